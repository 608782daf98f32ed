//! Finds the size from which a GPU multiplies faster than the CPU. It times products with a
//! decoder's shapes on both.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{LEAST_THRESHOLD, MatMulBackend, Route};
use crate::{Array, Result};

/// The measured products, as `(m, n, k)`: `[m, k]` times the transpose of `[n, k]`. They are a
/// head's scores, keys and values, the attention's projections, and the feed-forward part, for six
/// positions of a model with hidden size 2,560.
pub const SHAPES: [(i32, i32, i32); 4] = [
    (6, 256, 256),
    (6, 512, 2560),
    (6, 2560, 2560),
    (6, 10240, 2560),
];

/// The number of timed runs per product and device, after one warm-up. The median is used.
const RUNS: usize = 5;

/// The times of one product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CalibrationPoint {
    /// `(m, n, k)`.
    pub shape: (i32, i32, i32),
    /// `2 m n k`.
    pub flops: u64,
    /// The median time on the CPU.
    pub cpu: Duration,
    /// The median time on the GPU.
    pub gpu: Duration,
}

/// The measurements and the resulting threshold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calibration {
    /// The minimum FLOPs of a product on the GPU; `u64::MAX` if the CPU was faster for the largest
    /// product.
    pub threshold: u64,
    /// The products, by size.
    pub points: Vec<CalibrationPoint>,
}

/// Measures the products of [`SHAPES`] by `time`, which returns the time of one product on a
/// device.
///
/// ```
/// use std::time::Duration;
/// use mlx_rs_core::dispatch::{Route, calibrate_by};
/// // A GPU that takes a millisecond to start, and nothing then; a CPU of 100 GFLOPS.
/// let found = calibrate_by(&mut |route, (m, n, k)| Ok(match route {
///     Route::Gpu => Duration::from_millis(1),
///     Route::Cpu => Duration::from_nanos(2 * (m * n) as u64 * k as u64 / 100),
/// }))?;
/// assert_eq!(found.threshold, 2 * 6 * 10_240 * 2560);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// As `time`.
pub fn calibrate_by(
    time: &mut dyn FnMut(Route, (i32, i32, i32)) -> Result<Duration>,
) -> Result<Calibration> {
    let mut points = Vec::with_capacity(SHAPES.len());
    for shape in SHAPES {
        let mut median = |route: Route| -> Result<Duration> {
            time(route, shape)?;
            let mut times = (0..RUNS)
                .map(|_| time(route, shape))
                .collect::<Result<Vec<_>>>()?;
            times.sort_unstable();
            Ok(times[RUNS / 2])
        };
        let size = |n: i32| u64::from(n.unsigned_abs());
        let (m, n, k) = shape;
        points.push(CalibrationPoint {
            shape,
            flops: 2 * size(m) * size(n) * size(k),
            cpu: median(Route::Cpu)?,
            gpu: median(Route::Gpu)?,
        });
    }
    points.sort_by_key(|point| point.flops);
    // A single fast run of a small product does not decide: the GPU must also be faster for all
    // larger products.
    let wins = points
        .iter()
        .rev()
        .take_while(|point| point.gpu < point.cpu);
    let threshold = wins.last().map_or(u64::MAX, |point| point.flops);
    Ok(Calibration {
        threshold: threshold.max(LEAST_THRESHOLD),
        points,
    })
}

/// The matrices of the measured products. All runs of a shape use the same matrices, like a model's
/// weights.
#[derive(Default)]
pub(super) struct Products {
    made: BTreeMap<(i32, i32, i32), (Array, Array)>,
}

impl Products {
    /// The time of one product on `backend`.
    pub(super) fn time(
        &mut self,
        backend: &dyn MatMulBackend,
        shape: (i32, i32, i32),
    ) -> Result<Duration> {
        if !self.made.contains_key(&shape) {
            // Only the matrices of one shape are kept in memory.
            self.made.clear();
            let (m, n, k) = shape;
            let matrix = |rows: i32| -> Result<Array> {
                let count = i64::from(rows) * i64::from(k);
                let values: Vec<f32> = (0..count).map(|i| (i % 17) as f32 * 0.125 - 1.0).collect();
                Array::from_slice(&values, &[rows, k])
            };
            self.made.insert(shape, (matrix(m)?, matrix(n)?));
        }
        let Some((a, b)) = self.made.get(&shape) else {
            return Ok(Duration::ZERO);
        };
        let began = Instant::now();
        backend.matmul_transb(a, b)?;
        Ok(began.elapsed())
    }
}
