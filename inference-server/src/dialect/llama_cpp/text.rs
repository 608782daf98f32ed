//! `/tokenize`, `/detokenize`, `/apply-template` and `/embedding`.

use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use inference::{ChatEnd, ChatPrompt, EmbedOptions, Message, Prompt, Tool};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::engine::Places;
use crate::error::ApiError;
use crate::models::Lease;
use crate::pipeline::embeddings::vectors;
use crate::pipeline::{Prompts, Work, at_most, prepare};
use crate::state::App;

/// A text to tokenize.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct TokenizeRequest {
    /// The model's name. Without it, the server uses its first model.
    model: Option<String>,
    /// The text.
    #[serde(default)]
    content: String,
    /// Add the model's tokens around a text, such as a start token.
    add_special: Option<bool>,
    /// Only `true` is supported: special tokens in the text are markup.
    parse_special: Option<bool>,
    /// Also return the text of each token.
    with_pieces: Option<bool>,
}

/// Returns the token ids of a text.
#[utoipa::path(post, path = "/tokenize", request_body = TokenizeRequest, responses(
    (status = 200, description = "`tokens`", body = Object),
    (status = 400, description = "the request is not valid", body = Object)))]
pub(crate) async fn tokenize(
    State(app): State<App>,
    Work(request, places): Work<TokenizeRequest>,
) -> Result<Response, ApiError> {
    if request.parse_special == Some(false) {
        return Err(ApiError::unsupported(
            "parse_special",
            "parse_special false is not supported; leave it out",
        ));
    }
    let model = app.models.get(request.model.as_deref(), None).await?;
    prepare::check_bytes(&app, request.content.len())?;
    let (places, (first, rest)) = prepare::aside(places, move || {
        let add_special = request.add_special.unwrap_or(false);
        let encoded = model.tokens()?.encode(&request.content, add_special);
        let ids = encoded.map_err(|e| ApiError::of_engine(&e).with_param("content"))?;
        let mut list = TokenList {
            model,
            ids: ids.into_iter(),
            with_pieces: request.with_pieces == Some(true),
            started: false,
            ended: false,
        };
        let first = list.part()?;
        Ok((first, list))
    })
    .await?;
    let kind = [(CONTENT_TYPE, "application/json")];
    if rest.ended {
        return Ok((kind, first).into_response());
    }
    // The stream keeps its queue place until the client has read everything. This bounds the memory
    // that slow clients can occupy with id lists.
    let rest = stream::unfold((rest, places), |(mut rest, places)| async {
        if rest.ended {
            return None;
        }
        let part = rest.part().map_err(|e| {
            rest.ended = true;
            tracing::error!("an answer of /tokenize ends early: {e:?}");
            std::io::Error::other("a token has no text")
        });
        Some((part, (rest, places)))
    });
    let all = stream::iter([Ok(first)]).chain(rest);
    Ok((kind, Body::from_stream(all)).into_response())
}

/// Size of the parts of an answer, in bytes; a part may be slightly larger.
const PART: usize = 32 << 10;

/// An answer of `/tokenize`, serialized part by part. The JSON has tens of bytes per byte of the
/// text, so only the ids stay in memory.
struct TokenList {
    model: Lease,
    ids: std::vec::IntoIter<u32>,
    with_pieces: bool,
    started: bool,
    ended: bool,
}

#[derive(Serialize)]
struct TokenPiece {
    id: u32,
    piece: String,
}

impl TokenList {
    /// The next bytes of the answer.
    fn part(&mut self) -> Result<Vec<u8>, ApiError> {
        let tokens = self.model.tokens()?;
        let mut out = Vec::new();
        while out.len() < PART {
            let Some(id) = self.ids.next() else {
                if !self.started {
                    out.extend_from_slice(START);
                }
                out.extend_from_slice(b"]}");
                self.ended = true;
                break;
            };
            match self.started {
                true => out.push(b','),
                false => out.extend_from_slice(START),
            }
            self.started = true;
            let written = if self.with_pieces {
                let decoded = tokens.decode(std::slice::from_ref(&id));
                let piece = decoded.map_err(|e| ApiError::of_engine(&e))?;
                serde_json::to_writer(&mut out, &TokenPiece { id, piece })
            } else {
                serde_json::to_writer(&mut out, &id)
            };
            written.map_err(|_| ApiError::internal())?;
        }
        Ok(out)
    }
}

/// The start of a `/tokenize` response; the ids follow.
const START: &[u8] = b"{\"tokens\":[";

/// Token ids to convert to text.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct DetokenizeRequest {
    /// The model's name. Without it, the server uses its first model.
    model: Option<String>,
    /// The ids.
    #[serde(default)]
    tokens: Vec<u32>,
}

/// Converts token ids to text.
#[utoipa::path(post, path = "/detokenize", request_body = DetokenizeRequest, responses(
    (status = 200, description = "`content`", body = Object),
    (status = 400, description = "the request is not valid", body = Object)))]
