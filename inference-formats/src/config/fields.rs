//! Typed access to the fields of an untrusted JSON object. Each error contains the field's name,
//! its value and the allowed values. `null` counts as absent, because checkpoints use it for absent
//! fields.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

/// A result whose error is a message without the file's name.
pub(super) type Fault<T> = Result<T, String>;

/// A JSON object, and the prefix of its field names in messages.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// The prefix: `""` or, for example, `"rope_scaling."`.
    prefix: &'static str,
}

/// The value as a short text for messages.
pub(super) fn shown(value: &Value) -> String {
    const MAX: usize = 60;
    let text = match value {
        Value::Array(a) => return format!("a list of {}", a.len()),
        Value::Object(o) => return format!("an object with {} keys", o.len()),
        other => other.to_string(),
    };
    if text.chars().count() <= MAX {
        return text;
    }
    text.chars().take(MAX).chain("...".chars()).collect()
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, prefix: "" }
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    pub(super) fn missing(&self, name: &str) -> String {
        format!("the field {}{name} is missing", self.prefix)
    }

    fn wrong(&self, name: &str, value: &Value, wanted: &str) -> String {
        format!(
            "{}{name} is {}; it must be {wanted}",
            self.prefix,
            shown(value)
        )
    }

    pub(super) fn object(&self, name: &'static str) -> Fault<Option<&'a Map<String, Value>>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(self.wrong(name, other, "an object")),
        }
    }

    /// The fields of the nested object `name`. Messages put `prefix` (`"name."`) before their
    /// names.
    pub(super) fn nested(&self, name: &'static str, prefix: &'static str) -> Fault<Option<Self>> {
        Ok(self.object(name)?.map(|map| Self { map, prefix }))
    }

    pub(super) fn uint(&self, name: &str, range: RangeInclusive<usize>) -> Fault<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        // Some writers store integers as floats.
        let number = value.as_u64().or_else(|| {
            value
                .as_f64()
                .filter(|f| f.fract() == 0.0 && (0.0..9e15).contains(f))
                .map(|f| f as u64)
        });
        match number.and_then(|n| usize::try_from(n).ok()) {
            Some(n) if range.contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(
                name,
                value,
                &format!("a whole number from {} to {}", range.start(), range.end()),
            )),
        }
    }

    pub(super) fn required_uint(&self, name: &str, range: RangeInclusive<usize>) -> Fault<usize> {
        self.uint(name, range)?.ok_or_else(|| self.missing(name))
    }

    /// A finite number above zero.
    pub(super) fn positive(&self, name: &str) -> Fault<Option<f32>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_f64().map(|f| f as f32) {
            Some(f) if f.is_finite() && f > 0.0 => Ok(Some(f)),
            _ => Err(self.wrong(name, value, "a finite number above 0")),
        }
    }

    /// A finite number.
    pub(super) fn number(&self, name: &str) -> Fault<Option<f32>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_f64().map(|f| f as f32) {
            Some(f) if f.is_finite() => Ok(Some(f)),
            _ => Err(self.wrong(name, value, "a finite number")),
        }
    }

    /// A list of finite numbers.
    pub(super) fn numbers(&self, name: &str) -> Fault<Option<Vec<f32>>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let finite = |v: &Value| v.as_f64().map(|f| f as f32).filter(|f| f.is_finite());
        value
            .as_array()
            .and_then(|items| items.iter().map(finite).collect())
            .map(Some)
            .ok_or_else(|| self.wrong(name, value, "a list of finite numbers"))
    }

    pub(super) fn required_positive(&self, name: &str) -> Fault<f32> {
        self.positive(name)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn bool(&self, name: &str) -> Fault<Option<bool>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => Err(self.wrong(name, other, "true or false")),
        }
    }

    pub(super) fn str(&self, name: &str) -> Fault<Option<&'a str>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.wrong(name, other, "a string")),
        }
    }

    pub(super) fn strings(&self, name: &str) -> Fault<Vec<String>> {
        let wanted = "a list of strings";
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(value @ Value::Array(items)) => items
                .iter()
                .map(|i| i.as_str().map(str::to_owned))
                .collect::<Option<_>>()
                .ok_or_else(|| self.wrong(name, value, wanted)),
            Some(other) => Err(self.wrong(name, other, wanted)),
        }
    }

    pub(super) fn token_ids(&self, name: &str) -> Fault<Vec<u32>> {
        token_ids(name, self.get(name))
    }
}

/// One token id or a list of ids. A negative id stands for no token.
pub(super) fn token_ids(name: &str, value: Option<&Value>) -> Fault<Vec<u32>> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let items = match value {
        Value::Array(items) => items.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut ids = Vec::new();
    for item in items {
        let wrong = |wanted: &str| format!("{name} is {}; it must be {wanted}", shown(item));
        match item.as_i64() {
            Some(id) if id < 0 => {}
            Some(id) => {
                let id = u32::try_from(id).map_err(|_| wrong("a token id below 4294967296"))?;
                ids.push(id);
            }
            None => return Err(wrong("a token id or a list of them")),
        }
    }
    Ok(ids)
}
