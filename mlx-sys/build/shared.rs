//! Links mlx-c and the shim into one shared library, which the crate embeds and loads at the first
//! call (`src/library.rs`).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::env::Env;
use crate::mlx::Mlx;
use crate::pip::run;

/// The file that `src/library.rs` embeds.
const NAME: &str = "librust_mlx_c.so";

/// Links the shared library from libmlxc.a in `library` and the shim in OUT_DIR. Passes to the
/// crate the library's path, and the directory of MLX's own library.
pub fn link(env: &Env, mlx: &Mlx, library: &Path) -> Result<(), String> {
    let out = env.out_dir.join(NAME);
    run(Command::new(&env.cxx)
        .arg("-shared")
        .arg("-o")
        .arg(&out)
        .arg("-Wl,--whole-archive")
        .arg(env.out_dir.join("librust_mlx_shim.a"))
        .arg(library.join("libmlxc.a"))
        .arg("-Wl,--no-whole-archive")
        .arg("-L")
        .arg(mlx.lib())
        .arg("-lmlx")
        // libmlx finds its own dependencies at run time, so the linker does not need them.
        .arg("-Wl,--allow-shlib-undefined")
        .arg("-Wl,--strip-debug"))
    .map_err(|e| format!("cannot link mlx-c against MLX {}:\n{e}", mlx.version))?;
    emit(&out, mlx)
}

/// Creates an empty file in place of the library, for builds without the native library.
pub fn none(env: &Env) -> Result<(), String> {
    let out = env.out_dir.join(NAME);
    std::fs::write(&out, []).map_err(|e| format!("cannot write {}: {e}", out.display()))?;
    emit(
        &out,
        &Mlx {
            root: PathBuf::new(),
            package: String::new(),
            pin: None,
            libraries: Vec::new(),
            version: String::new(),
            spare: None,
        },
    )
}

fn emit(out: &Path, mlx: &Mlx) -> Result<(), String> {
    println!("cargo:rustc-cfg=mlx_loaded");
    println!("cargo:rustc-env=MLX_SYS_EMBEDDED={}", out.display());
    println!("cargo:rustc-env=MLX_SYS_MLX_VERSION={}", mlx.version);
    emit_package("", Some(mlx));
    emit_package("_SPARE", mlx.spare.as_deref());
    Ok(())
}

/// Passes the settings of a package to `src/library.rs`. They are empty without a package.
fn emit_package(suffix: &str, mlx: Option<&Mlx>) {
    let set = |name: &str, value: &str| println!("cargo:rustc-env=MLX_SYS_{name}{suffix}={value}");
    let pin = mlx.and_then(|mlx| mlx.pin.as_ref());
    let libraries = mlx.into_iter().flat_map(|mlx| &mlx.libraries);
    let libraries: Vec<_> = libraries
        .map(|library| format!("{} {}", library.directory, library.pin.join(" ")))
        .collect();
    set("PACKAGE", mlx.map_or("", |mlx| &mlx.package));
    set("PIN", &pin.map(|pin| pin.join(" ")).unwrap_or_default());
    set("LIBRARIES", &libraries.join(";"));
    let root = mlx.map(|mlx| mlx.root.to_string_lossy());
    set("PACKAGE_DIR", &root.unwrap_or_default());
}
