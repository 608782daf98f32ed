//! Every function of mlx-c must be an alias (`#[doc(alias)]`) of the wrapper that calls it, or be
//! listed in `docs/coverage.md` with a reason. This test reads the bindings, the sources and the
//! page, and fails where they disagree.
//!
//! The test relies on rustfmt's layout: an item ends at the first `}` with the indentation of its
//! first line.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The functions that the bindings of any version declare.
fn declared() -> BTreeSet<String> {
    let mut functions = BTreeSet::new();
    for entry in fs::read_dir(root().join("mlx-sys/src/bindings")).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        let names = text
            .lines()
            .filter_map(|l| l.trim_start().strip_prefix("pub fn "))
            .filter_map(|l| l.split('(').next());
        let before = functions.len();
        functions.extend(names.map(str::to_owned));
        assert!(functions.len() > before.max(500), "a file of bindings");
    }
    functions
}

/// A source file: the name of its module, and its lines.
struct Source {
    module: String,
    lines: Vec<String>,
}

fn read_sources(dir: &Path, into: &mut Vec<Source>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let file = path.file_stem().unwrap().to_str().unwrap();
            let module = match file {
                "mod" => dir.file_name().unwrap().to_str().unwrap(),
                file => file,
            };
            into.push(Source {
                module: module.to_owned(),
                lines: fs::read_to_string(&path)
                    .unwrap()
                    .lines()
                    .map(str::to_owned)
                    .collect(),
            });
        }
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|w| !w.is_empty())
}

/// Each word, with the text between the previous word and it, and the text after it.
fn tokens(text: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    let in_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = &text[at..];
        let start = at + rest.find(in_word)?;
        let end = text[start..]
            .find(|c| !in_word(c))
            .map_or(text.len(), |n| start + n);
        let gap = text[at..start].trim();
        at = end;
        Some((gap, &text[start..end], &text[end..]))
    })
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with("//")
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Function,
    Type,
    Impl,
    Module,
    /// A row of a macro's table, or an import that renames a function.
    Row,
}

/// A function, a type, an implementation, or one row of a macro's table.
struct Item {
    source: usize,
    line: usize,
    names: Vec<String>,
    kind: Kind,
    public: bool,
    /// The item's text without comments and attributes.
    text: String,
}

/// The name and visibility of the item that a line starts.
fn head(line: &str) -> Option<(String, Kind, bool)> {
    let line = line.trim_start();
    let public = line.starts_with("pub ");
    let rest = match line.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ")?.1,
        None => line.strip_prefix("pub ").unwrap_or(line),
    };
    let rest = ["const fn ", "unsafe fn ", "unsafe impl"]
        .iter()
        .find(|start| rest.starts_with(**start))
        .map_or(rest, |_| {
            rest.split_once(' ').map_or(rest, |(_, rest)| rest)
        });
    if let Some(implementation) = rest.strip_prefix("impl") {
        // For `impl<T: Bound> Trait<X> for Name<T> {`, the name is the last one outside of angle
        // brackets.
        let mut depth = 0_i32;
        let plain: String = implementation
            .split(" where ")
            .next()?
            .chars()
            .filter(|c| {
                depth += i32::from(*c == '<');
                let outside = depth == 0;
                depth -= i32::from(*c == '>');
                outside
            })
            .collect();
        return words(&plain)
            .last()
            .map(|name| (name.to_owned(), Kind::Impl, false));
    }
    let kinds = [
        ("fn ", Kind::Function),
        ("struct ", Kind::Type),
        ("enum ", Kind::Type),
        ("trait ", Kind::Type),
        ("type ", Kind::Type),
        ("mod ", Kind::Module),
    ];
    let (rest, kind) = kinds
        .iter()
        .find_map(|(start, kind)| Some((rest.strip_prefix(start)?, *kind)))?;
    let name = words(rest).next()?;
    Some((name.to_owned(), kind, public))
}

