//! Hands the directory of libmlx on to dependents as `DEP_MLX_METAL_BACKEND_LIB`. A program's build
//! script can then make the program find it when run by hand.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(lib) = std::env::var("DEP_MLX_RS_CORE_LIB") {
        println!("cargo:lib={lib}");
    }
}
