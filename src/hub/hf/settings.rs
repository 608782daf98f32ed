//! Reads the environment variables of Python's `huggingface_hub`, with its default values.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};

use super::HfHub;
use crate::hub::cache::is_on;

/// The hub's URL, unless `HF_ENDPOINT` is set.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// The maximum length of a token in bytes.
const MAX_TOKEN: u64 = 4096;

type Variables<'a> = dyn Fn(&str) -> Option<OsString> + 'a;

/// The hub that the variables describe.
pub(super) fn read(var: &Variables<'_>, home: Option<PathBuf>) -> Result<HfHub> {
    let set = |name: &str| var(name).filter(|value| !value.is_empty());
    let path = |name: &str| set(name).map(|value| expand(value, home.as_deref()));
    let hf_home = path("HF_HOME")
        .or_else(|| path("XDG_CACHE_HOME").map(|dir| dir.join("huggingface")))
        .or_else(|| {
            let home = home.as_ref().filter(|home| !home.as_os_str().is_empty());
            home.map(|home| home.join(".cache/huggingface"))
        });
    let cache = path("HF_HUB_CACHE")
        .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| hf_home.as_ref().map(|dir| dir.join("hub")))
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Io,
                "no place for the Hugging Face cache: set HF_HUB_CACHE, HF_HOME or HOME",
            )
        })?;
    let endpoint = set("HF_ENDPOINT").map(|e| e.to_string_lossy().into_owned());
    let hub = HfHub::new(endpoint.as_deref().unwrap_or(DEFAULT_ENDPOINT), cache)
        .map_err(|e| e.context("HF_ENDPOINT"))?
        .with_offline(is_on(var("HF_HUB_OFFLINE")) || is_on(var("MLX_OFFLINE")));
    if is_on(var("HF_HUB_DISABLE_IMPLICIT_TOKEN")) {
        return Ok(hub);
    }
    let named = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
        .iter()
        .find_map(|n| set(n));
    if let Some(token) = named {
        let hub = hub.with_token(&token.to_string_lossy());
        return hub.map_err(|e| e.context("HF_TOKEN"));
    }
    let file = path("HF_TOKEN_PATH").or_else(|| hf_home.map(|dir| dir.join("token")));
    match file.as_deref().and_then(read_token) {
        Some(token) => hub
            .with_token(&token)
            .map_err(|e| e.context(format!("{}", file.unwrap_or_default().display()))),
        None => Ok(hub),
    }
}

/// As in Python, a leading `~` is the home directory.
fn expand(value: OsString, home: Option<&Path>) -> PathBuf {
    let path = PathBuf::from(value);
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}

fn read_token(path: &Path) -> Option<String> {
    let file = std::fs::File::open(path).ok()?;
    let mut text = String::new();
    file.take(MAX_TOKEN).read_to_string(&mut text).ok()?;
    Some(text)
}

/// A token without surrounding white space; `None` if it is empty.
pub(super) fn token(text: &str) -> Result<Option<String>> {
    let text = text.trim();
    if text.len() as u64 > MAX_TOKEN || !text.chars().all(|c| c.is_ascii_graphic()) {
        // The message may be logged, so it must not contain the token.
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the access token contains characters that are not allowed in a token",
        ));
    }
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

/// An endpoint without a final slash.
pub(super) fn endpoint(text: &str) -> Result<String> {
    let text = text.trim().trim_end_matches('/');
    let rest = ["http://", "https://"]
        .iter()
        .find_map(|s| text.strip_prefix(s));
    match rest {
        Some(rest)
            if !rest.is_empty()
                && rest
                    .chars()
                    .all(|c| c.is_ascii_graphic() && !matches!(c, '?' | '#' | '@')) =>
        {
            Ok(text.to_owned())
        }
        _ => Err(Error::new(
            ErrorKind::InvalidOption,
            format!("{text:?} is not the address of a hub; it must begin with http:// or https://"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(vars: &[(&str, &str)], home: Option<&Path>) -> Result<HfHub> {
        let get = |name: &str| {
            let variable = vars.iter().find(|(key, _)| *key == name);
            variable.map(|(_, value)| OsString::from(value))
        };
        read(&get, home.map(Path::to_path_buf))
    }

    #[test]
    fn the_cache_is_where_the_variables_say() {
        let home = Some(Path::new("/h"));
        for (vars, want) in [
            (&[][..], "/h/.cache/huggingface/hub"),
            (&[("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HF_HOME", "/hf"), ("XDG_CACHE_HOME", "/x")], "/hf/hub"),
            (&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/hf")], "/c"),
            (&[("HF_HUB_CACHE", ""), ("HF_HOME", "~/hf")], "/h/hf/hub"),
        ] {
            assert_eq!(at(vars, home).unwrap().cache(), Path::new(want), "{vars:?}");
        }
        assert!(at(&[], None).unwrap_err().to_string().contains("HF_HOME"));
    }

    #[test]
    fn endpoints_and_switches_are_read() {
        let vars = [
            ("HF_ENDPOINT", "http://127.0.0.1:1/x/"),
            ("HF_HUB_OFFLINE", "1"),
        ];
        let hub = at(&vars, Some(Path::new("/h"))).unwrap();
        assert_eq!(hub.endpoint, "http://127.0.0.1:1/x");
        assert!(hub.offline);
        assert!(
            !at(&[("HF_HUB_OFFLINE", "0")], Some(Path::new("/h")))
                .unwrap()
                .offline
        );
        for bad in [
            "ftp://x",
            "x",
            "http://",
            "http://a b",
            "http://user@x",
            "http://x?y",
        ] {
            let error = at(&[("HF_ENDPOINT", bad)], Some(Path::new("/h"))).unwrap_err();
            assert!(error.to_string().contains("HF_ENDPOINT"), "{error}");
        }
    }

    #[test]
    fn the_token_comes_from_its_variable_or_its_file_and_is_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let home = dir.path().to_str().unwrap();
        let hub = at(&[("HF_HOME", home)], None).unwrap();
        assert_eq!(hub.token.as_deref(), Some("hf_file"));
        let hub = at(&[("HF_HOME", home), ("HF_TOKEN", " hf_var ")], None).unwrap();
        assert_eq!(hub.token.as_deref(), Some("hf_var"));
        assert!(!format!("{hub:?}").contains("hf_var"));
        let vars = [("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
        assert_eq!(at(&vars, None).unwrap().token, None);
        let error = at(&[("HF_HOME", home), ("HF_TOKEN", "a\nb")], None).unwrap_err();
        assert!(!error.to_string().contains("a\nb"), "{error}");
    }
}
