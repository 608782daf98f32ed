//! Tests a failing asynchronous evaluation. Arrays whose work started before the failure must stay
//! readable, and so must arrays built on them. MLX alone would leave the reader waiting forever
//! (hazard 17), so a watchdog aborts the process if this test hangs.

use std::sync::Once;
use std::time::Duration;

use mlx_rs_core::{Array, Device, Dtype, Result, Stream, async_eval, eval};

/// Ends the process if the tests hang. They normally take less than a second.
fn watchdog() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_secs(120));
            eprintln!("the tests of a failed asynchronous evaluation hang");
            std::process::abort();
        });
    });
}

fn x() -> Array {
    Array::from_slice(&[0.5f32; 16], &[4, 4]).unwrap()
}

/// An operation that MLX rejects during evaluation: on the CPU, gathered products support only
/// `float32`.
fn refused(from: &Array) -> Result<Array> {
    let half = from.astype(Dtype::Float16)?.expand_dims(0)?;
    half.gather_mm(&half, None, &Array::vector(&[0u32])?, false)
}

fn check(a: &Array, value: f32) {
    let got = a.to_vec::<f32>().unwrap();
    assert!(got.iter().all(|v| (v - value).abs() < 1e-5), "{got:?}");
}

#[test]
fn what_was_started_can_be_read() {
    crate::alone::alone(
        "async_failure::what_was_started_can_be_read",
        what_was_started_can_be_read_alone,
    );
}

fn what_was_started_can_be_read_alone() {
    watchdog();
    Device::cpu()
        .scope(|| -> Result<()> {
            for _ in 0..20 {
                let started = x().exp()?;
                let between = started.square()?;
                let bad = refused(&between)?;
                assert!(
                    async_eval([&bad])
                        .unwrap_err()
                        .message()
                        .contains("float32")
                );
                check(&started, 0.5f32.exp());
                check(&between, 1.0f32.exp());
                // Evaluating again must fail again, in both ways, and nothing may wait.
                assert!(async_eval([&bad]).is_err());
                assert!(eval([&bad]).is_err());
                assert!(bad.eval().is_err());
                // Arrays built on the started work must be readable, at once and later.
                let next = between.add(&started)?;
                async_eval([&next])?;
                check(&next, 1.0f32.exp() + 0.5f32.exp());
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn across_streams_as_well() {
    crate::alone::alone(
        "async_failure::across_streams_as_well",
        across_streams_as_well_alone,
    );
}

fn across_streams_as_well_alone() {
    watchdog();
    let (a, b) = (
        Stream::new(Device::cpu()).unwrap(),
        Stream::new(Device::cpu()).unwrap(),
    );
    for _ in 0..20 {
        // The failure is on one stream. Work on the other stream does not depend on it.
        let first = a.scope(|| x().exp()).unwrap();
        let second = b.scope(|| first.square()).unwrap();
        let bad = b.scope(|| refused(&second)).unwrap();
        assert!(async_eval([&bad]).is_err());
        // `first` is not read before this point, because a read would wait for the other stream.
        let next = b.scope(|| first.add(&first)).unwrap();
        async_eval([&next]).unwrap();
        check(&next, 2.0 * 0.5f32.exp());
        check(&second, 1.0f32.exp());
        check(&first, 0.5f32.exp());
        a.synchronize().unwrap();
        b.synchronize().unwrap();
    }
}
