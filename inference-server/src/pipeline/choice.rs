//! The request's rules about tool calls, for all APIs: which tools a reply may or must call.

use inference::{ChatPrompt, GenerateOptions, Grammar, Tool};
use serde_json::Value;

use super::prepare::Prepared;
use crate::error::ApiError;
use crate::models::ServedModel;
use crate::reply::{CallOrJson, ReplyRequest};
use crate::state::App;

/// The constraints of a request on tool calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ToolChoice {
    /// The reply must be a call.
    pub(crate) required: bool,
    /// The name of the tool that the reply must call.
    pub(crate) named: Option<String>,
    /// The reply must not be a call. The request then has no tools.
    pub(crate) forbidden: bool,
    /// The reply may have at most one call.
    pub(crate) one: bool,
}

/// Maximum length of a tool's name in bytes. The reply parsers accept no longer names.
const NAME_BYTES: usize = 256;

impl ToolChoice {
    /// Creates the choice that forbids calls.
    pub(crate) fn none() -> Self {
        Self {
            forbidden: true,
            ..Self::default()
        }
    }

    pub(crate) fn tool(name: String) -> Self {
        Self {
            required: true,
            named: Some(name),
            one: true,
            ..Self::default()
        }
    }

    fn request(&self, tools: &[Tool]) -> ReplyRequest {
        ReplyRequest {
            tools: tools.to_vec(),
            one_call: self.one,
            ..ReplyRequest::default()
        }
    }

    /// Runs the checks that need no tokenized prompt. `grammar` is the schema for the reply.
    pub(crate) fn check(
        &self,
        app: &App,
        model: &ServedModel,
        prompt: &ChatPrompt,
        grammar: Option<&Grammar>,
    ) -> Result<(), ApiError> {
        let usable = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
        super::prepare::check_tools(app, &prompt.tools)?;
        for (i, Tool { name, .. }) in prompt.tools.iter().enumerate() {
            if name.is_empty() || name.len() > NAME_BYTES || !name.chars().all(usable) {
                return Err(ApiError::field(
                    format!("tools[{i}]"),
                    format!(
                        "the name of a tool has 1 to {NAME_BYTES} bytes of letters, digits and _-.:/"
                    ),
                ));
            }
        }
        if !self.required {
            return match grammar {
                Some(Grammar::JsonSchema(schema)) if !prompt.tools.is_empty() => {
                    let request = self.request(&prompt.tools);
                    self.either(app, model, &request, schema).map(drop)
                }
                _ => Ok(()),
            };
        }
        if prompt.tools.is_empty() {
            let message = "tool_choice demands a call, and there are no tools";
            return Err(ApiError::field("tool_choice", message));
        }
        self.grammar(app, model, &self.request(&prompt.tools))
            .map(drop)
    }

    /// Applies the choice to a prepared request and its options. As in OpenAI's API, a schema for
    /// the reply does not apply to calls: a forced call ignores it, and any other reply is either a
    /// call or JSON of the schema.
    pub(crate) fn apply(
        &self,
        app: &App,
        model: &ServedModel,
        prepared: &mut Prepared,
        options: &mut GenerateOptions,
    ) -> Result<(), ApiError> {
        prepared.request.one_call = self.one;
        let grammar = &mut options.constraints.grammar;
        if self.required {
            *grammar = Some(self.grammar(app, model, &prepared.request)?);
            return Ok(());
        }
        match grammar {
            Some(Grammar::JsonSchema(schema)) if !prepared.request.tools.is_empty() => {
                let either = self.either(app, model, &prepared.request, schema)?;
                *grammar = Some(either.grammar.clone());
                prepared.either = Some(either);
            }
            // A reply that matches a schema has no tool calls or reasoning.
            Some(_) => prepared.verbatim = true,
            None => {}
        }
        Ok(())
    }

    fn grammar(
        &self,
        app: &App,
        model: &ServedModel,
        request: &ReplyRequest,
    ) -> Result<Grammar, ApiError> {
        let refuse = |why: String| {
            let message = format!(
                "the model {} cannot be made to call a tool: {why}; use tool_choice auto",
                model.id()
            );
            ApiError::unsupported("tool_choice", message)
        };
        if !model.capabilities().grammars {
            return Err(refuse(String::from("its backend has no grammars")));
        }
        check_schemas(app, model, request)?;
        let grammar = model
            .format()
            .forced_call(request, self.named.as_deref())
            .map_err(refuse)?;
        grammar
            .validate()
            .map_err(|e| ApiError::of_engine(&e).with_param("tools"))?;
        Ok(grammar)
    }

    /// Returns the grammar and the reader of replies that are either a call or JSON of `schema`.
    fn either(
        &self,
        app: &App,
        model: &ServedModel,
        request: &ReplyRequest,
        schema: &Value,
    ) -> Result<CallOrJson, ApiError> {
        check_schemas(app, model, request)?;
        let refuse = |why: String| {
            let message = format!(
                "the model {} cannot choose between a call and a reply that matches a schema: \
                 {why}; use tool_choice \"none\" for the reply or \"required\" for a call, or leave \
                 the schema out",
                model.id()
            );
            ApiError::unsupported("tool_choice", message)
        };
        let either = model
            .format()
            .call_or_json(request, schema)
            .map_err(refuse)?;
        either
            .grammar
            .validate()
            .map_err(|e| ApiError::of_engine(&e).with_param("tools"))?;
        Ok(either)
    }
}

/// Checks the tools' schemas. The limits come first, because they bound the time of all later
/// steps.
fn check_schemas(app: &App, model: &ServedModel, request: &ReplyRequest) -> Result<(), ApiError> {
    for (i, tool) in request.tools.iter().enumerate() {
        if let Some(schema) = &tool.parameters {
            super::prepare::grammar(app, model, "tools", schema)
                .map_err(|e| e.with_param(format!("tools[{i}]")))?;
        }
    }
    Ok(())
}
