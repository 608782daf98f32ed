//! Tests of `mlx backends --calibrate`.

use serde_json::Value;

use crate::program::{mlx, output, stdout, text};

/// With a GPU, `--calibrate` times four matrix multiplications on both devices. Without a GPU, a
/// note says that there is nothing to compare.
#[test]
fn calibration_times_products_where_a_gpu_is() {
    let run = output(&["backends", "--calibrate", "--json"]);
    let all: Value = serde_json::from_str(&stdout(&run)).unwrap();
    let all = all.as_array().unwrap();
    let timed = |backend: &&Value| backend["calibration"].is_array();
    let gpus: Vec<&Value> = all.iter().filter(timed).collect();
    let said = text(&run.stderr);
    if said.contains("there is no GPU here") {
        assert!(gpus.is_empty(), "{all:?}");
        assert!(
            all.iter()
                .all(|backend| backend["flop_threshold"].is_null())
        );
        return;
    }
    assert!(!gpus.is_empty(), "{all:?}");
    for gpu in gpus {
        let points = gpu["calibration"].as_array().unwrap();
        assert_eq!(points.len(), 4);
        for point in points {
            let of = |name: &str| point[name].as_f64().unwrap();
            assert!(of("cpu_seconds") > 0.0 && of("gpu_seconds") > 0.0);
            let expected = 2.0 * of("m") * of("n") * of("k");
            assert!((of("flops") - expected).abs() < 0.5, "{point}");
        }
        assert!(gpu["flop_threshold"].as_u64().unwrap() >= 100_000);
    }
}

/// The variable sets a threshold for the GPU. Without a GPU there is no threshold, so an invalid
/// value must not cause an error.
#[test]
fn the_threshold_of_the_environment_is_shown_or_refused() {
    let home = tempfile::tempdir().unwrap();
    let run = |threshold: &str| {
        let mut command = mlx(home.path(), &["backends", "--json"]);
        command
            .env("MLX_FLOP_THRESHOLD", threshold)
            .output()
            .unwrap()
    };
    let gpu = |run: &std::process::Output| -> Option<u64> {
        let all: Value = serde_json::from_str(&text(&run.stdout)).ok()?;
        let mut all = all.as_array()?.iter();
        all.find_map(|backend| backend["flop_threshold"].as_u64())
    };
    let (set, bad) = (run("123456"), run("many"));
    assert_eq!(set.status.code(), Some(0));
    match gpu(&set) {
        Some(threshold) => {
            assert_eq!(threshold, 123_456);
            assert_ne!(bad.status.code(), Some(0));
        }
        None => assert_eq!(bad.status.code(), Some(0)),
    }
}
