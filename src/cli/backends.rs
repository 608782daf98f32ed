//! `mlx backends`: the devices that models can run on here.

use std::sync::Arc;

use inference::Backend;
use serde_json::json;

use super::console::{Console, table};
use super::failure::Failure;

/// List the backends: which are available, on which device, and their capabilities
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let default = inference::default_backend().ok();
    let default = default.as_ref().map(|backend| backend.name());
    print(&inference::backends(), default, args.json, console)?;
    #[cfg(feature = "mlx-backend")]
    if let Some(hint) = super::standalone::hint() {
        console.warn(hint);
    }
    Ok(())
}

fn print(
    backends: &[Arc<dyn Backend>],
    default: Option<&str>,
    as_json: bool,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    if as_json {
        let value = |backend: &Arc<dyn Backend>| {
            let available = inference::availability(backend.as_ref());
            json!({
                "name": backend.name(),
                "available": available.is_ok(),
                "default": default == Some(backend.name()),
                "device": backend.device(),
                "capabilities": backend.capabilities(),
                "reason": available.err(),
            })
        };
        let values: Vec<_> = backends.iter().map(value).collect();
        return console.json(&values);
    }
    if backends.is_empty() {
        console.warn("no backend is built into this program");
        return Ok(());
    }
    let mut rows = vec![
        ["NAME", "AVAILABLE", "DEVICE", "CAPABILITIES"]
            .map(String::from)
            .to_vec(),
    ];
    let mut reasons = Vec::new();
    for backend in backends {
        let available = inference::availability(backend.as_ref());
        let mark = if default == Some(backend.name()) {
            " (default)"
        } else {
            ""
        };
        rows.push(vec![
            format!("{}{mark}", backend.name()),
            if available.is_ok() { "yes" } else { "no" }.into(),
            backend.device(),
            backend.capabilities().names().join(" "),
        ]);
        if let Err(reason) = available {
            reasons.push(format!("{} is not available: {reason}", backend.name()));
        }
    }
    for line in table(&rows) {
        console.line(&line)?;
    }
    if !reasons.is_empty() {
        console.line("")?;
    }
    for reason in reasons {
        console.line(&reason)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::mock::{MockBackend, Streams};
    use super::*;

    fn both() -> Vec<Arc<dyn Backend>> {
        let cpu = MockBackend {
            name: "cpu",
            reason: None,
        };
        let metal = MockBackend {
            name: "metal",
            reason: Some("no Apple silicon here"),
        };
        vec![Arc::new(cpu), Arc::new(metal)]
    }

    #[test]
    fn the_table_says_what_is_available_and_why_not() {
        let mut streams = Streams::new("");
        print(&both(), Some("cpu"), false, &mut streams.console()).unwrap();
        let out = streams.out();
        let lines: Vec<&str> = out.lines().collect();
        assert!(lines[1].starts_with("cpu (default)  yes"), "{out}");
        assert!(lines[1].contains("streaming"), "{out}");
        assert!(
            lines[2].starts_with("metal          no   ") && lines[2].ends_with("streaming"),
            "{out}"
        );
        assert_eq!(lines[3], "", "{out}");
        assert_eq!(lines[4], "metal is not available: no Apple silicon here");
        assert_eq!(lines.len(), 5);
    }

    #[test]
    fn json_has_the_same_facts() {
        let mut streams = Streams::new("");
        print(&both(), Some("cpu"), true, &mut streams.console()).unwrap();
        let value: serde_json::Value = serde_json::from_str(&streams.out()).unwrap();
        assert_eq!(value[0]["name"], "cpu");
        assert_eq!(value[0]["default"], true);
        assert_eq!(value[0]["capabilities"]["streaming"], true);
        assert_eq!(value[1]["available"], false);
        assert_eq!(value[1]["reason"], "no Apple silicon here");
    }

    #[test]
    fn none_at_all_is_said() {
        let mut streams = Streams::new("");
        print(&[], None, false, &mut streams.console()).unwrap();
        assert!(streams.err().contains("no backend"));
        assert_eq!(streams.out(), "");
        print(&[], None, true, &mut streams.console()).unwrap();
        assert_eq!(streams.out(), "[]\n");
    }
}
