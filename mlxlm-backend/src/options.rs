//! Options of the contract as the bridge gets them. Options without support are refused, and so are
//! options that the contract gains later. Nothing is silently ignored.

use inference::{Error, ErrorKind, GenerateOptions, Result};
use serde::Serialize;
use serde_json::{Map, Value};

/// The options that the bridge honors.
const HONORED: [&str; 21] = [
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "repeat_window",
    "presence_penalty",
    "frequency_penalty",
    "xtc_probability",
    "xtc_threshold",
    "logit_bias",
    "banned_tokens",
    "forced_tokens",
    "min_tokens",
    "logprobs",
    "stop_tokens",
    "ignore_eos",
    "seed",
    "logits",
    "prefill_step_size",
];

/// Options that the bridge need not see: stop strings are found on this side, and the others only
/// make the same reply come faster.
const OURS: [&str; 4] = ["stop", "cache_prompt", "num_draft_tokens", "prompt_lookup"];

/// The error for what only the native engine has.
pub fn native<T>(what: &str) -> Result<T> {
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "backend `mlx_lm` does not have {what}; load the model with the native backend instead: `metal`, `cuda` or \
             `cpu`"
        ),
    ))
}

fn fields(options: &impl Serialize) -> Result<Map<String, Value>> {
    match serde_json::to_value(options) {
        Ok(Value::Object(fields)) => Ok(fields),
        other => Err(Error::new(
            ErrorKind::InvalidOption,
            format!("the options cannot be sent to Python: {other:?}"),
        )),
    }
}

/// The first option that is not `known` and differs from `usual`.
///
/// # Errors
/// When the options cannot be written as JSON.
pub fn first_unknown<T: Serialize>(
    options: &T,
    usual: &T,
    known: &[&str],
) -> Result<Option<String>> {
    let (fields, usual) = (fields(options)?, fields(usual)?);
    let unknown = |(name, value): &(String, Value)| {
        !known.contains(&name.as_str()) && usual.get(name) != Some(value)
    };
    Ok(fields.into_iter().find(unknown).map(|(name, _)| name))
}

/// Options of a request, for the bridge.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for an option without support.
pub fn asked(options: &GenerateOptions) -> Result<Map<String, Value>> {
    if !options.logits_processors.is_empty() {
        return native("logits_processors");
    }
    let known = [&HONORED[..], &OURS].concat();
    if let Some(name) = first_unknown(options, &GenerateOptions::default(), &known)? {
        return native(&format!("the option {name}"));
    }
    let mut asked = fields(options)?;
    asked.retain(|name, _| HONORED.contains(&name.as_str()));
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_honored_option_is_one_and_goes_over() {
        let asked = asked(&GenerateOptions::default().with_top_k(7)).unwrap();
        for name in HONORED {
            assert!(asked.contains_key(name), "{name}");
        }
        assert_eq!(asked.len(), HONORED.len());
        assert_eq!(asked["top_k"], 7);
    }

    #[test]
    fn what_is_not_known_is_refused_unless_it_is_as_usual() {
        let error = super::asked(
            &GenerateOptions::default().with_grammar(inference::Grammar::json_object()),
        );
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Unsupported);
        let value = |fields: &str| -> Value { serde_json::from_str(fields).unwrap() };
        let (usual, changed) = (value(r#"{"a": 1, "b": 2}"#), value(r#"{"a": 5, "b": 3}"#));
        let unknown = |options, known: &[&str]| first_unknown(options, &usual, known).unwrap();
        assert_eq!(unknown(&usual, &[]), None);
        assert_eq!(unknown(&changed, &["a"]).as_deref(), Some("b"));
        assert_eq!(unknown(&changed, &["a", "b"]), None);
    }
}
