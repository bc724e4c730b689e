//! Quantiles of values from several sources, each source weighing the same however many values it has.

use std::collections::BTreeMap;

/// Values in rising order, each with its weight; the weights of one source add up to 1.
#[derive(Debug)]
pub(crate) struct Weighed(Vec<(f64, f64)>);

impl Weighed {
    /// Weighs values, each given with its source.
    pub(crate) fn new<S: Ord>(values: impl IntoIterator<Item = (S, f64)>) -> Self {
        let mut by_source: BTreeMap<S, Vec<f64>> = BTreeMap::new();
        for (source, value) in values {
            by_source.entry(source).or_default().push(value);
        }
        let weigh = |values: Vec<f64>| {
            let weight = 1.0 / values.len() as f64;
            values.into_iter().map(move |value| (value, weight))
        };
        let mut weighed: Vec<(f64, f64)> = by_source.into_values().flat_map(weigh).collect();
        weighed.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self(weighed)
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Number of sources, which is the sum of all weights.
    pub(crate) fn sources(&self) -> f64 {
        self.0.iter().map(|(_, weight)| weight).sum()
    }

    /// The value up to which the values have this share of all weight; `None` if there are none.
    pub(crate) fn quantile(&self, share: f64) -> Option<f64> {
        let total = self.sources();
        let mut below = 0.0;
        let found = self.0.iter().find(|(_, weight)| {
            below += weight;
            below >= share * total
        });
        found.or(self.0.last()).map(|(value, _)| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_weigh_the_same_however_many_values_they_have() {
        let many = (0..90).map(|_| ("many", 0.0));
        let few = (0..9).map(|_| ("few", 1.0));
        let all = Weighed::new(many.chain(few));
        assert_eq!(
            (all.quantile(0.4), all.quantile(0.6)),
            (Some(0.0), Some(1.0))
        );
        assert_eq!(Weighed::new::<u8>([]).quantile(0.5), None);
    }
}
