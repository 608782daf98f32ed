//! Tests of statistics against references, and of files of features and windows.

#![forbid(unsafe_code)]

mod golden;
mod vindex;
mod walkers;
mod windows;
