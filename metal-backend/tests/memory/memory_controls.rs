//! Tests the functions for memory limits and device properties at the crate's root. The limits
//! apply to the whole process, so these tests run in a separate process.

use metal_backend as engine;
use mlx_rs_core::{Array, Dtype, eval, zeros};

#[test]
fn limits_are_set_figures_follow_arrays_and_facts_are_told() {
    crate::alone::alone(
        "memory_controls::limits_are_set_figures_follow_arrays_and_facts_are_told",
        limits_are_set_figures_follow_arrays_and_facts_are_told_alone,
    );
}

fn limits_are_set_figures_follow_arrays_and_facts_are_told_alone() {
    let device = engine::Device::default_device();
    assert_eq!(
        device.kind() == mlx_rs_core::DeviceKind::Gpu,
        engine::metal_is_available() || engine::cuda_is_available()
    );
    // Each call must return the previous limit.
    let before = engine::set_memory_limit(1 << 34).unwrap();
    assert_eq!(engine::set_memory_limit(before).unwrap(), 1 << 34);
    let before = engine::set_cache_limit(1 << 30).unwrap();
    // The CPU allocator of MLX 0.30 does not keep freed memory, and reports a limit of 0.
    let old = mlx_rs_core::mlx_version().unwrap().starts_with("0.30.");
    let effective = if device.kind() == mlx_rs_core::DeviceKind::Gpu || !old {
        1 << 30
    } else {
        0
    };
    assert_eq!(engine::set_cache_limit(before).unwrap(), effective);

    const BYTES: usize = 4 << 20;
    let make = || -> Array {
        let a = zeros(&[BYTES as i32 / 4], Dtype::Float32).unwrap();
        let a = a.add(&Array::scalar(1.0f32).unwrap()).unwrap();
        eval([&a]).unwrap();
        a
    };
    engine::clear_cache().unwrap();
    let base = engine::active_memory().unwrap();
    let first = make();
    assert!(engine::active_memory().unwrap() >= base + BYTES);
    let second = make();
    assert!(engine::peak_memory().unwrap() >= base + 2 * BYTES);
    drop((first, second));
    engine::reset_peak().unwrap();
    assert!(engine::peak_memory().unwrap() < base + 2 * BYTES);
    engine::clear_cache().unwrap();
    assert_eq!(engine::cache_memory().unwrap(), 0);
    assert!(engine::active_memory().unwrap() <= base);
}
