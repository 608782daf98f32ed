//! The module in Python: builds a wheel of what Cargo built, installs it into an empty environment
//! without a network, and runs `python/calls.py` there on tiny models.

#![cfg(feature = "metal-backend")]

use std::path::{Path, PathBuf};
use std::process::Command;

fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The module's library: Cargo builds it before this test, beside it.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let name = format!("librust_mlx_python.{}", std::env::consts::DLL_EXTENSION);
    test.parent().unwrap().join(name)
}

fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?} {:?}\n{out}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    out
}

/// An environment with the wheel.
fn installed(dir: &Path) -> PathBuf {
    let wheel = run(Command::new("python3")
        .arg(crate_dir().join("tests/python/wheel.py"))
        .arg(crate_dir().join("python"))
        .arg(library())
        .args([env!("CARGO_PKG_VERSION"), dir.to_str().unwrap()]));
    let venv = dir.join("venv");
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv));
    let python = venv.join("bin/python");
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--no-index"])
        .args(["--disable-pip-version-check", wheel.trim()]));
    python
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "makes a Python environment: set MLX_TEST_PYTHON=1"
)]
fn the_module_works_in_an_empty_environment() {
    let dir = tempfile::tempdir().unwrap();
    let python = installed(dir.path());
    let mut command = Command::new(&python);
    command
        .arg(crate_dir().join("tests/python/calls.py"))
        .arg(crate_dir().parent().unwrap().join("tests/fixtures"))
        .current_dir(dir.path())
        .env("MLX_CACHE_DIR", dir.path().join("cache"))
        .env("MLX_OFFLINE", "1")
        .env("HF_HUB_CACHE", dir.path().join("hub"));
    let out = run(&mut command);
    assert!(out.ends_with("14 checks passed\n"), "{out}");
}

/// The stub of the native part must have its classes, methods and functions.
#[test]
fn the_stub_has_what_the_code_exports() {
    let read = |name: &str| std::fs::read_to_string(crate_dir().join(name)).unwrap();
    let stub = read("python/rust_mlx/_native.pyi");
    let mut found = 0;
    for file in ["src/model.rs", "src/stream.rs"] {
        let code = read(file);
        let mut exported = false;
        for line in code.lines() {
            match line {
                "#[pymethods]" | "#[pyfunction]" => exported = true,
                "}" => exported = false,
                _ => {}
            }
            let Some((_, rest)) = line.split_once("fn ").filter(|_| exported) else {
                continue;
            };
            let name = rest.split(['(', '<']).next().unwrap();
            assert!(stub.contains(&format!("def {name}(")), "{file}: {name}");
            found += 1;
        }
    }
    assert_eq!(found, stub.matches("def ").count());
}