/// Lines `from..to` without comments and attributes. Otherwise an alias would look like a call.
fn code(lines: &[String], from: usize, to: usize) -> String {
    let mut text = String::new();
    let mut inside = false;
    for line in &lines[from..to] {
        inside |= line.trim_start().starts_with("#[");
        if !inside && !is_comment(line) {
            text.push_str(line);
            text.push('\n');
        }
        inside &= !line.trim_end().ends_with(']');
    }
    text
}

/// The first line after the block that `start` opens.
fn end_of(lines: &[String], start: usize) -> usize {
    let indent = indentation(&lines[start]);
    let first = lines[start].trim_end();
    if first.ends_with(';') || first.ends_with('}') {
        return start + 1;
    }
    (start + 1..lines.len())
        .find(|&i| {
            indentation(&lines[i]) == indent
                && lines[i].trim_start().starts_with(['}', ')'])
                && lines[i].trim_end().ends_with(['}', ';', ')'])
        })
        .map_or(lines.len(), |i| i + 1)
}

/// The rows between a macro's brackets, each with the names before `=`, `:` or `(`.
fn rows(lines: &[String], source: usize, start: usize, end: usize, items: &mut Vec<Item>) {
    let mut first = None;
    for line in start + 1..end {
        let text = lines[line].trim();
        if text.is_empty() || is_comment(text) || text.starts_with("#[") || text == "example:" {
            continue;
        }
        let from = *first.get_or_insert(line);
        if text.ends_with(';') || line + 2 == end {
            let text = code(lines, from, line + 1);
            let names = text.split(['=', ':', '(']).next().unwrap_or_default();
            items.push(Item {
                source,
                line: from,
                names: words(names).map(str::to_owned).collect(),
                kind: Kind::Row,
                public: false,
                text,
            });
            first = None;
        }
    }
}

fn items(sources: &[Source]) -> Vec<Item> {
    let mut items = Vec::new();
    for (source, Source { lines, .. }) in sources.iter().enumerate() {
        for (line, text) in lines.iter().enumerate().filter(|(_, l)| !is_comment(l)) {
            if let Some((name, kind, public)) = head(text) {
                items.push(Item {
                    source,
                    line,
                    names: vec![name],
                    kind,
                    public,
                    text: code(lines, line, end_of(lines, line)),
                });
            } else if text.trim_end().ends_with(['{', '('])
                && let Some((name, _)) = text.split_once('!')
                && words(name).count() == 1
            {
                rows(lines, source, line, end_of(lines, line), &mut items);
            }
            // Handles `mlx_one_axis as mlx_one` in an import.
            let parts: Vec<&str> = words(text).collect();
            for alias in parts.windows(3).filter(|w| w[1] == "as") {
                items.push(Item {
                    source,
                    line,
                    names: vec![alias[2].to_owned()],
                    kind: Kind::Row,
                    public: false,
                    text: alias[0].to_owned(),
                });
            }
        }
    }
    items
}

/// The aliases in the sources: the mlx-c function, and the index of the item with the attribute.
fn aliases(sources: &[Source], items: &[Item], faults: &mut Vec<String>) -> Vec<(String, usize)> {
    let mut aliases = Vec::new();
    for (source, Source { lines, module }) in sources.iter().enumerate() {
        let mut names = Vec::new();
        let mut inside = false;
        for (line, text) in lines.iter().enumerate() {
            let text = text.trim();
            inside |= text.starts_with("#[doc(alias");
            if inside {
                names.extend(text.split('"').skip(1).step_by(2).map(str::to_owned));
                inside = !text.ends_with(")]");
            } else if !text.starts_with("#[") && !is_comment(text) && !names.is_empty() {
                // One row defines several functions, each with its own example.
                if text == "example:" {
                    continue;
                }
                let bearer = items.iter().position(|item| {
                    (item.source, item.line) == (source, line)
                        && (item.public || item.kind == Kind::Row)
                });
                match bearer {
                    Some(item) => aliases.extend(names.drain(..).map(|name| (name, item))),
                    None => faults.push(format!(
                        "{module}: {names:?} are aliases of {text:?}, which is not public"
                    )),
                }
                names.clear();
            }
        }
    }
    aliases
}

