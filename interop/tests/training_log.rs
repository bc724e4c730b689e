//! Training logs in the words of the systems that print them.

use interop::training_log::{LogSystem, StepSize, parse};

/// Steps of that many tokens per device, of 128 sequences on 64 devices.
fn size(tokens_per_gpu: f64) -> StepSize {
    StepSize {
        tokens_per_gpu,
        sequences: 128,
        gpus: 64,
    }
}

const MEGATRON: &str = "\
 [2026-05-01 12:00:00.000000] iteration        1/  500000 | consumed samples:          128 | elapsed time per iteration (ms): 21234.5 | throughput per GPU (TFLOP/s/GPU): 40.1 | learning rate: 1.500000E-04 | global batch size:   128 | lm loss: 1.2E+01 | loss scale: 1.0 | grad norm: 9.001 | number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 20000.25 | max allocated: 40960.50 | reserved: 50000.00 | max reserved: 51200.00
[Rank 8] (after 1 iterations) memory (MB) | allocated: 20000.25 | max allocated: 30720.00 | reserved: 50000.00 | max reserved: 40960.00
 [2026-05-01 12:00:03.000000] iteration        2/  500000 | consumed samples:          256 | elapsed time per iteration (ms): 2100.0 | throughput per GPU (TFLOP/s/GPU): 401.0 | global batch size:   128 | loss scale: 1.0 |
 [2026-05-01 12:00:05.000000] iteration        3/  500000 | consumed samples:          384 | elapsed time per iteration (ms): 2000.0 | throughput per GPU (TFLOP/s/GPU): 420.5 | global batch size:   128 | loss scale: 1.0 |
saving checkpoint at iteration 3
 [2026-05-01 12:00:07.000000] iteration        4/  500000 | consumed samples:          512 | elapsed time per iteration (ms): 2010.0 | throughput per GPU (TFLOP/s/GPU): 419.5 | global batch size:   128 | loss scale: 1.0 |
 [2026-05-01 12:00:09.000000] iteration        5/  500000 | consumed samples:          640 | elapsed time per iteration (ms): 5000.0 | throughput per GPU (TFLOP/s/GPU): 160.5 | global batch size:   128 | loss scale: 1.0 |
";

const TITAN: &str = "\
[titan] 2026-05-01 12:00:00,000 - root - INFO - \u{1b}[31mstep:  1  \u{1b}[32mloss: 12.26120  \u{1b}[38;2;180;60;0mgrad_norm:  4.1  \u{1b}[36mmemory: 30.50GiB(38.52%)  \u{1b}[34mtps: 700  \u{1b}[36mtflops: 40.30  \u{1b}[35mmfu: 4.07%\u{1b}[39m
[titan] 2026-05-01 12:00:09,000 - root - INFO - step: 10  loss: 10.1  grad_norm:  3.1  memory: 61.25GiB(77.36%)  tps: 7,123  tflops: 412.30  mfu: 41.70%
[titan] 2026-05-01 12:00:09,000 - root - WARNING - 3 CUDA memory allocation retries.
[titan] 2026-05-01 12:00:19,000 - root - INFO - step: 20  loss:  9.1  grad_norm:  2.1  memory: 61.25GiB(77.36%)  tps: 7,200  tflops: 416.80  mfu: 42.15%
";

const NANOTRON: &str = "\
05/01/2026 12:00:00 [INFO|DP=0|PP=0|TP=0|node-1]: iteration: 1 / 2000 | consumed_tokens: 1.05M | time_per_iteration_ms: 12.3K | tokens_per_sec: 85.3K | tokens_per_sec_per_gpu: 10.7K | global_batch_size: 1.05M | lm_loss: 11.8 | lr: 3e-06 | model_tflops_per_gpu: 523 | grad_norm: 20.1
05/01/2026 12:00:00 [INFO|DP=0|PP=0|TP=0|node-1]:  Memory usage: 9000.25MiB. Peak allocated 30720.00MiB. Peak reserved: 40960.00MiB
05/01/2026 12:00:12 [INFO|DP=0|PP=0|TP=0|node-1]: iteration: 2 / 2000 | consumed_tokens: 2.1M | time_per_iteration_ms: 987 | tokens_per_sec: 1.06M | tokens_per_sec_per_gpu: 133K | lm_loss: 11.7 | model_tflops_per_gpu: 523 | eta: 2:00:00
";

