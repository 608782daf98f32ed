//! Provides MLX itself: an installed one, or the Python package that matches mlx-c's version.

use std::path::{Path, PathBuf};

use crate::env::Env;
use crate::nvidia::{self, Library};
use crate::pins::{Pins, Version};
use crate::pip::Pip;

/// An MLX to build against.
pub struct Mlx {
    /// The directory with `include`, `lib` and `share/cmake/MLX`.
    pub root: PathBuf,
    /// The package with its version. Installed programs have a directory with this name.
    pub package: String,
    /// The package, its version and its SHA-256; `None` if MLX is not a Python package.
    pub pin: Option<[String; 3]>,
    /// The NVIDIA packages that this build needs.
    pub libraries: Vec<Library>,
    pub version: String,
    /// The build without CUDA, for machines without NVIDIA's driver, where the CUDA build cannot be
    /// loaded.
    pub spare: Option<Box<Mlx>>,
}

impl Mlx {
    pub fn find(env: &Env, pip: &Pip<'_>, pins: &Pins, mlx_c: Version) -> Result<Self, String> {
        if let Some(root) = &env.mlx_root {
            return Self::installed(root);
        }
        let version = pins.mlx_for(mlx_c)?;
        if !env.cuda {
            return Self::package(env, pip, pins, host_package(env)?, version);
        }
        let cuda = match env.cuda_version.as_deref().unwrap_or("13") {
            v @ ("12" | "13") => v,
            v => return Err(format!("MLX_CUDA_VERSION is `{v}`; it can be 12 or 13")),
        };
        let package = format!("mlx-cuda-{cuda}");
        let mut mlx = Self::package(env, pip, pins, &package, version.clone())?;
        let root = mlx.root.parent().unwrap_or(&mlx.root);
        mlx.libraries = nvidia::provision(env, pip, pins, (&version, cuda), root)?;
        let spare = Self::package(env, pip, pins, host_package(env)?, version)?;
        mlx.spare = Some(Box::new(spare));
        Ok(mlx)
    }

    /// MLX as a Python package.
    fn package(
        env: &Env,
        pip: &Pip<'_>,
        pins: &Pins,
        package: &str,
        version: String,
    ) -> Result<Self, String> {
        let dir = pip.wheel(package, Some(&version))?;
        let sha256 = pins.wheel(package, Some(&version), &env.target)?.sha256;
        let root = dir.join("mlx");
        check(&root)?;
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        Ok(Self {
            root,
            package: name.into_owned(),
            pin: Some([package.to_owned(), version.clone(), sha256]),
            libraries: Vec::new(),
            version,
            spare: None,
        })
    }

    fn installed(root: &Path) -> Result<Self, String> {
        check(root).map_err(|e| format!("MLX_ROOT: {e}"))?;
        let path = root.join("include/mlx/version.h");
        let text = std::fs::read_to_string(&path)
            .map_err(|e| format!("MLX_ROOT: cannot read {}: {e}", path.display()))?;
        let version = parse_header_version(&text)
            .ok_or_else(|| format!("MLX_ROOT: {} names no version", path.display()))?;
        println!("cargo:rerun-if-changed={}", path.display());
        Ok(Self {
            root: root.to_owned(),
            package: format!("mlx-{version}"),
            pin: None,
            libraries: Vec::new(),
            version,
            spare: None,
        })
    }

    pub fn lib(&self) -> PathBuf {
        self.root.join("lib")
    }
}

/// The Python package with MLX for this target, in the build without CUDA.
fn host_package(env: &Env) -> Result<&'static str, String> {
    match env.target.as_str() {
        "x86_64-linux" | "aarch64-linux" => Ok("mlx-cpu"),
        "aarch64-macos" => Ok("mlx-metal"),
        other => Err(format!(
            "there is no Python package of MLX for {other}; there are packages for Linux on x86-64 \
             and arm64 (glibc 2.35 or newer) and macOS 14 or newer on Apple silicon.\n\
             Build MLX yourself and set MLX_ROOT."
        )),
    }
}

fn check(root: &Path) -> Result<(), String> {
    for part in [
        "include/mlx/mlx.h",
        "lib",
        "share/cmake/MLX/MLXConfig.cmake",
    ] {
        if !root.join(part).exists() {
            return Err(format!(
                "{} is not an installed MLX: it has no {part}",
                root.display()
            ));
        }
    }
    Ok(())
}

/// Parses `MLX_VERSION_MAJOR` and similar lines, or a version string.
pub fn parse_header_version(text: &str) -> Option<String> {
    let number = |name: &str| {
        text.lines().find_map(|l| {
            l.trim()
                .strip_prefix("#define ")?
                .strip_prefix(name)?
                .trim()
                .parse::<u64>()
                .ok()
        })
    };
    Some(format!(
        "{}.{}.{}",
        number("MLX_VERSION_MAJOR")?,
        number("MLX_VERSION_MINOR")?,
        number("MLX_VERSION_PATCH")?
    ))
}
