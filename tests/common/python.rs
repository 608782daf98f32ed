//! Provides a Python interpreter with mlx-lm for tests. It is installed once in the build
//! directory, with the versions pinned in `tools/golden`.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use sha2::{Digest, Sha256};

/// The environment variable with the path of an interpreter that already has the pinned packages.
pub const VARIABLE: &str = "MLXLM_TEST_PYTHON";

static PYTHON: LazyLock<PathBuf> = LazyLock::new(|| match std::env::var_os(VARIABLE) {
    Some(python) if !python.is_empty() => python.into(),
    _ => install(),
});

/// The interpreter with mlx-lm. In a new build directory, the first call takes about a minute, and
/// needs pip and a package index.
pub fn with_mlx_lm() -> &'static Path {
    &PYTHON
}

/// The interpreter that also has lm-eval's harness. The harness needs 600 MB more disk space.
pub fn with_lm_eval() -> &'static Path {
    static INSTALLED: LazyLock<()> = LazyLock::new(|| {
        let python = with_mlx_lm();
        if std::env::var_os(VARIABLE).is_some_and(|python| !python.is_empty()) {
            return;
        }
        let pins = ["requirements.txt", "requirements-lm-eval.txt"].map(pins);
        let _lock = locked("venv.lock");
        let stamp = kept().join("venv/lm-eval.sha256");
        let wanted = digest(&pins[1]);
        if std::fs::read_to_string(&stamp).is_ok_and(|is| is == wanted) {
            return;
        }
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "install", "--quiet"]);
        // pip receives both lists, so that it does not change versions of the first list.
        for pins in &pins {
            pip.arg("--requirement").arg(pins);
        }
        run(&mut pip);
        std::fs::write(&stamp, wanted).unwrap();
    });
    LazyLock::force(&INSTALLED);
    with_mlx_lm()
}

/// The path of a list of pins in `tools/golden`.
fn pins(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tools/golden")
        .join(name)
}

/// The digest that marks a list as installed.
fn digest(pins: &Path) -> String {
    let digest = Sha256::digest(std::fs::read(pins).unwrap());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A directory inside the build directory for files that tests make once and keep.
pub fn kept() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("mlx-lm")
}

/// Runs a script of `tools` with this interpreter.
pub fn run_tool(script: &str, args: &[&Path]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tools")
        .join(script);
    let mut command = Command::new(with_mlx_lm());
    command.arg(&script).args(args);
    run(&mut command);
}

/// The first model in mlx-lm's format. It is converted once.
pub fn first_model_converted(gguf: &Path) -> PathBuf {
    let _lock = locked("first-model.lock");
    let dir = kept().join("first-model");
    if !dir.is_dir() {
        run_tool("compare/convert_gguf.py", &[gguf, &dir]);
    }
    dir
}

/// Locks a file until the result is dropped. So concurrent test programs do not disturb each other.
pub fn locked(name: &str) -> File {
    std::fs::create_dir_all(kept()).unwrap();
    let file = File::create(kept().join(name)).unwrap();
    file.lock().unwrap();
    file
}

fn install() -> PathBuf {
    let pins = pins("requirements.txt");
    let wanted = digest(&pins);
    let _lock = locked("venv.lock");
    let room = kept().join("venv");
    let (python, stamp) = (room.join("bin/python"), room.join("requirements.sha256"));
    if std::fs::read_to_string(&stamp).is_ok_and(|is| is == wanted) {
        return python;
    }
    run(Command::new("python3")
        .args(["-m", "venv", "--clear"])
        .arg(&room));
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--requirement"]);
    run(pip.arg(&pins));
    std::fs::write(&stamp, wanted).unwrap();
    python
}

fn run(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(
        output.status.success(),
        "{command:?}:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
