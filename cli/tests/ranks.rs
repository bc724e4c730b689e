//! Ranks that are processes, and the data they train on, as a user meets them.

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vescale-plan"));
    command.args(args).current_dir(folder).env("NO_COLOR", "1");
    command
}

fn run(folder: &Path, args: &[&str]) -> Output {
    command(folder, args).output().expect("the binary starts")
}

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

fn example(path: &str) -> String {
    let path = examples().join(path);
    path.to_str().expect("a path in UTF-8").to_owned()
}

/// Writes `p.yaml`, a plan with `strategy` for a model on `gpus` ranks, with few tokens per step.
fn plan(folder: &Path, model: &str, gpus: u64, strategy: &str) {
    let (model, gpus) = (example(model), gpus.to_string());
    let batch = [
        "--seq",
        "16",
        "--global-batch",
        &gpus,
        "--precision",
        "fp32",
    ];
    let args = ["estimate", "--model", &model, "--runtime", "vescale", "-q"];
    let more = ["--gpus", &gpus, "--strategy", strategy, "-o", "p.yaml"];
    let output = run(folder, &[&args[..], &batch, &more].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
}

/// A port that is free now.
fn port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("its address").port()
}

/// A rank, which does not outlive its test.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Rank {
    /// Starts a rank of `p.yaml` as a launcher does; each writes its own log.
    fn start(folder: &Path, [rank, world]: [usize; 2], port: u16, more: &[&str]) -> Self {
        let (data, log) = (example("data/tales.txt"), format!("log{rank}.jsonl"));
        let args = ["run", "p.yaml", "--communicator", "tcp", "--data", &data];
        let child = command(folder, &[&args[..], &["--log", &log], more].concat())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        Self(child.expect("the binary starts"))
    }

    #[cfg(unix)]
    fn signal(&self, signal: &str) {
        let pid = self.0.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status();
        assert!(sent.expect("`kill` starts").success());
    }

    /// Waits until it ends; returns its exit code and output, and how long it took.
    fn ended(mut self, within: Duration) -> (Option<i32>, String, Duration) {
        let began = Instant::now();
        while began.elapsed() < within {
            if self.0.try_wait().expect("it is ours").is_some() {
                let took = began.elapsed();
                let mut said = String::new();
                let stderr = self.0.stderr.as_mut().expect("piped");
                std::io::Read::read_to_string(stderr, &mut said).expect("UTF-8");
                return (self.0.wait().expect("ended").code(), said, took);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("process {} did not end in {within:?}", self.0.id());
    }
}

/// Waits until a rank has logged `count` steps.
fn steps(folder: &Path, count: usize) {
    let began = Instant::now();
    let log = folder.join("log0.jsonl");
    while fs::read_to_string(&log).map_or(0, |log| log.lines().count()) < count {
        assert!(
            began.elapsed() < Duration::from_secs(120),
            "no step is done"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A rank that is stopped, not ended, while gradients of 43 MB travel: the others end by the timeout and name it.
#[cfg(unix)]
#[test]
fn a_stopped_rank_ends_the_others_in_time() {
    let timeout = Duration::from_secs(3);
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    plan(
        folder,
        "nanogpt-10m/config.json",
        3,
        "dp_replicate=3,zero=0,mbs=1",
    );
    let port = port();
    let more = ["--timeout", "3", "--steps", "1000000"];
    let [first, second, third] = [0, 1, 2].map(|rank| Rank::start(folder, [rank, 3], port, &more));
    steps(folder, 2);
    second.signal("-STOP");
    let stopped = Instant::now();
    for rank in [first, third] {
        let (code, said, _) = rank.ended(Duration::from_secs(30));
        let took = stopped.elapsed();
        assert!(took < timeout + Duration::from_secs(2), "{took:?}: {said}");
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("rank 1"), "{said}");
    }
}

/// A rank that is killed in the middle of a block: no bad input, so exit code 1.
#[cfg(unix)]
#[test]
fn a_killed_rank_is_named_and_no_bad_input() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    plan(folder, "nanogpt/config.json", 2, "tp=2,mbs=1");
    let port = port();
    let more = ["--timeout", "60", "--steps", "1000000", "-q"];
    let [first, second] = [0, 1].map(|rank| Rank::start(folder, [rank, 2], port, &more));
    steps(folder, 2);
    second.signal("-KILL");
    let (code, said, took) = first.ended(Duration::from_secs(30));
    assert!(took < Duration::from_secs(5), "{took:?}: {said}");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("because rank 1 failed"), "{said}");
    assert!(
        said.lines().skip(1).all(|line| line.starts_with("  ")),
        "{said}"
    );
}

#[test]
fn strangers_do_not_stop_a_job() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    plan(folder, "nanogpt/config.json", 2, "dp_shard=2,zero=1,mbs=1");
    let port = port();
    let more = ["--timeout", "60", "--steps", "1", "-q"];
    let first = Rank::start(folder, [0, 2], port, &more);
    let greetings: [&[u8]; 3] = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"vescale1\x07\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0",
    ];
    let strangers: Vec<TcpStream> = greetings
        .iter()
        .map(|says| {
            let mut stream = loop {
                if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                    break stream;
                }
                std::thread::sleep(Duration::from_millis(10));
            };
            let _ = stream.write_all(says);
            stream
        })
        .collect();
    let second = Rank::start(folder, [1, 2], port, &more);
    for rank in [first, second] {
        let (code, said, took) = rank.ended(Duration::from_secs(40));
        assert_eq!(code, Some(0), "{took:?}: {said}");
    }
    drop(strangers);
}

