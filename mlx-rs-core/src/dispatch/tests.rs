//! Tests products against float64, the choice of the device by size, and calibration on simulated
//! devices.

use std::sync::Mutex;

use super::*;

/// Values are multiples of an eighth, so sums of a few hundred products are exact in float32.
fn matrix(shape: &[i32], seed: u32) -> (Vec<f32>, Array) {
    let count: i32 = shape.iter().product();
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let values: Vec<f32> = (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 24) as f32 - 128.0) / 64.0
        })
        .collect();
    let array = Array::from_slice(&values, shape).unwrap();
    (values, array)
}

/// `[m, k]` times `[k, n]` in float64, by the definition.
fn product(a: &[f32], b: &dyn Fn(usize, usize) -> f32, [m, n, k]: [usize; 3]) -> Vec<f64> {
    let mut out = Vec::with_capacity(m * n);
    for row in 0..m {
        for column in 0..n {
            let terms = (0..k).map(|i| f64::from(a[row * k + i]) * f64::from(b(i, column)));
            out.push(terms.sum());
        }
    }
    out
}

fn close(ours: &Array, expected: &[f64]) -> bool {
    let ours = ours.to_vec::<f32>().unwrap();
    let pairs = ours.iter().zip(expected);
    ours.len() == expected.len()
        && pairs
            .into_iter()
            .all(|(a, b)| (f64::from(*a) - b).abs() <= 1e-5 * b.abs().max(16.0))
}

/// The available backends, and a hybrid whose threshold is between the tests' sizes.
fn backends() -> Vec<Arc<dyn MatMulBackend>> {
    let cpu = || CpuBackend::new().unwrap();
    let mut hybrid = HybridBackend::new(cpu(), cpu()).unwrap();
    hybrid.fixed = Some(100_000);
    vec![
        Arc::new(cpu()),
        default_backend().unwrap(),
        Arc::new(hybrid),
    ]
}

#[test]
fn products_are_those_of_float64() {
    // Square, tall, wide, a row, a column, a single element, a decoder's head, and empty matrices.
    let shapes = [
        [8, 8, 8],
        [300, 3, 5],
        [2, 400, 7],
        [1, 64, 96],
        [70, 1, 33],
        [1, 1, 1],
        [6, 256, 256],
        [3, 4, 0],
        [0, 4, 3],
    ];
    for backend in backends() {
        for [m, n, k] in shapes {
            let name = format!("{}, {m} {n} {k}", backend.name());
            let dims = [m, n, k].map(|d: i32| d.unsigned_abs() as usize);
            let (a, left) = matrix(&[m, k], 1);
            let (b, right) = matrix(&[k, n], 2);
            let expected = product(&a, &|i, column| b[i * dims[1] + column], dims);
            let ours = backend.matmul(&left, &right).unwrap();
            assert_eq!(ours.shape(), [m, n], "{name}");
            assert!(close(&ours, &expected), "{name}");
            let (b, right) = matrix(&[n, k], 3);
            let expected = product(&a, &|i, column| b[column * dims[2] + i], dims);
            let ours = backend.matmul_transb(&left, &right).unwrap();
            assert_eq!(ours.shape(), [m, n], "{name}");
            assert!(close(&ours, &expected), "{name}");
        }
        let (values, a) = matrix(&[5, 5], 4);
        let identity = crate::eye(5, 5, 0, crate::Dtype::Float32).unwrap();
        let same = backend.matmul(&a, &identity).unwrap();
        assert_eq!(same.to_vec::<f32>().unwrap(), values);
        let zeros = crate::zeros(&[5, 5], crate::Dtype::Float32).unwrap();
        let none = backend.matmul_transb(&a, &zeros).unwrap();
        assert_eq!(none.to_vec::<f32>().unwrap(), [0.0; 25]);
    }
}

