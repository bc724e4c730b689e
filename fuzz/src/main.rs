//! `vescale-fuzz`: runs inputs against every reader and prints what became of them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Parser;
use fuzz::campaign::{self, Line, Plan, Row};
use fuzz::guard::{self, Finding};
use fuzz::memory::Counting;
use fuzz::shard::{self, Current, Order};
use fuzz::target::Depth;
use fuzz::targets;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// An input that runs longer ends its process.
const HANG: Duration = Duration::from_secs(20);
/// Stack of the thread that runs inputs: what the command line's main thread has.
const STACK: usize = 8 << 20;

/// Feeds changed files of the project to every reader and reports panics, broken promises, inputs that
/// take more than 2 s and inputs that take more than 1 GiB
#[derive(Parser, Debug)]
#[command(name = "vescale-fuzz", version)]
struct Arguments {
    /// Minutes to run
    #[arg(long, default_value_t = 0.0)]
    minutes: f64,
    /// Inputs of every target at least
    #[arg(long, default_value_t = 0)]
    inputs: u64,
    /// Only this target; may be given several times
    #[arg(long)]
    target: Vec<String>,
    /// Seed of every input
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Processes at a time [default: as many as there are cores]
    #[arg(long)]
    jobs: Option<usize>,
    /// Folder to write the inputs of findings to
    #[arg(long, value_name = "DIR")]
    findings: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Run one input from a file and print what became of it
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    #[arg(long, hide = true)]
    worker: bool,
    #[arg(long, hide = true)]
    named: bool,
    #[arg(long, hide = true, default_value_t = 0)]
    from: u64,
    #[arg(long, hide = true)]
    seconds: Option<f64>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let known: Vec<&str> = targets::all().iter().map(|t| t.name).collect();
    if let Some(wrong) = arguments
        .target
        .iter()
        .find(|t| !known.contains(&t.as_str()))
    {
        eprintln!(
            "error: unknown target `{wrong}`; targets: {}",
            known.join(", ")
        );
        return ExitCode::from(2);
    }
    if let Some(file) = &arguments.replay {
        return replay(&arguments, file);
    }
    if arguments.worker {
        return work(arguments);
    }
    let mut targets = arguments.target.clone();
    if targets.is_empty() {
        targets = known.iter().map(|&t| t.to_owned()).collect();
    }
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let plan = Plan {
        program: std::env::current_exe().unwrap_or_else(|_| "vescale-fuzz".into()),
        targets,
        seed: arguments.seed,
        inputs: arguments.inputs,
        time: Duration::from_secs_f64(60.0 * arguments.minutes.max(0.0)),
        jobs: arguments.jobs.unwrap_or_else(cores),
    };
    let start = Instant::now();
    let rows = campaign::run(&plan, &|target, report| {
        for finding in &report.findings {
            eprintln!("{target}: {:?}: {}", finding.fault, finding.message);
        }
    });
    finish(&arguments, &rows, start.elapsed())
}

/// Runs a shard, printing a line for who started it.
fn work(arguments: Arguments) -> ExitCode {
    let Some(target) = arguments.target.first().and_then(|name| targets::of(name)) else {
        return ExitCode::from(2);
    };
    let order = Order {
        target: target.name.to_owned(),
        seed: arguments.seed,
        from: arguments.from,
        count: arguments.inputs,
        time: Duration::from_secs_f64(arguments.seconds.unwrap_or(60.0)),
    };
    let current: Current = Arc::default();
    let watched = Arc::clone(&current);
    std::thread::spawn(move || watch(&watched));
    let shared: Current = Arc::clone(&current);
    let run = move || {
        let mut each = |input: &[u8]| {
            if arguments.named {
                say(&Line::Next(input.to_vec()));
            }
        };
        say(&Line::Done(shard::run(&target, &order, &shared, &mut each)));
    };
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(run);
    match thread.map(std::thread::JoinHandle::join) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        _ => ExitCode::from(1),
    }
}

/// Ends the process when an input does not end.
fn watch(current: &Mutex<Option<(Instant, Vec<u8>)>>) {
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let now = current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some((since, input)) = now
            && since.elapsed() > HANG
        {
            say(&Line::Hang(input));
            std::process::exit(3);
        }
    }
}

fn say(line: &Line) {
    let mut out = std::io::stdout().lock();
    let written = serde_json::to_writer(&mut out, line).map_err(std::io::Error::from);
    // Nobody listens any more: there is nobody to tell.
    let _ = written
        .and_then(|()| writeln!(out))
        .and_then(|()| out.flush());
}

fn replay(arguments: &Arguments, file: &Path) -> ExitCode {
    let Some(target) = arguments.target.first().and_then(|name| targets::of(name)) else {
        eprintln!("error: --replay needs --target");
        return ExitCode::from(2);
    };
    let input = match std::fs::read(file) {
        Ok(input) => input,
        Err(error) => {
            eprintln!("error: {}: {error}", file.display());
            return ExitCode::from(2);
        }
    };
    let run = guard::run(&target, &input, Depth::Use);
    println!("{run:#?}");
    ExitCode::from(u8::from(!run.faults.is_empty()))
}

fn finish(arguments: &Arguments, rows: &[Row], time: Duration) -> ExitCode {
    let findings: Vec<&Finding> = rows.iter().flat_map(|row| &row.report.findings).collect();
    if let Some(folder) = &arguments.findings
        && let Err(error) = keep(folder, &findings)
    {
        eprintln!("error: {}: {error}", folder.display());
        return ExitCode::from(1);
    }
    if arguments.json {
        say_rows(rows);
    } else {
        table(rows, time);
    }
    ExitCode::from(u8::from(!findings.is_empty()))
}

fn say_rows(rows: &[Row]) {
    match serde_json::to_string_pretty(rows) {
        Ok(text) => println!("{text}"),
        Err(error) => eprintln!("error: {error}"),
    }
}

fn keep(folder: &Path, findings: &[&Finding]) -> std::io::Result<()> {
    for finding in findings {
        let folder = folder.join(&finding.target);
        std::fs::create_dir_all(&folder)?;
        let number = fuzz::rng::hash(finding.key().as_bytes());
        let name = format!("{:?}-{number:016x}", finding.fault).to_lowercase();
        std::fs::write(folder.join(&name), &finding.input)?;
        std::fs::write(folder.join(format!("{name}.txt")), &finding.message)?;
    }
    Ok(())
}

fn table(rows: &[Row], time: Duration) {
    println!(
        "{:<18}{:>11}{:>9}{:>10}{:>9}{:>10}{:>10}{:>10}{:>10}",
        "reader",
        "inputs",
        "syntax",
        "accepted",
        "used",
        "outcomes",
        "slowest",
        "memory",
        "findings"
    );
    let mut all = 0;
    let mut findings = 0;
    for row in rows {
        let r = &row.report;
        let share = |part: u64| format!("{:.0}%", 100.0 * part as f64 / r.inputs.max(1) as f64);
        println!(
            "{:<18}{:>11}{:>9}{:>10}{:>9}{:>10}{:>10}{:>10}{:>10}",
            row.target,
            r.inputs,
            share(r.syntax),
            share(r.accepted),
            r.used,
            r.classes.len(),
            format!("{} ms", r.slowest_ms),
            format!("{} MiB", r.peak >> 20),
            r.findings.len()
        );
        all += r.inputs;
        findings += r.findings.len();
    }
    println!(
        "{all} inputs in {:.0} s, {findings} findings",
        time.as_secs_f64()
    );
}
