//! Adapters (LoRA) and frozen weights: parameter counts, what backward computes, and sharding.

use catalog::{DType, Model};
use dtensor::{Factor, Gradient, Product, Site, TensorRole, Trace};
use models::{BlockClass, BlockLayout};

fn adapted(model: &str, adapters: &str) -> Model {
    let model = catalog::load::model(model).expect("a preset");
    let adapters = adapters.parse().expect("adapters");
    model.with_adapters(Some(adapters)).expect("adapted")
}

fn layer(model: &Model, layout: &BlockLayout) -> Trace {
    let class = BlockClass::Layer(model.layer_class(0));
    models::trace_block(model, class, layout).expect("a layer")
}

fn alone() -> BlockLayout {
    BlockLayout::alone(1, 64, DType::Bf16)
}

/// Trainable parameters as litgpt publishes them for rank 8 beside queries and values (tutorials/resource-tables.md at
/// 2685705), and of PEFT's `print_trainable_parameters` for Llama 3 8B with all linear layers at rank 16.
#[test]
fn trained_parameters_are_the_published_ones() {
    for (model, adapters, published) in [
        ("llama2-7b", "rank=8,modules=q+v", 4_194_304),
        ("llama2-13b", "rank=8,modules=q+v", 6_553_600),
        ("llama3-8b", "rank=16", 41_943_040),
    ] {
        let whole = catalog::load::model(model).expect("a preset");
        let [trained, frozen] =
            models::trained_and_frozen(&adapted(model, adapters)).expect("counted");
        assert_eq!(trained, published, "{model}");
        let all = models::parameter_count(&whole).expect("counted");
        assert_eq!(frozen, all, "{model}");
    }
}

/// Numbers of weight gradients of adapters and of other layers.
fn weight_gradients(trace: &Trace) -> [usize; 2] {
    let gradients = trace.backward.iter().filter_map(|op| match op.operator {
        Gradient::Product(_, Product::Matmul(_, site), Factor::Second) => Some(site),
        _ => None,
    });
    let (of_adapters, others): (Vec<Site>, Vec<Site>) =
        gradients.partition(|site| *site == Site::Adapter);
    [of_adapters.len(), others.len()]
}

#[test]
fn frozen_weights_have_no_gradients() {
    let whole = catalog::load::model("llama3-8b").expect("a preset");
    assert_eq!(weight_gradients(&layer(&whole, &alone())), [0, 7]);
    for (adapters, products) in [("rank=8", 14), ("rank=8,modules=q+v", 4)] {
        let model = adapted("llama3-8b", adapters);
        assert_eq!(weight_gradients(&layer(&model, &alone())), [products, 0]);
    }
    let model = adapted("gpt2", "rank=8,modules=mlp");
    for class in [BlockClass::Embedding, BlockClass::Head] {
        let trace = models::trace_block(&model, class, &alone()).expect("a block");
        assert!(trace.parameters.iter().all(|p| !p.trained));
        let weights = |op: &&dtensor::Op<Gradient>| op.pass == dtensor::Pass::BackwardWeight;
        assert_eq!(trace.backward.iter().filter(weights).count(), 0);
    }
}

/// Names of tensors that the products of a layer keep.
fn kept_by_products(trace: &Trace) -> Vec<String> {
    let products = trace.forward.iter();
    let products = products.filter(|op| matches!(op.operator, dtensor::Operator::Product(_)));
    let kept = products.flat_map(|op| &op.saved);
    kept.map(|&id| trace.tensor(id).name.clone()).collect()
}

#[test]
fn inputs_are_kept_where_an_adapter_needs_them() {
    let model = adapted("llama3-8b", "rank=8,modules=fc2");
    let kept = kept_by_products(&layer(&model, &alone()));
    assert_eq!(kept, ["mlp.act_fn.output", "mlp.down_proj.lora_A.output"]);
}

#[test]
fn a_fused_projection_has_one_adapter_or_one_for_each_part() {
    let of = |adapters: &str| {
        let model = adapted("llama3-8b", adapters).with_fused_projections();
        let trace = layer(&model, &alone());
        let names = trace.parameters.iter().filter(|p| p.trained);
        let names = names.map(|p| {
            p.name
                .trim_start_matches("model.layers.{layer}.")
                .to_owned()
        });
        names.collect::<Vec<_>>()
    };
    let named =
        |module: &str| ["A", "B"].map(|part| format!("self_attn.{module}.lora_{part}.weight"));
    assert_eq!(of("rank=8,modules=qkv"), named("qkv_proj"));
    assert_eq!(
        of("rank=8,modules=q+v"),
        [named("q_proj"), named("v_proj")].concat()
    );
}

#[test]
fn adapters_are_split_as_their_layers() {
    for fused in [false, true] {
        for sequence_parallel in [false, true] {
            let mut model = adapted("llama3-8b", "rank=16");
            if fused {
                model = model.with_fused_projections();
            }
            let layout = BlockLayout {
                tp: 2,
                sequence_parallel,
                ..alone()
            };
            let trace = layer(&model, &layout);
            let halved = |name: &str| {
                let found = trace.parameters.iter().find(|p| p.name.ends_with(name));
                found.is_some_and(|p| p.local_elements * 2 == p.global_elements)
            };
            let column = if fused { "gate_up_proj" } else { "gate_proj" };
            assert!(halved(&format!("{column}.lora_A.weight")));
            assert!(halved(&format!("{column}.lora_B.weight")));
            assert!(halved("down_proj.lora_A.weight"));
            assert!(!halved("down_proj.lora_B.weight"));
            let gradient = trace.input_gradient.expect("a gradient");
            let input = trace.tensors.iter().find(|t| t.role == TensorRole::Input);
            assert_eq!(trace.tensor(gradient).shape, input.expect("an input").shape);
        }
    }
}

#[test]
fn attention_of_mixtures_of_experts_has_adapters() {
    let model = adapted("mixtral-8x7b", "rank=8,modules=attention");
    let layout = BlockLayout { ep: 4, ..alone() };
    let trace = layer(&model, &layout);
    assert_eq!(weight_gradients(&trace), [8, 0]);
    let grouped = trace.backward.iter().filter(|op| {
        matches!(op.operator, Gradient::Product(_, Product::GroupedMatmul(..), factor) if factor == Factor::Second)
    });
    assert_eq!(grouped.count(), 0);
}
