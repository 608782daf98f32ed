//! `/v1/infer`: the most probable next tokens of a text.

use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use inference::{CancelToken, GenerateOptions, Interrupt, Prompt, Steering, TopLogprob};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::engine::{LogitsJob, Places};
use crate::error::ApiError;
use crate::models::Lease;
use crate::pipeline::ask::Ask;
use crate::pipeline::embeddings::Leaves;
use crate::pipeline::run;
use crate::pipeline::{Work, prepare};
use crate::state::App;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(infer))
}

/// A text whose next token is predicted.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct InferRequest {
    /// The model's name. Without it, the server uses its first model.
    model: Option<String>,
    /// The text.
    #[serde(default)]
    prompt: String,
    /// The number of predictions, 5 by default.
    top: Option<usize>,
    /// `dense` computes the model as trained, `walk` uses features from a vindex, and `compare`
    /// does both. The default is `walk` if a layer of the model has the strategy `walk`, else
    /// `dense`.
    mode: Option<String>,
    /// Edits of the model's states, `{"edits": [..]}`, if the server allows them.
    #[schema(value_type = Option<Object>)]
    steering: Option<Steering>,
}

/// The value of `mode`.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Walk,
    Dense,
    Compare,
}

impl Mode {
    fn from_name(name: Option<&str>, model: &Lease) -> Result<Self, ApiError> {
        let routed = model.model().as_routed();
        let walks = routed.is_some_and(|routed| routed.feed_forward_plan().walks());
        let refused = |message: String| Err(ApiError::unsupported("mode", message));
        let mode = match name {
            None if walks => Self::Walk,
            None | Some("dense") => Self::Dense,
            Some("walk") => Self::Walk,
            Some("compare") => Self::Compare,
            Some(other) => {
                let shown: String = other.chars().take(40).collect();
                return refused(format!(
                    "the mode {shown:?} is not one of \"walk\", \"dense\" and \"compare\""
                ));
            }
        };
        if mode != Self::Dense && !walks {
            return refused(String::from(
                "no layer of this model walks; start the server with --ffn walk:K and --vindex DIR, \
                 or use \"dense\"",
            ));
        }
        if mode != Self::Walk && routed.is_some_and(|routed| !routed.has_dense()) {
            let message = "the model was loaded without its dense feed-forward parts (--walk-only)";
            let status = StatusCode::SERVICE_UNAVAILABLE;
            let error = ApiError::new(status, "server_error", message).with_code("no_weights");
            return Err(error.with_param("mode"));
        }
        Ok(mode)
    }
}

/// Predicts the most probable next tokens of a text, with their probabilities.
#[utoipa::path(post, path = "/v1/infer", request_body = InferRequest, responses(
    (status = 200, description = "`predictions`, or `walk` and `dense`", body = Object),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 503, description = "the model lacks the weights for it", body = Object),
    (status = 504, description = "it took too long", body = Object)))]
pub(crate) async fn infer(
    State(app): State<App>,
    Work(request, mut places): Work<InferRequest>,
) -> Result<axum::Json<Value>, ApiError> {
    let arrived = Instant::now();
    let (top, most) = (request.top.unwrap_or(5), app.limits.top_logprobs);
    if top == 0 || top > most {
        let message = format!("top is {top}; it must lie between 1 and {most}");
        return Err(ApiError::field("top", message));
    }
    if request.prompt.trim().is_empty() {
        return Err(ApiError::field("prompt", "the prompt is empty"));
    }
    let model = &app.models.get(request.model.as_deref(), None).await?;
    if model.model().as_routed().is_some() {
        prepare::without_adapter(model, "predictions of this route")?;
    }
    let mode = Mode::from_name(request.mode.as_deref(), model)?;
    let steering = prepare::steering(&app, model, request.steering.as_ref())?;
    if steering.is_some() && model.model().as_routed().is_some() {
        let message = "this route does not edit a model that was loaded with --ffn";
        return Err(ApiError::unsupported("steering", message));
    }
    let asked = Asked {
        app: &app,
        model,
        prompt: &request.prompt,
        top,
        steering,
        arrived,
    };
    let mut reply = json!({"prompt": request.prompt});
    let mut put = |name: &str, value: Value| reply[name] = value;
    match mode {
        Mode::Compare => {
            prepare::grow(&app, &mut places, 2)?;
            for (name, dense) in [("walk", false), ("dense", true)] {
                let started = Instant::now();
                let place = places.one().ok_or_else(ApiError::internal)?;
                put(name, asked.routed(place, dense).await?);
                put(&format!("{name}_ms"), milliseconds(started).into());
            }
        }
        Mode::Walk => {
            put("predictions", asked.routed(places, false).await?);
            put("mode", "walk".into());
        }
        Mode::Dense => {
            let predictions = match model.model().as_routed() {
                Some(_) => asked.routed(places, true).await?,
                None => asked.plain(places).await?,
            };
            put("predictions", predictions);
            put("mode", "dense".into());
        }
    }
    put("latency_ms", milliseconds(arrived).into());
    Ok(axum::Json(reply))
}

