//! Lets the programs of this package find the MLX library they were built against on macOS: first
//! beside themselves, then in the directory of mlx-sys. On Linux mlx-sys looks for it at run time.
//!
//! Sets the cfg `test_python` where tests may install Python packages, and `test_real_models` where
//! there are weights of real models: a test is ignored, and said to be, at compile time only.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(test_python)");
    let is_set = |name: &str| {
        println!("cargo:rerun-if-env-changed={name}");
        std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0")
    };
    if is_set("MLX_TEST_PYTHON") | is_set("MLXLM_TEST_PYTHON") {
        println!("cargo:rustc-cfg=test_python");
    }
    println!("cargo:rustc-check-cfg=cfg(test_real_models)");
    if is_set("RUST_MLX_REAL_MODELS") {
        println!("cargo:rustc-cfg=test_real_models");
    }
    if let Ok(version) = std::env::var("DEP_MLX_RS_CORE_VERSION") {
        println!("cargo:rustc-env=RUST_MLX_MLX_C_VERSION={version}");
    }
    // Absent in builds without the MLX backend and in docs builds.
    let Ok(lib) = std::env::var("DEP_MLX_RS_CORE_LIB") else {
        return;
    };
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("macos") {
        return;
    }
    // `mlx self install` copies from there.
    println!("cargo:rustc-env=RUST_MLX_LINKED_LIBRARY={lib}");
    for dir in ["@loader_path", "@loader_path/../lib", &lib] {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{dir}");
    }
}
