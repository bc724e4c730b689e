//! Two properties that few published runs have, long sequences and experts across the network, and which runs are evidence for a
//! plan that has them.

/// Sequence length, and whether expert-parallel ranks exchange tokens over the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reach {
    /// Tokens per sequence.
    pub seq_len: u64,
    /// Whether tokens are sent to experts over the network, out of a node or a larger domain of fast links.
    pub experts_across: bool,
}

impl Reach {
    /// Whether a run with these properties is evidence for a plan with the properties `asked`: the run's sequences are at least
    /// half as long, and it sends tokens to experts over the network if the plan does.
    #[must_use]
    pub fn shows(self, asked: Self) -> bool {
        self.seq_len >= asked.seq_len / 2 && self.experts_across >= asked.experts_across
    }

    /// The reaches with the sequence length alone, with the experts alone, and with both.
    pub(crate) fn parts(self) -> [Self; 3] {
        let nowhere = Self::default();
        let Self {
            seq_len,
            experts_across,
        } = self;
        [
            Self { seq_len, ..nowhere },
            Self {
                experts_across,
                ..nowhere
            },
            self,
        ]
    }

    /// Which runs are evidence for this, in words that follow "published runs". Empty if all runs are.
    pub(crate) fn words(self) -> String {
        let mut parts = Vec::new();
        if self.seq_len > 0 {
            parts.push(format!("at least {} tokens per sequence", self.seq_len / 2));
        }
        if self.experts_across {
            parts.push("experts across the network".to_owned());
        }
        match parts.is_empty() {
            true => String::new(),
            false => format!(" with {}", parts.join(" and ")),
        }
    }
}
