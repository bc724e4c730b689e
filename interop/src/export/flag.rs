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

/// The option with the same name as a field.
pub(crate) fn option(field: &str) -> String {
    format!("--{}", field.replace('_', "-"))
}

/// The field with the same name as an option.
pub(crate) fn field(option: &str) -> String {
    option.trim_start_matches('-').replace('-', "_")
}
