//! Messages to experts: what dispatchers send, and what runs beside the passes of another micro-batch.

use catalog::dispatcher::SecondSort;
use catalog::{DType, Dispatcher, Fitted, Model, Precision, Workload};
use costmodel::price::TablePrices;
use costmodel::{BlockCost, BlockKey, CostModel, Scenario};
use dtensor::Pass;
use models::BlockClass;
use plans::support::allowed_by;
use plans::{Decisions, Recompute, Strategy};

/// 128 experts, of which a token chooses 8.
const MODEL: &str = "qwen3-30b-a3b";
const CHOSEN: f64 = 8.0;

fn scenario(cluster: &str, gpus: u64, runtime: &str) -> Scenario {
    Scenario {
        model: catalog::load::model(MODEL).expect("preset"),
        cluster: catalog::load::cluster(cluster).expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus,
            seq_len: 8192,
            global_batch: 16 * gpus,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    }
}

fn strategy(s: &Scenario, text: &str) -> Strategy {
    plans::grammar::parse(text, &s.model, &s.workload, &s.runtime).expect(text)
}

/// The cost of a layer for one micro-batch.
fn layer(s: &Scenario, text: &str) -> BlockCost {
    let costs = CostModel::new(s.clone()).expect("priced");
    let class = BlockClass::Layer(s.model.layer_class(0));
    let key = BlockKey::of(s, &strategy(s, text), class, Recompute::None);
    costs.block(&key).expect("priced").as_ref().clone()
}

/// Expected number of different places, of `places`, that the chosen experts of a token are on.
fn distinct(places: f64) -> f64 {
    places * (1.0 - (1.0 - 1.0 / places).powf(CHOSEN))
}

#[test]
fn a_token_is_sent_once_to_each_rank_or_to_each_node() {
    let s = scenario("dgx-h100", 32, "megatron-core");
    for (sizes, places) in [("dp32 ep8", 8.0), ("dp32 ep4", 4.0), ("dp32 ep32", 4.0)] {
        let all = layer(&s, &format!("{sizes} mbs8"));
        let once = layer(&s, &format!("{sizes} mbs8 dispatcher=deepep"));
        let ratio = once.forward.ep / all.forward.ep;
        let expected = distinct(places) / CHOSEN;
        assert!(
            (ratio / expected - 1.0).abs() < 0.03,
            "{sizes}: {ratio}, not {expected}"
        );
        // Rows arrive sorted by expert.
        assert!(once.forward.compute < all.forward.compute, "{sizes}");
        assert_eq!(once.memory, all.memory, "{sizes}");
        let other = layer(&s, &format!("{sizes} mbs8 dispatcher=hybridep"));
        assert_eq!(once.forward, other.forward, "{sizes}");
    }
}

/// A strategy's dispatcher has the kernels that it has as the runtime's own.
#[test]
fn experts_have_the_kernels_of_the_dispatcher_that_a_strategy_names() {
    let mut s = scenario("dgx-h100", 32, "nemo");
    s.workload = s.workload.with_precision(Precision::Fp8);
    let text = "dp32 ep8 mbs2 fp8_recipe=tensorwise";
    for dispatcher in Dispatcher::ALL.iter().copied() {
        let mut of_runtime = s.clone();
        of_runtime.runtime.dispatcher = dispatcher;
        let costs = CostModel::new(s.clone()).expect("priced");
        let class = BlockClass::Layer(s.model.layer_class(0));
        let of = |more: &str| {
            let text = format!("{text}{more}");
            let key = BlockKey::of(&s, &strategy(&s, &text), class, Recompute::None);
            costs.block(&key).expect("priced")
        };
        // The other dispatchers' costs are known when this one's is asked for.
        of("");
        let (named, own) = (
            of(&format!(" dispatcher={}", dispatcher.name())),
            layer(&of_runtime, text),
        );
        assert_eq!(named.forward, own.forward, "{dispatcher:?}");
        assert_eq!(named.backward, own.backward, "{dispatcher:?}");
        assert_eq!(named.graphed, own.graphed, "{dispatcher:?}");
    }
    let compute = |more: &str| layer(&s, &format!("{text}{more}")).forward.compute;
    let copied = compute("") - compute(" dispatcher=hybridep");
    assert!(copied.0 > 0.0);
}

