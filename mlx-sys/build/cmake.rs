//! Builds libmlxc.a with the crate `cmake`, once per set of inputs, into the cache.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, key, sha256_file};
use crate::env::Env;
use crate::mlx::Mlx;
use crate::mlxc::Source;
use crate::pip::run;
use crate::tools::Tools;

/// The configuration of a release build of the project in `source`, with Ninja, below `work`.
pub fn project(tools: &Tools, source: &Path, work: &Path) -> ::cmake::Config {
    let mut config = ::cmake::Config::new(source);
    config
        .generator("Ninja")
        .define("CMAKE_MAKE_PROGRAM", &tools.ninja)
        .profile("Release")
        .out_dir(work);
    config
}

/// Configures and builds the project, and returns the build directory. The output goes to this
/// build script's standard output and error, which Cargo prints on failure.
pub fn make(tools: &Tools, config: &mut ::cmake::Config) -> Result<PathBuf, String> {
    // The crate `cmake` reads the program only from this variable. On a machine without CMake, the
    // program is in the cache. SAFETY: `set_var` requires that no other thread reads or writes the
    // environment at the same time. This build script starts no thread, and every earlier library
    // call has joined its own threads.
    unsafe { std::env::set_var("CMAKE", &tools.cmake) };
    // The crate panics when CMake fails. `main` prints the message instead, together with a remedy.
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let built = catch_unwind(AssertUnwindSafe(|| config.build()));
    set_hook(hook);
    let dir = built.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(|text| text.trim());
        format!(
            "{}\nCMake's output is above.",
            text.unwrap_or("CMake failed")
        )
    })?;
    Ok(dir.join("build"))
}

/// Builds libmlxc.a, and returns the directory that contains it.
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
            env.oldest_macos.as_deref().unwrap_or_default(),
            "position independent, one unit",
        ])
    );
    cache.dir(&name, |dir| {
        let work = env.out_dir.join("mlxc-build");
        // The directory of mlx-c's sources comes first, so that the shim finds mlx-c's header while
        // CMake still tests the compiler.
        let flags = format!(
            "-I\"{}\" -include \"{}\"",
            source.dir.display(),
            shim.display()
        );
        let compile = |as_one_unit: bool| {
            if work.exists() {
                fs::remove_dir_all(&work).map_err(|e| format!("{}: {e}", work.display()))?;
            }
            let mut config = project(tools, &source.dir, &work);
            config
                .define("CMAKE_CXX_COMPILER", &env.cxx)
                // The flags are defined, not added. Otherwise the crate would include CXXFLAGS,
                // which are not a part of the cache key.
                .define("CMAKE_CXX_FLAGS", &flags)
                .define("BUILD_SHARED_LIBS", "OFF")
                // On Linux, the library becomes a part of a shared library.
                .define("CMAKE_POSITION_INDEPENDENT_CODE", "ON")
                .define("CMAKE_UNITY_BUILD", if as_one_unit { "ON" } else { "OFF" })
                .define("CMAKE_UNITY_BUILD_BATCH_SIZE", "0")
                .define("MLX_C_BUILD_EXAMPLES", "OFF")
                .define("MLX_C_USE_SYSTEM_MLX", "ON")
                .define("MLX_DIR", mlx.root.join("share/cmake/MLX"))
                .build_target("mlxc");
            if let Some(oldest) = &env.oldest_macos {
                config.define("CMAKE_OSX_DEPLOYMENT_TARGET", oldest);
            }
            make(tools, &mut config)
        };
        // MLX's headers take most of the time of each file. One unit of all files parses them once,
        // and takes a fifth of the time. A user's checkout may define a name in two files, which
        // only separate units permit.
        let built = compile(true)
            .or_else(|_| compile(false))
            .map_err(|e| format!("cannot build mlx-c against MLX {}:\n{e}", mlx.version))?;
        fs::copy(built.join("libmlxc.a"), dir.join("libmlxc.a"))
            .map_err(|e| format!("the build left no libmlxc.a: {e}"))?;
        let _ = fs::remove_dir_all(&work);
        Ok(())
    })
}
