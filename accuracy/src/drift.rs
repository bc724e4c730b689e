//! Watches a run's step times against its prediction: says when their median leaves the prediction's interval, and when
//! it comes back.

use catalog::Seconds;

/// Number of last steps whose median is compared with the prediction, so that one slow step does not count as drift.
pub const WINDOW: usize = 10;

/// A run's median step time left its prediction's interval, or came back into it. The value is that median.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// The median left the interval.
    Left(Seconds),
    /// The median is within the interval again.
    Returned(Seconds),
}

/// The predicted interval of a running job's step time, and whether its steps were outside of it when last looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Watch {
    interval: (Seconds, Seconds),
    outside: bool,
}

impl Watch {
    /// A watch over a prediction's interval of step times.
    #[must_use]
    pub fn new(interval: (Seconds, Seconds)) -> Self {
        Self {
            interval,
            outside: false,
        }
    }

    /// Whether the run was last seen outside of the interval.
    #[must_use]
    pub fn outside(&self) -> bool {
        self.outside
    }

    /// Takes all step times so far, oldest first. Returns a change if the run left the interval or came back since the
    /// last call.
    pub fn see(&mut self, seconds: &[f64]) -> Option<Change> {
        let median = recent_median(seconds)?;
        let (low, high) = (self.interval.0.0, self.interval.1.0);
        let outside = !(low..=high).contains(&median);
        let changed = outside != self.outside;
        self.outside = outside;
        changed.then_some(match outside {
            true => Change::Left(Seconds(median)),
            false => Change::Returned(Seconds(median)),
        })
    }
}

/// Median of the last [`WINDOW`] step times; `None` while there are fewer.
#[must_use]
pub fn recent_median(seconds: &[f64]) -> Option<f64> {
    let from = seconds.len().checked_sub(WINDOW)?;
    let mut last = seconds[from..].to_vec();
    last.sort_by(f64::total_cmp);
    Some((last[(WINDOW - 1) / 2] + last[WINDOW / 2]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::{Change, Watch};
    use catalog::Seconds;

    #[test]
    fn a_run_that_slows_down_is_noticed_once() {
        let mut watch = Watch::new((Seconds(0.9), Seconds(1.1)));
        let mut seconds = vec![1.0; 9];
        assert_eq!(watch.see(&seconds), None);
        // A single slow step moves no median.
        seconds.push(30.0);
        assert_eq!(watch.see(&seconds), None);
        seconds.extend([1.4; 10]);
        assert_eq!(watch.see(&seconds), Some(Change::Left(Seconds(1.4))));
        assert!(watch.outside());
        seconds.push(1.4);
        assert_eq!(watch.see(&seconds), None);
        seconds.extend([1.0; 10]);
        assert_eq!(watch.see(&seconds), Some(Change::Returned(Seconds(1.0))));
    }
}
