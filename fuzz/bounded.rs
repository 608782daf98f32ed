//! A bounded fuzzing run on a stable compiler: the corpus, and mutations of it from a fixed seed.
//! `README.md` beside this file describes the long run. A crate's `tests/fuzz.rs` includes this
//! file, and runs all its targets in one test. The run also checks the memory of the process.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// A xorshift generator of Marsaglia. Its numbers are equal on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Integers at which arithmetic may overflow or change its sign.
const NUMBERS: [u64; 12] = [
    0,
    1,
    31,
    32,
    0x7f,
    0xff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    1 << 62,
    i64::MAX as u64,
    u64::MAX,
];

/// Words for mutated texts, for targets with text inputs.
const WORDS: [&str; 34] = [
    "0",
    "-1",
    "1e999",
    "99999999999999999999",
    "4294967296",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "[[[[",
    "}}}}",
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{% for x in range(99999) %}",
    "{% endfor %}",
    "{% set x = x ~ x %}",
    "{% if true %}",
    "{% endif %}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "messages",
    "| tojson",
    "| list",
    "| join('aaaaaaaa')",
    " ~ ",
    "'",
    "\\",
    "\u{0}",
    "é",
    "\u{10ffff}",
];

fn mutate(input: &mut Vec<u8>, corpus: &[Vec<u8>], is_text: bool, random: &mut Random) {
    for _ in 0..=random.below(4) {
        let at = random.below(input.len() + 1);
        let end = (at + 1 + random.below(16)).min(input.len());
        match random.below(if is_text { 9 } else { 7 }) {
            0 if at < input.len() => input[at] ^= 1 << random.below(8),
            1 if at < input.len() => input[at] = random.next() as u8,
            2 => input.truncate(at),
            3 => drop(input.drain(at..end)),
            4 => {
                let copy = input[at..end].to_vec();
                let to = random.below(input.len() + 1);
                input.splice(to..to, copy);
            }
            5 => {
                // Writes one of these integers, at a position where the input has one, or anywhere.
                let width = [1, 2, 4, 8][random.below(4)];
                let value = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
                if at + width <= input.len() {
                    input[at..at + width].copy_from_slice(&value[..width]);
                }
            }
            6 => {
                let other = &corpus[random.below(corpus.len())];
                let from = random.below(other.len() + 1);
                input.truncate(at);
                input.extend(&other[from..]);
            }
            7 => {
                let word = WORDS[random.below(WORDS.len())].bytes();
                input.splice(at..at, word);
            }
            8 => {
                // Replaces one number of a text by a word.
                let digit = |b: &u8| b.is_ascii_digit();
                if let Some(first) = input[at..].iter().position(digit) {
                    let first = at + first;
                    let length = input[first..].iter().take_while(|b| digit(b)).count();
                    let word = WORDS[random.below(12)].bytes();
                    input.splice(first..first + length, word);
                }
            }
            _ => {}
        }
    }
    input.truncate(64 << 10);
}

/// Peak resident memory so far in bytes, if the system reports it.
fn peak() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace()
        .nth(1)?
        .parse::<u64>()
        .ok()
        .map(|k| k << 10)
}

/// A function to fuzz.
pub struct Target {
    /// A description for messages.
    pub name: &'static str,
    /// The directory below `fuzz/corpus` with the initial inputs.
    pub corpus: &'static str,
    /// Whether the target's inputs are texts.
    pub is_text: bool,
    /// The function. It receives one input.
    pub entry: fn(&[u8]),
    /// Number of mutations per run.
    pub runs: usize,
}

/// The environment variable with a factor on the number of mutations. It also selects another seed.
const TIMES: &str = "MLX_FUZZ_TIMES";

/// Runs all targets.
///
/// # Panics
/// If an input crashes an entry, whose file the message names, or if memory grows by more than 256
/// MiB.
pub fn run(targets: &[Target]) {
    let times: u64 = std::env::var(TIMES).map_or(1, |n| n.parse().expect(TIMES));
    for target in targets {
        let name = target.name;
        let runs = target.runs * times as usize;
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../fuzz/corpus")
            .join(target.corpus);
        let mut paths: Vec<_> = fs::read_dir(&dir)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        paths.sort();
        let corpus: Vec<Vec<u8>> = paths.iter().map(|p| fs::read(p).unwrap()).collect();
        assert!(corpus.len() >= 3, "{name}");
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (times - 1));
        let before = peak();
        for n in 0..corpus.len() + runs {
            let mut input = corpus[n % corpus.len()].clone();
            if n >= corpus.len() {
                mutate(&mut input, &corpus, target.is_text, &mut random);
            }
            if catch_unwind(AssertUnwindSafe(|| (target.entry)(&input))).is_err() {
                let path = std::env::temp_dir().join(format!("fuzz-{name}-{n}"));
                fs::write(&path, &input).unwrap();
                panic!("{name}: run {n} crashed; its input is {}", path.display());
            }
        }
        if let (Some(before), Some(after)) = (before, peak()) {
            // Some kernels also count pages that were freed.
            let grown = after.saturating_sub(before) >> 20;
            assert!(grown < 256, "{name}: memory grew by {grown} MiB");
        }
    }
}
