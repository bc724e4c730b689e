//! What a Python file of configurations defines: its functions, the model that it loads, and how it makes a configuration.

use super::node::Value;
use super::python::{Assignment, CALL, parse};

/// What a Python file defines beside its assignments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Definitions {
    /// Names of public top-level functions without arguments.
    pub functions: Vec<String>,
    /// Hub name of the first model that the file loads with `from_hf_pretrained`.
    pub hub_model: Option<String>,
    /// Module below `torchtitan.models` from which the file imports `model_registry`.
    pub registry: Option<String>,
    /// Backend that carries tokens to experts: the last argument whose name ends in `comm_backend`.
    pub comm_backend: Option<String>,
    /// Whether the last `non_blocking_capacity_factor` is a number, which bounds tokens per expert.
    pub bounds_experts: bool,
    /// Whether the file itself makes the configuration of a trainer, by a constructor such as `Trainer.Config(…)`.
    pub makes_trainer: bool,
    /// Calls `cfg = f()` that make a configuration which later lines change (`cfg.model.a = b`).
    pub made: Vec<Made>,
}

/// A call that makes a configuration which the file then changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    /// Name of the function, without its module.
    pub function: String,
    /// Line of the call.
    pub line: usize,
    /// Whether the function is another file's: called as `module.f()`, or named without a call.
    pub imported: bool,
}

/// Sections of Megatron Bridge's configurations.
const SECTIONS: [&str; 7] = [
    "comm_overlap",
    "dataset",
    "ddp",
    "mixed_precision",
    "model",
    "optimizer",
    "train",
];

/// Finds the definitions in the text of a Python file.
#[must_use]
pub fn definitions(text: &str) -> Definitions {
    let name = |line: &str| {
        let (name, rest) = line.strip_prefix("def ")?.split_once('(')?;
        let public = rest.starts_with(')') && !name.starts_with('_');
        public.then(|| name.trim().to_owned())
    };
    let taken = text
        .split_once("from_hf_pretrained(")
        .and_then(|(_, rest)| {
            let rest = rest.trim_start();
            let name = rest.split([',', ')']).next()?.trim();
            literal(name).or_else(|| {
                let mut lines = text.lines().filter(|line| line.starts_with(name));
                lines.find_map(|line| literal(line.split_once('=')?.1))
            })
        });
    Definitions {
        functions: text.lines().filter_map(name).collect(),
        hub_model: taken,
        registry: text.lines().find_map(registry),
        comm_backend: given(text, "comm_backend=").find_map(literal),
        bounds_experts: given(text, "non_blocking_capacity_factor=")
            .next()
            .is_some_and(|value| value.trim_start().starts_with(|c: char| c.is_ascii_digit())),
        makes_trainer: makes_trainer(text),
        made: (1..)
            .zip(text.lines())
            .filter_map(|(at, line)| made(text, at, line))
            .collect(),
    }
}

/// The call on line `at` (from 1) that makes a configuration which later lines change, if any.
fn made(text: &str, at: usize, line: &str) -> Option<Made> {
    let (variable, value) = line.split_once('=')?;
    // `cfg: ConfigContainer = f()` declares a type.
    let variable = variable.split(':').next()?.trim();
    let (path, _) = value.trim().split_once('(')?;
    let name = |c: char| c.is_alphanumeric() || c == '_';
    let function = path.rsplit('.').next()?;
    if [variable, function]
        .iter()
        .any(|word| word.is_empty() || !word.chars().all(name))
    {
        return None;
    }
    let changes = |line: &str| {
        let below = line.trim().strip_prefix(variable)?.strip_prefix('.')?;
        let section = below.split(|c| !name(c)).next()?;
        SECTIONS.contains(&section).then_some(())
    };
    text.lines().skip(at).find_map(changes)?;
    let uncalled = |(from, _): (usize, &str)| {
        let after = text[from + function.len()..].chars().next();
        let before = text[..from].chars().next_back();
        let whole = !before.is_some_and(|c| name(c) || c == '"') && !after.is_some_and(name);
        whole && after != Some('(')
    };
    Some(Made {
        function: function.to_owned(),
        line: at,
        imported: path.contains('.') || text.match_indices(function).any(uncalled),
    })
}

/// The text after each occurrence of `argument`, last occurrence first: functions that change a
/// configuration come after the one that makes it.
fn given<'a>(text: &'a str, argument: &'a str) -> impl Iterator<Item = &'a str> {
    let found = text.rmatch_indices(argument);
    found.map(move |(at, _)| &text[at + argument.len()..])
}

/// Whether a function returns the constructor of a trainer's configuration, or a variable is set to it.
fn makes_trainer(text: &str) -> bool {
    let made = |assignment: &Assignment| {
        let trainer = matches!(&assignment.node.value, Value::Call(name, _) if is_trainer(name));
        trainer && !assignment.path.contains('.') && assignment.path != CALL
    };
    // Text that is no Python is reported where its assignments are read.
    parse(text, "").is_ok_and(|all| all.iter().any(made))
}

/// Whether a constructor makes the configuration of a trainer: `Trainer.Config`, or that of a class derived from it.
#[must_use]
pub fn is_trainer(constructor: &str) -> bool {
    constructor.contains("Trainer") && constructor.ends_with("Config")
}

/// The module of torchtitan's models whose registry a line imports.
fn registry(line: &str) -> Option<String> {
    let (module, names) = line
        .strip_prefix("from torchtitan.models.")?
        .split_once(" import ")?;
    names.contains("model_registry").then(|| module.to_owned())
}

/// The text inside the quotes with which a value begins; `None` if it does not begin with a quote.
fn literal(value: &str) -> Option<String> {
    let value = value.trim_start();
    let quote = value.chars().next().filter(|c| ['"', '\''].contains(c))?;
    let (text, _) = value[1..].split_once(quote)?;
    Some(text.to_owned())
}
