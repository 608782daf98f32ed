//! Tests that scripted models keep all promises that need neither files nor probabilities.

use std::sync::Arc;
use std::time::Duration;

use inference::{
    Capabilities, EmbedOptions, EmbeddingInfo, ErrorKind, FinishReason, GenerateOptions, Interrupt,
    Message, Prompt, RerankOptions, TextModel, TokenModel,
};
use inference_conformance::scripted::{
    END, Reply, Scripted, ScriptedBackend, Step, Vocabulary, attention,
};
use inference_conformance::{Check, Outcome, Suite};

/// Scripted models skip these checks: the test supplies the loader, and a script ignores options
/// that change probabilities.
const EXCEPT: [Check; 14] = [
    Check::Undeclared,
    Check::LoadMissing,
    Check::LoadNotAModel,
    Check::LoadAdapter,
    Check::RepeatPenalty,
    Check::PresencePenalty,
    Check::FrequencyPenalty,
    Check::LogitBias,
    Check::BannedTokens,
    Check::ForcedTokens,
    Check::Xtc,
    Check::Logprobs,
    Check::Unseeded,
    Check::Formats,
];

fn alphabet() -> Scripted {
    let next = |ids: &[u32]| match ids.last() {
        Some(&last @ 97..122) => last + 1,
        _ => 97,
    };
    let mut info = EmbeddingInfo::default();
    info.dimensions = 2;
    Scripted::predicting(next)
        .with_training()
        .with_attention()
        .with_template("{{ messages }}")
        .with_pace(Duration::from_micros(20))
        .with_embeddings(info, |ids| {
            let sum: u32 = ids.iter().sum();
            vec![ids.len() as f32, sum as f32]
        })
        .with_reranking(|_, document, _| Ok(1.0 / document.len() as f32))
}

#[test]
fn a_scripted_model_keeps_the_rest_of_the_contract() {
    let capabilities = Capabilities::new()
        .with_streaming()
        .with_chat()
        .with_classify()
        .with_batch_generate()
        .with_batch_sessions()
        .with_logits()
        .with_training()
        .with_attention_inspection()
        .with_embeddings()
        .with_reranking()
        .with_named_adapters();
    let backend = ScriptedBackend::new("scripted")
        .with_capabilities(capabilities)
        .loading(|_, _| Ok(alphabet()));
    let checks = Check::ALL.iter().filter(|check| !EXCEPT.contains(check));
    let report = Suite::new(Arc::new(backend), ".")
        .only(checks.copied())
        .run();
    report.assert_passed();
    let passed = report
        .checks
        .iter()
        .filter(|c| c.outcome == Outcome::Passed);
    assert!(passed.count() >= 58, "{report}");
}

fn text(model: &Scripted, prompt: &str) -> String {
    let stream = model.generate(&prompt.into(), &GenerateOptions::new());
    stream.unwrap().text().unwrap()
}

#[test]
fn replies_are_computed_from_what_was_asked() {
    let model = Scripted::computed(|asked| match asked.text.as_str() {
        "no" => Err(inference::Error::new(ErrorKind::InvalidOption, "refused")),
        said => Ok(Reply::text(&said.replace('a', "é"))),
    });
    assert_eq!(text(&model, "banana"), "bénéné");
    let chat = model.chat(&[Message::user("ba")], &GenerateOptions::new());
    assert_eq!(chat.unwrap().text().unwrap(), "user: bé\n");
    let refused = model.generate(&"no".into(), &GenerateOptions::new());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidOption);
    assert_eq!(model.asked(), ["text banana", "chat user:ba"]);
    let control = model.control();
    assert_eq!(
        (control.started(), control.running(), control.peak()),
        (2, 0, 1)
    );
}

