//! Checkpoints, weights of the Hugging Face hub and token files: what `run` and `checkpoint` open.

use std::path::Path;
use std::time::Duration;

use catalog::Precision;
use cpu_device::Numerics;
use dtensor::train::StatesPlan;
use executor::checkpoint::{Checkpoint, HubWeights, Manifest, Source};
use executor::{AdamW, Dataset, Execution, Job, Observer, Session, Settings, StepReport};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::mutate;
use crate::outcome::Outcome;
use crate::rng::Rng;
use crate::scene;
use crate::target::{Depth, Pool, Target};
use crate::tree;

/// Largest number of elements read of one parameter.
const MOST_READ: u64 = 1 << 14;
/// Bytes before the header of a rank's file: eight of magic, eight of the header's length.
const FRONT: usize = 16;

/// Packs the files of a folder into one input: for each, a line with name and length, then content.
fn packed(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut all = Vec::new();
    for (name, content) in files {
        all.extend(format!("{name} {}\n", content.len()).into_bytes());
        all.extend(content);
    }
    all
}

fn unpacked(mut input: &[u8]) -> Option<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    while !input.is_empty() {
        let end = input.iter().position(|b| *b == b'\n')?;
        let (name, length) = std::str::from_utf8(&input[..end]).ok()?.split_once(' ')?;
        let plain = name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '.');
        let content = input.get(end + 1..(end + 1).checked_add(length.parse().ok()?)?)?;
        if !plain || name.starts_with('.') {
            return None;
        }
        files.push((name.to_owned(), content.to_vec()));
        input = &input[end + 1 + content.len()..];
    }
    Some(files)
}

struct Quiet;

impl Observer for Quiet {
    fn step(&self, _: &StepReport) {}
}

/// A checkpoint of two ranks of a very small model, as training writes it.
fn written(strategy: &str) -> Option<Vec<u8>> {
    let folder = tempfile::tempdir().ok()?;
    let config = r#"{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8,
        "vocab_size": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}"#;
    let model = catalog::hf::decode(config, "config.json", "small").ok()?;
    let workload = scene::workload(2, 8, 4, Precision::Fp32).ok()?;
    let runtime = scene::runtime("vescale").ok()?;
    let strategy = plans::grammar::parse(strategy, &model, &workload, &runtime).ok()?;
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "abcdefgh".repeat(40)).ok()?;
    let data = Dataset::read(&text, 16, 8).ok()?;
    let settings = Settings {
        seed: 7,
        steps: 1,
        numerics: Numerics::Exact,
        execution: Execution::Replayed,
        dropout_by_rank: false,
        gradient_bucket: StatesPlan::BUCKET,
        optimizer: AdamW::default(),
        timeout: Duration::from_secs(60),
    };
    let job = Job::new(model, strategy, &workload, data, settings).ok()?;
    let saved = executor::Checkpoints::of(&job, &folder.path().join("saved"), 1);
    let session = Session {
        job: &job,
        start: None,
        checkpoints: Some(&saved),
        observer: &Quiet,
        watch: None,
    };
    executor::train(&session).ok()?;
    let last = executor::checkpoint::latest(&saved.dir).ok()??;
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    for entry in std::fs::read_dir(last).ok()? {
        let path = entry.ok()?.path();
        let name = path.file_name()?.to_str()?.to_owned();
        files.push((name, std::fs::read(&path).ok()?));
    }
    files.sort();
    Some(packed(&files))
}

/// Makes the manifest agree with the changed files, so that readers get beyond its checksums.
fn signed(files: &mut [(String, Vec<u8>)]) -> Option<()> {
    let contents = files.to_vec();
    let (_, manifest) = files.iter_mut().find(|(name, _)| name == "manifest.json")?;
    let mut tree: Value = serde_json::from_slice(manifest).ok()?;
    for entry in tree.get_mut("files")?.as_array_mut()? {
        let (_, content) = contents
            .iter()
            .find(|(name, _)| entry.get("name").is_some_and(|n| n == name.as_str()))?;
        let length = content
            .get(8..FRONT)?
            .try_into()
            .map(u64::from_le_bytes)
            .ok()?;
        let header = content.get(FRONT..FRONT.checked_add(usize::try_from(length).ok()?)?)?;
        let entry = entry.as_object_mut()?;
        entry.insert("bytes".to_owned(), json!(content.len()));
        let digest = Sha256::digest(header);
        let digest: String = digest.iter().map(|b| format!("{b:02x}")).collect();
        entry.insert("header_sha256".to_owned(), digest.into());
    }
    *manifest = sealed(&tree);
    Some(())
}

