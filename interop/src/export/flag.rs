//! Options of Megatron-LM's command line.

/// An option with its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flag {
    pub(crate) name: String,
    pub(crate) values: Vec<String>,
}

impl Flag {
    pub(crate) fn switch(name: &str) -> Self {
        let (name, values) = (name.to_owned(), Vec::new());
        Self { name, values }
    }

    pub(crate) fn value(name: &str, value: impl ToString) -> Self {
        let (name, values) = (name.to_owned(), vec![value.to_string()]);
        Self { name, values }
    }
}
