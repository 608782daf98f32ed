//! Paths of this program's files on the user's machine. No function creates anything.

use std::ffi::OsString;
use std::path::PathBuf;

use inference::{Error, ErrorKind, Result};

/// The name of our directory in the user's cache and state directories.
const DIR: &str = "rust-mlx";

/// The cache directory: `$MLX_CACHE_DIR`, else `$XDG_CACHE_HOME/rust-mlx`, else
/// `~/Library/Caches/rust-mlx` on macOS and `~/.cache/rust-mlx` elsewhere.
///
/// # Errors
/// [`ErrorKind::Io`] if neither a variable nor a home directory determines the path.
pub fn cache_dir() -> Result<PathBuf> {
    let fallback = if cfg!(target_os = "macos") {
        "Library/Caches"
    } else {
        ".cache"
    };
    locate(
        &|name| std::env::var_os(name),
        "XDG_CACHE_HOME",
        fallback,
        std::env::home_dir(),
    )
}

/// The directory of fetched models: `models` in [`cache_dir`], with one directory for each model.
///
/// # Errors
/// Those of [`cache_dir`].
pub fn models_dir() -> Result<PathBuf> {
    Ok(cache_dir()?.join("models"))
}

/// The directory of small persistent files, such as the chat's history. It is `$MLX_CACHE_DIR`,
/// else `$XDG_STATE_HOME/rust-mlx`, else `~/.local/state/rust-mlx`
/// (`~/Library/Application Support/rust-mlx` on macOS).
///
/// # Errors
/// Those of [`cache_dir`].
pub fn state_dir() -> Result<PathBuf> {
    let fallback = if cfg!(target_os = "macos") {
        "Library/Application Support"
    } else {
        ".local/state"
    };
    locate(
        &|name| std::env::var_os(name),
        "XDG_STATE_HOME",
        fallback,
        std::env::home_dir(),
    )
}

/// Whether a variable is set to a true value: not empty, `0`, `false`, `no` or `off`.
pub(super) fn is_on(value: Option<OsString>) -> bool {
    value.is_some_and(|value| {
        let value = value.to_string_lossy().trim().to_ascii_lowercase();
        !matches!(value.as_str(), "" | "0" | "false" | "no" | "off")
    })
}

fn locate(
    var: &dyn Fn(&str) -> Option<OsString>,
    xdg: &str,
    fallback: &str,
    home: Option<PathBuf>,
) -> Result<PathBuf> {
    let set = |name| {
        var(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(dir) = set("MLX_CACHE_DIR") {
        return Ok(dir);
    }
    // The XDG specification requires that relative paths are ignored.
    if let Some(dir) = set(xdg).filter(|dir| dir.is_absolute()) {
        return Ok(dir.join(DIR));
    }
    match home.filter(|home| !home.as_os_str().is_empty()) {
        Some(home) => Ok(home.join(fallback).join(DIR)),
        None => Err(Error::new(
            ErrorKind::Io,
            format!("no place for the cache: set MLX_CACHE_DIR, {xdg} or HOME"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(vars: &[(&str, &str)], home: Option<&str>) -> Result<PathBuf> {
        let get = |name: &str| {
            let variable = vars.iter().find(|(key, _)| *key == name);
            variable.map(|(_, value)| OsString::from(value))
        };
        locate(&get, "XDG_CACHE_HOME", ".cache", home.map(PathBuf::from))
    }

    #[test]
    fn the_order_of_places_is_ours_then_xdg_then_home() {
        let (ours, xdg) = (("MLX_CACHE_DIR", "/a"), ("XDG_CACHE_HOME", "/b"));
        assert_eq!(at(&[ours, xdg], Some("/h")).unwrap(), PathBuf::from("/a"));
        let want = PathBuf::from("/b/rust-mlx");
        assert_eq!(at(&[xdg], Some("/h")).unwrap(), want);
        let want = PathBuf::from("/h/.cache/rust-mlx");
        assert_eq!(at(&[], Some("/h")).unwrap(), want);
        // Empty and relative values count as unset.
        let odd = [("MLX_CACHE_DIR", ""), ("XDG_CACHE_HOME", "relative")];
        assert_eq!(at(&odd, Some("/h")).unwrap(), want);
        let error = at(&[], None).unwrap_err();
        assert!(error.to_string().contains("MLX_CACHE_DIR"), "{error}");
    }

    #[test]
    fn switches_are_off_for_the_words_that_say_no() {
        for off in ["", "0", "false", "No", " off "] {
            assert!(!is_on(Some(off.into())), "{off:?}");
        }
        assert!(!is_on(None));
        assert!(is_on(Some("1".into())) && is_on(Some("yes".into())));
    }
}