#[test]
fn ranks_of_several_hosts_need_a_secret() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let plan = example("nanogpt-tp2-pp2.yaml");
    let args = ["run", &plan, "--communicator", "tcp", "--timeout", "1"];
    let with = |secret: &[(&str, &str)]| {
        let place = [
            ("RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("MASTER_ADDR", "192.0.2.1"),
        ];
        let mut command = command(folder.path(), &args);
        let all = place.iter().chain(secret).copied();
        let output = command.envs(all).output().expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let (code, said) = with(&[]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("in VESCALE_JOB_SECRET, or"), "{said}");
    let (code, said) = with(&[("VESCALE_JOB_SECRET", "too-short")]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("VESCALE_JOB_SECRET: has 9 characters"),
        "{said}"
    );
    let (code, said) = with(&[("VESCALE_JOB_SECRET_FILE", "nowhere")]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("VESCALE_JOB_SECRET_FILE: nowhere: "),
        "{said}"
    );
    let long = "0123456789abcdef";
    let (code, said) = with(&[("VESCALE_JOB_SECRET", long)]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("rank 0 did not answer"), "{said}");
    assert!(!said.contains(long), "{said}");
}

#[test]
fn tokens_of_either_width_train_alike() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    let tokens: Vec<u32> = (0..4096u32)
        .map(|i| i.wrapping_mul(2_654_435_761) >> 25)
        .collect();
    let bytes = |width: usize| -> Vec<u8> {
        let bytes = tokens.iter().map(|token| token.to_le_bytes());
        bytes.flat_map(|bytes| bytes[..width].to_vec()).collect()
    };
    for (name, width) in [
        ("a.bin", 2),
        ("a.u16.bin", 2),
        ("a.u32.bin", 4),
        ("wrong.bin", 4),
    ] {
        fs::write(folder.join(name), bytes(width)).expect("written");
    }
    fs::write(folder.join("a.jsonl"), "{\"text\": \"once\"}\n".repeat(20)).expect("written");
    let single = example("nanogpt-single.yaml");
    let trained = |data: &str| {
        run(
            folder,
            &["run", &single, "--steps", "1", "--data", data, "--json"],
        )
    };
    let weights = |data: &str| {
        let output = trained(data);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{said}");
        let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        answer["weights_sha256"].clone()
    };
    let wanted = weights("a.bin");
    assert_eq!(weights("a.u16.bin"), wanted);
    assert_eq!(weights("a.u32.bin"), wanted);
    for (data, says) in [
        ("wrong.bin", "name such a file .u32.bin"),
        ("a.jsonl", "its name says no format of training data"),
    ] {
        let output = trained(data);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(says), "{said}");
    }
}

#[test]
fn what_is_beyond_runs_limits_says_what_to_do() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let folder = folder.path();
    let refused = |args: &[&str], says: &str| {
        let output = run(folder, args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(says), "{said}");
    };
    // A vocabulary of a tokenizer, on text.
    let config = fs::read_to_string(examples().join("nanogpt/config.json")).expect("readable");
    let config = config.replace("\"vocab_size\": 128", "\"vocab_size\": 50257");
    fs::write(folder.join("config.json"), config).expect("written");
    let (tales, model) = (example("data/tales.txt"), example("nanogpt/config.json"));
    let estimate = |model: &str, gpus: &str, strategy: &str| {
        let args = ["estimate", "--model", model, "--runtime", "vescale", "-q"];
        let sizes = ["--gpus", gpus, "--seq", "12", "--global-batch", "12"];
        let more = [
            "--precision",
            "fp32",
            "--strategy",
            strategy,
            "-o",
            "p.yaml",
        ];
        run(folder, &[&args[..], &sizes, &more].concat())
    };
    assert_eq!(estimate("config.json", "1", "mbs=1").status.code(), Some(0));
    refused(
        &["run", "p.yaml", "--data", &tales, "--steps", "1"],
        "expected  the tokens of its tokenizer, in a file named .u16.bin",
    );
    // Shards of 3 tokens, where exact mode sums by 4.
    assert_eq!(
        estimate(&model, "4", "cp=2,tp=2,sp=on,mbs=1").status.code(),
        Some(0)
    );
    refused(
        &[
            "run",
            "p.yaml",
            "--data",
            &tales,
            "--numerics",
            "exact",
            "--steps",
            "1",
        ],
        "or --numerics fast, which runs every layout that `estimate` takes",
    );
    let output = estimate(&model, "12", "dp_shard=12,zero=1,mbs=1");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("plan with --cluster local"), "{said}");
    let plan = example("nanogpt-single.yaml");
    for timeout in ["0", "18446744073709551615"] {
        refused(&["run", &plan, "--timeout", timeout], "--timeout");
    }
}

#[test]
fn memory_of_experts_says_what_it_is_predicted_from() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (plan, says) in [("mixtral-single.yaml", true), ("llama-single.yaml", false)] {
        let output = run(folder.path(), &["run", &example(plan), "--steps", "1"]);
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            said.contains("from the routing that this run recorded"),
            says,
            "{said}"
        );
    }
}
