//! Defaults that a user sets once: in the environment, in a file of the project, or in a file of their own.
//!
//! A flag beats the environment, which beats `vescale-plan.toml` in the current folder, which beats the user's own
//! file, which beats the tool's defaults.

use std::path::PathBuf;

use catalog::{Mistake, text};
use clap::ValueEnum;
use clap::error::ErrorKind;
use toml_edit::{Document, Value};

use crate::args::{ColorArg, words};

/// Flags whose default can be set, each with the tool's own default, in words where that is not one value.
pub(crate) const KEYS: [(&str, &str); 13] = [
    ("model", "(none: say --model)"),
    ("cluster", "dgx-h100"),
    ("gpus", "(none: say --gpus)"),
    ("runtime", "megatron-core; vescale on a profiled machine"),
    (
        "seq",
        "8192; fewer if the model's learned table of positions is shorter",
    ),
    (
        "global-batch",
        "as many as make 4 Mi tokens, and at least one for each of up to 2048 GPUs",
    ),
    ("precision", "bf16"),
    ("headroom", "5%"),
    ("tokens", "(none)"),
    ("price", "the cluster's"),
    ("top", "5"),
    ("threads", "all cores"),
    ("color", "auto"),
];

/// Commands whose flags take defaults from settings.
const COMMANDS: [&str; 3] = ["search", "estimate", "size"];

/// Name of the project's settings file, looked for in the current folder.
const PROJECT: &str = "vescale-plan.toml";

/// One default that was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    /// Name of the flag, without `--`.
    pub(crate) key: &'static str,
    /// Its value, as on the command line.
    pub(crate) value: String,
    /// The environment variable or file that sets it.
    pub(crate) origin: String,
}

/// All defaults that were set, at most one for each flag.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Settings(Vec<Setting>);

impl Settings {
    /// Reads the environment and the files.
    ///
    /// # Errors
    /// A file that cannot be read, a key that no flag has.
    pub(crate) fn load() -> Result<Self, Mistake> {
        let mut found = Self::default();
        for (key, _) in KEYS {
            let variable = variable(key);
            if let Some(value) = std::env::var_os(&variable).filter(|v| !v.is_empty()) {
                let value = value.to_string_lossy().into_owned();
                found.add(key, value, variable);
            }
        }
        for path in [Some(PathBuf::from(PROJECT)), own_file()] {
            match path {
                Some(path) if path.is_file() => found.read(&path)?,
                _ => {}
            }
        }
        Ok(found)
    }

    fn add(&mut self, key: &'static str, value: String, origin: String) {
        if self.get(key).is_none() {
            self.0.push(Setting { key, value, origin });
        }
    }

    fn read(&mut self, path: &std::path::Path) -> Result<(), Mistake> {
        let shown = path.display().to_string();
        let written = text::read(path).map_err(|e| e.mistake())?;
        let document = Document::parse(written.as_str()).map_err(|e| {
            let before = e.span().and_then(|span| written.get(..span.start));
            let line = before.map(|text| format!(", line {}", text.matches('\n').count() + 1));
            let place = format!("{shown}{}", line.unwrap_or_default());
            Mistake::new(e.message().to_owned()).at(place)
        })?;
        for (key, item) in document.as_table() {
            let plain = key.replace('_', "-");
            let Some((known, _)) = KEYS.into_iter().find(|(known, _)| *known == plain) else {
                let names = KEYS.map(|(name, _)| name);
                return Err(Mistake::new(format!("unknown key `{key}`"))
                    .at(&shown)
                    .expected(format!("one of {}", names.join(", ")))
                    .nearest(catalog::suggest::nearest(&plain, names))
                    .example("model = \"llama3-70b\""));
            };
            let value = match item.as_value() {
                Some(Value::String(s)) => s.value().clone(),
                Some(Value::Integer(i)) => i.value().to_string(),
                Some(Value::Float(f)) => f.value().to_string(),
                _ => {
                    return Err(Mistake::new("is neither a text nor a number")
                        .at(format!("{shown}, `{key}`"))
                        .expected("one value")
                        .example("seq = \"8k\""));
                }
            };
            self.add(known, value, shown.clone());
        }
        Ok(())
    }

