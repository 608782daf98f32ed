//! `/completion`: a raw prompt with llama.cpp's parameters, and an answer in llama.cpp's format.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, StreamExt};
use inference::{
    FinishReason, GenerateOptions, Parameter, ParameterValue, Prompt, SamplerOrder,
    SamplingDefaults, SamplingOptions, StopCause, Token,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::engine::Places;
use crate::error::{ApiError, Family};
use crate::models::{Lease, ServedModel};
use crate::pipeline::ask::Ask;
use crate::pipeline::events::{merged, sse};
use crate::pipeline::parameters::{self, Dialect, Parameters};
use crate::pipeline::prepare::with_logprobs;
use crate::pipeline::run::{self, End, Item, Keep, Reply};
use crate::pipeline::{OneOrMore, Prompts, Work, at_most, prepare, within};
use crate::state::App;

/// llama.cpp's fields and defaults.
#[derive(Debug)]
pub(crate) struct LlamaCpp;

/// An alias without generic parameters, because the derived OpenAPI schemas require one.
pub(crate) type LlamaCppParameters = Parameters<LlamaCpp>;

impl Dialect for LlamaCpp {
    const NAME: &'static str = "llama.cpp";
    const NEGATIVE_IS_ZERO: bool = true;

    fn default_of(parameter: &Parameter) -> Option<ParameterValue> {
        Some(match parameter.name() {
            "temperature" => ParameterValue::Real(0.8),
            "top_k" => ParameterValue::Count(40),
            "top_p" => ParameterValue::Real(0.95),
            "min_p" => ParameterValue::Real(0.05),
            _ => return None,
        })
    }

    fn takes(parameter: &Parameter) -> bool {
        // llama.cpp's own field `repeat_last_n` replaces this parameter, because its value 0 has
        // another meaning.
        parameter.name() != "repeat_window"
    }
}

/// The options before a request's fields apply: the operator's defaults, then llama.cpp's.
fn base(app: &App) -> Result<GenerateOptions, ApiError> {
    parameters::base::<LlamaCpp>(app, &SamplingDefaults::default())
}

/// The options of a request without parameters, under llama.cpp's names.
pub(super) fn defaults(app: &App) -> Result<Value, ApiError> {
    let most = app.defaults.max_tokens;
    let mut all = named(&base(app)?);
    all.insert(
        "n_predict".into(),
        most.map_or(-1, |n| i64::try_from(n).unwrap_or(i64::MAX))
            .into(),
    );
    all.insert("seed".into(), Value::from(-1));
    Ok(Value::Object(all))
}

/// The parameters of `options`, under llama.cpp's names.
fn named(options: &GenerateOptions) -> Map<String, Value> {
    let mut all = parameters::as_json(options);
    let window = match all.remove("repeat_window").and_then(|n| n.as_u64()) {
        Some(0) | None => Value::from(-1),
        Some(n) => n.into(),
    };
    all.insert("repeat_last_n".into(), window);
    all
}

/// A text to continue.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = llama::CompletionRequest)]
pub(crate) struct CompletionRequest {
    /// The model's name. Without it, the server uses its first model.
    model: Option<String>,
    /// A text, a list of token ids, or a list of texts and of such lists.
    #[schema(value_type = Option<crate::pipeline::described::Prompts>)]
    prompt: Option<Prompts>,
    #[serde(flatten)]
    rest: Sampling,
}

/// The sampling options.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Sampling {
    /// Maximum number of tokens of the reply. A negative number means as many as fit.
    #[serde(alias = "max_tokens")]
    pub(super) n_predict: Option<i64>,
    /// Send the reply while it is generated.
    pub(super) stream: Option<bool>,
    #[serde(flatten)]
    parameters: LlamaCppParameters,
    /// Which filters apply, in their order: `top_n_sigma`, `top_k`, `typ_p`, `top_p`, `min_p`,
    /// `xtc`, and `temperature` before or after all of them.
    samplers: Option<Vec<String>>,
    /// The number of last tokens that the repetition penalty counts; -1 counts all.
    repeat_last_n: Option<i64>,
    /// The same seed gives the same reply; -1 takes a random one.
    seed: Option<i64>,
    /// Strings that end the reply.
    #[schema(value_type = Option<crate::pipeline::described::OneOrMore>)]
    stop: Option<OneOrMore>,
    /// Continue after the model's end-of-text token.
    ignore_eos: Option<bool>,
    /// A list of pairs `[token, bias]`, or an object with a bias for each token. A bias is added to
    /// the logit.
    #[schema(value_type = Option<crate::pipeline::described::Biases>)]
    logit_bias: Option<Value>,
    /// Return log-probabilities with this number of alternatives.
    n_probs: Option<usize>,
    /// A JSON schema that the reply must match.
    #[schema(value_type = Option<Object>)]
    json_schema: Option<Value>,
    /// Reuse cached computations of a common prefix with earlier prompts.
    cache_prompt: Option<bool>,
    /// Cached prompt prefixes are shared only between requests with the same salt.
    cache_salt: Option<String>,
    /// Return the token ids of the reply.
    return_tokens: Option<bool>,
    /// Not supported.
    grammar: Option<String>,
    /// Not supported.
    mirostat: Option<i64>,
    /// Only 0 is supported.
    dry_multiplier: Option<f32>,
    /// Only 0 is supported.
    dynatemp_range: Option<f32>,
    /// Not supported.
    #[schema(value_type = Option<Vec<Object>>)]
    lora: Option<Vec<Value>>,
}

