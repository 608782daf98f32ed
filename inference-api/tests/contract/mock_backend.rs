//! Tests the contract with a mock backend and `dyn` objects, as a plugin and a program use it.
//! `broken_plugins.rs` tests faulty plugins, and `optional_traits.rs` tests the optional traits.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inference::{
    Backend, CancelToken, Capabilities, Error, ErrorKind, FinishReason, GenerateMetrics,
    GenerateOptions, LoadOptions, Message, Result, TextModel, Token, TokenSource, TokenStream,
};
use inference_conformance::scripted::{Input, Reply, Scripted, ScriptedBackend};

/// A model whose reply is the prompt's bytes, one token per byte.
fn echo() -> Scripted {
    let model = Scripted::computed(|asked| match asked.input {
        Input::Tokens(_) => Err(Error::new(ErrorKind::Unsupported, "only text")),
        _ => Ok(Reply::text(&asked.text)),
    });
    model.with_rendering(|prompt| {
        let said = prompt.messages.iter();
        Ok(said.map(|m| format!("[{}]{}", m.role, m.content)).collect())
    })
}

fn mock(name: &str) -> ScriptedBackend {
    ScriptedBackend::new(name)
        .with_capabilities(Capabilities::new().with_streaming().with_chat())
        .loading(|_, _| Ok(echo()))
}

fn away(name: &str) -> ScriptedBackend {
    mock(name).unavailable("its device is on the moon")
}

/// A backend whose `available` panics.
struct Panics;

impl Backend for Panics {
    fn name(&self) -> &str {
        "mock-panics"
    }
    fn available(&self) -> bool {
        panic!("asked the wrong backend")
    }
    fn device(&self) -> String {
        String::from("mock")
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new()
    }
    fn load_model(&self, _: &Path, _: &LoadOptions) -> Result<Box<dyn TextModel>> {
        panic!("asked the wrong backend")
    }
}

inference::register_backend!("mock-linked", || Box::new(mock("mock-linked")));
inference::register_backend!("mock-away", || Box::new(away("mock-away")));
inference::register_backend!("mock-panics", || Box::new(Panics));
inference::register_backend!("mock-twice", || Box::new(mock("mock-twice")));
inference::register_backend!("mock-twice", || Box::new(mock("mock-twice")));

fn model() -> Box<dyn TextModel> {
    let options = LoadOptions::new().with_backend("mock-linked");
    inference::load_model(env!("CARGO_MANIFEST_DIR"), &options).unwrap()
}

#[test]
fn linked_backends_are_listed_in_order_and_found_by_name() {
    let names: Vec<_> = inference::backends()
        .iter()
        .map(|b| b.name().to_owned())
        .collect();
    let mut sorted = names.clone();
    sorted.sort();
    assert_eq!(names, sorted);
    assert!(names.contains(&String::from("mock-away")));
    assert_eq!(
        inference::backend("mock-linked").unwrap().name(),
        "mock-linked"
    );
    assert_eq!(inference::duplicates(), ["mock-twice"]);
}

fn refused(name: &str) -> Error {
    inference::backend(name).err().expect("must be refused")
}

#[test]
fn unknown_unavailable_and_duplicate_are_different_errors() {
    let e = refused("mock-linkd");
    assert_eq!(e.kind(), ErrorKind::UnknownBackend);
    assert!(
        e.message().contains("mock-away") && e.message().contains("did you mean `mock-linked`"),
        "{e}"
    );
    let e = refused("mock-away");
    assert_eq!(e.kind(), ErrorKind::UnavailableBackend);
    assert!(
        e.message().contains("on the moon") && e.message().contains("mock-linked"),
        "{e}"
    );
    let e = refused("mock-panics");
    assert_eq!(e.kind(), ErrorKind::UnavailableBackend);
    assert!(e.message().contains("panicked"), "{e}");
    assert_eq!(refused("mock-twice").kind(), ErrorKind::DuplicateBackend);
}

