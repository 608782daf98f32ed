//! The bridge script on disk. It is embedded in this library, written once to a private directory,
//! and deleted with its last user. Its source is `bridge.py`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use inference::{Error, ErrorKind, Result};
use parking_lot::Mutex;

const BRIDGE: &str = include_str!("bridge.py");

/// A script that Python can read.
#[derive(Debug)]
pub enum Script {
    /// The embedded script, in a directory that is deleted when this value is dropped.
    Extracted {
        /// The directory, which is removed when dropped.
        dir: tempfile::TempDir,
    },
    /// A file of the caller.
    Given(PathBuf),
}

/// The script file that all processes share while any of them needs it.
static SHARED: Mutex<Weak<Script>> = Mutex::new(Weak::new());

impl Script {
    /// The script to run: `given`, otherwise the embedded script.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if it cannot be written.
    pub fn get(given: Option<&Path>) -> Result<Arc<Self>> {
        if let Some(path) = given {
            return Ok(Arc::new(Script::Given(path.to_owned())));
        }
        let mut shared = SHARED.lock();
        // A cleaner of temporary directories may have deleted the file.
        if let Some(script) = shared.upgrade().filter(|s| s.path().is_file()) {
            return Ok(script);
        }
        let script = Arc::new(extract().map_err(|e| {
            Error::new(
                ErrorKind::Io,
                format!("cannot write the bridge script to a temporary directory: {e}"),
            )
            .with_path(std::env::temp_dir())
            .with_source(e)
        })?);
        *shared = Arc::downgrade(&script);
        Ok(script)
    }

    /// The path of the script.
    pub fn path(&self) -> PathBuf {
        match self {
            Script::Extracted { dir } => dir.path().join("bridge.py"),
            Script::Given(path) => path.clone(),
        }
    }
}

fn extract() -> std::io::Result<Script> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("mlxlm-bridge-");
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
        builder.permissions(std::fs::Permissions::from_mode(0o700));
        options.mode(0o600);
    }
    let dir = builder.tempdir()?;
    let mut file = options.open(dir.path().join("bridge.py"))?;
    file.write_all(BRIDGE.as_bytes())?;
    Ok(Script::Extracted { dir })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_private_file_is_shared_and_removed_with_its_last_user() {
        let (a, b) = (Script::get(None).unwrap(), Script::get(None).unwrap());
        assert_eq!(a.path(), b.path());
        assert_eq!(std::fs::read_to_string(a.path()).unwrap(), BRIDGE);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&a.path()), 0o600);
            assert_eq!(mode(a.path().parent().unwrap()), 0o700);
        }
        let path = a.path();
        drop(a);
        assert!(path.is_file());
        drop(b);
        assert!(!path.exists() && !path.parent().unwrap().exists());
        // If a cleaner of temporary directories deleted the script, it must be written again.
        let again = Script::get(None).unwrap();
        assert!(again.path().is_file());
        std::fs::remove_file(again.path()).unwrap();
        assert!(Script::get(None).unwrap().path().is_file());
    }
}