impl Sampling {
    fn refuse(&self) -> Result<(), ApiError> {
        let not = |value: Option<f32>, neutral: f32| value.is_some_and(|v| v != neutral);
        for (param, there) in [
            (
                "grammar",
                self.grammar.as_ref().is_some_and(|g| !g.is_empty()),
            ),
            ("mirostat", self.mirostat.is_some_and(|n| n != 0)),
            ("dry_multiplier", not(self.dry_multiplier, 0.0)),
            ("dynatemp_range", not(self.dynatemp_range, 0.0)),
            ("lora", self.lora.as_ref().is_some_and(|l| !l.is_empty())),
        ] {
            if there {
                let message = format!("{param} is not supported; leave it out");
                return Err(ApiError::unsupported(param, message));
            }
        }
        Ok(())
    }

    /// The options that the request's fields describe, without the token limit.
    pub(super) fn options(
        &self,
        app: &App,
        model: &ServedModel,
    ) -> Result<GenerateOptions, ApiError> {
        self.refuse()?;
        let mut o = base(app)?;
        self.parameters.apply(&mut o)?;
        if let Some(samplers) = &self.samplers {
            ordered(&mut o.sampling, samplers)?;
        }
        match self.repeat_last_n {
            // In the contract, a window of 0 means all tokens. In llama.cpp, 0 disables the
            // penalty.
            Some(0) => o.penalties.repeat_penalty = 1.0,
            Some(n) => o.penalties.repeat_window = usize::try_from(n).unwrap_or(0),
            None => {}
        }
        o.sampling.seed = self.seed.and_then(|seed| u64::try_from(seed).ok());
        if let Some(stop) = &self.stop {
            o.stop.stop_strings = prepare::stops(app, "stop", stop.list())?;
        }
        o.stop.ignore_eos = self.ignore_eos.unwrap_or(false);
        if let Some(bias) = &self.logit_bias {
            (o.constraints.logit_bias, o.constraints.banned_tokens) = logit_bias(app, bias, model)?;
        }
        if let Some(n) = self.n_probs.filter(|n| *n > 0) {
            let most = app.limits.top_logprobs;
            if n > most {
                let message = format!("n_probs is {n}; at most {most} are allowed");
                return Err(ApiError::field("n_probs", message));
            }
            o.output.logprobs = with_logprobs(model, Some(n))?;
        }
        o.constraints.grammar = match &self.json_schema {
            None | Some(Value::Null) => None,
            Some(schema) => Some(prepare::grammar(app, model, "json_schema", schema)?),
        };
        o.prefill.cache_prompt = self.cache_prompt.unwrap_or(true);
        o.prefill.cache_salt = prepare::salt(self.cache_salt.as_ref())?;
        Ok(o)
    }

    /// The request's maximum number of tokens, if it sets one.
    pub(super) fn asked(&self) -> Option<usize> {
        usize::try_from(self.n_predict?).ok()
    }
}

