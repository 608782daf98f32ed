//! Tests the logic of the build script (versions, pins, hashes, and the cache), and the bindings
//! that it generates.

#![allow(dead_code, missing_docs, reason = "build modules are included whole")]

#[path = "../../build/cache.rs"]
mod cache;
#[path = "../../build/env.rs"]
mod env;
#[path = "../../build/nvidia.rs"]
mod nvidia;
#[path = "../../build/pins.rs"]
mod pins;
#[path = "../../build/pip.rs"]
mod pip;

mod bindings;

use std::path::{Path, PathBuf};

fn settings(cache: &Path) -> env::Env {
    env::Env {
        mlx_c_source_dir: None,
        mlx_c_version: None,
        mlx_c_fetch: None,
        mlx_root: None,
        cuda_version: None,
        cuda_libraries: None,
        cache_dir: Some(cache.to_owned()),
        offline: true,
        python: None,
        pregenerated: false,
        libclang_path: None,
        cxx: "c++".into(),
        oldest_macos: None,
        cuda: false,
        cargo: "cargo".into(),
        out_dir: PathBuf::new(),
        manifest_dir: PathBuf::new(),
        target: String::from("x86_64-linux"),
    }
}

fn real_pins() -> pins::Pins {
    pins::Pins::read(Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/vendor/pins.json"
    )))
    .unwrap()
}

fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

#[test]
fn versions_in_range_are_accepted_and_others_not() {
    let ok = |v: &str| pins::supported(pins::parse_version(v).unwrap());
    assert!(ok("0.4.1") && ok("0.4.9") && ok("0.5.0") && ok("0.5.7"));
    assert!(ok("0.7.0") && !ok("0.4.0") && !ok("0.6.0") && !ok("1.0.0"));
    for bad in ["", "1", "1.2", "a.b.c", "1.2.3.4", "1.2.-3"] {
        assert_eq!(pins::parse_version(bad), None, "{bad:?}");
    }
}

#[test]
fn the_cfg_follows_the_version_and_each_version_its_mlx() {
    let pins = real_pins();
    for (text, levels, mlx) in [
        ("0.4.1", &[][..], "0.30.1"),
        ("0.4.9", &[], "0.30.1"),
        ("0.5.0", &["0_5"], "0.30.6"),
        ("0.5.7", &["0_5"], "0.30.6"),
        ("0.7.0", &["0_5", "0_7"], "0.32.2"),
    ] {
        let version = pins::parse_version(text).unwrap();
        assert!(pins::supported(version), "{text}");
        assert_eq!(pins::levels(version).collect::<Vec<_>>(), levels, "{text}");
        assert_eq!(pins.mlx_for(version).unwrap(), mlx, "{text}");
    }
    for text in ["0.4.0", "0.6.0", "0.8.0"] {
        let version = pins::parse_version(text).unwrap();
        assert!(!pins::supported(version), "{text}");
    }
}

#[test]
fn every_pinned_mlx_c_is_whole() {
    let pins = real_pins();
    let all = pins.all_mlx_c();
    assert!(all.contains(&&*pins.default_mlx_c().unwrap()));
    for minor in all {
        let version = pins.mlx_c(minor, "version").unwrap();
        assert!(version.starts_with(&format!("{minor}.")), "{minor}");
        assert!(pins::supported(pins::parse_version(&version).unwrap()));
        let vendor = Path::new(env!("CARGO_MANIFEST_DIR")).join("vendor/mlx-c");
        let manifest = std::fs::read_to_string(vendor.join(minor).join("manifest.toml")).unwrap();
        let package = pins.mlx_c(minor, "crate").unwrap();
        let number = pins.mlx_c(minor, "crate_version").unwrap();
        let line = format!("{package} = {{ version = \"={number}\"");
        assert!(manifest.contains(&line), "{minor}: {manifest}");
        assert!(vendor.join(minor).join("lock.toml").is_file(), "{minor}");
    }
}

