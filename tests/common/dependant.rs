//! Runs Cargo in a workspace other than this one, as a stranger would who depends on our crates by
//! path. What such a workspace does is in the tests that call this.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// Where the programs that `cargo` builds are put: `target(shared)/debug/<name>`.
///
/// A directory of its own, since the outer Cargo holds the lock of this workspace's. Workspaces
/// that link the MLX engine share one, so that it is built once.
pub fn target(shared: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(shared)
}

/// Cargo, to be run in `workspace` (relative to the root of the repository) with its output in
/// [`target`]`(shared)`.
pub fn cargo(workspace: &str, shared: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = root.join(workspace);
    lock_versions(root, &dir);
    let mut command = clean(Command::new(env!("CARGO")));
    command
        .current_dir(dir)
        .env("CARGO_TARGET_DIR", target(shared))
        // Built once, never stepped through: half a gigabyte instead of four.
        .env("CARGO_INCREMENTAL", "0")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_NET_OFFLINE", "true");
    command
}

/// Begins with our versions, which are all on this machine already. So it needs no network, and no
/// other version of a crate. Cargo leaves out what the workspace does not need.
fn lock_versions(root: &Path, dir: &Path) {
    static DONE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if done.iter().any(|d| d == dir) {
        return;
    }
    // Moved into place: a Cargo that runs beside must not read half of it.
    let aside = dir.join(format!("Cargo.lock.{}", std::process::id()));
    std::fs::copy(root.join("Cargo.lock"), &aside).unwrap();
    std::fs::rename(&aside, dir.join("Cargo.lock")).unwrap();
    done.push(dir.to_owned());
}

/// Without what Cargo set for this test, its library path included: a stranger does not have it.
pub fn clean(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let ours = ["CARGO_PKG_", "CARGO_BIN_", "CARGO_MANIFEST_"];
        if ours.iter().any(|o| text.starts_with(o)) || text == "LD_LIBRARY_PATH" {
            command.env_remove(&name);
        }
    }
    command
}

/// What the command wrote to its standard output.
///
/// # Panics
/// With its error output, when it did not succeed.
#[track_caller]
pub fn stdout(command: &mut Command) -> String {
    let (out, err, output) = run(command);
    assert!(output.status.success(), "{command:?}\n{out}\n{err}");
    out
}

/// Standard output and error output.
#[track_caller]
pub fn run(command: &mut Command) -> (String, String, Output) {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr), output)
}
