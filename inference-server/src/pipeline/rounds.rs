//! Replies whose model calls tools of the server. The server runs the calls, adds their results to
//! the conversation, and lets the model continue. The client sees one reply without these calls.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use inference::{
    ChatEnd, ChatPrompt, FinishReason, GenerateMetrics, GenerateOptions, Message, ToolCall,
};

use super::choice::ToolChoice;
use super::items::{Call, Calls, End, Item};
use super::prepare::{self, Prepared};
use crate::engine::Places;
use crate::error::ApiError;
use crate::models::{Lease, ServedModel};
use crate::reply::Delta;
use crate::state::App;
use crate::tools::ServerTools;

/// Adds the server's tools to a conversation, if the request may call them. Returns whether it
/// added any.
///
/// A tool of the request hides a tool of the server with the same name. A request that forces or
/// forbids calls, has a schema or log-probabilities, or continues a message gets no tools of the
/// server.
pub(crate) fn offer(
    app: &App,
    model: &ServedModel,
    prompt: &mut ChatPrompt,
    choice: &ToolChoice,
    options: &GenerateOptions,
) -> bool {
    let Some(server) = &app.tools else {
        return false;
    };
    let is_free = !choice.required && !choice.forbidden && prompt.end == ChatEnd::Reply;
    let is_plain = options.constraints.grammar.is_none() && options.output.logprobs.is_none();
    if !is_free || !is_plain || !model.format().reads_tools() {
        return false;
    }
    let is_hidden = |name: &str| prompt.tools.iter().any(|tool| tool.name == name);
    let mut all = prompt.tools.clone();
    let offered = server.tools().iter().filter(|tool| !is_hidden(&tool.name));
    all.extend(offered.cloned());
    // The limits are those of the request's own tools.
    if all.len() == prompt.tools.len() || prepare::check_tools(app, &all).is_err() {
        return false;
    }
    prompt.tools = all;
    true
}

/// The parts of a request that a later round needs.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) app: App,
    pub(crate) model: Lease,
    pub(crate) server: ServerTools,
    /// The conversation, with all tools.
    pub(crate) prompt: ChatPrompt,
    /// The number of the request's own tools, which come first.
    pub(crate) own: usize,
    pub(crate) choice: ToolChoice,
    /// The options, except those that depend on the prompt.
    pub(crate) options: GenerateOptions,
    /// The maximum number of tokens of reasoning in a round.
    pub(crate) reasoning: Option<usize>,
    pub(crate) arrived: Instant,
}

/// The rounds of one reply.
pub(crate) struct Rounds {
    plan: Plan,
    /// Rounds of calls that are still allowed.
    left: usize,
    /// The maximum number of tokens of the whole reply.
    most: usize,
    /// The text and the reasoning of this round, and its calls of the server's tools.
    content: String,
    reasoning: String,
    calls: Calls,
    /// Whether the call that is being written is one of the server's tools.
    is_ours: bool,
    /// The indexes of the request's calls in the whole reply, by their index in this round.
    theirs: HashMap<usize, usize>,
    next: usize,
    /// Whether earlier rounds have content and reasoning.
    had: (bool, bool),
    /// Deltas from the end of a round, which precede those of the next round.
    held: Vec<Delta>,
    metrics: Option<GenerateMetrics>,
}

/// What to do with an item of a round.
pub(crate) enum Step {
    Pass(Item),
    Skip,
    /// Run the calls and start the next round.
    Again,
}

impl Rounds {
    pub(crate) fn new(plan: Plan, most: usize) -> Self {
        Self {
            left: plan.server.max_rounds(),
            plan,
            most,
            content: String::new(),
            reasoning: String::new(),
            calls: Calls::default(),
            is_ours: false,
            theirs: HashMap::new(),
            next: 0,
            had: (false, false),
            held: Vec::new(),
            metrics: None,
        }
    }

