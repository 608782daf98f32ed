//! The operator's values for fields that a request omits. They override the API's own defaults.

use inference::{Error, ErrorKind, GenerateOptions, ParameterValues, Result, SpeculativeOptions};
use serde_json::{Map, Value};

/// Defaults for options that a request omits. An option without a value here has the default of the
/// request's API: OpenAI's temperature is 1, Ollama's is 0.8.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RequestDefaults {
    /// The sampling options.
    pub parameters: ParameterValues,
    /// The maximum number of tokens of a reply.
    pub max_tokens: Option<usize>,
    /// Number of prompt tokens per prefill step.
    pub prefill_step_size: Option<usize>,
    /// Speculative decoding. Requests cannot change it, because it does not change the reply.
    pub speculative: SpeculativeOptions,
    /// Variables for the chat template, such as `enable_thinking`. A request's own variables
    /// override them.
    pub template: Map<String, Value>,
}

impl RequestDefaults {
    /// Creates an empty set. Each API then uses its own defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a value out of range. The message names the option and its
    /// range.
    pub(crate) fn validate(&self) -> Result<()> {
        let mut options = GenerateOptions::new();
        self.parameters.apply(&mut options)?;
        options.max_tokens = self.max_tokens.unwrap_or(1);
        if let Some(step) = self.prefill_step_size {
            options.prefill.prefill_step_size = step;
        }
        options.speculative = self.speculative.clone();
        if options.max_tokens == 0 {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "max_tokens is 0; it must be at least 1",
            ));
        }
        options.validate()
    }
}

#[cfg(test)]
mod tests {
    use inference::{Parameter, ParameterValue};

    use super::*;

    #[test]
    fn values_are_checked_by_their_names() {
        assert!(RequestDefaults::new().validate().is_ok());
        let with = |change: fn(&mut RequestDefaults)| {
            let mut defaults = RequestDefaults::new();
            change(&mut defaults);
            defaults.validate().map_err(|e| e.message().to_owned())
        };
        let value = |name: &str, x: f32| {
            let mut defaults = RequestDefaults::new();
            let parameter = Parameter::named(name).unwrap();
            defaults.parameters.put(parameter, ParameterValue::Real(x));
            defaults.validate().map_err(|e| e.message().to_owned())
        };
        assert!(value("temperature", 0.6).is_ok());
        assert!(with(|d| d.max_tokens = Some(1)).is_ok());
        for (result, name) in [
            (value("temperature", -1.0), "temperature"),
            (value("top_p", 1.5), "top_p"),
            (value("min_p", -0.5), "min_p"),
            (value("repeat_penalty", 0.0), "repeat_penalty"),
            (with(|d| d.max_tokens = Some(0)), "max_tokens"),
            (with(|d| d.prefill_step_size = Some(0)), "prefill_step_size"),
            (
                with(|d| d.speculative.num_draft_tokens = 65),
                "num_draft_tokens",
            ),
        ] {
            let message = result.unwrap_err();
            assert!(message.contains(name), "{message}");
        }
    }
}
