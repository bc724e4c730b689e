//! `profile`: measures this machine.

mod cuda;
mod file;
mod requests;
mod shown;

use std::path::Path;
use std::process::ExitCode;

use catalog::profile::{self, Measured};
use catalog::{DType, Model};
use profiler::{Effort, VISITS};

use self::file::ProfileFile;
use self::requests::{Request, What, blocks_of, effort, layouts, of_plan, shares};
use self::shown::show;
use crate::args::{AttentionArg, DeviceArg, ProfileArgs, SuiteArg};
use crate::error::CliError;
use crate::inputs;
use crate::output::Progress;

/// Equal layers in a row when no plan gives their number.
const SUITE_DEPTH: u64 = 3;

/// Runs `profile`.
pub(crate) fn run(args: &ProfileArgs) -> Result<ExitCode, CliError> {
    crate::memory::keep();
    if args.device == DeviceArg::Cuda {
        return cuda::run(args);
    }
    let others = [
        ("--attention own", args.attention == AttentionArg::Own),
        ("--all-hosts", args.all_hosts),
    ];
    inputs::of_cuda(args.gpus, &others)?;
    let path = args.output_profile.as_deref();
    let path = path.unwrap_or(Path::new(profile::DEFAULT_PATH));
    let machine = profiler::machine();
    let (file, mut profile) = ProfileFile::open(path, &machine)?;
    let effort = effort(args.suite);
    let requests = if args.plans.is_empty() {
        suite(args.suite, machine.cores)?
    } else {
        let mut requests = Vec::new();
        for path in &args.plans {
            requests.extend(on_cpu(path, of_plan(path, machine.cores)?)?);
        }
        requests
    };
    let progress = Progress::new(args.output.quiet, "measuring");
    let mut measured = Vec::new();
    for visit in 0..VISITS {
        for (done, request) in requests.iter().enumerate() {
            let done = visit * requests.len() + done;
            progress.update(done as f64 / (VISITS * requests.len()) as f64);
            measured.extend(measure(request, effort)?);
        }
    }
    profile.add(profiler::middle(measured));
    progress.finish();
    let profile = file.add(&profile)?;
    show(args.output, profile, path)?;
    Ok(ExitCode::SUCCESS)
}

fn measure(request: &Request, effort: Effort) -> Result<Vec<Measured>, CliError> {
    let ranks = request.ranks;
    Ok(match &request.what {
        What::Block(block) => profiler::blocks(block, ranks, request.threads, effort)?,
        What::States(elements) => profiler::states(*elements, ranks, effort)?,
        What::Messages(elements) => profiler::messages(*elements, ranks, effort)?,
    })
}

/// Refuses requests that the cpu device cannot compute.
fn on_cpu(path: &Path, requests: Vec<Request>) -> Result<Vec<Request>, CliError> {
    let narrow =
        |request: &Request| matches!(&request.what, What::Block(block) if block.trace.eight_bits);
    if requests.iter().any(narrow) {
        let what = "the cpu device does not compute in fp8";
        return Err(CliError::unexpected(path.display(), what, "--device cuda"));
    }
    Ok(requests)
}

/// A grid over sizes, for when there is no plan yet.
fn suite(suite: SuiteArg, cores: u64) -> Result<Vec<Request>, CliError> {
    let (widths, tokens, types): (&[u64], &[[u64; 2]], &[DType]) = match suite {
        SuiteArg::Quick => (&[64, 256, 768], &[[1, 64], [2, 256]], &[DType::F32]),
        SuiteArg::Full => (
            &[64, 128, 256, 512, 1024],
            &[[1, 64], [4, 64], [1, 256], [4, 256], [1, 1024], [1, 2048]],
            &[DType::F32, DType::Bf16],
        ),
    };
    let mut requests = Vec::new();
    let mut worlds = vec![1, cores];
    worlds.dedup();
    for world in worlds {
        let shares = shares(world, cores);
        for &hidden in widths {
            for model in synthetic(hidden)? {
                for &dtype in types {
                    for layout in layouts(&model, tokens, dtype) {
                        requests.extend(blocks_of(&model, &layout, SUITE_DEPTH, shares)?);
                    }
                }
            }
        }
        let states = [1 << 14, 1 << 18, 1 << 21, 1 << 24];
        requests.extend(states.map(|n| Request::new(What::States(n), shares)));
    }
    for ranks in [2, 4, 8] {
        let messages = [1 << 10, 1 << 14, 1 << 18, 1 << 22];
        requests.extend(messages.map(|n| Request::new(What::Messages(n), (ranks, 1))));
    }
    Ok(requests)
}

/// One layer of each model family whose operators differ.
fn synthetic(hidden: u64) -> Result<Vec<Model>, CliError> {
    let heads = (hidden / 64).max(2);
    let gpt = format!(
        r#"{{"model_type": "gpt2", "n_embd": {hidden}, "n_layer": 1, "n_head": {heads},
            "n_positions": 2048, "vocab_size": 1024, "activation_function": "gelu_new",
            "resid_pdrop": 0.1, "attn_pdrop": 0.1}}"#
    );
    let grouped = format!(
        r#""hidden_size": {hidden}, "num_hidden_layers": 1, "num_attention_heads": {heads},
           "num_key_value_heads": 2, "intermediate_size": {}, "vocab_size": 1024,
           "max_position_embeddings": 2048, "rms_norm_eps": 1e-5"#,
        hidden * 5 / 2
    );
    let llama = format!(r#"{{"model_type": "llama", {grouped}}}"#);
    let mixtral = format!(
        r#"{{"model_type": "mixtral", {grouped}, "num_local_experts": 8, "num_experts_per_tok": 2}}"#
    );
    let own = "the profile's own models";
    [("gpt", gpt), ("llama", llama), ("mixtral", mixtral)]
        .into_iter()
        .map(|(name, json)| Ok(catalog::hf::decode(&json, own, name)?))
        .collect()
}
