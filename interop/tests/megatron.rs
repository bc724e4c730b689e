//! Megatron-LM's own rules, and models that only a script describes.

use interop::check::check;
use interop::import::{Document, Given, import, of_file};

/// A launch script with Llama 3 8B on 64 GPUs in 4 pipeline stages, and these changes: an option, with its value if it has one,
/// in place of its own or beside the others.
fn findings(changes: &str) -> String {
    let mut options: Vec<&str> = "num-layers 32, hidden-size 4096, ffn-hidden-size 14336, num-attention-heads 32, group-query-attention, num-query-groups 8, swiglu, normalization RMSNorm, disable-bias-linear, position-embedding-type rope, max-position-embeddings 8192, seq-length 8192, tensor-model-parallel-size 2, sequence-parallel, pipeline-model-parallel-size 4, micro-batch-size 1, global-batch-size 128, bf16"
        .split(", ")
        .collect();
    for change in changes.split(", ").filter(|change| !change.is_empty()) {
        let name = change.split(' ').next();
        options.retain(|option| option.split(' ').next() != name);
        options.push(change);
    }
    let text = format!(
        "torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --{}\n",
        options.join(" --")
    );
    let document = Document::read(&text, "a.sh", None, &|_| None).expect("well-formed");
    let found = check(&document, None).expect("schema");
    let found: Vec<String> = found.iter().map(ToString::to_string).collect();
    found.join("\n").replace("a.sh:1: ", "")
}

