//! Compares rendered chat templates with texts of Hugging Face transformers. Conversations that
//! contain names of control tokens are compared with sanitized ids
//! (`tools/golden/chat_templates.py`).

use std::collections::HashMap;
use std::path::Path;

use inference::{ChatPrompt, Message};
use inference_text::{ChatOptions, ChatTemplate, TextPipeline};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Golden {
    now: u64,
    templates: HashMap<String, String>,
    talks: HashMap<String, Vec<Message>>,
    cases: Vec<Case>,
    injections: Vec<Injection>,
}

#[derive(Deserialize)]
struct Case {
    template: String,
    talk: String,
    extra: Map<String, Value>,
    text: Option<String>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Injection {
    messages: Vec<Message>,
    ids: Vec<u32>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../fixtures/chat_templates.json"))
        .expect("the golden file is whole")
}

#[test]
fn templates_render_as_in_transformers() {
    let golden = golden();
    assert!(golden.cases.len() >= 130);
    let mut wrong = Vec::new();
    for case in &golden.cases {
        let what = format!("{} with {} and {:?}", case.template, case.talk, case.extra);
        let mut options = ChatOptions::answer().with_now(golden.now);
        options.extra = case.extra.clone();
        let made = ChatTemplate::new(golden.templates[&case.template].as_str(), "a test").and_then(
            |template| template.render(&golden.talks[&case.talk], &options, "<s>", "</s>"),
        );
        match (made, &case.text, &case.error) {
            (Ok(ours), Some(theirs), _) if ours == *theirs => {}
            (Err(ours), _, Some(theirs)) => {
                // The error that a template raises must reach the user with its message.
                if let Some(raised) = theirs.strip_prefix("TemplateError: ") {
                    assert!(ours.to_string().contains(raised), "{what}: {ours}");
                }
            }
            (ours, theirs, error) => {
                wrong.push(format!(
                    "{what}:\nours   {ours:?}\ntheirs {theirs:?} {error:?}\n"
                ));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        golden.cases.len(),
        wrong.join("\n")
    );
}

#[test]
fn what_messages_spell_is_sanitized_as_in_transformers() {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/llama");
    let pipeline = TextPipeline::from_dir(tiny, "llama").unwrap();
    for case in golden().injections {
        let ids = pipeline
            .prepare_chat(&ChatPrompt::new(case.messages.clone()))
            .unwrap()
            .ids;
        assert_eq!(ids, case.ids, "{:?}", case.messages);
    }
}