/// Writes a manifest with a valid checksum; a tree that is no manifest is written as it is.
fn sealed(tree: &Value) -> Vec<u8> {
    let manifest = serde_json::from_value::<Manifest>(tree.clone());
    let text = match manifest {
        Ok(manifest) => serde_json::to_vec_pretty(&manifest.sealed()),
        Err(_) => serde_json::to_vec(tree),
    };
    text.unwrap_or_default()
}

/// Changes the JSON header of a file; its length is at offset `at`, right before it.
fn header(content: &mut Vec<u8>, at: usize, pool: &Pool, rng: &mut Rng) -> Option<()> {
    let length = content
        .get(at..at + 8)?
        .try_into()
        .map(u64::from_le_bytes)
        .ok()?;
    let end = (at + 8).checked_add(usize::try_from(length).ok()?)?;
    let mut tree: Value = serde_json::from_slice(content.get(at + 8..end)?).ok()?;
    tree::change(&mut tree, pool, rng);
    let new = serde_json::to_vec(&tree).ok()?;
    let length = (new.len() as u64).to_le_bytes();
    content.splice(at..end, length.into_iter().chain(new));
    Some(())
}

/// Folders of a checkpoint: a manifest and one file for each rank.
pub(super) fn checkpoints() -> Target {
    Target {
        use_every: 4,
        ..Target::new(
            "checkpoints",
            checkpoints_seeds,
            checkpoints_changed,
            checkpoints_read,
        )
    }
}

fn checkpoints_seeds() -> Vec<Vec<u8>> {
    let made = ["tp=2,sp=on", "pp=2", "dp_shard=2,zero=3"].map(written);
    made.into_iter().flatten().collect()
}

fn checkpoints_changed(pool: &Pool, rng: &mut Rng) -> Vec<u8> {
    let input = pool.pick(rng);
    let Some(mut files) = unpacked(input) else {
        return mutate::bytes(input, rng);
    };
    let at = rng.below(files.len());
    let (name, content) = &mut files[at];
    if name == "manifest.json" || rng.percent(20) {
        let found = files.iter_mut().find(|(name, _)| name == "manifest.json");
        if let Some((_, manifest)) = found
            && let Ok(mut tree) = serde_json::from_slice(manifest)
        {
            tree::change(&mut tree, pool, rng);
            *manifest = if rng.percent(80) {
                sealed(&tree)
            } else {
                serde_json::to_vec(&tree).unwrap_or_default()
            };
        }
    } else if rng.percent(70) {
        let _ = header(content, 8, pool, rng);
        if rng.percent(85) {
            let _ = signed(&mut files);
        }
    } else {
        *content = mutate::bytes(content, rng);
        if rng.percent(50) {
            let _ = signed(&mut files);
        }
    }
    packed(&files)
}

