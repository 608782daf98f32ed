//! Reads the conditions of `cfg(..)`, `cfg!(..)` and `cfg_attr(..)` in sources and manifests.

use std::fmt;

/// A condition: `key`, `key = "value"`, or `not`, `any` or `all` of others.
#[derive(Debug, Clone, PartialEq)]
pub enum Condition {
    Is(String, Option<String>),
    Not(Box<Self>),
    Any(Vec<Self>),
    All(Vec<Self>),
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |all: &[Self]| {
            let all: Vec<String> = all.iter().map(ToString::to_string).collect();
            all.join(", ")
        };
        match self {
            Self::Is(key, None) => write!(f, "{key}"),
            Self::Is(key, Some(value)) => write!(f, "{key} = {value:?}"),
            Self::Not(inner) => write!(f, "not({inner})"),
            Self::Any(all) => write!(f, "any({})", list(all)),
            Self::All(all) => write!(f, "all({})", list(all)),
        }
    }
}

/// Whether a condition can be true. `known` returns the parts with a certain value.
pub fn holds(condition: &Condition, known: &dyn Fn(&str, Option<&str>) -> Option<bool>) -> bool {
    possible(condition, known).0
}

/// Whether a condition can be true, and whether it can be false.
fn possible(
    condition: &Condition,
    known: &dyn Fn(&str, Option<&str>) -> Option<bool>,
) -> (bool, bool) {
    let all = |all: &[Condition]| -> Vec<(bool, bool)> {
        all.iter().map(|inner| possible(inner, known)).collect()
    };
    match condition {
        Condition::Is(key, value) => match known(key, value.as_deref()) {
            Some(is) => (is, !is),
            None => (true, true),
        },
        Condition::Not(inner) => {
            let (yes, no) = possible(inner, known);
            (no, yes)
        }
        Condition::Any(some) => {
            let some = all(some);
            (some.iter().any(|one| one.0), some.iter().all(|one| one.1))
        }
        Condition::All(some) => {
            let some = all(some);
            (some.iter().all(|one| one.0), some.iter().any(|one| one.1))
        }
    }
}

/// The conditions of a file, except those in comments.
pub fn conditions(text: &str) -> Vec<Condition> {
    let code: String = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| [line, "\n"])
        .collect();
    let mut conditions = Vec::new();
    for (at, _) in code.match_indices("cfg") {
        let inside = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
        if code[..at].ends_with(inside) {
            continue;
        }
        let rest = &code[at + "cfg".len()..];
        let rest = rest
            .strip_prefix("_attr")
            .or(rest.strip_prefix('!'))
            .unwrap_or(rest);
        if let Some(rest) = rest.strip_prefix('(') {
            conditions.extend(condition(&mut rest.trim_start()));
        }
    }
    conditions
}

/// Parses the condition at the start of `text`, and advances `text` beyond it.
fn condition(text: &mut &str) -> Option<Condition> {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
    let (key, rest) = text.split_at(end);
    if key.is_empty() {
        return None;
    }
    *text = rest.trim_start();
    if let Some(rest) = text.strip_prefix('=') {
        let (value, rest) = rest.trim_start().strip_prefix('"')?.split_once('"')?;
        *text = rest.trim_start();
        return Some(Condition::Is(key.to_owned(), Some(value.to_owned())));
    }
    let Some(rest) = text.strip_prefix('(') else {
        return Some(Condition::Is(key.to_owned(), None));
    };
    *text = rest.trim_start();
    let mut all = Vec::new();
    while !text.starts_with(')') {
        all.push(condition(text)?);
        *text = text.strip_prefix(',').unwrap_or(text).trim_start();
    }
    *text = text[1..].trim_start();
    match key {
        "not" => Some(Condition::Not(Box::new(all.pop()?))),
        "any" => Some(Condition::Any(all)),
        "all" => Some(Condition::All(all)),
        _ => None,
    }
}

#[test]
fn conditions_are_read_and_evaluated() {
    let text = "#[cfg(all(test, not(target_arch = \"aarch64\")))]\n// cfg(windows)\n\
        #[cfg_attr(\n    not(unix),\n    ignore = \"x\"\n)]\nlet a = cfg!(feature = \"b\");\n\
        my_cfg(windows); cfg($name);\n[target.'cfg(any(unix, windows))'.dependencies]\n";
    let parsed = conditions(text);
    let shown: Vec<String> = parsed.iter().map(ToString::to_string).collect();
    assert_eq!(
        shown,
        [
            "all(test, not(target_arch = \"aarch64\"))",
            "not(unix)",
            "feature = \"b\"",
            "any(unix, windows)"
        ]
    );
    let known = |key: &str, value: Option<&str>| match (key, value) {
        ("unix", None) => Some(true),
        ("target_arch", Some(v)) => Some(v == "x86_64"),
        ("feature", _) | ("windows", None) => Some(false),
        _ => None,
    };
    let results: Vec<bool> = parsed
        .iter()
        .map(|condition| holds(condition, &known))
        .collect();
    // There are builds with and without `test`.
    assert_eq!(results, [true, false, false, true]);
}