#[test]
fn the_default_follows_the_preference_and_register_refuses_taken_names() {
    // There is one registry per process, so this is a single test. At the start no backend of the
    // preference list is linked.
    assert_eq!(inference::default_backend().unwrap().name(), "mock-linked");
    assert_eq!(inference::backend("").unwrap().name(), "mock-linked");
    let register = |name, available| {
        let backend = if available { mock(name) } else { away(name) };
        inference::register(Arc::new(backend))
    };
    register("cpu", true).unwrap();
    assert_eq!(inference::default_backend().unwrap().name(), "cpu");
    register("metal", false).unwrap();
    assert_eq!(inference::default_backend().unwrap().name(), "cpu");
    register("cuda", true).unwrap();
    assert_eq!(inference::default_backend().unwrap().name(), "cuda");
    for name in ["cpu", "mock-linked", "mock-twice"] {
        assert_eq!(
            register(name, true).unwrap_err().kind(),
            ErrorKind::DuplicateBackend
        );
    }
    assert_eq!(
        register(" ", true).unwrap_err().kind(),
        ErrorKind::InvalidOption
    );
}

#[test]
fn a_missing_path_and_bad_options_fail_before_the_backend_is_asked() {
    let o = LoadOptions::new().with_backend("mock-linked");
    let e = inference::load_model("/no/such/model", &o).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::ModelNotFound);
    assert_eq!(e.path(), Some(Path::new("/no/such/model")));
    let e = inference::load_model(".", &o.with_context_len(0))
        .err()
        .unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidOption);
}

#[test]
fn streams_give_tokens_text_reason_and_figures() {
    let m = model();
    let out = m
        .generate(&"abc".into(), &GenerateOptions::new())
        .unwrap()
        .collect_output()
        .unwrap();
    assert_eq!(
        (out.text.as_str(), &out.tokens[..]),
        ("abc", &[97, 98, 99][..])
    );
    assert_eq!(out.finish_reason, Some(FinishReason::Stop));
    assert_eq!(out.metrics.prompt_tokens, 3);
    let out = m
        .generate(&"abc".into(), &GenerateOptions::new().with_max_tokens(2))
        .unwrap();
    assert_eq!(
        out.collect_output().unwrap().finish_reason,
        Some(FinishReason::Length)
    );
    let chat = m
        .chat(&[Message::user("hi")], &GenerateOptions::new())
        .unwrap();
    assert_eq!(chat.text().unwrap(), "[user]hi");
    assert!(m.as_trainable().is_none() && m.as_attention_inspector().is_none());
    let bad = m.generate(&"a".into(), &GenerateOptions::new().with_temperature(-1.0));
    assert_eq!(bad.unwrap_err().kind(), ErrorKind::InvalidOption);
}

#[test]
fn cancelling_and_deadlines_end_a_stream_once() {
    let m = model();
    let token = CancelToken::new();
    let mut s = m
        .generate(
            &"abc".into(),
            &GenerateOptions::new().with_cancel(token.clone()),
        )
        .unwrap();
    assert!(s.next().unwrap().is_ok());
    token.cancel();
    assert_eq!(s.next().unwrap().unwrap_err().kind(), ErrorKind::Cancelled);
    assert!(s.next().is_none() && s.next().is_none());
    assert_eq!(s.finish_reason(), Some(FinishReason::Cancelled));
    let past = Instant::now() - Duration::from_millis(1);
    let mut s = m
        .generate(&"abc".into(), &GenerateOptions::new().with_deadline(past))
        .unwrap();
    assert_eq!(
        s.next().unwrap().unwrap_err().kind(),
        ErrorKind::DeadlineExceeded
    );
    assert!(s.next().is_none());
    assert_eq!(s.finish_reason(), Some(FinishReason::Deadline));
}

