//! Tests of logits without a finite maximum, such as NaN. The request must end with an error that
//! names the step.

use std::fs;
use std::path::Path;

use crate::common::{fixture, greedy, load};
use inference::{
    BatchEvent, Error, ErrorKind, FinishReason, GenerateOptions, Grammar, LogitsProcessorFactory,
    Prompt,
};

/// A copy of the tiny Llama with NaN in one row of a float32 tensor. `width` is the row length in
/// elements.
fn damaged(tensor: &str, row: usize, width: usize) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture("tiny").join("llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let file = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let begin = 8 + header + metadata.info(tensor).unwrap().data_offsets.0 + row * width * 4;
    bytes[begin..begin + width * 4].fill(0xff);
    fs::write(&file, bytes).unwrap();
    dir
}

fn named(error: &Error, step: usize, what: &str) {
    assert_eq!(error.kind(), ErrorKind::Engine, "{what}: {error}");
    let text = error.to_string();
    assert!(
        text.contains(&format!("step {step} of the reply")),
        "{what}: {text}"
    );
    assert!(text.contains("NaN"), "{what}: {text}");
}

fn first_error(path: &Path, options: &GenerateOptions) -> (usize, Error) {
    let model = load(path);
    let mut stream = model
        .generate(&Prompt::Tokens((40..60).collect()), options)
        .unwrap();
    for before in 0..options.max_tokens {
        if let Err(error) = stream.next().expect("a token or an error") {
            assert_eq!(stream.finish_reason(), Some(FinishReason::Error));
            assert!(stream.next().is_none());
            return (before, error);
        }
    }
    panic!("{} tokens without an error", options.max_tokens);
}

#[test]
fn one_bad_norm_ends_every_kind_of_request() {
    let dir = damaged("model.norm.weight", 0, 32);
    let mut processed = greedy(4);
    processed.constraints.logits_processors = vec![LogitsProcessorFactory::new(|| {
        |_: &[u32], _: &[u32], _: &mut [f32]| Ok(())
    })];
    let mut guessed = greedy(4);
    guessed.speculative.prompt_lookup = 2;
    guessed.speculative.num_draft_tokens = 3;
    let mut forced = greedy(4);
    forced.constraints.forced_tokens = vec![7];
    for (what, options) in [
        ("greedy", greedy(4)),
        ("sampled", greedy(4).with_temperature(1.0).with_seed(3)),
        (
            "top-k",
            greedy(4).with_temperature(0.7).with_top_k(5).with_seed(3),
        ),
        ("penalty", greedy(4).with_repeat_penalty(1.3)),
        (
            "grammar",
            GenerateOptions::new()
                .with_max_tokens(4)
                .with_grammar(Grammar::Regex("[a-z]{9}".into())),
        ),
        ("processor", processed),
        ("prompt lookup", guessed),
        ("forced", forced),
    ] {
        let (before, error) = first_error(dir.path(), &options);
        assert_eq!(before, 0, "{what}");
        named(&error, 1, what);
    }
}

#[test]
fn the_step_is_that_of_the_bad_token() {
    // The options force token 7 as the third token. The step that reads token 7 computes only NaN.
    let dir = damaged("model.embed_tokens.weight", 7, 32);
    let mut options = greedy(8);
    options.constraints.forced_tokens = vec![50, 51, 7];
    let (before, error) = first_error(dir.path(), &options);
    assert_eq!(before, 3);
    named(&error, 4, "forced");
}

#[test]
fn in_a_batch_the_bad_row_alone_fails() {
    let dir = damaged("model.embed_tokens.weight", 7, 32);
    let model = load(dir.path());
    let good = Prompt::Tokens((40..60).collect());
    let alone = model.generate(&good, &greedy(6)).unwrap();
    let alone = alone.collect_output().unwrap().tokens;
    assert!(!alone.contains(&7), "choose another prompt: {alone:?}");
    let mut late = greedy(8);
    late.constraints.forced_tokens = vec![50, 7];
    let mut session = model.batch_session().unwrap();
    let first = session.add(&good, &greedy(6)).unwrap();
    let bad = session
        .add(&Prompt::Tokens(vec![9, 7]), &greedy(6))
        .unwrap();
    let later = session.add(&Prompt::Tokens(vec![9, 10]), &late).unwrap();
    let (mut tokens, mut failed, mut done) = (Vec::new(), Vec::new(), Vec::new());
    while !session.is_empty() {
        for event in session.step().unwrap() {
            match event {
                BatchEvent::Token { row, token } if row == first => tokens.push(token.id),
                BatchEvent::Failed { row, error } => failed.push((row, error)),
                BatchEvent::Done { row, .. } => done.push(row),
                _ => {}
            }
        }
    }
    assert_eq!(tokens, alone);
    assert_eq!(done, [first]);
    failed.sort_by_key(|(row, _)| *row);
    let rows: Vec<_> = failed.iter().map(|(row, _)| *row).collect();
    assert_eq!(rows, [bad, later]);
    named(&failed[0].1, 1, "in the prompt");
    named(&failed[1].1, 3, "in the reply");
}
