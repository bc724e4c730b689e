//! Names and paths from outside are data in every exported file: they read back as they are, and nothing of
//! them becomes a line, a key, a word or a statement of its own.

use catalog::model::ModelConfig;
use catalog::{Precision, Workload, WorkloadSizes};
use interop::config::{Node, Value, escape, python, toml, write, yaml};
use interop::export::{Dialect, Exported, Inputs, Job, Launcher, export};
use interop::import::Document;
use plans::plan_file::ShardingFile;
use proptest::prelude::*;

/// A name that occurs nowhere else in a file.
const SAFE: &str = "benignmodelname";

const LAUNCHERS: [Option<Launcher>; 4] = [
    None,
    Some(Launcher::Torchrun),
    Some(Launcher::Slurm),
    Some(Launcher::Kubernetes),
];

/// Texts that could break out of one format or another.
const PIECES: [&str; 28] = [
    "'",
    "\"",
    "\"\"\"",
    "'''",
    "`touch PWNED`",
    "$(touch PWNED)",
    "${HOME}",
    "\\",
    "\n",
    "\r",
    "\ntouch PWNED\n",
    "; touch PWNED;",
    "\u{1b}[2J",
    "</script><script>x()</script>",
    "../../etc",
    "# ",
    ": ",
    "- ",
    "{x: 1}",
    "[a]",
    "\u{202e}",
    "\u{2028}",
    "\u{85}",
    "&a",
    "*a",
    "%",
    "\t",
    "é中😀",
];

fn hostile() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => proptest::sample::select(PIECES.to_vec()).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
        1 => Just("a".to_owned()),
    ];
    proptest::collection::vec(piece, 1..6).prop_map(|pieces| pieces.concat())
}

/// A plan that the target takes, for a model of that name.
fn exported(name: &str, dialect: Dialect, launcher: Option<Launcher>) -> Exported {
    // nanotron has no model with the rotation of Llama 3.1.
    let preset = if dialect == Dialect::Nanotron {
        "llama2-7b"
    } else {
        "llama3-8b"
    };
    let model = catalog::load::model(preset).expect("preset");
    let mut named = ModelConfig::clone(&model);
    name.clone_into(&mut named.name);
    let workload = Workload::new(WorkloadSizes {
        gpus: 16,
        seq_len: 4096,
        global_batch: 64,
        precision: Precision::Bf16,
    })
    .expect("a workload");
    let runtime = catalog::load::runtime("vescale").expect("preset");
    let zero = match dialect {
        Dialect::Torchtitan02
        | Dialect::Torchtitan03
        | Dialect::TorchtitanMain
        | Dialect::Accelerate
        | Dialect::Axolotl
        | Dialect::Transformers => 3,
        Dialect::Nanotron => 0,
        _ => 1,
    };
    let text = format!("tp=1,pp=1,zero={zero},mbs=1,overlap=grad+param+pp");
    let plan = plans::grammar::parse(&text, &model, &workload, &runtime).expect("legal");
    let mut sharding = ShardingFile::default();
    let placement = vec!["tp: Shard(0)".to_owned()];
    sharding.parameter.insert(name.to_owned(), placement);
    let cluster = catalog::load::cluster("dgx-h100").expect("preset");
    let job = Job {
        model: &named,
        decisions: plan.decisions(),
        workload: &workload,
        runtime: &runtime,
        sharding: &sharding,
        id: "0123456789abcdef",
        cluster: &cluster,
        inputs: Inputs::default(),
    };
    export(&job, dialect, launcher).unwrap_or_else(|e| panic!("{dialect:?}: {e}"))
}

/// Texts of a tree in order, each with its place.
fn texts(node: &Node, at: &str, found: &mut Vec<(String, String)>) {
    match &node.value {
        Value::Table(entries) | Value::Call(_, entries) => {
            for (key, node) in entries {
                texts(node, &format!("{at}.{key}"), found);
            }
        }
        Value::List(items) => items.iter().for_each(|item| texts(item, at, found)),
        Value::Str(text) => found.push((at.to_owned(), text.clone())),
        other => found.push((at.to_owned(), format!("{other:?}"))),
    }
}

/// The places of all texts in the documents of a manifest; a name must not change them.
fn places(manifest: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, document) in manifest.split("\n---\n").enumerate() {
        let root = yaml::parse(document, "x").unwrap_or_else(|e| panic!("{e}\n{manifest}"));
        texts(&root, &at.to_string(), &mut found);
    }
    found
        .into_iter()
        .map(|(at, _)| at.replace(SAFE, "NAME"))
        .collect()
}

/// The texts that a training system reads from an exported file, with their places.
fn read_back(name: &str, text: &str, dialect: Dialect) -> Vec<(String, String)> {
    let document = Document::read(text, name, Some(dialect), &|_| None);
    let document = document.unwrap_or_else(|e| panic!("{e}\n{text}"));
    let mut found = Vec::new();
    texts(&document.root, "", &mut found);
    found
}

