//! Estimates how much memory JSON text needs after parsing, without parsing it.

use std::borrow::Cow;

use crate::limits::Limits;

/// Memory of an object or array with one element, plus a copy, in bytes.
const CONTAINER_BYTES: usize = 800;
/// Memory of any other value, plus a copy, in bytes.
const VALUE_BYTES: usize = 160;

/// The measured size of JSON text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Measure {
    /// Greatest nesting depth of objects and arrays.
    depth: usize,
    /// Number of objects and arrays.
    containers: usize,
    /// Upper bound on the number of all values.
    values: usize,
}

/// The limit that the JSON text exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Excess {
    Depth(usize),
    Containers(usize),
    Values(usize),
}

impl std::fmt::Display for Excess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Excess::Depth(n) => write!(f, "more than {n} levels of objects and lists"),
            Excess::Containers(n) => write!(f, "more than {n} objects and lists"),
            Excess::Values(n) => write!(f, "more than {n} values"),
        }
    }
}

impl Measure {
    /// Upper bound on the memory of the parsed values in bytes, without the text of strings.
    pub(crate) fn weight(&self) -> usize {
        let containers = self.containers.saturating_mul(CONTAINER_BYTES);
        containers.saturating_add(self.values.saturating_mul(VALUE_BYTES))
    }

    /// Measures JSON text without recursion, and stops when a limit is exceeded. The arguments of a
    /// tool call are a string that contains JSON, and this inner JSON counts, too.
    pub(crate) fn from_json(json: &[u8], limits: &Limits) -> Result<Self, Excess> {
        let mut all = Self::default();
        all.add(json, limits, true)?;
        Ok(all)
    }

    fn add(&mut self, json: &[u8], limits: &Limits, inner: bool) -> Result<(), Excess> {
        let (mut depth, mut at) = (0usize, 0);
        // The range of the last string, and whether the last key's value is a string of JSON.
        let (mut last, mut is_json) = (0..0, false);
        self.value(limits)?;
        while let Some(byte) = json.get(at) {
            match byte {
                b'"' => {
                    let end = end_of_text(json, at);
                    if std::mem::take(&mut is_json)
                        && let Some(text) = decoded(&json[at..end])
                    {
                        self.add(text.as_bytes(), limits, false)?;
                    }
                    last = at..end;
                    at = end;
                    continue;
                }
                b'{' | b'[' => {
                    is_json = false;
                    depth += 1;
                    self.depth = self.depth.max(depth);
                    self.containers += 1;
                    if depth > limits.json_depth {
                        return Err(Excess::Depth(limits.json_depth));
                    }
                    if self.containers > limits.json_containers {
                        return Err(Excess::Containers(limits.json_containers));
                    }
                    self.value(limits)?;
                }
                b'}' | b']' => depth = depth.saturating_sub(1),
                b',' => {
                    is_json = false;
                    self.value(limits)?;
                }
                // A key with an escape may spell `arguments`, so its value counts as JSON, too.
                b':' => {
                    let key = &json[last.clone()];
                    is_json = inner && (key == b"\"arguments\"" || key.contains(&b'\\'));
                }
                _ => {}
            }
            at += 1;
        }
        Ok(())
    }

    fn value(&mut self, limits: &Limits) -> Result<(), Excess> {
        self.values += 1;
        match self.values > limits.json_values {
            true => Err(Excess::Values(limits.json_values)),
            false => Ok(()),
        }
    }
}

/// The position after the string whose opening quotation mark is at `start`.
fn end_of_text(json: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(byte) = json.get(at) {
        match byte {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    json.len()
}

/// The content of a quoted string; `None` if it is malformed.
fn decoded(text: &[u8]) -> Option<Cow<'_, str>> {
    match text {
        [b'"', plain @ .., b'"'] if !plain.contains(&b'\\') => {
            std::str::from_utf8(plain).ok().map(Cow::Borrowed)
        }
        _ => serde_json::from_slice::<String>(text).ok().map(Cow::Owned),
    }
}

/// Size of a value as JSON text in bytes. The text is counted but not stored.
pub(crate) fn json_bytes(value: &impl serde::Serialize) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, part: &[u8]) -> std::io::Result<usize> {
            self.0 += part.len();
            Ok(part.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    match serde_json::to_writer(&mut count, value) {
        Ok(()) => count.0,
        // Serialization fails only for maps with keys that are not strings.
        Err(_) => usize::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(depth: usize, containers: usize, values: usize) -> Limits {
        Limits {
            json_depth: depth,
            json_containers: containers,
            json_values: values,
            ..Limits::default()
        }
    }

    fn of(json: &str, limits: &Limits) -> Result<Measure, Excess> {
        Measure::from_json(json.as_bytes(), limits)
    }

    #[test]
    fn depth_is_counted_outside_of_texts() {
        let two = limits(2, 1000, 1000);
        let text = r#"{"a": [1, "[[[[{{{{", "\"[["]}"#;
        let measure = of(text, &two).unwrap();
        assert_eq!((measure.depth, measure.containers), (2, 2));
        assert_eq!(of(r#"{"a": [[1]]}"#, &two), Err(Excess::Depth(2)));
        assert_eq!(of("[{},{},[],[]]", &two).unwrap().containers, 5);
        assert_eq!(of(&"[".repeat(100_000), &two), Err(Excess::Depth(2)));
        // Malformed text must not cause an endless loop.
        for text in ["\"", "\"\\", "{\"a", "\"a\\\"", ":", ",,,"] {
            of(text, &two).unwrap();
        }
    }

    #[test]
    fn values_and_containers_are_bounded() {
        let few = limits(64, 10, 20);
        assert_eq!(
            of("[{},{},{},{},{},{},{},{},{},{}]", &few),
            Err(Excess::Containers(10))
        );
        let numbers = format!("[{}0]", "0,".repeat(20));
        assert_eq!(of(&numbers, &few), Err(Excess::Values(20)));
        // The count is an upper bound.
        assert!(of("[0,0,0]", &few).unwrap().values >= 4);
    }

    #[test]
    fn arguments_of_calls_count_as_the_json_that_they_are() {
        let few = limits(8, 10, 1000);
        let inner = serde_json::Value::from(format!("[{}]", "{},".repeat(20))).to_string();
        for key in ["\"arguments\"", "\"\\u0061rguments\""] {
            let text = format!("{{{key} : {inner}}}");
            assert_eq!(of(&text, &few), Err(Excess::Containers(10)), "{text}");
        }
        // The bracket may be written with an escape.
        let escaped = inner.replace('{', "\\u007b");
        let text = format!("{{\"arguments\":{escaped}}}");
        assert_eq!(of(&text, &few), Err(Excess::Containers(10)));
        let deep = serde_json::Value::from("[".repeat(9)).to_string();
        let text = format!("{{\"arguments\":{deep}}}");
        assert_eq!(of(&text, &few), Err(Excess::Depth(8)));
        // A string counts as JSON only directly after the key `arguments`.
        for text in [
            format!("{{\"content\":{inner}}}"),
            format!("{{\"arguments\":[{inner}]}}"),
            format!("{{\"arguments\":1,\"a\":{inner}}}"),
        ] {
            of(&text, &few).unwrap();
        }
    }

    #[test]
    fn a_size_is_that_of_the_text() {
        let value = serde_json::json!({"a": [1, 2.5, "é\n"], "b": null});
        assert_eq!(json_bytes(&value), value.to_string().len());
    }
}
