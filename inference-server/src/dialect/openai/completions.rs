//! `/v1/completions`: raw prompts, without a chat template. Special tokens in a prompt are markup.

use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use inference::{Prompt, Token};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::chat::{Completion, FINGERPRINT, finish, now};
use super::options::{self, Usage};
use super::stream::{self, Chunks};
use super::types::CompletionRequest;
use crate::error::ApiError;
use crate::pipeline::ask::Ask;
use crate::pipeline::infill;
use crate::pipeline::prepare::with_logprobs;
use crate::pipeline::run::{self, Item, Keep};
use crate::pipeline::{Prompts, Work};
use crate::state::App;

/// OpenAI's default for `max_tokens`.
const MAX_TOKENS: usize = 16;
/// OpenAI's limit on `logprobs` for completions.
const TOP_LOGPROBS: usize = 5;

/// Continues texts.
#[utoipa::path(post, path = "/v1/completions", request_body = CompletionRequest, responses(
    (status = 200, description = "a completion, or with `stream` its chunks as server-sent events", content((Object = "application/json"), (String = "text/event-stream"))),
    (status = 400, description = "the request is not valid", body = Object),
    (status = 429, description = "the queue is full", body = Object)))]
pub(crate) async fn create(
    State(app): State<App>,
    Work(mut request, mut places): Work<CompletionRequest>,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let prompts = Prompts::checked(request.prompt.take(), &app)?;
    let fields = request.sampling();
    let n = options::choices(&app, &fields)?;
    let usage = options::wants_usage(&fields)?;
    let mut options = options::options(&app, model, &fields)?;
    if let Some(top) = request.logprobs.filter(|n| *n > TOP_LOGPROBS) {
        return Err(ApiError::field(
            "logprobs",
            format!("logprobs is {top}; at most {TOP_LOGPROBS} are allowed"),
        ));
    }
    options.output.logprobs = with_logprobs(model, request.logprobs)?;
    let echo = request.echo.unwrap_or(false);
    for (param, there) in [
        ("best_of", request.best_of.is_some_and(|b| b != n)),
        ("echo", echo && request.logprobs.is_some()),
    ] {
        if there {
            let what = match param {
                "best_of" => "best_of other than n",
                "echo" => "echo together with logprobs",
                other => other,
            };
            let message = format!("{what} is not supported; leave it out");
            return Err(ApiError::unsupported(param, message));
        }
    }
    let asked = options::asked("max_tokens", request.max_tokens)?;
    let head = Head {
        id: app.name("cmpl-"),
        created: now(),
        model: model.id().to_owned(),
        logprobs: options.output.logprobs.is_some(),
        n,
    };
    let mut ask = Ask::new(&app, options, arrived)?;
    let asked = asked.or(app.defaults.max_tokens).or(Some(MAX_TOKENS));
    (ask.most, ask.choices) = (("max_tokens", asked), n);
    ask.streamed = request.stream.unwrap_or(false);
    let streamed = ask.streamed;

    let texts: Vec<Option<String>> = prompts
        .iter()
        .map(|prompt| match prompt {
            Prompt::Text(text) => Some(text.clone()),
            _ => None,
        })
        .collect();
    let suffix = request.suffix.take().filter(|s| !s.is_empty());
    let prompts = match (suffix, prompts.as_slice()) {
        (None, _) => prompts,
        (Some(suffix), [Prompt::Text(prefix)]) => {
            let parts = infill::Parts {
                prefix: prefix.clone(),
                suffix,
                ..infill::Parts::default()
            };
            let (back, prompt) = infill::prompt(&app, model, places, "suffix", parts).await?;
            places = back;
            vec![prompt]
        }
        (Some(_), _) => {
            let message = "suffix needs one prompt, a text";
            return Err(ApiError::field("suffix", message));
        }
    };
    let asked = ask.texts(&app, model, places, "prompt", prompts).await?;
    let mut echoes = Vec::with_capacity(asked.replies.len());
    for (prompt, text) in asked.prompts.iter().zip(texts) {
        let echoed = match (echo, text) {
            (false, _) => String::new(),
            (true, Some(text)) => text,
            (true, None) => model
                .tokens()?
                .decode(&prompt.ids)
                .map_err(|e| ApiError::of_engine(&e))?,
        };
        echoes.extend(std::iter::repeat_n(echoed, n));
    }
    let replies = asked.replies;
    if streamed {
        let chunks = TextChunks {
            head,
            usage: usage.then(Usage::default),
            choices: echoes
                .into_iter()
                .map(|echo| Choice {
                    echo,
                    ..Choice::default()
                })
                .collect(),
        };
        return Ok(stream::answer(replies, chunks, app.limits.ping));
    }
    let mut usage = Usage::default();
    let keep = || Kept {
        text: String::new(),
        logprobs: head.logprobs.then(Logprobs::default),
    };
    let wholes = run::all(replies, keep).await?;
    let mut choices = Vec::with_capacity(wholes.len());
    for (i, (reply, echo)) in wholes.into_iter().zip(echoes).enumerate() {
        usage.add(&reply.end.metrics, i.is_multiple_of(n));
        choices.push(WholeChoice {
            index: i,
            text: echo + &reply.collected.text,
            logprobs: reply.collected.logprobs,
            finish_reason: finish(&reply.end, false),
        });
    }
    let body = Completion {
        id: head.id,
        object: "text_completion",
        created: head.created,
        model: head.model,
        system_fingerprint: FINGERPRINT,
        choices,
        usage: usage.json(),
    };
    Ok(axum::Json(body).into_response())
}

