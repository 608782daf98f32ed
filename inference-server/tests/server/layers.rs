//! Tests the dependencies between the server's modules: a module may use only modules before it in
//! the list.

use std::path::Path;

use crate::layering::{modules, upward};

/// Modules from the bottom up. `module::*` means a module and all files in its directory.
const ORDER: &[&str] = &[
    "error",
    "patience",
    "limits",
    "measure",
    "defaults",
    "tools",
    "config",
    "metrics",
    "telemetry::*",
    "reply::*",
    "models::*",
    "engine::*",
    "auth",
    "state",
    "ui::*",
    // The dialects use the pipeline, so the pipeline comes first.
    "pipeline::*",
    "status",
    "dialect::openai::*",
    "dialect::responses::*",
    "dialect::anthropic::*",
    "dialect::ollama::*",
    "dialect::llama_cpp::*",
    "dialect::native",
    "dialect",
    "middleware",
    "routes",
    "openapi",
    "net",
    "lib",
];

#[test]
fn layers_use_only_what_is_below_them() {
    let modules = modules(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let faults = upward(ORDER, &modules);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for name in ORDER {
        let name = name.trim_end_matches("::*");
        assert!(modules.contains_key(name), "{name} is no module any more");
    }
}
