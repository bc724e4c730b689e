//! Metrics that trackers export, and the Trainer's state.

use interop::training_log::{LogSystem, StepSize, parse};

/// Steps of that many tokens per device, of 128 sequences on 64 devices.
fn size(tokens_per_gpu: f64) -> StepSize {
    StepSize {
        tokens_per_gpu,
        sequences: 128,
        gpus: 64,
    }
}

/// Metrics as trackers export them.
#[test]
fn exported_metrics_are_read() {
    let wandb = "\"Step\",\"run-1 - time_metrics/end_to_end(s)\",\"run-1 - time_metrics/end_to_end(s)__MIN\",\"run-1 - throughput(tps)\"\n\"10\",\"2.5\",\"2.0\",\"700\"\n\"20\",\"2.4\",\"2.0\",\"710\"\n\"30\",\"2.6\"\n";
    let history = "{\"_step\": 1, \"_timestamp\": 100.0, \"loss\": 3.0}\n{\"_step\": 3, \"_timestamp\": 104.0, \"loss\": 2.9}\n{\"_step\": 3, \"lr\": 0.1}\nnoise\n{\"_step\": 4, \"_timestamp\": 106.5, \"loss\": 2.8}\n";
    let board =
        "Wall time,Step,Value\n1700000000.0,10,3.1\n1700000020.0,20,3.0\n1700000041.0,30,2.9\n";
    let points = "[[1700000000.0, 10, 3.1], [1700000020.0, 20, 3.0]]";
    let state = "{\"global_step\": 100, \"log_history\": [{\"loss\": 2.0, \"step\": 50}, {\"step\": 100, \"train_runtime\": 250.0, \"total_flos\": 1.0}]}";
    // The Trainer logs in some steps only, and evaluates; `_step` counts what it logs.
    let trainer = "{\"_step\": 0, \"_timestamp\": 100.0, \"train/global_step\": 10}\n{\"_step\": 1, \"_timestamp\": 120.0, \"train/global_step\": 20}\n{\"_step\": 2, \"_timestamp\": 150.0, \"train/global_step\": 20, \"eval/samples_per_second\": 9.0}\n{\"_step\": 3, \"_timestamp\": 171.0, \"train/global_step\": 30.0, \"train/train_samples_per_second\": 3.0}\n";
    let table = "_step,_timestamp,train/global_step,eval/samples_per_second\n0,100.0,10,\n1,120.0,20,\n2,150.0,20,9.0\n3,171.0,30,\n";
    let page =
        "\"Step\",\"run-1 - train/global_step\",\"run-1 - _timestamp\"\n1,10,100.0\n2,20,120.0\n";
    // One row has another name for its step; rows of the machine's use have none.
    let named = (0..8).map(|i| format!("{{\"_step\": {i}, \"step_time_s\": 2.0}}\n"));
    let named =
        named.collect::<String>() + "{\"_step\": 8, \"global_step\": 9, \"step_time_s\": 2.5}\n";
    let named = named.as_str();
    let machine = "{\"_step\": 0, \"_timestamp\": 100.0, \"train/global_step\": 10}\n{\"_step\": 1, \"_timestamp\": 110.0, \"system/gpu\": 98.0}\n{\"_step\": 2, \"_timestamp\": 120.0, \"train/global_step\": 20}\n";
    let emptied = "_step,step_time_s,global_step\n0,2.0,\n1,2.0,\n2,2.5,9\n";
    let nulls = "[{\"_step\": 0, \"step_time\": 2.0, \"global_step\": null}, {\"_step\": 1, \"step_time\": 2.0, \"global_step\": null}, {\"_step\": 2, \"step_time\": 2.5, \"global_step\": 9}]";
    let cases: [(&str, LogSystem, &[f64], usize); 12] = [
        (nulls, LogSystem::Metrics, &[2.0, 2.0, 2.5], 0),
        (
            named,
            LogSystem::Metrics,
            &[2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.5],
            0,
        ),
        (machine, LogSystem::Metrics, &[2.0], 0),
        (emptied, LogSystem::Metrics, &[2.0, 2.0, 2.5], 0),
        (page, LogSystem::Metrics, &[2.0], 0),
        (trainer, LogSystem::Metrics, &[2.0, 2.1], 0),
        (table, LogSystem::Metrics, &[2.0, 2.1], 0),
        (wandb, LogSystem::Metrics, &[2.5, 2.4], 1),
        (history, LogSystem::Metrics, &[2.0, 2.5], 1),
        (board, LogSystem::Metrics, &[2.0, 2.1], 0),
        (points, LogSystem::Metrics, &[2.0], 0),
        (state, LogSystem::Trainer, &[2.5], 0),
    ];
    for (text, system, seconds, garbled) in cases {
        let log = parse(text, "x").expect("read");
        let found: Vec<f64> = log.steps.iter().filter_map(|step| step.seconds).collect();
        assert_eq!((log.system, found.as_slice()), (system, seconds), "{text}");
        assert_eq!(log.garbled, garbled, "{text}");
    }
    // Text that only looks like a table, and numbers beyond any run.
    for text in [
        "Step,Value\n",
        "step,loss\n1,2\n",
        "[1, 2]",
        "[[1e300, 1, 2], [2e300, 2, 2]]",
    ] {
        assert!(parse(text, "x").is_err(), "{text}");
    }
}

