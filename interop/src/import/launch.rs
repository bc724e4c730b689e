//! The command that starts a training script: on how many devices, and under which settings of `accelerate launch`.

use super::error::ImportError;
use super::script::{Command, LLAMA_FACTORY, Setting, settings, typed};
use crate::config::shell::{Script, Word};
use crate::config::{self, Node, Value};
use crate::export::Dialect;
use crate::export::schema::Schema;

/// What a launch command says apart from the arguments of the training script.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Launch {
    /// Number of devices.
    pub gpus: Option<u64>,
    /// Number of devices of a node.
    pub gpus_per_node: Option<u64>,
    /// The option that counts devices or nodes, if its value is not known here.
    pub open: Option<Open>,
    /// What `accelerate launch` is told, by options or by its configuration file, as keys and values of such a file.
    pub settings: Option<Node>,
    /// The training program that is started, by the name of its file, such as `pretrain_gpt.py`.
    pub program: Option<Word>,
}

/// An option whose value is not known here, such as `--nnodes $NODES`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// Line in the script.
    pub line: usize,
    /// The option's name.
    pub option: String,
    /// Its value as written.
    pub value: String,
}

/// Options of torchrun, DeepSpeed and Slurm that give the number of devices in each node.
const EACH: [&str; 6] = [
    "--nproc-per-node",
    "--nproc_per_node",
    "--num_gpus",
    "--num-gpus",
    "--gpus-per-node",
    "--gpus_per_node",
];
/// Options of these and of `accelerate launch` that give the number of nodes.
const NODES: [&str; 5] = [
    "--nnodes",
    "--num-nodes",
    "--num_nodes",
    "--num_machines",
    "--num-machines",
];
/// Options of `accelerate launch` that give the number of devices in all nodes together.
const ALL: [&str; 2] = ["--num_processes", "--num-processes"];

/// Programs that by default start a process for each device that they see; torchrun starts one.
const LAUNCHERS: [&str; 3] = ["deepspeed", "accelerate", LLAMA_FACTORY];
/// Names of PyTorch's launcher.
const TORCHRUN: [&str; 3] = [
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
];

/// The number of devices or nodes that options give. An error is the option whose value is not known here, or `None` if there is
/// no such option.
type Count = Result<u64, Option<Open>>;

/// The value of the first of these options that has a number, else the last that has another value. `words` are pairs of a word
/// and its line.
fn count(words: &[(&str, usize)], names: &[&str]) -> Count {
    let mut found = None;
    for (at, (word, line)) in words.iter().enumerate() {
        let (name, attached) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (*word, None),
        };
        let value = attached.or(words.get(at + 1).map(|(next, _)| *next));
        let Some(value) = value.filter(|_| names.contains(&name)) else {
            continue;
        };
        if let Ok(number) = value.parse() {
            return Ok(number);
        }
        found = Some(Open {
            line: *line,
            option: name.to_owned(),
            value: value.to_owned(),
        });
    }
    Err(found)
}

/// The number of devices in a list of their indices, such as `0,1,2,3`.
fn indices(list: &str) -> Option<u64> {
    let indices = list.split(',');
    let numbers = indices
        .clone()
        .all(|index| index.trim().parse::<u32>().is_ok());
    numbers.then(|| indices.count() as u64)
}

/// Nodes and devices of each node in DeepSpeed's `--include a:0,1@b:0,1`; `None` if nodes have unequal numbers of devices.
fn included(words: &[(&str, usize)]) -> Option<(u64, u64)> {
    let at = words.iter().position(|(word, _)| *word == "--include")?;
    let (list, _) = words.get(at + 1)?;
    let of_node = |node: &str| indices(node.split_once(':')?.1);
    let nodes: Vec<u64> = list.split('@').map(of_node).collect::<Option<_>>()?;
    let each = *nodes.first()?;
    let equal = nodes.iter().all(|&devices| devices == each);
    equal.then_some((nodes.len() as u64, each))
}

/// Whether one of these programs is among the words.
fn has(words: &[(&str, usize)], programs: &[&str]) -> bool {
    words.iter().any(|(word, _)| programs.contains(word))
}

/// The number of devices of all nodes, if variables or the `#SBATCH` lines of a script give it.
fn beside_launcher(script: &Script, words: &[(&str, usize)]) -> Option<u64> {
    let value = |name: &str| Some(script.variables.get(name)?.first()?.text.as_str());
    let mut named = ["GPUS", "WORLD_SIZE"].into_iter().filter_map(value);
    let named = named.find_map(|text| text.parse().ok());
    // Plain `python` starts one process however many devices it sees.
    let visible = value("CUDA_VISIBLE_DEVICES").filter(|_| has(words, &LAUNCHERS));
    named
        .or(script.job.gpus)
        .or_else(|| visible.and_then(indices))
}

