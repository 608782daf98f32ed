//! Which names of owners, revisions and files are safe in paths.

use std::path::{Component, Path};

/// Whether a text is a single, safe path component on every platform.
pub(super) fn is_plain(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    !part.is_empty() && part.len() <= 200 && !part.starts_with('.') && part.chars().all(allowed)
}

/// Whether a text can be a branch, tag or commit: safe path components separated by `/`.
pub(super) fn is_revision(text: &str) -> bool {
    text.len() <= 200
        && text
            .split('/')
            .all(|part| is_plain(&part.replace('+', "-")))
}

/// Whether a file name stays inside the repository's directory on every platform.
pub(super) fn is_safe_name(name: &str) -> bool {
    let odd = |c: char| c.is_control() || matches!(c, '\\' | ':');
    !name.is_empty()
        && name.len() <= 1024
        && !name.contains(odd)
        && !name.contains("//")
        && Path::new(name)
            .components()
            .all(|c| matches!(c, Component::Normal(_)))
        && !name.split('/').any(|part| part == "." || part == "..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_out_are_not_safe() {
        for good in [
            "config.json",
            "sub/dir/x.gguf",
            ".gitattributes",
            "a b+c.json",
        ] {
            assert!(is_safe_name(good), "{good:?}");
        }
        for bad in [
            "",
            "..",
            "../x",
            "a/../../x",
            "/etc/passwd",
            "a\\..\\x",
            "C:x",
            "a\0",
            "a//b",
            "a/./b",
        ] {
            assert!(!is_safe_name(bad), "{bad:?}");
        }
    }
}
