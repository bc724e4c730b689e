//! `profile`: measures this machine.

use std::path::Path;
use std::process::ExitCode;

use catalog::profile::{self, Machine, Measured, Profile};
use catalog::{CpKind, DType, Model};
use dtensor::{BlockMesh, BlockPosition};
use models::{BlockClass, BlockLayout};
use profiler::{BlockRequest, Effort, VISITS};
use serde::Serialize;

use crate::args::{AttentionArg, DeviceArg, ProfileArgs, SuiteArg};
use crate::commands::plan;
use crate::commands::profile_file::ProfileFile;
use crate::error::CliError;
use crate::output::{self, Progress, SCHEMA_VERSION};

/// Equal layers to run in a row, at most: beyond this caches hold nothing of the first.
const MOST_DEPTH: u64 = 8;
/// Equal layers in a row when no plan says how many.
const SUITE_DEPTH: u64 = 3;

#[derive(Serialize)]
pub(super) struct ProfileJson {
    pub(super) schema_version: u32,
    pub(super) machine: Machine,
    pub(super) path: String,
    pub(super) measured: Vec<Measured>,
}

/// Something to measure, on so many ranks at a time.
pub(super) struct Request {
    pub(super) what: What,
    ranks: u64,
    threads: usize,
}

pub(super) enum What {
    Block(Box<BlockRequest>),
    States(u64),
    Messages(u64),
}

/// Runs `profile`.
pub(crate) fn run(args: &ProfileArgs) -> Result<ExitCode, CliError> {
    if args.device == DeviceArg::Cuda {
        return super::profile_cuda::run(args);
    }
    if let Some(gpus) = args.gpus {
        let message = format!("--gpus {gpus}: expected --device cuda with it");
        return Err(CliError::Usage(message));
    }
    let others = [
        ("--attention own", args.attention == AttentionArg::Own),
        ("--all-hosts", args.all_hosts),
    ];
    if let Some((flag, _)) = others.iter().find(|(_, asked)| *asked) {
        let message = format!("{flag}: expected --device cuda with it");
        return Err(CliError::Usage(message));
    }
    let path = args
        .output_profile
        .as_deref()
        .unwrap_or(Path::new(profile::DEFAULT_PATH));
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
    if args.output.json {
        output::json(&ProfileJson {
            schema_version: SCHEMA_VERSION,
            machine,
            path: path.display().to_string(),
            measured: profile.measured,
        })?;
    } else {
        output::print(&summary(&profile, path));
    }
    Ok(ExitCode::SUCCESS)
}

/// How long to measure each request.
pub(super) fn effort(suite: SuiteArg) -> Effort {
    match suite {
        SuiteArg::Quick => Effort::QUICK,
        SuiteArg::Full => Effort::FULL,
    }
}

fn measure(request: &Request, effort: Effort) -> Result<Vec<Measured>, CliError> {
    let ranks = request.ranks;
    Ok(match &request.what {
        What::Block(block) => profiler::blocks(block, ranks, request.threads, effort)?,
        What::States(elements) => profiler::states(*elements, ranks, effort)?,
        What::Messages(elements) => profiler::messages(*elements, ranks, effort)?,
    })
}

/// Refuses what the cpu device does not compute.
fn on_cpu(path: &Path, requests: Vec<Request>) -> Result<Vec<Request>, CliError> {
    let narrow =
        |request: &Request| matches!(&request.what, What::Block(block) if block.trace.eight_bits);
    if requests.iter().any(narrow) {
        let path = path.display();
        let message = format!("{path}: the cpu device does not compute in fp8; use --device cuda");
        return Err(CliError::Usage(message));
    }
    Ok(requests)
}

/// The shapes that a plan needs.
pub(super) fn of_plan(path: &Path, cores: u64) -> Result<Vec<Request>, CliError> {
    let loaded = plan::load(path)?;
    let scenario = loaded.costs.scenario();
    let (model, s) = (&scenario.model, &loaded.strategy);
    let layout = BlockLayout::of(s, scenario.workload.seq_len, scenario.workload.precision);
    let world = scenario.workload.gpus;
    let (ranks, threads) = shares(world, cores);
    let depth = s
        .stages
        .0
        .iter()
        .copied()
        .max()
        .unwrap_or(1)
        .min(MOST_DEPTH);
    let mut requests = blocks_of(model, &layout, depth, (ranks, threads))?;
    let parameters = models::parameter_count(model).map_err(|e| CliError::Usage(e.to_string()))?;
    let held = (parameters / (s.tp * s.pp)).max(1);
    for elements in [held, held.div_ceil(s.dp_shard)] {
        requests.push(Request {
            what: What::States(elements),
            ranks,
            threads,
        });
    }
    let activation = s.micro_batch * layout.seq_len * model.hidden / s.cp;
    for size in [s.dp_shard * s.cp, s.dp_replicate, s.pp, world] {
        if size > 1 {
            for elements in [activation, held] {
                requests.push(Request {
                    what: What::Messages(elements),
                    ranks: size,
                    threads,
                });
            }
        }
    }
    Ok(requests)
}

