//! Tests the helpers of walkers by their properties, edges and circuits against their definitions,
//! and truncated files.

use inference_probe::walkers::circuits::Head;
use inference_probe::walkers::edges::{THRESHOLDS, edges};
use inference_probe::walkers::vectors::{Extraction, Header, Line, Named, VERSION};
use inference_probe::walkers::{Lines, Scored, counts, round, top_k};
use proptest::prelude::*;

fn scores() -> impl Strategy<Value = Vec<f32>> {
    // There are only a few different numbers, so that equal ones occur.
    let number = prop_oneof![
        12 => (-8i32..9).prop_map(|n| n as f32 * 0.25),
        1 => Just(f32::NAN),
        1 => Just(f32::INFINITY),
        1 => Just(f32::NEG_INFINITY),
        1 => Just(-0.0),
    ];
    prop::collection::vec(number, 0..60)
}

proptest! {
    /// The result must equal that of a full sort.
    #[test]
    fn the_best_are_those_of_a_sort(scores in scores(), k in 0usize..70, least in -3i32..4) {
        let least = least as f32 * 0.5;
        let mut expected: Vec<(f32, u32)> = scores.iter().copied().zip(0..).collect();
        expected.retain(|(score, _)| *score >= least);
        expected.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        expected.truncate(k);
        let actual = top_k(&scores, k, least);
        let actual: Vec<(f32, u32)> = actual.iter().map(|s| (s.score, s.id)).collect();
        prop_assert_eq!(actual, expected);
    }

    /// A rounded number must be close, have no further digits, and not change when rounded again.
    #[test]
    fn rounding_is_near_and_final(x in -1e9f64..1e9, digits in 0u32..7) {
        let rounded = round(x, digits);
        let unit = 10f64.powi(-(digits as i32));
        prop_assert!((rounded - x).abs() <= unit * 0.5 + x.abs() * 1e-15);
        prop_assert_eq!(round(rounded, digits), rounded);
        prop_assert_eq!(round(-x, digits), -rounded);
    }

    /// Counts must decrease with increasing thresholds, and must equal those of a filter.
    #[test]
    fn counts_are_those_of_a_filter(values in prop::collection::vec(0.0f64..1.0, 0..50)) {
        let actual = counts(&values, &THRESHOLDS);
        prop_assert!(actual.is_sorted_by(|a, b| a >= b));
        for (n, t) in actual.iter().zip(THRESHOLDS) {
            prop_assert_eq!(*n, values.iter().filter(|v| **v >= t).count());
        }
    }

    /// Edges must be sorted, between 0 and 1, and unique per pair; the best edge is 1.
    #[test]
    fn edges_are_pairs_by_confidence(
        features in prop::collection::vec((scores(), scores()), 0..6),
    ) {
        let best = |all: &[f32]| top_k(all, 3, 0.02);
        let keep = |all: Vec<Scored>| -> Vec<Scored> {
            all.into_iter().filter(|s| s.score.is_finite()).collect()
        };
        let inputs: Vec<_> = features.iter().map(|(a, _)| keep(best(a))).collect();
        let outputs: Vec<_> = features.iter().map(|(_, b)| keep(best(b))).collect();
        let (actual, stats) = edges(2, &inputs, &outputs);
        let pairs: usize = inputs.iter().zip(&outputs).map(|(a, b)| a.len() * b.len()).sum();
        prop_assert_eq!(actual.len(), pairs);
        prop_assert_eq!(stats.edges, pairs);
        prop_assert!(actual.is_sorted_by(|a, b| a.c >= b.c));
        prop_assert!(actual.iter().all(|e| e.c > 0.0 && e.c <= 1.0 && e.selectivity <= 1.0));
        for edge in &actual {
            let product = edge.c_in * edge.c_out;
            prop_assert!((edge.c * stats.max_product - product).abs() <= 1e-12 * product);
        }
        prop_assert_eq!(actual.first().map_or(1.0, |e| e.c), 1.0);
        prop_assert!(stats.connected <= stats.features);
    }

    /// The computed length must be that of the added vector, and both must match the matrix
    /// multiplication.
    #[test]
    fn a_head_adds_the_product_of_its_matrices(
        numbers in prop::collection::vec(-2.0f32..2.0, 2 * 3 * 5 + 4 * 5),
    ) {
        const HIDDEN: usize = 5;
        let (values, rest) = numbers.split_at(3 * HIDDEN);
        let (outputs, tokens) = rest.split_at(3 * HIDDEN);
        let head = Head { values, outputs, hidden: HIDDEN };
        let tokens: Vec<&[f32]> = tokens.chunks(HIDDEN).collect();
        let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let scores: Vec<Vec<f32>> = values
            .chunks(HIDDEN)
            .map(|row| tokens.iter().map(|t| dot(row, t)).collect())
            .collect();
        let lengths = head.lengths(&scores).unwrap();
        for (token, length) in lengths.iter().enumerate() {
            let value: Vec<f32> = scores.iter().map(|row| row[token]).collect();
            let added = head.added(&value);
            // By definition: sum over d of W_O[:, d] (W_V[d, :] e).
            for (i, x) in added.iter().enumerate() {
                let terms = (0..3).map(|d| {
                    f64::from(outputs[d * HIDDEN + i])
                        * f64::from(dot(&values[d * HIDDEN..][..HIDDEN], tokens[token]))
                });
                let expected: f64 = terms.sum();
                prop_assert!((f64::from(*x) - expected).abs() < 1e-4);
            }
            let norm = dot(&added, &added).sqrt();
            prop_assert!((norm - length).abs() <= 1e-3 * norm.max(1.0), "{norm} {length}");
        }
    }
}

