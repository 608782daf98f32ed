//! Lets the module find the MLX library that it was built against, on macOS. On Linux mlx-sys looks
//! for it at run time. Sets the cfg `test_python` where tests may make Python environments.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(test_python)");
    println!("cargo:rerun-if-env-changed=MLX_TEST_PYTHON");
    if std::env::var_os("MLX_TEST_PYTHON").is_some_and(|value| !value.is_empty() && value != "0") {
        println!("cargo:rustc-cfg=test_python");
    }
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("macos") {
        return;
    }
    // The interpreter that loads the module has Python's functions.
    println!("cargo:rustc-cdylib-link-arg=-undefined");
    println!("cargo:rustc-cdylib-link-arg=dynamic_lookup");
    if let Ok(lib) = std::env::var("DEP_MLX_METAL_BACKEND_LIB") {
        for dir in ["@loader_path", &lib] {
            println!("cargo:rustc-cdylib-link-arg=-Wl,-rpath,{dir}");
        }
    }
}
