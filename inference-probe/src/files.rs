//! Files that appear under their names when they are whole, and what tells a model's files from
//! others.

use std::fs::File;
use std::io::{Read as _, Write};
use std::path::Path;

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::error::{Error, Result};

pub(crate) fn temporary(path: &Path) -> Result<NamedTempFile> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    NamedTempFile::new_in(dir.unwrap_or(Path::new("."))).map_err(|e| Error::io(path, e))
}

pub(crate) fn persist(file: NamedTempFile, path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = std::fs::Permissions::from_mode(0o644);
    file.as_file()
        .set_permissions(mode)
        .and_then(|()| file.as_file().sync_all())
        .map_err(|e| Error::io(path, e))?;
    file.persist(path).map_err(|e| Error::io(path, e.error))?;
    Ok(())
}

/// Writes a file whole or not at all.
///
/// # Errors
/// [`Error::Io`].
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = temporary(path)?;
    file.write_all(bytes).map_err(|e| Error::io(path, e))?;
    persist(file, path)
}

/// What tells a model from others, in hexadecimal: SHA-256 of the name, the size and the first MiB
/// of each of its safetensors, GGUF and JSON files, by name. A hash of all bytes would take minutes.
/// `model` is a directory or a file.
///
/// # Errors
/// [`Error::Io`].
pub fn identity(model: &Path) -> Result<String> {
    let mut files = vec![model.to_owned()];
    if model.is_dir() {
        files = std::fs::read_dir(model)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
            .map_err(|e| Error::io(model, e))?;
        files.retain(|file| {
            let kind = file.extension().and_then(|e| e.to_str());
            matches!(kind, Some("safetensors" | "gguf" | "json"))
        });
        files.sort();
    }
    let mut hash = Sha256::new();
    for file in files {
        let head = || -> std::io::Result<(u64, Vec<u8>)> {
            let opened = File::open(&file)?;
            let size = opened.metadata()?.len();
            let mut head = Vec::new();
            opened.take(1 << 20).read_to_end(&mut head)?;
            Ok((size, head))
        };
        let (size, head) = head().map_err(|e| Error::io(&file, e))?;
        hash.update(file.file_name().unwrap_or_default().as_encoded_bytes());
        hash.update([0]);
        hash.update(size.to_le_bytes());
        hash.update(head);
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}