#[test]
fn each_system_is_read() {
    let log = parse(MEGATRON, "m.log").expect("read");
    assert_eq!((log.system, log.steps.len()), (LogSystem::Megatron, 5));
    assert_eq!(log.steps[2].seconds, Some(2.0));
    assert_eq!(
        (log.steps[2].step, log.steps[2].global_batch),
        (3, Some(128))
    );
    assert_eq!(log.steps[2].tflops_per_gpu, Some(420.5));
    assert_eq!(log.reserved, Some(51200 << 20));
    assert_eq!(log.allocated, Some((40960 << 20) + (1 << 19)));

    let log = parse(TITAN, "t.log").expect("read");
    assert_eq!(
        (log.system, log.steps.len(), log.retries),
        (LogSystem::Torchtitan, 3, 3)
    );
    assert_eq!(log.steps[1].tokens_per_s_per_gpu, Some(7123.0));
    assert_eq!(log.reserved, Some((61.25 * 1024f64.powi(3)) as u64));
    let steady = log.steady("t.log", Some(1), size(7200.0)).expect("steps");
    assert_eq!(steady.seconds[0], 1.0);

    let log = parse(NANOTRON, "n.log").expect("read");
    assert_eq!((log.system, log.steps.len()), (LogSystem::Nanotron, 2));
    assert_eq!(log.steps[0].seconds, Some(12.3));
    assert_eq!(log.steps[1].seconds, Some(0.987));
    assert_eq!(log.reserved, Some(40960 << 20));
}

/// A peak of memory has the unit that follows it, MiB if none does.
#[test]
fn memory_has_the_unit_that_follows_it() {
    let line = |peak: &str| NANOTRON.replace("40960.00MiB", peak);
    for (peak, mib) in [("40960.00MiB", 40960), ("30.5GiB", 31232), ("2048.0", 2048)] {
        let log = parse(&line(peak), "n.log").expect("read");
        assert_eq!(log.reserved, Some(mib << 20), "{peak}");
    }
}

#[test]
fn the_median_stands_apart_from_warm_up_and_outliers() {
    let log = parse(MEGATRON, "m.log").expect("read");
    let steady = log.steady("m.log", None, size(1.0)).expect("steps");
    assert_eq!(
        (steady.warmup, steady.median(), steady.slow()),
        (2, 2.01, 1)
    );
    assert_eq!(steady.quantile(0.0), 2.0);
    assert_eq!(steady.quantile(1.0), 5.0);
}

/// A job that raises its batch: the steps with the planned number of sequences count, or else the
/// last.
#[test]
fn steps_of_one_batch_count() {
    let line = |step: u64, batch: u64| {
        let ms = 10 * batch;
        format!(
            "iteration {step}/ 9 | elapsed time per iteration (ms): {ms} | global batch size: {batch} |\n"
        )
    };
    let batches = [32, 64, 64, 128, 256, 512];
    let text: String = (1..)
        .zip(batches)
        .map(|(step, batch)| line(step, batch))
        .collect();
    let log = parse(&text, "m.log").expect("read");
    for (warmup, planned, batch, other) in [
        (0, 64, 64, 4),
        (0, 128, 128, 5),
        (2, 64, 64, 3),
        (3, 64, 512, 2),
        (0, 1024, 512, 5),
    ] {
        let size = StepSize {
            sequences: planned,
            ..size(1.0)
        };
        let steady = log.steady("m.log", Some(warmup), size).expect("steps");
        assert_eq!(steady.global_batch(), Some(batch), "{planned}");
        assert_eq!(steady.median(), batch as f64 / 100.0);
        assert_eq!(steady.other_batches, other, "{planned}");
    }
}