/// Applies the request's `samplers`: disables the filters that the list omits, and sets the order.
/// Temperature must be first or last. The filters must be in the order of `FIRST` or `LAST`.
fn ordered(sampling: &mut SamplingOptions, samplers: &[String]) -> Result<(), ApiError> {
    const PARAM: &str = "samplers";
    const LAST: [&str; 6] = ["top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"];
    const FIRST: [&str; 6] = ["top_n_sigma", "top_k", "top_p", "min_p", "typ_p", "xtc"];
    // llama.cpp applies these before all filters. Here they are disabled, and fields that would
    // enable them are refused.
    const OFF: [&str; 2] = ["penalties", "dry"];
    let named: Vec<&str> = samplers
        .iter()
        .map(|name| match name.as_str() {
            "typical_p" => "typ_p",
            name => name,
        })
        .collect();
    let unknown =
        |name: &&&str| !LAST.contains(name) && !OFF.contains(name) && **name != "temperature";
    if let Some(name) = named.iter().find(unknown) {
        let shown: String = name.chars().take(40).collect();
        let message = format!("samplers holds {shown:?}, which is not supported");
        return Err(ApiError::unsupported(PARAM, message));
    }
    let used: Vec<&str> = named
        .into_iter()
        .filter(|name| !OFF.contains(name))
        // The two orders place typical-p differently, which matters only if typical-p is enabled.
        .filter(|name| *name != "typ_p" || sampling.typical_p < 1.0)
        .collect();
    let place = |name: &str| used.iter().position(|candidate| *candidate == name);
    let filters = used.iter().filter(|name| **name != "temperature");
    let first = place("temperature") == Some(0) && used.len() > 1;
    let last = place("temperature").is_none_or(|at| at + 1 == used.len());
    let order = if first { FIRST } else { LAST };
    let sorted = filters
        .map(|name| order.iter().position(|candidate| candidate == name))
        .is_sorted();
    if !(first || last) || !sorted {
        let message = format!(
            "samplers must be in the order {}, temperature; or temperature, {}",
            LAST.join(", "),
            FIRST.join(", ")
        );
        return Err(ApiError::unsupported(PARAM, message));
    }
    if place("temperature").is_none() && sampling.temperature > 0.0 {
        sampling.temperature = 1.0;
    }
    if place("top_n_sigma").is_none() {
        sampling.top_n_sigma = 0.0;
    }
    if place("typ_p").is_none() {
        sampling.typical_p = 1.0;
    }
    if place("top_k").is_none() {
        sampling.top_k = 0;
    }
    if place("top_p").is_none() {
        sampling.top_p = 1.0;
    }
    if place("min_p").is_none() {
        sampling.min_p = 0.0;
    }
    if place("xtc").is_none() {
        sampling.xtc_probability = 0.0;
    }
    if first {
        sampling.sampler_order = SamplerOrder::TemperatureFirst;
    }
    Ok(())
}

type Biases = (BTreeMap<u32, f32>, Vec<u32>);

/// Biases by token, and forbidden tokens (a bias of `false`).
fn logit_bias(app: &App, bias: &Value, model: &ServedModel) -> Result<Biases, ApiError> {
    let param = "logit_bias";
    let (vocabulary, most) = (model.info().vocab_size, app.limits.logit_bias);
    let bad = || {
        let message = format!(
            "logit_bias must be pairs of a token below {vocabulary} or a text, and a number or false, or an \
             object of them"
        );
        ApiError::field(param, message)
    };
    let pairs: Vec<(Named<'_>, &Value)> = match bias {
        Value::Null => Vec::new(),
        Value::Object(all) => {
            at_most(param, all.len(), most)?;
            all.iter()
                .map(|(key, v)| (key.parse().map_or(Named::Text(key), Named::Id), v))
                .collect()
        }
        Value::Array(all) => {
            at_most(param, all.len(), most)?;
            let pairs: Option<Vec<_>> = all.iter().map(pair).collect();
            pairs.ok_or_else(bad)?
        }
        _ => return Err(bad()),
    };
    let (mut biases, mut banned) = Biases::default();
    for (name, value) in pairs {
        let ids = match name {
            Named::Id(id) => {
                let id = u32::try_from(id).ok();
                let id = id.filter(|id| (*id as usize) < vocabulary);
                vec![id.ok_or_else(bad)?]
            }
            Named::Text(text) if text.len() > app.limits.stop_bytes => return Err(bad()),
            Named::Text(text) => {
                let ids = model.tokens()?.encode(text, false);
                ids.map_err(|e| ApiError::of_engine(&e).with_param(param))?
            }
        };
        at_most(param, biases.len() + banned.len() + ids.len(), most)?;
        if value == &Value::Bool(false) {
            banned.extend(ids);
            continue;
        }
        let value = value.as_f64().ok_or_else(bad)? as f32;
        within(param, value, -100.0, 100.0)?;
        biases.extend(ids.into_iter().map(|id| (id, value)));
    }
    Ok((biases, banned))
}

/// The target of a bias: one token, or all tokens of a text.
enum Named<'a> {
    Id(u64),
    Text(&'a str),
}

fn pair(pair: &Value) -> Option<(Named<'_>, &Value)> {
    match pair.as_array()?.as_slice() {
        [Value::String(text), value] => Some((Named::Text(text), value)),
        [id, value] => Some((Named::Id(id.as_u64()?), value)),
        _ => None,
    }
}

