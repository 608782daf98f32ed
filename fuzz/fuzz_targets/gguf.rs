#![no_main]

#[path = "../entries/formats.rs"]
mod entries;

libfuzzer_sys::fuzz_target!(|data: &[u8]| entries::gguf(data));
