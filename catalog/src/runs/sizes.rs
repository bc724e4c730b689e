//! The sizes of published runs in users' files, checked when a file is read, so that no product of them overflows; and that
//! what is assumed of a run has a name of its fields.

use serde_json::{Map, Value};

use super::{Run, RunsFile};
use crate::error::{SpecError, in_range};
use crate::suggest::nearest;
use crate::workload::MAX_GLOBAL_BATCH;

/// Sizes of models that may be 0: a model may have none of them.
const MAY_BE_ABSENT: [&str; 2] = ["shared_experts", "dense_layers"];

impl RunsFile {
    /// Refuses runs with a size out of range, and names the run and its field.
    pub(super) fn check_sizes(&self, path: &str) -> Result<(), SpecError> {
        self.check_each(path, check)
    }

    /// Refuses runs whose sizes contradict each other: a prediction would have to ignore one of them. Published rows are predicted
    /// all the same, by the number of GPUs and the batch.
    pub(super) fn check_products(&self, path: &str) -> Result<(), SpecError> {
        self.check_each(path, contradicts)
    }

    fn check_each(
        &self,
        path: &str,
        of_run: fn(&Run) -> Result<(), (String, String)>,
    ) -> Result<(), SpecError> {
        for (index, run) in self.runs.iter().enumerate() {
            of_run(run).map_err(|(field, message)| {
                let run = match run.id.as_str() {
                    "" => (index + 1).to_string(),
                    id => format!("`{id}`"),
                };
                SpecError::field(format!("{path}, run {run}"), &field, message)
            })?;
        }
        Ok(())
    }
}

/// Refuses a number of replicas that is not that of the GPUs, and a number of micro-batches that is not that of the batch.
fn contradicts(run: &Run) -> Result<(), (String, String)> {
    let sizes = [run.num_gpus, run.tp, run.pp];
    let [Some(gpus), Some(tp), Some(pp)] = sizes else {
        return Ok(());
    };
    let of_replica = [tp, pp, run.cp.unwrap_or(1)].into_iter();
    let replica = of_replica.fold(1, u64::saturating_mul);
    let replicas = gpus / replica.max(1);
    if let Some(dp) = run.dp.filter(|dp| *dp != replicas) {
        let message =
            format!("{dp} replicas of {replica} GPUs (tp · pp · cp) are not num_gpus {gpus}");
        return Err(("dp".to_owned(), message));
    }
    let batches = [run.global_batch, run.micro_batch, run.grad_accum];
    let [Some(batch), Some(micro_batch), Some(steps)] = batches else {
        return Ok(());
    };
    let product = [replicas, micro_batch, steps]
        .into_iter()
        .fold(1, u64::saturating_mul);
    if product == batch {
        return Ok(());
    }
    let message = format!(
        "{steps} micro-batches of {micro_batch} sequences on each of {replicas} replicas are not global_batch {batch}"
    );
    Err(("grad_accum".to_owned(), message))
}

/// Refuses what is assumed under an unknown name, and a size of a run that is out of range, by its field's name. Every number is a size but those that were measured, those
/// derived from them, and flags.
fn check(run: &Run) -> Result<(), (String, String)> {
    let Ok(Value::Object(fields)) = serde_json::to_value(run) else {
        return Ok(());
    };
    let of = |name: &str| fields.get(name).and_then(Value::as_object);
    let unknown = |name: &&String| !fields.contains_key(*name);
    if let Some(name) = of("assumed").and_then(|assumed| assumed.keys().find(unknown)) {
        let message = match nearest(name, fields.keys()) {
            Some(near) => format!("`{name}` is no field of a run; did you mean `{near}`?"),
            None => format!("`{name}` is no field of a run; expected one of them"),
        };
        return Err((format!("assumed.{name}"), message));
    }
    in_object(&fields, "")?;
    for name in ["model", "assumed"] {
        of(name).map_or(Ok(()), |sizes| in_object(sizes, &format!("{name}.")))?;
    }
    Ok(())
}

