//! Every handle and byte must be released, also after errors.
//!
//! The test runs in a separate process, because the counters would also count concurrent tests.

use mlx_rs_core::{Dtype, memory, ones};

#[test]
fn handles_and_bytes_are_given_back() {
    crate::alone::alone(
        "leaks::handles_and_bytes_are_given_back",
        handles_and_bytes_are_given_back_alone,
    );
}

fn handles_and_bytes_are_given_back_alone() {
    let other = ones(&[3], Dtype::Float32).unwrap();
    other.eval().unwrap();
    let (before, bytes) = (memory::live_arrays(), memory::active().unwrap());
    {
        let a = ones(&[1 << 16], Dtype::Float32).unwrap();
        for _ in 0..100 {
            let b = a.add(&a).unwrap();
            b.eval().unwrap();
            let _ = b.add(&other).unwrap_err();
        }
        assert_eq!(memory::live_arrays() - before, 1);
    }
    assert_eq!(memory::live_arrays(), before);
    assert_eq!(memory::active().unwrap(), bytes);
}
