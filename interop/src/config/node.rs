//! A configuration file as a tree of values with line numbers.

/// A value and its line in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Line in the file, from 1; 0 for a value that was not read from a file.
    pub line: usize,
    /// The value itself.
    pub value: Value,
}

/// The kinds of value that a configuration file can hold.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null` in JSON and YAML, `None` in Python.
    Null,
    /// A boolean.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A string.
    Str(String),
    /// A sequence of values.
    List(Vec<Node>),
    /// Keys and values, in the order of the file.
    Table(Vec<(String, Node)>),
    /// A Python constructor with keyword arguments, such as `FullAC.Config()`.
    Call(String, Vec<(String, Node)>),
    /// A Python expression that is not a literal.
    Expression(String),
}

impl Node {
    /// A node that was not read from a file.
    #[must_use]
    pub fn made(value: impl Into<Value>) -> Self {
        Self {
            line: 0,
            value: value.into(),
        }
    }

    /// An empty table.
    #[must_use]
    pub fn table() -> Self {
        Self::made(Value::Table(Vec::new()))
    }

    /// The entries of a table, or the keyword arguments of a constructor.
    #[must_use]
    pub fn entries(&self) -> &[(String, Node)] {
        match &self.value {
            Value::Table(entries) | Value::Call(_, entries) => entries,
            _ => &[],
        }
    }

    /// The value of one key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Node> {
        let entries = self.entries().iter();
        entries.rev().find(|(k, _)| k == key).map(|(_, node)| node)
    }

    /// The value at a dotted path.
    #[must_use]
    pub fn at(&self, path: &str) -> Option<&Node> {
        path.split('.').try_fold(self, |node, key| node.get(key))
    }

    /// Sets the value at a dotted path, creating tables on the way.
    pub fn set(&mut self, path: &str, value: impl Into<Value>) {
        let (key, rest) = match path.split_once('.') {
            Some((key, rest)) => (key, Some(rest)),
            None => (path, None),
        };
        if self.entries().is_empty() && !matches!(self.value, Value::Table(_) | Value::Call(..)) {
            self.value = Value::Table(Vec::new());
        }
        let (Value::Table(entries) | Value::Call(_, entries)) = &mut self.value else {
            return;
        };
        let index = entries.iter().position(|(k, _)| k == key);
        let index = index.unwrap_or_else(|| {
            entries.push((key.to_owned(), Node::table()));
            entries.len() - 1
        });
        match rest {
            Some(rest) => entries[index].1.set(rest, value),
            None => entries[index].1 = Node::made(value),
        }
    }

    /// The value as an integer, if it is one.
    #[must_use]
    pub fn int(&self) -> Option<i64> {
        match self.value {
            Value::Int(i) => Some(i),
            _ => None,
        }
    }

    /// The value as a string, if it is one.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Str(s) => Some(s),
            _ => None,
        }
    }

    /// The value as a number, if it is one.
    #[must_use]
    pub fn float(&self) -> Option<f64> {
        match self.value {
            Value::Int(whole) => Some(whole as f64),
            Value::Float(number) => Some(number),
            _ => None,
        }
    }

    /// The value as a list, if it is one.
    #[must_use]
    pub fn list(&self) -> Option<&[Node]> {
        match &self.value {
            Value::List(items) => Some(items),
            _ => None,
        }
    }
}

impl Value {
    /// Name of the value's type, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "true or false",
            Self::Int(_) => "a whole number",
            Self::Float(_) => "a number",
            Self::Str(_) => "text",
            Self::List(_) => "a list",
            Self::Table(_) => "a section",
            Self::Call(..) => "a constructor",
            Self::Expression(_) => "an expression",
        }
    }

    /// The value on one line, for messages.
    #[must_use]
    pub fn shown(&self) -> String {
        match self {
            Self::Null => "null".to_owned(),
            Self::Bool(b) => b.to_string(),
            Self::Int(i) => i.to_string(),
            Self::Float(f) => f.to_string(),
            Self::Str(s) => format!("`{}`", s.chars().take(80).collect::<String>()),
            Self::List(_) | Self::Table(_) => self.kind().to_owned(),
            Self::Call(name, _) => format!("{name}(…)"),
            Self::Expression(text) => text.chars().take(80).collect(),
        }
    }
}

impl Value {
    /// The value as a script has it: text as it is, all else as in messages.
    #[must_use]
    pub fn plain(&self) -> String {
        match self {
            Self::Str(text) => text.clone(),
            other => other.shown(),
        }
    }
}

/// The path of a key in a section, whose own path is empty for the whole file.
pub(crate) fn below(section: &str, key: &str) -> String {
    match section {
        "" => key.to_owned(),
        _ => format!("{section}.{key}"),
    }
}

impl From<bool> for Value {
    fn from(b: bool) -> Self {
        Self::Bool(b)
    }
}

impl From<u64> for Value {
    fn from(n: u64) -> Self {
        // Sizes are far below 2^63: `legality` and the command line limit them.
        Self::Int(i64::try_from(n).unwrap_or(i64::MAX))
    }
}

impl From<f64> for Value {
    fn from(f: f64) -> Self {
        Self::Float(f)
    }
}

impl From<&str> for Value {
    fn from(s: &str) -> Self {
        Self::Str(s.to_owned())
    }
}

impl From<String> for Value {
    fn from(s: String) -> Self {
        Self::Str(s)
    }
}

impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(items: Vec<T>) -> Self {
        Self::List(items.into_iter().map(Node::made).collect())
    }
}