#[test]
fn a_batch_is_its_products_one_by_one() {
    let (_, a) = matrix(&[6, 64], 1);
    let (_, b) = matrix(&[64, 300], 2);
    let (_, c) = matrix(&[12, 64], 3);
    let (_, heads) = matrix(&[4, 6, 64], 4);
    let ops = [
        MatMulOp::new(&a, &b),
        MatMulOp::transposed(&a, &c),
        MatMulOp::new(&heads, &b),
        MatMulOp::transposed(&c, &a),
    ];
    for backend in backends() {
        let together = backend.matmul_batch(&ops).unwrap();
        assert_eq!(together.len(), ops.len());
        for (op, result) in ops.iter().zip(&together) {
            let alone = match op.transpose_b {
                true => backend.matmul_transb(&op.a, &op.b).unwrap(),
                false => backend.matmul(&op.a, &op.b).unwrap(),
            };
            assert!(result.array_equal(&alone).unwrap(), "{}", backend.name());
        }
        assert!(backend.matmul_batch(&[]).unwrap().is_empty());
    }
}

#[test]
fn what_is_no_product_is_an_error() {
    let (_, a) = matrix(&[2, 3], 1);
    let (_, b) = matrix(&[2, 3], 2);
    let scalar = Array::scalar(1.0f32).unwrap();
    for backend in backends() {
        assert!(backend.matmul(&a, &b).is_err());
        assert!(backend.matmul_transb(&a, &scalar).is_err());
        assert!(backend.matmul(&scalar, &a).is_err());
        let ops = [MatMulOp::transposed(&a, &b), MatMulOp::new(&a, &b)];
        assert!(backend.matmul_batch(&ops).is_err());
    }
    assert_eq!(MatMulOp::new(&scalar, &a).flops(), 0);
}