/// Continues texts, with llama.cpp's parameters.
#[utoipa::path(post, path = "/completion", request_body = CompletionRequest, responses(
    (status = 200, description = "a completion, several for several prompts, or with `stream` events", content((crate::pipeline::described::ListOrObject = "application/json"), (String = "text/event-stream"))),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 429, description = "the queue is full", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Work(mut request, places): Work<CompletionRequest>,
) -> Result<Response, ApiError> {
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let several = matches!(request.prompt, Some(Prompts::More(_)));
    let prompts = Prompts::checked(request.prompt.take(), &app)?;
    answer(&app, model, places, prompts, several, &request.rest).await
}

/// Continues the prompts. If `several`, the answer is a JSON list.
pub(super) async fn answer(
    app: &App,
    model: &Lease,
    places: Places,
    prompts: Vec<Prompt>,
    several: bool,
    sampling: &Sampling,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let options = sampling.options(app, model)?;
    let mut ask = Ask::new(app, options, arrived)?;
    ask.most = ("n_predict", sampling.asked());
    ask.streamed = sampling.stream == Some(true);
    let streamed = ask.streamed;
    let texts: Vec<Option<String>> = prompts
        .iter()
        .map(|prompt| match prompt {
            Prompt::Text(text) => Some(text.clone()),
            _ => None,
        })
        .collect();
    let asked = ask.texts(app, model, places, "prompt", prompts).await?;
    let mut heads = Vec::with_capacity(asked.prompts.len());
    let each = asked.prompts.iter().zip(&asked.options).zip(texts);
    for (index, ((prompt, options), text)) in each.enumerate() {
        let text = match text {
            Some(text) => text,
            None => model
                .tokens()?
                .decode(&prompt.ids)
                .map_err(|e| ApiError::of_engine(&e))?,
        };
        heads.push(Head {
            index,
            model: model.id().to_owned(),
            settings: settings(options, options.max_tokens),
            prompt: text,
            tokens: sampling.return_tokens.unwrap_or(false),
            probabilities: options.output.logprobs.is_some(),
        });
    }
    if streamed {
        return Ok(events(asked.replies, heads, app.limits.ping));
    }
    let probabilities = asked.options.iter().any(|o| o.output.logprobs.is_some());
    let keep = || Kept {
        text: String::new(),
        ids: sampling.return_tokens.unwrap_or(false).then(Vec::new),
        probabilities: probabilities.then(Vec::new),
    };
    let wholes = run::all(asked.replies, keep).await?;
    let mut all: Vec<Answer> = wholes
        .into_iter()
        .zip(&heads)
        .map(|(reply, head)| head.last(reply.collected, &reply.end))
        .collect();
    Ok(match several {
        true => axum::Json(all).into_response(),
        false => axum::Json(all.pop().ok_or_else(ApiError::internal)?).into_response(),
    })
}

/// Data of the tokens that an unstreamed answer contains.
#[derive(Default)]
struct Kept {
    text: String,
    ids: Option<Vec<u32>>,
    probabilities: Option<Vec<Probability>>,
}

impl Keep for Kept {
    fn add(&mut self, token: Token) {
        self.text.push_str(&token.text);
        if let Some(ids) = &mut self.ids {
            ids.push(token.id);
        }
        if let Some(all) = &mut self.probabilities {
            all.push(Probability::from_token(token));
        }
    }
}

