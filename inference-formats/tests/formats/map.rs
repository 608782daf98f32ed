//! Tests that `docs/architecture.md` lists each crate of the workspace and each folder of its
//! sources, and nothing that does not exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The words of a line that are in backquotes and end with a slash.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    let words = line.split('`').skip(1).step_by(2);
    words.filter(|word| word.ends_with('/'))
}

/// The paths on the page, relative to the root of the repository. A table row starts with paths.
/// Further folders in the row are below the first path, or below each other if a sentence in
/// parentheses follows. If a table header contains a path, the rows are below it.
fn shown(page: &str) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut base = "";
    for line in page.lines() {
        let Some(row) = line.strip_prefix('|') else {
            base = "";
            continue;
        };
        let (first, rest) = row.split_once(" | ").unwrap_or((row, ""));
        if let Some((_, of)) = first.split_once(" of `") {
            base = of.trim_end_matches('`');
            continue;
        }
        let paths: Vec<_> = quoted(first).map(|path| format!("{base}{path}")).collect();
        if let Some(path) = paths.first() {
            let mut parent = path.clone();
            for (i, part) in rest.split(['(', ')']).enumerate() {
                for name in quoted(part) {
                    let above = if i % 2 == 1 { &parent } else { path };
                    let inner = format!("{above}{name}");
                    // Other rows are named from the root.
                    if root().join(&inner).is_dir() {
                        all.insert(inner.clone());
                    }
                    if i % 2 == 0 {
                        parent = inner;
                    }
                }
            }
        }
        all.extend(paths);
    }
    all
}

/// Every folder below `folder`, as paths from the root of the repository.
fn folders(folder: &str, all: &mut BTreeSet<String>) {
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            let inner = format!("{folder}{}/", entry.file_name().to_str().unwrap());
            folders(&inner, all);
            all.insert(inner);
        }
    }
}

/// The directories of the workspace's packages, except the root.
fn members() -> Vec<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let (_, list) = manifest.split_once("members = [").unwrap();
    let (list, _) = list.split_once(']').unwrap();
    let names = list.split('"').skip(1).step_by(2);
    names
        .filter(|name| *name != ".")
        .map(|name| format!("{name}/"))
        .collect()
}

#[test]
fn the_page_shows_every_crate_and_folder() {
    let page = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let shown = shown(&page);
    let mut wanted: BTreeSet<_> = members().into_iter().collect();
    assert!(wanted.len() > 10, "{wanted:?}");
    for member in wanted.clone() {
        folders(&format!("{member}src/"), &mut wanted);
    }
    folders("src/", &mut wanted);
    let missing: Vec<_> = wanted.difference(&shown).collect();
    assert!(missing.is_empty(), "docs/architecture.md lacks {missing:?}");
    let gone: Vec<_> = shown
        .iter()
        .filter(|path| !root().join(path).is_dir())
        .collect();
    assert!(
        gone.is_empty(),
        "docs/architecture.md shows {gone:?}, which do not exist"
    );
}

#[test]
fn a_row_shows_its_paths_and_what_is_below_them() {
    let page = "| Module of `inference-formats/src/` | What |\n|---|---|\n\
                | `gguf/`, `absent/` | headers |\n\n\
                | Folder | What |\n|---|---|\n\
                | `src/cli/` | `measure/` (`bench/`), `src/hub/` |\n";
    let expected = [
        "inference-formats/src/absent/",
        "inference-formats/src/gguf/",
        "src/cli/",
        "src/cli/measure/",
        "src/cli/measure/bench/",
    ];
    assert_eq!(shown(page), expected.map(String::from).into());
}
