//! Numbers, shapes and types at their limits, under a small memory budget, which belongs to the
//! process.

#[path = "../../../tests/common/alone.rs"]
mod alone;
mod edges;
#[path = "../support/operations.rs"]
mod operations;
mod soundness_ops;
mod soundness_products;