/// An unstreamed answer. It is a struct, because a JSON value would need several times the memory.
#[derive(Serialize)]
struct Answer {
    content: String,
    tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    completion_probabilities: Vec<Probability>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A token and its alternatives.
#[derive(Serialize)]
struct Probability {
    id: u32,
    token: String,
    bytes: Option<Box<[u8]>>,
    logprob: f32,
    top_logprobs: Vec<Alternative>,
}

#[derive(Serialize)]
struct Alternative {
    id: u32,
    token: String,
    bytes: Option<Box<[u8]>>,
    logprob: f32,
}

impl Probability {
    fn from_token(token: Token) -> Self {
        let (logprob, top) = token
            .logprobs
            .map_or((0.0, Vec::new()), |l| (l.logprob, l.top));
        let alternative = |t: inference::TopLogprob| Alternative {
            id: t.id,
            token: t.text,
            bytes: t.bytes,
            logprob: t.logprob,
        };
        Self {
            id: token.id,
            token: match &token.bytes {
                Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                None => token.text,
            },
            bytes: token.bytes,
            logprob,
            top_logprobs: top.into_iter().map(alternative).collect(),
        }
    }
}

fn settings(options: &GenerateOptions, most: usize) -> Value {
    let mut all = named(options);
    for (name, value) in [
        ("n_predict", json!(most)),
        ("seed", json!(options.sampling.seed)),
        ("stop", json!(options.stop.stop_strings)),
        ("ignore_eos", json!(options.stop.ignore_eos)),
    ] {
        all.insert(name.into(), value);
    }
    Value::Object(all)
}

/// The fields of an answer besides its text.
struct Head {
    index: usize,
    model: String,
    settings: Value,
    prompt: String,
    tokens: bool,
    probabilities: bool,
}

impl Head {
    /// The unstreamed answer, which is also the last event of a stream.
    fn last(&self, collected: Kept, end: &End) -> Answer {
        let m = &end.metrics;
        let (kind, word) = match (&end.reason, &end.stop) {
            (FinishReason::Length, _) => ("limit", ""),
            (_, Some(StopCause::String(stop))) => ("word", stop.as_str()),
            (_, Some(StopCause::Eos(_))) => ("eos", ""),
            _ => ("none", ""),
        };
        let mut rest = Map::new();
        for (name, value) in [
            ("index", self.index.into()),
            ("id_slot", Value::from(-1)),
            ("stop", true.into()),
            ("model", self.model.as_str().into()),
            ("tokens_predicted", m.generated_tokens.into()),
            ("tokens_evaluated", m.prompt_tokens.into()),
            ("tokens_cached", m.cached_tokens.into()),
            ("generation_settings", self.settings.clone()),
            ("prompt", self.prompt.as_str().into()),
            ("has_new_line", collected.text.contains('\n').into()),
            ("truncated", false.into()),
            ("stop_type", kind.into()),
            ("stopping_word", word.into()),
            ("timings", timings(end)),
        ] {
            rest.insert(name.into(), value);
        }
        Answer {
            content: collected.text,
            tokens: collected.ids.unwrap_or_default(),
            completion_probabilities: collected.probabilities.unwrap_or_default(),
            rest,
        }
    }

    fn piece(&self, token: Token, count: usize) -> Value {
        let ids: &[u32] = if self.tokens { &[token.id] } else { &[] };
        let mut piece = json!({
            "index": self.index,
            "content": token.text,
            "tokens": ids,
            "stop": false,
            "id_slot": -1,
            "tokens_predicted": count,
        });
        if self.probabilities {
            piece["completion_probabilities"] = json!([Probability::from_token(token)]);
        }
        piece
    }
}

fn timings(end: &End) -> Value {
    let m = &end.metrics;
    let computed = m.prompt_tokens.saturating_sub(m.cached_tokens);
    // Prefill computes the first token, so decode time excludes that token.
    let decoded = m.generated_tokens.saturating_sub(1);
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let each = |time: Duration, n: usize| match n {
        0 => 0.0,
        n => milliseconds(time) / n as f64,
    };
    let rate = |time: Duration, n: usize| match time.is_zero() {
        true => 0.0,
        false => n as f64 / time.as_secs_f64(),
    };
    json!({
        "cache_n": m.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": milliseconds(m.prefill_time),
        "prompt_per_token_ms": each(m.prefill_time, computed),
        "prompt_per_second": rate(m.prefill_time, computed),
        "predicted_n": m.generated_tokens,
        "predicted_ms": milliseconds(m.decode_time),
        "predicted_per_token_ms": each(m.decode_time, decoded),
        "predicted_per_second": rate(m.decode_time, decoded),
    })
}

/// Answers with events. The `stop` field of the last reply ends the stream; llama.cpp sends no
/// `[DONE]`.
fn events(replies: Vec<Reply>, heads: Vec<Head>, ping: Duration) -> Response {
    let counts = vec![0usize; heads.len()];
    let state = Some((Box::pin(merged(replies)), heads, counts));
    let all = stream::unfold(state, |state| async {
        let (mut items, heads, mut counts) = state?;
        let (i, item) = items.next().await?;
        let mut more = true;
        let values = match item {
            Item::Started => Vec::new(),
            Item::Token { token, .. } => {
                counts[i] += 1;
                vec![heads[i].piece(*token, counts[i])]
            }
            // Earlier events already contained the text.
            Item::End { end, .. } => vec![json!(heads[i].last(Kept::default(), &end))],
            Item::Failed(error) => {
                more = false;
                vec![error.body(Family::OpenAi)]
            }
        };
        let values: Vec<Result<Event, Infallible>> = values
            .into_iter()
            .map(|value| Ok(Event::default().data(value.to_string())))
            .collect();
        Some((values, more.then_some((items, heads, counts))))
    });
    sse(all.flat_map(stream::iter), ping)
}
