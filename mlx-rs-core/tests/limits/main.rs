//! Tests numbers, shapes and types at their limits. The tests run under a small memory budget, so
//! they have a process of their own.

#[path = "../../../tests/common/alone.rs"]
mod alone;
mod edges;
#[path = "../support/operations.rs"]
mod operations;
mod soundness_ops;
mod soundness_products;
