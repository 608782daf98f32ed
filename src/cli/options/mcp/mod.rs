//! `--mcp FILE`: tools of MCP servers (Model Context Protocol), which the program starts as
//! subprocesses. `config` reads the file, and `client` talks to the servers.

use std::path::PathBuf;

use crate::cli::options::load::at_least_one;
use crate::cli::terminal::failure::Failure;

#[cfg(feature = "mcp")]
mod client;
#[cfg(feature = "mcp")]
mod config;
#[cfg(all(test, unix, feature = "mcp", feature = "serve"))]
mod tests;

#[cfg(feature = "mcp")]
pub use client::Host;

/// The flags of MCP servers.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Tools of MCP servers")]
pub struct McpArgs {
    /// Start the MCP servers of this JSON file (`mcpServers`, as for Claude Desktop), offer their
    /// tools to the model, and run its calls. The servers are programs with your rights
    #[arg(long, value_name = "FILE")]
    mcp: Option<PathBuf>,
    /// Rounds of calls in a reply. After the last one, the model answers without these tools
    #[arg(long, value_name = "N", default_value_t = 8, requires = "mcp", value_parser = at_least_one)]
    mcp_max_rounds: usize,
    /// Seconds in which a server must start, and a tool must return its result
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "mcp", value_parser = at_least_one)]
    mcp_timeout: usize,
}

/// Running MCP servers, and the bound on a reply's rounds.
pub struct Mcp {
    pub host: std::sync::Arc<Host>,
    pub max_rounds: usize,
}

/// Without the feature there are no servers.
#[cfg(not(feature = "mcp"))]
pub enum Host {}

impl McpArgs {
    /// Whether there is a file of servers.
    #[cfg_attr(
        not(all(unix, feature = "serve", feature = "mlx-backend")),
        allow(dead_code, reason = "only groups of processes ask")
    )]
    pub fn is_given(&self) -> bool {
        self.mcp.is_some()
    }

    /// Starts the servers of the file, if there is one.
    ///
    /// # Errors
    /// A usage error for the file. If a server does not start, an error with its name and with the
    /// end of its error output.
    #[cfg(feature = "mcp")]
    pub fn start(&self) -> Result<Option<Mcp>, Failure> {
        let Some(path) = &self.mcp else {
            return Ok(None);
        };
        let specs = config::read(path)?;
        let timeout = std::time::Duration::from_secs(self.mcp_timeout as u64);
        let host = Host::start(specs, timeout).map_err(Failure::failed)?;
        Ok(Some(Mcp {
            host: std::sync::Arc::new(host),
            max_rounds: self.mcp_max_rounds,
        }))
    }

    #[cfg(not(feature = "mcp"))]
    pub fn start(&self) -> Result<Option<Mcp>, Failure> {
        let _ = (self.mcp_max_rounds, self.mcp_timeout);
        match &self.mcp {
            None => Ok(None),
            Some(_) => Err(Failure::failed(
                "--mcp needs the feature `mcp`, which is not built in",
            )),
        }
    }
}

#[cfg(not(feature = "mcp"))]
impl Host {
    pub fn tools(&self) -> Vec<inference::Tool> {
        match *self {}
    }

    pub fn call(
        &self,
        _: &str,
        _: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, String> {
        match *self {}
    }
}

#[cfg(feature = "serve")]
impl inference_server::ToolHost for Host {
    fn tools(&self) -> Vec<inference::Tool> {
        self.tools()
    }

    fn call(
        &self,
        name: &str,
        arguments: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, String> {
        self.call(name, arguments)
    }
}
