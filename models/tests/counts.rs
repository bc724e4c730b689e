//! Parameter counts equal the published ones to the unit, and ranks partition them exactly.

use catalog::{CpKind, DType};
use models::{BlockClass, BlockLayout, parameter_count, trace_block};
use proptest::prelude::*;

/// Published counts, to the unit: sizes of the safetensors on the Hugging Face hub, tied weights once.
const PUBLISHED: &[(&str, u64)] = &[
    ("llama3-8b", 8_030_261_248),
    ("llama3-70b", 70_553_706_496),
    ("llama3.1-405b", 405_853_388_800),
    ("llama3.2-1b", 1_235_814_400),
    ("llama2-7b", 6_738_415_616),
    ("llama2-13b", 13_015_864_320),
    ("llama2-70b", 68_976_648_192),
    ("mistral-7b", 7_241_732_096),
    ("mixtral-8x7b", 46_702_792_704),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("gpt2", 124_439_808),
    ("gpt2-xl", 1_557_611_200),
    ("opt-6.7b", 6_658_473_984),
    ("bloom-176b", 176_247_271_424),
    ("gpt-neox-20b", 20_554_567_680),
    ("falcon-7b", 6_921_720_704),
    ("mpt-7b", 6_649_286_656),
    ("phi3-mini", 3_821_079_552),
    ("starcoder2-3b", 3_030_371_328),
    ("starcoder2-7b", 7_173_923_840),
    ("gemma2-9b", 9_241_705_984),
    ("deepseek-v3", 671_026_419_200),
    ("gpt-oss-20b", 20_914_757_184),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-14b", 14_770_033_664),
    ("qwen2.5-32b", 32_763_876_352),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-4b", 4_022_468_096),
    ("qwen3-14b", 14_768_307_200),
    ("smollm2-135m", 134_515_008),
    ("smollm2-360m", 361_821_120),
    ("smollm2-1.7b", 1_711_376_384),
    ("llama-7b", 6_738_415_616),
    ("open-llama-3b", 3_426_473_600),
    ("starcoder2-15b", 15_957_889_024),
    ("pythia-12b", 11_846_072_320),
    // Prediction modules not counted: the safetensors of Qwen3-Coder-Next, which has the same sizes without them.
    ("qwen3-next-80b-a3b", 79_674_391_296),
    // The hub's 31,577,937,344 and the 128 correction biases of each of 23 routers, which are buffers there;
    // llama.cpp counts them too.
    ("nemotron-3-nano-30b-a3b", 31_577_937_344 + 23 * 128),
    ("nemotron-h-8b", 8_100_852_736),
    ("olmo2-1b", 1_484_916_736),
    ("olmo2-7b", 7_298_617_344),
    ("olmo2-13b", 13_716_198_400),
    ("olmo2-32b", 32_234_279_936),
    ("olmo3-7b", 7_298_011_136),
    ("olmo3-32b", 32_233_522_176),
    ("qwen3-coder-480b-a35b", 480_154_875_392),
    // Counted by transformers 5.23 (`Ernie4_5_MoeForCausalLM`, without the prediction module).
    ("ernie4.5-21b-a3b", 21_825_437_888),
    // The hub counts the vision tower and its projector too: 871,932,416.
    ("llama4-scout", 108_641_793_536 - 871_932_416),
    ("llama4-maverick", 401_583_781_376 - 871_932_416),
    // The hub says 228,703,644,928, with a scale for each 128 × 128 weights in FP8.
    ("minimax-m2", 228_703_644_928 - 13_880_064),
];

/// Model cards, in billions: no tensor sizes are at hand.
const ROUNDED: [(&str, u64); 2] = [("nemotron-h-47b", 47), ("nemotron-h-56b", 56)];

/// As [`PUBLISHED`], of files that hold the embedding and the head again for each prediction module.
const WITH_PREDICTION_MODULES: [(&str, u64); 2] =
    [("glm4.5", 358_337_791_296), ("glm4.5-air", 110_468_824_832)];

/// Presets whose count is not compared: no list of their tensors is at hand. Their families have other sizes above.
const NOT_COMPARED: &[&str] = &[
    "meta-llama-3-8b",
    "meta-llama-3-70b",
    "llama3.2-3b",
    "tinyllama-1.1b",
    "mixtral-8x22b",
    "qwen2.5-72b",
    "qwen2.5-0.5b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-235b-a22b",
    "gemma2-27b",
    "gemma3-27b",
    "phi3-medium",
    "gpt2-medium",
    "gpt2-large",
    "gpt3-175b",
    "megatron-22b",
    "megatron-530b",
    "megatron-1t",
    "opt-13b",
    "opt-30b",
    "opt-66b",
    "bloom-7b1",
    "falcon-40b",
    "falcon-180b",
    "mpt-30b",
    "deepseek-v2",
    "deepseek-v2-lite",
    "gpt-oss-120b",
    "nemotron-4-15b",
    "nemotron-4-340b",
    "qwen3-4b-2507",
    "qwen3-30b-a3b-2507",
    "gemma3-12b",
    "smollm-360m",
    "llama-13b",
    "mistral-7b-v0.1",
    "redpajama-3b",
    "kimi-k2",
    "nemotron-mini-4b",
    "deepseek-v3-main",
    "glm4.6",
    "kimi-k2-0905",
];

