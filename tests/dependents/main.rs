//! Tests that build separate crates, outside the workspace, that depend on the workspace's crates.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/dependant.rs"]
mod dependant;
mod outside;
mod plugin;
mod registration;