#[test]
fn every_target_has_its_pins() {
    let pins = real_pins();
    for (target, package) in [
        ("x86_64-linux", "mlx-cpu"),
        ("aarch64-linux", "mlx-cpu"),
        ("aarch64-macos", "mlx-metal"),
    ] {
        for version in [(0, 4, 1), (0, 5, 0), (0, 7, 0)] {
            let mlx = pins.mlx_for(version).unwrap();
            let wheel = pins.wheel(package, Some(&mlx), target).unwrap();
            assert_eq!(wheel.sha256.len(), 64);
        }
        for tool in ["cmake", "ninja", "libclang"] {
            pins.wheel(tool, None, target).unwrap();
        }
    }
    assert!(
        pins.wheel("mlx-cpu", None, "x86_64-windows")
            .unwrap_err()
            .contains("x86_64-windows")
    );
    assert!(pins.mlx_for((0, 6, 0)).is_err());
    assert!(pins::Pins::parse("{").is_err());
}

#[test]
fn a_damaged_download_is_refused() {
    let file = scratch("damaged").join("x.whl");
    std::fs::write(&file, "not what was pinned").unwrap();
    let e = pip::check_hash(&file, &"0".repeat(64)).unwrap_err();
    assert!(e.contains("damaged"), "{e}");
    pip::check_hash(&file, &cache::sha256_file(&file).unwrap()).unwrap();
}

#[test]
fn offline_with_an_empty_cache_says_the_ways_out() {
    let env = settings(&scratch("offline"));
    let cache = cache::Cache::open(&env).unwrap();
    let pins = real_pins();
    let pip = pip::Pip {
        env: &env,
        cache: &cache,
        pins: &pins,
    };
    let e = pip.wheel("mlx-cpu", Some("0.30.6")).unwrap_err();
    assert!(
        e.contains("MLX_SYS_OFFLINE") && e.contains("mlx-cpu"),
        "{e}"
    );
}

#[test]
fn on_macos_the_oldest_system_is_that_of_mlx_unless_another_is_asked_for() {
    let of = |target, wanted: Option<&str>| env::oldest_macos(target, wanted.map(String::from));
    assert_eq!(of("aarch64-macos", None).as_deref(), Some("14.0"));
    assert_eq!(of("aarch64-macos", Some("15.1")).as_deref(), Some("15.1"));
    assert_eq!(of("x86_64-linux", Some("15.1")), None);
    let wheel = real_pins().wheel("mlx-metal", None, "aarch64-macos");
    let platform = format!("macosx_{}_arm64", env::OLDEST_MACOS.replace('.', "_"));
    assert_eq!(wheel.unwrap().platform, platform);
}

/// Python must run in an empty directory, where no `pip.py` can replace pip. Pip must select
/// packages for one Python version, whichever version runs it.
#[cfg(unix)]
#[test]
fn pip_runs_in_an_empty_directory_for_one_python_version() {
    use std::os::unix::fs::PermissionsExt;
    let root = scratch("pip");
    let (log, python) = (root.join("log"), root.join("python"));
    let record = format!("echo \"$PWD $(ls) $@\" >> '{}'", log.display());
    let script = format!("#!/bin/sh\n{record}\n[ \"$1\" = -c ]\n");
    std::fs::write(&python, script).unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut env = settings(&root.join("cache"));
    env.offline = false;
    env.python = Some(python.into());
    let (cache, pins) = (cache::Cache::open(&env).unwrap(), real_pins());
    let pip = pip::Pip {
        env: &env,
        cache: &cache,
        pins: &pins,
    };
    let e = pip.wheel("mlx-cpu", Some("0.30.6")).unwrap_err();
    assert!(e.contains("cannot download"), "{e}");
    let log = std::fs::read_to_string(log).unwrap();
    let calls: Vec<&str> = log.lines().collect();
    assert_eq!(calls.len(), 2, "{log}");
    let inside = format!("{}/.mlx-cpu", root.join("cache").display());
    assert!(calls.iter().all(|c| c.starts_with(&inside)), "{log}");
    assert!(calls[0].contains(".partial  -c import"), "{log}");
    assert!(
        calls[1].contains(".partial requirements.txt -m pip download"),
        "{log}"
    );
    assert!(calls[1].contains("--python-version 3.12"), "{log}");
}