#[test]
fn a_script_waits_fails_and_panics_where_it_says() {
    let options = GenerateOptions::new().with_max_tokens(3);
    let model = Scripted::replies(["a", "b", "c", "d"]);
    let slow = model
        .clone()
        .after(1, Step::Wait(Duration::from_millis(30)));
    let output = slow.generate(&"x".into(), &options).unwrap();
    let output = output.collect_output().unwrap();
    assert_eq!(
        (output.text.as_str(), output.finish_reason),
        ("abc", Some(FinishReason::Length))
    );
    assert!(output.metrics.decode_time >= Duration::from_millis(30));

    let mut failing = model.clone().after(2, Step::fail(ErrorKind::Engine));
    let mut stream = failing.generate(&"x".into(), &options).unwrap();
    let tokens: Vec<_> = stream.by_ref().map_while(Result::ok).collect();
    assert_eq!(tokens.len(), 2);
    assert_eq!(stream.finish_reason(), Some(FinishReason::Error));
    drop(stream);

    failing = model.after(0, Step::Panic("asked to".into()));
    let mut stream = failing.generate(&"x".into(), &options).unwrap();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stream.next()));
    let panic = panicked.unwrap_err();
    assert_eq!(inference::kit::panic_text(panic.as_ref()), Some("asked to"));
    drop(stream);
    assert_eq!(failing.control().running(), 0);

    let every = Reply::text("ab")
        .before_each(Step::Idle)
        .after(2, Step::fail(ErrorKind::Closed));
    let items: Vec<_> = every
        .into_stream()
        .map(|item| item.map(|t| t.text))
        .collect();
    assert_eq!(items.len(), 3);
    assert_eq!(items[2].as_ref().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn one_request_of_a_session_can_fail_all() {
    let lost = inference::Error::new(ErrorKind::Engine, "the device is lost");
    let model = Scripted::computed(move |asked| {
        let reply = Reply::text(&asked.text);
        Ok(match asked.text.as_str() {
            "bad" => reply.after(1, Step::FailAll(lost.clone())),
            _ => reply,
        })
    });
    let mut session = model.batch_session().unwrap();
    let options = GenerateOptions::new();
    session.add(&"good".into(), &options).unwrap();
    session.add(&"bad".into(), &options).unwrap();
    assert_eq!(session.step().unwrap().len(), 2);
    assert_eq!(session.step().unwrap_err().message(), "the device is lost");
    assert!(session.is_empty());
    assert_eq!((model.control().running(), model.control().peak()), (0, 2));
}

#[test]
fn special_tokens_have_names_and_no_text() {
    let vocabulary = Vocabulary::new().with_specials(["<call>"]);
    let ids = vocabulary.encode("a<call>é");
    assert_eq!(ids, [97, END + 1, 0xc3, 0xa9]);
    let reply = ids.clone();
    let model = Scripted::computed(move |_| Ok(Reply::ids(reply.clone())));
    let model = model.with_vocabulary(vocabulary.clone());
    let tokens = model.generate(&ids.clone().into(), &GenerateOptions::new());
    let tokens: Vec<_> = tokens.unwrap().map(Result::unwrap).collect();
    assert_eq!(tokens[1].bytes.as_deref(), Some(b"<call>".as_slice()));
    assert!(tokens[1].special && tokens[1].text.is_empty());
    assert_eq!(
        (tokens[2].text.as_str(), tokens[3].text.as_str()),
        ("", "é")
    );
    assert_eq!(model.control().last().unwrap().text, "a<call>é");
    assert_eq!(TokenModel::decode(&model, &ids).unwrap(), "aé");
    assert!(vocabulary.decode(&[END + 2], true).is_err());
}

#[test]
fn vectors_and_scores_are_those_of_the_script() {
    let mut info = EmbeddingInfo::default();
    (info.dimensions, info.max_length) = (2, Some(3));
    let model = Scripted::replies(["a"])
        .with_embeddings(info, |ids| vec![1.0, ids.len() as f32])
        .with_reranking(|query, document, _| Ok((query.len() * document.len()) as f32));
    let embedder = model.as_embedding_model().unwrap();
    let (none, options) = (Interrupt::new(), EmbedOptions::new());
    let prompts = [Prompt::from("ab"), Prompt::from("abcd")];
    let vectors = embedder.embed(&prompts[..1], &options, &none).unwrap();
    assert_eq!(vectors, [[1.0, 2.0]]);
    let failure = embedder.embed(&prompts, &options, &none).unwrap_err();
    assert_eq!(failure.kind(), ErrorKind::InvalidOption);
    let short = EmbedOptions::new().with_truncate(true).with_dimensions(1);
    let vectors = embedder.embed(&prompts, &short, &none).unwrap();
    assert_eq!(vectors, [[1.0], [1.0]]);
    let tokens = embedder.embedding_tokens(&prompts[1], &short).unwrap();
    assert_eq!(tokens, [97, 98, 99]);
    let ranker = model.as_rerank_model().unwrap();
    let documents = [String::from("a"), String::from("bcd")];
    let ranking = ranker.rerank("xy", &documents, &RerankOptions::new(), &none);
    let ranking = ranking.unwrap();
    assert_eq!((ranking.scores, ranking.tokens), (vec![2.0, 6.0], 8));
    assert_eq!(attention(&[7, 8]).keys, [[[7.0, 8.0]]]);
}
