//! Tests of the program as users see it: flags, output, terminals.

mod backends;
mod chat;
#[path = "../common/mod.rs"]
mod common;
mod devices;
mod door;
mod infer;
mod inspect;
#[path = "../common/layering.rs"]
mod layering;
mod layers;
mod presets;
mod probe;
#[path = "../common/program.rs"]
mod program;
mod python_habits;
mod screen;
mod steer;
#[path = "../common/terminal.rs"]
mod terminal;
mod tools;
mod usage;
mod vindex;
mod vindex_sweep;
mod vindex_weights;
