//! Tests that read the sources: the order of modules, and code that is compiled elsewhere.

mod layering;
mod platforms;
