//! Builds libmlxc.a with CMake, once for each set of inputs, into the cache.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::cache::{Cache, key, sha256_file};
use crate::env::Env;
use crate::mlx::Mlx;
use crate::mlxc::Source;
use crate::pip::run;
use crate::tools::Tools;

/// `-DNAME=value`.
pub fn define(name: &str, value: impl Into<OsString>) -> OsString {
    let mut text = OsString::from(format!("-D{name}="));
    text.push(value.into());
    text
}

/// The directory that holds libmlxc.a.
pub fn build(
    env: &Env,
    cache: &Cache,
    tools: &Tools,
    source: &Source,
    mlx: &Mlx,
) -> Result<PathBuf, String> {
    let shim = env.manifest_dir.join("shim/error_format.h");
    let compiler = run(Command::new(&env.cxx).arg("--version"))?;
    let name = format!(
        "mlxc-{}",
        key(&[
            &source.hash,
            &mlx.version,
            &mlx.root.to_string_lossy(),
            &sha256_file(&shim)?,
            &compiler,
            &env.target,
            "position independent",
        ])
    );
    cache.dir(&name, |dir| {
        let work = env.out_dir.join("mlxc-build");
        if work.exists() {
            fs::remove_dir_all(&work).map_err(|e| format!("{}: {e}", work.display()))?;
        }
        // The sources' own directory comes first so that the shim finds mlx-c's header while CMake
        // still tries out the compiler.
        let flags = format!(
            "-I\"{}\" -include \"{}\"",
            source.dir.display(),
            shim.display()
        );
        run(Command::new(&tools.cmake)
            .args(["-G", "Ninja", "-S"])
            .arg(&source.dir)
            .arg("-B")
            .arg(&work)
            .arg(define("CMAKE_MAKE_PROGRAM", &tools.ninja))
            .arg(define("CMAKE_CXX_COMPILER", &env.cxx))
            .arg(define("CMAKE_CXX_FLAGS", flags))
            .arg(define("CMAKE_BUILD_TYPE", "Release"))
            .arg(define("BUILD_SHARED_LIBS", "OFF"))
            // It becomes part of a shared library on Linux.
            .arg(define("CMAKE_POSITION_INDEPENDENT_CODE", "ON"))
            .arg(define("MLX_C_BUILD_EXAMPLES", "OFF"))
            .arg(define("MLX_C_USE_SYSTEM_MLX", "ON"))
            .arg(define("MLX_DIR", mlx.root.join("share/cmake/MLX"))))
        .map_err(|e| format!("cannot configure mlx-c against MLX {}:\n{e}", mlx.version))?;
        run(Command::new(&tools.cmake).arg("--build").arg(&work))
            .map_err(|e| format!("cannot build mlx-c against MLX {}:\n{e}", mlx.version))?;
        fs::copy(work.join("libmlxc.a"), dir.join("libmlxc.a"))
            .map_err(|e| format!("the build left no libmlxc.a: {e}"))?;
        let _ = fs::remove_dir_all(&work);
        Ok(())
    })
}
