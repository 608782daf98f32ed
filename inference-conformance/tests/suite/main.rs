//! The suite itself: it passes well-behaved backends and finds each fault.

#![forbid(unsafe_code)]

mod broken;
mod crate_page;
#[path = "../mock/mod.rs"]
mod mock;
mod well_behaved;
