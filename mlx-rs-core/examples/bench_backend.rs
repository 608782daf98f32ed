//! Measures matrix multiplications with a decoder's sizes on each device.
//!
//! ```text
//! cargo run --release -p rust-mlx-core --example bench_backend
//! ```

use std::time::{Duration, Instant};

use mlx_rs_core::dispatch::{CpuBackend, GpuBackend, MatMulBackend};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{Array, Device, Dtype, Result};

/// The sizes `(m, n, k)`: scores of a head, projections, feed-forward, and logits of one position.
const SIZES: [(i32, i32, i32); 5] = [
    (6, 6, 256),
    (6, 512, 2560),
    (6, 2560, 2560),
    (6, 10_240, 2560),
    (1, 262_144, 2560),
];

/// Measures the multiplications of a decoder.
pub fn main() -> Result<()> {
    run(&SIZES, 5)
}

/// Prints the median time of `runs` multiplications of each size.
pub fn run(sizes: &[(i32, i32, i32)], runs: usize) -> Result<()> {
    let mut backends: Vec<Box<dyn MatMulBackend>> = vec![Box::new(CpuBackend::new()?)];
    if Device::gpu().is_available() {
        backends.push(Box::new(GpuBackend::new()?));
    }
    for &(m, n, k) in sizes {
        let noise = |rows: i32, seed| -> Result<Array> {
            let x = random::normal(0.0, 1.0, &[rows, k], Dtype::Float32, &Key::new(seed)?)?;
            x.eval()?;
            Ok(x)
        };
        let (x, weights) = (noise(m, 1)?, noise(n, 2)?);
        let flops = 2.0 * f64::from(m) * f64::from(n) * f64::from(k);
        for backend in &backends {
            backend.matmul_transb(&x, &weights)?;
            let mut times = Vec::with_capacity(runs);
            for _ in 0..runs {
                let began = Instant::now();
                backend.matmul_transb(&x, &weights)?;
                times.push(began.elapsed());
            }
            times.sort_unstable();
            let median = times.get(times.len() / 2).copied().unwrap_or(Duration::MAX);
            println!(
                "{m:>3} x {k:>5} x {n:>7} on {:<4} {median:>12.1?} {:>8.1} GFLOPS",
                backend.name(),
                flops / median.as_secs_f64() / 1e9
            );
        }
    }
    Ok(())
}
