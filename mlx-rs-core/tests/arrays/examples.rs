//! The examples run, and each ends with a check of its own. The one with a kernel runs it where
//! there is a GPU. Elsewhere it compares a function with a gradient of its own, and says so.

#[path = "../../examples/custom_kernel.rs"]
mod custom_kernel;
#[path = "../../examples/linear_regression.rs"]
mod linear_regression;
#[path = "../../examples/mlp.rs"]
mod mlp;

#[test]
fn a_linear_regression_converges() {
    linear_regression::main().unwrap();
}

#[test]
fn a_network_learns() {
    mlp::main().unwrap();
}

#[test]
fn a_kernel_or_its_stand_in_equals_the_operation() {
    custom_kernel::main().unwrap();
}
