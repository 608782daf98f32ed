//! Tests of reading files: every bad line must be reported, and every limit must be enforced.

use super::*;
use crate::text::test_support::chatml;
use proptest::prelude::*;

fn read_text(content: impl AsRef<[u8]>, options: &DataOptions) -> Result<Dataset> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("train.jsonl");
    std::fs::write(&path, content).unwrap();
    Dataset::read(path, &chatml(), options)
}

#[test]
fn bad_lines_are_told_by_file_and_line() {
    let content = "{\"text\": \"a\"}\n{\"text\": \n\n[1]\n{\"prompt\": \"x\"}\n{\"text\": \"b\"}";
    let error = read_text(content, &DataOptions::new())
        .unwrap_err()
        .to_string();
    for what in [
        "train.jsonl",
        "3 bad lines",
        "line 2: not JSON: EOF while parsing a value, at column",
        "line 4: the line is JSON, but not an object",
        "line 5: \"text\" is missing",
    ] {
        assert!(error.contains(what), "{what}: {error}");
    }
    let data = read_text(content, &DataOptions::new().with_skip_bad_lines(true)).unwrap();
    assert_eq!(data.lines, [1, 6]);
    assert_eq!(data.blank_lines, 1);
    assert_eq!(
        data.bad_lines.iter().map(|b| b.line).collect::<Vec<_>>(),
        [2, 4, 5]
    );
}

#[test]
fn limits_hold() {
    let limited = |change: fn(&mut DataLimits)| {
        let mut limits = DataLimits::default();
        change(&mut limits);
        let content = "{\"text\": \"hello\"}\n{\"text\": \"hello world\"}\n";
        read_text(content, &DataOptions::new().with_limits(limits))
            .unwrap_err()
            .to_string()
    };
    assert!(limited(|l| l.file_bytes = 10).contains("at most 10 are read"));
    assert!(limited(|l| l.line_bytes = 17).contains("line 2: the line has more than 17 bytes"));
    assert!(limited(|l| l.lines = 1).contains("more than 1 lines"));
    assert!(limited(|l| l.tokens = 2).contains("up to line 2"));
    let deep = "[".repeat(200_000);
    let error = read_text(deep, &DataOptions::new())
        .unwrap_err()
        .to_string();
    assert!(error.contains("recursion limit"), "{error}");
    let many = "x\n".repeat(5000);
    let error = read_text(many, &DataOptions::new())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("1000 bad lines") && error.len() < 5000,
        "{error}"
    );
}

#[test]
fn empty_and_absent_files_are_errors() {
    assert!(
        read_text("", &DataOptions::new())
            .unwrap_err()
            .to_string()
            .contains("no examples")
    );
    let dir = tempfile::tempdir().unwrap();
    let read = |p: &Path| DataDir::read(p, &chatml(), &DataOptions::new()).map(drop);
    assert!(
        read(dir.path())
            .unwrap_err()
            .to_string()
            .contains("none of the three")
    );
    assert!(
        read(&dir.path().join("no"))
            .unwrap_err()
            .to_string()
            .contains("no such directory")
    );
    std::fs::create_dir(dir.path().join("train.jsonl")).unwrap();
    assert!(
        read(dir.path())
            .unwrap_err()
            .to_string()
            .contains("not a regular file")
    );
}

#[test]
fn the_data_we_ship_is_good() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/data/pirate");
    let options = DataOptions::new().with_mask_prompt(true);
    let data = DataDir::read(dir, &chatml(), &options).unwrap();
    let sizes = [&data.train, &data.valid, &data.test].map(|d| d.as_ref().unwrap().examples.len());
    assert_eq!(sizes, [100, 20, 20]);
    let test = data.test.unwrap();
    assert!(test.nothing_learned(256).is_empty());
    assert_eq!(test.nothing_learned(1).len(), 20);
    for example in &test.examples {
        let learned = &example.ids[example.parts[0].offset..];
        let said = chatml().tokenizer().decode(learned).unwrap();
        assert!(
            said.starts_with("Arr! ") && said.contains(", matey."),
            "{said:?}"
        );
    }
}

proptest! {
    #[test]
    fn no_line_is_lost(content in "(\\{\"text\": \"[a-z]{0,3}\"\\}|[ {}\\[\\]\"a-z]{0,6}|\n){0,12}") {
        let total = content.lines().count();
        match read_text(&content, &DataOptions::new().with_skip_bad_lines(true)) {
            Ok(d) => prop_assert_eq!(d.examples.len() + d.bad_lines.len() + d.blank_lines, total),
            Err(e) => prop_assert_eq!(e.kind(), ErrorKind::InvalidOption),
        }
    }

    #[test]
    fn bytes_of_any_kind_do_no_harm(content in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = read_text(content, &DataOptions::new());
    }
}
