//! A configuration file of any training system as a tree, and the system that it is for.

use std::collections::BTreeMap;

use crate::config::definitions::is_trainer;
use crate::config::python::CALL;
use crate::config::{self, Node, SyntaxError, Value, place};
use crate::export::Dialect;
use crate::export::schema::{Kind, Schema};
use crate::import::dispatcher;
use crate::import::error::ImportError;
use crate::import::formats;
use crate::import::launch::Launch;
use crate::import::manifest;
use crate::import::readings::{Reading, Way, readings};
use crate::import::script::{LLAMA_FACTORY, is_option, typed, untyped};
use crate::import::titan_keys;

/// A configuration file, read for a dialect.
#[derive(Clone, Debug)]
pub struct Document {
    /// Path of the file, for messages.
    pub path: String,
    /// The system and version that it is for.
    pub dialect: Dialect,
    /// Its keys and values. For Megatron-LM the keys are options with their dashes.
    pub root: Node,
    /// What a launch script says beside the arguments of the program that it starts.
    pub launch: Launch,
    /// What a Python file defines: functions that make configurations, and where its model comes from.
    pub python: config::definitions::Definitions,
    /// Settings in the words of the file, for keys of a file that was rewritten for another system.
    pub own_words: BTreeMap<String, String>,
    /// Other ways through a launch script with undecided conditions, each with what it then states.
    pub others: Vec<(Way, Document)>,
}

