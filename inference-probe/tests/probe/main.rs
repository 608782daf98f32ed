//! Statistics against references, and files of features and windows.

#![forbid(unsafe_code)]

mod golden;
mod vindex;
mod walkers;
mod windows;
