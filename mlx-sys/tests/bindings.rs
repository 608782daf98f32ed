//! The committed declarations, which docs builds use, are those that bindgen generates.

/// A function that mlx-c has since 0.5.
const NEW_FUNCTION: &str = "fn mlx_device_info_get(";

#[test]
fn the_cfg_says_what_was_bound() {
    let generated = std::fs::read_to_string(mlx_sys::BINDINGS_FILE).unwrap();
    assert_eq!(generated.contains(NEW_FUNCTION), cfg!(mlx_c_0_5));
}

#[test]
#[cfg_attr(
    not(mlx_c_0_5),
    ignore = "the committed declarations are those of mlx-c 0.5"
)]
fn the_committed_bindings_are_what_bindgen_generates() {
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bindings.rs");
    let generated = std::fs::read_to_string(mlx_sys::BINDINGS_FILE).unwrap();
    if std::env::var_os("MLX_SYS_UPDATE_BINDINGS").is_some() {
        std::fs::write(committed, &generated).unwrap();
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        // C's integer and float types differ in name between platforms; one is the reference.
        return;
    }
    let old = std::fs::read_to_string(committed).unwrap();
    assert!(
        old == generated,
        "src/bindings.rs is stale; refresh it with \
         MLX_SYS_UPDATE_BINDINGS=1 cargo test -p rust-mlx-sys --test bindings"
    );
    assert!(
        !old.lines().any(|l| l.trim_start().starts_with("//")),
        "comments are not committed"
    );
}