fn checkpoints_read(input: &[u8], depth: Depth) -> Outcome {
    let Some(files) = unpacked(input) else {
        return Outcome::malformed(&"no list of files");
    };
    let Ok(folder) = tempfile::tempdir() else {
        return Outcome::malformed(&"no temporary folder");
    };
    let inside = folder.path().join("step-00000001");
    let _ = std::fs::create_dir(&inside);
    for (name, content) in &files {
        let _ = std::fs::write(inside.join(name), content);
    }
    let manifest = files.iter().find(|(name, _)| name == "manifest.json");
    let json = manifest.is_some_and(|(_, m)| serde_json::from_slice::<Value>(m).is_ok());
    let checkpoint = match Checkpoint::open(folder.path()) {
        Ok(checkpoint) => checkpoint,
        Err(error) if json => return Outcome::refused(&without(folder.path(), &error)),
        Err(error) => return Outcome::malformed(&without(folder.path(), &error)),
    };
    let wrong = checkpoint.verify();
    let mut outcome = match wrong.first() {
        Some(error) => Outcome::refused(&without(folder.path(), error)),
        None => Outcome::accepted(format!("{} parameters", checkpoint.parameters().len())),
    };
    for parameter in checkpoint.parameters() {
        let elements: u64 = parameter.shape.iter().fold(1, |n, d| n.saturating_mul(*d));
        outcome.expect(
            !wrong.is_empty() || 12 * elements <= input.len() as u64,
            || format!("whole, with {elements} elements in {} bytes", input.len()),
        );
        if let Err(error) = states(&checkpoint, &parameter.name, &parameter.shape) {
            outcome.expect(!wrong.is_empty(), || {
                format!("whole, but: {}", without(folder.path(), &error))
            });
        }
    }
    if depth == Depth::Use {
        let to = folder.path().join("weights.safetensors");
        match checkpoint.safetensors() {
            Ok(weights) => {
                let written = std::fs::write(&to, weights);
                let again = written.map(|()| HubWeights::open(&to));
                let again = again.is_ok_and(|again| again.is_ok());
                outcome.expect(again, || "exported weights are not read".to_owned());
            }
            Err(error) => outcome.expect(!wrong.is_empty(), || {
                format!("whole, not exported: {}", without(folder.path(), &error))
            }),
        }
    }
    outcome
}

/// An error without the folder's name, which differs from run to run.
fn without(folder: &Path, error: &impl ToString) -> String {
    error.to_string().replace(&folder.display().to_string(), "")
}

/// Reads the first elements of a parameter.
fn states(source: &dyn Source, name: &str, shape: &[u64]) -> Result<(), executor::ExecutorError> {
    let elements: u64 = shape.iter().fold(1, |n, d| n.saturating_mul(*d));
    let count = elements.min(MOST_READ) as usize;
    let mut into = [vec![0.0; count], vec![0.0; count], vec![0.0; count]];
    let [weights, momentum, variance] = &mut into;
    source.read(name, shape, 0, [weights, momentum, variance])
}

/// `.safetensors` files.
pub(super) fn safetensors() -> Target {
    Target::new(
        "safetensors",
        safetensors_seeds,
        safetensors_changed,
        safetensors_read,
    )
}

fn safetensors_seeds() -> Vec<Vec<u8>> {
    let tensors = [
        ("model.embed_tokens.weight", "F32", vec![4, 8], 128),
        (
            "transformer.h.0.attn.c_attn.weight",
            "BF16",
            vec![8, 24],
            384,
        ),
        (
            "model.layers.0.mlp.experts.gate_up_proj",
            "F16",
            vec![2, 4, 8],
            128,
        ),
        ("model.norm.weight", "F32", vec![8], 32),
    ];
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, dtype, shape, bytes) in tensors {
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]});
        header.insert(name.to_owned(), entry);
        at += bytes;
    }
    let mut text = serde_json::to_vec(&header).unwrap_or_default();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend(text);
    file.resize(file.len() + at, 0x3c);
    vec![file]
}

fn safetensors_changed(pool: &Pool, rng: &mut Rng) -> Vec<u8> {
    let mut input = pool.pick(rng).to_vec();
    if rng.percent(70) && header(&mut input, 0, pool, rng).is_some() {
        return input;
    }
    mutate::bytes(&input, rng)
}