/// Libraries that send a token once to a rank leave it to the receiver to order tokens by expert: what is ordered has a row for every
/// rank that a token was sent to.
#[test]
fn tokens_are_ordered_after_arrival_where_each_is_sent_once_to_a_rank() {
    let mut s = scenario("dgx-h100", 64, "megatron-core");
    s.runtime.second_sort = SecondSort::Never;
    let bandwidth = 3.35e12 * 0.35;
    for ep in [8, 16, 64] {
        let of = |more: &str| layer(&s, &format!("dp64 ep{ep} mbs1{more}"));
        let own = of("");
        for dispatcher in ["deepep", "hybridep"] {
            let arrived = of(&format!(" dispatcher={dispatcher}"));
            let row = (8192 * s.model.hidden * 2) as f64;
            let expected = 2.0 * row * (distinct(f64::from(ep)) - 1.0) / bandwidth;
            let passes = [
                arrived.forward.compute - own.forward.compute,
                arrived.backward.whole.compute - own.backward.whole.compute,
            ];
            for more in passes {
                assert!(
                    (more.0 / expected - 1.0).abs() < 0.1,
                    "{ep}: {more:?}, {expected}"
                );
            }
        }
    }
}

#[test]
fn gathering_all_tokens_pays_where_they_choose_more_experts_than_there_are_ranks() {
    let mut s = scenario("dgx-h100", 8, "megatron-core");
    // Only messages and sums are compared.
    s.runtime.second_sort = SecondSort::Never;
    for (ep, pays) in [(2, true), (8, false)] {
        let of = |more: &str| layer(&s, &format!("dp8 ep{ep} mbs4{more}"));
        let (rows, tokens) = (of(""), of(" dispatcher=all_gather"));
        let less = tokens.forward.device() < rows.forward.device();
        assert_eq!(less, pays, "ep={ep}");
        // The rows of experts are summed over the tokens of all ranks.
        let more = tokens.forward.compute - rows.forward.compute;
        assert!(more.0 > 0.0, "ep={ep}");
        // Eight ranks have as many tokens as one rank has rows, because a token has eight.
        assert_eq!(tokens.memory, rows.memory, "ep={ep}");
    }
    let s = scenario("dgx-h100", 16, "megatron-core");
    let of = |more: &str| layer(&s, &format!("dp16 ep16 mbs4{more}"));
    let (rows, tokens) = (of(""), of(" dispatcher=all_gather"));
    let row = 4 * 8192 * s.model.hidden * 2;
    let more = tokens.memory.transient_forward - rows.memory.transient_forward;
    assert_eq!(more.0, (16 - 8) * row);
}

/// Dispatchers other than the all-to-all reach the tensor-parallel peers of an expert in the same message. An all-gather over 8 ranks of
/// expert parallelism with 2 peers each is one over 16 ranks. DeepEP sends a token once to each of two nodes.
#[test]
fn one_message_carries_tokens_to_experts_and_to_their_tensor_parallel_peers() {
    let s = scenario("dgx-h100", 32, "megatron-core");
    for dispatcher in ["all_gather", "deepep", "hybridep"] {
        let of = |sizes: &str| layer(&s, &format!("dp32 {sizes} mbs8 dispatcher={dispatcher}"));
        let [apart, peers] = ["ep16", "ep8 etp2"].map(of);
        assert_eq!(peers.forward.tp.0, 0.0, "{dispatcher}");
        let ratio = peers.forward.ep / apart.forward.ep;
        // Inside a node, both peers of every chosen expert get the token, which may take longer than what the network card sends.
        let most = if dispatcher == "all_gather" {
            1.001
        } else {
            1.1
        };
        assert!((0.999..most).contains(&ratio), "{dispatcher}: {ratio}");
    }
    let all = layer(&s, "dp32 ep8 etp2 mbs8");
    assert!(
        all.forward.tp.0 > 0.0,
        "an all-to-all has messages of its own"
    );
}