/// Milliseconds since a time, with one decimal.
fn milliseconds(since: Instant) -> f64 {
    (since.elapsed().as_secs_f64() * 1e4).round() / 10.0
}

fn prediction(token: &str, probability: f64) -> Value {
    json!({"token": token, "probability": (probability * 1e4).round() / 1e4})
}

/// A validated request.
struct Asked<'a> {
    app: &'a App,
    model: &'a Lease,
    prompt: &'a str,
    top: usize,
    steering: Option<Steering>,
    arrived: Instant,
}

impl Asked<'_> {
    /// The ids of the prompt.
    async fn prepared(&self, places: Places) -> Result<(Places, prepare::Prepared), ApiError> {
        let prompts = vec![Prompt::from(self.prompt)];
        let (place, mut all) =
            prepare::raw(self.app, self.model, places, "prompt", prompts).await?;
        Ok((place, all.pop().ok_or_else(ApiError::internal)?))
    }

    /// Predicts in a batch with other requests. The model must have no feed-forward plan;
    /// [`Self::routed`] predicts with one.
    async fn plain(&self, places: Places) -> Result<Value, ApiError> {
        let mut options = GenerateOptions::new();
        let logprobs = crate::pipeline::prepare::with_logprobs(self.model, Some(self.top))?;
        options.output.logprobs = logprobs;
        // The reply may end here, so the end-of-text token is a valid prediction.
        options.stop.ignore_eos = true;
        options.steering.clone_from(&self.steering);
        let mut ask = Ask::new(self.app, options, self.arrived)?;
        ask.most.1 = Some(1);
        let prompts = vec![Prompt::from(self.prompt)];
        let asked = ask.texts(self.app, self.model, places, "prompt", prompts);
        let reply = asked.await?.one()?;
        let complete = run::collect(reply, Vec::new()).await?;
        let logprobs = complete.collected.first().and_then(|t| t.logprobs.as_ref());
        let top = &logprobs.ok_or_else(ApiError::internal)?.top;
        let one = |t: &TopLogprob| prediction(&t.text, f64::from(t.logprob).exp());
        Ok(top.iter().map(one).collect())
    }

    /// Predicts with the model's feed-forward plan or, if `dense`, without the plan.
    async fn routed(&self, places: Places, dense: bool) -> Result<Value, ApiError> {
        let (place, prepared) = self.prepared(places).await?;
        // When the client disconnects, this future is dropped. Its guard then cancels the
        // computation.
        let cancel = CancelToken::new();
        let _leaves = Leaves(cancel.clone());
        let job = LogitsJob {
            model: self.model.clone(),
            prompt: prepared.ids,
            dense,
            interrupt: Interrupt::new()
                .with_cancel(cancel)
                .with_deadline(self.arrived + self.app.limits.request_timeout),
            _place: place,
        };
        let logits = self.app.engine.logits(job).await;
        let logits = logits
            .map_err(|_| ApiError::internal())?
            .map_err(|e| ApiError::of_engine(&e))?;
        let tokens = self.model.tokens()?;
        let named = |(id, p): (u32, f64)| {
            let text = tokens.decode(&[id]).unwrap_or_default();
            prediction(&text, p)
        };
        Ok(most_probable(&logits, self.top)
            .into_iter()
            .map(named)
            .collect())
    }
}

/// The most probable tokens with their probabilities. Among tokens of equal probability, the lower
/// id comes first.
fn most_probable(logits: &[f32], top: usize) -> Vec<(u32, f64)> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let power = |x: f32| f64::from(x - greatest).exp();
    let sum: f64 = logits.iter().map(|x| power(*x)).sum();
    let mut order: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    order.truncate(top);
    order
        .into_iter()
        .map(|(id, x)| (id, power(x) / sum))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_probable_come_first_with_their_share() {
        let logits = [0.0, 2.0f32.ln(), 0.0, f32::NEG_INFINITY];
        let top = most_probable(&logits, 3);
        let ids: Vec<u32> = top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 0, 2]);
        for ((_, p), wanted) in top.iter().zip([0.5, 0.25, 0.25]) {
            assert!((p - wanted).abs() < 1e-6, "{p}");
        }
        assert_eq!(most_probable(&logits, 9).len(), 4);
        assert_eq!(most_probable(&logits, 9)[3], (3, 0.0));
    }
}