#[test]
fn dropping_a_stream_ends_its_request_and_closing_ends_all() {
    let m = echo();
    let mut s = m.generate(&"abc".into(), &GenerateOptions::new()).unwrap();
    s.next();
    assert_eq!(m.control().running(), 1);
    drop(s);
    assert_eq!(m.control().running(), 0);
    assert_eq!(m.metrics().generated_tokens, 1);
    let mut s = m.generate(&"abc".into(), &GenerateOptions::new()).unwrap();
    m.close().unwrap();
    m.close().unwrap();
    assert_eq!(s.next().unwrap().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn streams_and_models_cross_threads() {
    fn sendable<T: Send>(t: T) -> T {
        t
    }
    let m: Arc<dyn TextModel> = Arc::from(model());
    let s = sendable(m.generate(&"abc".into(), &GenerateOptions::new()).unwrap());
    drop(m); // the stream outlives the model's handle
    assert_eq!(
        std::thread::spawn(move || s.text())
            .join()
            .unwrap()
            .unwrap(),
        "abc"
    );
}

#[test]
fn every_prompt_of_a_batch_has_its_own_error() {
    let results = model()
        .batch_generate(&["a".into(), vec![1u32].into()], &GenerateOptions::new())
        .unwrap();
    assert_eq!(results[0].text(), "a");
    assert_eq!(
        results[1].error.as_ref().unwrap().kind(),
        ErrorKind::Unsupported
    );
}

/// A source that yields a token, an error, and then further tokens. It never reports its end.
struct Careless(u32);

impl Iterator for Careless {
    type Item = Result<Token>;
    fn next(&mut self) -> Option<Self::Item> {
        self.0 += 1;
        Some(match self.0 {
            2 => Err(Error::new(ErrorKind::Engine, "broken")),
            n => Ok(Token::new(n, "x").with_logits([0.0, 1.0])),
        })
    }
}

impl TokenSource for Careless {
    fn finish_reason(&self) -> Option<FinishReason> {
        None
    }
    fn metrics(&self) -> GenerateMetrics {
        GenerateMetrics::default()
    }
}

#[test]
fn a_stream_ends_after_an_error_whatever_its_source_does() {
    let mut s = TokenStream::new(Careless(0));
    assert_eq!(s.next().unwrap().unwrap().logits.unwrap().len(), 2);
    assert_eq!(s.finish_reason(), None);
    assert_eq!(s.next().unwrap().unwrap_err().kind(), ErrorKind::Engine);
    assert!(s.next().is_none() && s.next().is_none());
    assert_eq!(s.finish_reason(), Some(FinishReason::Error));
    let e = TokenStream::new(Careless(0)).collect_output().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Engine);
}

#[test]
fn no_tokens_asked_for_are_no_tokens() {
    let options = GenerateOptions::new().with_max_tokens(0);
    let out = model().generate(&"abc".into(), &options).unwrap();
    let out = out.collect_output().unwrap();
    assert_eq!(
        (out.text.as_str(), out.finish_reason),
        ("", Some(FinishReason::Length))
    );
    let json = serde_json::to_value(&out).unwrap();
    assert_eq!(json["finish_reason"], "length");
    assert_eq!(json["metrics"]["prompt_tokens"], 3);
    assert_eq!(
        serde_json::from_value::<inference::Output>(json).unwrap(),
        out
    );
}

#[test]
fn cancelling_works_from_another_thread() {
    let token = CancelToken::new();
    let options = GenerateOptions::new()
        .with_max_tokens(usize::MAX)
        .with_cancel(token.clone());
    let long = "x".repeat(1 << 20);
    let mut s = model().generate(&long.into(), &options).unwrap();
    s.next().unwrap().unwrap();
    let (tx, rx) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        rx.recv().unwrap();
        s.find_map(Result::err).map(|e| e.kind())
    });
    token.cancel();
    tx.send(()).unwrap();
    assert_eq!(reader.join().unwrap(), Some(ErrorKind::Cancelled));
}
