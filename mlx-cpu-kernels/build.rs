//! Tells the crate whether it is optimized: at level 0 the kernels are many times slower, which
//! their users should hear about.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(unoptimized)");
    if std::env::var("OPT_LEVEL").as_deref() == Ok("0") {
        println!("cargo:rustc-cfg=unoptimized");
    }
}