fn in_object(sizes: &Map<String, Value>, prefix: &str) -> Result<(), (String, String)> {
    for (name, value) in sizes.iter().filter(|(_, value)| value.is_number()) {
        let least = u64::from(!MAY_BE_ABSENT.contains(&name.as_str()));
        let whole = value
            .as_u64()
            .ok_or_else(|| format!("{value} is no size; expected a whole number"));
        whole
            .and_then(|size| in_range(size, least..=MAX_GLOBAL_BATCH))
            .map_err(|message| (format!("{prefix}{name}"), message))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_out_of_range_are_refused_with_run_and_field() {
        for (run, says) in [
            (
                "{id: a, global_batch: 9223372036854775808}",
                "runs.yaml, run `a`: field `global_batch`: 9223372036854775808 is out of range; expected 1 to 16777216",
            ),
            ("{id: a, micro_batch: 16777217}", "field `micro_batch`"),
            ("{id: a, vpp: 0}", "field `vpp`: 0 is out of range"),
            ("{global_batch: 0}", "run 1: field `global_batch`"),
            ("{id: a, model: {layers: 0}}", "field `model.layers`"),
            (
                "{id: a, model: {dense_layers: 16777217}}",
                "expected 0 to 16777216",
            ),
            (
                "{id: a, assumed: {tp: 18446744073709551615}}",
                "field `assumed.tp`",
            ),
            (
                "{id: a, assumed: {pp: 1.5}}",
                "1.5 is no size; expected a whole number",
            ),
        ] {
            let text = format!("schema: runs-v1\nruns: [{run}]\n");
            let error = RunsFile::parse(&text, "runs.yaml").expect_err(run);
            assert!(error.to_string().contains(says), "{run}: {error}");
        }
    }

    #[test]
    fn sizes_that_contradict_each_other_are_refused() {
        // 16 GPUs in replicas of tp 2 are 8 replicas; 32 sequences in micro-batches of 1 are 4 on each.
        let mesh = "num_gpus: 16, tp: 2, pp: 1";
        let batch = "global_batch: 32, micro_batch: 1";
        for (rest, says) in [
            (
                "dp: 4".to_owned(),
                "field `dp`: 4 replicas of 2 GPUs (tp · pp · cp) are not num_gpus 16",
            ),
            ("dp: 4, cp: 2".to_owned(), ""),
            ("dp: 8".to_owned(), ""),
            (
                format!("{batch}, grad_accum: 2"),
                "field `grad_accum`: 2 micro-batches of 1 sequences on each of 8 replicas are not global_batch 32",
            ),
            (format!("{batch}, grad_accum: 4"), ""),
            (format!("dp: 8, {batch}"), ""),
        ] {
            let text = format!("schema: runs-v1\nruns: [{{id: a, {mesh}, {rest}}}]\n");
            let said = match RunsFile::parse(&text, "runs.yaml") {
                Ok(_) => String::new(),
                Err(error) => error.to_string(),
            };
            let right = said.contains(says) && says.is_empty() == said.is_empty();
            assert!(right, "{rest}: {said:?}, not {says:?}");
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_at_its_line() {
        for (run, says) in [
            (
                "globl_batch: 4",
                "line 3 column 3: unknown field `globl_batch`",
            ),
            ("model: {hiden: 4}", "unknown field `hiden`"),
            ("status: okay", "unknown variant `okay`"),
            ("tier: D", "unknown variant `D`"),
            (
                "metrics: {step_time_s: -1}",
                "-1 is not measured; expected a number above 0",
            ),
            ("metrics: {step_time_s: fast}", "\"fast\" is not measured"),
            ("metrics: {step_time_s: .nan}", "non-finite float"),
            (
                "metrics: {tokens_per_sec: 9}",
                "unknown field `tokens_per_sec`",
            ),
            ("derived: {step_time: 9}", "unknown field `step_time`"),
        ] {
            let text = format!("schema: runs-v1\nruns:\n- {run}\n");
            let error = RunsFile::parse(&text, "runs.yaml").expect_err(run);
            assert!(error.to_string().contains(says), "{run}: {error}");
        }
    }

    #[test]
    fn sizes_in_range_and_numbers_that_are_no_sizes_are_read() {
        for run in [
            "{id: a, global_batch: 16777216, model: {shared_experts: 0}}",
            "{id: a, flags: {tokens: 300000000000}, metrics: {step_time_s: 0.5}}",
            "{id: a, assumed: {seq_len: the default}}",
        ] {
            let text = format!("schema: runs-v1\nruns: [{run}]\n");
            assert!(RunsFile::parse(&text, "runs.yaml").is_ok(), "{run}");
        }
        let runs = super::super::embedded().expect("embedded runs are well-formed");
        let schema = "runs-v1".to_owned();
        let file = RunsFile { schema, runs };
        assert_eq!(file.check_sizes("published.jsonl"), Ok(()));
    }
}
