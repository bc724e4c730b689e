//! Exact mode with MPI processes as ranks: every layout of up to 8 ranks gives the bits of one device.
//!
//! `cargo test -p vescale-tests --features mpi --test mpi`, where `mpirun` is. Started by itself it
//! trains on one device, then starts `mpirun -n RANKS` of itself for every layout.

#[path = "executor/exact.rs"]
#[allow(
    dead_code,
    unused_imports,
    reason = "its layouts are used, its own tests are not"
)]
mod exact;
#[path = "executor/jobs.rs"]
#[allow(dead_code, reason = "its jobs are used, what they cost is not")]
mod jobs;

use std::process::{Command, ExitCode};
use std::time::Duration;

use catalog::Model;
use catalog::Precision;
use cpu_device::Numerics;
use executor::device::Cores;
use executor::{Job, Outcome};

const STEPS: u64 = 20;
/// Most ranks of a layout: each is a process.
const MOST: usize = 8;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.as_slice() {
        [role, model, layout] if role == "rank" => rank(model, layout),
        _ => drive(),
    }
}

fn model(name: &str) -> Model {
    match name {
        "llama" => jobs::llama(),
        "mixtral" => jobs::mixtral(),
        _ => jobs::nanogpt(0.1),
    }
}

fn of(model_name: &str, layout: &str) -> Job {
    let model = model(model_name);
    jobs::job(&model, layout, Numerics::Exact, Precision::Fp32, STEPS)
}

/// The results that must be equal, as text.
fn bits(outcome: &Outcome) -> String {
    let losses: Vec<String> = outcome
        .losses
        .iter()
        .map(|l| format!("{:016x}", l.to_bits()))
        .collect();
    format!("{} {}", outcome.weights_sha256(), losses.join(" "))
}

/// One process of a layout; rank 0 prints the results.
fn rank(model: &str, layout: &str) -> ExitCode {
    let job = of(model, layout);
    let comm = comm::mpi::MpiCommunicator::join(Duration::from_secs(60));
    let comm = comm.expect("started by mpirun");
    match executor::train_rank(&Cores { threads: 1 }, &jobs::session(&job), &comm) {
        Ok(outcome) => {
            if let Some(outcome) = outcome {
                println!("{}", bits(&outcome));
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn drive() -> ExitCode {
    let dense = [&exact::ALONE[1..], exact::SCHEDULES, exact::MIXES].concat();
    let mut wrong = 0;
    for (name, layouts) in [
        ("llama", dense),
        ("nanogpt", exact::MIXES.to_vec()),
        ("mixtral", exact::EXPERTS.to_vec()),
    ] {
        let expected = bits(&jobs::train(&of(name, "tp=1,mbs=4")));
        let mut count = 0;
        for layout in layouts {
            let ranks = executor::Mesh::new(&of(name, layout).strategy).world();
            if !(2..=MOST).contains(&ranks) {
                continue;
            }
            count += 1;
            let got = launched(name, layout, ranks);
            if got != expected {
                wrong += 1;
                println!("{name} {layout}: {got} for {expected}");
            }
        }
        println!("{name}: {count} layouts");
    }
    println!("{wrong} differ from one device");
    ExitCode::from(u8::from(wrong > 0))
}

fn launched(name: &str, layout: &str, ranks: usize) -> String {
    let own = std::env::current_exe().expect("this program has a path");
    let output = Command::new("mpirun")
        .args(["-n", &ranks.to_string()])
        .arg(own)
        .args(["rank", name, layout])
        .output()
        .expect("mpirun starts");
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() {
        text
    } else {
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}
