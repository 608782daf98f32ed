//! Runs Cargo in another workspace, like a user whose crate depends on ours by path. The callers
//! test how such a workspace behaves.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use parking_lot::Mutex;

/// The target directory of the outer Cargo, which releases its lock before it runs tests. A crate
/// that the other workspace builds with the same features and profile is there already.
pub fn target() -> PathBuf {
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    temporary.parent().unwrap().to_owned()
}

/// A Cargo command for `workspace` (relative to the root of the repository) with its output in
/// [`target`].
pub fn cargo(workspace: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = root.join(workspace);
    lock_versions(root, &dir);
    let mut command = clean(Command::new(env!("CARGO")));
    command
        .current_dir(dir)
        .env("CARGO_TARGET_DIR", target())
        // As in our own profile: other values would build every crate again.
        .env("CARGO_INCREMENTAL", "0")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_NET_OFFLINE", "true");
    command
}

/// Copies our lock file, because its crate versions are already downloaded. So Cargo needs no
/// network and selects no other versions. Cargo drops entries that the workspace does not need.
fn lock_versions(root: &Path, dir: &Path) {
    static DONE: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let mut done = DONE.lock();
    if done.iter().any(|d| d == dir) {
        return;
    }
    // A rename is atomic, so a concurrent Cargo never reads a partial file.
    let aside = dir.join(format!("Cargo.lock.{}", std::process::id()));
    std::fs::copy(root.join("Cargo.lock"), &aside).unwrap();
    std::fs::rename(&aside, dir.join("Cargo.lock")).unwrap();
    done.push(dir.to_owned());
}

/// Removes the variables that the outer Cargo set for this test, including its library path. Users
/// do not have these variables.
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

/// The standard output of the command.
///
/// # Panics
/// If the command failed. The panic message contains the command's error output.
#[track_caller]
pub fn stdout(command: &mut Command) -> String {
    let (out, err, output) = run(command);
    assert!(output.status.success(), "{command:?}\n{out}\n{err}");
    out
}

/// The standard output and the error output.
#[track_caller]
pub fn run(command: &mut Command) -> (String, String, Output) {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr), output)
}
