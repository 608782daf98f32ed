//! Tests that build crates outside the workspace which depend on it.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/dependant.rs"]
mod dependant;
mod outside;
mod plugin;
mod registration;
