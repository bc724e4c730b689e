//! What the suite replays: every input that was once treated wrongly, and a seeded sample of every
//! target. The full counts come from `cargo run --release -p vescale-fuzz -- --minutes 10`.

use std::sync::mpsc;
use std::time::Duration;

use fuzz::guard::{self, Run};
use fuzz::outcome;
use fuzz::rng::Rng;
use fuzz::shard::{self, Current, Order, Report};
use fuzz::target::{Depth, Target};
use fuzz::{corpus, memory::Counting, targets};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Longest that one entry may take on a busy machine without optimisation.
const DEADLINE: Duration = Duration::from_secs(20);
/// Stack of a main thread.
const STACK: usize = 8 << 20;

/// Runs `work` on a thread of its own; none if it does not end.
fn within<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::Builder::new().stack_size(STACK);
    thread.spawn(move || sender.send(work())).expect("a thread");
    receiver.recv_timeout(DEADLINE).ok()
}

#[test]
fn the_corpus_shows_no_fault() {
    let entries = corpus::entries().expect("a corpus");
    assert!(!entries.is_empty());
    let mut wrong: Vec<String> = Vec::new();
    for entry in entries {
        let target = targets::of(&entry.target).expect(&entry.target);
        let input = entry.input.clone();
        let run: Option<Run> = within(move || guard::run(&target, &input, Depth::Use));
        let mut faults: Vec<String> = match &run {
            Some(run) => run
                .faults
                .iter()
                .map(|(f, m)| format!("{f:?}: {m}"))
                .collect(),
            None => vec!["it does not end".to_owned()],
        };
        let taken = run.and_then(|run| run.outcome).is_some_and(|o| o.accepted);
        if taken && entry.name.ends_with(".refused") {
            faults.push("it is accepted".to_owned());
        }
        for fault in faults {
            wrong.push(format!("{}/{}: {fault}", entry.target, entry.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Some inputs of a target.
fn sample(name: &str, count: u64) -> Report {
    let target = targets::of(name).expect(name);
    let order = Order {
        target: name.to_owned(),
        seed: 20_261_122,
        from: 0,
        count,
        time: DEADLINE,
    };
    let run = move || shard::run(&target, &order, &Current::default(), &mut |_| {});
    let thread = std::thread::Builder::new().stack_size(STACK);
    let thread = thread.spawn(run).expect("a thread");
    thread.join().expect("panics are caught")
}

#[test]
fn samples_of_every_target_show_no_fault_and_mostly_pass_its_syntax() {
    let mut wrong: Vec<String> = Vec::new();
    for target in targets::all() {
        let name = target.name;
        let count = if name == "scenarios" { 12 } else { 400 };
        let report = sample(name, count);
        wrong.extend(report.findings.iter().map(|f| {
            let input = String::from_utf8_lossy(&f.input);
            format!("{name}: {:?}: {}: {input:?}", f.fault, f.message)
        }));
        if 10 * report.syntax < 3 * report.inputs {
            let (syntax, inputs) = (report.syntax, report.inputs);
            wrong.push(format!(
                "{name}: {syntax} of {inputs} inputs pass its syntax"
            ));
        }
        if report.accepted == 0 {
            wrong.push(format!("{name}: nothing is accepted"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn an_input_is_a_function_of_its_seed() {
    let numbers = |seed, index| {
        let mut rng = Rng::of(seed, "units", index);
        [rng.bits(), rng.bits()]
    };
    assert_eq!(numbers(1, 2), numbers(1, 2));
    assert_ne!(numbers(1, 2), numbers(1, 3));
    assert_ne!(numbers(1, 2), numbers(2, 2));
    let untimed = || {
        let mut report = sample("units", 200);
        // How long an input takes depends on what else the machine does.
        report.slowest_ms = 0;
        report
    };
    assert_eq!(untimed(), untimed());
}

#[test]
fn kinds_of_errors_leave_names_and_numbers_out() {
    let one = outcome::kind("a.yaml: line 3 column 12: unknown field `foo`, expected `bar`");
    let two = outcome::kind("a.yaml: line 40 column 1: unknown field `x`, expected `y`");
    assert_eq!(one, two);
}

#[test]
fn faults_are_noticed() {
    let run = |input: &[u8], _: Depth| {
        match input {
            b"panic" => panic!("as asked"),
            b"memory" => drop(std::hint::black_box(vec![0u8; 3 << 30])),
            b"slow" => std::thread::sleep(Duration::from_millis(2100)),
            _ => {}
        }
        let mut outcome = outcome::Outcome::accepted("");
        outcome.expect(input != b"lie", || "a lie".to_owned());
        outcome
    };
    let faulty = Target::new("faulty", || vec![b"x".to_vec()], |_, _| b"x".to_vec(), run);
    let faults = |input: &[u8]| {
        let run = guard::run(&faulty, input, Depth::Read);
        run.faults
            .into_iter()
            .map(|(fault, _)| fault)
            .collect::<Vec<_>>()
    };
    assert_eq!(faults(b"panic"), [guard::Fault::Panic]);
    assert_eq!(faults(b"memory"), [guard::Fault::Memory]);
    assert_eq!(faults(b"lie"), [guard::Fault::Invariant]);
    assert_eq!(faults(b"fine"), []);
    assert!(guard::is_slow(&faulty, b"slow", Depth::Read));
    let finding = guard::Finding {
        target: "faulty".to_owned(),
        fault: guard::Fault::Invariant,
        message: "a lie".to_owned(),
        input: b"lie".to_vec(),
    };
    assert_eq!(guard::minimised(&faulty, &finding, Depth::Read), b"lie");
}