    fn is_of_server(&self, name: &str) -> bool {
        let mut offered = self.plan.prompt.tools.iter().skip(self.plan.own);
        offered.any(|tool| tool.name == name)
    }

    /// Removes the calls of the server's tools from an item.
    pub(crate) fn read(&mut self, item: Item) -> Step {
        match item {
            Item::Started if self.metrics.is_some() => Step::Skip,
            Item::Token { token, deltas } => {
                let deltas = self.filter(deltas);
                Step::Pass(Item::Token { token, deltas })
            }
            Item::End { deltas, end } => {
                let deltas = self.filter(deltas);
                self.end(deltas, end)
            }
            item => Step::Pass(item),
        }
    }

    fn end(&mut self, deltas: Vec<Delta>, mut end: End) -> Step {
        let metrics = match self.metrics.take() {
            Some(earlier) => sum(earlier, &end.metrics),
            None => end.metrics.clone(),
        };
        let called = self.calls.done.len();
        let is_over = self.left == 0 || end.reason != FinishReason::Stop;
        if called > 0 && self.theirs.is_empty() && !is_over {
            self.metrics = Some(metrics);
            self.held = deltas;
            return Step::Again;
        }
        if called > 0 {
            // Either the client must first run its own calls, or the reply was cut.
            tracing::warn!("{called} calls of the server's tools are dropped at the reply's end");
        }
        end.metrics = metrics;
        Step::Pass(Item::End { deltas, end })
    }

    fn filter(&mut self, deltas: Vec<Delta>) -> Vec<Delta> {
        let mut passed = std::mem::take(&mut self.held);
        for delta in deltas {
            match delta {
                Delta::Content(text) => {
                    let text = joined(&mut self.content, self.had.0, text);
                    passed.push(Delta::Content(text));
                }
                Delta::Reasoning(text) => {
                    let text = joined(&mut self.reasoning, self.had.1, text);
                    passed.push(Delta::Reasoning(text));
                }
                Delta::ToolCall { index, id, name } => {
                    self.is_ours = self.is_of_server(&name);
                    if self.is_ours {
                        self.calls.begin(id, name);
                        continue;
                    }
                    self.theirs.insert(index, self.next);
                    passed.push(Delta::ToolCall {
                        index: self.next,
                        id,
                        name,
                    });
                    self.next += 1;
                }
                Delta::Arguments { json, .. } if self.is_ours => self.calls.arguments(&json),
                Delta::CallEnded { .. } if self.is_ours => self.calls.end(),
                Delta::CallBroken { .. } if self.is_ours => self.calls.give_up(),
                Delta::Arguments { index, json } => {
                    let index = self.of_client(index);
                    passed.push(Delta::Arguments { index, json });
                }
                Delta::CallEnded { index } => {
                    let index = self.of_client(index);
                    passed.push(Delta::CallEnded { index });
                }
                Delta::CallBroken { index } => {
                    let index = self.of_client(index);
                    // A broken call does not count as a call of the client, so the server's calls
                    // may still run.
                    self.theirs.retain(|_, theirs| *theirs != index);
                    passed.push(Delta::CallBroken { index });
                }
            }
        }
        passed
    }

    fn of_client(&self, index: usize) -> usize {
        self.theirs.get(&index).copied().unwrap_or(index)
    }

