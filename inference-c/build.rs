//! Lets the library find the MLX library that it was built against, on macOS. On Linux mlx-sys
//! looks for it at run time.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("macos")
        && let Ok(lib) = std::env::var("DEP_MLX_METAL_BACKEND_LIB")
    {
        for dir in ["@loader_path", "@loader_path/../lib", &lib] {
            println!("cargo:rustc-link-arg=-Wl,-rpath,{dir}");
        }
    }
}
