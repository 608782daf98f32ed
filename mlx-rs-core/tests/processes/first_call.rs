//! mlx-c's default error handler prints and exits the process. The handler of this crate must be
//! installed before the first call, also when that call fails. Therefore the test runs in a
//! separate process.

#[test]
fn the_first_call_of_a_process_may_fail() {
    crate::alone::alone(
        "first_call::the_first_call_of_a_process_may_fail",
        the_first_call_of_a_process_may_fail_alone,
    );
}

fn the_first_call_of_a_process_may_fail_alone() {
    let e = mlx_rs_core::Array::from_slice(&[1.0f32, 2.0], &[2])
        .and_then(|a| a.reshape(&[3]))
        .unwrap_err();
    assert!(e.message().contains("reshape"), "{e}");
}
