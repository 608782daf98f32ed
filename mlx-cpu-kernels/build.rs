//! Tells the crate whether it is compiled with optimization. At level 0 the kernels are many times
//! slower, so the crate warns its users.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(unoptimized)");
    if std::env::var("OPT_LEVEL").as_deref() == Ok("0") {
        println!("cargo:rustc-cfg=unoptimized");
    }
}