/// Every peer of an expert orders the rows of both peers' tokens.
#[test]
fn tensor_parallel_peers_order_each_others_rows() {
    let mut s = scenario("dgx-h100", 32, "megatron-core");
    s.runtime.second_sort = SecondSort::Never;
    let bandwidth = 3.35e12 * 0.35;
    let of = |sizes: &str| layer(&s, &format!("dp32 {sizes} mbs1 dispatcher=deepep"));
    let [alone, peers] = ["ep8", "ep8 etp2"].map(of);
    let token = (8192 * s.model.hidden * 2) as f64;
    // Permute reads arrived tokens and writes rows, unpermute the reverse; products have the same size together.
    let expected = 2.0 * token * (distinct(8.0) + CHOSEN) / bandwidth;
    let orders = |of: &BlockCost| of.forward.compute;
    let more = orders(&peers) - orders(&alone);
    assert!(more.0 > 0.8 * expected, "{more:?}, {expected}");
}

/// An all-gather dispatcher also gathers which experts every token chose, a byte for each of them, and its probabilities: 3 bytes for
/// each of 1,024 experts are 3/4 of the 4,096 bytes of a token's activations.
#[test]
fn gathering_all_tokens_also_gathers_their_routing() {
    let of = |experts: u64| {
        let mut s = scenario("dgx-h100", 8, "megatron-core");
        let mut config = (*s.model).clone();
        config.moe.as_mut().expect("has experts").experts = experts;
        s.model = Model::new(config, "more experts").expect("a model");
        let cost = layer(&s, "dp8 ep8 mbs8 dispatcher=all_gather");
        (cost.forward.ep, cost.backward.whole.ep)
    };
    let ((few, few_back), (many, many_back)) = (of(128), of(1024));
    let (hidden, of_expert) = (4096.0, 3.0 * (1024.0 - 128.0));
    // Activations go to the experts and back.
    let expected = of_expert / (2.0 * hidden + 3.0 * 128.0);
    let more = (many - few) / few;
    assert!((more / expected - 1.0).abs() < 0.15, "{more}, {expected}");
    // Back come the gradients of the probabilities.
    let more = (many_back - few_back) / (many - few);
    assert!((more / (2.0 / 3.0) - 1.0).abs() < 0.15, "{more}");
}

/// Across nodes DeepEP sends a token once to a node, whose ranks pass it on to each other. On H800, whose links inside a node are
/// less than half as fast as an H100's, passing on takes longer than what the network card sends.
#[test]
fn a_node_passes_tokens_on_to_its_ranks() {
    for (cluster, slower) in [("dgx-h100", false), ("h800", true)] {
        let s = scenario(cluster, 32, "megatron-core");
        let of = |sizes: &str| layer(&s, &format!("dp32 {sizes} mbs8 dispatcher=deepep"));
        let [inside, across] = ["ep8", "ep16"].map(of);
        // The same links carry a token to 5.3 ranks of one node, or to 5.7 of the 8 that both nodes have in all, times two.
        let passed_on = distinct(16.0) / distinct(8.0);
        let ratio = across.forward.ep / inside.forward.ep;
        let bound = (ratio / passed_on - 1.0).abs() < 0.03;
        assert_eq!(bound, slower, "{cluster}: {ratio}, {passed_on}");
    }
}

/// With few rows per expert a grouped product takes as long as reading all experts' weights, and with many as long as multiplying.
#[test]
fn grouped_products_read_the_weights_of_every_expert() {
    let cluster = catalog::load::cluster("dgx-h100").expect("preset");
    let prices = TablePrices::new(&cluster, 8, &Fitted::default()).expect("prices");
    let (experts, n, k) = (128, 1536, 2048);
    let weights = (experts * n * k * 2) as f64 / 3.35e12;
    for (rows, pass, least, most) in [
        (16, Pass::Forward, 1.0, 1.3),
        (16, Pass::BackwardInput, 1.0, 1.3),
        // Gradients are written where weights are read.
        (16, Pass::BackwardWeight, 1.0, 3.0),
        (4096, Pass::Forward, 10.0, f64::INFINITY),
    ] {
        let all = experts * rows;
        let sizes = match pass {
            Pass::BackwardWeight => [n, k, all],
            _ => [all, n, k],
        };
        let time = prices.grouped_gemm(experts, sizes, DType::Bf16, pass);
        let of_weights = time.0 / weights;
        assert!(
            (least..=most).contains(&of_weights),
            "{rows} {pass:?}: {of_weights}"
        );
    }
}

