//! Tests Parquet files: rows must equal what pyarrow reads (`tools/golden/parquet.py`), and damaged
//! files must be errors.

use std::path::PathBuf;

use inference::ErrorKind;

use super::*;
use crate::text::test_support::chatml;
use crate::train::dataset::{DataOptions, Dataset};

fn fixtures() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/parquet"
    ))
}

fn rows_of(path: &Path, limits: &DataLimits) -> Result<Vec<Json>> {
    let mut rows = Vec::new();
    read_rows(path, limits, &mut |row| {
        rows.push(Json::Object(row.map_err(bad)?));
        Ok(())
    })?;
    Ok(rows)
}

#[test]
fn rows_are_those_that_pyarrow_reads() {
    let expected = std::fs::read(fixtures().join("rows.json")).unwrap();
    let expected: Map<String, Json> = serde_json::from_slice(&expected).unwrap();
    assert_eq!(expected.len(), 7);
    for (name, rows) in &expected {
        let got = rows_of(&fixtures().join(name), &DataLimits::default()).unwrap();
        assert_eq!(&Json::Array(got), rows, "{name}");
    }
}

#[test]
fn parts_of_a_file_are_read_as_one() {
    let first = fixtures().join("train-00000-of-00002.parquet");
    let read = |path: &Path, options: &DataOptions| Dataset::read(path, &chatml(), options);
    let data = read(&first, &DataOptions::new()).unwrap();
    assert_eq!(data.lines, [1, 2, 3, 4, 5]);
    let second = fixtures().join("train-00001-of-00002.parquet");
    let second = read(&second, &DataOptions::new()).unwrap();
    assert_eq!(second.examples, data.examples[3..]);

    let limited = |change: fn(&mut DataLimits)| {
        let mut limits = DataLimits::default();
        change(&mut limits);
        let error = read(&first, &DataOptions::new().with_limits(limits)).unwrap_err();
        error.to_string()
    };
    assert!(limited(|l| l.lines = 4).contains("more than 4 lines"));
    assert!(limited(|l| l.file_bytes = 10).contains("at most 10 are read"));
    assert!(limited(|l| l.line_bytes = 40).contains("line 1: the row has more than 40 bytes"));
    assert!(limited(|l| l.tokens = 2).contains("2 are read"));
}

#[test]
fn an_error_names_the_columns_that_were_left_out() {
    let error = Dataset::read(
        fixtures().join("prompts.parquet"),
        &chatml(),
        &DataOptions::new(),
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("prompts.parquet"), "{error}");
    let mut none = |_| Err(bad("no"));
    let path = fixtures().join("prompts.parquet");
    let error = read_rows(&path, &DataLimits::default(), &mut none);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("when, raw, flags"), "{error}");
}

/// Some damage cannot be detected, for example in text. All other damage must be an error.
#[test]
fn damaged_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.parquet");
    let mut errors = 0;
    for name in ["prompts", "train-00001-of-00002"] {
        let whole = std::fs::read(fixtures().join(format!("{name}.parquet"))).unwrap();
        let mut look = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            match rows_of(&path, &DataLimits::default()) {
                Ok(_) => false,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
                    errors += 1;
                    true
                }
            }
        };
        assert!(!look(&whole));
        for length in (0..whole.len()).step_by(7) {
            assert!(look(&whole[..length]), "{name}: {length} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= [0xff, 0x10, 0x01][at % 3];
            look(&damaged);
        }
    }
    assert!(errors > 1500, "{errors}");
}
