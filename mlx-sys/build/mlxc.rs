//! Provides the sources of mlx-c: a user's directory, mlx-c's own repository, or the pinned Cargo
//! package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, sha256_tree};
use crate::cmake;
use crate::env::Env;
use crate::pins::{Pins, SUPPORTED, Version, parse_version, supported};
use crate::pip::run;
use crate::tools::Tools;

/// A checkout of mlx-c.
pub struct Source {
    pub dir: PathBuf,
    pub version: Version,
    /// A hash that distinguishes builds of different sources.
    pub hash: String,
}

impl Source {
    pub fn find(env: &Env, cache: &Cache, pins: &Pins, tools: &Tools) -> Result<Self, String> {
        if let Some(dir) = &env.mlx_c_source_dir {
            println!("cargo:rerun-if-changed={}", dir.display());
            return Self::at(dir.clone());
        }
        match env.mlx_c_fetch.as_deref() {
            None | Some("") => Self::from_cargo(env, pins, &minor_version(env, pins)?),
            Some("upstream") => Self::from_upstream(env, cache, tools),
            Some(other) => Err(format!(
                "MLX_C_FETCH is `{other}`; it can be `upstream`, or unset for the pinned Cargo package"
            )),
        }
    }

    /// The checkout at `dir`, if this binding supports its version.
    pub fn at(dir: PathBuf) -> Result<Self, String> {
        let version = version_of(&dir)?;
        if !supported(version) {
            let (a, b, c) = version;
            return Err(format!(
                "{} is mlx-c {a}.{b}.{c}; this binding is for {SUPPORTED}",
                dir.display()
            ));
        }
        let hash = sha256_tree(&dir.join("mlx"))?;
        Ok(Self { dir, version, hash })
    }

    /// Lets Cargo fetch and verify the package. The package's build script never runs.
    fn from_cargo(env: &Env, pins: &Pins, minor: &str) -> Result<Self, String> {
        let manifest = write_manifest(env, minor)?;
        let mut command = Command::new(&env.cargo);
        command.args([
            "metadata",
            "--locked",
            "--format-version",
            "1",
            "--manifest-path",
        ]);
        command.arg(&manifest);
        if env.offline {
            command.arg("--offline");
        }
        // Cargo's settings for this build must not apply to the other package, so they are removed.
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CARGO_")
                && !matches!(&*text, "CARGO_HOME" | "CARGO_NET_OFFLINE")
                && !text.starts_with("CARGO_HTTP")
                && !text.starts_with("CARGO_REGISTR")
                && !text.starts_with("CARGO_SOURCE")
            {
                command.env_remove(&name);
            }
        }
        let text = run(&mut command).map_err(|e| {
            format!(
                "cannot fetch the Cargo package that carries mlx-c:\n{e}\n\
                 Check the network, or set MLX_C_SOURCE_DIR to a checkout of mlx-c {SUPPORTED}."
            )
        })?;
        let metadata: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| format!("cargo metadata: {e}"))?;
        let name = pins.mlx_c(minor, "crate")?;
        let package = metadata["packages"]
            .as_array()
            .and_then(|all| all.iter().find(|p| p["name"] == *name))
            .and_then(|p| p["manifest_path"].as_str())
            .ok_or_else(|| format!("cargo metadata does not list the package {name}"))?;
        let root = Path::new(package)
            .parent()
            .ok_or("a manifest has no directory")?;
        let source = Self::at(root.join(pins.mlx_c(minor, "directory")?))?;
        let expected = pins.mlx_c(minor, "tree_sha256")?;
        if source.hash != expected {
            return Err(format!(
                "the sources in {} have SHA-256 {}, not the pinned {expected}",
                source.dir.display(),
                source.hash
            ));
        }
        Ok(source)
    }

    /// Fetches mlx-c's own repository at the pinned commit.
    fn from_upstream(env: &Env, cache: &Cache, tools: &Tools) -> Result<Self, String> {
        let dir = cache.dir("mlx-c-upstream-0.4.1", |temporary| {
            if env.offline {
                return Err(String::from(
                    "MLX_SYS_OFFLINE is set and mlx-c's repository is not in the cache",
                ));
            }
            let build = env.out_dir.join("superbuild");
            let project = env.manifest_dir.join("vendor/superbuild");
            let mut config = cmake::project(tools, &project, &build);
            config
                .define("MLX_C_DESTINATION", temporary)
                .no_build_target(true);
            cmake::make(tools, &mut config).map(|_| ())
        })?;
        Self::at(dir)
    }
}

/// The minor version whose package is built: that of `MLX_C_VERSION`, or the default.
pub fn minor_version(env: &Env, pins: &Pins) -> Result<String, String> {
    let Some(wanted) = &env.mlx_c_version else {
        return pins.default_mlx_c();
    };
    let all = pins.all_mlx_c();
    let pinned = |minor: &&str| {
        *minor == wanted
            || pins
                .mlx_c(minor, "version")
                .is_ok_and(|version| version == *wanted)
    };
    let pinned_version = all.iter().copied().find(pinned);
    pinned_version.map(str::to_owned).ok_or_else(|| {
        format!(
            "MLX_C_VERSION is `{wanted}`; it can be {}, or unset for the default. For 0.4.1 set \
             MLX_C_FETCH=upstream, for a checkout MLX_C_SOURCE_DIR.",
            all.join(" or ")
        )
    })
}

/// Creates a package in OUT_DIR from the pinned manifest and lock file, and returns its manifest.
/// The files have other names in `vendor/`, because Cargo does not publish directories with a
/// `Cargo.toml`.
fn write_manifest(env: &Env, minor: &str) -> Result<PathBuf, String> {
    let from = env.manifest_dir.join("vendor/mlx-c").join(minor);
    let to = env.out_dir.join("mlx-c-source");
    let fail = |e: std::io::Error| format!("cannot write {}: {e}", to.display());
    fs::create_dir_all(&to).map_err(fail)?;
    fs::write(to.join("lib.rs"), "").map_err(fail)?;
    for (pinned, name) in [("manifest.toml", "Cargo.toml"), ("lock.toml", "Cargo.lock")] {
        let text = fs::read(from.join(pinned)).map_err(|e| format!("cannot read {pinned}: {e}"))?;
        fs::write(to.join(name), text).map_err(fail)?;
    }
    Ok(to.join("Cargo.toml"))
}

/// The version in a checkout's CMakeLists.txt.
fn version_of(dir: &Path) -> Result<Version, String> {
    let path = dir.join("CMakeLists.txt");
    let text = fs::read_to_string(&path)
        .map_err(|e| format!("{} is not a checkout of mlx-c: {e}", dir.display()))?;
    parse_cmake_version(&text)
        .ok_or_else(|| format!("{} does not set MLX_C_VERSION", path.display()))
}

/// Parses `set(MLX_C_VERSION x.y.z)`.
pub fn parse_cmake_version(text: &str) -> Option<Version> {
    let rest = text.split_once("set(MLX_C_VERSION")?.1;
    parse_version(rest.split_once(')')?.0)
}