/// Every pass copies the rows of a rank's experts twice more: when they arrive, and before they return.
#[test]
fn rows_are_sorted_a_second_time_around_an_all_to_all() {
    // Peak of an H100's memory.
    let bandwidth = 3.35e12;
    for (runtime, text, sorted) in [
        ("megatron-core", "dp128 ep8 mbs1", true),
        ("megatron-core", "dp128 mbs1", true),
        ("nemo", "dp128 ep8 mbs1", true),
        // With one expert on each rank, or a library that delivers sorted rows, nothing is sorted.
        ("megatron-core", "dp128 ep128 mbs1", false),
        ("megatron-core", "dp128 ep8 mbs1 dispatcher=deepep", false),
        (
            "megatron-core",
            "dp128 ep8 mbs1 dispatcher=all_gather",
            false,
        ),
        ("torchtitan", "dp128 ep8 zero3 mbs1", true),
        ("torchtitan", "dp128 ep128 zero3 mbs1", true),
        // torchtitan 0.2 pads the rows of every expert.
        ("torchtitan", "dp128 zero3 mbs1", true),
        ("torchtitan-2026", "dp128 ep8 zero3 mbs1", true),
        ("torchtitan-2026", "dp128 zero3 mbs1", false),
        ("vescale", "dp128 ep8 mbs1", false),
    ] {
        let s = scenario("dgx-h100", 128, runtime);
        let mut once = s.clone();
        once.runtime.second_sort = SecondSort::Never;
        let [twice, once] = [&s, &once].map(|s| layer(s, text));
        let rows = (8192 * s.model.hidden * 2) as f64 * CHOSEN;
        let least = 2.0 * 2.0 * rows / bandwidth;
        let added = [
            twice.forward.compute - once.forward.compute,
            twice.backward.whole.compute - once.backward.whole.compute,
        ];
        for added in added {
            let of_least = added.0 / least;
            let expected = if sorted { 1.0..2.0 } else { 0.0..1e-9 };
            assert!(expected.contains(&of_least), "{runtime} {text}: {of_least}");
        }
    }
}

/// Predictions list the messages that the dispatcher sends.
#[test]
fn messages_to_experts_are_called_what_their_dispatcher_sends() {
    let s = scenario("dgx-h100", 8, "megatron-core");
    let costs = CostModel::new(s.clone()).expect("priced");
    for (dispatcher, names) in [
        (
            "all_to_all",
            ["all-to-all (forward)", "all-to-all (backward)"],
        ),
        ("deepep", ["all-to-all (forward)", "all-to-all (backward)"]),
        (
            "all_gather",
            ["all-gather (forward)", "reduce-scatter (forward)"],
        ),
    ] {
        let text = format!("dp8 ep8 mbs1 dispatcher={dispatcher}");
        let predicted = costs.predict(&strategy(&s, &text)).expect("priced");
        let said = |name: &str| {
            let mut kernels = predicted.kernels.iter();
            kernels.any(|kernel| kernel.name.contains("experts") && kernel.name.contains(name))
        };
        assert!(names.into_iter().all(said), "{dispatcher}");
        assert_eq!(
            said("all-to-all"),
            dispatcher != "all_gather",
            "{dispatcher}"
        );
    }
}

/// Names of the messages of a step on eight H100s, with the time counted for each.
fn messages(text: &str) -> Vec<(String, f64)> {
    let s = scenario("dgx-h100", 8, "megatron-core");
    let costs = CostModel::new(s.clone()).expect("priced");
    let predicted = costs.predict(&strategy(&s, text)).expect("priced");
    let kinds = ["all-gather", "reduce-scatter", "all-to-all"];
    let kernels = predicted.kernels.into_iter();
    let kernels = kernels.filter(|kernel| kinds.iter().any(|kind| kernel.name.contains(kind)));
    kernels
        .map(|kernel| (kernel.name, kernel.seconds))
        .collect()
}

