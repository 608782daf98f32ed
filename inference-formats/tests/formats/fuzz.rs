//! Runs this crate's fuzz targets for a short time with a stable compiler; see `fuzz/README.md`.

#[path = "../../../fuzz/bounded.rs"]
mod bounded;
#[path = "../../../fuzz/entries/formats.rs"]
mod entries;

use bounded::Target;

#[test]
fn no_input_crashes_or_takes_much_memory() {
    bounded::run(&[
        Target {
            name: "config",
            corpus: "config",
            is_text: true,
            entry: entries::config,
            runs: 40_000,
        },
        Target {
            name: "safetensors",
            corpus: "safetensors",
            is_text: false,
            entry: entries::safetensors,
            runs: 10_000,
        },
        Target {
            name: "gguf",
            corpus: "gguf",
            is_text: false,
            entry: entries::gguf,
            runs: 8_000,
        },
    ]);
}
