//! Tests with several processes: groups that compute one model, Python's mlx-lm, and a program that
//! was moved to another place.

#[path = "../common/mod.rs"]
mod common;
mod launch;
mod mlx_lm;
#[path = "../common/program.rs"]
mod program;
#[path = "../common/python.rs"]
mod python;
#[path = "../common/served.rs"]
mod served;
mod standalone;
mod vindex_numpy;
