//! Compares ids, mask offsets and batches with those of mlx-lm (`tools/golden/datasets.py`).

use super::shuffle::Shuffler;
use super::*;
use crate::text::TextPipeline;
use serde::Deserialize;
use serde_json::{Map, Value as Json};

#[derive(Deserialize)]
struct Golden {
    model: String,
    lines: Vec<Line>,
    lengths: Vec<usize>,
    streams: Vec<Stream>,
    permutations: Vec<Permutations>,
}

#[derive(Deserialize)]
struct Line {
    line: Map<String, Json>,
    mask: bool,
    ids: Vec<u32>,
    offset: usize,
}

#[derive(Deserialize)]
struct Stream {
    by_length: bool,
    batch_size: usize,
    max_seq_length: usize,
    seed: u32,
    batches: Vec<Expected>,
}

#[derive(Deserialize)]
struct Expected {
    width: usize,
    tokens: Vec<u32>,
    spans: Vec<[u32; 2]>,
}

#[derive(Deserialize)]
struct Permutations {
    seed: u32,
    orders: Vec<Vec<u32>>,
}

fn golden() -> Golden {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/datasets.json");
    let text = std::fs::read_to_string(path).expect("the golden file is there");
    serde_json::from_str(&text).expect("the golden file is whole")
}

#[test]
fn lines_become_mlx_lm_s_ids_and_offsets() {
    let golden = golden();
    let dir = format!("{}/../{}", env!("CARGO_MANIFEST_DIR"), golden.model);
    let pipeline = TextPipeline::from_dir(dir, "llama").unwrap();
    let names = FieldNames::default();
    for case in &golden.lines {
        let format = Format::from_line(&case.line, &names, case.mask).unwrap();
        let example = format
            .example(&case.line, &names, case.mask, &pipeline)
            .unwrap();
        assert_eq!(example.ids, case.ids, "{:?}", case.line);
        assert_eq!(example.parts[0].offset, case.offset, "{:?}", case.line);
    }
    assert!(golden.lines.len() > 10);
}

#[test]
fn batches_are_mlx_lm_s_in_its_order() {
    let golden = golden();
    let examples: Vec<Example> = golden
        .lengths
        .iter()
        .zip(1_u32..)
        .map(|(length, id)| Example::new(vec![id; *length], 2))
        .collect();
    for stream in &golden.streams {
        let order = if stream.by_length {
            Order::ByLength
        } else {
            Order::AsRead
        };
        let options = BatchOptions::new()
            .with_batch_size(stream.batch_size)
            .with_max_seq_length(stream.max_seq_length)
            .with_order(order)
            .with_seed(stream.seed);
        let mut batches = Batches::new(&examples, options).unwrap();
        for (n, expected) in stream.batches.iter().enumerate() {
            let batch = batches.next_batch();
            assert_eq!(
                batch.width, expected.width,
                "batch {n} of seed {}",
                stream.seed
            );
            assert_eq!(
                batch.tokens, expected.tokens,
                "batch {n} of seed {}",
                stream.seed
            );
            assert_eq!(
                batch.spans, expected.spans,
                "batch {n} of seed {}",
                stream.seed
            );
        }
    }
}

#[test]
fn permutations_are_numpy_s() {
    for case in golden().permutations {
        let mut shuffler = Shuffler::new(case.seed);
        for order in case.orders {
            assert_eq!(
                shuffler.permutation(order.len() as u32),
                order,
                "seed {}",
                case.seed
            );
        }
    }
}
