//! Conversion of OpenAI's sampling fields to options of the contract, and of metrics to `usage`.

use std::collections::BTreeMap;

use inference::{GenerateMetrics, GenerateOptions};
use serde_json::{Value, json};

use super::parameters::OpenAi;
use super::types::Sampling;
use crate::error::ApiError;
use crate::models::ServedModel;
use crate::pipeline::parameters;
use crate::pipeline::{at_most, prepare, within};
use crate::state::App;

/// The options before a request's fields apply. The operator's defaults come first, then the
/// recommendations in the model's files, as in vLLM, then OpenAI's defaults.
pub(crate) fn base(app: &App, model: &ServedModel) -> Result<GenerateOptions, ApiError> {
    parameters::base::<OpenAi>(app, &model.info().sampling)
}

/// The options that a request's fields describe, without `max_tokens`.
pub(crate) fn options(
    app: &App,
    model: &ServedModel,
    fields: &Sampling<'_>,
) -> Result<GenerateOptions, ApiError> {
    let limits = &app.limits;
    if fields.grammar.is_some_and(|g| !g.is_empty()) {
        let message = "grammar is not supported; use a JSON schema";
        return Err(ApiError::unsupported("grammar", message));
    }
    let mut o = base(app, model)?;
    fields.parameters.apply(&mut o)?;
    if let Some(bias) = fields.logit_bias {
        at_most("logit_bias", bias.len(), limits.logit_bias)?;
        o.constraints.logit_bias = logit_bias(bias, model.info().vocab_size)?;
    }
    if let Some(stop) = fields.stop {
        o.stop.stop_strings = prepare::stops(app, "stop", stop.list())?;
    }
    if let Some(ids) = fields.stop_token_ids {
        at_most("stop_token_ids", ids.len(), limits.stops)?;
        o.stop.stop_tokens = ids.to_vec();
    }
    o.stop.ignore_eos = fields.ignore_eos.unwrap_or(false);
    o.stop.min_tokens = fields.min_tokens.unwrap_or(0);
    // Negative seeds are valid. Their bits are read as an unsigned integer.
    o.sampling.seed = fields.seed.map(i64::cast_unsigned);
    o.prefill.cache_prompt = fields.cache_prompt.unwrap_or(true);
    o.prefill.cache_salt = prepare::salt(fields.cache_salt)?;
    o.steering = prepare::steering(app, model, fields.steering)?;
    Ok(o)
}

fn logit_bias(
    bias: &BTreeMap<String, f32>,
    vocabulary: usize,
) -> Result<BTreeMap<u32, f32>, ApiError> {
    let mut out = BTreeMap::new();
    for (id, bias) in bias {
        let param = "logit_bias";
        let shown: String = id.chars().take(40).collect();
        let known = id.parse::<u32>().ok();
        let Some(id) = known.filter(|id| (*id as usize) < vocabulary) else {
            return Err(ApiError::field(
                param,
                format!(
                    "logit_bias has the key {shown:?}, which is not a token id below {vocabulary}"
                ),
            ));
        };
        within(&format!("{param}.{shown}"), *bias, -100.0, 100.0)?;
        out.insert(id, *bias);
    }
    Ok(out)
}

/// The number of replies to each prompt.
pub(crate) fn choices(app: &App, fields: &Sampling<'_>) -> Result<usize, ApiError> {
    let n = fields.n.unwrap_or(1);
    if n == 0 || n > app.limits.choices {
        return Err(ApiError::field(
            "n",
            format!("n is {n}; it must lie between 1 and {}", app.limits.choices),
        ));
    }
    Ok(n)
}

/// Whether a stream ends with the counts of tokens.
pub(crate) fn wants_usage(fields: &Sampling<'_>) -> Result<bool, ApiError> {
    if fields.stream_options.is_some() && fields.stream != Some(true) {
        return Err(ApiError::field(
            "stream_options",
            "stream_options are only allowed when stream is true",
        ));
    }
    let options = fields.stream_options;
    Ok(options.and_then(|o| o.include_usage).unwrap_or(false))
}

/// The request's maximum number of tokens. 0 is refused, as in OpenAI's API.
pub(crate) fn asked(param: &str, tokens: Option<usize>) -> Result<Option<usize>, ApiError> {
    match tokens {
        Some(0) => Err(ApiError::field(
            param,
            format!("{param} is 0; it must be at least 1"),
        )),
        tokens => Ok(tokens),
    }
}

/// Counts of tokens.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Usage {
    prompt: usize,
    cached: usize,
    generated: usize,
}

impl Usage {
    /// Adds the counts of a reply. A prompt counts only with its first reply.
    pub(crate) fn add(&mut self, metrics: &GenerateMetrics, first_of_prompt: bool) {
        if first_of_prompt {
            self.prompt += metrics.prompt_tokens;
            self.cached += metrics.cached_tokens;
        }
        self.generated += metrics.generated_tokens;
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}
