//! Compares flash attention with the full score matrix, at the sizes of
//! `examples/bench_attention.rs`, which prints the tables.
//!
//! `cargo bench -p rust-mlx-core --bench attention`

#[path = "../examples/bench_attention.rs"]
mod bench_attention;

fn main() -> mlx_rs_core::Result<()> {
    bench_attention::main()
}
