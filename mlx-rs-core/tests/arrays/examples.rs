//! Runs the examples, each of which ends with a check. The example with a kernel runs the kernel
//! only on a GPU. On other machines it compares a function with its custom gradient, and prints
//! that.

#[path = "../../examples/attention_demo.rs"]
mod attention_demo;
#[path = "../../examples/backend_demo.rs"]
mod backend_demo;
#[path = "../../examples/bench_attention.rs"]
#[allow(dead_code, reason = "its `main` takes a while")]
mod bench_attention;
#[path = "../../examples/bench_backend.rs"]
#[allow(dead_code, reason = "its `main` takes a while")]
mod bench_backend;
#[path = "../../examples/custom_kernel.rs"]
mod custom_kernel;
#[path = "../../examples/linear_regression.rs"]
mod linear_regression;
#[path = "../../examples/mlp.rs"]
mod mlp;
#[path = "../../examples/tiled_product.rs"]
pub(crate) mod tiled_product;

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

#[test]
fn a_product_in_tiles_or_its_stand_in_is_the_product() {
    tiled_product::main().unwrap();
}

#[test]
fn products_of_all_backends_agree() {
    backend_demo::main().unwrap();
}

#[test]
fn attention_in_blocks_is_that_of_all_scores() {
    attention_demo::main().unwrap();
}

/// Runs the benches of matrix multiplication and of attention with small sizes.
#[test]
fn the_benches_run() {
    bench_backend::run(&[(6, 6, 256), (1, 300, 64)], 2).unwrap();
    // Results for the longest sizes are compared with sums in float64.
    let error = bench_attention::run(&[(1, 32), (6, 128)], &[6, 40, 2048], 2).unwrap();
    assert!(error > 0.0 && error < 2e-6, "{error}");
}