/// Ranks that compute at a time and threads each may use.
fn shares(world: u64, cores: u64) -> (u64, usize) {
    (world.min(cores), (cores / world).max(1) as usize)
}

pub(super) fn blocks_of(
    model: &Model,
    layout: &BlockLayout,
    depth: u64,
    (ranks, threads): (u64, usize),
) -> Result<Vec<Request>, CliError> {
    let mut classes = vec![BlockClass::Embedding, BlockClass::Head];
    classes.extend((0..model.layers).map(|i| BlockClass::Layer(model.layer_class(i))));
    classes.sort_unstable();
    classes.dedup();
    classes
        .into_iter()
        .map(|class| {
            let trace = models::trace_block(model, class, layout)
                .map_err(|e| CliError::Usage(e.to_string()))?;
            let position = BlockPosition {
                mesh: BlockMesh {
                    tp: layout.tp,
                    cp: layout.cp,
                    ep: layout.ep,
                    etp: layout.etp,
                },
                at: [0; 4],
            };
            let block = BlockRequest {
                trace,
                position,
                micro_batch: layout.micro_batch,
                seq_len: layout.seq_len,
                vocab: model.vocab,
                depth: match class {
                    BlockClass::Layer(_) => depth,
                    _ => 1,
                },
            };
            Ok(Request {
                what: What::Block(Box::new(block)),
                ranks,
                threads,
            })
        })
        .collect()
}

/// A grid over sizes, for plans that are not known yet.
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
        let shares @ (ranks, threads) = shares(world, cores);
        for &hidden in widths {
            for model in synthetic(hidden)? {
                for &dtype in types {
                    for layout in layouts(&model, tokens, dtype) {
                        requests.extend(blocks_of(&model, &layout, SUITE_DEPTH, shares)?);
                    }
                }
            }
        }
        requests.extend(
            [1 << 14, 1 << 18, 1 << 21, 1 << 24].map(|elements| Request {
                what: What::States(elements),
                ranks,
                threads,
            }),
        );
    }
    for ranks in [2, 4, 8] {
        requests.extend(
            [1 << 10, 1 << 14, 1 << 18, 1 << 22].map(|elements| Request {
                what: What::Messages(elements),
                ranks,
                threads: 1,
            }),
        );
    }
    Ok(requests)
}

/// Alone and split in two, by every way to split tokens: sizes decide what a rank computes, the way
/// what it does to communicate.
pub(super) fn layouts(model: &Model, tokens: &[[u64; 2]], dtype: DType) -> Vec<BlockLayout> {
    let mut layouts = Vec::new();
    for &[micro_batch, seq_len] in tokens {
        let alone = BlockLayout::alone(micro_batch, seq_len, dtype);
        let experts = if model.moe.is_some() { 2 } else { 1 };
        layouts.push(alone);
        for sequence_parallel in [false, true] {
            layouts.push(BlockLayout {
                tp: 2,
                sequence_parallel,
                ep: experts,
                ..alone
            });
        }
        for cp_kind in [CpKind::Ring, CpKind::AllGather, CpKind::AllToAll] {
            layouts.push(BlockLayout {
                cp: 2,
                cp_kind,
                ep: experts,
                ..alone
            });
        }
    }
    layouts
}

/// One layer of each family whose operators differ.
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
    [("gpt", gpt), ("llama", llama), ("mixtral", mixtral)]
        .into_iter()
        .map(|(name, json)| {
            Ok(catalog::hf::decode(
                &json,
                "the profile's own models",
                name,
            )?)
        })
        .collect()
}

pub(super) fn summary(profile: &Profile, path: &Path) -> String {
    let noisy = profile.measured.iter().filter(|m| m.spread > 0.1).count();
    format!(
        "{}: {} kernels, matrix products up to {}\n{} of them vary by more than 10% from run to run\nwrote {}; plan for it with --cluster {}\n",
        profile.machine.described(),
        profile.measured.len(),
        profile.peak(),
        noisy,
        path.display(),
        if path == Path::new(profile::DEFAULT_PATH) {
            "local".to_owned()
        } else {
            path.display().to_string()
        }
    )
}