#[test]
fn every_preset_has_a_count() {
    let exact = PUBLISHED
        .iter()
        .chain(&ROUNDED)
        .chain(&WITH_PREDICTION_MODULES);
    let counted: Vec<&str> = exact
        .map(|(name, _)| *name)
        .chain(NOT_COMPARED.iter().copied())
        .collect();
    for info in catalog::load::model_names() {
        assert!(
            counted.contains(&info.name.as_str()),
            "{}: its published number of parameters is missing in models/tests/counts.rs",
            info.name
        );
    }
}

#[test]
fn counts_equal_the_published_ones() {
    let wrong: Vec<String> = PUBLISHED
        .iter()
        .filter_map(|&(name, expected)| {
            let model = catalog::load::model(name).expect(name);
            let count = parameter_count(&model).expect(name);
            (count != expected).then(|| {
                format!(
                    "{name}: {count}, published {expected} ({:+})",
                    count as i64 - expected as i64
                )
            })
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn counts_round_to_the_published_ones() {
    for (name, billions) in ROUNDED {
        let model = catalog::load::model(name).expect(name);
        let count = parameter_count(&model).expect(name);
        assert_eq!(
            (count + 500_000_000) / 1_000_000_000,
            billions,
            "{name}: {count}"
        );
    }
}

#[test]
fn counts_with_prediction_modules_equal_the_published_ones() {
    for (name, expected) in WITH_PREDICTION_MODULES {
        let model = catalog::load::model(name).expect(name);
        let parameters = models::parameters(&model).expect(name);
        let count: u64 = parameters.iter().map(|p| p.global_elements).sum();
        let again = model.mtp_layers * 2 * model.vocab * model.hidden;
        assert_eq!(count + again, expected, "{name}");
    }
}

#[test]
fn every_preset_traces_under_every_axis() {
    for info in catalog::load::model_names() {
        let model = catalog::load::model(&info.name).expect("preset");
        if model.hybrid.is_some() {
            // Their own tests, in `hybrids.rs`: the sequence may not be split.
            continue;
        }
        for block in models::blocks(&model) {
            for &cp_kind in CpKind::ALL {
                let layout = BlockLayout {
                    cp: 2,
                    cp_kind,
                    ..BlockLayout::alone(1, 64, DType::Bf16)
                };
                trace_block(&model, block, &layout)
                    .unwrap_or_else(|e| panic!("{} {block:?} {cp_kind:?}: {e}", info.name));
                if model.attention.heads.is_multiple_of(2) && model.attention.kv_heads() > 1 {
                    let layout = BlockLayout {
                        tp: 2,
                        sequence_parallel: true,
                        ..layout
                    };
                    trace_block(&model, block, &layout)
                        .unwrap_or_else(|e| panic!("{} {block:?} tp: {e}", info.name));
                }
            }
        }
    }
}

fn layout(tp: u64, ep: u64, etp: u64) -> BlockLayout {
    BlockLayout {
        tp,
        sequence_parallel: tp > 1,
        ep,
        etp,
        ..BlockLayout::alone(1, 256, DType::Bf16)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn shards_partition_every_dimension(n in 1u64..100_000, k in 1u64..64) {
        let sizes: Vec<u64> = (0..k).map(|r| dtensor::placement::shard_size(n, k, r)).collect();
        prop_assert_eq!(sizes.iter().sum::<u64>(), n);
        prop_assert!(sizes.windows(2).all(|w| w[0] >= w[1]));
    }

    #[test]
    fn experts_divide_by_ep_and_etp(ep in 0u32..4, etp in 0u32..3) {
        let (ep, etp) = (1u64 << ep, 1u64 << etp);
        let model = catalog::load::model("mixtral-8x7b").expect("preset");
        let class = BlockClass::Layer(model.layer_class(0));
        let trace = trace_block(&model, class, &layout(4, ep, etp)).expect("traces");
        for p in trace.parameters.iter().filter(|p| p.expert) {
            prop_assert_eq!(p.local_elements * ep * etp, p.global_elements);
        }
    }

    #[test]
    fn matrices_divide_by_tp(tp in 0u32..4) {
        let tp = 1u64 << tp;
        let model = catalog::load::model("llama3-70b").expect("preset");
        let class = BlockClass::Layer(model.layer_class(0));
        let trace = trace_block(&model, class, &layout(tp, 1, 1)).expect("traces");
        for p in trace.parameters.iter().filter(|p| p.global_shape.len() == 2) {
            prop_assert_eq!(p.local_elements * tp, p.global_elements, "{}", &p.name);
        }
    }
}
