//! Runs this crate's fuzz targets for a short time with a stable compiler; see `fuzz/README.md`.

#[path = "../../../fuzz/bounded.rs"]
mod bounded;
#[path = "../../../fuzz/entries/text.rs"]
mod entries;

use bounded::Target;

#[test]
fn no_input_crashes_or_takes_much_memory() {
    bounded::run(&[
        Target {
            name: "gguf tokenizer",
            corpus: "gguf",
            is_text: false,
            entry: entries::gguf_tokenizer,
            runs: 8_000,
        },
        Target {
            name: "template",
            corpus: "template",
            is_text: true,
            entry: entries::template,
            runs: 10_000,
        },
    ]);
}
