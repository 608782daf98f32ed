//! Hands what mlx-sys says about the native library on to dependents (`DEP_MLX_RS_CORE_*`), and
//! sets the cfg of its API level.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(mlx_c_0_5)");
    for key in ["VERSION", "MLX_VERSION", "LIB", "ROOT"] {
        if let Ok(value) = std::env::var(format!("DEP_MLXC_{key}")) {
            println!("cargo:{}={value}", key.to_lowercase());
        }
    }
    if std::env::var_os("DEP_MLXC_C_0_5").is_some() {
        println!("cargo:rustc-cfg=mlx_c_0_5");
    }
}
