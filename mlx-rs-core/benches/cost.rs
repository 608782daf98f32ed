//! What the safe layer costs: the lock against an owning thread, building one lazy operation
//! against the raw C call, evaluation, and copies in and out. `cargo bench -p mlx-rs-core`.

use std::sync::mpsc;

use divan::{Bencher, black_box};
use mlx_rs_core::Array;
use mlx_sys as sys;
use parking_lot::ReentrantMutex;

fn main() {
    divan::main();
}

/// The lock that every call takes, nobody else holding it.
#[divan::bench]
fn uncontended_lock(bencher: Bencher<'_, '_>) {
    let lock = ReentrantMutex::new(());
    bencher.bench_local(|| drop(black_box(lock.lock())));
}

/// The alternative: send the call to a thread that owns MLX and wait for its answer.
#[divan::bench]
fn round_trip_to_an_owning_thread(bencher: Bencher<'_, '_>) {
    let (ask, asked) = mpsc::channel::<mpsc::SyncSender<u32>>();
    let owner = std::thread::spawn(move || {
        while let Ok(answer) = asked.recv() {
            let _ = answer.send(1);
        }
    });
    bencher.bench_local(|| {
        let (answer, answered) = mpsc::sync_channel(1);
        ask.send(answer).ok();
        black_box(answered.recv())
    });
    drop(ask);
    owner.join().ok();
}

#[divan::bench]
fn build_add_safe(bencher: Bencher<'_, '_>) {
    let a = Array::scalar(1.0f32).unwrap();
    bencher.bench_local(|| a.add(&a).unwrap());
}

#[divan::bench]
fn build_add_raw(bencher: Bencher<'_, '_>) {
    // SAFETY: handles are made here, used on this thread only, and freed at the end.
    unsafe {
        let stream = sys::mlx_default_cpu_stream_new();
        let a = sys::mlx_array_new_float32(1.0);
        bencher.bench_local(|| {
            let mut out = sys::mlx_array_new();
            sys::mlx_add(&raw mut out, a, a, stream);
            sys::mlx_array_free(out);
        });
        sys::mlx_array_free(a);
        sys::mlx_stream_free(stream);
    }
}

#[divan::bench]
fn evaluate_a_scalar(bencher: Bencher<'_, '_>) {
    let a = Array::scalar(1.0f32).unwrap();
    bencher.bench_local(|| a.add(&a).unwrap().item::<f32>().unwrap());
}

#[divan::bench]
fn copy_in_and_out_1m(bencher: Bencher<'_, '_>) {
    let values = vec![1.0f32; 1 << 20];
    bencher.bench_local(|| Array::vector(&values).unwrap().to_vec::<f32>().unwrap());
}