/// Returns the text of a file that another one names by a relative path.
pub type Include<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Document {
    /// Reads a file; the dialect is detected if it is not given.
    ///
    /// # Errors
    /// For malformed text, with its line, and for files of no known dialect.
    pub fn read(
        text: &str,
        path: &str,
        dialect: Option<Dialect>,
        include: Include<'_>,
    ) -> Result<Self, ImportError> {
        let dialect = match dialect {
            Some(dialect) => dialect,
            None => {
                manifest::refuse(text, path)?;
                detect(text, path)?
            }
        };
        let ((root, launch), ways) = parse(text, path, dialect, include)?;
        if !matches!(root.value, Value::Table(_)) {
            return Err(SyntaxError::new(path, root.line, "a table of keys is expected").into());
        }
        let python = match dialect.is_python() {
            true => config::definitions::definitions(text),
            false => config::definitions::Definitions::default(),
        };
        let document = Self {
            path: path.to_owned(),
            dialect,
            root,
            launch,
            python,
            own_words: BTreeMap::new(),
            others: Vec::new(),
        };
        let document = document.with_files(include)?;
        let others = ways.into_iter().map(|(way, (root, launch))| {
            let other = Self {
                root,
                launch,
                ..document.clone()
            };
            Ok((way, other.with_files(include)?))
        });
        let others = others.collect::<Result<_, ImportError>>()?;
        Ok(Self { others, ..document })
    }

    /// Includes the configurations of DeepSpeed or FSDP that the document names by their files.
    fn with_files(mut self, include: Include<'_>) -> Result<Self, ImportError> {
        files_beside(&mut self.root, include)?;
        if let Some(settings) = &mut self.launch.settings {
            files_beside(settings, include)?;
        }
        Ok(self)
    }

    /// Why the file configures nothing; `None` if it sets a key of its system.
    ///
    /// # Errors
    /// Never for the embedded schemas; a test reads them all.
    pub fn states_nothing(&self) -> Result<Option<&'static str>, catalog::SpecError> {
        let schema = Schema::of(self.dialect)?;
        let mut keys = self.root.entries().iter();
        Ok(match keys.len() {
            // A program has more to say than the keys that it sets.
            0 if !self.dialect.is_python() => Some("the file is empty"),
            _ if keys.any(|(key, _)| schema.kind(key).is_some() || schema.is_section(key)) => None,
            _ => Some("the file sets no key of this system"),
        })
    }

    /// A non-negative integer; `None` if the key is absent or null.
    ///
    /// # Errors
    /// When the value is something else, negative, or above 2^40.
    pub fn size(&self, key: &str) -> Result<Option<u64>, ImportError> {
        let Some(node) = self.said(key) else {
            return Ok(None);
        };
        match node.int().and_then(|i| u64::try_from(i).ok()) {
            Some(size) if size <= 1 << 40 => Ok(Some(size)),
            _ => Err(self.wrong(key, "a whole number that is not negative")),
        }
    }

    /// A parallel degree or a micro-batch: 1 if the key is absent.
    ///
    /// # Errors
    /// When the value is something else, 0, or larger than any job has.
    pub fn degree(&self, key: &str) -> Result<u64, ImportError> {
        match self.stated_degree(key)? {
            0 => Err(self.wrong(key, "a whole number of at least 1")),
            size => Ok(size),
        }
    }

    /// A parallel degree of a system that reads 0 as a degree that is not set; 1 if the key is absent.
    ///
    /// # Errors
    /// When the value is something else, or larger than any job has.
    pub(super) fn degree_or_unset(&self, key: &str) -> Result<u64, ImportError> {
        Ok(self.stated_degree(key)?.max(1))
    }

    fn stated_degree(&self, key: &str) -> Result<u64, ImportError> {
        let size = self.size(key)?.unwrap_or(1);
        if size > 1 << 20 {
            return Err(self.wrong(key, "at most 1048576"));
        }
        Ok(size)
    }

    /// A boolean; `None` if the key is absent or null.
    ///
    /// # Errors
    /// When the value is something else.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ImportError> {
        match self.said(key).map(|node| &node.value) {
            None => Ok(None),
            Some(Value::Bool(on)) => Ok(Some(*on)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// Whether the key is present and true.
    pub(super) fn on(&self, key: &str) -> Result<bool, ImportError> {
        Ok(self.flag(key)? == Some(true))
    }

    /// The text of a key, which may be in a list by itself; `None` if the key is absent or null.
    ///
    /// # Errors
    /// When the value is something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ImportError> {
        let Some(node) = self.said(key) else {
            return Ok(None);
        };
        let text = match node.list() {
            Some([one]) => one.text(),
            _ => node.text(),
        };
        text.map(Some).ok_or_else(|| self.wrong(key, "text"))
    }

    /// The value of a key, if it is not null.
    pub(super) fn said(&self, key: &str) -> Option<&Node> {
        self.find(key).filter(|node| node.value != Value::Null)
    }

    /// The strings of a key that takes one or several; none if the key is absent.
    #[must_use]
    pub fn words(&self, key: &str) -> Vec<&str> {
        let node = self.find(key);
        match node.and_then(Node::list) {
            Some(list) => list.iter().filter_map(Node::text).collect(),
            None => node.and_then(Node::text).into_iter().collect(),
        }
    }

    /// The value of a key. Options of Megatron-LM are whole keys, dots included. Other keys may be
    /// in the launcher's settings too; those of torchtitan 0.2 may have their earlier names.
    #[must_use]
    pub fn find(&self, key: &str) -> Option<&Node> {
        if key.starts_with("--") {
            return self.root.get(key);
        }
        let of_launcher = || self.launch.settings.as_ref()?.at(key);
        let toml = self.dialect == Dialect::Torchtitan02;
        let earlier = || titan_keys::earlier(&self.root, key).filter(|_| toml);
        self.root.at(key).or_else(of_launcher).or_else(earlier)
    }

    /// Place of a key as `file:line`.
    #[must_use]
    pub fn place(&self, key: &str) -> String {
        place(&self.path, self.find(key).map_or(0, |node| node.line))
    }

    /// A note on a key, with its place.
    pub(super) fn note(&self, key: &str, text: impl std::fmt::Display) -> String {
        format!("{}: {text}", self.place(key))
    }

    /// A setting as the file has it: in its own words, or as a key and a value.
    pub(super) fn in_own_words(&self, key: &str, value: &str) -> String {
        let own = self.own_words.get(key).cloned();
        own.unwrap_or_else(|| format!("{key}{value}"))
    }

    /// The same file rewritten for another system.
    pub(super) fn rewritten(&self, dialect: Dialect, root: Node) -> Self {
        Self {
            path: self.path.clone(),
            dialect,
            root,
            launch: self.launch.clone(),
            python: Default::default(),
            own_words: BTreeMap::new(),
            others: Vec::new(),
        }
    }

    /// The error for a value that its key does not allow.
    #[must_use]
    pub fn wrong(&self, key: &str, expected: &str) -> ImportError {
        let node = self.find(key);
        let found = node.map_or_else(String::new, |n| n.value.shown());
        let unknown = node.and_then(Node::text).and_then(|t| t.strip_prefix('$'));
        let name = unknown.map(|name| name.trim_start_matches("((").trim_end_matches("))"));
        let name = name.filter(|name| name.chars().all(|c| c.is_alphanumeric() || c == '_'));
        // The option has no value: another option follows it.
        let bare = key.starts_with("--") && node.is_some_and(|n| n.value == Value::Bool(true));
        let message = match name {
            Some(name) => format!("{expected} is expected, and the script does not set {name}"),
            None if bare => format!("no value is given; expected {expected}"),
            None => format!("{found} is not {expected}"),
        };
        self.unsupported(key, &message)
    }

    /// The error for a value that no strategy can express.
    #[must_use]
    pub fn unsupported(&self, key: &str, why: &str) -> ImportError {
        ImportError::value(self.place(key), key, why)
    }

    /// The error for a missing value, with advice on how to give it.
    #[must_use]
    pub fn missing(&self, what: impl Into<String>, how: impl Into<String>) -> ImportError {
        ImportError::Missing {
            path: self.path.clone(),
            what: what.into(),
            how: how.into(),
        }
    }
}

