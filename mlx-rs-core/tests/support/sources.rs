//! Reads the sources of this crate, for tests that check every public function. It is not a parser:
//! it recognizes Rust by the layout of lines that rustfmt produces.

use std::fs;
use std::path::{Path, PathBuf};

/// Every public function of the crate, in the order of the files.
pub(crate) fn all() -> Vec<Function> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    files.sort();
    files
        .iter()
        .flat_map(|file| {
            let place = file.strip_prefix(root).unwrap().display().to_string();
            functions(&place, &fs::read_to_string(file).unwrap())
        })
        .collect()
}

/// One public function, or one row of a macro's table that defines functions.
pub(crate) struct Function {
    /// The file, from the crate's root.
    pub(crate) place: String,
    pub(crate) name: String,
    pub(crate) docs: String,
    /// The text from its name up to the body.
    pub(crate) signature: String,
    /// The documentation of the type, if the function is a method.
    pub(crate) of_type: String,
    /// Whether a macro defines the function. The macro then documents its errors.
    pub(crate) row: bool,
}

fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
            into.push(path);
        }
    }
}

/// The name after `prefix`, if the line begins with it.
fn name_after(line: &str, prefixes: &[&str]) -> Option<String> {
    let rest = prefixes.iter().find_map(|p| line.strip_prefix(p))?;
    let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$'));
    Some(rest[..end.unwrap_or(rest.len())].to_owned())
}

/// The name of the type in `impl<..> Name<..> {` or `impl Trait for Name {`.
fn implemented(line: &str) -> Option<String> {
    let mut rest = line.strip_prefix("impl")?;
    if rest.starts_with('<') {
        let mut depth = 0;
        let end = rest.char_indices().find_map(|(i, c)| {
            depth += match c {
                '<' => 1,
                '>' if !rest[..i].ends_with('-') => -1,
                _ => 0,
            };
            (depth == 0).then_some(i)
        })?;
        rest = &rest[end + 1..];
    }
    let rest = rest.rsplit(" for ").next()?.trim_start();
    name_after(rest, &[""]).filter(|n| !n.is_empty())
}

/// The names of a macro's row: `one, two = mlx_one, ...` or `set = Set;`. Assignments, such as `x =
/// None;`, are not rows.
fn row(line: &str) -> Vec<String> {
    let word = |w: &str| {
        !w.is_empty()
            && w.chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    match line.split_once(" = ") {
        Some((names, value))
            if value.ends_with(';')
                && value != "None;"
                && (value.starts_with("mlx_")
                    || value
                        .trim_end_matches(';')
                        .chars()
                        .all(char::is_alphanumeric)
                        && value.starts_with(char::is_uppercase))
                && names.split(", ").all(word) =>
        {
            names.split(", ").map(str::to_owned).collect()
        }
        _ => Vec::new(),
    }
}

pub(crate) fn functions(place: &str, text: &str) -> Vec<Function> {
    let mut names = Vec::new();
    let mut types: Vec<(String, String)> = Vec::new();
    let (mut docs, mut of, mut inside_attribute) = (String::new(), String::new(), false);
    let lines: Vec<&str> = text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        let trimmed = line.trim();
        if trimmed == "#[cfg(test)]" && lines.get(at + 1).is_some_and(|l| l.starts_with("mod ")) {
            break;
        }
        if inside_attribute {
            inside_attribute = trimmed != ")]";
            continue;
        }
        if let Some(doc) = trimmed.strip_prefix("///") {
            docs.push_str(doc);
            docs.push('\n');
            continue;
        }
        if trimmed.starts_with('#') || trimmed.starts_with("$(#[") || trimmed == "example:" {
            inside_attribute = trimmed.ends_with('(');
            docs.push_str(trimmed);
            docs.push('\n');
            continue;
        }
        if let Some(name) = name_after(trimmed, &["pub struct ", "pub enum ", "pub trait "]) {
            types.push((name, std::mem::take(&mut docs)));
        } else if let Some(name) = implemented(trimmed) {
            of = types
                .iter()
                .find(|t| t.0 == name)
                .map_or(String::new(), |t| t.1.clone());
        }
        let made = name_after(trimmed, &["pub fn ", "pub unsafe fn ", "pub const fn "]);
        let rows = row(trimmed);
        if made.is_some() || !rows.is_empty() {
            let mut body = false;
            let signature = lines[at..]
                .iter()
                .take_while(|l| !std::mem::replace(&mut body, l.contains('{')));
            let signature: Vec<&str> = signature.copied().collect();
            for name in made.iter().chain(&rows) {
                names.push(Function {
                    place: place.to_owned(),
                    name: name.clone(),
                    docs: docs.clone(),
                    signature: signature.join(" "),
                    of_type: of.clone(),
                    row: made.is_none(),
                });
            }
        }
        docs.clear();
    }
    names
}
