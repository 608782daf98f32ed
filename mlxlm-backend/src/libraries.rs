//! Removes directories that contain another MLX from the library path of the Python process.

use std::env::{join_paths, split_paths};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

/// Variables whose directories the loader searches before the paths in a library itself.
const VARIABLES: [&str; 3] = [
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "DYLD_FALLBACK_LIBRARY_PATH",
];
/// The names of MLX's library on Linux and macOS.
const LIBRARIES: [&str; 2] = ["libmlx.so", "libmlx.dylib"];

/// Removes directories that contain MLX from the child's search path. `cargo run` adds the
/// directory of our MLX. The loader would then prefer it to the MLX of the Python package, which
/// may have another version.
pub(crate) fn keep_apart(command: &mut Command, variable: impl Fn(&str) -> Option<OsString>) {
    for name in VARIABLES {
        let Some(paths) = variable(name).and_then(|paths| without_mlx(&paths)) else {
            continue;
        };
        if paths.is_empty() {
            command.env_remove(name);
        } else {
            command.env(name, paths);
        }
    }
}

/// The path without these directories; `None` if it would not change.
fn without_mlx(paths: &OsStr) -> Option<OsString> {
    let has_mlx = |dir: &Path| LIBRARIES.iter().any(|name| dir.join(name).exists());
    let all: Vec<_> = split_paths(paths).collect();
    let remaining: Vec<_> = all.iter().filter(|dir| !has_mlx(dir)).collect();
    if remaining.len() == all.len() {
        return None;
    }
    join_paths(remaining).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_with_an_mlx_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let (plain, linux, mac) = (
            dir.path().join("plain"),
            dir.path().join("linux"),
            dir.path().join("mac"),
        );
        for dir in [&plain, &linux, &mac] {
            std::fs::create_dir(dir).unwrap();
        }
        std::fs::write(linux.join("libmlx.so"), "").unwrap();
        std::fs::write(mac.join("libmlx.dylib"), "").unwrap();

        let mut command = Command::new("python3");
        keep_apart(&mut command, |name| match name {
            "LD_LIBRARY_PATH" => join_paths([&linux, &plain, &mac]).ok(),
            "DYLD_LIBRARY_PATH" => join_paths([&mac]).ok(),
            _ => join_paths([&plain]).ok(),
        });
        let set: Vec<_> = command.get_envs().collect();
        assert_eq!(
            set,
            [
                (OsStr::new("DYLD_LIBRARY_PATH"), None),
                (OsStr::new("LD_LIBRARY_PATH"), Some(plain.as_os_str())),
            ]
        );
        let mut command = Command::new("python3");
        keep_apart(&mut command, |_| None);
        assert_eq!(command.get_envs().count(), 0);
    }
}