    /// The setting of a flag, if there is one; `key` is the flag's name without `--`.
    pub(crate) fn get(&self, key: &str) -> Option<&Setting> {
        self.0.iter().find(|setting| setting.key == key)
    }

    /// Which variable or file set a refused value; `None` if it was given on the command line.
    pub(crate) fn place_of(&self, option: &str, value: &str) -> Option<String> {
        let flag = option.trim_start_matches('-').split(' ').next()?;
        let setting = self.get(flag).filter(|s| s.value == value)?;
        said_by(setting)
    }

    /// The place of a mistake that was found after the command line was read: the variable or file that sets its flag, if that is no flag of
    /// the command line.
    pub(crate) fn origin_of(&self, place: &str) -> Option<String> {
        let (flag, _) = place.strip_prefix("--")?.split_once(' ')?;
        said_by(self.get(flag)?)
    }

    /// The error of the first default that its flag does not take.
    pub(crate) fn refused(&self, command: &clap::Command) -> Option<clap::Error> {
        self.0.iter().find_map(|setting| {
            let takes = |sub: &clap::Command| {
                let mut flags = sub.get_arguments();
                flags.any(|arg| arg.get_long() == Some(setting.key))
            };
            let takes = |name: &&str| command.find_subcommand(name).is_some_and(takes);
            let name = COMMANDS.into_iter().find(takes).unwrap_or(COMMANDS[0]);
            let flag = format!("--{}={}", setting.key, setting.value);
            let words = ["vescale-plan", name, &flag];
            let error = command.clone().try_get_matches_from(words).err()?;
            let of_value = [ErrorKind::ValueValidation, ErrorKind::InvalidValue];
            of_value.contains(&error.kind()).then_some(error)
        })
    }

    /// The command line's definition with these settings as defaults of its flags.
    pub(crate) fn as_defaults_of(&self, mut command: clap::Command) -> clap::Command {
        for name in COMMANDS {
            command = command.mut_subcommand(name, |sub| {
                let flags: Vec<(String, String)> = sub
                    .get_arguments()
                    .filter_map(|arg| {
                        let setting = self.get(arg.get_long()?)?;
                        Some((arg.get_id().to_string(), setting.value.clone()))
                    })
                    .collect();
                flags.into_iter().fold(sub, |sub, (id, value)| {
                    sub.mut_arg(id, |arg| arg.default_value(value).required(false))
                })
            });
        }
        match self.get("color") {
            Some(color) => {
                let value = color.value.clone();
                command.mut_arg("color", |arg| arg.default_value(value))
            }
            None => command,
        }
    }
}

/// Which variable or file says a default, and what; `None` if the command line has its flag.
fn said_by(setting: &Setting) -> Option<String> {
    let Setting { key, value, origin } = setting;
    let on_line = words::given().any(|word| word.trim_start_matches('-').starts_with(key));
    (!on_line).then(|| format!("{origin}: {key} = {value}"))
}

/// Name of the environment variable that sets a flag's default.
pub(crate) fn variable(key: &str) -> String {
    format!("VESCALE_PLAN_{}", key.replace('-', "_").to_uppercase())
}

/// Path of the user's own settings file; `None` where no home folder is known.
pub(crate) fn own_file() -> Option<PathBuf> {
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".config"));
    let folder = std::env::var_os("XDG_CONFIG_HOME").filter(|v| !v.is_empty());
    let folder = folder.map(PathBuf::from).or_else(home)?;
    Some(folder.join("vescale-plan").join("config.toml"))
}

/// When to colour, read from the words of the command line before they are parsed: help and mistakes are coloured too.
pub(crate) fn color_of_words(words: impl Iterator<Item = String>) -> ColorArg {
    let words: Vec<String> = words.collect();
    let after = words.windows(2).filter(|pair| pair[0] == "--color");
    let after = after.map(|pair| pair[1].as_str());
    let within = words
        .iter()
        .filter_map(|word| word.strip_prefix("--color="));
    let said = after.chain(within).last().map(str::to_owned);
    let said = said.or_else(|| std::env::var(variable("color")).ok());
    said.and_then(|word| ColorArg::from_str(&word, true).ok())
        .unwrap_or(ColorArg::Auto)
}