/// Asserts that a line's key is a Python literal of this text.
fn literal(line: &str, text: &str) {
    let key = line.trim_start().strip_suffix(": [Shard(0)],").expect(line);
    // Python reads the escapes of JSON in the same way.
    let read = match key.strip_prefix("r\"").and_then(|k| k.strip_suffix('"')) {
        Some(raw) => {
            assert!(!raw.contains('"') && !raw.ends_with('\\'), "{line}");
            raw.to_owned()
        }
        None => serde_json::from_str(key).expect(line),
    };
    let text = text.replace(r"\{expert\}", r"\d+");
    assert_eq!(read, text);
}

/// Asserts that files exported for a hostile name differ from those for a benign one in the name
/// only.
fn same_but_for_the_name(name: &str, dialect: Dialect, launcher: Option<Launcher>) {
    let (ours, theirs) = (
        exported(SAFE, dialect, launcher),
        exported(name, dialect, launcher),
    );
    assert_eq!(ours.files.len(), theirs.files.len());
    for (benign, hostile) in ours.files.iter().zip(&theirs.files) {
        assert_eq!(benign.name, hostile.name);
        if launcher == Some(Launcher::Kubernetes) && hostile.name.ends_with(".yaml") {
            assert_eq!(
                places(&hostile.text),
                places(&benign.text),
                "{}",
                hostile.text
            );
        }
        let control = hostile
            .text
            .chars()
            .find(|&c| c != '\n' && catalog::names::is_control(c));
        assert_eq!(
            control, None,
            "{dialect:?} {}\n{}",
            hostile.name, hostile.text
        );
        let (a, b) = (benign.text.lines(), hostile.text.lines());
        assert_eq!(a.clone().count(), b.clone().count(), "{}", hostile.text);
        for (a, b) in a.zip(b) {
            match a.find(SAFE) {
                None => assert_eq!(a, b),
                // A key of a Python literal.
                Some(_) if a.ends_with(": [Shard(0)],") => literal(b, &format!(r"(.*\.)?{name}")),
                Some(start) => assert!(b.starts_with(&a[..start]), "{b}"),
            }
        }
    }
    let (benign, hostile) = (&ours.files[0], &theirs.files[0]);
    let mut expected = read_back(&benign.name, &benign.text, dialect);
    for (at, text) in &mut expected {
        *at = at.replace(SAFE, name);
        *text = text.replace(SAFE, name);
    }
    // veScale's patterns are keys of a Python literal, which is read as an expression.
    if dialect != Dialect::VeScale {
        assert_eq!(read_back(&hostile.name, &hostile.text, dialect), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn names_are_data_in_every_export(name in hostile()) {
        for &dialect in Dialect::ALL {
            for launcher in LAUNCHERS {
                same_but_for_the_name(&name, dialect, launcher);
            }
        }
    }
}

#[test]
fn each_hostile_piece_is_data_in_every_export() {
    for piece in PIECES {
        for &dialect in Dialect::ALL {
            same_but_for_the_name(&format!("a{piece}b"), dialect, Some(Launcher::Kubernetes));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    /// The texts of a tree are read back unchanged from every format.
    #[test]
    fn texts_read_back_from_every_format(text in hostile()) {
        let mut root = Node::table();
        root.set("section.key", text.as_str());
        root.set("section.other", 1);
        for (parsed, format) in [
            (yaml::parse(&write::yaml(&root), "x"), "YAML"),
            (toml::parse(&write::toml(&root), "x"), "TOML"),
            (interop::config::json::parse(&write::json(&root), "x"), "JSON"),
        ] {
            let parsed = parsed.unwrap_or_else(|e| panic!("{format}: {e}"));
            let found = parsed.at("section.key").and_then(Node::text);
            prop_assert_eq!(found, Some(text.as_str()), "{}", format);
        }
        let assigned = format!("x = {}\n", escape::quoted(&text));
        let parsed = python::parse(&assigned, "x").expect("Python");
        prop_assert_eq!(parsed.len(), 1);
        prop_assert_eq!(parsed[0].node.text(), Some(text.as_str()));
        let documented = format!("\"\"\"{}.\"\"\"\n\nx = 1\n", escape::docstring(&text));
        let parsed = python::parse(&documented, "x").expect("Python");
        prop_assert_eq!(parsed.len(), 1, "{}", documented);
        let word = escape::shell(&text);
        let script = interop::config::shell::parse(&format!("run {word}\n"), "x", &|_| None, &Default::default());
        let script = script.expect("a script");
        let words: Vec<&str> = script.commands[0].iter().map(|w| w.text.as_str()).collect();
        prop_assert_eq!(script.commands.len(), 1);
        prop_assert_eq!(words, vec!["run", text.as_str()]);
    }
}
