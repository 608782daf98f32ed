//! The cache of provisioned files. It is outside the source tree, its entries are complete or
//! absent, and concurrent builds can use it.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::env::Env;

/// The cache directory, locked by this build.
pub struct Cache {
    pub root: PathBuf,
    _lock: File,
}

impl Cache {
    pub fn open(env: &Env) -> Result<Self, String> {
        let root = env.cache_dir.clone().ok_or(
            "there is no place for provisioned files: set MLX_SYS_CACHE_DIR, XDG_CACHE_HOME or HOME",
        )?;
        let fail = |e| format!("cannot use the cache directory {}: {e}", root.display());
        fs::create_dir_all(&root).map_err(fail)?;
        let lock = File::create(root.join(".lock")).map_err(fail)?;
        lock.lock().map_err(fail)?;
        Ok(Self { root, _lock: lock })
    }

    /// The directory `name`. If it is missing, `make` first creates it under a temporary name.
    pub fn dir(
        &self,
        name: &str,
        make: impl FnOnce(&Path) -> Result<(), String>,
    ) -> Result<PathBuf, String> {
        let done = self.root.join(name);
        if done.is_dir() {
            return Ok(done);
        }
        let temporary = self.root.join(format!(".{name}.partial"));
        let fail = |e| format!("cannot write {}: {e}", temporary.display());
        if temporary.exists() {
            // A killed build left it here. The lock guarantees that no other build uses it.
            fs::remove_dir_all(&temporary).map_err(fail)?;
        }
        fs::create_dir_all(&temporary).map_err(fail)?;
        let made = make(&temporary);
        if made.is_err() {
            let _ = fs::remove_dir_all(&temporary);
        }
        made?;
        fs::rename(&temporary, &done).map_err(fail)?;
        Ok(done)
    }
}

fn hex(digest: impl AsRef<[u8]>) -> String {
    digest.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

/// The SHA-256 of a file.
pub fn sha256_file(path: &Path) -> Result<String, String> {
    let fail = |e| format!("cannot read {}: {e}", path.display());
    let mut file = File::open(path).map_err(fail)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer).map_err(fail)? {
            0 => return Ok(hex(hash.finalize())),
            n => hash.update(&buffer[..n]),
        }
    }
}

/// The SHA-256 of the names and contents of all files below `dir`, sorted by name.
pub fn sha256_tree(dir: &Path) -> Result<String, String> {
    let mut files = Vec::new();
    list(dir, &mut files)?;
    files.sort();
    let mut hash = Sha256::new();
    for path in files {
        let name = path
            .strip_prefix(dir)
            .unwrap_or(&path)
            .to_string_lossy()
            .replace('\\', "/");
        hash.update(format!("{name}\0{}\n", sha256_file(&path)?));
    }
    Ok(hex(hash.finalize()))
}

fn list(dir: &Path, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let fail = |e| format!("cannot list {}: {e}", dir.display());
    for entry in fs::read_dir(dir).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.file_name().is_some_and(|n| n == ".git") {
            continue;
        }
        if path.is_dir() {
            list(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// A short name that identifies a set of inputs.
pub fn key(parts: &[&str]) -> String {
    let mut text = hex(Sha256::digest(parts.join("\0")));
    text.truncate(16);
    text
}