/// Reads a file of a dialect: its keys and launch command, and for a script what other ways through it give.
fn parse(
    text: &str,
    path: &str,
    dialect: Dialect,
    include: Include<'_>,
) -> Result<(Reading, Vec<(Way, Reading)>), ImportError> {
    formats::readable(path, dialect)?;
    let trainer = matches!(
        dialect,
        Dialect::Transformers | Dialect::TransformersDeepSpeed | Dialect::LlamaFactory
    );
    // LLaMA-Factory's own files are YAML, whatever their names.
    let factory = dialect == Dialect::LlamaFactory;
    let script = trainer && !is_yaml(path) && (!factory || starts_factory(text));
    let root = match dialect {
        Dialect::MegatronLm if is_model_args(text, path) => model_args(text, path)?,
        Dialect::Torchtitan02 => config::toml::parse(text, path)?,
        Dialect::DeepSpeed => config::json::parse_unique(text, path)?,
        _ if trainer && is_json(text, path) => config::json::parse(text, path)?,
        _ if dialect == Dialect::MegatronLm || script => {
            return readings(text, path, dialect, include);
        }
        _ if dialect.is_python() => assignments(text, path)?,
        _ => config::yaml::parse(text, path)?,
    };
    Ok(((root, Launch::default()), Vec::new()))
}

