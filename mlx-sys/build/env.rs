//! Every environment variable that this build reads.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `MLX_C_SOURCE_DIR` | a checkout of mlx-c 0.4.1 to 0.5.x or 0.7.x to build | none |
//! | `MLX_C_VERSION` | `0.5` or `0.7`: which pinned mlx-c, with the MLX that belongs to it | the default of `pins.json` |
//! | `MLX_C_FETCH` | `upstream`: fetch mlx-c v0.4.1 from its own repository | the pinned Cargo package |
//! | `MLX_ROOT` | an installed MLX with `include`, `lib` and `share/cmake/MLX` | the pinned Python package |
//! | `MLX_CUDA_VERSION` | `12` or `13`: which CUDA build, with feature `cuda` | `13` |
//! | `MLX_CUDA_LIBRARIES` | `system`: with feature `cuda`, use NVIDIA's libraries of the system | the pinned Python packages |
//! | `MLX_SYS_CACHE_DIR` | the directory for provisioned files | the user's cache directory, `rust-mlx/mlx-sys` |
//! | `MLX_SYS_OFFLINE` | `1`: never use the network, only the cache | off |
//! | `MLX_SYS_PYTHON` | the Python 3 whose pip downloads packages | `python3`, then `python` |
//! | `MLX_SYS_PREGENERATED` | `1`: use the committed bindings, build and link nothing (so does `DOCS_RS`) | off |
//! | `LIBCLANG_PATH` | the directory of libclang for bindgen | the system's, else the Python package |
//! | `CXX` | the C++ compiler | `c++` |
//! | `MACOSX_DEPLOYMENT_TARGET` | the oldest macOS that C++ is compiled for | that of MLX's package |
//!
//! `XDG_CACHE_HOME` and `HOME` determine the default cache directory. Cargo sets `CARGO`,
//! `CARGO_*`, `OUT_DIR` and `TARGET`.

use std::env::var_os;
use std::ffi::OsString;
use std::path::PathBuf;

/// Variables whose change makes the build run again.
const WATCHED: [&str; 15] = [
    "MLX_C_SOURCE_DIR",
    "MLX_C_VERSION",
    "MLX_C_FETCH",
    "MLX_ROOT",
    "MLX_CUDA_VERSION",
    "MLX_CUDA_LIBRARIES",
    "MLX_SYS_CACHE_DIR",
    "MLX_SYS_OFFLINE",
    "MLX_SYS_PYTHON",
    "MLX_SYS_PREGENERATED",
    "DOCS_RS",
    "LIBCLANG_PATH",
    "CXX",
    "XDG_CACHE_HOME",
    "MACOSX_DEPLOYMENT_TARGET",
];

/// The oldest macOS that MLX's package supports.
pub const OLDEST_MACOS: &str = "14.0";

/// The settings of one build.
pub struct Env {
    pub mlx_c_source_dir: Option<PathBuf>,
    pub mlx_c_version: Option<String>,
    pub mlx_c_fetch: Option<String>,
    pub mlx_root: Option<PathBuf>,
    pub cuda_version: Option<String>,
    pub cuda_libraries: Option<String>,
    pub cache_dir: Option<PathBuf>,
    pub offline: bool,
    pub python: Option<OsString>,
    pub pregenerated: bool,
    pub libclang_path: Option<PathBuf>,
    pub cxx: OsString,
    /// The oldest macOS to compile for; `None` for other systems.
    pub oldest_macos: Option<String>,
    pub cuda: bool,
    pub cargo: OsString,
    pub out_dir: PathBuf,
    pub manifest_dir: PathBuf,
    /// The target in the form that `pins.json` uses, such as `x86_64-linux` or `aarch64-macos`.
    pub target: String,
}

fn on(name: &str) -> bool {
    var_os(name).is_some_and(|v| !v.is_empty() && v != "0")
}

fn path(name: &str) -> Option<PathBuf> {
    var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from)
}

fn text(name: &str) -> Option<String> {
    var_os(name)
        .filter(|v| !v.is_empty())
        .map(|v| v.to_string_lossy().into_owned())
}

impl Env {
    /// Reads all settings, and tells Cargo which ones to watch.
    pub fn read() -> Self {
        for name in WATCHED {
            println!("cargo:rerun-if-env-changed={name}");
        }
        let cargo_text = |name: &str| text(name).unwrap_or_default();
        let target = format!(
            "{}-{}",
            cargo_text("CARGO_CFG_TARGET_ARCH"),
            cargo_text("CARGO_CFG_TARGET_OS")
        );
        Self {
            mlx_c_source_dir: path("MLX_C_SOURCE_DIR"),
            mlx_c_version: text("MLX_C_VERSION"),
            mlx_c_fetch: text("MLX_C_FETCH"),
            mlx_root: path("MLX_ROOT"),
            cuda_version: text("MLX_CUDA_VERSION"),
            cuda_libraries: text("MLX_CUDA_LIBRARIES"),
            cache_dir: path("MLX_SYS_CACHE_DIR").or_else(default_cache),
            offline: on("MLX_SYS_OFFLINE"),
            python: var_os("MLX_SYS_PYTHON").filter(|v| !v.is_empty()),
            pregenerated: on("MLX_SYS_PREGENERATED") || on("DOCS_RS"),
            libclang_path: path("LIBCLANG_PATH"),
            cxx: var_os("CXX")
                .filter(|v| !v.is_empty())
                .unwrap_or_else(|| "c++".into()),
            oldest_macos: oldest_macos(&target, text("MACOSX_DEPLOYMENT_TARGET")),
            cuda: on("CARGO_FEATURE_CUDA"),
            cargo: var_os("CARGO").unwrap_or_else(|| "cargo".into()),
            out_dir: path("OUT_DIR").unwrap_or_default(),
            manifest_dir: path("CARGO_MANIFEST_DIR").unwrap_or_default(),
            target,
        }
    }

    pub fn linux(&self) -> bool {
        self.target.ends_with("-linux")
    }

    pub fn macos(&self) -> bool {
        self.target.ends_with("-macos")
    }
}

/// The oldest macOS to compile for: the requested one, otherwise the oldest that MLX's package
/// supports. By default, Apple's compiler targets the system that it runs on. The program would
/// then not start on an older system.
pub fn oldest_macos(target: &str, wanted: Option<String>) -> Option<String> {
    let macos = target.ends_with("-macos");
    macos.then(|| wanted.unwrap_or_else(|| String::from(OLDEST_MACOS)))
}

/// The user's cache directory on this platform.
fn default_cache() -> Option<PathBuf> {
    let base = path("XDG_CACHE_HOME")
        .filter(|p| p.is_absolute())
        .or_else(|| {
            let home = path("HOME")?;
            Some(if cfg!(target_os = "macos") {
                home.join("Library/Caches")
            } else {
                home.join(".cache")
            })
        })?;
    Some(base.join("rust-mlx").join("mlx-sys"))
}