#[test]
fn what_megatron_rejects_is_found() {
    let cases = [
        "num-experts 8, expert-model-parallel-size 16",
        "num-experts 8, expert-model-parallel-size 8, expert-tensor-parallel-size 1, moe-token-dispatcher-type alltoall, overlap-moe-expert-parallel-comm",
        "num-experts 8, expert-model-parallel-size 8, expert-tensor-parallel-size 1, moe-token-dispatcher-type alltoall, overlap-moe-expert-parallel-comm, num-virtual-stages-per-pipeline-rank 2, recompute-granularity full, recompute-method uniform, recompute-num-layers 1",
        "num-layers-per-virtual-pipeline-stage 3",
        "num-virtual-stages-per-pipeline-rank 3",
        "num-layers-per-virtual-pipeline-stage 2, global-batch-size 240",
        "num-layers-per-virtual-pipeline-stage 2, microbatch-group-size-per-virtual-pipeline-stage 3",
        "cuda-graph-impl full_iteration",
        "cuda-graph-impl transformer_engine, recompute-granularity full, recompute-method uniform, recompute-num-layers 1",
        "cross-entropy-loss-fusion, cross-entropy-fusion-impl te",
        "optimizer-cpu-offload, use-distributed-optimizer",
        "main-grads-dtype bf16",
        "cpu-offloading-num-layers 4",
        "cpu-offloading-num-layers 32, pipeline-model-parallel-size 1",
        "context-parallel-size 2, cp-comm-type a2a+p2p",
        "context-parallel-size 4, cp-comm-type a2a+p2p, hierarchical-context-parallel-sizes 2 4",
        "context-parallel-size 8, cp-comm-type a2a",
        "num-query-groups 3",
        "decoder-first-pipeline-num-layers 8, account-for-loss-in-pipeline-split",
        "decoder-first-pipeline-num-layers 6",
        "account-for-loss-in-pipeline-split",
        "seq-length 16384",
        "num-experts 8, expert-model-parallel-size 8, expert-tensor-parallel-size 1, use-tp-pp-dp-mapping",
        "context-parallel-size 2, softmax-type learnable",
        "context-parallel-size 2, window-size 127,0",
        "num-experts 8, moe-router-topk 1, expert-tensor-parallel-size 1",
        "multi-latent-attention, rope-type rope",
        "context-parallel-size 8, cp-comm-type a2a a2a",
        "context-parallel-size 2, use-tp-pp-dp-mapping",
        "decoder-first-pipeline-num-layers 40",
        "pipeline-model-parallel-size 2, decoder-first-pipeline-num-layers 10, decoder-last-pipeline-num-layers 10",
        "num-layers-per-virtual-pipeline-stage 2, microbatch-group-size-per-virtual-pipeline-stage 0",
        "recompute-activations, recompute-granularity full, recompute-method uniform",
    ];
    let shown = cases.map(findings).join("\n");
    insta::assert_snapshot!(shown, @"
    `--expert-model-parallel-size`: 16 does not divide the 8 experts (arguments.py:1657)
    `--overlap-moe-expert-parallel-comm`: with 4 pipeline ranks needs several stages per rank; set --num-virtual-stages-per-pipeline-rank (transformer_config.py:3007)
    `--overlap-moe-expert-parallel-comm`: cannot be combined with --recompute-granularity full (transformer_config.py:3021)
    `--num-layers-per-virtual-pipeline-stage`: 3 does not divide the 8 layers of a rank (arguments.py:972)
    `--num-virtual-stages-per-pipeline-rank`: 3 does not divide the 8 layers of a rank
    `--global-batch-size`: makes 30 micro-batches, which interleaving over 4 ranks cannot run in groups of 4 (schedules.py:1161)
    `--global-batch-size`: makes 16 micro-batches, which interleaving over 4 ranks cannot run in groups of 3 (schedules.py:1161)
    `--cuda-graph-impl`: full_iteration needs --no-check-for-nan-in-loss-and-grad (arguments.py:1235)
    `--cuda-graph-impl`: transformer_engine cannot be combined with --recompute-granularity full (transformer_config.py:2856)
    `--cross-entropy-loss-fusion`: cannot be combined with --cross-entropy-fusion-impl te (arguments.py:1697)
    `--optimizer-cpu-offload`: needs --use-precision-aware-optimizer (arguments.py:1885)
    `--main-grads-dtype`: bf16 needs --use-precision-aware-optimizer (optimizer_config.py:469)
    `--cpu-offloading-num-layers`: cannot be combined with --pipeline-model-parallel-size above 1 (transformer_config.py:1891)
    `--cpu-offloading-num-layers`: has to be below the 32 layers (transformer_config.py:1884)
    `--cp-comm-type`: a2a+p2p needs --hierarchical-context-parallel-sizes (arguments.py:583)
    `--hierarchical-context-parallel-sizes`: do not multiply to --context-parallel-size 4 (arguments.py:582)
    `--cp-comm-type`: a2a needs a context-parallel size that divides a rank's 16 query and 4 key heads, which 8 does not (context_parallel.py of Transformer Engine)
    `--num-query-groups`: 3 and --tensor-model-parallel-size 2 do not divide one another (transformer_config.py:1462)
    `--decoder-first-pipeline-num-layers`: cannot be combined with --account-for-loss-in-pipeline-split (transformer_config.py:2236)
    `--pipeline-model-parallel-size`: 26 layers beside those of the first and last stage do not divide into 3 stages; give --pipeline-model-parallel-layout
    `--pipeline-model-parallel-size`: 33 layers with the embedding and the loss counted as layers do not divide into 4 stages; give --pipeline-model-parallel-layout
    `--seq-length`: 16384 is above --max-position-embeddings 8192 (arguments.py:1354)
    `--use-tp-pp-dp-mapping`: with pipeline stages needs experts to be replicated as often as attention: etp·ep = 8 is not tp·cp = 2 (parallel_state.py:898)
    `--softmax-type`: learnable with --context-parallel-size above 1 needs --cp-comm-type a2a (context_parallel.py of Transformer Engine)
    `--window-size`: with --context-parallel-size above 1 needs --cp-comm-type a2a or all_gather (context_parallel.py of Transformer Engine)
    `--moe-router-topk`: 1 with --moe-router-score-function softmax needs --moe-router-pre-softmax or --moe-router-load-balancing-type sinkhorn (transformer_config.py:2661)
    `--multi-latent-attention`: cannot be combined with --group-query-attention (arguments.py:1974)
    `--multi-latent-attention`: with --rope-type rope and --position-embedding-type rope needs --no-rope-fusion (transformer_config.py:3345)
    `--cp-comm-type`: a2a needs a context-parallel size that divides a rank's 16 query and 4 key heads, which 8 does not (context_parallel.py of Transformer Engine)
    `--use-tp-pp-dp-mapping`: with pipeline stages and no experts needs cp = 1 (parallel_state.py:898)
    `--decoder-first-pipeline-num-layers`: the ends of the pipeline have 40 layers; the model has 32
    `--decoder-first-pipeline-num-layers`: the ends of the pipeline have 20 layers; the model has 32
    `--global-batch-size`: makes 16 micro-batches, which interleaving over 4 ranks cannot run in groups of 0 (schedules.py:1161)
    `--recompute-activations`: with --recompute-granularity full cannot be combined with --recompute-method (arguments.py:1426)
    ");
}

/// The same conditions where Megatron-LM takes them.
#[test]
fn what_megatron_takes_is_not_found() {
    for changes in [
        "",
        "num-experts 8, expert-model-parallel-size 2, use-tp-pp-dp-mapping, expert-tensor-parallel-size 1",
        "num-layers-per-virtual-pipeline-stage 2",
        "num-virtual-stages-per-pipeline-rank 4, no-overlap-p2p-communication",
        "pipeline-model-parallel-layout 'Et*8|t*8|t*8|t*8L'",
        "cuda-graph-impl full_iteration, no-check-for-nan-in-loss-and-grad",
        "main-grads-dtype bf16, use-precision-aware-optimizer",
        "context-parallel-size 2, cp-comm-type a2a, softmax-type learnable, window-size 127,0",
        "context-parallel-size 4, cp-comm-type a2a+p2p, hierarchical-context-parallel-sizes 2 2",
        "decoder-first-pipeline-num-layers 5",
        "account-for-loss-in-pipeline-split, num-layers 31",
        "num-query-groups 1",
        "num-virtual-stages-per-pipeline-rank $VPP, global-batch-size 240",
        "pipeline-model-parallel-size 2, num-layers-per-virtual-pipeline-stage $VPP, no-overlap-p2p-communication",
        "recompute-activations, recompute-granularity full",
        "cp-comm-type $KIND, optimizer-cpu-offload, use-precision-aware-optimizer",
    ] {
        assert_eq!(findings(changes), "", "{changes}");
    }
}

/// A misspelt option in the table would never apply.
#[test]
fn the_table_of_rules_has_options_of_megatron_alone() {
    let table = include_str!("../src/check/rules/megatron_options.txt");
    let rows = table.lines().filter(|row| row.starts_with('-'));
    let options = rows.flat_map(|row| row.split([' ', ';', '=', '>', '!']));
    let mut options: Vec<&str> = options.filter_map(|word| word.strip_prefix("--")).collect();
    options.sort_unstable();
    options.dedup();
    assert!(options.len() > 80, "{options:?}");
    for option in options {
        let found = findings(option);
        let known = !found.contains("unknown to") && !found.contains("no such key");
        assert!(known, "{found}");
    }
}

/// Sizes of the models below. Rows of the embedding table are a multiple of 128.
const SIZES: &str = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 --vocab-size 256 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --hidden-dropout 0 --attention-dropout 0";
const LLAMA: &str = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --ffn-hidden-size 96";
const EXPERTS: &str = "--num-experts 8 --moe-ffn-hidden-size 32 --moe-router-topk 2";
const LATENT: &str = "--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --rope-type rope";

fn model(options: &str) -> Result<interop::import::OfFile, String> {
    let document = Document::read(options, "own.sh", None, &|_| None).expect("well-formed");
    of_file(&document).map_err(|error| error.to_string())
}

#[test]
fn models_of_scripts_have_the_parameters_counted_by_hand() {
    let ends = 2 * 256 * 64 + 64;
    // Queries and output, keys and values of 2 heads of 16; two norms.
    let attention = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64;
    // Queries by rank 24, keys and values by rank 16, each with a norm; output; two norms.
    let latent = (64 * 24 + 24 + 24 * 4 * 24) + (64 * 24 + 16 + 16 * 4 * 32) + 4 * 16 * 64 + 2 * 64;
    let (dense, routed, shared) = (3 * 64 * 96, 64 * 8 + 8 * 3 * 64 * 32, 3 * 64 * 48);
    // Biases of all linear layers, and of norms.
    let gpt = 2 * (64 * 64 + 64) + 2 * (64 * 32 + 32) + 64 * 256 + 256 + 256 * 64 + 64 + 4 * 64;
    for (options, layers) in [
        (LLAMA.to_owned(), 4 * (attention + dense)),
        (format!("{LLAMA} --use-rope-scaling --qk-layernorm"), 4 * (attention + dense + 2 * 16)),
        (format!("{LLAMA} --add-qkv-bias"), 4 * (attention + dense + 64 + 2 * 32)),
        (format!("{LLAMA} --window-size '(15, 0)'"), 4 * (attention + dense)),
        (format!("{LLAMA} --window-size 15,0 --softmax-type learnable"), 4 * (attention + dense + 4)),
        (format!("{LLAMA} --window-size 15,0 --window-attn-skip-freq 2"), 4 * (attention + dense)),
        (format!("{LLAMA} --window-size 15,0 --window-attn-skip-freq '([1]*3+[0])'"), 4 * (attention + dense)),
        (format!("{LLAMA} {EXPERTS}"), 4 * (attention + routed)),
        (format!("{LLAMA} {EXPERTS} --moe-router-pre-softmax --moe-shared-expert-intermediate-size 48 --moe-layer-freq '([0]*1+[1]*3)'"), 4 * attention + dense + 3 * (routed + shared)),
        (format!("{LLAMA} {EXPERTS} --moe-layer-freq '[0,1]*2'"), 4 * attention + 2 * (dense + routed)),
        (format!("{LLAMA} {EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"), 4 * (attention + routed + 8)),
        (format!("{} {EXPERTS} --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0", LLAMA.replace("--swiglu", "")), 4 * (attention + routed)),
        (format!("{LLAMA} {LATENT}"), 4 * (latent + dense)),
        (format!("{LLAMA} {LATENT} {EXPERTS} --moe-shared-expert-intermediate-size 48 --moe-layer-freq '([0]*1+[1]*3)'"), 4 * latent + dense + 3 * (routed + shared)),
        (String::new(), 4 * gpt + 64 + 128 * 64),
        ("--position-embedding-type rope".to_owned(), 4 * gpt + 64),
        ("--squared-relu --disable-bias-linear --position-embedding-type rope --ffn-hidden-size 96".to_owned(), 4 * (attention + 2 * 64 + 2 * 64 * 96) + 64),
    ] {
        let found = model(&format!("{SIZES} {options}")).expect(&options);
        assert!(!found.known, "{options}");
        assert_eq!(models::parameter_count(&found.model).expect("a count"), ends + layers, "{options}");
        // A plan carries the model by its definition.
        let definition = found.model.definition().expect("defined").to_string();
        let again = catalog::hf::decode(&definition, "model", &found.name).expect("a model");
        assert_eq!(again, found.model, "{options}");
    }
}

#[test]
fn layers_without_a_window_are_those_of_the_script() {
    let windows = |options: &str| {
        let all = format!("{SIZES} {LLAMA} --window-size 15,0 {options}");
        let model = model(&all).expect(options).model;
        let windowed = (0..4).map(|layer| model.layer_class(layer).window.is_some());
        windowed.map(u8::from).collect::<Vec<_>>()
    };
    for (options, expected) in [
        ("", [1, 1, 1, 1]),
        ("--window-attn-skip-freq 2", [1, 0, 1, 0]),
        ("--window-attn-skip-freq 4", [1, 1, 1, 0]),
        ("--window-attn-skip-freq 1", [0, 0, 0, 0]),
        ("--window-attn-skip-freq '([1,0]*2)'", [1, 0, 1, 0]),
        ("--window-attn-skip-freq '([1]*4)'", [1, 1, 1, 1]),
    ] {
        assert_eq!(windows(options), expected, "{options}");
    }
    // gpt-oss has a window in every other layer.
    let oss = catalog::load::model("gpt-oss-20b").expect("preset");
    let text = format!(
        "--num-layers {} --window-size 127,0 --micro-batch-size 1 --seq-length 128 --window-attn-skip-freq",
        oss.layers
    );
    for (every, same) in [(2, true), (3, false)] {
        let document = Document::read(&format!("{text} {every}"), "own.sh", None, &|_| None)
            .expect("well-formed");
        let given = Given {
            model: &oss,
            gpus: Some(8),
            seq_len: None,
            gpus_per_node: 8,
        };
        let error = import(&document, &given)
            .err()
            .map(|error| error.to_string());
        let expected = format!(
            "own.sh:1: `--window-attn-skip-freq`: {every}, but windows are in other layers of model gpt-oss-20b; give the right --model"
        );
        assert_eq!(error, (!same).then_some(expected));
    }
}

#[test]
fn the_option_that_stops_a_model_is_named() {
    let all = format!("{SIZES} {LLAMA} {EXPERTS}");
    let cases = [
        "--moe-layer-freq 2",
        "--moe-layer-freq '[1,0,0,1]'",
        "--moe-layer-freq '[1]*x'",
        "--no-rope-freq 4",
        "--moe-router-score-function sqrtsoftplus",
        "--softmax-type off-by-one",
        "--window-size 16,16",
        "--window-size 16,0 --window-attn-skip-freq '([1]*3)'",
        "--window-size 16,0 --window-attn-skip-freq '([0]*1+[1]*3)'",
        "--window-size 16,0 --window-attn-skip-freq true",
        "--multi-latent-attention",
        "--kv-channels no",
        "--activation-func-clamp-value 7.0",
        "--moe-router-num-groups 4 --moe-router-group-topk 2",
        "--moe-router-num-groups 4 --moe-router-group-topk 1",
        "--moe-router-topk-scaling-factor x",
    ];
    let shown = cases.map(|more| model(&format!("{all} {more}")).expect_err(more));
    insta::assert_snapshot!(shown.join("\n"), @r#"
    own.sh:1: `--moe-layer-freq`: expected 4 layers: dense ones, then groups of n whose last has experts
    own.sh:1: `--moe-layer-freq`: expected 4 layers: dense ones, then groups of n whose last has experts
    own.sh:1: `--moe-layer-freq`: `[1]*x` is not a number or a list such as ([0]*1+[1]*23)
    own.sh:1: `--no-rope-freq`: is not modelled
    own.sh:1: `--moe-router-score-function`: sqrtsoftplus is not modelled; expected softmax or sigmoid
    own.sh:1: `--softmax-type`: off-by-one is not modelled; expected vanilla or learnable
    own.sh:1: `--window-size`: expected the number of tokens before, and 0 for those after: 1023,0
    own.sh:1: `--window-attn-skip-freq`: expected 4 layers: groups of n whose last attends to all tokens
    own.sh:1: `--window-attn-skip-freq`: expected 4 layers: groups of n whose last attends to all tokens
    own.sh:1: `--window-attn-skip-freq`: `true` is not a number or a list such as ([0]*1+[1]*23)
    own.sh: `--qk-layernorm`: latent attention without norms of its ranks is not modelled
    own.sh:1: `--kv-channels`: "no" is not a size; expected a whole number up to 2^24
    own.sh:1: `--activation-func-clamp-value`: is modelled with --quick-geglu alone
    own.sh:1: `--moe-router-group-topk`: under softmax, groups are modelled with --moe-router-pre-softmax alone
    own.sh:1: `--moe-router-group-topk`: groups scored by other than 1 experts are not modelled
    own.sh:1: `--moe-router-topk-scaling-factor`: "x" is not a number >= 0
    "#);
}

/// A script with the length of a decoder's sequences trains a model with an encoder, whose length is the other one.
#[test]
fn scripts_of_models_with_encoders_are_refused() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let given = Given {
        model: &model,
        gpus: None,
        seq_len: None,
        gpus_per_node: 8,
    };
    let text = |more: &str| {
        format!(
            "torchrun --nproc_per_node 8 examples/multimodal/train.py --seq-length 576 --micro-batch-size 1 --global-batch-size 8 --bf16 {more}\n"
        )
    };
    for (more, refused) in [("", false), ("--decoder-seq-length 1024", true)] {
        let document = Document::read(&text(more), "a.sh", None, &|_| None).expect("well-formed");
        let error = import(&document, &given)
            .err()
            .map(|error| error.to_string());
        let said = error.as_ref().is_some_and(|error| {
            error.starts_with(
                "a.sh:1: `--decoder-seq-length`: the script trains a model with an encoder",
            )
        });
        assert_eq!(said, refused, "{more}: {error:?}");
    }
}