/// Finds calls in an item and in the private helpers that it reaches.
struct Calls<'a> {
    sources: &'a [Source],
    items: &'a [Item],
    /// The private items of each name. Public items have aliases of their own, so calls are not
    /// followed into them.
    helpers: BTreeMap<&'a str, Vec<usize>>,
    /// For each item, the helpers that it uses.
    used: Vec<BTreeSet<usize>>,
}

/// The maximum number of helpers between a wrapper and its call of mlx-c.
const DEPTH: usize = 2;

impl<'a> Calls<'a> {
    fn new(sources: &'a [Source], items: &'a [Item], aliases: &[(String, usize)]) -> Self {
        let aliased: BTreeSet<usize> = aliases.iter().map(|(_, item)| *item).collect();
        let public_types: BTreeSet<&str> = items
            .iter()
            .filter(|item| item.public && item.kind == Kind::Type)
            .map(|item| item.names[0].as_str())
            .collect();
        let mut helpers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (i, item) in items.iter().enumerate() {
            for name in item.names.iter().map(String::as_str) {
                let of_public_type = item.kind == Kind::Impl && public_types.contains(name);
                if !item.public && !of_public_type && !aliased.contains(&i) {
                    helpers.entry(name).or_default().push(i);
                }
            }
        }
        let mut calls = Self {
            sources,
            items,
            helpers,
            used: Vec::new(),
        };
        calls.used = items.iter().map(|item| calls.used(item)).collect();
        calls
    }

    /// The private items that `item` uses. `name(..)` is a function of the same file, or the only
    /// function of that name. `.name(..)` and `Type::name(..)` are functions of the same file.
    /// `module::name` is a function of that module. The name of a type includes its
    /// implementations.
    fn used(&self, item: &Item) -> BTreeSet<usize> {
        let mut used = BTreeSet::new();
        let mut before = ("", "");
        for (gap, word, after) in tokens(&item.text) {
            let all = self.helpers.get(word).map_or(&[][..], Vec::as_slice);
            let qualifier = if gap == "::" { before.1 } else { "" };
            before = (gap, word);
            let called = after.starts_with('(') || after.starts_with("::<");
            let is_type = |i: usize| !matches!(self.items[i].kind, Kind::Function | Kind::Module);
            let mut files = all.iter().map(|&i| self.items[i].source);
            let first = files.next();
            let only = files.all(|file| Some(file) == first);
            used.extend(all.iter().copied().filter(|&i| {
                let other = &self.items[i];
                let here = other.source == item.source;
                if is_type(i) {
                    here || only || self.sources[other.source].module == qualifier
                } else if gap.ends_with('.') || qualifier.starts_with(char::is_uppercase) {
                    called && here
                } else if !qualifier.is_empty() {
                    called && self.sources[other.source].module == qualifier
                } else {
                    called && (here || only)
                }
            }));
        }
        used
    }

    /// Whether the item calls `function` directly, or through at most [`DEPTH`] helpers.
    fn made(&self, start: usize, function: &str) -> bool {
        let first = &self.items[start];
        let mut level = BTreeSet::from([start]);
        if first.kind == Kind::Type {
            let implements = |item: &Item| item.kind == Kind::Impl && item.names == first.names;
            level.extend((0..self.items.len()).filter(|&i| implements(&self.items[i])));
        }
        let mut seen = level.clone();
        for _ in 0..=DEPTH {
            if level
                .iter()
                .any(|&i| words(&self.items[i].text).any(|w| w == function))
            {
                return true;
            }
            let next: BTreeSet<usize> = level
                .iter()
                .flat_map(|&i| self.used[i].iter().copied())
                .filter(|i| !seen.contains(i))
                .collect();
            seen.extend(&next);
            level = next;
        }
        false
    }
}

