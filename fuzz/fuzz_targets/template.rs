#![no_main]

#[path = "../entries/text.rs"]
mod entries;

libfuzzer_sys::fuzz_target!(|data: &[u8]| entries::template(data));
