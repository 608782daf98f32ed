//! Converts prompts to token ids within limits. The work runs on threads other than those that
//! answer requests.

use std::time::Instant;

use inference::{
    ChatPrompt, Edit, EditOperation, EmbedOptions, GenerateOptions, Grammar, PreparedPrompt,
    Prompt, Steering, Tool,
};

use crate::engine::{Places, Refused};
use crate::error::ApiError;
use crate::measure::json_bytes;
use crate::models::{Lease, ServedModel};
use crate::reply::{CallOrJson, ReplyRequest};
use crate::state::App;

/// A prompt as token ids, with everything that its reply needs.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    pub(crate) ids: Vec<u32>,
    /// The information for the reply's parser.
    pub(crate) request: ReplyRequest,
    /// Whether the reply is plain text, without tool calls or reasoning.
    pub(crate) verbatim: bool,
    /// How to read a reply that is either a call or JSON of a schema.
    pub(crate) either: Option<CallOrJson>,
}

/// Number of characters at the end of a prompt that reply parsers receive.
const END: usize = 256;

/// Refuses log-probabilities if the backend has none.
pub(crate) fn with_logprobs(
    model: &ServedModel,
    asked: Option<usize>,
) -> Result<Option<usize>, ApiError> {
    if asked.is_some() && !model.capabilities().logprobs {
        return Err(ApiError::unsupported(
            "logprobs",
            format!("the model {} gives no log-probabilities", model.id()),
        ));
    }
    Ok(asked)
}

/// Reserves places for `n` replies, before any work for them.
pub(crate) fn reserve(app: &App, n: usize) -> Result<Places, ApiError> {
    app.engine.reserve(n).map_err(|refused| match refused {
        Refused::Full => ApiError::busy(),
        Refused::Stopping => ApiError::stopping(),
    })
}

/// The place of a request. Reserves one if the request has none.
pub(crate) fn place(app: &App, place: Option<Places>) -> Result<Places, ApiError> {
    place.map_or_else(|| reserve(app, 1), Ok)
}

/// Refuses a request without a place if the server is stopping.
pub(crate) fn goes_on(app: &App) -> Result<(), ApiError> {
    match app.engine.is_draining() {
        true => Err(ApiError::stopping()),
        false => Ok(()),
    }
}

/// Reserves further places, up to `n` in total. Does nothing if there are already `n` places.
pub(crate) fn grow(app: &App, places: &mut Places, n: usize) -> Result<(), ApiError> {
    let more = n.saturating_sub(places.len());
    if more > 0 {
        places.add(reserve(app, more)?);
    }
    Ok(())
}

/// Runs slow work on another thread. The work continues if the client disconnects, so it owns the
/// request's places.
pub(crate) async fn aside<P: Send + 'static, T: Send + 'static>(
    places: P,
    run: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<(P, T), ApiError> {
    let done = tokio::task::spawn_blocking(move || run().map(|value| (places, value)));
    done.await.unwrap_or_else(|e| {
        tracing::error!("preparing a request failed: {e}");
        Err(ApiError::internal())
    })
}

/// The error for a failed chat template. The client's input is the usual cause.
pub(crate) fn template_error(e: &inference::Error) -> ApiError {
    match e.kind() {
        inference::ErrorKind::InvalidModel => ApiError::field(
            "messages",
            format!("the chat template failed: {}", e.message()),
        ),
        inference::ErrorKind::InvalidOption => ApiError::of_engine(e).with_param("messages"),
        _ => ApiError::of_engine(e),
    }
}

/// Adds the operator's variables for the chat template.
pub(crate) fn add_names(app: &App, prompt: &mut ChatPrompt) {
    for (name, value) in &app.defaults.template {
        if !prompt.template.contains_key(name) {
            prompt.template.insert(name.clone(), value.clone());
        }
    }
}

/// The ids of a conversation.
pub(crate) async fn chat<P: Send + 'static>(
    app: &App,
    model: &Lease,
    places: P,
    mut prompt: ChatPrompt,
) -> Result<(P, Prepared), ApiError> {
    add_names(app, &mut prompt);
    let (app, model) = (app.clone(), model.clone());
    aside(places, move || {
        check_chat(&app, &model, &prompt)?;
        let tokens = model.tokens()?;
        let failed = |e: inference::Error| template_error(&e);
        let prepare = |prompt: &ChatPrompt| tokens.prepare_chat(prompt);
        let prepared = model.format().written(&prompt, &prepare);
        let PreparedPrompt { text, ids, .. } = prepared.map_err(failed)?;
        check_length(&model, ids.len())?;
        let start = text
            .char_indices()
            .rev()
            .nth(END - 1)
            .map_or(0, |(at, _)| at);
        let request = ReplyRequest {
            prompt_end: text[start..].to_owned(),
            earlier_calls: prompt.messages.iter().map(|m| m.tool_calls.len()).sum(),
            tools: prompt.tools,
            one_call: false,
        };
        Ok(Prepared {
            ids,
            request,
            verbatim: false,
            either: None,
        })
    })
    .await
}

