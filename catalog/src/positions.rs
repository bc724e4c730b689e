//! How long the sequences of a model may be.

use crate::Mistake;
use crate::model::{ModelConfig, Position};
use crate::rope::RopeScaling;

impl ModelConfig {
    /// Tokens that the model's learned position table has room for; `None` if it has no such table.
    #[must_use]
    pub fn table_of_positions(&self) -> Option<u64> {
        match self.position {
            // OPT's table has rows that belong to no position.
            Position::Learned { rows } => Some(rows.min(self.max_position)),
            Position::Rope { .. } | Position::Alibi | Position::Absent => None,
        }
    }

    /// The declared sequence length of a model with rotary positions, if `seq_len` is longer, else
    /// `None`. Longer sequences run, on positions that the model was not trained on.
    #[must_use]
    pub fn exceeded_by(&self, seq_len: u64) -> Option<u64> {
        let Position::Rope { .. } = self.position else {
            return None;
        };
        // Configurations that extend a model by YaRN often declare its original length.
        let extended = match self.constants.rope_scaling {
            RopeScaling::Yarn {
                factor, original, ..
            } => (factor * original) as u64,
            _ => 0,
        };
        let declared = self.max_position.max(extended);
        (seq_len > declared).then_some(declared)
    }

    /// Refuses sequences that are longer than the model's learned table of positions: no framework can run them.
    ///
    /// # Errors
    /// When they are longer.
    pub fn check_sequence(&self, seq_len: u64) -> Result<(), Mistake> {
        match self.table_of_positions() {
            Some(most) if seq_len > most => {
                let what = format!(
                    "{} has a learned table of {most} positions, and a sequence has {seq_len} tokens",
                    self.name
                );
                let wrong = Mistake::new(what).at(format!("--seq {seq_len}"));
                let wrong = wrong.expected(format!("1 to {most} tokens"));
                Err(wrong.nearest(Some(most.to_string())))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn models_take_sequences_of_their_own_length() {
        for (model, table, declared) in [
            ("gpt2", Some(1024), None),
            // Two rows of its table belong to no position.
            ("opt-13b", Some(2048), None),
            ("llama3-8b", None, Some(131_072)),
            // 4,096 positions, extended 40 times by YaRN.
            ("deepseek-v3", None, Some(163_840)),
            ("bloom-7b1", None, None),
        ] {
            let of = crate::load::model(model).expect("a preset");
            assert_eq!(of.table_of_positions(), table, "{model}");
            assert_eq!(of.exceeded_by(1 << 22), declared, "{model}");
            assert_eq!(of.check_sequence(1 << 22).is_err(), table.is_some());
            let most = table.or(declared).unwrap_or(1);
            assert!(of.check_sequence(most).is_ok(), "{model}");
            assert_eq!(of.exceeded_by(most), None, "{model}");
        }
    }
}
