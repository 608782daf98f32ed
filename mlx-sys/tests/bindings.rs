//! The committed declarations, which docs builds use, are those that bindgen generates.

#[test]
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
         MLX_SYS_UPDATE_BINDINGS=1 cargo test -p mlx-sys --test bindings"
    );
    assert!(
        !old.lines().any(|l| l.trim_start().starts_with("//")),
        "comments are not committed"
    );
}