/// Rows go to an expert's group and are gathered in it; sums are scattered before they return. Each
/// message has its own time.
#[test]
fn messages_in_a_chain_are_each_counted() {
    let found = messages("tp2 sp ep4 etp2 dp4 mbs1");
    for kind in ["all-to-all", "all-gather", "reduce-scatter"] {
        for pass in ["(forward)", "(backward)"] {
            let name = format!("mlp.experts {kind} {pass}");
            assert!(
                found.iter().any(|(found, _)| *found == name),
                "{name}: {found:?}"
            );
        }
    }
}

#[test]
fn gathers_that_backward_repeats_say_so() {
    for (text, repeated) in [("tp2 sp dp4 mbs1", true), ("dp8 mbs1", false)] {
        let found = messages(text);
        let says = |(name, _): &(String, f64)| {
            name.ends_with("all-gather (forward) (repeated in backward)")
        };
        assert_eq!(found.iter().any(says), repeated, "{text}: {found:?}");
    }
}

#[test]
fn overlap_with_another_micro_batch_never_slows_a_block() {
    for cluster in ["dgx-h100", "gb200-nvl72", "aws-p5"] {
        let s = scenario(cluster, 64, "megatron-core");
        for sizes in [
            "dp64 ep8",
            "dp64 ep32 mbs4",
            "tp2 dp32 ep16 etp1 sp",
            "tp4 cp2 dp8 ep8 etp2 sp overlap=grad+param+tp",
        ] {
            let overlap = match sizes.split_once("overlap=") {
                Some((_, overlap)) => format!("overlap={overlap}+ep"),
                None => "overlap=grad+param+ep".to_owned(),
            };
            let beside = format!(
                "{} {overlap}",
                sizes.split(" overlap").next().unwrap_or(sizes)
            );
            let (alone, beside) = (layer(&s, sizes), layer(&s, &beside));
            for (alone, beside) in [
                (alone.forward, beside.forward),
                (alone.backward.whole, beside.backward.whole),
                (alone.backward.input, beside.backward.input),
                (alone.backward.weight, beside.backward.weight),
            ] {
                assert!(beside.device() <= alone.device(), "{cluster}: {sizes}");
                assert_eq!(beside.compute, alone.compute, "{cluster}: {sizes}");
                assert_eq!(beside.host, alone.host, "{cluster}: {sizes}");
            }
            assert!(
                beside.forward.device() < alone.forward.device(),
                "{cluster}: {sizes}"
            );
        }
    }
}

/// HybridEP orders rows inside its dispatch and combine, which run beside the other micro-batch; DeepEP leaves that to the experts.
#[test]
fn rows_are_ordered_beside_another_micro_batch_where_the_dispatcher_orders_them() {
    let s = scenario("dgx-h100", 64, "megatron-core");
    let of = |dispatcher: &str, overlap: &str| {
        let text = format!("dp64 ep8 mbs4 dispatcher={dispatcher} overlap=grad+param{overlap}");
        let cost = layer(&s, &text);
        [cost.forward, cost.backward.whole]
    };
    for (dispatcher, moves) in [("deepep", false), ("hybridep", true), ("all_to_all", false)] {
        for (alone, beside) in of(dispatcher, "").into_iter().zip(of(dispatcher, "+ep")) {
            assert_eq!(beside.compute < alone.compute, moves, "{dispatcher}");
            assert_eq!(beside.host, alone.host, "{dispatcher}");
            assert!(beside.device() < alone.device(), "{dispatcher}");
        }
    }
    // Tokens are ordered once in each direction, so both passes move about the same.
    let [forward, backward] = of("hybridep", "");
    let [beside, behind] = of("hybridep", "+ep");
    let moved = [
        forward.compute - beside.compute,
        backward.compute - behind.compute,
    ];
    assert!((moved[0].0 / moved[1].0 - 1.0).abs() < 0.3, "{moved:?}");
}