/// Detects the dialect of a file from its suffix and keys.
fn detect(text: &str, path: &str) -> Result<Dialect, ImportError> {
    let suffix = path.rsplit('.').next().unwrap_or_default();
    let has = |word: &str| text.contains(word);
    let found = match suffix {
        "json" | "yaml" | "yml" if has("per_device_train_batch_size") => Some(trainer(text)),
        "json" => {
            let keys = ["train_", "gradient_", "zero_optimization", "bf16", "fp16"];
            // Text that is not JSON at all is reported by the JSON reader.
            let broken = serde_json::from_str::<serde_json::Value>(text).is_err();
            (broken || keys.into_iter().any(has)).then_some(Dialect::DeepSpeed)
        }
        "toml" => Some(Dialect::Torchtitan02),
        "py" => python(text),
        "yaml" | "yml" if has("distributed_type") || has("compute_environment") => {
            Some(Dialect::Accelerate)
        }
        "yaml" | "yml" if is_model_args(text, path) => Some(Dialect::MegatronLm),
        "yaml" | "yml" if has("base_model") => Some(Dialect::Axolotl),
        "yaml" | "yml" if has("parallelism:") => Some(Dialect::Nanotron),
        "yaml" | "yml" => None,
        _ if has(LLAMA_FACTORY) => Some(Dialect::LlamaFactory),
        _ if has("--per_device_train_batch_size") => Some(trainer(text)),
        _ if has("--") => Some(Dialect::MegatronLm),
        _ => None,
    };
    found.ok_or_else(|| ImportError::UnknownKind {
        path: path.to_owned(),
    })
}

/// The keys under which files of transformers and accelerate give a configuration of DeepSpeed or FSDP, or the path of a
/// file with it.
const BESIDE: [&str; 3] = [
    "deepspeed",
    "deepspeed_config.deepspeed_config_file",
    "fsdp_config",
];

/// Replaces the path of such a configuration by its content, where `include` can read it.
fn files_beside(root: &mut Node, include: Include<'_>) -> Result<(), ImportError> {
    for key in BESIDE {
        let Some(node) = root.at(key) else {
            continue;
        };
        let Some(path) = node.text().filter(|path| path.ends_with(".json")) else {
            continue;
        };
        let line = node.line;
        let path = path.to_owned();
        if let Some(text) = include(&path) {
            let engine = config::json::parse(&text, &path)?;
            root.set(key, engine.value);
            locate(root, key, line);
        }
    }
    Ok(())
}

/// The system that a file with the Trainer's arguments is for.
fn trainer(text: &str) -> Dialect {
    let has = |word: &str| text.contains(word);
    if has("finetuning_type") || has("cutoff_len") {
        return Dialect::LlamaFactory;
    }
    match has("deepspeed") {
        true => Dialect::TransformersDeepSpeed,
        false => Dialect::Transformers,
    }
}

fn python(text: &str) -> Option<Dialect> {
    let has = |word: &str| text.contains(word);
    if has("torchtitan") {
        let main = [
            "num_tokens_per_",
            "max_context_length",
            "num_pp_microbatches",
        ];
        let newer = main.into_iter().any(has);
        return Some(if newer {
            Dialect::TorchtitanMain
        } else {
            Dialect::Torchtitan03
        });
    }
    if has("megatron.bridge") {
        return Some(Dialect::MegatronBridge);
    }
    has("vescale").then_some(Dialect::VeScale)
}

/// Whether this is a test case of Megatron-LM: YAML with options in a section `MODEL_ARGS`.
fn is_model_args(text: &str, path: &str) -> bool {
    is_yaml(path) && text.lines().any(|line| line.starts_with("MODEL_ARGS:"))
}

/// Whether this is a script that starts LLaMA-Factory: it names its command, or gives options.
fn starts_factory(text: &str) -> bool {
    text.contains(LLAMA_FACTORY) || text.split_whitespace().any(is_option)
}

/// Whether a file is JSON, by its name or its first character.
fn is_json(text: &str, path: &str) -> bool {
    path.ends_with(".json") || text.trim_start().starts_with('{')
}

fn is_yaml(path: &str) -> bool {
    path.ends_with(".yaml") || path.ends_with(".yml")
}

