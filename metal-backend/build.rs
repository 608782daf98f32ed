//! Passes the directory of libmlx to dependents as `DEP_MLX_METAL_BACKEND_LIB`. A program's build
//! script can use it so that the program finds libmlx when it is started without cargo.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(lib) = std::env::var("DEP_MLX_RS_CORE_LIB") {
        println!("cargo:lib={lib}");
    }
}
