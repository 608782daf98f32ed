//! The versions of linked libraries, which `--version` shows beside the program's own version.

/// The versions of the linked libraries, one per line.
#[cfg(feature = "mlx-backend")]
pub fn long() -> String {
    let mlx = rust_mlx::mlx::mlx_version().unwrap_or_else(|_| String::from("unknown"));
    format!(
        "{}\nMLX {mlx}\nmlx-c {}\nkernels {}",
        env!("CARGO_PKG_VERSION"),
        option_env!("RUST_MLX_MLX_C_VERSION").unwrap_or("unknown"),
        rust_mlx::mlx::cpu::instruction_set()
    )
}

/// The version without libraries, because none is linked without the engine.
#[cfg(not(feature = "mlx-backend"))]
pub fn long() -> String {
    format!("{}\nwithout MLX", env!("CARGO_PKG_VERSION"))
}
