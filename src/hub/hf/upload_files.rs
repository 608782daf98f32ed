//! Selects the files of a directory that an upload publishes.

use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};

use super::MAX_FILES;

/// A file to upload.
pub(super) struct Upload {
    /// The path after following links.
    pub path: PathBuf,
    /// The name in the repository.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
}

/// The error for a file that cannot be read.
pub(super) fn unread(path: &Path, e: std::io::Error) -> Error {
    Error::new(ErrorKind::Io, "cannot read the file")
        .with_path(path)
        .with_source(e)
}

/// The files to upload: one file, or a directory's files sorted by name. A link may point to
/// another file of the directory or, in a Hugging Face cache, to a blob of this model. A link to
/// another place is refused. Entries that are neither files nor directories are refused.
pub(super) fn files(path: &Path) -> Result<Vec<Upload>> {
    let mut files = Vec::new();
    if path.is_dir() {
        let allowed = places(path)?;
        for entry in std::fs::read_dir(path).map_err(|e| unread(path, e))? {
            let path = entry.map_err(|e| unread(path, e))?.path();
            files.extend(upload(&path, &allowed)?);
        }
    } else {
        files.extend(upload(path, &[])?);
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    if files.is_empty() || files.len() > MAX_FILES {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "there are {} files to upload; there must be 1 to {MAX_FILES}",
                files.len()
            ),
        )
        .with_path(path));
    }
    Ok(files)
}

/// The directories in which files may be: the directory itself and, for a snapshot in a Hugging
/// Face cache, the blobs.
fn places(dir: &Path) -> Result<Vec<PathBuf>> {
    let real = dir.canonicalize().map_err(|e| unread(dir, e))?;
    let mut places = vec![real.clone()];
    let snapshots = real.parent();
    if let Some(model) = snapshots
        .filter(|dir| dir.file_name().is_some_and(|name| name == "snapshots"))
        .and_then(Path::parent)
        && let Ok(blobs) = model.join("blobs").canonicalize()
        && blobs.parent() == Some(model)
    {
        places.push(blobs);
    }
    Ok(places)
}

/// The file at `path`; `None` for a directory or a file that is not uploaded. If `allowed` is not
/// empty, the resolved file must be in one of these directories.
fn upload(path: &Path, allowed: &[PathBuf]) -> Result<Option<Upload>> {
    let refused = |why: &str| Err(Error::new(ErrorKind::InvalidOption, why).with_path(path));
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(name) = name.filter(|name| !stays(name)) else {
        return Ok(None);
    };
    // The upload reads the resolved path, even if the link changes later.
    let real = path.canonicalize().map_err(|e| unread(path, e))?;
    if !allowed.is_empty() && !allowed.iter().any(|dir| real.starts_with(dir)) {
        return refused(
            "a link that leads out of the directory is not followed, so that nothing is published \
             by mistake; copy the file, or remove the link",
        );
    }
    let facts = std::fs::metadata(&real).map_err(|e| unread(path, e))?;
    if facts.is_dir() {
        return Ok(None);
    }
    if !facts.is_file() {
        return refused("not a regular file: pipes, sockets and devices cannot be uploaded");
    }
    Ok(Some(Upload {
        name: name.to_owned(),
        size: facts.len(),
        path: real,
    }))
}

/// Whether a file is not uploaded, because it is hidden or only resumed training needs it.
fn stays(name: &str) -> bool {
    let numbered = name
        .strip_suffix("_adapters.safetensors")
        .is_some_and(|n| n.len() == 7 && n.bytes().all(|b| b.is_ascii_digit()));
    name.starts_with('.') || name == "training_state.safetensors" || numbered
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn names(path: &Path) -> Vec<String> {
        let files = files(path).unwrap();
        files.into_iter().map(|file| file.name).collect()
    }

    #[test]
    fn links_stay_inside_and_special_files_are_refused() {
        let place = tempfile::tempdir().unwrap();
        let secret = place.path().join("secret");
        std::fs::write(&secret, "key").unwrap();
        let dir = place.path().join("model");
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(dir.join("sub")).unwrap();
        std::fs::write(dir.join("config.json"), "{}").unwrap();
        symlink("config.json", dir.join("again.json")).unwrap();
        // A hidden file is not uploaded, whatever its target.
        symlink(&secret, dir.join(".hidden")).unwrap();
        assert_eq!(names(&dir), ["again.json", "config.json"]);

        let link = dir.join("model.safetensors");
        for target in [secret.as_path(), Path::new("../secret"), place.path()] {
            symlink(target, &link).unwrap();
            let why = files(&dir).err().unwrap().to_string();
            assert!(
                why.contains("model.safetensors") && why.contains("copy"),
                "{why}"
            );
            std::fs::remove_file(&link).unwrap();
        }
        symlink("absent", &link).unwrap();
        let why = files(&dir).err().unwrap().to_string();
        assert!(why.contains("model.safetensors"), "{why}");
        std::fs::remove_file(&link).unwrap();

        let made = std::process::Command::new("mkfifo").arg(&link).status();
        assert!(made.unwrap().success());
        let why = files(&dir).err().unwrap().to_string();
        assert!(
            why.contains("model.safetensors") && why.contains("regular"),
            "{why}"
        );
        assert!(files(&link).is_err());
        // If the caller names a link, the file is uploaded under the link's name, not under its
        // target's.
        let one = place.path().join("one.gguf");
        symlink(&secret, &one).unwrap();
        assert_eq!(names(&one), ["one.gguf"]);
    }

    #[test]
    fn a_snapshot_of_the_cache_has_its_files_in_blobs() {
        let place = tempfile::tempdir().unwrap();
        let model = place.path().join("models--a--b");
        let snapshot = model.join("snapshots").join("0123");
        for dir in [&snapshot, &model.join("blobs")] {
            std::fs::create_dir_all(dir).unwrap();
        }
        std::fs::write(model.join("blobs/e1"), "{}").unwrap();
        symlink("../../blobs/e1", snapshot.join("config.json")).unwrap();
        assert_eq!(names(&snapshot), ["config.json"]);
        std::fs::write(model.join("refs"), "x").unwrap();
        symlink("../../refs", snapshot.join("leak.json")).unwrap();
        assert!(files(&snapshot).is_err());
    }
}
