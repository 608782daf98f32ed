//! Matrix multiplication on the CPU and on the GPU. Prints the available backend and the devices
//! for a decoder's sizes, and checks that all ways have equal results.
//!
//! ```text
//! cargo run --release -p rust-mlx-core --example backend_demo
//! ```

use mlx_rs_core::dispatch::{CpuBackend, GpuBackend, HybridBackend, MatMulOp, default_backend};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{Array, Device, Dtype, Result};

/// The multiplications of a model with hidden size 2,560 and heads of 256, at six positions: name
/// and FLOPs.
const PRODUCTS: [(&str, u64); 5] = [
    ("scores of a head", 2 * 6 * 6 * 256),
    ("values of a head", 2 * 6 * 6 * 256),
    ("projection", 2 * 6 * 2560 * 2560),
    ("feed-forward", 2 * 6 * 10_240 * 2560),
    ("logits", 2 * 2560 * 262_144),
];

/// Prints the backend, and checks that all ways to multiply agree.
pub fn main() -> Result<()> {
    let backend = default_backend()?;
    println!("backend: {}", backend.name());
    if Device::gpu().is_available() {
        let hybrid = HybridBackend::new(CpuBackend::new()?, GpuBackend::new()?)?;
        println!(
            "on the GPU from {} FLOPs before calibration",
            hybrid.flop_threshold()
        );
        for point in hybrid.calibrate()?.points {
            let (m, n, k) = point.shape;
            println!(
                "  {m} x {k} x {n}: CPU {:?}, GPU {:?}",
                point.cpu, point.gpu
            );
        }
        println!("on the GPU from {} FLOPs after it", hybrid.flop_threshold());
        for (name, flops) in PRODUCTS {
            println!("  {name:<18} {flops:>13} FLOPs: {:?}", hybrid.route(flops));
        }
    }

    let noise = |shape: &[i32], seed| -> Result<Array> {
        random::normal(0.0, 1.0, shape, Dtype::Float32, &Key::new(seed)?)
    };
    let (x, weights) = (noise(&[6, 256], 1)?, noise(&[512, 256], 2)?);
    // The rows of a weight are its outputs.
    let one = backend.matmul_transb(&x, &weights)?;
    let batch = backend.matmul_batch(&[
        MatMulOp::transposed(&x, &weights),
        MatMulOp::new(&x, &weights.swap_axes(0, 1)?),
    ])?;
    for other in &batch {
        assert!(one.all_close(other, 1e-4, 1e-4)?);
    }
    println!("three ways to multiply {:?} agree", one.shape());
    Ok(())
}