#[test]
fn malformed_logs_say_where() {
    let check = |text: &str, expected: &str| {
        assert_eq!(
            parse(text, "x.log").expect_err("refused").to_string(),
            expected
        );
    };
    check(
        "hello\n",
        "x.log: no training step is found; lines of Megatron-LM (`iteration … elapsed time per iteration (ms): …`), \
         torchtitan (`step: … tps: …`), nanotron (`iteration: … tokens_per_sec_per_gpu: …`), DeepSpeed \
         (`CurrSamplesPerSec=…`), NeMo (`train_step_timing in s: …`), MaxText (`completed step: … seconds: …`), Hugging \
         Face's Trainer (`10/100 [… 2.10s/it]`, trainer_state.json), InternEvo (`tgs (tokens/gpu/second)=…`), modded-nanogpt \
         (`train_time:…ms`), PyTorch's FSDP examples (`Speed: … samples/sec`), `run --log`, and CSV or JSON of Weights & \
         Biases and TensorBoard are read",
    );
    check(
        "\n iteration 1/ 5 | elapsed time per iteration (ms): fast |\n",
        "x.log:2: `elapsed time per iteration (ms)`: `fast` is not a number",
    );
    check(
        "step: 1  memory: 3.1GiB  tps: many  tflops: 1",
        "x.log:1: `tps`: `many` is not a number",
    );
    check(
        " iteration 1/ 5 | elapsed time per iteration (ms): 9.0 | global batch size: 0 |\n",
        "x.log:1: `global batch size`: `0` is not a number above 0",
    );
    for (text, said) in [
        (
            "[{\"step\":1,\"time\":\n",
            "x.log:1: the JSON is broken at column 18: it ends too early",
        ),
        (
            "{\"a\":[1,2}",
            "x.log:1: the JSON is broken at column 10: expected `,` or `]`",
        ),
        (
            "{\"_step\":1,\"a\":2}\n{\"_step\":2,\"a\" 3}\n",
            "x.log:2: the JSON is broken at column 16: expected `:`",
        ),
        (
            "{\"train/step_time\":\"fast\"}\n",
            "x.log:1: `train/step_time`: `fast` is not a number",
        ),
        (
            "[{\"step\":1,\"train/step_time\":[3]}]",
            "x.log: `train/step_time`: `[3]` is not a number",
        ),
        (
            "step,train/step_time\n1,fast\n2,slow\n",
            "x.log:2: `train/step_time`: `fast` is not a number",
        ),
    ] {
        check(text, said);
    }
    for log in [
        "[rank0]: hello\n",
        "[2026-01-01] a\n",
        "{\"a\": 1}\ntext {\n",
    ] {
        let refused = parse(log, "x.log").expect_err(log).to_string();
        assert!(
            refused.starts_with("x.log: no training step is found"),
            "{refused}"
        );
    }
    let log = parse(TITAN, "t.log").expect("read");
    let error = log
        .steady("t.log", Some(9), size(1.0))
        .expect_err("nothing left");
    assert_eq!(
        error.to_string(),
        "t.log: 3 steps are logged, and none is left after 9 of warm-up; give a longer log or a smaller --warmup"
    );
}

/// Steps without a usable time are not reported as too few steps.
#[test]
fn steps_without_times_are_said() {
    let lines =
        (0..6).map(|step| format!("{{\"step\":{step},\"loss\":4.0,\"step_time_s\":-1.0}}\n"));
    let log = parse(&lines.collect::<String>(), "own.log").expect("read");
    let error = log.steady("own.log", None, size(1.0)).expect_err("no time");
    assert_eq!(
        error.to_string(),
        "own.log: 6 steps are logged, and none of those after 2 of warm-up has a time or rate above 0; give a log of step times or rates"
    );
}