/// The token ids of raw prompts. `param` is the name of the request's field with the prompts.
pub(crate) async fn raw(
    app: &App,
    model: &Lease,
    places: Places,
    param: &'static str,
    prompts: Vec<Prompt>,
) -> Result<(Places, Vec<Prepared>), ApiError> {
    let bytes: usize = prompts
        .iter()
        .map(|prompt| match prompt {
            Prompt::Text(text) => text.len(),
            Prompt::Tokens(ids) => ids.len(),
            _ => 0,
        })
        .sum();
    check_bytes(app, bytes)?;
    let model = model.clone();
    aside(places, move || {
        let tokens = model.tokens()?;
        let mut all = Vec::new();
        for prompt in prompts {
            let ids = match prompt {
                Prompt::Text(text) => tokens
                    .encode(&text, true)
                    .map_err(|e| ApiError::of_engine(&e).with_param(param))?,
                Prompt::Tokens(ids) => ids,
                _ => return Err(ApiError::internal()),
            };
            if ids.is_empty() {
                let message = format!("{param} is empty; give it some text");
                return Err(ApiError::field(param, message));
            }
            check_ids(&model, param, &ids)?;
            check_length(&model, ids.len())?;
            let request = ReplyRequest::default();
            all.push(Prepared {
                ids,
                request,
                verbatim: true,
                either: None,
            });
        }
        Ok(all)
    })
    .await
}

/// Refuses ids outside the model's vocabulary. `param` is the name of the request's field with the
/// ids.
pub(crate) fn check_ids(
    model: &ServedModel,
    param: &'static str,
    ids: &[u32],
) -> Result<(), ApiError> {
    let most = model.info().vocab_size;
    match ids.iter().find(|id| **id as usize >= most) {
        None => Ok(()),
        Some(id) => {
            let message = format!("the token {id} is not in the vocabulary of {most}");
            Err(ApiError::field(param, message))
        }
    }
}

