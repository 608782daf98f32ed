//! Tests how requests and processes end, with a mock bridge: cancellation, deadlines, dropped
//! streams, several callers, closing, and the death of the program.
#![cfg(unix)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{Mock, ask, collect, exists, kill, pid, text, until};
use inference::{
    Backend, CancelToken, ErrorKind, FinishReason, GenerateOptions, Interrupt, LoadOptions,
    Message, Progress, Prompt,
};

fn options() -> GenerateOptions {
    GenerateOptions::new()
}

#[test]
fn a_cancelled_request_ends_and_leaves_the_process_alone() {
    let mock = Mock::good();
    let model = mock.load();
    let before = pid(model.as_ref());
    let cancel = CancelToken::new();
    let asked = options().with_cancel(cancel.clone());
    let mut stream = model.generate(&"endless".into(), &asked).unwrap();
    assert_eq!(text(stream.next()), "0 ");
    cancel.cancel();
    let error = stream.next().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(stream.finish_reason(), Some(FinishReason::Cancelled));
    assert!(stream.next().is_none());
    assert!(model.metrics().generated_tokens >= 1);
    assert_eq!(pid(model.as_ref()), before);
}

#[test]
fn a_raised_token_and_a_past_deadline_do_nothing_over_there() {
    let mock = Mock::good();
    let model = mock.load();
    let cancel = CancelToken::new();
    cancel.cancel();
    let late = options().with_deadline(Instant::now());
    let cases = [
        (options().with_cancel(cancel), ErrorKind::Cancelled),
        (late, ErrorKind::DeadlineExceeded),
    ];
    for (asked, kind) in cases {
        let mut stream = model.generate(&"fine".into(), &asked).unwrap();
        assert_eq!(stream.next().unwrap().unwrap_err().kind(), kind);
        assert_eq!(stream.metrics().generated_tokens, 0);
    }
    assert_eq!(collect(ask(model.as_ref(), "fine")).0.len(), 3);
}

#[test]
fn a_deadline_ends_a_reply_also_while_nothing_comes() {
    let mock = Mock::good().with(|s| s.with_cancel_grace(Duration::from_secs(2)));
    let model = mock.load();
    for prompt in ["endless", "deaf"] {
        let begun = Instant::now();
        let deadline = begun + Duration::from_millis(300);
        let asked = options().with_max_tokens(1 << 20).with_deadline(deadline);
        let mut stream = model.generate(&prompt.into(), &asked).unwrap();
        let error = stream.find_map(Result::err).unwrap();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{prompt}");
        assert_eq!(stream.finish_reason(), Some(FinishReason::Deadline));
        assert!(begun.elapsed() < Duration::from_secs(60), "{prompt}");
    }
    // This must also hold if no caller reads the tokens.
    let before = pid(model.as_ref());
    let asked = options().with_deadline(Instant::now() + Duration::from_millis(300));
    let mut stream = model.generate(&"flood".into(), &asked).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(pid(model.as_ref()), before);
    let error = stream.next().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
}

#[test]
fn a_process_that_does_not_listen_is_replaced() {
    let mock = Mock::good().with(|s| s.with_cancel_grace(Duration::from_millis(200)));
    let model = mock.load();
    let before = pid(model.as_ref());
    let mut stream = ask(model.as_ref(), "deaf").unwrap();
    assert_eq!(text(stream.next()), "1 ");
    drop(stream);
    assert_ne!(pid(model.as_ref()), before);
    assert!(!exists(before));
}

#[test]
fn dropping_a_stream_cancels_it() {
    let mock = Mock::good();
    let model = mock.load();
    let before = pid(model.as_ref());
    for _ in 0..5 {
        let mut stream = ask(model.as_ref(), "endless").unwrap();
        assert_eq!(text(stream.next()), "0 ");
        drop(stream);
        assert!(model.metrics().generated_tokens >= 1);
        assert_eq!(model.metrics().prompt_tokens, 3);
    }
    // This request is dropped before it runs.
    let running = ask(model.as_ref(), "endless").unwrap();
    drop(ask(model.as_ref(), "endless").unwrap());
    drop(running);
    assert_eq!(pid(model.as_ref()), before);
}

#[test]
fn little_is_computed_ahead_of_a_slow_caller() {
    let mock = Mock::good();
    let model = mock.load();
    let mut stream = ask(model.as_ref(), "flood").unwrap();
    assert_eq!(text(stream.next()), "0 ");
    std::thread::sleep(Duration::from_millis(500));
    let produced = stream.metrics().generated_tokens;
    assert!(produced < 50, "{produced}");
    // While the caller waits, no tokens may be lost.
    let words: Vec<String> = stream.by_ref().take(299).map(|t| text(Some(t))).collect();
    let expected: Vec<String> = (1..300).map(|n| format!("{} ", n % 100)).collect();
    assert_eq!(words, expected);
}

