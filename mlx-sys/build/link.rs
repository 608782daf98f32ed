//! Tells Cargo and dependent crates how to link, and programs where to find libmlx when they run.

use std::path::Path;

use crate::env::Env;
use crate::mlx::Mlx;
use crate::mlxc::Source;
use crate::pins::{Version, levels};
use crate::shared;

/// Prints the link lines and the metadata (`DEP_MLXC_*` in dependents).
pub fn emit(env: &Env, source: &Source, mlx: &Mlx, library: &Path) -> Result<(), String> {
    if env.linux() {
        shared::link(env, mlx, library)?;
    } else {
        link_statically(env, mlx, library)?;
    }
    emit_api(source.version);
    println!("cargo:mlx_version={}", mlx.version);
    println!("cargo:include={}", source.dir.display());
    println!("cargo:root={}", mlx.root.display());
    // This is the persistent directory, not the one in OUT_DIR, because an installed program
    // outlives the build.
    println!("cargo:lib={}", mlx.lib().display());
    Ok(())
}

/// Links mlx-c and the shim statically into each program, which then needs libmlx to start.
fn link_statically(env: &Env, mlx: &Mlx, library: &Path) -> Result<(), String> {
    // Cargo adds link directories inside OUT_DIR to the library path of `cargo run` and `cargo
    // test`, in every dependent crate. So OUT_DIR gets a link to MLX. The link is to the directory,
    // because libmlx finds its metallib relative to its own location.
    let run_root = env.out_dir.join("mlx");
    link_directory(&mlx.root, &run_root)?;
    for dir in [library, &run_root.join("lib"), &env.out_dir] {
        println!("cargo:rustc-link-search=native={}", dir.display());
    }
    println!("cargo:rustc-link-lib=static=rust_mlx_shim");
    println!("cargo:rustc-link-lib=static=mlxc");
    println!("cargo:rustc-link-lib=dylib=mlx");
    println!("cargo:rustc-link-lib=dylib=c++");
    for framework in ["Foundation", "Metal", "Accelerate"] {
        println!("cargo:rustc-link-lib=framework={framework}");
    }
    Ok(())
}

/// Emits the version of mlx-c as `DEP_MLXC_VERSION`, and its API levels. Each level becomes a cfg
/// `mlx_c_*` in this crate, and `DEP_MLXC_C_*` for dependents.
pub fn emit_api(version: Version) {
    let (major, minor, patch) = version;
    println!("cargo:version={major}.{minor}.{patch}");
    for level in levels(version) {
        println!("cargo:rustc-cfg=mlx_c_{level}");
        println!("cargo:c_{level}=1");
    }
}

fn link_directory(target: &Path, link: &Path) -> Result<(), String> {
    let fail = |e: std::io::Error| format!("cannot link {} in OUT_DIR: {e}", target.display());
    match std::fs::symlink_metadata(link) {
        Ok(_) => std::fs::remove_file(link).map_err(fail)?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(fail(e)),
    }
    #[cfg(unix)]
    return std::os::unix::fs::symlink(target, link).map_err(fail);
    #[cfg(not(unix))]
    return Err(String::from("MLX has no build for this platform"));
}