#[test]
fn a_directory_is_whole_or_not_there() {
    let cache = cache::Cache::open(&settings(&scratch("whole"))).unwrap();
    let failed = cache.dir("thing", |dir| {
        std::fs::write(dir.join("half"), "x").unwrap();
        Err(String::from("interrupted"))
    });
    assert_eq!(failed.unwrap_err(), "interrupted");
    assert!(!cache.root.join("thing").exists());
    let made = cache.dir("thing", |dir| {
        assert!(!dir.join("half").exists());
        std::fs::write(dir.join("whole"), "x").map_err(|e| e.to_string())
    });
    assert!(made.unwrap().join("whole").is_file());
    // The directory must be created only once.
    cache
        .dir("thing", |_| Err(String::from("asked again")))
        .unwrap();
}

#[test]
fn a_tree_hash_sees_names_and_contents() {
    let dir = scratch("tree");
    std::fs::write(dir.join("a"), "1").unwrap();
    let first = cache::sha256_tree(&dir).unwrap();
    std::fs::rename(dir.join("a"), dir.join("b")).unwrap();
    let renamed = cache::sha256_tree(&dir).unwrap();
    std::fs::write(dir.join("b"), "2").unwrap();
    let changed = cache::sha256_tree(&dir).unwrap();
    assert!(first != renamed && renamed != changed);
}

/// A cache with the NVIDIA packages, as pip unpacks them.
fn cache_with_nvidia(root: &Path, pins: &pins::Pins, of: (&str, &str)) {
    let cuda = of.1;
    for (directory, package) in pins.cuda_libraries(of.0, cuda).unwrap() {
        let wheel = pins.wheel(&package, None, "x86_64-linux").unwrap();
        let name = format!("{package}-{}-{}", wheel.version, &wheel.sha256[..12]);
        // Most packages of CUDA 13 share a directory. cuDNN and NCCL have their own directories.
        let shared = cuda == "13" && !["cudnn", "nccl"].contains(&&*directory);
        let package_dir = if shared { "cu13" } else { &*directory };
        let lib = root.join(name).join("nvidia").join(package_dir).join("lib");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::write(lib.join("which"), &package).unwrap();
    }
}

#[test]
fn nvidias_libraries_are_where_mlx_looks_for_them() {
    let pins = real_pins();
    let versions = ["0.30.6", "0.32.2"];
    for of in versions.iter().flat_map(|mlx| [(*mlx, "12"), (*mlx, "13")]) {
        let root = scratch(&format!("nvidia-{}-{}", of.0, of.1));
        cache_with_nvidia(&root, &pins, of);
        let mut env = settings(&root);
        let cache = cache::Cache::open(&env).unwrap();
        let pip = pip::Pip {
            env: &env,
            cache: &cache,
            pins: &pins,
        };
        let mlx = root.join("mlx-cuda");
        // The second build finds the links of the first.
        for _ in 0..2 {
            let libraries = nvidia::provision(&env, &pip, &pins, of, &mlx).unwrap();
            let names: Vec<_> = libraries.iter().map(|l| l.directory.as_str()).collect();
            // These are the directories in libmlx's search path, and the headers that libmlx passes
            // to NVRTC.
            for name in ["cublas", "cuda_nvrtc", "cudnn", "nccl", "cuda_runtime"] {
                assert!(names.contains(&name), "{name} is not among {names:?}");
            }
            assert_eq!(names.contains(&"cufft"), of.0 == "0.32.2");
            for library in &libraries {
                let file = mlx
                    .join("nvidia")
                    .join(&library.directory)
                    .join("lib/which");
                let actual = std::fs::read_to_string(&file).unwrap();
                assert_eq!(actual, library.pin[0], "{}", library.directory);
            }
        }
        // The links must stay valid if the cache is moved.
        let link = std::fs::read_link(mlx.join("nvidia/cudnn")).unwrap();
        assert!(link.is_relative(), "{}", link.display());
        env.cuda_libraries = Some(String::from("system"));
        let pip = pip::Pip {
            env: &env,
            cache: &cache,
            pins: &pins,
        };
        let none = nvidia::provision(&env, &pip, &pins, of, &mlx).unwrap();
        assert!(none.is_empty());
        env.cuda_libraries = Some(String::from("mine"));
        let pip = pip::Pip {
            env: &env,
            cache: &cache,
            pins: &pins,
        };
        let refused = nvidia::provision(&env, &pip, &pins, of, &mlx)
            .err()
            .unwrap();
        assert!(
            refused.contains("`mine`") && refused.contains("system"),
            "{refused}"
        );
    }
}
