//! Builds the binding in these steps: provision (MLX, mlx-c, tools) -> cmake -> bindgen -> link.
//! Each step is a module in `build/`. `build/env.rs` reads all external settings.

#[path = "build/bindings.rs"]
mod bindings;
#[path = "build/cache.rs"]
mod cache;
#[path = "build/cmake.rs"]
mod cmake;
#[path = "build/env.rs"]
mod env;
#[path = "build/link.rs"]
mod link;
#[path = "build/mlx.rs"]
mod mlx;
#[path = "build/mlxc.rs"]
mod mlxc;
#[path = "build/nvidia.rs"]
mod nvidia;
#[path = "build/pins.rs"]
mod pins;
#[path = "build/pip.rs"]
mod pip;
#[path = "build/shared.rs"]
mod shared;
#[path = "build/shim.rs"]
mod shim;
#[path = "build/tools.rs"]
mod tools;

fn main() {
    if let Err(message) = run() {
        // Prints a message instead of a panic, because the reader needs the remedy, not a
        // backtrace.
        for line in message.lines() {
            println!("cargo:warning={line}");
        }
        eprintln!("\nerror: {message}\n");
        std::process::exit(1);
    }
}

fn run() -> Result<(), String> {
    let env = env::Env::read();
    println!("cargo:rustc-check-cfg=cfg(mlx_c_0_5, mlx_c_0_7, mlx_loaded)");
    for path in [
        "build.rs",
        "build",
        "shim",
        "src/bindings",
        "vendor/pins.json",
        "vendor/mlx-c",
    ] {
        println!("cargo:rerun-if-changed={path}");
    }
    let pins = pins::Pins::read(&env.manifest_dir.join("vendor/pins.json"))?;
    if env.pregenerated {
        return bindings::use_committed(&env, &pins);
    }
    let cache = cache::Cache::open(&env)?;
    let pip = pip::Pip {
        env: &env,
        cache: &cache,
        pins: &pins,
    };
    let tools = tools::Tools::find(&env, &pip)?;
    let source = mlxc::Source::find(&env, &cache, &pins, &tools)?;
    let mlx = mlx::Mlx::find(&env, &pip, &pins, source.version)?;
    let library = cmake::build(&env, &cache, &tools, &source, &mlx)?;
    shim::build(&env, &source, &mlx)?;
    bindings::generate(&env, &tools, &source)?;
    link::emit(&env, &source, &mlx, &library)
}
