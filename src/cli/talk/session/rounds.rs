//! Replies whose model calls tools of MCP servers.

use inference::{FinishReason, Message, ToolCall};
use serde_json::Value;

use super::Session;
use crate::cli::talk::reply::Reply;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;

impl Session<'_> {
    /// Generates replies until one calls no tool of an MCP server. The program runs these calls and
    /// adds their results to the conversation. If a reply also calls a tool of `--tools`, the user
    /// gives its result with `/tool`.
    pub(super) fn rounds(
        &mut self,
        once: bool,
        console: &mut Console<'_>,
    ) -> Result<Reply, Failure> {
        let mut left = self.mcp.as_ref().map_or(0, |mcp| mcp.max_rounds);
        let outcome = loop {
            let mut reply = match self.reply(once, console) {
                Ok(reply) => reply,
                Err(failure) => break Err(failure),
            };
            let is_ours = |call: &ToolCall| self.dialog.is_of_mcp(&call.name);
            let is_whole = reply.error.is_none() && reply.finish_reason == Some(FinishReason::Stop);
            let goes_on = is_whole && !reply.calls.is_empty() && reply.calls.iter().all(is_ours);
            let Some(mcp) = self.mcp.as_ref().filter(|_| goes_on) else {
                break Ok(reply);
            };
            self.generated_tokens += reply.metrics.generated_tokens;
            let calls = std::mem::take(&mut reply.calls);
            let message = Message::assistant(reply.text).with_tool_calls(calls.clone());
            self.messages.push(message);
            for call in calls {
                let arguments = Value::Object(call.arguments.clone());
                console.note(&format!("(calls {} {arguments})", call.name));
                let text = mcp
                    .host
                    .call(&call.name, &call.arguments)
                    .unwrap_or_else(|error| {
                        console.note(&format!("({} failed: {error})", call.name));
                        format!("Error: {error}")
                    });
                let message = Message::tool(&call.id, text).with_name(&call.name);
                self.messages.push(message);
            }
            left -= 1;
            if left == 0 {
                console.warn("(the last round of tools is over; --mcp-max-rounds N allows more)");
                self.dialog.show_mcp(false);
            }
        };
        self.dialog.show_mcp(true);
        outcome
    }
}