pub(crate) async fn detokenize(
    State(app): State<App>,
    Work(request, places): Work<DetokenizeRequest>,
) -> Result<Response, ApiError> {
    let model = app.models.get(request.model.as_deref(), None).await?;
    let most = app.limits.prompt_bytes;
    // A token decodes to a few bytes. So this limit allows about as much text as the limit on
    // prompts.
    at_most("tokens", request.tokens.len(), most / 8)?;
    prepare::check_ids(&model, "tokens", &request.tokens)?;
    let (places, content) = prepare::aside(places, move || {
        let tokens = model.tokens()?;
        let failed = |e: inference::Error| ApiError::of_engine(&e);
        // Some tokens decode to a hundred bytes, so the decoded text is limited, too.
        let mut bytes = 0;
        for ids in request.tokens.chunks(AT_A_TIME) {
            bytes += tokens.decode(ids).map_err(failed)?.len();
            if bytes > most {
                let message = format!("the text of the tokens has more than {most} bytes");
                return Err(ApiError::field("tokens", message));
            }
        }
        tokens.decode(&request.tokens).map_err(failed)
    })
    .await?;
    Ok(text_answer("content", content, places))
}

/// Number of ids that are decoded at once to measure their text.
const AT_A_TIME: usize = 1024;

/// A JSON object with one text, serialized part by part. The response keeps its queue place until
/// the client has read everything. This bounds the memory that slow clients can occupy with texts.
fn text_answer(name: &'static str, text: String, places: Places) -> Response {
    let start = format!("{{\"{name}\":\"");
    let parts = stream::unfold(Some((text, 0, places)), move |state| {
        let mut out = if matches!(state, Some((_, 0, _))) {
            start.clone().into_bytes()
        } else {
            Vec::new()
        };
        async move {
            let (text, from, places) = state?;
            let mut to = text.len().min(from + PART);
            while !text.is_char_boundary(to) {
                to += 1;
            }
            let part = serde_json::to_string(&text[from..to]).ok()?;
            out.extend_from_slice(&part.as_bytes()[1..part.len() - 1]);
            let ended = to == text.len();
            if ended {
                out.extend_from_slice(b"\"}");
            }
            let part = Ok::<_, std::convert::Infallible>(out);
            Some((part, (!ended).then_some((text, to, places))))
        }
    });
    let kind = [(CONTENT_TYPE, "application/json")];
    (kind, Body::from_stream(parts)).into_response()
}

/// A conversation to render.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct TemplateRequest {
    /// The model's name. Without it, the server uses its first model.
    model: Option<String>,
    /// The turns, oldest first.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Message>,
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Tool>>,
    /// More variables for the model's chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// End the prompt where the model's answer begins; true by default.
    add_generation_prompt: Option<bool>,
}

/// Renders a conversation with the model's chat template.
#[utoipa::path(post, path = "/apply-template", request_body = TemplateRequest, responses(
    (status = 200, description = "`prompt`", body = Object),
    (status = 400, description = "the request is not valid", body = Object)))]
pub(crate) async fn apply_template(
    State(app): State<App>,
    Work(request, places): Work<TemplateRequest>,
) -> Result<Response, ApiError> {
    let model = app.models.get(request.model.as_deref(), None).await?;
    let mut prompt = ChatPrompt::new(request.messages);
    prompt.tools = request.tools.unwrap_or_default();
    prompt.template = request.chat_template_kwargs.unwrap_or_default();
    if request.add_generation_prompt == Some(false) {
        prompt.end = ChatEnd::Messages;
    }
    prepare::add_names(&app, &mut prompt);
    let (places, text) = prepare::aside(places, move || {
        prepare::check_chat(&app, &model, &prompt)?;
        let tokens = model.tokens()?;
        let prepare = |prompt: &ChatPrompt| tokens.prepare_chat(prompt);
        let prepared = model.format().written(&prompt, &prepare);
        prepared.map_or_else(|e| Err(prepare::template_error(&e)), |p| Ok(p.text))
    })
    .await?;
    Ok(text_answer("prompt", text, places))
}

/// Texts to embed.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = llama::EmbeddingRequest)]
pub(crate) struct EmbeddingRequest {
    /// The model's name. Without it, the server uses its first model.
    model: Option<String>,
    /// A text, a list of token ids, or a list of texts and of such lists.
    #[serde(alias = "input")]
    #[schema(value_type = crate::pipeline::described::Prompts)]
    content: Prompts,
}

/// Embeds texts as vectors of length one, pooled as the model was trained.
#[utoipa::path(post, path = "/embedding", request_body = EmbeddingRequest, responses(
    (status = 200, description = "a list with `index` and `embedding`", body = Vec<Object>),
    (status = 400, description = "the request is not valid", body = Object)))]
pub(crate) async fn embedding(
    State(app): State<App>,
    Work(request, places): Work<EmbeddingRequest>,
) -> Result<axum::Json<Vec<Vectors>>, ApiError> {
    let model = &app.models.get(request.model.as_deref(), None).await?;
    let prompts: Vec<Prompt> = request.content.list();
    let options = EmbedOptions::new();
    let (vectors, _) = vectors(&app, model, places, prompts, options).await?;
    let item = |(index, vector): (usize, Vec<f32>)| Vectors {
        index,
        embedding: [vector],
    };
    Ok(axum::Json(
        vectors.into_iter().enumerate().map(item).collect(),
    ))
}

/// The vectors of a text. There is exactly one vector, since token-level poolings are not
/// supported.
#[derive(Serialize)]
pub(crate) struct Vectors {
    index: usize,
    embedding: [Vec<f32>; 1],
}
