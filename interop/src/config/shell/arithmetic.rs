//! Arithmetic of shells: whole numbers, variables, `+ - * / %`, comparisons, `&& || !` and parentheses.

/// Deepest nesting of parentheses and signs.
const MOST_NESTED: usize = 64;

/// Binary operators by precedence, weakest first. `<=` comes before its prefix `<`.
const LEVELS: [&[&str]; 6] = [
    &["||"],
    &["&&"],
    &["==", "!="],
    &["<=", ">=", "<", ">"],
    &["+", "-"],
    &["*", "/", "%"],
];

/// Evaluates an expression. `held` returns a variable's value, or as an error the unknown variable.
///
/// # Errors
/// The error of `held`, or the text as `$((…))` if it is not a valid expression.
pub(super) fn evaluate(
    text: &str,
    held: &dyn Fn(&str) -> Result<i64, String>,
) -> Result<i64, String> {
    let mut reader = Reader {
        rest: text.trim_start(),
        nested: 0,
        held,
    };
    let no_expression = || {
        let shown: String = text.split_whitespace().collect();
        format!("$(({shown}))")
    };
    match reader.level(0) {
        Ok(value) if reader.rest.is_empty() => Ok(value),
        Err(Some(unknown)) => Err(unknown),
        Ok(_) | Err(None) => Err(no_expression()),
    }
}

struct Reader<'a> {
    rest: &'a str,
    nested: usize,
    held: &'a dyn Fn(&str) -> Result<i64, String>,
}

/// A value. The error is the unknown variable, or `None` if the text is not an expression.
type Found = Result<i64, Option<String>>;

impl Reader<'_> {
    fn skip(&mut self, bytes: usize) {
        self.rest = self.rest[bytes..].trim_start();
    }

    /// Evaluates operators of this level and those that bind more tightly, from left to right.
    fn level(&mut self, level: usize) -> Found {
        let Some(operators) = LEVELS.get(level) else {
            return self.factor();
        };
        let mut left = self.level(level + 1)?;
        while let Some(operator) = operators.iter().find(|op| self.rest.starts_with(**op)) {
            self.skip(operator.len());
            let right = self.level(level + 1)?;
            left = applied(left, operator, right).ok_or(None)?;
        }
        Ok(left)
    }

    fn factor(&mut self) -> Found {
        self.nested += 1;
        if self.nested > MOST_NESTED {
            return Err(None);
        }
        let value = match self.rest.chars().next().ok_or(None)? {
            sign @ ('-' | '+' | '!') => {
                self.skip(1);
                let value = self.factor()?;
                match sign {
                    '-' => value.checked_neg().ok_or(None)?,
                    '!' => i64::from(value == 0),
                    _ => value,
                }
            }
            '(' => {
                self.skip(1);
                let value = self.level(0)?;
                if !self.rest.starts_with(')') {
                    return Err(None);
                }
                self.skip(1);
                value
            }
            _ => self.number()?,
        };
        self.nested -= 1;
        Ok(value)
    }

    /// A number, or a variable with or without its `$`.
    fn number(&mut self) -> Found {
        let dollar = usize::from(self.rest.starts_with('$'));
        let name = &self.rest[dollar..];
        let end = name.find(|c| !super::lexer::is_name(c));
        let name = &name[..end.unwrap_or(name.len())];
        if name.is_empty() {
            return Err(None);
        }
        self.skip(dollar + name.len());
        if dollar == 0 && name.starts_with(|c: char| c.is_ascii_digit()) {
            return name.parse().map_err(|_| None);
        }
        (self.held)(name).map_err(Some)
    }
}

fn applied(left: i64, operator: &str, right: i64) -> Option<i64> {
    match operator {
        "+" => left.checked_add(right),
        "-" => left.checked_sub(right),
        "*" => left.checked_mul(right),
        "/" => left.checked_div(right),
        "%" => left.checked_rem(right),
        _ => Some(i64::from(match operator {
            "||" => left != 0 || right != 0,
            "&&" => left != 0 && right != 0,
            "==" => left == right,
            "!=" => left != right,
            "<=" => left <= right,
            ">=" => left >= right,
            "<" => left < right,
            _ => left > right,
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::evaluate;

    #[test]
    fn arithmetic_is_a_shells() {
        let held = |name: &str| match name {
            "W" => Ok(64),
            "T" => Ok(8),
            other => Err(format!("${other}")),
        };
        for (text, value) in [
            ("W / T / 2 * 32", Ok(128)),
            ("64/2*2", Ok(64)),
            ("2+3*4", Ok(14)),
            ("(2+3)*4 % 7", Ok(6)),
            ("10 - 2 - 3", Ok(5)),
            ("$W - -1", Ok(65)),
            ("W >= 64 && !(T == 4)", Ok(1)),
            ("W < 64 || T != 8", Ok(0)),
            ("W / X", Err("$X")),
            ("8 / 0", Err("$((8/0))")),
            ("9223372036854775807 + 1", Err("$((9223372036854775807+1))")),
            ("2 +", Err("$((2+))")),
            ("2 2", Err("$((22))")),
            ("", Err("$(())")),
        ] {
            let value = value.map_err(str::to_owned);
            assert_eq!(evaluate(text, &held), value, "{text}");
        }
        let nested = "(".repeat(100_000);
        assert!(evaluate(&nested, &held).is_err());
    }
}
