//! Tests replies through `inference::bindings`, with a scripted model.

use inference::bindings::{Input, Reply, backend_infos};
use inference::{ErrorKind, FinishReason, GenerateOptions};
use inference_conformance::scripted::{Scripted, Step};
use serde_json::json;

#[test]
fn a_reply_has_text_tokens_and_the_reason_of_its_end() {
    let model = Scripted::replies(["Par", "is", "."]);
    let input = Input::from_json(json!([{"role": "user", "content": "France?"}])).unwrap();
    let stream = input.start(&model, &GenerateOptions::new()).unwrap();
    let mut pieces = Vec::new();
    let reply = Reply::collect(stream, |token| {
        pieces.push(token.text.clone());
        true
    })
    .unwrap();
    assert_eq!((reply.text.as_str(), reply.tokens.len()), ("Paris.", 3));
    assert_eq!(pieces.concat(), "Paris.");
    assert_eq!(reply.finish_reason, Some(FinishReason::Stop));
    assert_eq!(reply.metrics.generated_tokens, 3);
    let json = serde_json::to_value(&reply).unwrap();
    assert_eq!(json["finish_reason"], "stop");
    assert_eq!(serde_json::from_value::<Reply>(json).unwrap(), reply);
}

#[test]
fn a_reply_that_the_caller_stops_is_that_so_far() {
    let model = Scripted::replies(["a", "b", "c"]);
    let input = Input::from_json(json!("x")).unwrap();
    let stream = input.start(&model, &GenerateOptions::new()).unwrap();
    let reply = Reply::collect(stream, |token| token.text != "b").unwrap();
    assert_eq!(reply.text, "ab");
    assert_eq!(reply.finish_reason, Some(FinishReason::Cancelled));
}

#[test]
fn errors_of_a_stream_and_options_without_an_effect_are_errors() {
    let model = Scripted::replies(["a", "b"]).after(1, Step::fail(ErrorKind::Engine));
    let input = Input::from_json(json!("x")).unwrap();
    let stream = input.start(&model, &GenerateOptions::new()).unwrap();
    let error = Reply::collect(stream, |_| true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Engine);
    let logits = GenerateOptions::new().with_logits(true);
    let error = input.start(&model, &logits).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn each_linked_backend_is_described_once() {
    let infos = backend_infos();
    let names: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
    assert!(names.is_sorted(), "{names:?}");
    assert_eq!(names.len(), inference::backends().len());
    for info in infos {
        assert_eq!(info.available, info.reason.is_none(), "{info:?}");
    }
}
