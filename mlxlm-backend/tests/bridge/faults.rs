//! Tests each violation of the protocol with a mock bridge. The running request must end with an
//! error that names the fault, the process must be reaped, and the next request must work.
#![cfg(unix)]

use std::time::{Duration, Instant};

use crate::common::{Mock, ask, collect, exists, kill, pid};
use inference::{Backend, ChatPrompt, ErrorKind, FinishReason, GenerateOptions, Interrupt};

/// The mock commits the fault `prompt` after two tokens. The error must contain `expected`.
fn fault(prompt: &str, expected: &str) {
    let mock = Mock::good().with(|s| s.with_silence_timeout(Duration::from_secs(2)));
    let model = mock.load();
    let before = pid(model.as_ref());
    let (words, error) = collect(ask(model.as_ref(), prompt));
    let error = error.unwrap_or_else(|| panic!("{prompt}: no error"));
    assert_eq!(error.kind(), ErrorKind::Engine, "{prompt}: {error}");
    let said = error.to_string();
    assert!(said.contains(expected), "{prompt}: {said}");
    assert!(
        said.contains("the next request starts Python again"),
        "{said}"
    );
    assert_eq!(words, ["1 ", "2 "], "{prompt}");
    // The process was ended and reaped, and a new one answers.
    let after = pid(model.as_ref());
    assert_ne!(before, after, "{prompt}");
    assert!(!exists(before), "{prompt}");
}

#[test]
fn lines_that_are_no_messages() {
    fault("garbage", "Traceback: this is no message");
    fault("array", "not an object");
    fault("empty", "not an object");
    fault("text id", "an invalid message");
    fault("unknown field", "surprise");
    fault("negative token", "an invalid message");
    fault("odd reason", "tired");
    fault("no utf-8", "not UTF-8");
    fault("deep", "an invalid message");
}

#[test]
fn lines_that_do_not_end() {
    fault("half", "in the middle of a message");
    fault("half and silence", "said nothing");
    fault("huge", "longer than a message may be");
    fault("endless line", "longer than a message may be");
}

#[test]
fn messages_that_do_not_fit() {
    fault("wrong id", "answered request");
    fault("no id", "answered request none");
    fault("no token id", "cannot be part of a reply");
    fault("no reason", "without a reason");
    fault("bad logits", "bad logits");
}

#[test]
fn death_and_silence() {
    fault("death", "exit status: 7");
    fault("death", "it last said: the mock is tired");
    fault("abort", "signal: 6");
    fault("silence", "said nothing for 2.0 s");
    let mock = Mock::good();
    let model = mock.load();
    let (words, error) = collect(ask(model.as_ref(), "closed output"));
    assert_eq!(words.len(), 2);
    assert!(error.unwrap().to_string().contains("closed its output"));
}

#[test]
fn a_reply_that_did_not_start_is_a_fault() {
    let mock = Mock::good();
    let model = mock.load();
    let error = ask(model.as_ref(), "no start").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Engine);
    assert!(error.to_string().contains("had not started"), "{error}");
    assert_eq!(collect(ask(model.as_ref(), "fine")).0.len(), 3);
}

#[test]
fn what_comes_after_the_end_does_not_reach_the_next_request() {
    let mock = Mock::good();
    let model = mock.load();
    for _ in 0..3 {
        let (words, error) = collect(ask(model.as_ref(), "afterthought"));
        assert!(error.is_none(), "{error:?}");
        assert_eq!(words, ["1 ", "2 "]);
        // When the next request begins, a late message has already arrived.
        std::thread::sleep(Duration::from_millis(300));
        let (words, error) = collect(ask(model.as_ref(), "say a|b"));
        assert!(error.is_none(), "{error:?}");
        assert_eq!(words, ["a", "b"]);
    }
}

#[test]
fn a_process_that_died_while_nobody_asked_is_replaced() {
    let mock = Mock::good();
    let model = mock.load();
    let before = pid(model.as_ref());
    kill(before);
    // The request during which the process ends may fail, but the next one must succeed.
    let _ = collect(ask(model.as_ref(), "fine"));
    assert_ne!(pid(model.as_ref()), before);
    assert!(!exists(before));
}

#[test]
fn errors_that_the_other_side_reports_leave_it_running() {
    let mock = Mock::good();
    let model = mock.load();
    let before = pid(model.as_ref());
    let (words, error) = collect(ask(model.as_ref(), "error"));
    assert_eq!(words.len(), 2);
    let error = error.unwrap();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert_eq!(error.message(), "out of luck");
    // An error of the prompt must be returned before there is a stream.
    let error = ask(model.as_ref(), "refused").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert_eq!(pid(model.as_ref()), before);
}

