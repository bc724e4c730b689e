//! What `profile --device cuda` measures without a plan: grids over shapes, and blocks of models that fit one GPU.

use catalog::{DType, Model};
use models::BlockLayout;
use profiler::cuda::{Causal, ELEMENTS, Linear, OPERATORS, Operator, OperatorKind, Request, Way};

use super::super::requests::{blocks_of, layouts};
use crate::args::SuiteArg;
use crate::error::CliError;

/// Largest GEMM `m · n · k` in 32 bits, for which there are no tensor cores.
const MOST_PRODUCT: u64 = 1 << 37;
/// Tokens per attention, in one sequence or several.
const TOKENS: u64 = 8192;
/// `[query heads, key/value heads, dimensions per head]`: GPT-2's, Llama 3.2 1B's, Llama 3's.
const HEADS: [[u64; 3]; 3] = [[12, 12, 64], [32, 8, 64], [32, 8, 128]];
/// Vocabulary sizes: Llama 2's, GPT-2's, Llama 3's.
const VOCABULARIES: [u64; 3] = [32_000, 50_304, 128_256];

/// `[features in, features out]` of heads whose rows of logits are not aligned to 16 bytes, as matrix units read them: GPT-2's,
/// and two of other alignments.
const UNALIGNED_HEADS: [[u64; 2]; 3] = [[768, 50_257], [768, 50_258], [768, 50_260]];

/// A model, and micro-batches `[sequences, tokens]` to measure it at.
type Shapes = (Model, Vec<[u64; 2]>);

/// All requests, with those that matter most to predictions first: later ones get less time. `eight_bits` says whether
/// the device has FP8 GEMMs.
pub(super) fn requests(
    suite: SuiteArg,
    gpus: u64,
    eight_bits: bool,
) -> Result<Vec<Request>, CliError> {
    let mut requests = vec![Request::Launches];
    for (model, tokens) in models(suite)? {
        // As one of two ranks, so that the packing of exchanges is measured.
        if gpus > 1 {
            let split = layouts(&model, &tokens[..1], DType::Bf16)
                .into_iter()
                .skip(1);
            for layout in split {
                requests.extend(on_one_gpu(&model, &layout)?);
            }
        }
        for [micro_batch, seq_len] in tokens {
            let layout = BlockLayout::alone(micro_batch, seq_len, DType::Bf16);
            requests.extend(on_one_gpu(&model, &layout)?);
        }
    }
    // From sizes that stay in the cache to sizes that saturate memory.
    requests.extend([1 << 20, 1 << 24, 1 << 28].map(Request::States));
    requests.extend([1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28].map(Request::Copies));
    requests.extend(
        products(suite, eight_bits)
            .into_iter()
            .map(Request::Product),
    );
    requests.extend(attentions(suite).into_iter().map(Request::Attention));
    requests.extend(operators(suite).into_iter().map(Request::Operator));
    Ok(requests)
}

/// The blocks of a model under a layout, each measured alone.
fn on_one_gpu(
    model: &Model,
    layout: &BlockLayout,
) -> Result<impl Iterator<Item = Request>, CliError> {
    let blocks = blocks_of(model, layout, 1, (1, 1))?;
    Ok(blocks
        .into_iter()
        .filter_map(|block| block.what.on_one_gpu()))
}

fn products(suite: SuiteArg, eight_bits: bool) -> Vec<Linear> {
    let (tokens, shapes): (&[u64], Vec<[u64; 2]>) = match suite {
        SuiteArg::Quick => (
            &[2048, 8192],
            vec![[1024, 1024], [4096, 4096], [2048, 8192]],
        ),
        SuiteArg::Full => {
            let widths = [768, 1024, 2048, 4096, 8192];
            let square = widths.iter().flat_map(|&k| widths.map(|n| [k, n]));
            let wide = [[4096, 14336], [14336, 4096], [8192, 28672], [28672, 8192]];
            let all = square.chain(wide).chain(UNALIGNED_HEADS);
            (&[512, 2048, 8192, 32768], all.collect())
        }
    };
    let mut products = Vec::new();
    for element in ELEMENTS {
        if element.way == Way::EightBits && !eight_bits {
            continue;
        }
        let slow = element.dtype == DType::F32 && element.way == Way::Whole;
        for &rows in tokens {
            for &[inputs, outputs] in &shapes {
                let takes = outputs.is_multiple_of(8) || element == ELEMENTS[0];
                if takes && (!slow || rows * inputs * outputs <= MOST_PRODUCT) {
                    products.push(Linear {
                        rows,
                        inputs,
                        outputs,
                        element,
                    });
                }
            }
        }
    }
    products
}

fn attentions(suite: SuiteArg) -> Vec<Causal> {
    let lengths: &[u64] = match suite {
        SuiteArg::Quick => &[1024, 8192],
        SuiteArg::Full => &[512, 1024, 2048, 4096, 8192, 16384],
    };
    let attention = |length: u64| {
        HEADS.map(|[heads, groups, dim]| Causal {
            batch: (TOKENS / length).max(1),
            length,
            heads,
            groups,
            dim,
        })
    };
    lengths
        .iter()
        .flat_map(|&length| attention(length))
        .collect()
}

