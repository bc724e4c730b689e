//! `--break-at`: stops at an operator and shows the tensors it read and wrote.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Mutex;

use catalog::Mistake;
use cpu_device::Tensor;
use cpu_device::{Seen, Watch, WatchError};
use dtensor::{TensorId, TensorInfo};

use crate::error::CliError;

/// A watch that stops ranks at the operator of this name, and remembers what it saw.
pub(crate) struct BreakAt {
    name: String,
    seen: Mutex<Sighting>,
}

#[derive(Default)]
struct Sighting {
    /// Reports of the ranks that stopped, with rank numbers.
    reports: Vec<(usize, String)>,
    /// Names of operators that ran before.
    others: BTreeSet<String>,
}

impl BreakAt {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            seen: Mutex::default(),
        }
    }

    /// The collected reports.
    ///
    /// # Errors
    /// When no operator has this name; the error names the most similar one that ran.
    pub(crate) fn report(self) -> Result<String, CliError> {
        let Sighting {
            mut reports,
            others,
        } = self
            .seen
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if reports.is_empty() {
            let nearest = catalog::suggest::nearest(&self.name, &others);
            let wrong = Mistake::new("no operator of that name ran")
                .at(format!("--break-at {}", self.name))
                .expected("the name of an operator, as --trace shows them");
            return Err(wrong.nearest(nearest).into());
        }
        reports.sort();
        Ok(reports.into_iter().map(|(_, text)| text).collect())
    }
}

impl Watch for BreakAt {
    fn ran(&self, seen: &Seen<'_>) -> Result<(), WatchError> {
        let name = seen.name();
        let mut sighting = self
            .seen
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if name != self.name {
            sighting.others.insert(name);
            return Ok(());
        }
        sighting.reports.push((seen.rank, describe(seen)));
        Err(WatchError::Stopped { operator: name })
    }
}

fn describe(seen: &Seen<'_>) -> String {
    let mut text = format!(
        "rank {}: {} ({}), step {}, sequences from {}\n",
        seen.rank,
        seen.title(),
        seen.pass(),
        seen.micro_batch.step,
        seen.micro_batch.first_sequence
    );
    list(&mut text, seen, "read", seen.op.inputs);
    list(&mut text, seen, "wrote", seen.op.outputs);
    text
}

fn list(text: &mut String, seen: &Seen<'_>, verb: &str, ids: &[TensorId]) {
    for (info, tensor) in seen.tensors(ids) {
        let _ = writeln!(text, "  {verb:<5} {}", line(info, &tensor));
    }
}

/// A tensor on one line: its description and statistics.
fn line(info: &TensorInfo, tensor: &Tensor) -> String {
    let values = tensor.f32();
    let finite = || values.iter().copied().filter(|x| x.is_finite());
    let count = finite().count();
    let (mut least, mut most, mut sum, mut squares) = (f32::MAX, f32::MIN, 0.0, 0.0);
    for x in finite() {
        least = least.min(x);
        most = most.max(x);
        sum += f64::from(x);
        squares += f64::from(x) * f64::from(x);
    }
    let mean = sum / count.max(1) as f64;
    let rms = (squares / count.max(1) as f64).sqrt();
    let local: Vec<u64> = tensor.shape.iter().map(|&d| d as u64).collect();
    let numbers = if count == 0 {
        "no finite number".to_owned()
    } else {
        format!("{least:.4e} … {most:.4e}, mean {mean:.4e}, rms {rms:.4e}")
    };
    let lost = values.len() - count;
    let lost = match lost {
        0 => String::new(),
        _ => format!(", {lost} not finite"),
    };
    format!(
        "{} {:?} {local:?} of {:?} ({}): {numbers}{lost}",
        info.name, info.dtype, info.global, info.placements
    )
}