#[test]
fn short_questions_have_the_same_guards() {
    let mock = Mock::good().with(|s| s.with_silence_timeout(Duration::from_secs(2)));
    let model = mock.load();
    let tokens = model.as_token_model().unwrap();
    assert_eq!(tokens.encode("four", false).unwrap(), [4]);
    let error = tokens.encode("silence", false).unwrap_err();
    assert!(error.to_string().contains("heard nothing"), "{error}");
    assert_eq!(tokens.encode("four", false).unwrap(), [4]);
    // The mock omits the field `text`.
    let error = tokens.decode(&[1]).unwrap_err();
    assert!(error.to_string().contains("lacks"), "{error}");
    let error = tokens.prepare_chat(&ChatPrompt::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let all = tokens.logits(&"x".into(), true, &Interrupt::new()).unwrap();
    assert_eq!((all.shape, all.tokens), (vec![2, 3], vec![5, 6]));
    assert_eq!(all.logits, [0.5, -1.0, 2.0, 0.5, -1.0, 2.0]);
    assert_eq!(
        tokens
            .logits(&"x".into(), false, &Interrupt::new())
            .unwrap()
            .shape,
        [1, 3]
    );
}

#[test]
fn a_start_that_fails_says_why() {
    let cases = [
        (
            "dies",
            ErrorKind::UnavailableBackend,
            "No module named 'mlx_lm'",
        ),
        (
            "mute",
            ErrorKind::UnavailableBackend,
            "waited 0.5 s for Python to start",
        ),
        (
            "chatty",
            ErrorKind::UnavailableBackend,
            "Welcome to Python!",
        ),
        ("old", ErrorKind::Engine, "did not begin with protocol 1"),
    ];
    for (start, kind, expected) in cases {
        let patience = match start {
            "mute" => Duration::from_millis(500),
            _ => Duration::from_secs(20),
        };
        let mock = Mock::new(start, "ok").with(|s| s.with_start_timeout(patience));
        let since = Instant::now();
        let error = mock.try_load().map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), kind, "{start}: {error}");
        assert!(error.to_string().contains(expected), "{start}: {error}");
        assert!(since.elapsed() < Duration::from_secs(15), "{start}");
    }
    let mock = Mock::good().with(|s| s.with_python("/no/such/python"));
    let error = mock.try_load().map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnavailableBackend);
    assert!(error.to_string().contains("MLXLM_PYTHON"), "{error}");
}

#[test]
fn loading_that_fails_says_why() {
    let kinds = [
        ("refuses invalid_model", ErrorKind::InvalidModel),
        ("refuses unsupported", ErrorKind::Unsupported),
        ("refuses out_of_memory", ErrorKind::OutOfMemory),
        ("dies", ErrorKind::Engine),
        ("mute", ErrorKind::Engine),
    ];
    for (load, kind) in kinds {
        let mock = Mock::new("ok", load).with(|s| match load {
            "mute" => s.with_load_timeout(Duration::from_millis(500)),
            _ => s,
        });
        let error = mock.try_load().map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), kind, "{load}: {error}");
        assert_eq!(error.path(), Some(mock.path()), "{load}: {error}");
        if load == "dies" {
            assert!(error.to_string().contains("no room on the mock"), "{error}");
        }
    }
}

#[test]
fn a_restart_that_fails_is_an_error_each_time_and_not_the_end() {
    let mock = Mock::new("ok", "once");
    let model = mock.load();
    assert!(collect(ask(model.as_ref(), "death")).1.is_some());
    for _ in 0..2 {
        let error = ask(model.as_ref(), "fine").unwrap_err();
        assert!(error.to_string().starts_with("restart: "), "{error}");
    }
    std::fs::remove_file(mock.path().join("loaded")).unwrap();
    assert_eq!(collect(ask(model.as_ref(), "fine")).0.len(), 3);
}

#[test]
fn unreasonable_patience_is_no_fault() {
    let mock = Mock::good().with(|s| {
        s.with_start_timeout(Duration::MAX)
            .with_load_timeout(Duration::MAX)
            .with_silence_timeout(Duration::MAX)
            .with_cancel_grace(Duration::MAX)
            .with_quit_grace(Duration::MAX)
            .with_max_line(usize::MAX)
    });
    let model = mock.load();
    let options = GenerateOptions::new().with_max_tokens(usize::MAX);
    let mut stream = model.generate(&"fine".into(), &options).unwrap();
    assert_eq!(stream.by_ref().count(), 3);
    assert_eq!(stream.finish_reason(), Some(FinishReason::Stop));
}

#[test]
fn availability_is_asked_once_and_explained() {
    let mock = Mock::good();
    let backend = mock.backend();
    assert!(backend.available());
    assert_eq!(backend.unavailable_reason(), None);
    assert!(
        backend.device().contains("mlx-lm mock"),
        "{}",
        backend.device()
    );
    assert_eq!(mock.probes(), 1);

    let mock = Mock::new("absent", "ok");
    let backend = mock.backend();
    assert!(!backend.available());
    let reason = backend.unavailable_reason().unwrap();
    assert!(reason.contains("No module named 'mlx_lm'"), "{reason}");
    assert!(reason.contains("pip install mlx-lm"), "{reason}");
    assert!(reason.contains("MLXLM_PYTHON"), "{reason}");
    assert_eq!(mock.probes(), 1);

    let mock = Mock::new("mute", "ok").with(|s| s.with_start_timeout(Duration::from_millis(500)));
    let reason = mock.backend().unavailable_reason().unwrap();
    assert!(reason.contains("waited 0.5 s"), "{reason}");
    let mock = Mock::good().with(|s| s.with_python("/no/such/python"));
    let reason = mock.backend().unavailable_reason().unwrap();
    assert!(reason.contains("/no/such/python"), "{reason}");
}
