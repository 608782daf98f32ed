//! Parses `owner/name[@revision][:file]`, the notation for a model on the hub, and URLs of the
//! hub's pages. There is no I/O.

use std::fmt;

use super::names::{is_plain, is_revision};

/// The hosts of the hub's pages.
const HOSTS: [&str; 3] = ["hf.co", "huggingface.co", "www.huggingface.co"];

/// A model on the hub: its repository, revision and file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelSpec {
    owner: String,
    name: String,
    revision: Option<String>,
    file: Option<String>,
}

impl ModelSpec {
    /// Parses `owner/name[@revision][:file]`. The revision is a branch, tag or commit. The file is
    /// a GGUF file's name, or a quantization such as `Q4_K_M`. The URL of a model's page is also
    /// accepted, with or without `https://`, and with `/tree/REVISION`, `/blob/REVISION/FILE` or
    /// `/resolve/REVISION/FILE`. Returns `None` for other texts.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match page(text) {
            Some(rest) => Self::of_page(rest),
            None => Self::of_name(text),
        }
    }

    /// Parses the part of a URL after the host.
    fn of_page(rest: &str) -> Option<Self> {
        let rest = rest.split(['?', '#']).next()?.trim_end_matches('/');
        let mut parts = rest.splitn(5, '/');
        let id = format!("{}/{}", parts.next()?, parts.next()?);
        let Some(kind) = parts.next() else {
            return Self::of_name(&id);
        };
        if !matches!(kind, "tree" | "blob" | "resolve" | "raw") || id.contains(['@', ':']) {
            return None;
        }
        // The hub encodes the slash of `refs/pr/3` as `%2F`.
        let revision = parts.next()?.replace("%2F", "/").replace("%2f", "/");
        let mut name = id;
        if revision != "main" {
            name = format!("{name}@{revision}");
        }
        // Other files are ignored, because all files of a safetensors model are downloaded
        // together.
        let is_gguf = |file: &&str| kind != "tree" && file.to_ascii_lowercase().ends_with(".gguf");
        if let Some(file) = parts.next().filter(is_gguf) {
            name = format!("{name}:{file}");
        }
        Self::of_name(&name)
    }

    fn of_name(text: &str) -> Option<Self> {
        let (text, file) = match text.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (text, None),
        };
        let (id, revision) = match text.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (text, None),
        };
        let (owner, name) = id.split_once('/')?;
        // In the cache's directory names, `--` separates owner and name, so neither may contain it.
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

    /// The branch, tag or commit; `main` by default.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Whether the text contains a revision.
    pub fn has_revision(&self) -> bool {
        self.revision.is_some()
    }

    /// The file name or quantization, if the text contains one.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

/// The part after the host, if `text` is a URL of the hub.
fn page(text: &str) -> Option<&str> {
    let rest = ["https://", "http://"].iter().find_map(|scheme| {
        let head = text.get(..scheme.len())?;
        let is_scheme = head.eq_ignore_ascii_case(scheme);
        is_scheme.then(|| &text[scheme.len()..])
    });
    let (host, path) = rest.unwrap_or(text).split_once('/')?;
    let known = HOSTS.iter().any(|known| known.eq_ignore_ascii_case(host));
    known.then_some(path)
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
    fn addresses_of_pages_are_names() {
        for (text, name) in [
            ("hf.co/own/m", "own/m"),
            ("hf.co/own/m:Q4_K_M", "own/m:Q4_K_M"),
            ("HF.co/own/m@v1", "own/m@v1"),
            ("huggingface.co/own/m/", "own/m"),
            ("https://huggingface.co/own/m", "own/m"),
            (
                "HTTPS://www.huggingface.co/own/m?library=mlx#files",
                "own/m",
            ),
            ("https://hf.co/own/m/tree/main", "own/m"),
            ("https://huggingface.co/own/m/tree/v2", "own/m@v2"),
            (
                "https://huggingface.co/own/m/tree/refs%2Fpr%2F3",
                "own/m@refs/pr/3",
            ),
            (
                "https://huggingface.co/own/m/blob/main/config.json",
                "own/m",
            ),
            (
                "https://huggingface.co/own/m/blob/main/sub/x.Q4_0.gguf",
                "own/m:sub/x.Q4_0.gguf",
            ),
            (
                "https://huggingface.co/own/m/resolve/abc/x.gguf?download=true",
                "own/m@abc:x.gguf",
            ),
        ] {
            let spec = ModelSpec::parse(text).map(|spec| spec.to_string());
            assert_eq!(spec.as_deref(), Some(name), "{text}");
        }
        for text in [
            "hf.co",
            "hf.co/own",
            "https://hf.co/own",
            "https://hf.co/own/m/discussions",
            "https://hf.co/own/m/tree/",
            "https://hf.co/own/m/tree/..%2Fx",
            "https://hf.co/own/..",
            "https://example.com/own/m",
            "https://hf.co.example.com/own/m",
            "ftp://hf.co/own/m",
        ] {
            assert_eq!(ModelSpec::parse(text), None, "{text:?}");
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
