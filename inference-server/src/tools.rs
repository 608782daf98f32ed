//! Tools that the server runs itself, such as those of MCP servers. `pipeline/rounds.rs` offers
//! them to models and runs their calls.

use std::fmt;
use std::sync::Arc;

use inference::Tool;
use serde_json::{Map, Value};

/// Runs tools for the server.
pub trait ToolHost: Send + Sync {
    /// The tools. Their names are distinct, and consist of letters, digits and `_-.:/`.
    fn tools(&self) -> Vec<Tool>;

    /// Runs a tool and returns its result. The call may block, and runs on a thread of its own.
    ///
    /// # Errors
    /// The tool's error in words. The model reads it instead of the result.
    fn call(&self, name: &str, arguments: &Map<String, Value>) -> Result<String, String>;
}

/// The tools of a server, and how often a reply may call them.
#[derive(Clone)]
pub struct ServerTools {
    host: Arc<dyn ToolHost>,
    tools: Arc<[Tool]>,
    max_rounds: usize,
}

impl ServerTools {
    /// Makes the tools of `host` available to the model. A reply may call tools in up to
    /// `max_rounds` rounds; a round has one or more calls. After the last round, the model answers
    /// without these tools.
    pub fn new(host: Arc<dyn ToolHost>, max_rounds: usize) -> Self {
        let tools = host.tools().into();
        Self {
            host,
            tools,
            max_rounds,
        }
    }

    /// The tools.
    pub fn tools(&self) -> &[Tool] {
        &self.tools
    }

    /// The maximum number of rounds of calls in a reply.
    pub fn max_rounds(&self) -> usize {
        self.max_rounds
    }

    pub(crate) fn host(&self) -> &Arc<dyn ToolHost> {
        &self.host
    }
}

impl fmt::Debug for ServerTools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTools")
            .field("tools", &self.tools)
            .field("max_rounds", &self.max_rounds)
            .finish_non_exhaustive()
    }
}

impl PartialEq for ServerTools {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.host, &other.host) && self.max_rounds == other.max_rounds
    }
}
