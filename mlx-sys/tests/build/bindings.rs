//! The committed declarations, which documentation builds use, must equal those that bindgen
//! generates.

/// Functions of newer mlx-c versions: one since 0.5, and one since 0.7.
const NEW_FUNCTIONS: [(&str, bool); 2] = [
    ("fn mlx_device_info_get(", cfg!(mlx_c_0_5)),
    ("fn mlx_stream_new_thread_unsafe(", cfg!(mlx_c_0_7)),
];

/// The minor version of the mlx-c that this build is bound to.
const MINOR: &str = if cfg!(mlx_c_0_7) {
    "0.7"
} else if cfg!(mlx_c_0_5) {
    "0.5"
} else {
    "0.4"
};

#[test]
fn the_cfg_says_what_was_bound() {
    let generated = std::fs::read_to_string(mlx_sys::BINDINGS_FILE).unwrap();
    for (function, expected) in NEW_FUNCTIONS {
        assert_eq!(generated.contains(function), expected, "{function}");
    }
}

#[test]
fn the_committed_bindings_are_what_bindgen_generates() {
    let committed = format!("{}/src/bindings/{MINOR}.rs", env!("CARGO_MANIFEST_DIR"));
    let generated = std::fs::read_to_string(mlx_sys::BINDINGS_FILE).unwrap();
    if std::env::var_os("MLX_SYS_UPDATE_BINDINGS").is_some() {
        std::fs::write(&committed, &generated).unwrap();
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        // C's integer and float types have different names on each platform, so only one platform
        // is compared.
        return;
    }
    let old = std::fs::read_to_string(&committed).unwrap();
    assert!(
        old == generated,
        "{committed} is stale; refresh it with \
         MLX_SYS_UPDATE_BINDINGS=1 cargo test -p rust-mlx-sys --test build"
    );
    assert!(
        !old.lines().any(|l| l.trim_start().starts_with("//")),
        "comments are not committed"
    );
}
