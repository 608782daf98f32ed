//! Starts MCP servers and calls their tools, by the crate `rmcp`. One thread talks to all servers.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use inference::Tool;
use parking_lot::Mutex;
use rmcp::model::{CallToolRequestParams, CallToolResult, ContentBlock};
use rmcp::service::RunningService;
use rmcp::{Peer, RoleClient, ServiceExt};
use serde_json::{Map, Value};
use tokio::io::{AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use super::config::Spec;

/// Number of bytes of a server's error output that an error message shows.
const TAIL: usize = 2000;
/// Maximum size of a result in bytes. The rest is cut.
const MAX_RESULT: usize = 256 << 10;
/// How long a server may take to end, before it is killed.
const END: Duration = Duration::from_secs(3);
/// Variables with secrets of this program, which servers do not get.
const SECRETS: [&str; 3] = ["MLX_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];

/// A running server.
struct Server {
    name: String,
    service: RunningService<RoleClient, ()>,
    child: Child,
    tools: Vec<rmcp::model::Tool>,
}

/// A tool that is offered to models.
struct Offered {
    tool: Tool,
    /// The tool's name on its server.
    name: String,
    peer: Peer<RoleClient>,
}

/// Running MCP servers. Dropping it ends them.
pub struct Host {
    offered: Vec<Offered>,
    timeout: Duration,
    runtime: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    /// Starts the servers, and asks them for their tools. Each must answer within `timeout`.
    ///
    /// # Errors
    /// If a server does not start or answer. The error contains its name and the end of its error
    /// output.
    pub fn start(specs: Vec<Spec>, timeout: Duration) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("--mcp: no thread for the servers: {e}");
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(failed)?;
        let servers = runtime.block_on(async {
            let mut servers = Vec::new();
            for spec in specs {
                match start(&spec, timeout).await {
                    Ok(server) => servers.push(server),
                    Err(why) => {
                        end(servers).await;
                        return Err(format!("MCP server {:?} {why}", spec.name));
                    }
                }
            }
            Ok(servers)
        })?;
        let offered = offered(&servers)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name(String::from("mcp"))
            .spawn(move || {
                runtime.block_on(async {
                    let _ = stopped.await;
                    end(servers).await;
                });
            })
            .map_err(failed)?;
        Ok(Self {
            offered,
            timeout,
            runtime: handle,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// The tools of all servers.
    pub fn tools(&self) -> Vec<Tool> {
        self.offered.iter().map(|o| o.tool.clone()).collect()
    }

    /// Calls a tool, and returns the text of its result.
    ///
    /// # Errors
    /// The tool's error, or the reason why there is no result.
    pub fn call(&self, name: &str, arguments: &Map<String, Value>) -> Result<String, String> {
        let offered = self.offered.iter().find(|o| o.tool.name == name);
        let offered = offered.ok_or_else(|| format!("there is no tool {name:?}"))?;
        let request =
            CallToolRequestParams::new(offered.name.clone()).with_arguments(arguments.clone());
        let (peer, timeout) = (offered.peer.clone(), self.timeout);
        let (sender, receiver) = mpsc::channel();
        self.runtime.spawn(async move {
            let called = tokio::time::timeout(timeout, peer.call_tool(request)).await;
            let _ = sender.send(called);
        });
        match receiver.recv() {
            Ok(Ok(Ok(result))) => text_of(&result),
            Ok(Ok(Err(e))) => Err(e.to_string()),
            Ok(Err(_)) => Err(format!("no result within {} s", timeout.as_secs())),
            Err(_) => Err(String::from("the MCP client has ended")),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Starts one server, and lists its tools.
async fn start(spec: &Spec, timeout: Duration) -> Result<Server, String> {
    let mut command = Command::new(&spec.command);
    command.args(&spec.args);
    for secret in SECRETS {
        command.env_remove(secret);
    }
    command
        .envs(&spec.env)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    if let Some(dir) = &spec.cwd {
        command.current_dir(dir);
    }
    let mut child = command
        .spawn()
        .map_err(|e| format!("cannot be started: {:?}: {e}", spec.command))?;
    let (Some(input), Some(output), Some(errors)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(String::from("has no standard streams"));
    };
    let tail = Arc::new(Mutex::new(Vec::new()));
    let reading = tokio::spawn(keep_tail(errors, spec.name.clone(), Arc::clone(&tail)));
    let connected = tokio::time::timeout(timeout, async {
        let service = ().serve((output, input)).await.map_err(|e| e.to_string())?;
        let tools = service.list_all_tools().await.map_err(|e| e.to_string())?;
        Ok::<_, String>((service, tools))
    });
    let why = match connected.await {
        Ok(Ok((service, tools))) => {
            return Ok(Server {
                name: spec.name.clone(),
                service,
                child,
                tools,
            });
        }
        Ok(Err(why)) => format!("does not answer as an MCP server: {why}"),
        Err(_) => format!("does not answer within {} s", timeout.as_secs()),
    };
    // The rest of the server's error output may contain the reason.
    let _ = tokio::time::timeout(Duration::from_secs(1), reading).await;
    let tail = tail.lock();
    let said = String::from_utf8_lossy(&tail);
    match said.trim() {
        "" => Err(format!("{why}; it wrote nothing to its standard error")),
        said => Err(format!("{why}; its standard error ends with:\n{said}")),
    }
}

/// Reads a server's error output into the log, and keeps its end.
async fn keep_tail(errors: ChildStderr, name: String, tail: Arc<Mutex<Vec<u8>>>) {
    let mut errors = BufReader::new(errors);
    let mut part = [0; 1024];
    while let Ok(n @ 1..) = errors.read(&mut part).await {
        let part = part.get(..n).unwrap_or_default();
        tracing::debug!(
            server = name,
            "{}",
            String::from_utf8_lossy(part).trim_end()
        );
        let mut tail = tail.lock();
        tail.extend_from_slice(part);
        let surplus = tail.len().saturating_sub(TAIL);
        tail.drain(..surplus);
    }
}

/// Ends the servers: closes their input, and kills those that stay.
async fn end(servers: Vec<Server>) {
    for mut server in servers {
        let _ = server.service.close_with_timeout(END).await;
        if tokio::time::timeout(END, server.child.wait())
            .await
            .is_err()
        {
            tracing::warn!("MCP server {:?} does not end; it is killed", server.name);
            let _ = server.child.kill().await;
        }
    }
}

/// The tools of all servers, under distinct names. Two tools of the same name get their servers'
/// names as prefixes.
fn offered(servers: &[Server]) -> Result<Vec<Offered>, String> {
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    let named = servers
        .iter()
        .flat_map(|server| server.tools.iter().map(move |tool| (server, tool)));
    for (_, tool) in named.clone() {
        *count.entry(usable(&tool.name)).or_default() += 1;
    }
    let mut all: Vec<Offered> = Vec::new();
    for (server, tool) in named {
        let mut name = usable(&tool.name);
        if count.get(&name).is_some_and(|n| *n > 1) {
            name = format!("{}_{name}", usable(&server.name));
        }
        if all.iter().any(|other| other.tool.name == name) {
            return Err(format!(
                "two tools of MCP servers are called {name:?}; rename a server"
            ));
        }
        let schema = Value::Object(tool.input_schema.as_ref().clone());
        let mut ours = Tool::new(name, schema);
        ours.description = tool.description.as_ref().map(ToString::to_string);
        all.push(Offered {
            tool: ours,
            name: tool.name.to_string(),
            peer: server.service.peer().clone(),
        });
    }
    Ok(all)
}

/// The name with characters that all formats of calls can write.
fn usable(name: &str) -> String {
    let safe = |c: char| match c {
        c if c.is_ascii_alphanumeric() || matches!(c, '_' | '-') => c,
        _ => '_',
    };
    name.chars().take(128).map(safe).collect()
}

/// The text of a result. Images and other data are named, because the model reads text only.
fn text_of(result: &CallToolResult) -> Result<String, String> {
    let mut parts = Vec::new();
    for block in &result.content {
        parts.push(match block {
            ContentBlock::Text(text) => text.text.clone(),
            other => {
                let value = serde_json::to_value(other).unwrap_or_default();
                let kind = value["type"].as_str().unwrap_or("data").to_owned();
                format!("[{kind}, which is left out]")
            }
        });
    }
    if parts.is_empty()
        && let Some(value) = &result.structured_content
    {
        parts.push(value.to_string());
    }
    let mut text = parts.join("\n");
    if text.len() > MAX_RESULT {
        let at = text.floor_char_boundary(MAX_RESULT);
        text.truncate(at);
        text.push_str("\n[the rest is left out]");
    }
    match result.is_error {
        Some(true) => Err(text),
        _ => Ok(text),
    }
}