#[test]
fn numbers_beyond_any_run_are_refused() {
    for time in ["1e308K", "1e400", "inf", "nan", "-5", "1e19"] {
        let line = format!("iteration 1/ 9 | elapsed time per iteration (ms): {time} |\n");
        let error = parse(&line, "m.log").expect_err(time).to_string();
        assert!(error.contains("is not a number"), "{error}");
    }
}

#[test]
fn a_rate_of_nothing_makes_no_step() {
    let log = parse("step: 1 tps: 700\nstep: 2 tps: 1e-308\n", "t.log").expect("read");
    let steady = log
        .steady("t.log", Some(0), size(7000.0))
        .expect("one step");
    assert_eq!(steady.seconds, [10.0]);
}

#[test]
fn further_systems_are_read() {
    let cases = [
        (
            LogSystem::DeepSpeed,
            "[2026-05-01 12:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step=40/global_step=20, RunningAvgSamplesPerSec=60.0, CurrSamplesPerSec=64.0, MemAllocated=10.5GB, MaxMemAllocated=30.1GB",
            (20, 2.0),
        ),
        (
            LogSystem::NeMo,
            "Training epoch 0, iteration 45/99 | lr: 6.897e-06 | global_batch_size: 128 | global_step: 45 | max_memory_reserved: 127785762816 | reduced_train_loss: 11.96 | train_step_timing in s: 6.08 | TFLOPS_per_GPU: 1.249e+03 | consumed_samples: 5888",
            (45, 6.08),
        ),
        (
            LogSystem::MaxText,
            "completed step: 9, seconds: 3.139, TFLOP/s/device: 419.7, Tokens/s/device: 7831.5, total_weights: 98304, loss: 6.7",
            (9, 3.139),
        ),
        (
            LogSystem::Trainer,
            "Loading checkpoint shards: 100%|##| 4/4 [00:05<00:00,  1.30s/it]\n  9%|9   | 9/100 [00:19<03:09,  2.20s/it]\r 10%|#   | 10/100 [00:21<03:09,  2.10s/it]",
            (9, 2.2),
        ),
        (
            LogSystem::Own,
            "{\"step\":3,\"loss\":1.5,\"gradient_norm\":0.1,\"step_time_s\":0.25,\"tokens_per_s\":10.0,\"mfu\":null,\"peak_memory_bytes\":1024}",
            (3, 0.25),
        ),
        (
            LogSystem::Research,
            "2026-05-01 12:00:00 INFO [train.py, line 601, in record] - pid=7 : tflops=127.9 step=3 loss=8.8 tgs (tokens/gpu/second)=0.5 tgs/tgs_avg=0.4 lr=1e-06",
            (3, 2.0),
        ),
        (
            LogSystem::Research,
            "step:0/50 val_loss:16.0 train_time:200ms step_avg:nanms\nstep:1/50 train_loss:16.0 train_time:1000ms step_avg:nanms\nstep:2/50 train_loss:9.5 train_time:1250ms step_avg:575ms",
            (1, 0.25),
        ),
        (
            LogSystem::Research,
            "0: 2026-05-01 12:00:00 I [train.py:103] Batch 5 Loss: 14.3, Speed: 32.0 samples/sec, lr: 0.000099",
            (5, 4.0),
        ),
        // A launcher dropped the escape characters of colours.
        (
            LogSystem::Torchtitan,
            "1: 2026-05-01 12:00:00,441 - root - INFO - [36mstep: 1990  [32mloss:  3.4  [33mmemory: 68.57GiB(86.69%)  [34mtps: 2  [35mmfu: 39.73%[39m",
            (1990, 0.5),
        ),
        (
            LogSystem::Metrics,
            "{\"lm loss\": {\"values\": {\"1\": 10.5}}, \"iteration-time\": {\"start_step\": 1, \"values\": {\"1\": \"nan\", \"2\": 1.5}}}",
            (2, 1.5),
        ),
    ];
    for (system, text, (step, seconds)) in cases {
        let log = parse(text, "x.log").expect("read");
        assert_eq!((log.system, log.steps[0].step), (system, step));
        let steady = log.steady("x.log", Some(0), size(1.0)).expect("a step");
        let longest = steady.seconds.last().copied();
        assert_eq!(longest, Some(seconds), "{system:?}");
    }
}

