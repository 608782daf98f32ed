//! The committed header must be that of the code. `RUST_MLX_UPDATE_HEADER=1` writes it.

use std::path::Path;

#[test]
fn the_header_is_that_of_the_code() {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(crate_dir.join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(crate_dir.join("src/status.rs"))
        .with_src(crate_dir.join("src/abi.rs"))
        .generate()
        .unwrap();
    let mut made = Vec::new();
    bindings.write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let header = crate_dir.join("include/rust_mlx.h");
    if std::env::var_os("RUST_MLX_UPDATE_HEADER").is_some() {
        std::fs::write(&header, &made).unwrap();
    }
    let committed = std::fs::read_to_string(&header).unwrap_or_default();
    assert!(
        committed == made,
        "include/rust_mlx.h is not that of src/abi.rs; run this test with RUST_MLX_UPDATE_HEADER=1"
    );
}

/// Every function of the code is in the header, and has documentation there.
#[test]
fn every_function_is_in_the_header_and_described() {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| std::fs::read_to_string(crate_dir.join(name)).unwrap();
    let (code, header) = (read("src/abi.rs"), read("include/rust_mlx.h"));
    let mut functions = 0;
    for line in code.lines() {
        let Some((_, rest)) = line.split_once("extern \"C\" fn rust_mlx_") else {
            continue;
        };
        let name = format!("rust_mlx_{}(", rest.split('(').next().unwrap());
        let (before, _) = header
            .split_once(&name)
            .unwrap_or_else(|| panic!("{name} is not in the header"));
        let described = before.rfind("*/").unwrap();
        assert!(!before[described..].contains(';'), "{name}");
        functions += 1;
    }
    assert_eq!(functions, 13);
}
