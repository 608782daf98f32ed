//! Lists the code that a plain build on Linux x86-64 does not compile, because such code breaks
//! unnoticed. `ELSEWHERE` lists each of its conditions, with the check that compiles the code or
//! the reason why none does. The test covers the whole workspace. It is in this crate because most
//! such code is here, and this crate builds without MLX.

mod conditions;
mod elsewhere;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use conditions::{conditions, holds};
use elsewhere::ELSEWHERE;

/// Folders without sources of this workspace.
const FOREIGN: &[&str] = &["target", "vendor", "node_modules"];

/// Features that `cargo test --workspace` does not enable, each with the folder of its crate.
const OFF: &[(&str, &str)] = &[
    ("", "async"),
    ("", "cuda"),
    ("", "parquet"),
    ("metal-backend", "cuda"),
    ("metal-backend", "parquet"),
    ("mlx-rs-core", "cuda"),
    ("mlx-sys", "cuda"),
];

fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    root.expect("the crate is in a workspace").to_owned()
}

/// The sources and manifests below a folder.
fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            if !FOREIGN.contains(&name) && !name.starts_with('.') {
                sources(&path, files);
            }
        } else if name.ends_with(".rs") || name == "Cargo.toml" {
            files.push(path);
        }
    }
}

/// Whether a part of a condition holds in a plain build of a file's crate. `None` if it holds in
/// some builds only, such as `test`.
fn plain(file: &str, key: &str, value: Option<&str>) -> Option<bool> {
    match (key, value) {
        ("unix", None) => Some(true),
        ("windows", None) => Some(false),
        ("target_arch", Some(v)) => Some(v == "x86_64"),
        ("target_os", Some(v)) => Some(v == "linux"),
        ("target_env", Some(v)) => Some(v == "gnu"),
        ("target_family", Some(v)) => Some(v == "unix"),
        ("target_endian", Some(v)) => Some(v == "little"),
        ("target_pointer_width", Some(v)) => Some(v == "64"),
        ("feature", Some(v)) => {
            let folder = file.split_once('/').map_or("", |(first, _)| first);
            // The root crate's folder is the empty string.
            let folder = match folder {
                "src" | "tests" | "examples" => "",
                _ => folder,
            };
            Some(!OFF.contains(&(folder, v)))
        }
        _ => None,
    }
}

#[test]
fn what_is_not_compiled_here_is_known() {
    let root = root();
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut actual = BTreeSet::new();
    for path in files {
        let file = path.strip_prefix(&root).unwrap().to_str().unwrap();
        let file = file.replace('\\', "/");
        if file.starts_with("mlx-cpu-kernels/tests/sources/platforms") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for condition in conditions(&text) {
            if !holds(&condition, &|key, value| plain(&file, key, value)) {
                actual.insert((file.clone(), condition.to_string()));
            }
        }
    }
    let known: BTreeSet<(String, String)> = (ELSEWHERE.iter())
        .flat_map(|(condition, _, files)| {
            let pair = |file: &&str| ((*file).to_owned(), (*condition).to_owned());
            files.iter().map(pair).collect::<Vec<_>>()
        })
        .collect();
    let line = |(file, condition): &(String, String)| format!("{file}: {condition}\n");
    let missing: String = actual.difference(&known).map(line).collect();
    assert!(
        missing.is_empty(),
        "a build on Linux x86-64 lacks these; `ELSEWHERE` must say what compiles them:\n{missing}"
    );
    let gone: String = known.difference(&actual).map(line).collect();
    assert!(
        gone.is_empty(),
        "the sources have these of `ELSEWHERE` no more:\n{gone}"
    );
}

/// Each entry names a command or program that exists, or a reason why nothing compiles the code.
#[test]
fn what_compiles_the_rest_is_there() {
    let root = root();
    let ci = fs::read_to_string(root.join(".ci/run")).unwrap();
    for (condition, by, files) in ELSEWHERE {
        assert!(!files.is_empty(), "{condition}");
        let reason = by
            .strip_prefix("nothing: ")
            .is_some_and(|why| !why.is_empty());
        let command = by
            .strip_suffix(" in .ci/run")
            .map(|command| ci.contains(command));
        let program = by.starts_with("tools/") && root.join(by).is_file();
        let emulated = *by == "emulated in tests";
        assert!(
            reason || command == Some(true) || program || emulated,
            "{condition}: {by}"
        );
    }
    for (folder, feature) in OFF {
        let manifest = fs::read_to_string(root.join(folder).join("Cargo.toml")).unwrap();
        assert!(
            manifest.contains(&format!("\n{feature} = ")),
            "{folder} has no feature {feature}"
        );
    }
}