fn operators(suite: SuiteArg) -> Vec<Operator> {
    let (tokens, columns, types): (&[u64], &[u64], &[DType]) = match suite {
        SuiteArg::Quick => (&[2048, 8192], &[2048, 8192], &[DType::Bf16]),
        SuiteArg::Full => (
            &[512, 2048, 8192, 32768],
            &[768, 2048, 4096, 8192, 14336],
            &[DType::Bf16, DType::F32],
        ),
    };
    let mut operators = Vec::new();
    for &kind in OPERATORS {
        let loss = kind == OperatorKind::CrossEntropy;
        // Logits keep the type in which the head writes them.
        let types = if loss { &types[..1] } else { types };
        let columns = if loss { &VOCABULARIES } else { columns };
        for &dtype in types {
            for &rows in tokens.iter().filter(|&&rows| !loss || rows <= TOKENS) {
                operators.extend(columns.iter().map(|&columns| Operator {
                    kind,
                    rows,
                    columns,
                    dtype,
                }));
            }
        }
    }
    operators
}

/// Models of sizes that one GPU trains: GPT-2 124M with and without dropout, a Llama of 1 B parameters, a small mixture
/// of experts; in the full suite also layers as wide as those of larger models.
fn models(suite: SuiteArg) -> Result<Vec<Shapes>, CliError> {
    let decoder = |kind: &str, hidden: u64, heads: u64, groups: u64, inner: u64, more: &str| {
        format!(
            r#"{{"model_type": "{kind}", "hidden_size": {hidden}, "num_hidden_layers": 1,
                "num_attention_heads": {heads}, "num_key_value_heads": {groups},
                "intermediate_size": {inner}, "vocab_size": 32000, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 8192{more}}}"#
        )
    };
    let gpt = |hidden: u64, heads: u64, positions: u64, more: &str| {
        format!(
            r#"{{"model_type": "gpt2", "n_embd": {hidden}, "n_layer": 1, "n_head": {heads}, "vocab_size": 50304,
                "n_positions": {positions}, "activation_function": "gelu_new"{more}}}"#
        )
    };
    // Attention with dropout runs on another kernel.
    let drops = r#", "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1"#;
    let experts = r#", "num_local_experts": 8, "num_experts_per_tok": 2"#;
    let llama = decoder("llama", 2048, 32, 8, 8192, "");
    let mixtral = decoder("mixtral", 1024, 16, 4, 2816, experts);
    let mut grid = vec![
        ("gpt", gpt(768, 12, 1024, ""), vec![[8, 1024], [32, 1024]]),
        ("gpt", gpt(768, 12, 1024, drops), vec![[16, 1024]]),
        ("llama", llama, vec![[1, 2048], [4, 2048], [1, 8192]]),
        ("mixtral", mixtral, vec![[1, 2048], [8, 2048]]),
    ];
    if suite == SuiteArg::Full {
        let wide = decoder("llama", 4096, 32, 8, 14336, "");
        let wider = decoder("llama", 8192, 64, 8, 28672, "");
        grid.push(("llama", wide, vec![[1, 2048], [1, 8192], [4, 4096]]));
        grid.push(("llama", wider, vec![[1, 2048], [1, 8192]]));
        grid.push(("gpt", gpt(4096, 32, 2048, ""), vec![[1, 2048], [4, 2048]]));
    }
    grid.into_iter()
        .map(|(name, json, tokens)| {
            let model = catalog::hf::decode(&json, "the profile's own models", name)?;
            Ok((model, tokens))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use profiler::cuda::Asked;

    use super::*;

    fn is_narrow(request: &Request) -> bool {
        matches!(request, Request::Product(linear) if linear.element.way == Way::EightBits)
    }

    #[test]
    fn suites_are_of_models_and_shapes() {
        for (suite, gpus, models_wanted, least, most) in [
            (SuiteArg::Quick, 1, 4, 100, 220),
            (SuiteArg::Quick, 8, 4, 150, 270),
            (SuiteArg::Full, 1, 7, 900, 2000),
        ] {
            assert_eq!(models(suite).expect("decodes").len(), models_wanted);
            let without = requests(suite, gpus, false).expect("traces");
            let requests = requests(suite, gpus, true).expect("traces");
            assert!(without.iter().all(|request| !is_narrow(request)));
            assert!(requests.iter().any(is_narrow));
            let parts: usize = requests.iter().map(Request::parts).sum();
            assert!((least..most).contains(&parts), "{parts}");
            // No shape of a grid is measured twice.
            let blocks = |r: &&Request| !matches!(r, Request::Block(_));
            let kernels = requests.iter().filter(blocks).flat_map(Request::kernels);
            let kernels: Vec<_> = kernels.collect();
            let distinct: BTreeSet<_> = kernels.iter().collect();
            assert!(kernels.len() - distinct.len() <= kernels.len() / 10);
        }
    }
}
