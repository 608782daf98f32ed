//! What holds for a request that does not say it, in place of the defaults of its API.

use inference::{Error, ErrorKind, GenerateOptions, Result};
use serde_json::{Map, Value};

/// What holds for a request that does not say it. `None` leaves it to the request's API, which has
/// its own: OpenAI's temperature is 1, Ollama's 0.8.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RequestDefaults {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// The part of the probability that is kept, above 0 and at most 1.
    pub top_p: Option<f32>,
    /// The most probable tokens that are kept; 0 is all.
    pub top_k: Option<usize>,
    /// The least probability that is kept, as a part of the greatest.
    pub min_p: Option<f32>,
    /// Factor against tokens of the prompt and the reply; 1 is off.
    pub repeat_penalty: Option<f32>,
    /// The most tokens of a reply.
    pub max_tokens: Option<usize>,
    /// Tokens of a prompt that are computed in one step.
    pub prefill_step_size: Option<usize>,
    /// Names for the chat template, such as `enable_thinking`. Those of a request come before them.
    pub template: Map<String, Value>,
}

impl RequestDefaults {
    /// None: each API has its own.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] for a value out of range. The message names it and the range.
    pub(crate) fn validate(&self) -> Result<()> {
        let mut options = GenerateOptions::new();
        let sampling = &mut options.sampling;
        sampling.temperature = self.temperature.unwrap_or(0.0);
        sampling.top_p = self.top_p.unwrap_or(1.0);
        sampling.top_k = self.top_k.unwrap_or(0);
        sampling.min_p = self.min_p.unwrap_or(0.0);
        options.penalties.repeat_penalty = self.repeat_penalty.unwrap_or(1.0);
        options.max_tokens = self.max_tokens.unwrap_or(1);
        if let Some(step) = self.prefill_step_size {
            options.prefill.prefill_step_size = step;
        }
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
    use super::*;

    #[test]
    fn values_are_checked_by_their_names() {
        assert!(RequestDefaults::new().validate().is_ok());
        let with = |change: fn(&mut RequestDefaults)| {
            let mut defaults = RequestDefaults::new();
            change(&mut defaults);
            defaults.validate().map_err(|e| e.message().to_owned())
        };
        assert!(with(|d| d.temperature = Some(0.6)).is_ok());
        assert!(with(|d| d.max_tokens = Some(1)).is_ok());
        for (change, name) in [
            (
                (|d: &mut RequestDefaults| d.temperature = Some(-1.0)) as fn(&mut RequestDefaults),
                "temperature",
            ),
            (|d| d.top_p = Some(1.5), "top_p"),
            (|d| d.min_p = Some(-0.5), "min_p"),
            (|d| d.repeat_penalty = Some(0.0), "repeat_penalty"),
            (|d| d.max_tokens = Some(0), "max_tokens"),
            (|d| d.prefill_step_size = Some(0), "prefill_step_size"),
        ] {
            let message = with(change).unwrap_err();
            assert!(message.contains(name), "{message}");
        }
    }
}
