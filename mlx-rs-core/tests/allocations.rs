//! Counts Rust's heap allocations per call. Calls that a decoder makes often must allocate nothing.
//! `metal-backend/tests/decode_allocations.rs` measures a whole decode step. MLX's own allocations
//! (the graph node, its inputs and its shape) are not counted; a raw C call makes the same ones.

use mlx_cpu_kernels::testing::CountingAllocator;
use mlx_rs_core::{All, Array, Device, Dtype, Stream, array, eval, fast, idx, zeros};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The number of allocations of one call of `f`, after a warm-up call. The result is dropped.
fn allocations<R>(mut f: impl FnMut() -> R) -> usize {
    for _ in 0..3 {
        drop(f());
    }
    let before = CountingAllocator::of_thread();
    drop(f());
    CountingAllocator::of_thread() - before
}

#[test]
fn calls_of_arrays_allocate_nothing_in_rust() {
    let a = zeros(&[8, 8], Dtype::Float32).unwrap();
    let scalar = array!(1.0).unwrap();
    let ids = Array::vector(&[1u32, 2]).unwrap();
    let stream = Stream::new(Device::cpu()).unwrap();
    eval([&a, &scalar, &ids]).unwrap();

    for (what, count) in [
        ("add", allocations(|| a.add(&a).unwrap())),
        ("matmul", allocations(|| a.matmul(&a).unwrap())),
        ("exp", allocations(|| a.exp().unwrap())),
        ("reshape", allocations(|| a.reshape(&[64]).unwrap())),
        ("transpose", allocations(|| a.transpose().unwrap())),
        ("astype", allocations(|| a.astype(Dtype::Float16).unwrap())),
        ("sum", allocations(|| a.sum(All, false).unwrap())),
        ("clone", allocations(|| a.clone())),
        ("scalar", allocations(|| Array::scalar(1.0f32).unwrap())),
        ("operator", allocations(|| &a * 2.0)),
        (
            "rms_norm",
            allocations(|| fast::rms_norm(&a, None, 1e-5).unwrap()),
        ),
        (
            "take_clamped",
            allocations(|| a.take_clamped(&ids, 0).unwrap()),
        ),
        ("eval", allocations(|| eval([&a]).unwrap())),
        ("item", allocations(|| scalar.item::<f32>().unwrap())),
        ("data", allocations(|| a.data::<f32>().unwrap().len())),
        (
            "shape",
            allocations(|| a.shape().len() + a.size() + a.ndim()),
        ),
        ("scope", allocations(|| stream.scope(|| a.add(&a).unwrap()))),
        (
            "compute and read",
            allocations(|| scalar.add(&scalar).unwrap().item::<f32>().unwrap()),
        ),
    ] {
        assert_eq!(count, 0, "{what}");
    }

    // Only the result is allocated.
    assert_eq!(allocations(|| a.to_vec::<f32>().unwrap()), 1);
    // An index allocates small lists of bounds and axes, with one entry per axis. In critical code,
    // `slice_axis` (fixed bounds) and `take_clamped` allocate fewer.
    let counts = [
        allocations(|| a.get(idx![3]).unwrap()),
        allocations(|| a.get(idx![1..3, ..; 2]).unwrap()),
        allocations(|| a.get(idx![&ids]).unwrap()),
    ];
    assert!(counts.iter().all(|&n| n <= 20), "{counts:?}");
    // A failed call allocates its message. The call after it allocates nothing.
    assert!(allocations(|| a.matmul(&ids).unwrap_err()) > 0);
    assert_eq!(allocations(|| a.add(&a).unwrap()), 0);
}
