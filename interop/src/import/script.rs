//! Reads a launch script: the options of the program that it starts, and the words before that program.

use super::error::ImportError;
use crate::config::shell::{self, Word};
use crate::config::{Node, SyntaxError, Value};
use crate::export::Dialect;
use crate::export::flag;
use crate::export::schema::{Kind, Schema};

/// LLaMA-Factory's command, which starts a process for each device that it sees.
pub(super) const LLAMA_FACTORY: &str = "llamafactory-cli";

/// An option with its values, as written.
pub(super) struct Setting {
    pub(super) line: usize,
    /// The name with its dashes.
    pub(super) name: String,
    pub(super) values: Vec<String>,
}

impl Setting {
    /// The key that stands for the option in a YAML file.
    pub(super) fn key(&self) -> String {
        flag::field(&self.name)
    }
}

/// The options among words.
pub(super) fn settings(words: &[Word]) -> Vec<Setting> {
    let mut all = Vec::new();
    let mut at = 0;
    while let Some(word) = words.get(at) {
        at += 1;
        if !is_option(&word.text) {
            continue;
        }
        let (name, attached) = match word.text.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word.text.as_str(), None),
        };
        let mut values: Vec<String> = attached.into_iter().collect();
        while let Some(next) = words.get(at).filter(|w| !is_option(&w.text)) {
            values.push(next.text.clone());
            at += 1;
        }
        // What an environment variable appends after an option's own value is unknown, and not part of the value.
        while values.len() > 1 && values.last().is_some_and(|v| v.starts_with('$')) {
            values.pop();
        }
        all.push(Setting {
            line: word.line,
            name: name.to_owned(),
            values,
        });
    }
    all
}

/// The options in these words of a script, as a tree of keys and values; `None` if there are none. Options of Megatron-LM keep
/// their dashes; those of the Trainer become the keys of its YAML.
pub(super) fn options(program: &[Word], dialect: Dialect) -> Result<Option<Node>, ImportError> {
    let schema = Schema::of(dialect)?;
    let entry = |option: Setting| {
        let name = match dialect {
            Dialect::MegatronLm => option.name.clone(),
            _ => option.key(),
        };
        let value = match schema.kind(&name) {
            Some(kind) => typed(&kind, &option.values, option.line),
            None if dialect != Dialect::MegatronLm => guessed(&option.values),
            None => untyped(&option.values),
        };
        let line = option.line;
        (name, Node { line, value })
    };
    let entries: Vec<(String, Node)> = settings(program).into_iter().map(entry).collect();
    if entries.is_empty() {
        return Ok(None);
    }
    let mut root = Node {
        line: 1,
        value: Value::Table(entries),
    };
    if dialect == Dialect::MegatronLm {
        positions(&mut root);
    }
    Ok(Some(root))
}

/// The error for a script whose training program is given no options. It names the file with the settings where the script sources
/// one, or starts a program that reads one.
pub(super) fn without_options(script: &shell::Script, path: &str) -> SyntaxError {
    let all = all_words(script);
    let sourced = sourced(&all);
    // Other commands, such as `grep`, name programs without starting them.
    let (starting, naming): (Vec<_>, Vec<_>) = all
        .into_iter()
        .partition(|words| words.iter().any(is_starter));
    let started = starting.into_iter().chain(naming).filter_map(|words| {
        let at = program_at(&words).or_else(|| module_at(&words))?;
        let file = settings_file(&words[at + 1..]);
        Some((words[at].clone(), file))
    });
    let started: Vec<(Word, Option<String>)> = started.collect();
    let with_file = started.iter().find(|(_, file)| file.is_some());
    if let Some(file) = sourced.filter(|_| with_file.is_none()) {
        let name = base(&file.text);
        let message = format!(
            "no `--option` is found, and `{name}`, which is sourced here, is not beside this script; give that file"
        );
        return SyntaxError::new(path, file.line, message);
    }
    let Some((program, file)) = with_file.or(started.first()) else {
        return SyntaxError::new(path, 0, "no `--option` is found");
    };
    SyntaxError::new(
        path,
        program.line,
        settings_of(&program.text, file.as_deref()),
    )
}

/// The message for a program that is started without options: it names the file with the settings if that is known.
fn settings_of(program: &str, file: Option<&str>) -> String {
    // A path that begins with a variable lies in a folder that is unknown here.
    let shown = match program.rsplit_once('/') {
        Some((folder, name)) if folder.starts_with('$') => name,
        _ => program,
    };
    match file {
        Some(file) => format!("the settings of `{shown}` are in `{file}`; give that file"),
        None if shown != program => format!(
            "`{shown}` is given no `--option`: its settings are not in this script; give `{shown}` itself"
        ),
        None => format!("`{shown}` is given no `--option`: its settings are not in this script"),
    }
}

