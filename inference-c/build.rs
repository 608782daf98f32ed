//! On macOS, adds the rpaths with which this library finds libmlx at run time: its own directory,
//! `../lib`, and the directory of the libmlx it was built with. On Linux, mlx-sys finds libmlx at
//! run time.

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