#[test]
fn matrices_that_are_no_head_are_refused() {
    let numbers = [1.0f32; 12];
    for (values, outputs, hidden) in [(6, 4, 2), (5, 5, 2), (0, 0, 2), (4, 4, 0)] {
        let head = Head {
            values: &numbers[..values],
            outputs: &numbers[..outputs],
            hidden,
        };
        assert!(head.dim().is_err(), "{values} {outputs} {hidden}");
        assert!(head.lengths(&[]).is_err());
    }
    let head = Head {
        values: &numbers[..4],
        outputs: &numbers[..4],
        hidden: 2,
    };
    assert!(head.lengths(&[vec![1.0], vec![]]).is_err());
    assert!(head.lengths(&[vec![1.0]]).is_err());
}

fn header() -> Header {
    Header {
        version: VERSION,
        component: "ffn_gate".into(),
        model: "m".into(),
        identity: "00".into(),
        hidden_size: 2,
        top_k: 1,
    }
}

fn line(layer: usize, index: usize) -> Line {
    Line {
        layer,
        index,
        vector: vec![layer as f32, index as f32 * 0.1],
        input: None,
        top_k: vec![Named {
            token: 3,
            text: "\"\n".into(),
            score: 0.5,
        }],
    }
}

/// Writes the layers that the file lacks. Stops after at most `stop` lines.
fn write(path: &std::path::Path, resume: bool, stop: usize) -> usize {
    let mut file = Extraction::open(path, &header(), resume).unwrap();
    let mut written = 0;
    for layer in 0..3 {
        if file.has(layer) {
            continue;
        }
        for index in 0..4 {
            if written == stop {
                return written;
            }
            file.line(&line(layer, index)).unwrap();
            written += 1;
        }
        file.end_layer(layer).unwrap();
    }
    written
}

#[test]
fn what_is_cut_anywhere_goes_on_and_ends_as_if_it_was_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ndjson");
    assert_eq!(write(&path, false, usize::MAX), 12);
    let all = std::fs::read(&path).unwrap();
    let lines: Vec<serde_json::Value> = all
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).unwrap())
        .collect();
    assert_eq!(lines.len(), 1 + 3 * 5);
    assert_eq!(lines[1]["top_k"][0]["text"], "\"\n");
    let hash = &lines[5]["sha256"];
    assert_eq!(hash.as_str().unwrap().len(), 64);
    let done = serde_json::json!({"done": 0, "vectors": 4, "sha256": hash});
    assert_eq!(lines[5], done);
    let first_line = all.iter().position(|b| *b == b'\n').unwrap() + 1;
    for end in (first_line..=all.len()).step_by(7) {
        std::fs::write(&path, &all[..end]).unwrap();
        write(&path, true, usize::MAX);
        assert!(std::fs::read(&path).unwrap() == all, "cut at {end}");
    }
    // Nothing remains to be written, and an existing file must not be overwritten.
    assert_eq!(write(&path, true, usize::MAX), 0);
    assert!(Extraction::open(&path, &header(), false).is_err());
}

#[test]
fn another_file_is_not_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ndjson");
    let refused = |bytes: &[u8], why: &str| {
        std::fs::write(&path, bytes).unwrap();
        let error = Extraction::open(&path, &header(), true)
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    };
    refused(b"", "not the header");
    refused(b"{}\n", "not the header");
    refused(&[0xff; 100], "not the header");
    let header_json = serde_json::to_string(&header()).unwrap();
    refused(header_json.as_bytes(), "not the header"); // without its line end
    refused(
        format!("{}\n", header_json.replace("\"00\"", "\"01\"")).as_bytes(),
        "another model",
    );
    let lies = format!("{header_json}\n{{\"done\":0,\"vectors\":1}}\n");
    refused(lies.as_bytes(), "the number of vectors");
    std::fs::remove_file(&path).unwrap();
    let mut file = Extraction::open(&path, &header(), true).unwrap();
    let mut bad = line(0, 0);
    bad.vector[1] = f32::NAN;
    assert!(
        file.line(&bad)
            .unwrap_err()
            .to_string()
            .contains("no finite number")
    );
}

/// A changed byte must cause an error, or its layer must count as incomplete and be written again.
#[test]
fn no_changed_byte_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.ndjson");
    write(&path, false, usize::MAX);
    let all = std::fs::read(&path).unwrap();
    let mut refused = 0;
    for at in 0..all.len() {
        let mut bytes = all.clone();
        bytes[at] ^= 2;
        std::fs::write(&path, &bytes).unwrap();
        match Extraction::open(&path, &header(), true) {
            Err(_) => {
                refused += 1;
                assert_eq!(std::fs::read(&path).unwrap(), bytes, "{at}");
            }
            Ok(file) => {
                drop(file);
                write(&path, true, usize::MAX);
                assert!(std::fs::read(&path).unwrap() == all, "byte {at}");
            }
        }
    }
    assert!(refused > all.len() / 2, "{refused} of {}", all.len());
    // Files of an earlier version have no hashes.
    let text = String::from_utf8(all).unwrap();
    let cut = |line: &str| match line.split_once(",\"sha256\"") {
        Some((before, _)) => format!("{before}}}\n"),
        None => format!("{line}\n"),
    };
    std::fs::write(&path, text.lines().map(cut).collect::<String>()).unwrap();
    assert_eq!(write(&path, true, usize::MAX), 0);
}

#[test]
fn lines_appear_when_they_are_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("e.jsonl");
    let mut lines = Lines::create(&path).unwrap();
    lines.line(&Scored { id: 1, score: 0.5 }).unwrap();
    assert!(!path.exists());
    lines.finish().unwrap();
    assert_eq!(
        std::fs::read_to_string(&path).unwrap(),
        "{\"id\":1,\"score\":0.5}\n"
    );
}