/// The token ids of texts to embed. `param` is the name of the request's field with the texts.
pub(crate) async fn texts(
    app: &App,
    model: &Lease,
    places: Places,
    (param, texts): (&'static str, Vec<Prompt>),
    options: EmbedOptions,
) -> Result<(Places, Vec<Vec<u32>>), ApiError> {
    let sizes = texts.iter().map(|text| match text {
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(ids) => ids.len(),
        _ => 0,
    });
    check_bytes(app, sizes.sum())?;
    without_adapter(model, "embeddings")?;
    let model = model.clone();
    aside(places, move || {
        let Some(embedder) = model.model().as_embedding_model() else {
            return Err(no_embeddings(&model));
        };
        let failed = |e: inference::Error| ApiError::of_engine(&e).with_param(param);
        let mut all = Vec::with_capacity(texts.len());
        for text in texts {
            if text == Prompt::Tokens(Vec::new()) || text == Prompt::Text(String::new()) {
                let message = format!("{param} is empty; give it some text");
                return Err(ApiError::field(param, message));
            }
            let ids = embedder.embedding_tokens(&text, &options).map_err(failed)?;
            check_ids(&model, param, &ids)?;
            match model.context() {
                Some(most) if ids.len() > most => return Err(ApiError::context(ids.len(), most)),
                _ => all.push(ids),
            }
        }
        Ok(all)
    })
    .await
}

/// Refuses a model with an adapter that shares its weights, for computations that do not name
/// adapters.
pub(crate) fn without_adapter(model: &ServedModel, what: &str) -> Result<(), ApiError> {
    let Some(base) = model.base() else {
        return Ok(());
    };
    let (id, base) = (model.id(), base.id());
    Err(ApiError::unsupported(
        "model",
        format!(
            "the model {id} shares the weights of {base}, and {what} cannot name an adapter; serve \
             it alone with --adapter-path"
        ),
    ))
}

pub(crate) fn no_embeddings(model: &ServedModel) -> ApiError {
    let message = format!("the model {} makes no embeddings", model.id());
    ApiError::unsupported("model", message)
}

/// Checks a conversation before the chat template renders it.
pub(crate) fn check_chat(
    app: &App,
    model: &ServedModel,
    prompt: &ChatPrompt,
) -> Result<(), ApiError> {
    let limits = &app.limits;
    super::at_most("messages", prompt.messages.len(), limits.messages)?;
    if prompt.messages.is_empty() {
        return Err(ApiError::field("messages", "there are no messages"));
    }
    if !model.capabilities().chat || !model.info().has_chat_template {
        return Err(ApiError::unsupported(
            "messages",
            format!(
                "the model {} has no chat template; use completions with a prompt",
                model.id()
            ),
        ));
    }
    if !prompt.tools.is_empty() && !model.format().reads_tools() {
        return Err(ApiError::unsupported(
            "tools",
            format!(
                "the model {} has no known format of tool calls; leave tools out, or set \
                 tool_choice to \"none\"",
                model.id()
            ),
        ));
    }
    check_tools(app, &prompt.tools)?;
    let (bytes, most) = (json_bytes(&prompt.template), limits.template_bytes);
    if bytes > most {
        return Err(ApiError::field(
            "chat_template_kwargs",
            format!(
                "the template's arguments have {bytes} bytes as JSON; at most {most} are allowed"
            ),
        ));
    }
    let mut bytes = 0usize;
    for (i, message) in prompt.messages.iter().enumerate() {
        if !ROLES.contains(&message.role.as_str()) {
            let shown: String = message.role.chars().take(40).collect();
            let roles = ROLES.join(", ");
            return Err(ApiError::field(
                format!("messages[{i}].role"),
                format!("the role {shown:?} is not known; the roles are {roles}"),
            ));
        }
        let calls = &message.tool_calls;
        let param = format!("messages[{i}].tool_calls");
        super::at_most(&param, calls.len(), limits.tool_calls)?;
        bytes += message.role.len() + message.content.len();
        bytes += message.name.as_ref().map_or(0, String::len);
        bytes += message.reasoning.as_ref().map_or(0, String::len);
        bytes += message.tool_call_id.as_ref().map_or(0, String::len);
        for call in calls {
            bytes += call.id.len() + call.name.len() + json_bytes(&call.arguments);
        }
    }
    check_bytes(app, bytes)
}

/// The known roles of messages.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Checks the number and the size of the tools.
pub(crate) fn check_tools(app: &App, tools: &[Tool]) -> Result<(), ApiError> {
    let limits = &app.limits;
    super::at_most("tools", tools.len(), limits.tools)?;
    let mut all = 0usize;
    for (i, tool) in tools.iter().enumerate() {
        let schema = tool.parameters.as_ref().map_or(0, json_bytes);
        let most = limits.schema_bytes;
        if schema > most {
            return Err(ApiError::field(
                format!("tools[{i}]"),
                format!("the schema has {schema} bytes; at most {most} are allowed"),
            ));
        }
        all += schema + tool.name.len() + tool.description.as_ref().map_or(0, String::len);
    }
    let most = limits.tools_bytes;
    if all > most {
        let message = format!("the tools have {all} bytes; at most {most} are allowed");
        return Err(ApiError::field("tools", message));
    }
    Ok(())
}

pub(crate) fn check_bytes(app: &App, bytes: usize) -> Result<(), ApiError> {
    let most = app.limits.prompt_bytes;
    if bytes > most {
        return Err(ApiError::invalid(format!(
            "the prompt has {bytes} bytes; at most {most} are allowed"
        ))
        .with_code("prompt_too_large"));
    }
    Ok(())
}

/// Checks that the context has space for the prompt and one more token. A prompt is never
/// truncated.
fn check_length(model: &ServedModel, prompt: usize) -> Result<(), ApiError> {
    match model.context() {
        Some(context) if prompt >= context => Err(ApiError::context(prompt, context)),
        _ => Ok(()),
    }
}

/// Maximum number of reply tokens: the request's number, limited by the context and the
/// configuration.
pub(crate) fn reply_tokens(
    app: &App,
    model: &ServedModel,
    prompt: usize,
    asked: Option<usize>,
) -> usize {
    let room = model
        .context()
        .map_or(usize::MAX, |c| c.saturating_sub(prompt));
    asked
        .or(app.defaults.max_tokens)
        .unwrap_or(usize::MAX)
        .min(room)
        .min(app.limits.reply_tokens)
}

/// Maximum number of tokens of an unstreamed reply with log-probabilities. A request for more
/// tokens is refused.
pub(crate) fn whole_tokens(
    app: &App,
    (param, asked): (&str, Option<usize>),
    replies: usize,
    logprobs: Option<usize>,
    most: usize,
) -> Result<usize, ApiError> {
    let Some(top) = logprobs else { return Ok(most) };
    let all = app.limits.whole_logprobs;
    let each = (all / (replies.max(1) * (top + 1))).max(1);
    if let Some(asked) = asked.map(|n| n.min(most)).filter(|n| *n > each) {
        return Err(ApiError::field(
            param,
            format!(
                "without streaming, all replies together have at most {all} log-probabilities, which is {each} tokens a reply here, but {param} is {asked}; stream the reply, or ask for less"
            ),
        ));
    }
    Ok(most.min(each))
}

/// The grammar of a request, if this model supports grammars.
pub(crate) fn grammar(
    app: &App,
    model: &ServedModel,
    param: &'static str,
    schema: &serde_json::Value,
) -> Result<Grammar, ApiError> {
    if !model.capabilities().grammars {
        return Err(ApiError::unsupported(
            param,
            format!("the model {} cannot be held to a schema", model.id()),
        ));
    }
    // The limit comes first, because it bounds the time of later steps.
    let (bytes, most) = (json_bytes(schema), app.limits.schema_bytes);
    if bytes > most {
        return Err(ApiError::field(
            param,
            format!("the schema has {bytes} bytes; at most {most} are allowed"),
        ));
    }
    let grammar = Grammar::JsonSchema(schema.clone());
    grammar
        .validate()
        .map_err(|e| ApiError::of_engine(&e).with_param(param))?;
    Ok(grammar)
}

/// Checks options, and sets the request's deadline.
pub(crate) fn finish_options(
    app: &App,
    mut options: GenerateOptions,
    arrived: Instant,
) -> Result<GenerateOptions, ApiError> {
    if let Some(step) = app.defaults.prefill_step_size {
        options.prefill.prefill_step_size = step;
    }
    options.speculative = app.defaults.speculative.clone();
    options.validate().map_err(|e| ApiError::of_engine(&e))?;
    options.interrupt.deadline = Some(arrived + app.limits.request_timeout);
    Ok(options)
}

/// Limits the reasoning of a reply to `budget` tokens. A reply with a grammar contains no
/// reasoning, so the budget is ignored.
pub(crate) fn bound_reasoning(
    model: &Lease,
    prepared: &Prepared,
    budget: Option<usize>,
    options: &mut GenerateOptions,
) -> Result<(), ApiError> {
    if let Some(budget) = budget
        && options.constraints.grammar.is_none()
        && let Some(marks) = model.format().reasoning_marks(&prepared.request)
    {
        let bound = crate::reply::bound(model.model(), marks, budget);
        let bound = bound.map_err(|e| ApiError::of_engine(&e))?;
        options.constraints.logits_processors.extend(bound);
    }
    Ok(())
}

/// The maximum length of a `cache_salt` in bytes.
const SALT_BYTES: usize = 256;

/// Checks a `cache_salt`.
pub(crate) fn salt(salt: Option<&String>) -> Result<Option<String>, ApiError> {
    match salt {
        Some(salt) if salt.is_empty() || salt.len() > SALT_BYTES => Err(ApiError::field(
            "cache_salt",
            format!(
                "cache_salt has {} bytes; it must have 1 to {SALT_BYTES}",
                salt.len()
            ),
        )),
        salt => Ok(salt.cloned()),
    }
}

/// Checks edits of the model's states. The operator must allow edits, and the edits must fit the
/// model.
pub(crate) fn steering(
    app: &App,
    model: &ServedModel,
    steering: Option<&Steering>,
) -> Result<Option<Steering>, ApiError> {
    let Some(steering) = steering else {
        return Ok(None);
    };
    if !app.steering {
        let message = "this server does not allow steering; start it with --allow-steering";
        return Err(ApiError::field("steering", message));
    }
    let patched = |edit: &Edit| match &edit.operation {
        EditOperation::Patch { prompt, .. } => match prompt {
            Prompt::Text(text) => text.len(),
            Prompt::Tokens(tokens) => tokens.len(),
            _ => 0,
        },
        _ => 0,
    };
    let edits = steering.edits();
    super::at_most("steering.edits", edits.len(), MOST_EDITS)?;
    let patched: usize = edits.iter().map(patched).sum();
    super::at_most("steering.edits[..].prompt", patched, MOST_PATCHED)?;
    let steerable = model.model().as_steerable().ok_or_else(|| {
        ApiError::unsupported(
            "steering",
            "the backend of this model does not support steering",
        )
    })?;
    let checked = steerable
        .steering_shape()
        .and_then(|shape| steering.check(&shape));
    checked.map_err(|e| ApiError::of_engine(&e).with_param("steering"))?;
    Ok(Some(steering.clone()))
}

/// The maximum number of edits of a request.
const MOST_EDITS: usize = 256;

/// Maximum total size, in bytes or tokens, of the prompts whose states the edits patch in. The
/// engine computes these prompts before the request itself.
const MOST_PATCHED: usize = 4096;

/// Checks stop strings.
pub(crate) fn stops(app: &App, param: &str, stops: Vec<String>) -> Result<Vec<String>, ApiError> {
    super::at_most(param, stops.len(), app.limits.stops)?;
    if let Some(at) = stops
        .iter()
        .position(|s| s.is_empty() || s.len() > app.limits.stop_bytes)
    {
        return Err(ApiError::field(
            format!("{param}[{at}]"),
            format!("a stop string has 1 to {} bytes", app.limits.stop_bytes),
        ));
    }
    Ok(stops)
}
