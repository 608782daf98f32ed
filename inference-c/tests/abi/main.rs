//! Tests of the C interface: its header, and C programs that use it.

mod header;
mod program;
