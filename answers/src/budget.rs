//! How long a whole training takes and what it costs. If the times of a checkpoint and of a restart
//! are given, the time lost to failures is included.

use catalog::{Bytes, Cluster, Seconds};
use costmodel::Scenario;
use costmodel::goodput::{Failures, PUBLISHED, published_mtbf};
use plans::Decisions;
use reports::format;
use reports::lines::{Style, of};
use serde::Serialize;

use crate::failures::{Checkpoint, Mtbf};

const DAY: f64 = 86400.0;
/// Days, a million years, after which a training counts as never done.
const NEVER: f64 = 365.25e6;

/// Days and dollars of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Budget {
    /// Number of tokens trained on.
    pub tokens: f64,
    /// Days at the predicted rate, with failures if these are given; infinite if it never ends.
    pub days: f64,
    /// Dollars per device-hour, if known.
    pub price: Option<f64>,
    /// Dollars of the whole run, if the price is known and it is ever done.
    pub dollars: Option<f64>,
    /// Time lost to failures, if facts about these are given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failures: Option<Lost>,
}

/// The effect of failures on a training run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Lost {
    /// Share of the time that is spent on steps which are kept.
    pub goodput: f64,
    /// Days if nothing failed and no checkpoint were written.
    pub days_without: f64,
    /// Mean time between two failures of the whole job.
    pub mtbf_s: f64,
    /// Whether `mtbf_s` follows from the published failure rate, because none was given.
    pub mtbf_published: bool,
    /// Bytes of a checkpoint.
    pub checkpoint_bytes: u64,
    /// Seconds for which writing a checkpoint stops the training.
    pub checkpoint_s: f64,
    /// Seconds of computing between two checkpoints at which least time is lost.
    pub checkpoint_every_s: f64,
    /// Seconds from a failure until training goes on.
    pub restart_s: f64,
}

impl Lost {
    /// Command-line flags that give the same facts for a job on `gpus` GPUs.
    pub(crate) fn flags(&self, gpus: u64) -> Vec<(&'static str, String)> {
        let seconds = |time: f64| format!("{time}s");
        let given = (!self.mtbf_published).then(|| ("mtbf", seconds(self.mtbf_s * gpus as f64)));
        let mut flags = vec![
            ("checkpoint", seconds(self.checkpoint_s)),
            ("restart", seconds(self.restart_s)),
        ];
        flags.extend(given);
        flags
    }
}

/// The training run whose length and cost were asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Training {
    tokens: Option<f64>,
    price: Option<f64>,
    facts: Option<Facts>,
}

/// Facts about failures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// Mean time between failures; without it, the published one.
    pub mtbf: Option<Mtbf>,
    /// Time or rate of writing a checkpoint.
    pub checkpoint: Checkpoint,
    /// Time from a failure until training goes on.
    pub restart: Seconds,
    /// Number of parameters that are trained, which a checkpoint holds.
    pub trained: u64,
}

impl Training {
    /// A run of `tokens` tokens at a price per device-hour; without a price, at the cluster's.
    #[must_use]
    pub fn on(cluster: &Cluster, tokens: Option<f64>, price: Option<f64>) -> Self {
        let usual = || cluster.dollars_per_gpu_hour.as_ref().map(|p| p.value);
        Self {
            tokens,
            price: price.or_else(usual),
            facts: None,
        }
    }

    /// This run with failures, if their facts are given.
    #[must_use]
    pub fn with_failures(self, facts: Option<Facts>) -> Self {
        Self { facts, ..self }
    }

    /// Days and dollars of the run on `gpus` GPUs at the predicted rate, if a number of tokens was
    /// given. `d` decides the size of a checkpoint.
    #[must_use]
    pub fn budget(
        &self,
        scenario: &Scenario,
        gpus: u64,
        d: &Decisions,
        tokens_per_s_per_gpu: f64,
    ) -> Option<Budget> {
        let tokens = self.tokens?;
        let days_without = tokens / (tokens_per_s_per_gpu * gpus as f64) / DAY;
        let lost = |facts: Facts| facts.lost(scenario, gpus, d, days_without);
        let failures = self.facts.map(lost);
        let days = match failures.map_or(days_without, |lost| days_without / lost.goodput) {
            days if days > NEVER => f64::INFINITY,
            days => days,
        };
        let price = self.price.filter(|_| days.is_finite());
        Some(Budget {
            tokens,
            days,
            price: self.price,
            dollars: price.map(|price| price * gpus as f64 * days * 24.0),
            failures,
        })
    }
}

impl Facts {
    fn lost(&self, scenario: &Scenario, gpus: u64, d: &Decisions, days_without: f64) -> Lost {
        let nodes = gpus.div_ceil(scenario.cluster.gpus_per_node);
        let between = match self.mtbf {
            None => published_mtbf().0 / gpus as f64,
            Some(Mtbf::PerGpu(time)) => time.0 / gpus as f64,
            Some(Mtbf::PerNode(time)) => time.0 / nodes as f64,
        };
        let bytes = costmodel::states::checkpoint(scenario, d, self.trained);
        let checkpoint = match self.checkpoint {
            Checkpoint::Time(time) => time,
            Checkpoint::Rate(rate) => bytes / rate,
        };
        let failures = Failures {
            between: Seconds(between),
            checkpoint,
            restart: self.restart,
        };
        let interval = failures.best_interval();
        Lost {
            goodput: failures.goodput(interval),
            days_without,
            mtbf_s: between,
            mtbf_published: self.mtbf.is_none(),
            checkpoint_bytes: bytes.0,
            checkpoint_s: checkpoint.0,
            checkpoint_every_s: interval.0,
            restart_s: self.restart.0,
        }
    }
}

