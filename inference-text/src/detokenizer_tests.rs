//! Compares streamed decoding with decoding whole sequences. The text must be equal up to the first
//! stop string.

use proptest::prelude::*;

use super::*;
use crate::testing::{IM_END, byte_level, char_of, sentence_piece};

/// The complete result of a stream: texts with their ids, and the stop string.
fn stream(
    tokenizer: &Arc<Tokenizer>,
    ids: &[u32],
    stop: &[&str],
) -> (Vec<(u32, String)>, Option<String>) {
    let stop: Vec<String> = stop.iter().map(|s| (*s).to_owned()).collect();
    let mut stream = Detokenizer::new(tokenizer.clone(), &stop);
    let mut ready = Vec::new();
    for id in ids {
        let step = stream.push(*id);
        ready.extend(step.ready);
        if step.stopped.is_some() {
            return (ready, step.stopped);
        }
    }
    let end = stream.finish();
    ready.extend(end.ready);
    (ready, end.stopped)
}

fn joined(ready: &[(u32, String)]) -> String {
    ready.iter().map(|(_, text)| text.as_str()).collect()
}

/// The text up to the first position where a stop string is complete.
fn reference(text: &str, stop: &[&str]) -> (String, bool) {
    for end in (0..=text.len()).filter(|n| text.is_char_boundary(*n)) {
        if let Some(longest) = stop
            .iter()
            .filter(|s| text[..end].ends_with(**s))
            .map(|s| s.len())
            .max()
        {
            return (text[..end - longest].to_owned(), true);
        }
    }
    (text.to_owned(), false)
}

fn bytes(tokenizer: &Tokenizer, bytes: &[u8]) -> Vec<u32> {
    bytes
        .iter()
        .map(|b| tokenizer.id_of(&char_of(*b).to_string()).unwrap())
        .collect()
}

#[test]
fn a_character_is_never_split() {
    let tokenizer = Arc::new(byte_level());
    let ids = bytes(&tokenizer, "a😀é".as_bytes());
    let mut stream = Detokenizer::new(tokenizer, &[]);
    let steps: Vec<_> = ids.iter().map(|id| stream.push(*id).ready).collect();
    assert_eq!(steps[0], [(ids[0], "a".to_owned())]);
    assert!(steps[1..4].iter().all(Vec::is_empty), "{steps:?}");
    assert_eq!(joined(&steps[4]), "😀");
    assert_eq!(steps[4].len(), 4);
    assert_eq!(steps[4][3], (ids[4], "😀".to_owned()));
    assert!(steps[5].is_empty());
    assert_eq!(joined(&steps[6]), "é");
    assert_eq!(stream.finish(), Released::default());
}

#[test]
fn what_stays_incomplete_is_flushed_on_the_last_token() {
    let tokenizer = Arc::new(byte_level());
    let ids = bytes(&tokenizer, &[b'x', 0xF0, 0x9F]);
    let mut stream = Detokenizer::new(tokenizer.clone(), &[]);
    for id in &ids {
        stream.push(*id);
    }
    let end = stream.finish();
    assert_eq!(
        end.ready,
        [(ids[1], String::new()), (ids[2], "\u{FFFD}".to_owned())]
    );
    assert_eq!(tokenizer.decode(&ids).unwrap(), "x\u{FFFD}");
}

#[test]
fn tokens_wait_for_a_possible_stop_string_and_come_with_their_own_text() {
    let tokenizer = Arc::new(byte_level());
    let ids = bytes(&tokenizer, b"a<b><c");
    let mut stream = Detokenizer::new(tokenizer, &["<b>>".to_owned()]);
    let text = |r: Released| r.ready.into_iter().map(|(_, t)| t).collect::<Vec<_>>();
    assert_eq!(text(stream.push(ids[0])), ["a"]);
    assert!(text(stream.push(ids[1])).is_empty());
    assert!(text(stream.push(ids[2])).is_empty());
    assert!(text(stream.push(ids[3])).is_empty());
    assert_eq!(text(stream.push(ids[4])), ["<", "b", ">"]);
    assert_eq!(text(stream.push(ids[5])), ["<", "c"]);
}

#[test]
fn a_stop_string_ends_the_stream_and_is_left_out() {
    let tokenizer = Arc::new(byte_level());
    let ids = tokenizer.encode("say hello world", false).unwrap();
    let (ready, stopped) = stream(&tokenizer, &ids, &["llo w", "zzz"]);
    assert_eq!(stopped.as_deref(), Some("llo w"));
    assert_eq!(joined(&ready), "say he");
    let mut over = Detokenizer::new(tokenizer.clone(), &["a".to_owned()]);
    let a = tokenizer.id_of("a").unwrap();
    assert_eq!(
        over.push(a),
        Released {
            ready: vec![(a, String::new())],
            stopped: Some("a".into())
        }
    );
    assert_eq!(
        over.push(a),
        Released {
            ready: vec![],
            stopped: Some("a".into())
        }
    );
    assert_eq!(over.finish().ready, []);
    assert_eq!(over.stopped(), Some("a"));
}