#[test]
fn streams_of_one_thread_do_not_block_each_other() {
    let mock = Mock::good();
    let model = mock.load();
    let long: Vec<String> = (0..200).map(|n| format!("w{n}")).collect();
    let prompt = format!("say {}", long.join("|"));
    let mut first = ask(model.as_ref(), &prompt).unwrap();
    assert_eq!(text(first.next()), "w0");
    let second = ask(model.as_ref(), "say x|y").unwrap();
    // An error of a waiting request must appear in its stream.
    let third = ask(model.as_ref(), "refused").unwrap();
    let (words, error) = collect(Ok(third));
    assert!(words.is_empty());
    assert_eq!(error.unwrap().kind(), ErrorKind::InvalidOption);
    assert_eq!(collect(Ok(second)).0, ["x", "y"]);
    assert_eq!(collect(Ok(first)).0, long[1..]);
}

#[test]
fn callers_on_many_threads_get_their_own_replies() {
    let mock = Mock::good();
    let model = mock.load();
    let before = pid(model.as_ref());
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let model = model.as_ref();
            scope.spawn(move || {
                for round in 0..10 {
                    let words: Vec<String> =
                        (0..20).map(|w| format!("{thread}.{round}.{w}")).collect();
                    if round % 4 == 3 {
                        // One request is dropped in the middle.
                        let mut stream = ask(model, "endless").unwrap();
                        assert_eq!(text(stream.next()), "0 ");
                        continue;
                    }
                    let (got, error) = collect(ask(model, &format!("say {}", words.join("|"))));
                    assert!(error.is_none(), "{error:?}");
                    assert_eq!(got, words);
                    assert_eq!(
                        model.as_token_model().unwrap().encode("abc", true).unwrap(),
                        [3]
                    );
                }
            });
        }
    });
    assert_eq!(pid(model.as_ref()), before);
}

#[test]
fn replies_end_as_asked() {
    let mock = Mock::good();
    let model = mock.load();
    let run = |asked: GenerateOptions| {
        let output = model.generate(&"say a|b EN|D c|d".into(), &asked);
        let output = output.unwrap().collect_output().unwrap();
        (
            output.text,
            output.tokens.len(),
            output.finish_reason.unwrap(),
        )
    };
    assert_eq!(run(options()), ("ab END cd".into(), 4, FinishReason::Stop));
    let few = options().with_max_tokens(2);
    assert_eq!(run(few), ("ab EN".into(), 2, FinishReason::Length));
    // The text must end before the stop string, which spans several tokens.
    let stop = options().with_stop(vec![String::from("END")]);
    assert_eq!(run(stop), ("ab ".into(), 3, FinishReason::Stop));
    let stop = options().with_stop(vec![String::from("END!")]);
    assert_eq!(run(stop).0, "ab END cd");
    let bad = options().with_temperature(-1.0);
    let error = model.generate(&"fine".into(), &bad).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
}

#[test]
fn figures_are_what_was_measured() {
    let mock = Mock::good();
    let model = mock.load();
    let mut stream = ask(model.as_ref(), "say a|b|c|d").unwrap();
    assert_eq!(stream.by_ref().count(), 4);
    let m = stream.metrics();
    assert_eq!((m.prompt_tokens, m.generated_tokens), (3, 4));
    assert_eq!((m.peak_memory_bytes, m.active_memory_bytes), (2000, 1000));
    assert!(m.prefill_time <= m.time_to_first_token);
    assert!(m.time_to_first_token + m.decode_time <= m.total_time);
    assert!(m.time_to_first_token > Duration::ZERO);
    assert_eq!(model.metrics(), m);
    // This side ends the reply at the stop string. The metrics must still come from the bridge.
    let asked = options().with_stop(vec![String::from("5")]);
    let output = model.generate(&"endless".into(), &asked).unwrap();
    let output = output.collect_output().unwrap();
    assert_eq!(output.finish_reason, Some(FinishReason::Stop));
    assert_eq!(output.metrics.peak_memory_bytes, 2000);
}

#[test]
fn logits_come_with_their_tokens_and_chats_are_answered() {
    let mock = Mock::good();
    let model = mock.load();
    let asked = options().with_logits(true);
    let mut stream = model.generate(&"logits".into(), &asked).unwrap();
    let token = stream.next().unwrap().unwrap();
    assert_eq!(token.logits.as_deref(), Some(&[0.5, -1.0][..]));
    let stream = model
        .chat(&[Message::user("say hello")], &options())
        .unwrap();
    assert_eq!(stream.text().unwrap(), "hello");
    let stream = model.generate(&Prompt::Tokens(vec![1, 2]), &options());
    assert_eq!(stream.unwrap().collect_output().unwrap().tokens, [1, 2, 3]);
}

#[test]
fn progress_is_told_and_may_panic() {
    let mock = Mock::good();
    let model = mock.load();
    let told = Arc::new(Mutex::new(Vec::new()));
    let note = Arc::clone(&told);
    let progress = Progress::new(move |done, total| note.lock().unwrap().push((done, total)));
    let asked = options().with_progress(progress);
    let stream = model.generate(&"fine".into(), &asked).unwrap();
    assert_eq!(stream.count(), 3);
    assert_eq!(*told.lock().unwrap(), [(3, 3)]);
    let asked = options().with_progress(Progress::new(|_, _| panic!("a test of ours")));
    let (_, error) = collect(model.generate(&"fine".into(), &asked));
    assert!(error.unwrap().to_string().contains("panicked"));
    assert_eq!(collect(ask(model.as_ref(), "fine")).0.len(), 3);
}

