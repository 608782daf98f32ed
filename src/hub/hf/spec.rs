//! `owner/name[@revision][:file]`, what a user types for a model on the hub. No I/O.

use std::fmt;

use super::layout::{is_plain, is_revision};

/// A model on the hub: its repository, and which revision and file of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelSpec {
    owner: String,
    name: String,
    revision: Option<String>,
    file: Option<String>,
}

impl ModelSpec {
    /// Reads `owner/name[@revision][:file]`: a branch, tag or commit, and a GGUF file's name or
    /// quantization such as `Q4_K_M`. `None` for what is no such thing.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (text, file) = match text.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (text, None),
        };
        let (id, revision) = match text.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (text, None),
        };
        let (owner, name) = id.split_once('/')?;
        // `--` separates the parts of a directory's name in the cache.
        let fine = |part: &str| is_plain(part) && part.len() <= 96 && !part.contains("--");
        if !fine(owner) || !fine(name) || !revision.is_none_or(is_revision) {
            return None;
        }
        if file.is_some_and(|f| f.is_empty() || f.len() > 1024 || f.contains(char::is_control)) {
            return None;
        }
        Some(Self {
            owner: owner.to_owned(),
            name: name.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// The repository: `owner/name`.
    #[must_use]
    pub fn id(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The repository's owner.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The repository's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The branch, tag or commit; `main` when none was given.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Whether a revision was given.
    pub fn has_revision(&self) -> bool {
        self.revision.is_some()
    }

    /// The file or quantization, when one was given.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read() {
        for (text, id, revision, file) in [
            ("own/tiny.model", "own/tiny.model", "main", None),
            ("own/m@v1.0", "own/m", "v1.0", None),
            ("own/m@refs/pr/3", "own/m", "refs/pr/3", None),
            ("own/m:Q4_K_M", "own/m", "main", Some("Q4_K_M")),
            ("own/m@abc:sub/x.gguf", "own/m", "abc", Some("sub/x.gguf")),
        ] {
            let spec = ModelSpec::parse(text).unwrap();
            assert_eq!((spec.id().as_str(), spec.revision()), (id, revision));
            assert_eq!(spec.file(), file);
            assert_eq!(spec.to_string(), text);
        }
    }

    #[test]
    fn paths_and_escapes_are_no_models() {
        for text in [
            "",
            "name",
            "/name",
            "own/",
            "a/b/c",
            "../x",
            "own/..",
            "own/.x",
            "~/m",
            "own/m@",
            "own/m@../x",
            "own/m@/x",
            "own/m@x/",
            "own/m:",
            "own/m:a\0",
            "own/m\n",
            "own/m?x=1",
            "own/a--b",
            "C:/models",
            "own/m%2f",
            "own\\m",
        ] {
            assert_eq!(ModelSpec::parse(text), None, "{text:?}");
        }
    }
}
