//! The order of the server's rooms: each uses only what stands before it.

use std::path::Path;

use crate::layering::{modules, upward};

/// Modules from the bottom up. `room::*` stands for a room and all files in it.
const ORDER: &[&str] = &[
    "error",
    "patience",
    "limits",
    "measure",
    "defaults",
    "config",
    "metrics",
    "reply::*",
    "models::*",
    "engine::*",
    "auth",
    "state",
    "ui::*",
    // From a request to its reply, then the shapes that clients know.
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
fn rooms_use_only_what_stands_below_them() {
    let modules = modules(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let faults = upward(ORDER, &modules);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for name in ORDER {
        let name = name.trim_end_matches("::*");
        assert!(modules.contains_key(name), "{name} is no module any more");
    }
}
