//! Days and dollars of a whole training.

use catalog::{Cluster, Seconds};
use reports::format;
use serde::Serialize;

/// Days and dollars of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Budget {
    /// Number of tokens trained on.
    pub tokens: f64,
    /// Days at the predicted rate.
    pub days: f64,
    /// Dollars per device-hour, if known.
    pub price: Option<f64>,
    /// Dollars of the whole run, if the price is known.
    pub dollars: Option<f64>,
}

/// The training run whose cost was asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Training {
    tokens: Option<f64>,
    price: Option<f64>,
}

impl Training {
    /// A run of so many tokens, if they are given, at a price per device-hour; without a price, at the cluster's.
    #[must_use]
    pub fn on(cluster: &Cluster, tokens: Option<f64>, price: Option<f64>) -> Self {
        let usual = || cluster.dollars_per_gpu_hour.as_ref().map(|p| p.value);
        Self {
            tokens,
            price: price.or_else(usual),
        }
    }

    /// Days and dollars of the run at a predicted rate, if a number of tokens was given.
    #[must_use]
    pub fn budget(&self, gpus: u64, tokens_per_s_per_gpu: f64) -> Option<Budget> {
        let tokens = self.tokens?;
        let seconds = tokens / (tokens_per_s_per_gpu * gpus as f64);
        Some(Budget {
            tokens,
            days: seconds / 86400.0,
            price: self.price,
            dollars: self
                .price
                .map(|price| price * gpus as f64 * seconds / 3600.0),
        })
    }
}

/// Days and dollars of the training on one line.
#[must_use]
pub fn line(b: &Budget) -> String {
    let dollars = b
        .dollars
        .map_or_else(String::new, |d| format!(", {}", format::dollars(d)));
    let days = format::duration(Seconds(b.days * 86400.0));
    format!(
        "\n{} tokens: {days}{dollars}\n",
        format::short_count(b.tokens)
    )
}
