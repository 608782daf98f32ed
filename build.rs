//! On macOS, adds the rpaths with which the programs of this package find the MLX library they were
//! built against: the program's directory, `../lib`, and the directory of mlx-sys. On Linux,
//! mlx-sys finds the library at run time.
//!
//! Sets the cfg `test_python` if tests may install Python packages, and `test_real_models` if the
//! environment names real models. The tests that need them are otherwise ignored. Only at compile
//! time can a test be marked so that the test report lists it as ignored.

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
    // `mlx self install` copies the library from this directory.
    println!("cargo:rustc-env=RUST_MLX_LINKED_LIBRARY={lib}");
    for dir in ["@loader_path", "@loader_path/../lib", &lib] {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{dir}");
    }
}
