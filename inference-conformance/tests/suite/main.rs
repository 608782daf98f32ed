//! Tests of the suite itself: correct backends must pass, and each fault must be found.

#![forbid(unsafe_code)]

mod broken;
mod crate_page;
#[path = "../mock/mod.rs"]
mod mock;
mod scripted;
mod well_behaved;
