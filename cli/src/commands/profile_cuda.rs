//! `profile --device cuda`: measures a GPU.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use dtensor::BlockMesh;
use models::BlockLayout;
use profiler::cuda::{self, Target};
use profiler::{BlockRequest, Effort};
use spec::profile::{self, Profile};
use spec::{DType, ModelConfig};

use super::profile::{ProfileJson, Request, What, before, blocks_of, effort, of_plan, summary};
use crate::args::{ProfileArgs, SuiteArg};
use crate::error::CliError;
use crate::output::{self, Progress, SCHEMA_VERSION};

/// Elements of the optimizer's states: from what stays in the cache to what fills memory's queues.
const STATES: [u64; 3] = [1 << 20, 1 << 24, 1 << 28];

/// Runs `profile --device cuda`. Every measurement is written as soon as it is there, and what a file holds
/// already is not measured again.
pub(crate) fn run(args: &ProfileArgs) -> Result<ExitCode, CliError> {
    let path = args.output_profile.as_deref();
    let path = path.unwrap_or(Path::new(profile::DEFAULT_PATH));
    let target = Target::new(0)?;
    let mut profile = before(path, &target.machine)?;
    let effort = effort(args.suite).at_once();
    let requests = requests(args)?;
    let progress = Progress::new(args.output.quiet, "measuring");
    for (done, request) in requests.iter().enumerate() {
        progress.update(done as f64 / requests.len() as f64);
        if let Some(measured) = measure(&target, request, &profile, effort)? {
            profile.add(measured);
            output::write(path, &profile.to_yaml())?;
        }
    }
    profile.add(cuda::launches(&target.device, effort)?);
    progress.finish();
    output::write(path, &profile.to_yaml())?;
    if args.output.json {
        output::json(&ProfileJson {
            schema_version: SCHEMA_VERSION,
            machine: target.machine,
            path: path.display().to_string(),
            measured: profile.measured,
        })?;
    } else {
        output::print(&summary(&profile, path));
        output::print(&condition()?);
    }
    Ok(ExitCode::SUCCESS)
}

/// What the GPU was like when it was measured.
fn condition() -> Result<String, CliError> {
    let c = dtensor::cuda::condition(0)?;
    let [clock, most] = c.clock_mhz;
    let [power, limit] = c.power_watts;
    Ok(format!(
        "driver {}; now {clock} of {most} MHz, memory {} MHz, {power} of {limit} W, {} °C\n",
        c.driver, c.memory_clock_mhz, c.celsius
    ))
}

/// Measures a request, unless the profile holds all of it.
fn measure(
    target: &Target,
    request: &What,
    profile: &Profile,
    effort: Effort,
) -> Result<Option<Vec<profile::Measured>>, CliError> {
    let device = &target.device;
    let measured = match request {
        What::Block(block) if is_measured(block, profile) => return Ok(None),
        What::Block(block) => cuda::blocks(device, block, effort)?,
        What::States(elements) => cuda::states(device, *elements, effort)?,
        What::Messages(_) => return Ok(None),
    };
    Ok(Some(measured))
}

fn is_measured(block: &BlockRequest, profile: &Profile) -> bool {
    let held: BTreeSet<(&str, &[u64])> = profile
        .measured
        .iter()
        .map(|m| (m.kernel.as_str(), m.sizes.as_slice()))
        .collect();
    let trace = &block.trace;
    let mut ops = trace.forward.iter().chain(&trace.backward);
    ops.all(|op| {
        let kernel = trace.kernel(op, |_| 1);
        held.contains(&(kernel.name.as_str(), kernel.sizes.as_slice()))
    })
}

/// What to measure: the plans' shapes, or a grid.
fn requests(args: &ProfileArgs) -> Result<Vec<What>, CliError> {
    let mut requests: Vec<Request> = Vec::new();
    for path in &args.plans {
        requests.extend(of_plan(path, 1)?);
    }
    if args.plans.is_empty() {
        for (model, tokens) in grid(args.suite)? {
            for [micro_batch, seq_len] in tokens {
                let layout = BlockLayout::alone(micro_batch, seq_len, DType::Bf16);
                requests.extend(blocks_of(&model, &layout, 1, (1, 1))?);
            }
        }
    }
    let mut all: Vec<What> = requests.into_iter().map(|request| request.what).collect();
    let one = BlockMesh {
        tp: 1,
        cp: 1,
        ep: 1,
        etp: 1,
    };
    for what in &all {
        if let What::Block(block) = what
            && block.position.mesh != one
        {
            let wanted = "a plan whose layers lie whole on one GPU (tp, cp and ep 1)";
            return Err(CliError::Usage(format!(
                "one GPU is measured alone: expected {wanted}"
            )));
        }
    }
    if args.plans.is_empty() {
        all.extend(STATES.map(What::States));
    }
    Ok(all)
}

/// A model, and micro-batches `[sequences, tokens]` to measure it at.
type Shapes = (ModelConfig, Vec<[u64; 2]>);

/// Models of sizes that one GPU trains: GPT-2 124M, a Llama of 1 B parameters, a small mixture of experts;
/// in full also layers as wide as those of larger ones.
fn grid(suite: SuiteArg) -> Result<Vec<Shapes>, CliError> {
    let decoder = |kind: &str, hidden: u64, heads: u64, groups: u64, inner: u64, more: &str| {
        format!(
            r#"{{"model_type": "{kind}", "hidden_size": {hidden}, "num_hidden_layers": 1,
                "num_attention_heads": {heads}, "num_key_value_heads": {groups},
                "intermediate_size": {inner}, "vocab_size": 32000, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 8192{more}}}"#
        )
    };
    let gpt = r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 1, "n_head": 12,
        "n_positions": 1024, "vocab_size": 50304, "activation_function": "gelu_new"}"#;
    let experts = r#", "num_local_experts": 8, "num_experts_per_tok": 2"#;
    let llama = decoder("llama", 2048, 32, 8, 8192, "");
    let mixtral = decoder("mixtral", 1024, 16, 4, 2816, experts);
    let mut grid = vec![
        ("gpt", gpt.to_owned(), vec![[8, 1024], [32, 1024]]),
        ("llama", llama, vec![[1, 2048], [4, 2048], [1, 8192]]),
        ("mixtral", mixtral, vec![[1, 2048], [8, 2048]]),
    ];
    if suite == SuiteArg::Full {
        let wide = decoder("llama", 4096, 32, 8, 14336, "");
        let wider = decoder("llama", 8192, 64, 8, 28672, "");
        grid.push(("llama", wide, vec![[1, 2048], [1, 8192], [4, 4096]]));
        grid.push(("llama", wider, vec![[1, 2048], [1, 8192]]));
    }
    grid.into_iter()
        .map(|(name, json, tokens)| {
            let model = spec::hf::decode(&json, "the profile's own models", name)?;
            Ok((model, tokens))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grids_models_are_models() {
        let count = |suite| grid(suite).expect("decodes").len();
        assert_eq!((count(SuiteArg::Quick), count(SuiteArg::Full)), (3, 5));
    }
}