/// The last script that a command sources, which could not be read beside the script.
fn sourced(all: &[Vec<Word>]) -> Option<Word> {
    let file = |words: &Vec<Word>| match words.as_slice() {
        [first, file, ..] if matches!(first.text.as_str(), "source" | ".") => Some(file.clone()),
        _ => None,
    };
    let mut files = all.iter().rev().filter_map(file);
    files.find(|file| file.text.ends_with(".sh"))
}

/// The settings file that a program's arguments name: the first YAML, JSON or TOML file, or else the Python file of torchtitan's
/// `--module NAME`. `None` if they name neither.
fn settings_file(arguments: &[Word]) -> Option<String> {
    let is_file = |word: &&Word| {
        let suffix = word.text.rsplit_once('.').map(|(_, suffix)| suffix);
        matches!(suffix, Some("yaml" | "yml" | "json" | "toml"))
    };
    let file = arguments
        .iter()
        .find(is_file)
        .map(|word| match word.text.starts_with('$') {
            true => base(&word.text).to_owned(),
            false => word.text.clone(),
        });
    let module = || {
        let at = arguments.iter().position(|word| word.text == "--module")?;
        Some(format!("{}.py", arguments.get(at + 1)?.text))
    };
    file.or_else(module)
}

/// The last part of a path.
fn base(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// The words of every command, also of those that a launcher gets as one word: `srun sh -c "torchrun pretrain_gpt.py --a 1"`.
fn all_words(script: &shell::Script) -> Vec<Vec<Word>> {
    let nested = script.commands.iter().flatten();
    let nested = nested.filter(|word| word.text.contains(' '));
    let nested = nested.map(|word| word.split().collect());
    script.commands.iter().cloned().chain(nested).collect()
}

/// Where a starter names the module of a training program: behind `-m`.
fn module_at(words: &[Word]) -> Option<usize> {
    let starter = words.iter().position(is_starter)?;
    let behind = words.get(starter..)?;
    let at = behind.iter().rposition(|word| word.text == "-m")? + starter + 1;
    (at < words.len()).then_some(at)
}

/// Where a command names the training program: at a `.py`, at the word after `llamafactory-cli`, or at a variable that the script
/// leaves to its user.
fn program_at(words: &[Word]) -> Option<usize> {
    let is_cli = |word: &Word| word.text.rsplit('/').next() == Some(LLAMA_FACTORY);
    let python = words.iter().position(|word| word.text.ends_with(".py"));
    let after = || Some(words.iter().position(is_cli)? + 1);
    let known = python.or_else(after).filter(|at| *at < words.len());
    known.or_else(|| variable_at(words))
}

/// Commands that start a training program given to them.
const STARTERS: [&str; 5] = ["accelerate", "torchrun", "deepspeed", "python", "python3"];

fn is_starter(word: &Word) -> bool {
    let name = word.text.rsplit('/').next().unwrap_or_default();
    STARTERS.contains(&name)
}

/// Where a variable of unknown value stands in the place of a training program: behind a starter, and not as the value of an option.
fn variable_at(words: &[Word]) -> Option<usize> {
    let starter = words.iter().position(is_starter)?;
    let behind = words.get(starter..)?.windows(2);
    let mut places = behind
        .enumerate()
        .map(|(at, pair)| (starter + at + 1, pair));
    let names_program = |pair: &[Word]| {
        let (before, text) = (&pair[0].text, &pair[1].text);
        let named = text.trim_start_matches(['$', '{']).trim_end_matches('}');
        let is_name = named.chars().all(|c| c.is_alphanumeric() || c == '_');
        let value = is_option(before) && !before.contains('=');
        text.starts_with('$') && is_name && !named.is_empty() && !value
    };
    let found = places.find(|(_, pair)| names_program(pair));
    found.map(|(at, _)| at)
}

/// Sets the kind of positions as Megatron-LM does for options that imply it (`validate_args`; for gpt-oss
/// `post_training/model_builder.py`).
fn positions(root: &mut Node) {
    let on = |key: &str| {
        root.get(key)
            .is_some_and(|node| node.value == Value::Bool(true))
    };
    let kind = match (
        on("--enable-gpt-oss"),
        on("--use-rotary-position-embeddings"),
    ) {
        (true, _) => "yarn",
        (false, true) => "rope",
        (false, false) => return,
    };
    root.set("--position-embedding-type", Value::Str(kind.to_owned()));
}

/// Options with which a program is given DeepSpeed's configuration.
const OF_FILES: [&str; 2] = ["--deepspeed", "--deepspeed_config"];

/// A training program in a command, with the words on both sides of it.
#[derive(Default)]
pub(super) struct Command {
    pub(super) launcher: Vec<Word>,
    /// The program; `None` where a script holds arguments only.
    pub(super) program: Option<Word>,
    pub(super) arguments: Vec<Word>,
}

impl Command {
    fn of(words: &[Word]) -> Option<Self> {
        let at = program_at(words)?;
        Some(Self {
            launcher: words[..at].to_vec(),
            program: Some(words[at].clone()),
            arguments: words[at + 1..].to_vec(),
        })
    }

    /// Number of options, but for those that only name a file with the settings.
    fn options(&self) -> usize {
        let words = self.arguments.iter().map(|word| word.text.as_str());
        let options = words.filter(|word| is_option(word));
        options.filter(|word| !OF_FILES.contains(word)).count()
    }
}

/// The command that starts training: among those that name a program, the one with the most options after it. A file
/// without such a command holds arguments only: in arrays, variables and bare words.
pub(super) fn command(script: &shell::Script) -> Command {
    let all = all_words(script);
    let named = all.iter().filter_map(|words| Command::of(words));
    let longest = named.max_by_key(Command::options);
    if let Some(command) = longest.filter(|command| command.options() > 0) {
        return command;
    }
    let mut found = Vec::new();
    for words in script.variables.values() {
        for word in words {
            // `ARGS=" --a 1 --b "` is split where it is used.
            let one = words.len() == 1 && word.text.contains("--");
            match (words.len(), one) {
                (1, false) => {}
                (_, true) => found.extend(word.split()),
                (_, false) => found.push(word.clone()),
            }
        }
    }
    // Options of a launcher or a profiler follow its name; those of an argument file stand alone.
    let bare = script
        .commands
        .iter()
        .filter(|words| words.first().is_some_and(|w| is_option(&w.text)));
    found.extend(bare.flatten().cloned());
    Command {
        arguments: found,
        ..Command::default()
    }
}

/// Whether a word is an option such as `--name`; a negative number is a value.
pub(super) fn is_option(word: &str) -> bool {
    word.starts_with("--") && word[2..].starts_with(|c: char| c.is_ascii_alphabetic())
}

/// An option's values as argparse would read them; what argparse would refuse stays a string. Those of a list are where the
/// option is, at `line`.
pub(super) fn typed(kind: &Kind, values: &[String], line: usize) -> Value {
    match (kind, values) {
        (Kind::Flag, []) => Value::Bool(true),
        (Kind::Flag, [one]) if one.starts_with('$') => Value::Bool(true),
        (Kind::List(inner), values) => {
            let item = |value| Node {
                line,
                value: typed(inner, std::slice::from_ref(value), line),
            };
            Value::List(values.iter().map(item).collect())
        }
        // `HfArgumentParser` gives booleans `nargs="?"` and `const=True`.
        (Kind::Optional(inner), []) if **inner == Kind::Bool => Value::Bool(true),
        (Kind::Optional(_), []) => Value::Null,
        (Kind::Optional(inner), values) => typed(inner, values, line),
        (Kind::Int | Kind::Size, [one]) => match one.parse::<i64>() {
            Ok(int) => Value::Int(int),
            Err(_) => Value::Str(one.clone()),
        },
        (Kind::Float, [one]) => match one.parse::<f64>() {
            Ok(float) => Value::Float(float),
            Err(_) => Value::Str(one.clone()),
        },
        (Kind::Bool, [one]) => match one.to_lowercase().as_str() {
            "true" | "t" | "yes" | "y" | "1" => Value::Bool(true),
            "false" | "f" | "no" | "n" | "0" => Value::Bool(false),
            _ => Value::Str(one.clone()),
        },
        _ => untyped(values),
    }
}

/// Values of an option that is the script's own: true or false, whole numbers, else text.
fn guessed(values: &[String]) -> Value {
    match values {
        [one] if one.eq_ignore_ascii_case("true") => Value::Bool(true),
        [one] if one.eq_ignore_ascii_case("false") => Value::Bool(false),
        [one] => typed(&Kind::Int, std::slice::from_ref(one), 0),
        _ => untyped(values),
    }
}

pub(super) fn untyped(values: &[String]) -> Value {
    match values {
        [] => Value::Bool(true),
        [one] => Value::Str(one.clone()),
        many => many.to_vec().into(),
    }
}