fn safetensors_read(input: &[u8], _: Depth) -> Outcome {
    let Ok(folder) = tempfile::tempdir() else {
        return Outcome::malformed(&"no temporary folder");
    };
    let path = folder.path().join("model.safetensors");
    let _ = std::fs::write(&path, input);
    let tree = tensors(input);
    let hub = match HubWeights::open(&path) {
        Ok(hub) => hub,
        Err(error) if tree.is_some() => {
            return Outcome::refused(&without(folder.path(), &error));
        }
        Err(error) => return Outcome::malformed(&without(folder.path(), &error)),
    };
    let mut outcome = Outcome::accepted("");
    for (name, shape) in tree.unwrap_or_default() {
        let names = [
            name.clone(),
            format!("{name}.0.gate.weight"),
            format!("{name}.1.up.weight"),
            format!("{name}.9.weight"),
        ];
        let turned: Vec<u64> = shape.iter().rev().copied().collect();
        for name in names {
            for shape in [&shape, &turned, &Vec::new(), &vec![4, 4], &vec![0]] {
                if let Err(error) = states(&hub, &name, shape) {
                    let kind = crate::outcome::kind(&without(folder.path(), &error));
                    if outcome.class.len() < 400 && !outcome.class.contains(&kind) {
                        outcome.class.push_str(&kind);
                    }
                }
            }
        }
    }
    outcome
}

/// Names and shapes in a file's header.
fn tensors(input: &[u8]) -> Option<Vec<(String, Vec<u64>)>> {
    let length = input.get(..8)?.try_into().map(u64::from_le_bytes).ok()?;
    let end = usize::try_from(length).ok()?.checked_add(8)?;
    let tree: Value = serde_json::from_slice(input.get(8..end)?).ok()?;
    let shape = |v: &Value| {
        v["shape"]
            .as_array()
            .map(|s| s.iter().filter_map(Value::as_u64).collect())
    };
    Some(
        tree.as_object()?
            .iter()
            .filter_map(|(k, v)| Some((k.clone(), shape(v)?)))
            .collect(),
    )
}

/// Text and token files.
pub(super) fn token_files() -> Target {
    Target::new(
        "token-files",
        token_files_seeds,
        |pool, rng| mutate::bytes(pool.pick(rng), rng),
        token_files_read,
    )
}

fn token_files_seeds() -> Vec<Vec<u8>> {
    let words: Vec<u8> = (0..64u16).flat_map(|t| (t % 16).to_le_bytes()).collect();
    let wide: Vec<u8> = (0..64u32).flat_map(|t| (t % 16).to_le_bytes()).collect();
    let with = |kind: &str, content: &[u8]| [kind.as_bytes(), content].concat();
    vec![
        with("txt 16 8\n", &b"the quick brown fox ".repeat(4)),
        with("txt 256 8\n", "naïve ☃ text, long enough".as_bytes()),
        with("bin 16 8\n", &words),
        with("bin 65536 1\n", &words),
        with("bin 16 8\n", &wide),
    ]
}

fn token_files_read(input: &[u8], _: Depth) -> Outcome {
    let split = input.iter().position(|b| *b == b'\n');
    let (line, content) = input.split_at(split.map_or(input.len(), |at| at + 1));
    let line = String::from_utf8_lossy(line).into_owned();
    let mut words = line.split_whitespace();
    let kind = words.next().filter(|kind| matches!(*kind, "txt" | "bin"));
    let (Some(kind), Some(Ok(vocab)), Some(Ok(seq))) = (
        kind,
        words.next().map(str::parse::<u64>),
        words.next().map(str::parse::<u64>),
    ) else {
        return Outcome::malformed(&"no kind, vocabulary and sequence");
    };
    let Ok(folder) = tempfile::tempdir() else {
        return Outcome::malformed(&"no temporary folder");
    };
    let path = folder.path().join(format!("tokens.{kind}"));
    let _ = std::fs::write(&path, content);
    let data = match Dataset::read(&path, vocab, seq) {
        Ok(data) => data,
        Err(error) => return Outcome::refused(&without(folder.path(), &error)),
    };
    let mut outcome = Outcome::accepted(kind);
    outcome.expect(data.len() as u64 > seq, || {
        "shorter than a sequence".to_owned()
    });
    let known = (0..data.len()).all(|at| u64::from(data.token(at)) < vocab);
    outcome.expect(known, || "a token beyond the vocabulary".to_owned());
    for sequence in [0, 1, u64::MAX] {
        let start = data.start(7, sequence, seq) as u64;
        outcome.expect(start.saturating_add(seq) < data.len() as u64, || {
            format!("sequence {sequence} starts at {start}")
        });
    }
    outcome
}
