//! Files that appear under their names when they are whole.

use std::io::Write;
use std::path::Path;

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
