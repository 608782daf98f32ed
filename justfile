# What one does daily; `just --list` shows it.

# Everything a change must pass.
check:
    bash .ci/run

# The tests of one crate: just test rust-mlx-inference-text
test crate *args:
    cargo test -p {{crate}} {{args}}

# Golden values of the model families, compared again.
golden:
    cargo test --test engine -- golden:: gguf_families::

# Rates of the first model: just bench --repeat 5
bench *args:
    cargo run --release -- bench --model smollm2 {{args}}

# Beside mlx-lm and llama.cpp, in interleaved rounds (needs their Python packages).
compare *args:
    cargo build --release
    python3 tools/compare.py {{args}}