/// Megatron-DeepSpeed logs a step in both systems' formats, and DeepSpeed's lines may be more
/// frequent.
#[test]
fn megatron_lines_count_beside_those_of_deepspeed() {
    let rate =
        |step: u64| format!("global_step={step}, CurrSamplesPerSec=64.0, MemAllocated=6.0GB\n");
    let time = |step: u64| {
        format!(
            " iteration {step}/ 9 | elapsed time per iteration (ms): 2500.0 | global batch size: 128 |\n"
        )
    };
    let text: String = (1..=6)
        .map(|step| rate(2 * step - 1) + &rate(2 * step) + &time(2 * step))
        .collect();
    let log = parse(&text, "d.log").expect("read");
    assert_eq!(
        (log.system, log.steps.len(), log.repeated),
        (LogSystem::Megatron, 6, 0)
    );
    let steady = log.steady("d.log", None, size(1.0)).expect("steps");
    assert_eq!((steady.median(), steady.global_batch()), (2.5, Some(128)));
}

/// Ranks write the same step, into each other's lines, and validate between steps.
#[test]
fn noise_is_counted_and_left_out() {
    let line = |rank: u64, step: u64| {
        format!(
            "[rank{rank}]:step: {step}  loss: 9.1  memory: 61.25GiB(77.36%)  tps: 7,200  tflops: 416.80\n"
        )
    };
    let mut text = String::new();
    for step in 1..=10 {
        for rank in 0..4 {
            text.push_str(&line(rank, step));
        }
    }
    text.push_str("validate step: 10  loss: 9.0  memory: 79.00GiB(99.00%)  tps: 20,000\n");
    text.push_str("step: 11  memory: [rank3]:step: 11  loss: 9.1  memory: x  tps: 7,\n");
    let log = parse(&text, "t.log").expect("read");
    assert_eq!((log.steps.len(), log.repeated, log.garbled), (10, 30, 1));
    assert_eq!(log.reserved, Some((61.25 * 1024f64.powi(3)) as u64));
}

/// Output of one rank after the other's: each step counts once, and after a restart those since then count.
#[test]
fn ranks_may_log_one_after_the_other() {
    let run = |rank: &str, steps: std::ops::RangeInclusive<u64>| -> String {
        steps
            .map(|step| format!("{rank}step: {step}  loss: 9.1  tps: 7,200\n"))
            .collect()
    };
    for (ranks, runs, repeated) in [
        // Lines without ranks do not show whether the job began anew.
        (["12:00:00 ", "13:00:00 "], &[30, 30, 10][..], 0),
        (["", ""], &[30, 30, 10], 0),
        (["[rank0]:", "[rank1]:"], &[30], 30 + 10),
        (["[default0]:", "[default1]:"], &[30], 30 + 10),
        (["0: ", "1: "], &[30], 30 + 10),
    ] {
        let text: String = [1..=30, 21..=30]
            .into_iter()
            .flat_map(|steps| ranks.map(|rank| run(rank, steps.clone())))
            .collect();
        let log = parse(&text, "t.log").expect("read");
        let others: Vec<usize> = log.other_runs.iter().map(Vec::len).collect();
        assert_eq!((log.steps.len(), log.repeated), (10, repeated), "{ranks:?}");
        assert_eq!(others, runs, "{ranks:?}");
    }
}

