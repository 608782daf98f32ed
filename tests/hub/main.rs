//! Tests of downloads from and uploads to a hub that runs in the test.

#[path = "../common/mod.rs"]
mod common;
mod download;
mod fake_hub;
mod push;
