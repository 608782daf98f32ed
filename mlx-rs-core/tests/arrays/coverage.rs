//! `docs/coverage.md` names the counterpart of every function of mlx-c. This reads the bindings,
//! the table and the sources, and fails where they disagree.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Functions of mlx-c 0.4.1 that later versions do not have.
const ONLY_0_4: [&str; 1] = ["mlx_metal_device_info"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The functions that the bindings declare.
fn declared() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("mlx-sys/src/bindings/0.7.rs")).unwrap();
    text.lines()
        .filter_map(|l| l.trim_start().strip_prefix("pub fn "))
        .filter_map(|l| l.split('(').next())
        .map(str::to_owned)
        .collect()
}

/// The rows of the table: function and what stands for it.
fn rows() -> Vec<(String, String)> {
    let text = fs::read_to_string(root().join("docs/coverage.md")).unwrap();
    text.lines()
        .filter_map(|l| {
            l.strip_prefix("| `")?
                .strip_suffix(" |")?
                .split_once("` | ")
        })
        .map(|(f, cell)| (f.to_owned(), cell.to_owned()))
        .collect()
}

/// Every source file of the crate.
fn sources(dir: &Path, into: &mut Vec<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(fs::read_to_string(path).unwrap());
        }
    }
}

/// The words of the sources, and those that a declaration or a macro's table names.
fn words() -> (BTreeSet<String>, BTreeSet<String>) {
    let mut texts = Vec::new();
    sources(&root().join("mlx-rs-core/src"), &mut texts);
    let (mut used, mut named) = (BTreeSet::new(), BTreeSet::new());
    for text in &texts {
        let code = text.lines().filter(|l| !l.trim_start().starts_with("//"));
        for line in code {
            let words: Vec<&str> = line
                .split(|c: char| !(c.is_alphanumeric() || c == '_'))
                .filter(|w| !w.is_empty())
                .collect();
            for pair in words.windows(2) {
                if ["fn", "struct", "enum", "mod", "trait", "type"].contains(&pair[0]) {
                    named.insert(pair[1].to_owned());
                }
            }
            // `name = mlx_name;` and `one, two = mlx_one, mlx_two;` in the tables of macros.
            if let Some((names, calls)) = line.split_once('=')
                && calls.trim_start().starts_with("mlx_")
            {
                named.extend(names.split(',').map(|n| n.trim().to_owned()));
            }
            used.extend(words.into_iter().map(str::to_owned));
        }
    }
    (used, named)
}

/// The paths in backticks of a cell.
fn paths(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

#[test]
fn every_function_of_mlx_c_is_accounted_for() {
    let declared = declared();
    assert!(declared.len() > 550, "{} functions read", declared.len());
    let mut faults = Vec::new();
    let mut table = BTreeMap::new();
    for (function, cell) in rows() {
        if !declared.contains(&function) && !ONLY_0_4.contains(&function.as_str()) {
            faults.push(format!("{function} has a row but does not exist"));
        }
        if table.insert(function.clone(), cell).is_some() {
            faults.push(format!("{function} has two rows"));
        }
    }
    for function in &declared {
        if !table.contains_key(function) {
            faults.push(format!("{function} has neither a wrapper nor a reason"));
        }
    }
    let (used, named) = words();
    for (function, cell) in &table {
        let paths = paths(cell);
        for path in &paths {
            let mut missing = path.split("::").filter(|s| !named.contains(*s));
            if let Some(part) = missing.next() {
                faults.push(format!("{function}: `{path}`: there is no {part}"));
            }
        }
        let only_paths = paths.iter().map(|p| p.len() + 4).sum::<usize>() >= cell.len() + 2;
        if only_paths && !used.contains(function) {
            faults.push(format!(
                "{function}: {cell} does not call it; say what it does"
            ));
        }
        if paths.is_empty() && cell.split_whitespace().count() < 4 {
            faults.push(format!("{function}: {cell:?} is no reason"));
        }
    }
    assert!(
        faults.is_empty(),
        "docs/coverage.md:\n{}",
        faults.join("\n")
    );
}