/// Of several runs in one log the last counts, with its own memory; one of a few steps counts if no other has more.
#[test]
fn the_last_run_of_a_log_counts() {
    let line = |step: u64, tps: u64, gib: u64| {
        format!("step: {step}  loss: 9.1  memory: {gib}.00GiB(77%)  tps: {tps}\n")
    };
    let run = |steps: std::ops::RangeInclusive<u64>, tps: u64, gib: u64| -> String {
        steps.map(|step| line(step, tps, gib)).collect()
    };
    for (text, first, count, gib, others) in [
        (
            run(1..=20, 7200, 70) + &run(1..=30, 3600, 60),
            1,
            30,
            60,
            &[1.0][..],
        ),
        // A restart from a checkpoint.
        (
            run(1..=20, 7200, 70) + &run(16..=30, 3600, 60),
            16,
            15,
            60,
            &[1.0],
        ),
        (
            run(1..=20, 7200, 70) + &run(1..=3, 3600, 60),
            1,
            20,
            70,
            &[2.0],
        ),
        (
            run(9..=11, 7200, 70) + &run(1..=3, 3600, 60),
            1,
            3,
            60,
            &[1.0],
        ),
        (run(1..=20, 7200, 70), 1, 20, 70, &[]),
    ] {
        let log = parse(&text, "t.log").expect("read");
        let seen = (log.steps[0].step, log.steps.len(), log.reserved);
        assert_eq!(seen, (first, count, Some(gib << 30)), "{text}");
        assert_eq!(log.other_medians(size(7200.0)), others, "{text}");
    }
}

fn bar(done: u64, total: u64, seconds: u64, rate: &str) -> String {
    let (minutes, seconds) = (seconds / 60, seconds % 60);
    format!(" 10%|#  | {done}/{total} [{minutes:02}:{seconds:02}<01:00, {rate}]\r")
}

/// The bar of training in 20 steps of 5 s.
fn training(steps: std::ops::RangeInclusive<u64>) -> String {
    let steps = steps.map(|done| bar(done, 20, done * 5, "5.00s/it"));
    steps.collect()
}

fn evaluation(total: u64) -> String {
    let steps = (2..=total).map(|done| bar(done, total, done / 2, "2.00it/s"));
    bar(0, total, 0, "?it/s") + &steps.collect::<String>()
}

/// Checks that so many steps of 5 s are read.
fn check_steps(text: &str, steps: usize) {
    let log = parse(text, "x.log").expect("read");
    let times: Vec<f64> = log.steps.iter().filter_map(|step| step.seconds).collect();
    assert_eq!(times.len(), steps, "{text}");
    // Rates are smoothed, and that is undone: up to rounding.
    let same = |time: &f64| (time - 5.0).abs() < 1e-9;
    assert!(times.iter().all(same), "{times:?}");
}

/// Progress bars of the Trainer's evaluations, which have no title either, count as no steps,
/// whether within training or before.
#[test]
fn bars_of_evaluations_are_no_steps() {
    let begin = bar(0, 20, 0, "?it/s");
    let forty = |steps: std::ops::RangeInclusive<u64>| training(steps).replace("/20 ", "/40 ");
    for (text, steps) in [
        (
            begin.clone() + &training(1..=10) + &evaluation(250) + &training(11..=20),
            20,
        ),
        (evaluation(7) + &begin + &training(1..=20), 20),
        (begin.clone() + &evaluation(4) + &training(1..=20), 20),
        (begin.clone() + &training(1..=20) + &evaluation(30), 20),
        // The log begins in the midst of an evaluation.
        (
            bar(99, 250, 90, "1.00it/s") + &training(11..=20) + &evaluation(250),
            10,
        ),
        // A run that is resumed with another number of steps.
        (training(1..=9) + &forty(10..=15), 15),
        (
            training(1..=9) + &bar(0, 40, 0, "?it/s") + &forty(8..=15),
            8,
        ),
        // Two runs in one log.
        (
            begin.clone() + &training(1..=20) + &begin + &training(1..=12),
            12,
        ),
    ] {
        check_steps(&text, steps);
    }
}

