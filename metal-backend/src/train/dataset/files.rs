//! Finds the files of a data set in a directory, and the shards of a Parquet file.

use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};

/// The maximum number of shards of a Parquet file.
const MAX_SHARDS: usize = 10_000;

/// Whether a file contains examples: its name ends with `.jsonl` or `.parquet`.
#[must_use]
pub fn has_examples(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "jsonl") || is_parquet(path)
}

pub(super) fn is_parquet(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "parquet")
}

/// Whether the path is a file of examples.
#[must_use]
pub fn is_file(path: &Path) -> bool {
    has_examples(path) && path.is_file()
}

/// Returns a file of a data set: the path itself, or [`part`] if the path is a directory.
///
/// # Errors
/// `InvalidOption` if the directory has no such file; the errors of [`part`].
pub fn file_of(data: &Path, name: &str) -> Result<PathBuf> {
    if !data.is_dir() {
        return Ok(data.to_owned());
    }
    part(data, name)?.ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOption,
            format!("there is no {name}.jsonl, and no {name}.parquet"),
        )
        .with_path(data)
    })
}

/// Returns the file of a directory for `train`, `valid` or `test`: `NAME.jsonl`, `NAME.parquet`, or
/// the first shard, such as `NAME-00000-of-00003.parquet`. Parquet files for `valid` may be named
/// `validation`, as on the Hugging Face Hub.
///
/// # Errors
/// `InvalidOption` if several files match; `Io` if the directory cannot be read.
pub fn part(dir: &Path, name: &str) -> Result<Option<PathBuf>> {
    let mut found = Vec::new();
    let mut look = |file: String| {
        let path = dir.join(file);
        // `exists` would hide a dangling link or an inaccessible file, which must be errors.
        match path.symlink_metadata() {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            _ => found.push(path),
        }
    };
    look(format!("{name}.jsonl"));
    let names: &[&str] = match name {
        "valid" => &["valid", "validation"],
        _ => &[name],
    };
    for name in names {
        look(format!("{name}.parquet"));
    }
    let entries = std::fs::read_dir(dir).map_err(|e| {
        Error::new(ErrorKind::Io, "cannot read the directory")
            .with_path(dir)
            .with_source(e)
    })?;
    let mut first: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| numbered(path).is_some_and(|(stem, _, _)| names.contains(&stem.as_str())))
        .collect();
    first.sort();
    // Keeps only one file of each set of shards.
    first.dedup_by_key(|path| numbered(path).map(|(stem, _, count)| (stem, count)));
    found.append(&mut first);
    match found.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(one.clone())),
        [one, other, ..] => Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "there are {} and {}; leave one of them in the directory",
                shown(one),
                shown(other)
            ),
        )
        .with_path(dir)),
    }
}

fn shown(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Returns all shards if the path is the first shard of several; otherwise only the path.
///
/// # Errors
/// `InvalidOption` if a shard is missing.
#[cfg_attr(not(feature = "parquet"), allow(dead_code))]
pub(super) fn shards(path: &Path) -> Result<Vec<PathBuf>> {
    let Some((stem, 0, count)) = numbered(path) else {
        return Ok(vec![path.to_owned()]);
    };
    let all =
        (0..count).map(|n| path.with_file_name(format!("{stem}-{n:05}-of-{count:05}.parquet")));
    let all: Vec<PathBuf> = all.collect();
    match all.iter().find(|path| !path.is_file()) {
        None => Ok(all),
        Some(missing) => Err(Error::new(
            ErrorKind::InvalidOption,
            format!("{} is missing; it has {count} parts", shown(missing)),
        )),
    }
}

/// Returns name, number and count of a file name such as `train-00000-of-00003.parquet`.
fn numbered(path: &Path) -> Option<(String, usize, usize)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".parquet")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| -> Option<usize> {
        let is_number = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        is_number.then(|| text.parse().ok()).flatten()
    };
    let (number, count) = (digits(number)?, digits(count)?);
    let is_valid = number < count && count <= MAX_SHARDS;
    is_valid.then(|| (name.to_owned(), number, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_file_for_each_part() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str| std::fs::write(dir.path().join(name), "").unwrap();
        let part = |name: &str| {
            let found = super::part(dir.path(), name);
            found.map(|path| path.as_deref().map(shown))
        };
        assert_eq!(part("train").unwrap(), None);
        write("train-00000-of-00002.parquet");
        write("train-00001-of-00002.parquet");
        write("validation-00000-of-00001.parquet");
        write("training.parquet");
        write("test.parquet");
        let first = Some(String::from("train-00000-of-00002.parquet"));
        assert_eq!(part("train").unwrap(), first);
        let valid = Some(String::from("validation-00000-of-00001.parquet"));
        assert_eq!(part("valid").unwrap(), valid);
        assert_eq!(part("test").unwrap().as_deref(), Some("test.parquet"));
        write("test.jsonl");
        let error = part("test").unwrap_err().to_string();
        assert!(error.contains("test.jsonl and test.parquet"), "{error}");

        let all = shards(&dir.path().join("train-00000-of-00002.parquet")).unwrap();
        assert_eq!(all.len(), 2);
        let second = dir.path().join("train-00001-of-00002.parquet");
        assert_eq!(shards(&second).unwrap(), std::slice::from_ref(&second));
        std::fs::remove_file(&second).unwrap();
        let error = shards(&all[0]).unwrap_err().to_string();
        assert!(
            error.contains("train-00001-of-00002.parquet is missing"),
            "{error}"
        );
    }
}
