//! Crates outside of the workspace that use it, each built by Cargo in the test.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/dependant.rs"]
mod dependant;
mod outside;
mod plugin;
mod registration;