#[test]
fn the_stop_string_that_is_complete_first_wins_however_tokens_fall() {
    let tokenizer = Arc::new(byte_level());
    let merged = tokenizer.encode("xhello", false).unwrap();
    let single = bytes(&tokenizer, b"xhello");
    assert!(merged.len() < single.len());
    for ids in [&merged, &single] {
        let (ready, stopped) = stream(&tokenizer, ids, &["hello", "el", "hel"]);
        assert_eq!(
            (joined(&ready).as_str(), stopped.as_deref()),
            ("x", Some("hel"))
        );
    }
}

#[test]
fn a_half_stop_string_at_the_end_is_text() {
    let tokenizer = Arc::new(byte_level());
    let ids = bytes(&tokenizer, b"ok STO");
    let (ready, stopped) = stream(&tokenizer, &ids, &["STOP"]);
    assert_eq!((joined(&ready).as_str(), stopped), ("ok STO", None));
    assert_eq!(ready.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids);
}

#[test]
fn spaces_of_sentence_piece_are_exact() {
    let tokenizer = Arc::new(sentence_piece());
    for text in ["hello world", "  hello", "é hello😀 ", "w\nh"] {
        let ids = tokenizer.encode(text, false).unwrap();
        let (ready, _) = stream(&tokenizer, &ids, &[]);
        assert_eq!(joined(&ready), text);
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
    let ids = tokenizer.encode("world", false).unwrap();
    let mut more = Detokenizer::new(tokenizer, &[]).continuing();
    let text: String = ids
        .iter()
        .flat_map(|id| more.push(*id).ready)
        .map(|(_, t)| t)
        .collect();
    assert_eq!(text, " world");
}

#[test]
fn special_and_unknown_ids_add_nothing_and_keep_their_place() {
    let tokenizer = Arc::new(byte_level());
    let a = tokenizer.id_of("a").unwrap();
    let (ready, _) = stream(&tokenizer, &[IM_END, a, 999_999, a], &["ab"]);
    assert_eq!(
        ready,
        [
            (IM_END, String::new()),
            (a, "a".into()),
            (999_999, String::new()),
            (a, "a".into())
        ]
    );
}

#[test]
fn long_streams_cost_the_same_per_token() {
    // Quadratic work would take minutes here: half a million tokens, a long stop string that is
    // always half complete, and bytes that never form characters.
    let tokenizer = Arc::new(byte_level());
    let (a, bad) = (tokenizer.id_of("a").unwrap(), bytes(&tokenizer, &[0xFF])[0]);
    let mut stream = Detokenizer::new(tokenizer, &["a".repeat(2000) + "b"]);
    let started = std::time::Instant::now();
    let mut released = 0;
    for n in 0..500_000u32 {
        released += stream.push(if n % 4000 == 0 { bad } else { a }).ready.len();
    }
    released += stream.finish().ready.len();
    assert_eq!(released, 500_000);
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
}

const STOPS: [&str; 12] = [
    "h", "ll", "lo w", "hello", "wor", "\u{FFFD}", "é", "😀", "  ", "he", "el", "d\n",
];

fn check(tokenizer: &Arc<Tokenizer>, ids: &[u32], stop: &[&str]) -> Result<(), TestCaseError> {
    let (ready, stopped) = stream(tokenizer, ids, stop);
    let complete = tokenizer.decode(ids).unwrap();
    let (text, hit) = reference(&complete, stop);
    prop_assert_eq!(joined(&ready), text);
    prop_assert_eq!(stopped.is_some(), hit);
    // Each token is returned once, in order.
    let out: Vec<u32> = ready.iter().map(|(id, _)| *id).collect();
    prop_assert_eq!(&out[..], &ids[..out.len()]);
    prop_assert!(hit || out.len() == ids.len());
    Ok(())
}

fn ids(most: u32) -> impl Strategy<Value = Vec<u32>> {
    // Half of the ids are from the end of the vocabulary, which contains words.
    prop::collection::vec(prop_oneof![0..most, most.saturating_sub(30)..most], 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn byte_level_streams_equal_the_whole(ids in ids(280), stop in prop::sample::subsequence(STOPS.to_vec(), 0..4)) {
        thread_local!(static T: Arc<Tokenizer> = Arc::new(byte_level()));
        T.with(|t| check(t, &ids, &stop))?;
    }

    #[test]
    fn sentence_piece_streams_equal_the_whole(ids in ids(290), stop in prop::sample::subsequence(STOPS.to_vec(), 0..4)) {
        thread_local!(static T: Arc<Tokenizer> = Arc::new(sentence_piece()));
        T.with(|t| check(t, &ids, &stop))?;
    }

    #[test]
    fn texts_come_back_in_a_stream(text in "[a-zé😀 \n]{0,40}", stop in prop::sample::subsequence(STOPS.to_vec(), 0..3)) {
        thread_local!(static T: Arc<Tokenizer> = Arc::new(byte_level()));
        T.with(|t| {
            let ids = t.encode(&text, false).unwrap();
            prop_assert_eq!(t.decode(&ids).unwrap(), text.clone());
            check(t, &ids, &stop)
        })?;
    }
}
