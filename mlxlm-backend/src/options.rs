//! Converts the contract's options for the bridge. Unsupported options are refused, including
//! options that later versions of the contract add. No option is ignored silently.

use inference::{Error, ErrorKind, GenerateOptions, Result};
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

/// Options that the bridge does not need, because this side searches for stop strings.
const OURS: [&str; 1] = ["stop_strings"];

/// The error for a feature that only the native engine has.
pub fn native<T>(what: &str) -> Result<T> {
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "backend `mlx_lm` does not have {what}; load the model with the native backend instead: `metal`, `cuda` or \
             `cpu`"
        ),
    ))
}

/// The options of a request in the form that the bridge expects.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for an unsupported option.
pub fn asked(options: &GenerateOptions) -> Result<Map<String, Value>> {
    let known = [&HONORED[..], &OURS].concat();
    if let Some(name) = options.first_not_of(&known)? {
        return native(&format!("the option {name}"));
    }
    let mut asked = options.to_flat_json()?;
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
        let options = GenerateOptions::default;
        let error = asked(&options().with_grammar(inference::Grammar::json_object())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("the option grammar"), "{error}");
        // This side searches for stop strings, and prompt lookup does not change the reply, so both
        // are accepted.
        let stop = vec![String::from("x")];
        asked(&options().with_prompt_lookup(2).with_stop(stop)).unwrap();
    }
}
