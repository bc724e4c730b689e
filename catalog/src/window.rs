//! Windows of attention: the earlier tokens that a query may attend to.

/// The tokens that a query may attend to, given its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Window {
    /// The last `n` tokens, including its own.
    Sliding(u64),
    /// The earlier tokens of its chunk; a sequence is cut into chunks of `n` tokens (Llama 4).
    Chunk(u64),
}

impl Window {
    /// Most tokens that a query sees.
    #[must_use]
    pub fn tokens(self) -> u64 {
        match self {
            Self::Sliding(tokens) | Self::Chunk(tokens) => tokens,
        }
    }

    /// The first token that a query at this position sees.
    #[must_use]
    pub fn first(self, position: u64) -> u64 {
        match self {
            Self::Sliding(tokens) => (position + 1).saturating_sub(tokens),
            Self::Chunk(tokens) => position - position % tokens.max(1),
        }
    }

    /// Tokens that a query of a sequence sees on average, its own and those before it.
    #[must_use]
    pub fn mean(self, sequence: u64) -> f64 {
        let sum = |tokens: u64| tokens as f64 * (tokens + 1) as f64 / 2.0;
        let length = sequence.max(1);
        match self {
            // The first queries do not fill the window.
            Self::Sliding(tokens) => {
                let window = tokens.min(length) as f64;
                window - window * (window - 1.0) / (2.0 * length as f64)
            }
            Self::Chunk(tokens) => {
                let tokens = tokens.clamp(1, length);
                let whole = (length / tokens) as f64 * sum(tokens);
                (whole + sum(length % tokens)) / length as f64
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Window;

    #[test]
    fn the_mean_is_that_of_all_queries() {
        for window in [1, 3, 8, 20, 50].map(|n| [Window::Sliding(n), Window::Chunk(n)]) {
            for window in window {
                let seen = |position: u64| position + 1 - window.first(position);
                let all: u64 = (0..20).map(seen).sum();
                assert!(
                    (window.mean(20) - all as f64 / 20.0).abs() < 1e-12,
                    "{window:?}"
                );
            }
        }
    }
}
