//! An option of Megatron-LM's command line.

/// An option with its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flag {
    pub(crate) name: &'static str,
    pub(crate) values: Vec<String>,
}

impl Flag {
    pub(crate) fn switch(name: &'static str) -> Self {
        let values = Vec::new();
        Self { name, values }
    }

    pub(crate) fn value(name: &'static str, value: impl ToString) -> Self {
        let values = vec![value.to_string()];
        Self { name, values }
    }
}
