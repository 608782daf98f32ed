//! Passes mlx-sys's information about the native library to dependents (`DEP_MLX_RS_CORE_*`), and
//! sets the cfg of its API level.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(mlx_c_0_5, mlx_c_0_7)");
    for key in ["VERSION", "MLX_VERSION", "LIB", "ROOT"] {
        if let Ok(value) = std::env::var(format!("DEP_MLXC_{key}")) {
            println!("cargo:{}={value}", key.to_lowercase());
        }
    }
    for level in ["0_5", "0_7"] {
        if std::env::var_os(format!("DEP_MLXC_C_{level}")).is_some() {
            println!("cargo:rustc-cfg=mlx_c_{level}");
        }
    }
}
