//! Every public function says how it is used and how it fails: this reads the sources and fails on one
//! without an example, and on one that returns a `Result` without a section `# Errors`. Whether the
//! examples are right is what `cargo test --doc` says.

use std::fs;
use std::path::{Path, PathBuf};

/// Files whose functions need no example of their own, and why.
const WITHOUT_EXAMPLES: [(&str, &str); 2] = [
    (
        "src/cpu/",
        "the engine's own kernels, of a decoder's shapes; tests/gradients and their unit tests show them",
    ),
    (
        "src/array/convert.rs: from_literal",
        "hidden: `array!` is its face",
    ),
];

/// One public function, or one row of a table that a macro makes functions from.
struct Function {
    place: String,
    name: String,
    docs: String,
    /// What follows its name up to the body.
    signature: String,
    /// The example of the type that it is a method of.
    of_type: String,
    /// Made by a macro, which documents how it fails.
    row: bool,
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

/// The type that `impl<..> Name<..> {` or `impl Trait for Name {` is of.
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

/// The names of a macro's row: `one, two = mlx_one, ...` or `set = Set;`.
fn row(line: &str) -> Vec<String> {
    let word = |w: &str| {
        !w.is_empty()
            && w.chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    match line.split_once(" = ") {
        Some((names, value))
            if value.ends_with(';')
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

fn functions(place: &str, text: &str) -> Vec<Function> {
    let mut found = Vec::new();
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
                found.push(Function {
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
    found
}

impl Function {
    /// Whether an example of its own, or of its type, shows it. A macro's pattern has that of its rows.
    fn shown(&self) -> bool {
        let calls = [format!(".{}(", self.name), format!("::{}(", self.name)];
        self.docs.contains("```")
            || self.name.starts_with('$')
            || self.of_type.contains("```")
                && calls.iter().any(|c| self.of_type.contains(c.as_str()))
    }

    fn says_how_it_fails(&self) -> bool {
        let signature = self.signature.split(" where ").next().unwrap_or_default();
        let returned = signature.rsplit_once("->").map_or("", |s| s.1);
        let fails = returned.contains("Result<") && !returned.contains("impl Fn");
        self.row || !fails || self.docs.contains("# Errors")
    }
}

#[test]
fn every_public_function_has_an_example_and_says_how_it_fails() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    let (mut faults, mut count, mut used) = (Vec::new(), 0, [false; WITHOUT_EXAMPLES.len()]);
    for file in &files {
        let place = file.strip_prefix(root).unwrap().display().to_string();
        for f in functions(&place, &fs::read_to_string(file).unwrap()) {
            count += 1;
            if !f.says_how_it_fails() {
                faults.push(format!("{}: {} has no section `# Errors`", f.place, f.name));
            }
            if f.shown() {
                continue;
            }
            let name = format!("{}: {}", f.place, f.name);
            match WITHOUT_EXAMPLES
                .iter()
                .position(|(p, _)| name.starts_with(p))
            {
                Some(allowed) => used[allowed] = true,
                None => faults.push(format!("{name} has no example")),
            }
        }
    }
    for ((place, _), used) in WITHOUT_EXAMPLES.iter().zip(used) {
        if !used {
            faults.push(format!("{place} is excused, but needs no excuse"));
        }
    }
    assert!(count > 400, "only {count} functions were read");
    assert!(
        faults.is_empty(),
        "{} faults:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

#[test]
fn the_reader_finds_what_is_missing() {
    let text = "
/// ```
/// Thing::new();
/// ```
pub struct Thing;
impl<'a> Thing<'a> {
    /// Shown by the type.
    pub fn new() -> Self {}
    /// Says nothing.
    #[must_use]
    pub fn lost(
        &self,
    ) -> Result<Array> {}
}
made! {
    /// Half of it.
    one, two = mlx_one, mlx_two;
    /// ```
    /// ```
    three = mlx_three;
}
";
    let all = functions("x", text);
    let names: Vec<&str> = all.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["new", "lost", "one", "two", "three"]);
    let shown: Vec<bool> = all.iter().map(Function::shown).collect();
    assert_eq!(shown, [true, false, false, false, true]);
    let told: Vec<bool> = all.iter().map(Function::says_how_it_fails).collect();
    assert_eq!(told, [true, false, true, true, true]);
}
