//! Compiles `shim/`, the C++ code of this crate on top of MLX, into a separate static library. It
//! is small, so it is built into OUT_DIR each time instead of being cached.

use crate::env::Env;
use crate::mlx::Mlx;
use crate::mlxc::Source;

/// Compiles and links the shim. Its symbols need libmlx, which is linked after it.
pub fn build(env: &Env, source: &Source, mlx: &Mlx) -> Result<(), String> {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .compiler(&env.cxx)
        .warnings(false)
        .include(env.manifest_dir.join("shim"))
        .include(&source.dir)
        .include(mlx.root.join("include"))
        .file(env.manifest_dir.join("shim/graph.cpp"))
        .file(env.manifest_dir.join("shim/host_op.cpp"))
        .file(env.manifest_dir.join("shim/stalled.cpp"))
        .file(env.manifest_dir.join("shim/statics.cpp"))
        .file(env.manifest_dir.join("shim/vmap.cpp"))
        // `link.rs` prints the libraries in the required order.
        .cargo_metadata(false)
        // MLX's headers do not compile with the standard library's checks of a debug build.
        .debug(false)
        .opt_level(2);
    if let Some(oldest) = &env.oldest_macos {
        build.flag(format!("-mmacosx-version-min={oldest}"));
    }
    build
        .try_compile("rust_mlx_shim")
        .map_err(|e| format!("cannot compile the shim against MLX {}: {e}", mlx.version))
}
