//! Tests of stop strings, characters, the clock and messages of panics.

use proptest::prelude::*;

use super::*;

type Out = (Vec<(usize, String)>, Option<String>);

fn run(stops: &[&str], pieces: &[(&str, bool)], rest: &str) -> Out {
    let stops: Vec<String> = stops.iter().map(|&s| s.into()).collect();
    let mut text = StopText::new(&stops);
    let mut out = Vec::new();
    for (n, (piece, pending)) in pieces.iter().enumerate() {
        let released = text.push(n, piece, *pending);
        out.extend(released.ready);
        if released.stopped.is_some() {
            let after = text.push(n, "more", false);
            assert_eq!((after.ready.len(), &after.stopped), (0, &released.stopped));
            assert_eq!(text.finish("more"), after);
            assert_eq!(text.stopped(), after.stopped.as_deref());
            return (out, released.stopped);
        }
    }
    let released = text.finish(rest);
    out.extend(released.ready);
    (out, released.stopped)
}

fn joined(out: &[(usize, String)]) -> String {
    out.iter().map(|(_, t)| t.as_str()).collect()
}

#[test]
fn nothing_waits_without_a_reason() {
    let mut text = StopText::new(&[String::from("END"), String::new()]);
    assert_eq!(text.push(1, "abc", false).ready, [(1, "abc".into())]);
    assert_eq!(text.push(2, "xE", false).ready, []);
    assert_eq!(text.push(3, "N", false).ready, []);
    let out = text.push(4, "x", false).ready;
    assert_eq!(out, [(2, "xE".into()), (3, "N".into()), (4, "x".into())]);
}

#[test]
fn a_stop_string_across_tokens_is_cut_out() {
    let (out, stopped) = run(&["END"], &[("aE", false), ("N", false), ("Db", false)], "");
    assert_eq!(stopped.as_deref(), Some("END"));
    assert_eq!(joined(&out), "a");
    assert_eq!(out.len(), 3);
}

#[test]
fn the_one_complete_first_wins_and_of_two_the_longer() {
    let (out, stopped) = run(&["bc", "abcd"], &[("xabcd", false)], "");
    assert_eq!(
        (joined(&out).as_str(), stopped.as_deref()),
        ("xa", Some("bc"))
    );
    let (out, stopped) = run(&["bc", "abc"], &[("xabc", false)], "");
    assert_eq!(
        (joined(&out).as_str(), stopped.as_deref()),
        ("x", Some("abc"))
    );
}

#[test]
fn incomplete_characters_wait_and_the_rest_goes_to_the_last_token() {
    let (out, stopped) = run(&[], &[("a", false), ("", true), ("", true)], "\u{fffd}");
    assert!(stopped.is_none());
    let expected = [(0, "a".into()), (1, String::new()), (2, "\u{fffd}".into())];
    assert_eq!(out, expected);
}

proptest! {
    /// However the text is divided into tokens, the released text must be all text before the first
    /// complete stop string.
    #[test]
    fn text_is_cut_as_in_the_whole(
        pieces in prop::collection::vec("[abé€]{0,3}", 0..12),
        stops in prop::collection::vec("[abé€]{1,4}", 0..3),
    ) {
        let all = pieces.concat();
        let ends = |end: &usize| all.is_char_boundary(*end) && stops.iter().any(|s| all[..*end].ends_with(s.as_str()));
        let expected = (1..=all.len()).find(ends).map(|end| {
            let matches = stops.iter().filter(|s| all[..end].ends_with(s.as_str()));
            let stop = matches.max_by_key(|s| s.len()).unwrap();
            (all[..end - stop.len()].to_owned(), stop.clone())
        });
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let pieces: Vec<(&str, bool)> = pieces.iter().map(|p| (p.as_str(), false)).collect();
        let (out, stopped) = run(&stops, &pieces, "");
        match expected {
            Some((text, stop)) => prop_assert_eq!((joined(&out), stopped), (text, Some(stop))),
            None => prop_assert_eq!((joined(&out), stopped, out.len()), (all, None, pieces.len())),
        }
    }

    #[test]
    fn characters_are_those_of_the_whole(
        tokens in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5), 0..12),
        text in "[a-zé€😀]{0,8}",
    ) {
        let tokens = tokens.into_iter().chain(text.bytes().map(|b| vec![b]));
        let tokens: Vec<Vec<u8>> = tokens.collect();
        let mut decoder = Utf8Decoder::new();
        let mut said: String = tokens.iter().map(|bytes| decoder.push(bytes)).collect();
        said.push_str(&decoder.finish());
        prop_assert!(!decoder.is_open());
        prop_assert_eq!(said, String::from_utf8_lossy(&tokens.concat()).into_owned());
    }
}

#[test]
fn a_character_comes_with_its_last_byte() {
    let mut decoder = Utf8Decoder::new();
    let steps = "é"
        .bytes()
        .map(|byte| (decoder.push(&[byte]), decoder.is_open()));
    let steps: Vec<_> = steps.collect();
    assert_eq!(steps, [(String::new(), true), (String::from("é"), false)]);
}

#[test]
fn times_fit_together_and_stay_after_the_end() {
    let wait = || std::thread::sleep(Duration::from_millis(3));
    let mut clock = Clock::queued();
    wait();
    assert_eq!(clock.metrics().prefill_time, Duration::ZERO);
    clock.begin();
    clock.counts().prompt_tokens = 7;
    clock.counts().total_time = Duration::from_secs(900);
    wait();
    clock.token();
    wait();
    clock.token();
    assert!(clock.stop() && !clock.stop());
    let m = clock.metrics();
    wait();
    clock.begin();
    assert_eq!(clock.metrics(), m);
    assert_eq!((m.prompt_tokens, m.generated_tokens), (7, 0));
    let least = Duration::from_millis(3);
    assert!(m.prefill_time >= least && m.decode_time >= least);
    assert!(m.time_to_first_token >= m.prefill_time + least);
    assert!(m.total_time >= m.time_to_first_token + m.decode_time);
    assert!(m.total_time < Duration::from_secs(900));

    let mut clock = Clock::start(3);
    clock.stop();
    let m = clock.metrics();
    assert_eq!(m.prompt_tokens, 3);
    assert_eq!(
        (m.prefill_time, m.decode_time),
        (m.total_time, Duration::ZERO)
    );
}

#[test]
fn panics_without_a_message_have_no_text() {
    let thrown = |f: fn()| std::panic::catch_unwind(f).unwrap_err();
    assert_eq!(
        panic_text(thrown(|| panic!("fixed")).as_ref()),
        Some("fixed")
    );
    assert_eq!(
        panic_text(thrown(|| std::panic::panic_any(7)).as_ref()),
        None
    );
}