/// A backend that records its calls.
struct Watched(&'static str, Mutex<Vec<u64>>);

impl MatMulBackend for Watched {
    fn name(&self) -> &str {
        self.0
    }

    fn matmul(&self, a: &Array, b: &Array) -> Result<Array> {
        only(self.matmul_batch(&[MatMulOp::new(a, b)])?)
    }

    fn matmul_transb(&self, a: &Array, b: &Array) -> Result<Array> {
        only(self.matmul_batch(&[MatMulOp::transposed(a, b)])?)
    }

    fn matmul_batch(&self, ops: &[MatMulOp]) -> Result<Vec<Array>> {
        self.1
            .lock()
            .unwrap()
            .extend(ops.iter().map(MatMulOp::flops));
        CpuBackend::new()?.matmul_batch(ops)
    }
}

#[test]
fn each_product_goes_where_its_size_says() {
    let watched = |name| Watched(name, Mutex::default());
    let mut hybrid = HybridBackend::new(watched("cpu"), watched("gpu")).unwrap();
    hybrid.fixed = Some(1000);
    let (_, a) = matrix(&[5, 10], 1);
    let (_, b) = matrix(&[10, 9], 2); // 900
    let (_, c) = matrix(&[10, 10], 3); // 1000
    hybrid.matmul(&a, &b).unwrap();
    hybrid.matmul_transb(&a, &c).unwrap();
    let ops = [&c, &b, &c, &b].map(|right| MatMulOp::new(&a, right));
    let results = hybrid.matmul_batch(&ops).unwrap();
    assert_eq!(results[1].shape(), [5, 9]);
    assert_eq!(results[2].shape(), [5, 10]);
    assert_eq!(*hybrid.cpu.1.lock().unwrap(), [900; 3]);
    assert_eq!(*hybrid.gpu.1.lock().unwrap(), [1000; 3]);
}

/// The time of a product on a simulated device with a start time (nanoseconds) and a speed (FLOPs
/// per nanosecond).
fn device(start: u64, speed: u64, (m, n, k): (i32, i32, i32)) -> std::time::Duration {
    let flops = [2, m, n, k].map(|d| u64::from(d.unsigned_abs()));
    std::time::Duration::from_nanos(start + flops.iter().product::<u64>() / speed)
}

/// The five products of a model with hidden size 2,560 and heads of 256 at six positions. They are
/// sent to devices after calibration on simulated devices of different speeds.
#[test]
fn the_five_products_of_a_decoder_are_routed_by_calibration() {
    // Scores of a head, values of a head, a projection, the feed-forward part, and logits of one
    // position.
    let products = [
        2 * 6 * 6 * 256,
        2 * 6 * 6 * 256,
        2 * 6 * 2560 * 2560,
        2 * 6 * 10_240 * 2560,
        2 * 2560 * 262_144,
    ];
    assert_eq!(
        products,
        [18_432, 18_432, 78_643_200, 314_572_800, 1_342_177_280]
    );
    let (c, g) = (Route::Cpu, Route::Gpu);
    // The GPU's start time and speed relative to a CPU of 1 TFLOPS, the expected threshold, and the
    // expected devices.
    for (start, speed, threshold, routes) in [
        (10_000, 10, 15_728_640, [c, c, g, g, g]),
        (50_000, 10, 78_643_200, [c, c, g, g, g]),
        (200_000, 10, 314_572_800, [c, c, c, g, g]),
        (10_000_000, 10, u64::MAX, [c; 5]),
        // For a GPU that is always faster, the threshold is the smallest measured product.
        (0, 10, 786_432, [c, c, g, g, g]),
    ] {
        let measured = calibrate_by(&mut |route, shape| {
            Ok(match route {
                Route::Cpu => device(1, 1000, shape),
                Route::Gpu => device(start, speed * 1000, shape),
            })
        })
        .unwrap();
        assert_eq!(measured.threshold, threshold, "{start} {speed}");
        assert_eq!(measured.points.len(), SHAPES.len());
        let cpu = || CpuBackend::new().unwrap();
        let mut hybrid = HybridBackend::new(cpu(), cpu()).unwrap();
        hybrid.fixed = None;
        assert_eq!(hybrid.flop_threshold(), DEFAULT_THRESHOLD);
        hybrid.measured.set(measured.threshold).unwrap();
        assert_eq!(
            products.map(|flops| hybrid.route(flops)),
            routes,
            "{start} {speed}"
        );
    }
}

#[test]
fn calibration_takes_medians_and_no_lucky_run() {
    // The first run of each product is slow, and one of five runs is an outlier.
    let mut runs = std::collections::HashMap::new();
    let measured = calibrate_by(&mut |route, shape| {
        let run = runs.entry((route, shape)).or_insert(0u32);
        *run += 1;
        let slow = matches!(*run, 1 | 4);
        let base = device(1000, 1000, shape);
        Ok(match (route, slow) {
            (_, true) => base * 100,
            // The GPU is faster only for the smallest and the largest product.
            (Route::Gpu, false) if [SHAPES[0], SHAPES[3]].contains(&shape) => base / 2,
            (Route::Gpu, false) => base * 2,
            (Route::Cpu, false) => base,
        })
    })
    .unwrap();
    assert!(runs.values().all(|n| *n == 6), "{runs:?}");
    assert_eq!(measured.threshold, 2 * 6 * 10_240 * 2560);
    assert_eq!(measured.points[1].gpu, measured.points[1].cpu * 2);
    let failed =
        calibrate_by(&mut |_, _| Err(Error::new(ErrorKind::OutOfMemory, "test", "no memory")));
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::OutOfMemory);
}

#[test]
fn a_real_calibration_measures_and_the_environment_is_read() {
    let cpu = || CpuBackend::new().unwrap();
    let mut hybrid = HybridBackend::new(cpu(), cpu()).unwrap();
    hybrid.fixed = None;
    let measured = hybrid.calibrate().unwrap();
    assert_eq!(hybrid.flop_threshold(), measured.threshold);
    assert!(measured.threshold >= LEAST_THRESHOLD);
    let times = measured.points.iter().flat_map(|p| [p.cpu, p.gpu]);
    assert!(times.into_iter().all(|t| !t.is_zero()));
    hybrid.fixed = Some(7);
    hybrid.calibrate().unwrap();
    assert_eq!(hybrid.flop_threshold(), 7);
    assert_eq!(threshold_of(" 500 ").unwrap(), 500);
    for text in ["", "-1", "1e6", "x", "1.5"] {
        assert_eq!(
            threshold_of(text).unwrap_err().kind(),
            ErrorKind::Value,
            "{text}"
        );
    }
}