/// Without a pipeline the first forward pass and the last backward pass overlap with no other.
#[test]
fn passes_at_the_ends_of_a_step_run_alone() {
    let s = scenario("dgx-h100", 16, "megatron-core");
    let costs = CostModel::new(s.clone()).expect("priced");
    let time = |text: &str| {
        let score = costs.score(&strategy(&s, text)).expect("priced");
        (score.step_time.0, score.peak_memory.0)
    };
    let gain = |mbs: u64| {
        let text = format!("dp16 ep16 mbs{mbs} recompute=none overlap=grad+param");
        let (alone, held) = time(&text);
        let (beside, more) = time(&format!("{text}+ep"));
        assert!(
            more > held,
            "mbs={mbs}: a layer of another micro-batch is held"
        );
        (alone - beside) * mbs as f64
    };
    // All micro-batches but one (of 16, 8 or 4) overlap; the gain per sequence is alike.
    let each = gain(1) / 15.0;
    for (mbs, micro_batches) in [(2, 8.0), (4, 4.0)] {
        let other = gain(mbs) / (micro_batches - 1.0) / (mbs * mbs) as f64;
        assert!(
            (other / each - 1.0).abs() < 0.2,
            "mbs={mbs}: {other}, not {each}"
        );
    }
    // A single micro-batch has no other to overlap with.
    let one = "dp16 ep16 mbs16 recompute=none overlap=grad+param";
    assert_eq!(time(one).0, time(&format!("{one}+ep")).0);
}

#[test]
fn what_a_runtime_cannot_do_with_experts_is_refused() {
    let refused = |runtime: &str, text: &str| {
        let s = scenario("dgx-h100", 16, runtime);
        let allowed = |d: &Decisions| allowed_by(d, &s.model, &s.runtime, Precision::Bf16);
        allowed(&strategy(&s, text)).expect_err(text).to_string()
    };
    for (runtime, text, said) in [
        ("vescale", "dp16 ep8 overlap=ep", "no choice of it"),
        ("vescale", "dp16 ep8 dispatcher=deepep", "it has all_to_all"),
        (
            "torchtitan",
            "dp16 ep8 dispatcher=all_gather",
            "it has all_to_all, deepep, hybridep",
        ),
        (
            "megatron-core",
            "pp2 dp8 ep8 overlap=grad+param+ep+pp",
            "an interleaved schedule, or pp=1",
        ),
        (
            "megatron-core",
            "dp16 ep8 recompute=full overlap=grad+param+ep+pp",
            "recompute=none or selective",
        ),
        (
            "megatron-core",
            "dp16 ep8 overlap=grad+param+ep+pp dispatcher=all_gather",
            "a dispatcher other than all_gather",
        ),
    ] {
        let error = refused(runtime, text);
        assert!(error.contains(said), "{runtime}: {text}: {error}");
    }
    // A decision without effect need not be supported by the runtime.
    let s = scenario("dgx-h100", 16, "vescale");
    let text = "dp16 overlap=grad+param+ep+pp";
    allowed_by(&strategy(&s, text), &s.model, &s.runtime, Precision::Bf16).expect(text);
}

#[test]
fn a_library_must_run_on_the_cluster() {
    for (cluster, sizes, runs) in [
        ("dgx-h100", "dp32 ep32", true),
        ("aws-p5", "dp32 ep8", true),
        ("aws-p5", "dp32 ep32", false),
        ("gb200-nvl72", "dp32 ep32", false),
        ("mi300x", "dp32 ep8", false),
    ] {
        let s = scenario(cluster, 32, "megatron-core");
        let costs = CostModel::new(s.clone()).expect("priced");
        let text = format!("{sizes} dispatcher=deepep");
        let predicted = costs.predict(&strategy(&s, &text));
        assert_eq!(predicted.is_ok(), runs, "{cluster}: {sizes}");
        if let Err(error) = predicted {
            assert!(error.to_string().contains("expected all_to_all"), "{error}");
        }
    }
}