/// The options of a test case of Megatron-LM.
fn model_args(text: &str, path: &str) -> Result<Node, ImportError> {
    let schema = Schema::of(Dialect::MegatronLm)?;
    let root = config::yaml::parse(text, path)?;
    let option = |(name, node): &(String, Node)| {
        let words: Vec<String> = match &node.value {
            Value::Bool(false) | Value::Null => return None,
            Value::Bool(true) => Vec::new(),
            Value::Str(text) if schema.kind(name).is_none_or(|kind| kind == Kind::Str) => {
                vec![text.clone()]
            }
            Value::Str(text) => text.split_whitespace().map(str::to_owned).collect(),
            other => vec![other.shown()],
        };
        let line = node.line;
        let value = match schema.kind(name) {
            Some(kind) => typed(&kind, &words, line),
            None => untyped(&words),
        };
        is_option(name).then(|| (name.clone(), Node { line, value }))
    };
    let section = root.get("MODEL_ARGS").map_or(&[][..], Node::entries);
    Ok(Node {
        line: 1,
        value: Value::Table(section.iter().filter_map(option).collect()),
    })
}

/// Assignments of a Python file as a tree: `config.a.b = v` becomes `a.b`, and keyword arguments of the constructor of the
/// whole configuration become keys.
fn assignments(text: &str, path: &str) -> Result<Node, ImportError> {
    let mut root = Node::table();
    let mut constants: BTreeMap<String, Value> = BTreeMap::new();
    // Variables of the function, which the configuration may name.
    let mut locals: BTreeMap<String, Value> = BTreeMap::new();
    for mut assignment in config::python::parse(text, path)? {
        if let Value::Expression(name) = &assignment.node.value
            && let Some(value) = constants.get(name.trim())
        {
            assignment.node.value = value.clone();
        }
        // A constant of the module, as people name them.
        let named = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        if assignment.path.chars().all(named) {
            constants.insert(assignment.path, assignment.node.value);
            continue;
        }
        if assignment.path == CALL {
            for (path, node) in dispatcher::settings(&root, &assignment.node) {
                put(&mut root, &path, node);
            }
            continue;
        }
        let returned = assignment.path == "return";
        let whole = |name: &str| match returned {
            true => name.ends_with("Config"),
            false => is_trainer(name) && !assignment.path.contains('.'),
        };
        match assignment.node.value {
            Value::Call(name, arguments) if whole(&name) => {
                for (key, mut node) in arguments {
                    if let Value::Expression(name) = &node.value
                        && let Some(value) = locals.get(name.trim())
                    {
                        node.value = value.clone();
                    }
                    put(&mut root, &key, node);
                }
                continue;
            }
            _ if returned => continue,
            value => assignment.node.value = value,
        }
        if !assignment.path.contains('.') {
            locals.insert(assignment.path.clone(), assignment.node.value.clone());
        }
        let below = match assignment.path.split_once('.') {
            Some((_, below)) => below,
            None => assignment.path.as_str(),
        };
        put(&mut root, below, assignment.node);
    }
    Ok(root)
}

/// Sets a node at a path; assigning a whole section replaces its content.
fn put(root: &mut Node, path: &str, node: Node) {
    let line = node.line;
    match node.value {
        // An ordinary section becomes a table of its arguments; one whose class is a choice stays a constructor.
        Value::Call(name, arguments) if !name.contains('.') && name.ends_with("Config") => {
            root.set(path, Value::Table(Vec::new()));
            for (key, node) in arguments {
                put(root, &format!("{path}.{key}"), node);
            }
        }
        value => root.set(path, value),
    }
    locate(root, path, line);
}

/// Sets the line of the node at a path, and of tables made on the way.
fn locate(node: &mut Node, path: &str, line: usize) {
    let (key, rest) = match path.split_once('.') {
        Some((key, rest)) => (key, Some(rest)),
        None => (path, None),
    };
    if let Value::Table(entries) | Value::Call(_, entries) = &mut node.value
        && let Some((_, found)) = entries.iter_mut().find(|(k, _)| k == key)
    {
        if found.line == 0 || rest.is_none() {
            found.line = line;
        }
        if let Some(rest) = rest {
            locate(found, rest, line);
        }
    }
}
