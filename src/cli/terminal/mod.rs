//! Terminal input and output: results, progress, the screen of a reply, lines, Ctrl-C, and failures
//! with their exit codes.

pub mod bounded;
pub mod console;
pub mod failure;
pub mod interrupt;
pub mod lines;
pub mod progress;
pub mod screen;
pub mod tty;
pub mod wrap;
