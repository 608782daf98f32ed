//! Reads the file of `--mcp`: `{"mcpServers": {NAME: {"command", "args", "env", "cwd"}}}`, the
//! format of Claude Desktop, Cursor and others.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::cli::terminal::bounded::read_text;
use crate::cli::terminal::failure::Failure;

/// Maximum size of the file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// A server to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    pub name: String,
    pub command: String,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub cwd: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Entry {
    command: Option<String>,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    cwd: Option<PathBuf>,
    #[serde(default)]
    disabled: bool,
    #[serde(rename = "type")]
    kind: Option<String>,
    url: Option<Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// The servers of a file, without disabled ones.
///
/// # Errors
/// A usage error that names the file, and if possible the server.
pub fn read(path: &Path) -> Result<Vec<Spec>, Failure> {
    let wrong = |why: String| Failure::usage(format!("--mcp {}: {why}", path.display()));
    let text = read_text(path, MAX_FILE).map_err(|e| wrong(e.to_string()))?;
    parse(&text).map_err(wrong)
}

fn parse(text: &str) -> Result<Vec<Spec>, String> {
    let value: Value = serde_json::from_str(text).map_err(|e| format!("it is not JSON: {e}"))?;
    let Some(Value::Object(servers)) = value.get("mcpServers") else {
        return Err(String::from(
            "must be an object with the field \"mcpServers\", an object of servers by name",
        ));
    };
    let mut specs = Vec::new();
    for (name, value) in servers {
        let wrong = |why: String| format!("server {name:?}: {why}");
        let entry: Entry =
            serde_json::from_value(value.clone()).map_err(|e| wrong(e.to_string()))?;
        if entry.disabled {
            continue;
        }
        let is_stdio = entry.kind.as_deref().is_none_or(|kind| kind == "stdio");
        let Some(command) = entry.command.filter(|_| is_stdio && entry.url.is_none()) else {
            return Err(wrong(String::from(
                "only servers with a \"command\" (stdio) are supported, none with a \"url\"",
            )));
        };
        for field in entry.others.keys() {
            tracing::warn!("--mcp: field {field:?} of server {name:?} has no meaning here");
        }
        specs.push(Spec {
            name: name.clone(),
            command,
            args: entry.args,
            env: entry.env,
            cwd: entry.cwd,
        });
    }
    if specs.is_empty() {
        return Err(String::from("it has no enabled server"));
    }
    Ok(specs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_a_command() {
        let text = r#"{"mcpServers": {
            "a": {"command": "x", "args": ["-y"], "env": {"K": "v"}, "cwd": "/", "timeout": 3},
            "b": {"type": "stdio", "command": "y"},
            "c": {"url": "https://mcp.example", "disabled": true}}, "other": 1}"#;
        let specs = parse(text).unwrap();
        let [a, b] = &specs[..] else {
            panic!("{specs:?}")
        };
        assert_eq!((a.name.as_str(), a.command.as_str()), ("a", "x"));
        assert_eq!(
            (a.args.as_slice(), &a.env["K"]),
            (&["-y".into()][..], &"v".into())
        );
        assert_eq!((b.command.as_str(), &b.cwd), ("y", &None));
        for (bad, why) in [
            ("", "not JSON"),
            ("[]", "mcpServers"),
            (r#"{"mcpServers": {}}"#, "no enabled server"),
            (r#"{"mcpServers": {"a": {}}}"#, "server \"a\""),
            (r#"{"mcpServers": {"a": {"url": "x"}}}"#, "stdio"),
            (
                r#"{"mcpServers": {"a": {"command": "x", "url": "x"}}}"#,
                "stdio",
            ),
            (
                r#"{"mcpServers": {"a": {"command": "x", "type": "sse"}}}"#,
                "stdio",
            ),
            (
                r#"{"mcpServers": {"a": {"command": "x", "args": "y"}}}"#,
                "server \"a\"",
            ),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }
}