/// An entry of the page: its functions, the paths that it names, and its text.
struct Entry {
    functions: Vec<String>,
    paths: Vec<String>,
    text: String,
}

/// The entries of the page, and the headings and paragraphs with their reasons.
fn page() -> (Vec<Entry>, Vec<(String, String)>) {
    let text = fs::read_to_string(root().join("docs/coverage.md")).unwrap();
    let (mut entries, mut reasons) = (Vec::new(), Vec::new());
    for section in text.split("\n## ").skip(1) {
        let (reason, list) = section.split_once("\n- ").unwrap_or((section, ""));
        let (title, reason) = reason.split_once('\n').unwrap_or((reason, ""));
        reasons.push((title.to_owned(), reason.to_owned()));
        for entry in list.split("\n- ") {
            let names = entry.split('`').skip(1).step_by(2);
            let (functions, paths): (Vec<_>, Vec<_>) = names
                .map(str::to_owned)
                .partition(|name| name.trim_start_matches('_').starts_with("mlx_"));
            entries.push(Entry {
                functions,
                paths,
                text: entry.to_owned(),
            });
        }
    }
    (entries, reasons)
}

#[test]
fn every_function_of_mlx_c_is_accounted_for() {
    let declared = declared();
    let mut sources = Vec::new();
    read_sources(&root().join("mlx-rs-core/src"), &mut sources);
    let items = items(&sources);
    let mut faults = Vec::new();

    let aliases = aliases(&sources, &items, &mut faults);
    let calls = Calls::new(&sources, &items, &aliases);
    let mut wrapped = BTreeSet::new();
    for (function, item) in &aliases {
        let names = items[*item].names.join(", ");
        if !declared.contains(function) {
            faults.push(format!(
                "{function} is an alias of {names} but does not exist"
            ));
        } else if !calls.made(*item, function) {
            faults.push(format!(
                "{function} is an alias of {names}, which does not call it"
            ));
        }
        wrapped.insert(function.clone());
    }
    // rustdoc rejects an alias that equals the item's name.
    for (i, item) in items.iter().enumerate().filter(|(_, item)| item.public) {
        if declared.contains(&item.names[0]) && calls.made(i, &item.names[0]) {
            wrapped.insert(item.names[0].clone());
        }
    }

    let (entries, reasons) = page();
    for (title, reason) in &reasons {
        if reason.split_whitespace().count() < 4 {
            faults.push(format!("the section {title:?} gives no reason"));
        }
    }
    let names: BTreeSet<&str> = items
        .iter()
        .flat_map(|item| item.names.iter().map(String::as_str))
        .chain(sources.iter().map(|source| source.module.as_str()))
        .collect();
    let mut listed = BTreeSet::new();
    for entry in &entries {
        if entry.functions.is_empty() {
            faults.push(format!("{:?} names no function", entry.text));
        }
        for path in &entry.paths {
            let mut missing = path.split("::").filter(|part| !names.contains(part));
            if let Some(part) = missing.next() {
                faults.push(format!("`{path}`: there is no {part}"));
            }
        }
        for function in &entry.functions {
            if !declared.contains(function) {
                faults.push(format!("{function} has a line but does not exist"));
            }
            if wrapped.contains(function) {
                faults.push(format!("{function} has a line and is an alias"));
            }
            if !listed.insert(function.clone()) {
                faults.push(format!("{function} has two lines"));
            }
        }
    }
    for function in &declared {
        if !wrapped.contains(function) && !listed.contains(function) {
            faults.push(format!("{function} has neither an alias nor a reason"));
        }
    }
    assert!(
        wrapped.len() > 300 && listed.len() > 250,
        "{} functions have aliases, {} have lines",
        wrapped.len(),
        listed.len()
    );
    assert!(
        faults.is_empty(),
        "aliases and docs/coverage.md:\n{}",
        faults.join("\n")
    );
}