impl Launch {
    /// What a script says of devices: nodes times devices of a node, all of them, or a variable that gives their number.
    pub(super) fn of(script: &Script, command: &Command) -> Self {
        let arrays = script.variables.values().filter(|v| v.len() > 1).flatten();
        let words = script.commands.iter().flatten().chain(arrays);
        let words: Vec<(&str, usize)> = words
            .flat_map(|w| w.text.split_whitespace().map(|part| (part, w.line)))
            .collect();
        let [each, nodes, all] = [&EACH[..], &NODES, &ALL].map(|names| count(&words, names));
        let job = &script.job;
        // Without a launcher of their own, the processes that Slurm starts on a node have a device each.
        let tasks = job.tasks_per_node.filter(|&tasks| tasks > 1);
        // torchrun without `--nnodes` runs on one node, however many the job has.
        let one_node = each.is_ok() && has(&words, &TORCHRUN);
        let included = included(&words);
        let of_job = job.gpus_per_node.or(tasks.filter(|_| job.gpus.is_none()));
        let usual = included.map(|(_, each)| each).or(of_job);
        let each = each.or_else(|open| usual.ok_or(open));
        let of_job = job.nodes.filter(|_| !one_node);
        let usual = included.map(|(nodes, _)| nodes).or(of_job);
        let nodes = nodes.or_else(|open| usual.ok_or(open));
        let (gpus, gpus_per_node, open) = match [each, nodes, all] {
            [each, nodes, Ok(all)] => {
                let share = || all.checked_div(nodes.ok()?);
                (Some(all), each.ok().or_else(share), None)
            }
            [_, _, Err(Some(open))] => (None, None, Some(open)),
            [Ok(each), Err(Some(open)), _] => (None, Some(each), Some(open)),
            [Ok(each), Ok(nodes), _] => (nodes.checked_mul(each), Some(each), None),
            [Ok(each), Err(None), _] => (Some(each), Some(each), None),
            [Err(open), nodes, _] => {
                let all = beside_launcher(script, &words);
                let share = || all?.checked_div(nodes.ok()?);
                (all, share(), open.filter(|_| all.is_none()))
            }
        };
        let program = command.program.as_ref().map(|word| Word {
            text: word.text.rsplit('/').next().unwrap_or_default().to_owned(),
            line: word.line,
        });
        Self {
            gpus,
            gpus_per_node,
            open,
            settings: None,
            program,
        }
    }
}

/// The settings of `accelerate launch` in the words before the training script: its configuration file, and the options
/// that take the place of the file's keys. `None` for other launchers.
pub(super) fn accelerate(
    launcher: &[Word],
    path: &str,
    include: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<Node>, ImportError> {
    let is = |word: &Word| word.text.rsplit('/').next().unwrap_or("") == "accelerate";
    let by_name = launcher
        .windows(2)
        .any(|w| is(&w[0]) && w[1].text == "launch");
    let by_module =
        |w: &Word| ["accelerate.commands.launch", "accelerate-launch"].contains(&w.text.as_str());
    if !by_name && !launcher.iter().any(by_module) {
        return Ok(None);
    }
    let schema = Schema::of(Dialect::Accelerate)?;
    let options = settings(launcher);
    let file = options.iter().find(|option| option.key() == "config_file");
    let mut root = match file {
        Some(option) => file_of(option, path, include)?,
        None => Node::table(),
    };
    for option in &options {
        let name = option.key();
        let kind = match name.as_str() {
            "use_fsdp" => Some("FSDP"),
            "use_deepspeed" => Some("DEEPSPEED"),
            "use_megatron_lm" => Some("MEGATRON_LM"),
            _ => None,
        };
        if let Some(kind) = kind {
            root.set("distributed_type", kind);
            continue;
        }
        let counts = option.values.iter().any(|v| v.starts_with('$')) && name.starts_with("num_");
        let mut keys = schema.keys();
        let key = keys.find(|key| key.rsplit('.').next() == Some(&name));
        if let Some((key, kind)) = key.and_then(|key| Some((key, schema.kind(key)?)))
            && !counts
        {
            root.set(key, typed(&kind, &option.values, option.line));
        }
    }
    let line = launcher.first().map_or(0, |word| word.line);
    let line = file.map_or(line, |option| option.line);
    stand_at(&mut root, line);
    Ok(Some(root))
}

/// The configuration file that an option names.
fn file_of(
    option: &Setting,
    path: &str,
    include: &dyn Fn(&str) -> Option<String>,
) -> Result<Node, ImportError> {
    let name = option.values.first().map_or("", String::as_str);
    match include(name) {
        Some(text) if name.ends_with(".json") => Ok(config::json::parse(&text, name)?),
        Some(text) => Ok(config::yaml::parse(&text, name)?),
        None => {
            let place = config::place(path, option.line);
            let why =
                format!("`{name}` cannot be read, from the folder of the script or from here");
            Err(ImportError::value(place, &option.name, why))
        }
    }
}

/// Sets the line of every node of a tree: the script's line that names the file of the tree.
fn stand_at(node: &mut Node, line: usize) {
    node.line = line;
    if let Value::Table(entries) = &mut node.value {
        for (_, below) in entries {
            stand_at(below, line);
        }
    }
}