/// Data are prepared under a bar without a title, for longer than training lasts: losses tell, or which bar does not end.
#[test]
fn bars_of_preparing_data_are_no_steps() {
    let begin = bar(0, 20, 0, "?it/s");
    let prepared: String = (1..=60)
        .map(|done| bar(100 * done, 6000, 2 * done, "50.0it/s"))
        .collect();
    let loss = "{'loss': 1.5, 'epoch': 0.1}\n";
    let losses = |between: &str| training(1..=10) + between + loss + &training(10..=15);
    for (text, steps) in [
        (prepared.clone() + &begin + &losses("\n"), 15),
        (prepared.clone() + &losses(""), 15),
        (prepared.clone() + &begin + &training(1..=9), 9),
        // Losses that were buffered come at the end, after another bar.
        (begin + &training(1..=20) + &evaluation(9) + "\n" + loss, 20),
    ] {
        check_steps(&text, steps);
    }
}

/// The Trainer under DeepSpeed logs a step in its bar, and some in the words of DeepSpeed too.
#[test]
fn the_bar_of_the_trainer_counts_beside_lines_of_deepspeed() {
    let begin = "  0%|  | 0/40 [00:00<?, ?it/s]\r".to_owned();
    let line = |step: u64| {
        let bar = format!(
            "{step}%|#  | {step}/40 [00:{:02}<01:00, 2.00s/it]",
            2 * step
        );
        match step % 10 {
            0 => format!(
                "\n[timer.py:264:stop] global_step={step}, CurrSamplesPerSec=42.0\n{bar}\n{{'loss': 1.0}}\n"
            ),
            _ => bar + "\r",
        }
    };
    let text: String = (1..=29).map(line).collect();
    let log = parse(&(begin + &text), "x.log").expect("read");
    assert_eq!(
        (log.system, log.of_others, log.steps.len()),
        (LogSystem::Trainer, 0, 29)
    );
    // A bar of preparing data is no reason to leave DeepSpeed's lines.
    let rates = (1..=9).map(|step| format!("global_step={step}, CurrSamplesPerSec=42.0\n"));
    let text = "100%|#| 90/90 [00:09<00:00, 10.0it/s]\n{'loss': 1.0}\n".to_owned();
    let log = parse(&(text + &rates.collect::<String>()), "x.log").expect("read");
    assert_eq!((log.system, log.steps.len()), (LogSystem::DeepSpeed, 9));
}

/// A bar smooths its rate as tqdm does: every tenth step is followed by a save of 30 s, and the first step is slow.
#[test]
fn one_slow_step_is_one_step() {
    let (mut steps, mut seconds, mut elapsed) = (0.0, 0.0, 0.0);
    let mut text = "  0%|   | 0/100 [00:00<?, ?it/s]\r".to_owned();
    for step in 1..=100 {
        let saves = if step % 10 == 1 { 30.0 } else { 0.0 };
        let took = 2.1 + saves;
        elapsed += took;
        (steps, seconds) = (0.3 + 0.7 * steps, 0.3 * took + 0.7 * seconds);
        let (minutes, left) = (elapsed as u64 / 60, elapsed as u64 % 60);
        let rate = seconds / steps;
        text +=
            &format!("{step}%|#  | {step}/100 [{minutes:02}:{left:02}<01:00, {rate:5.2}s/it]\r");
    }
    let log = parse(&text, "x.log").expect("read");
    let steady = log.steady("x.log", None, size(1.0)).expect("steps");
    // Rates have two digits after the point.
    assert!((steady.median() - 2.1).abs() < 0.02, "{}", steady.median());
    assert_eq!((log.steps.len(), steady.slow()), (100, 9));
}

/// A progress bar with a negative rate counts as one without a rate, and its neighbours keep
/// theirs.
#[test]
fn a_negative_rate_is_none() {
    let bar = |done: u64| {
        let rate = if done == 7 { "-40.00s/it" } else { "2.00s/it" };
        format!(
            "{done}%|#  | {done}/100 [00:{:02}<03:00, {rate}]\r",
            2 * done
        )
    };
    let text: String = (1..=12).map(bar).collect();
    let log = parse(&text, "x.log").expect("read");
    let times: Vec<f64> = log.steps.iter().filter_map(|step| step.seconds).collect();
    assert_eq!(times.len(), 11);
    assert!(
        times.iter().all(|time| (time - 2.0).abs() < 1e-9),
        "{times:?}"
    );
}
