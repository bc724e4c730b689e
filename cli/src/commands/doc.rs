//! `doc`: how to write what the flags take, and what exit codes mean.

use std::process::ExitCode;

use clap::ValueEnum;
use planner::constraints::{CHOICES, DIMENSIONS};
use plans::strategy_words::KEYS;

use crate::args::{DocArgs, DocTopic};
use crate::error::CliError;
use crate::output;
use crate::settings;

/// Runs `doc`.
pub(crate) fn run(args: &DocArgs) -> Result<ExitCode, CliError> {
    let Some(topic) = args.topic else {
        let topics = DocTopic::value_variants().iter();
        let topics: Vec<_> = topics.filter_map(DocTopic::to_possible_value).collect();
        let rows = topics.iter().map(|value| {
            let help = value.get_help().map(ToString::to_string);
            (value.get_name(), help.unwrap_or_default())
        });
        let rows: Vec<(&str, String)> = rows.collect();
        output::print("Topics of `vescale-plan doc TOPIC`\n");
        output::print(&output::style().pairs(&rows));
        return Ok(ExitCode::SUCCESS);
    };
    match topic {
        DocTopic::Strategies => strategies(),
        DocTopic::Constraints => constraints(),
        DocTopic::Clusters => show(CLUSTERS),
        DocTopic::Models => show(MODELS),
        DocTopic::Settings => settings(),
        DocTopic::ExitCodes => show(EXIT_CODES),
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a text, wrapped to the width of the terminal. Each paragraph and each list item is one line of `text`.
fn show(text: &str) {
    output::print(&output::style().page(text));
}

fn strategies() {
    show(STRATEGIES);
    show(&format!("\nKeys: {}", KEYS.join(", ")));
    output::print(&reports::terminal::terms(output::style()));
}

fn constraints() {
    show(CONSTRAINTS);
    let (sizes, choices) = (DIMENSIONS.join(", "), CHOICES.join(", "));
    show(&format!("\nSizes: {sizes}. Choices: {choices}."));
    show(VALUES);
}

fn settings() {
    show(SETTINGS);
    if let Some(own) = settings::own_file() {
        output::print(&format!("  {}\n", own.display()));
    }
    let keys = settings::KEYS.map(|(key, _)| key).join(", ");
    show(&format!(
        "\nKeys: {keys}. `vescale-plan config` shows what holds, and what set it."
    ));
}

const STRATEGIES: &str = "\
A strategy is a list of words, separated by commas or spaces. A word is key=value (tp=8) or, shorter, the key with its number \
(tp8). What is left out is the runtime's default; only etp is 1 where Megatron's default is tp. Strategies are printed in the short form, and every form is read wherever \
a strategy is asked for.

  --strategy tp=8,pp=4,recompute=selective
  --strategy 'tp8 pp4 recompute=selective'
";

const CONSTRAINTS: &str = "\
Constraints narrow a search:

  --fix tp=8,zero=1          these values
  --fix recompute=none|full  one of these values
  --min pp=2                 at least
  --max pp=4                 at most
  --forbid cp                size 1
  --constraints FILE         the same in YAML; flags beat it

  # constraints.yaml
  fix: {tp: 8, zero: [0, 1], recompute: none}
  max: {pp: 4}
  forbid: [cp]
  uneven: 2

`uneven` is of files alone: a pipeline stage at either end may have up to this many layers fewer than the others (1 if \
it is not given).
";

const VALUES: &str = "\
A value that no strategy of the model, runtime and number of GPUs can have is refused with the legal values (exit code 2). \
Values that are legal each, but not together, end with exit code 3.
";

const SETTINGS: &str = "\
Defaults of search, estimate and size, strongest first:

  a flag                     --seq 8k
  the environment            VESCALE_PLAN_SEQ=8k
  ./vescale-plan.toml        seq = \"8k\"
";

const CLUSTERS: &str = "\
A cluster is one of:

  --cluster dgx-h100   a preset (`vescale-plan clusters`)
  --cluster ours.yaml  a file (`vescale-plan schema cluster`)
  --cluster local      this machine, as `vescale-plan profile` measured it

  --cluster 'h100-sxm x 8 per node, 400 Gb/s x 8'
      one line: GPU x COUNT per node, then, if they differ from the preset with that GPU, RATE x CARDS between nodes, \
`nvlink RATE` or `pcie RATE` inside a node, `domain 36` for the number of GPUs that NVLink joins (without it: the preset's, or \
COUNT if that differs from the preset's), and `$2.5` per GPU and hour

  --cluster '64 x dgx-a100 + 32 x dgx2-v100, 100 Gb/s between, 20 ms away'
      pools of GPUs that differ, or that are at different sites: up to four, each of a preset or a file, with --gpus for \
all of them (96). What follows the comma is the whole link between two pools; without it they share a network

  --cluster '62 nodes x dgx-h100 + 2 nodes x dgx-h100 at 0.8 with 2% jitter'
      pools by their nodes; `at 0.8` after any cluster says that its GPUs reach 0.8 of the usual speed, and `with 2% jitter` \
that the time of a rank's pass has a standard deviation of 2%

A pipeline passes through pools one after the other, and each rank gets the layers that its GPUs have time for; or groups of \
replicas train side by side on different pools, and each gets the sequences that it has time for, under a plan of its own. \
`search` tries every order of the pools, every way to divide them into groups, and every way to leave some out. `--fix \
groups=1` keeps all replicas alike. best.plan.yaml#2 names the second group of a plan.

A file that changes a preset; its profile is measured by `vescale-plan profile --device cuda -o gpu.yaml`:

  schema_version: 1
  name: ours
  extends: dgx-h100
  profile: gpu.yaml

GPUs are given as a number (--gpus 512), as nodes (--gpus '64 nodes'), or with their kind (--gpus '512x h100', which also \
chooses the cluster).
";

const MODELS: &str = "\
A model is one of:

  --model llama3-70b                a preset (`vescale-plan models`)
  --model meta-llama/Llama-3.1-70B  its published name, if there is a preset of it
  --model path/to/config.json       a config.json of the Hugging Face hub
  --model path/to/folder            a folder that holds one

Nothing is downloaded. For another model of the hub:

  hf download OWNER/NAME config.json --local-dir NAME
  vescale-plan search --model NAME --gpus 64
";

const EXIT_CODES: &str = "\
  0    ok; it fits
  1    a fault of ours or of the machine; a stream or disk that is full
  2    bad input
  3    no plan fits, or this one does not
  4    a target cannot express the plan, or a configuration has errors
  5    outside --tolerance
  130  interrupted; the best plan so far was kept
";
