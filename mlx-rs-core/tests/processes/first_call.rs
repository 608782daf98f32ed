//! mlx-c's default error handler prints and exits the process. This crate must install its own
//! handler before the first call, also if that call fails. The test runs in a separate process, so
//! that its call is the first one.

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
