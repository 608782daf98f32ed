//! Checks the order of the program's modules: each may use only those before it.

use std::path::Path;

use crate::layering::{modules, upward};

/// Modules of `src/` from the bottom up. `module::*` means a module and all files in its directory.
const ORDER: &[&str] = &[
    // The facade crate, and the modules that find models by name.
    "hub::*",
    "export::*",
    "lib",
    // Terminal input and output.
    "cli::terminal::*",
    "cli::mock",
    // Parts that several commands share.
    "cli::options::*",
    // The commands.
    "cli::models::*",
    "cli::talk::*",
    "cli::learn::*",
    "cli::measure::*",
    "cli::serve::*",
    // The program.
    "cli::version",
    "cli::completions",
    "cli",
    "cli::compat_tests",
    "main",
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
    assert!(modules.len() > 80, "the program lies elsewhere");
}

#[test]
fn arrows_that_point_up_are_found() {
    let mut all = modules(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    all.values_mut().for_each(String::clear);
    let text = "use crate::cli::talk::generate::Args;\n";
    all.insert("cli::options::load".into(), text.into());
    assert_eq!(upward(ORDER, &all).len(), 1);
}
