//! Tests of the formats of tool calls and reasoning, through the public API.

mod choice;
mod forced;
mod gemma;
mod grammar;
mod harmony;
mod harness;
mod json_calls;
mod limits;
mod named_json;
mod properties;
mod pythonic;
mod reasoning;
mod stream;
mod tagged;