#[test]
fn what_it_cannot_do_points_to_the_native_backends() {
    let mock = Mock::good();
    let model = mock.load();
    let errors = [
        model.classify(&["a".into()], &options(), false).map(|_| ()),
        model.batch_generate(&["a".into()], &options()).map(|_| ()),
        model.batch_session().map(|_| ()),
    ];
    for error in errors {
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("`metal`"), "{error}");
    }
    let backend = mock.backend();
    let load = |path: &std::path::Path, options: &LoadOptions| {
        backend.load_model(path, options).map(|_| ()).unwrap_err()
    };
    let file = mock.path().join("model.gguf");
    std::fs::write(&file, "GGUF").unwrap();
    let error = load(&file, &LoadOptions::new());
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("`cpu`"), "{error}");
    let error = load(&mock.path().join("nowhere"), &LoadOptions::new());
    assert_eq!(error.kind(), ErrorKind::ModelNotFound);
    let adapter = LoadOptions::new().with_adapter_path("no/such/adapter");
    assert_eq!(load(mock.path(), &adapter).kind(), ErrorKind::ModelNotFound);
    let bad = LoadOptions::new().with_context_len(0);
    assert_eq!(load(mock.path(), &bad).kind(), ErrorKind::InvalidOption);
    std::fs::remove_file(mock.path().join("config.json")).unwrap();
    let error = load(mock.path(), &LoadOptions::new());
    assert_eq!(error.kind(), ErrorKind::InvalidModel);
}

#[test]
fn closing_ends_everything_and_the_process() {
    let mock = Mock::good();
    let model = mock.load();
    let number = pid(model.as_ref());
    let mut running = ask(model.as_ref(), "endless").unwrap();
    assert_eq!(text(running.next()), "0 ");
    let mut waiting = ask(model.as_ref(), "fine").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| model.close().unwrap());
        model.close().unwrap();
    });
    assert!(!exists(number));
    for stream in [&mut running, &mut waiting] {
        let error = stream.find_map(Result::err).unwrap();
        assert_eq!(error.kind(), ErrorKind::Closed);
    }
    let kind = |e: inference::Error| e.kind();
    let closed = ErrorKind::Closed;
    assert_eq!(
        ask(model.as_ref(), "fine").map(|_| ()).map_err(kind),
        Err(closed)
    );
    let tokens = model.as_token_model().unwrap();
    assert_eq!(tokens.encode("a", true).map_err(kind), Err(closed));
    assert_eq!(
        tokens
            .logits(&"a".into(), true, &Interrupt::new())
            .map(|_| ())
            .map_err(kind),
        Err(closed)
    );
    assert_eq!(model.info().vocab_size, 100);
    model.close().unwrap();
}

#[test]
fn the_process_ends_with_the_last_who_uses_it() {
    let mock = Mock::good();
    let model = mock.load();
    let number = pid(model.as_ref());
    let mut stream = ask(model.as_ref(), "endless").unwrap();
    drop(model);
    assert_eq!(text(stream.next()), "0 ");
    assert!(exists(number));
    drop(stream);
    assert!(!exists(number));
}

#[test]
fn one_that_does_not_quit_is_killed() {
    let mock = Mock::new("stubborn", "ok").with(|s| s.with_quit_grace(Duration::from_millis(200)));
    let model = mock.load();
    let number = pid(model.as_ref());
    drop(model);
    assert!(!exists(number));
}

#[test]
fn loading_again_and_again_leaves_no_process_behind() {
    let mock = Mock::good();
    let mut numbers = Vec::new();
    for _ in 0..5 {
        let model = mock.load();
        numbers.push(pid(model.as_ref()));
    }
    assert!(numbers.iter().all(|&number| !exists(number)));
}

const MARK: &str = "MLXLM_TEST_LOADS_AND_WAITS";

/// The program that [`a_killed_program_takes_its_process_along`] kills. It is not a test itself.
#[test]
fn program_that_loads_and_waits() {
    if std::env::var_os(MARK).is_none() {
        return;
    }
    let mock = Mock::good();
    let model = mock.load();
    println!("\npid {}", pid(model.as_ref()));
    let _stream = ask(model.as_ref(), "endless").unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_killed_program_takes_its_process_along() {
    let mut program = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "life::program_that_loads_and_waits",
            "--nocapture",
        ])
        .env(MARK, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(program.stdout.take().unwrap());
    let number = out
        .lines()
        .find_map(|line| line.unwrap().strip_prefix("pid ")?.parse().ok())
        .expect("the program says which process it has");
    assert!(exists(number));
    kill(program.id());
    program.wait().unwrap();
    until("the process outlived its program", || !exists(number));
}