#[derive(Serialize)]
struct WholeChoice {
    index: usize,
    text: String,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
}

/// Data of the tokens that an unstreamed answer contains.
struct Kept {
    text: String,
    logprobs: Option<Logprobs>,
}

impl Keep for Kept {
    fn add(&mut self, token: Token) {
        self.text.push_str(&token.text);
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.add(token);
        }
    }
}

/// The fields that all chunks of a stream share.
struct Head {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    /// The number of replies to a prompt.
    n: usize,
}

/// Log-probabilities in the shape of the completions API.
#[derive(Default, Serialize)]
struct Logprobs {
    /// Character offset of the next token in the text.
    #[serde(skip)]
    offset: usize,
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Top>,
    text_offset: Vec<usize>,
}

/// Alternatives by their text.
struct Top(Vec<(String, f32)>);

impl Serialize for Top {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

impl Logprobs {
    fn add(&mut self, token: Token) {
        self.text_offset.push(self.offset);
        self.offset += token.text.chars().count();
        self.tokens.push(match &token.bytes {
            Some(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            None => token.text,
        });
        let (logprob, top) = token
            .logprobs
            .map_or((0.0, Vec::new()), |l| (l.logprob, l.top));
        let mut all: Vec<(String, f32)> = Vec::with_capacity(top.len());
        for t in top {
            // Several tokens may have equal text, but a JSON object may have each key only once.
            match all.iter_mut().find(|(text, _)| *text == t.text) {
                Some((_, logprob)) => *logprob = t.logprob,
                None => all.push((t.text, t.logprob)),
            }
        }
        self.token_logprobs.push(logprob);
        self.top_logprobs.push(Top(all));
    }

    /// The log-probabilities since the last chunk.
    fn take(&mut self, wanted: bool) -> Value {
        if !wanted {
            return Value::Null;
        }
        let next = Self {
            offset: self.offset,
            ..Self::default()
        };
        json!(std::mem::replace(self, next))
    }
}

#[derive(Default)]
struct Choice {
    echo: String,
    logprobs: Logprobs,
}

struct TextChunks {
    head: Head,
    usage: Option<Usage>,
    choices: Vec<Choice>,
}

impl TextChunks {
    fn chunk(&self, choices: Value) -> Value {
        let mut chunk = json!({
            "id": self.head.id,
            "object": "text_completion",
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        });
        if self.usage.is_some() {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn choice(&mut self, i: usize, text: &str, finish: Option<&str>) -> Value {
        let wanted = self.head.logprobs;
        let logprobs = self.choices[i].logprobs.take(wanted);
        self.chunk(json!([{
            "index": i,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
        }]))
    }
}

impl Chunks for TextChunks {
    fn of(&mut self, i: usize, item: Item) -> Result<Vec<Value>, ApiError> {
        let mut chunks = Vec::new();
        let echo = match item {
            Item::Failed(_) => String::new(),
            _ => std::mem::take(&mut self.choices[i].echo),
        };
        if !echo.is_empty() {
            chunks.push(self.choice(i, &echo, None));
        }
        match item {
            Item::Started => {}
            Item::Token { token, .. } => {
                let text = token.text.clone();
                if self.head.logprobs {
                    self.choices[i].logprobs.add(*token);
                }
                if !text.is_empty() {
                    chunks.push(self.choice(i, &text, None));
                }
            }
            Item::End { end, .. } => {
                chunks.push(self.choice(i, "", Some(finish(&end, false))));
                let first = i.is_multiple_of(self.head.n);
                if let Some(usage) = &mut self.usage {
                    usage.add(&end.metrics, first);
                }
            }
            Item::Failed(error) => return Err(error),
        }
        Ok(chunks)
    }

    fn last(&mut self) -> Vec<Value> {
        let Some(usage) = &self.usage else {
            return Vec::new();
        };
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = usage.json();
        vec![chunk]
    }
}
