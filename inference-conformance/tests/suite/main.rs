//! The suite itself: correct backends pass, and each fault is found.

#![forbid(unsafe_code)]

mod broken;
mod crate_page;
#[path = "../mock/mod.rs"]
mod mock;
mod scripted;
mod well_behaved;
