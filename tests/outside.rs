//! A crate outside this workspace links the backend and picks it by name: built and run as its
//! author would, with Cargo alone.

mod common;

use std::path::Path;
use std::process::Command;

use common::{greedy, tiny};
use inference::Prompt;

fn outside(args: &[&str]) -> std::process::Output {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/outside/Cargo.toml");
    let mut command = Command::new(env!("CARGO"));
    command
        .args(["run", "--quiet", "--manifest-path"])
        .arg(manifest)
        .arg("--")
        .args(args);
    // A directory of its own: the outer Cargo holds the lock of this workspace's.
    command.env(
        "CARGO_TARGET_DIR",
        Path::new(env!("CARGO_TARGET_TMPDIR")).join("outside"),
    );
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        // What Cargo set for this test, its library path included, a stranger does not have.
        if text.starts_with("CARGO_PKG")
            || text.starts_with("CARGO_BIN")
            || text == "LD_LIBRARY_PATH"
        {
            command.env_remove(&name);
        }
    }
    command.output().unwrap()
}

#[test]
fn a_strangers_program_links_the_backend_and_picks_it_by_name() {
    let path = common::fixture("tiny/llama");
    let output = outside(&["cpu", path.to_str().unwrap()]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    for name in ["cpu true", "cuda", "metal"] {
        assert!(stderr.contains(name), "{stderr}");
    }
    let expected = tiny("llama")
        .generate(&Prompt::Tokens(vec![40, 41, 42]), &greedy(8))
        .unwrap()
        .collect_output()
        .unwrap()
        .tokens;
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        format!("{expected:?}")
    );

    let output = outside(&["cqu", path.to_str().unwrap()]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("did you mean"));
}