    /// Runs the calls of this round, and prepares the next one.
    ///
    /// # Errors
    /// If the longer conversation cannot be served, for example because it exceeds the context.
    pub(crate) async fn again(
        &mut self,
        place: &Arc<Places>,
    ) -> Result<(Prepared, GenerateOptions), ApiError> {
        let calls = std::mem::take(&mut self.calls.done);
        let asked: Vec<ToolCall> = calls.iter().map(as_call).collect();
        let content = std::mem::take(&mut self.content);
        let reasoning = std::mem::take(&mut self.reasoning);
        self.had.0 |= !content.is_empty();
        self.had.1 |= !reasoning.is_empty();
        self.theirs.clear();
        let mut message = Message::assistant(content).with_tool_calls(asked);
        message.reasoning = Some(reasoning).filter(|text| !text.is_empty());
        self.plan.prompt.messages.push(message);
        for call in calls {
            let text = self.run(&call).await;
            let message = Message::tool(&call.id, text).with_name(&call.name);
            self.plan.prompt.messages.push(message);
        }
        self.left -= 1;
        let plan = &self.plan;
        let mut prompt = plan.prompt.clone();
        if self.left == 0 {
            tracing::warn!("the last round of calls is over; the model answers without the tools");
            prompt.tools.truncate(plan.own);
        }
        let (app, model) = (&plan.app, &plan.model);
        let (_, mut prepared) = prepare::chat(app, model, Arc::clone(place), prompt).await?;
        let mut options = plan.options.clone();
        plan.choice.apply(app, model, &mut prepared, &mut options)?;
        prepare::bound_reasoning(model, &prepared, plan.reasoning, &mut options)?;
        let spent = self.metrics.as_ref().map_or(0, |m| m.generated_tokens);
        let rest = self.most.saturating_sub(spent).max(1);
        let most = prepare::reply_tokens(app, model, prepared.ids.len(), Some(rest));
        options.stop.min_tokens = options.stop.min_tokens.min(most);
        Ok((prepared, options.with_max_tokens(most)))
    }

    /// Runs one call, and returns the text for the model: the result, or a description of the
    /// failure.
    async fn run(&self, call: &Call) -> String {
        let host = Arc::clone(self.plan.server.host());
        let (name, arguments) = (call.name.clone(), as_call(call).arguments);
        let started = Instant::now();
        let done = tokio::task::spawn_blocking(move || host.call(&name, &arguments)).await;
        tracing::info!(tool = call.name, took = ?started.elapsed(), "ran a tool");
        match done {
            Ok(Ok(text)) => text,
            Ok(Err(error)) => {
                tracing::warn!(tool = call.name, "a tool failed: {error}");
                format!("Error: {error}")
            }
            Err(e) => {
                tracing::error!(tool = call.name, "a tool failed: {e}");
                String::from("Error: the tool failed")
            }
        }
    }

    pub(crate) fn model(&self) -> &Lease {
        &self.plan.model
    }

    pub(crate) fn app(&self) -> &App {
        &self.plan.app
    }

    pub(crate) fn arrived(&self) -> Instant {
        self.plan.arrived
    }
}

/// Appends a piece of text to this round's text. Returns the piece for the client: an empty line
/// separates the texts of two rounds.
fn joined(round: &mut String, had: bool, piece: String) -> String {
    let is_first = round.is_empty();
    round.push_str(&piece);
    match had && is_first && !piece.is_empty() {
        true => format!("\n\n{piece}"),
        false => piece,
    }
}

fn as_call(call: &Call) -> ToolCall {
    // The parser has checked that the arguments are an object.
    let arguments = serde_json::from_str(&call.arguments).unwrap_or_default();
    ToolCall::new(&call.id, &call.name, arguments)
}

/// The metrics of two rounds together. Prompt tokens add up, because each round has its own prompt.
fn sum(mut a: GenerateMetrics, b: &GenerateMetrics) -> GenerateMetrics {
    a.prompt_tokens += b.prompt_tokens;
    a.cached_tokens += b.cached_tokens;
    a.generated_tokens += b.generated_tokens;
    a.draft_tokens += b.draft_tokens;
    a.accepted_draft_tokens += b.accepted_draft_tokens;
    a.prefill_time += b.prefill_time;
    a.decode_time += b.decode_time;
    a.total_time += b.total_time;
    a.peak_memory_bytes = a.peak_memory_bytes.max(b.peak_memory_bytes);
    a.active_memory_bytes = b.active_memory_bytes;
    a
}
