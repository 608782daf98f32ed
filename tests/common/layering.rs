//! Finds the dependencies between the modules of a crate, for tests of the modules' order. It
//! detects only paths that begin with `crate::` or `super::`, not method calls or re-exported
//! items.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The text of each module below `root`, by path.
pub fn modules(root: &Path) -> BTreeMap<String, String> {
    let mut modules = BTreeMap::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let relative = path.strip_prefix(root).unwrap().with_extension("");
            let parts: Vec<_> = relative.iter().map(|p| p.to_str().unwrap()).collect();
            let name = parts.join("::");
            let name = name.strip_suffix("::mod").unwrap_or(&name).to_owned();
            modules.insert(name, fs::read_to_string(&path).unwrap());
        }
    }
    modules
}

/// The text of a file without comments and without its last module of tests.
pub fn code(text: &str) -> String {
    let end = text.find("\nmod tests {").unwrap_or(text.len());
    let end = text[..end].find("\npub(crate) mod tests {").unwrap_or(end);
    text[..end]
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .fold(String::new(), |all, line| all + line + "\n")
}

/// The paths of a file that begin with `crate::` or `super::`, as paths from the root of the crate.
fn paths(module: &str, text: &str) -> Vec<String> {
    let code = code(text);
    let parent = |module: &str| {
        module
            .rsplit_once("::")
            .map_or(String::new(), |(p, _)| p.into())
    };
    let mut all = Vec::new();
    for (key, base) in [("crate::", String::new()), ("super::", parent(module))] {
        for (at, _) in code.match_indices(key) {
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let rest = &code[at + key.len()..];
            let end = rest
                .find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'))
                .unwrap_or(rest.len());
            let (mut stem, mut base) = (rest[..end].trim_end_matches(':'), base.clone());
            while let Some(rest) = stem.strip_prefix("super::") {
                (stem, base) = (rest, parent(&base));
            }
            let mut names = vec![stem.to_owned()];
            if let Some(list) = rest[end..].strip_prefix('{') {
                let list = &list[..list.find('}').unwrap_or(list.len())];
                let each = list.split(',').map(str::trim).filter(|n| !n.is_empty());
                names = each.map(|name| format!("{stem}::{name}")).collect();
            }
            for name in names {
                let path = format!("{base}::{name}");
                all.push(path.trim_matches(':').to_owned());
            }
        }
    }
    all
}

/// The position of a module in `order`: the position of its own entry, or of the innermost matching
/// `module::*`.
fn place(order: &[&str], module: &str) -> Option<usize> {
    if let Some(position) = order.iter().position(|o| *o == module) {
        return Some(position);
    }
    let mut parent = module;
    loop {
        let pattern = format!("{parent}::*");
        if let Some(at) = order.iter().position(|o| *o == pattern) {
            return Some(at);
        }
        (parent, _) = parent.rsplit_once("::")?;
    }
}

/// Each use of a module that is not earlier in `order` than its user, and each module without a
/// position. Files below one `module::*` may use each other.
pub fn upward(order: &[&str], modules: &BTreeMap<String, String>) -> Vec<String> {
    let mut faults = Vec::new();
    for (module, text) in modules {
        let Some(position) = place(order, module) else {
            faults.push(format!("{module} has no place in the order"));
            continue;
        };
        for path in paths(module, text) {
            // Finds the longest prefix of the path that is a module; an item name follows it.
            let mut used = path.as_str();
            while !modules.contains_key(used) {
                let Some((shorter, _)) = used.rsplit_once("::") else {
                    break;
                };
                used = shorter;
            }
            let own_layer = module
                .strip_prefix(used)
                .is_some_and(|r| r.starts_with("::"));
            let others = modules.contains_key(used) && used != module;
            // A path to a function's module may pass through a `mod.rs` that only declares
            // children.
            if others && !own_layer && place(order, used).is_some_and(|used| used > position) {
                faults.push(format!("{module} uses {path}, which stands above it"));
            }
        }
    }
    faults
}
