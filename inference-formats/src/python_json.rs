//! Reads Python's JSON dialect. Python's module `json` also writes `Infinity`, `-Infinity` and
//! `NaN`, which are invalid JSON. Published configurations contain them, such as `time_step_limit:
//! [0.0, Infinity]` of Mamba-2. transformers 5 writes `{"__float__": "Infinity"}` instead.

use serde_json::Value;

/// Parses JSON or Python's dialect of it. An infinity, also in transformers 5's form, becomes the
/// largest finite number of its sign. NaN becomes null.
///
/// # Errors
/// The JSON parser's error, if the text is neither.
///
/// ```
/// let text = br#"{"time_step_limit": [0.0, Infinity], "note": "Infinity"}"#;
/// let value = inference_formats::python_json::from_slice(text)?;
/// assert_eq!(value["time_step_limit"][1], f64::MAX);
/// assert_eq!(value["note"], "Infinity");
/// # Ok::<(), serde_json::Error>(())
/// ```
pub fn from_slice(bytes: &[u8]) -> serde_json::Result<Value> {
    let mut value = serde_json::from_slice(bytes)
        .or_else(|fault| serde_json::from_slice(&as_json(bytes)).map_err(|_| fault))?;
    untag(&mut value);
    Ok(value)
}

/// Replaces objects with the single field `__float__`, in which transformers 5 writes infinities
/// and NaN.
fn untag(value: &mut Value) {
    match value {
        Value::Array(all) => all.iter_mut().for_each(untag),
        Value::Object(fields) => {
            let tag = fields.get("__float__").and_then(Value::as_str);
            let number = match tag.filter(|_| fields.len() == 1) {
                Some("Infinity") => f64::MAX.into(),
                Some("-Infinity") => f64::MIN.into(),
                Some("NaN") => Value::Null,
                _ => return fields.values_mut().for_each(untag),
            };
            *value = number;
        }
        _ => {}
    }
}

/// Returns the text with each infinity or NaN outside strings replaced by valid JSON.
fn as_json(bytes: &[u8]) -> Vec<u8> {
    const OTHERS: [(&[u8], &[u8]); 3] = [
        (b"-Infinity", b"-1.7976931348623157e308"),
        (b"Infinity", b"1.7976931348623157e308"),
        (b"NaN", b"null"),
    ];
    let mut out = Vec::with_capacity(bytes.len());
    let (mut rest, mut in_string) = (bytes, false);
    while let Some((&byte, after)) = rest.split_first() {
        if in_string && byte == b'\\' {
            let pair = rest.len().min(2);
            out.extend_from_slice(&rest[..pair]);
            rest = &rest[pair..];
            continue;
        }
        let other = OTHERS.iter().find(|(name, _)| rest.starts_with(name));
        if let Some((name, number)) = other.filter(|_| !in_string) {
            out.extend_from_slice(number);
            rest = &rest[name.len()..];
            continue;
        }
        in_string ^= byte == b'"';
        out.push(byte);
        rest = after;
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_of_python_become_numbers_of_json() {
        let text = br#"{"limit": [0.0, Infinity], "others": [-Infinity, NaN, -1],
            "note": "Infinity \" NaN", "Infinity": 1}"#;
        let expected = json!({"limit": [0.0, f64::MAX], "others": [-f64::MAX, null, -1],
            "note": "Infinity \" NaN", "Infinity": 1});
        assert_eq!(from_slice(text).unwrap(), expected);
        assert_eq!(from_slice(b"[1, null]").unwrap(), json!([1, null]));
        let tagged = br#"{"limit": [0.0, {"__float__": "Infinity"}], "a": {"__float__": "NaN"},
            "b": {"c": {"__float__": "-Infinity"}}, "d": {"__float__": "1"},
            "e": {"__float__": "NaN", "more": 1}}"#;
        let expected = json!({"limit": [0.0, f64::MAX], "a": null, "b": {"c": f64::MIN},
            "d": {"__float__": "1"}, "e": {"__float__": "NaN", "more": 1}});
        assert_eq!(from_slice(tagged).unwrap(), expected);
        for broken in [
            "{\"a\": Infinit}",
            "{\"a\": Infinity",
            "{\"a\": \"\\",
            "",
            "[NaNa]",
        ] {
            assert!(from_slice(broken.as_bytes()).is_err(), "{broken}");
        }
    }
}