/// Metrics of several runs in one file are no run's. Columns without values or of quantities that are not read do not count.
#[test]
fn metrics_of_several_runs_are_refused() {
    for (text, runs) in [
        (
            "Step,a - iteration-time,b - iteration-time\n1,4,3\n2,4,3\n",
            true,
        ),
        (
            "Step,b - iteration-time,a - iteration-time\n1,3,4\n2,3,4\n",
            true,
        ),
        (
            "Step,a - iteration-time,b - throughput(tps)\n1,4,\n2,,9\n",
            true,
        ),
        (
            "[{\"step\": 1, \"a - step_time\": 4}, {\"step\": 2, \"b - step_time\": 3}]",
            true,
        ),
        (
            "Step,a - iteration-time,b - iteration-time\n1,4,\n2,4,\n",
            false,
        ),
        ("Step,a - iteration-time,b - loss\n1,4,3\n2,4,3\n", false),
    ] {
        let read = parse(text, "x.csv");
        let said = "x.csv: the metrics are of 2 runs, `a`, `b`; give those of one run";
        let refused = read.as_ref().is_err_and(|error| error.to_string() == said);
        assert_eq!((read.is_err(), refused), (runs, runs), "{text}");
    }
}

/// Exported metrics of a job that raises its batch say it as Megatron-LM does.
#[test]
fn exported_batches_are_read() {
    let rows = |names: &str| {
        let row = |step: u64| {
            let batch = if step < 20 { 64 } else { 128 };
            format!("{step},{},{batch}\n", batch as f64 / 100.0)
        };
        names.to_owned() + &(1..=40).map(row).collect::<String>()
    };
    let objects = (1..=40).map(|step| {
        let batch = if step < 20 { 64 } else { 128 };
        let time = batch as f64 / 100.0;
        format!(
            "{{\"_step\": {step}, \"batch-size\": {batch}}}\n{{\"_step\": {step}, \"iteration-time\": {time}}}\n"
        )
    });
    for text in [
        rows("Step,iteration-time,batch-size\n"),
        rows("Step,r - iteration-time,r - batch-size\n"),
        objects.collect(),
    ] {
        let log = parse(&text, "x").expect("read");
        let steady = log.steady("x", None, size(1.0)).expect("steps");
        assert_eq!(
            (steady.median(), steady.other_batches),
            (1.28, 15),
            "{text}"
        );
    }
    let other = rows("Step,iteration-time,batch-size vs samples\n");
    let log = parse(&other, "x").expect("read");
    assert!(log.steps.iter().all(|step| step.global_batch.is_none()));
}

/// The Trainer's state of a checkpoint has no time; one with an evaluation after training has.
#[test]
fn the_state_of_an_unfinished_run_is_refused() {
    let state =
        |last: &str| format!("{{\"log_history\": [{{\"loss\": 4.0, \"step\": 40}}{last}]}}");
    let error = parse(&state(""), "trainer_state.json").expect_err("refused");
    assert!(error.to_string().contains("no `train_runtime`"), "{error}");
    let whole = ", {\"step\": 50, \"train_runtime\": 100.0}, {\"eval_loss\": 3.0, \"step\": 50}";
    let log = parse(&state(whole), "trainer_state.json").expect("read");
    assert_eq!((log.steps[0].seconds, log.mean_of), (Some(2.0), Some(50)));
    let steady = log
        .steady("trainer_state.json", None, size(1.0))
        .expect("a time");
    assert!(!steady.first_alone);
}

/// The Trainer's state of a run that began at a checkpoint has the time of an unknown number of steps.
#[test]
fn the_state_of_a_resumed_run_is_refused() {
    for (mean, resumed) in [(3.0, false), (2.8, false), (2.5, true), (0.3, true)] {
        let text = format!(
            "{{\"log_history\": [{{\"loss\": 4.0, \"step\": 40}}, {{\"loss\": 2.0, \"step\": 80}}, {{\"step\": 90, \
             \"train_loss\": {mean}, \"train_runtime\": 180.0}}]}}"
        );
        let log = parse(&text, "trainer_state.json");
        assert_eq!(log.is_err(), resumed, "{mean}");
        match log {
            Ok(log) => assert_eq!(log.steps[0].seconds, Some(2.0)),
            Err(error) => assert!(error.to_string().contains("was resumed"), "{error}"),
        }
    }
}

/// A metric's name says its quantity and its unit. Of several metrics of one quantity the one with the shortest name is read.
#[test]
fn metrics_are_known_by_their_names() {
    for (names, values) in [
        ("throughput/samples_per_sec", "64"),
        ("throughput/device/samples_per_sec", "1"),
        ("throughput/device/tokens_per_sec", "4096"),
        (
            "throughput/samples_per_sec,throughput/device/samples_per_sec",
            "64,1",
        ),
        (
            "throughput/device/samples_per_sec,throughput/samples_per_sec",
            "1,64",
        ),
        ("perf/step_time_ms", "2000"),
        ("iteration_time_ms", "2000"),
        ("run-1 - time_per_iteration_ms", "2000"),
        ("elapsed time per iteration (ms)", "2000"),
        ("iteration_time/milliseconds", "2000"),
        ("time_metrics/end_to_end(s)", "2"),
        ("step_time_s", "2"),
        ("step_time,data_step_time", "2,0.01"),
        ("data_step_time,step_time", "0.01,2"),
        // The name of a run is no metric's.
        ("step_time-fix - throughput(tps)", "4096"),
        ("step_time_ms - step_time_s", "2"),
        (
            "a-run - data_step_time,b - c - lr,a-run - step_time",
            "0.01,1,2",
        ),
    ] {
        let text = format!("Step,{names}\n1,{values}\n");
        let log = parse(&text, "x.csv").expect("read");
        let steady = log.steady("x.csv", Some(0), size(8192.0)).expect("a step");
        assert_eq!(steady.median(), 2.0, "{names}");
    }
}