/// Days and dollars of the training, and what failures take of them, as text.
#[must_use]
pub fn lines(b: &Budget, style: Style) -> String {
    let whole = line(b);
    let Some(lost) = &b.failures else {
        return whole;
    };
    let time = |seconds| format::duration(Seconds(seconds));
    let mut failures = format!(
        "goodput {} ({} without failures): a failure every {}, {} to restart; a checkpoint of {} takes {}",
        of(lost.goodput),
        time(lost.days_without * DAY),
        time(lost.mtbf_s),
        time(lost.restart_s),
        format::bytes(Bytes(lost.checkpoint_bytes)),
        time(lost.checkpoint_s),
    );
    if b.days.is_finite() {
        let every = time(lost.checkpoint_every_s);
        failures.push_str(&format!(
            ", and is best written every {every} (Young, Daly)"
        ));
    }
    let mut text = whole + &style.paragraph("  ", &failures);
    if lost.mtbf_published {
        let source = format!("failures as published: {PUBLISHED}; --mtbf says others");
        text.push_str(&style.paragraph("  ", &source));
    }
    text
}

fn line(b: &Budget) -> String {
    let dollars = b
        .dollars
        .map_or_else(String::new, |d| format!(", {}", format::dollars(d)));
    let days = match b.days.is_finite() {
        true => format::duration(Seconds(b.days * DAY)),
        false => "never done, because failures come too fast".to_owned(),
    };
    format!(
        "\n{} tokens: {days}{dollars}\n",
        format::short_count(b.tokens)
    )
}

#[cfg(test)]
mod tests {
    use catalog::{Precision, Workload, WorkloadSizes};

    use super::*;

    fn scenario() -> Scenario {
        let sizes = WorkloadSizes {
            gpus: 8,
            seq_len: 4096,
            global_batch: 64,
            precision: Precision::Bf16,
        };
        Scenario {
            model: catalog::load::model("llama3-8b").expect("a preset"),
            cluster: catalog::load::cluster("dgx-h100").expect("a preset"),
            runtime: catalog::load::runtime("megatron-core").expect("a preset"),
            workload: Workload::new(sizes).expect("a workload"),
            headroom: 0.05,
        }
    }

    fn training(mtbf: Option<Mtbf>) -> Training {
        let s = scenario();
        let training = Training::on(&s.cluster, Some(1e12), Some(2.0));
        training.with_failures(Some(Facts {
            mtbf,
            checkpoint: Checkpoint::Time(Seconds(60.0)),
            restart: Seconds(600.0),
            trained: 8_000_000_000,
        }))
    }

    /// More GPUs fail more often. The same MTBF per node means fewer failures than per GPU. With a
    /// failure every second no training ends.
    #[test]
    fn failures_grow_with_gpus() {
        let s = scenario();
        let plan = plans::grammar::parse("tp8", &s.model, &s.workload, &s.runtime);
        let plan = plan.expect("a strategy");
        let year = Seconds(365.25 * DAY);
        let lost = |mtbf, gpus| {
            let budget = training(mtbf).budget(&s, gpus, &plan, 1000.0);
            let budget = budget.expect("tokens are given");
            let lost = budget.failures.expect("facts are given");
            let dollars = budget.dollars.expect("a price");
            assert!((dollars / (2.0 * 24.0 * gpus as f64 * budget.days) - 1.0).abs() < 1e-12);
            assert!((budget.days * lost.goodput / lost.days_without - 1.0).abs() < 1e-12);
            lost
        };
        for mtbf in [None, Some(Mtbf::PerGpu(year)), Some(Mtbf::PerNode(year))] {
            let shares = [8, 64, 1024, 16384].map(|gpus| lost(mtbf, gpus).goodput);
            assert!(
                shares.windows(2).all(|pair| pair[0] > pair[1]),
                "{shares:?}"
            );
        }
        let (gpu, node) = (Mtbf::PerGpu(year), Mtbf::PerNode(year));
        let ratio = lost(Some(node), 64).mtbf_s / lost(Some(gpu), 64).mtbf_s;
        assert!((ratio - 8.0).abs() < 1e-9);
        // A failure every second is too many, whatever a GPU costs.
        let second = Some(Mtbf::PerGpu(Seconds(1.0)));
        let never = training(second).budget(&s, 8, &plan, 1000.0);
        let never = never.expect("tokens are given");
        assert_eq!((never.days, never.dollars), (f64::INFINITY, None));
        let style = Style {
            width: 100,
            colour: false,
        };
        let text = lines(&never, style);
        assert!(
            text.contains("never done") && !text.contains("best written"),
            "{text}"
        );
        // Llama 3's own: a failure every three hours, and more than 90% of the time was effective.
        let llama = lost(None, 16384);
        assert!((llama.mtbf_s / 3600.0 - 3.1).abs() < 0.1);
        assert!((0.8..0.95).contains(&llama.goodput), "{}", llama.goodput);
    }
}
