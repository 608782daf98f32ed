//! Compares texts and conversations of the first model with golden ids
//! (`tools/golden/text_golden.py`).
//!
//! A test that has the model's file calls `assert_golden` with the loaded model. This file has the
//! checks that need no model file.

use inference::{ChatEnd, ChatPrompt, Message, TokenModel};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    vocab_size: usize,
    texts: Vec<Text>,
    chats: Vec<Chat>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    /// The ids if no special token is recognized.
    plain: Vec<u32>,
    decoded: String,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<(String, String)>,
    answer: bool,
    text: String,
    ids: Vec<u32>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../fixtures/text_smollm_golden.json"))
        .expect("the golden file is whole")
}

/// Checks each golden text and conversation with the model's own encoding, decoding and template.
#[allow(dead_code, reason = "for tests that have the model's file")]
pub fn assert_golden(model: &dyn TokenModel) {
    let golden = golden();
    assert_eq!(model.info().vocab_size, golden.vocab_size);
    for case in &golden.texts {
        let text = &case.text;
        assert_eq!(model.encode(text, false).unwrap(), case.ids, "{text:?}");
        assert_eq!(
            model.encode(text, true).unwrap(),
            case.ids,
            "this model adds nothing: {text:?}"
        );
        assert_eq!(model.decode(&case.ids).unwrap(), case.decoded, "{text:?}");
    }
    for case in &golden.chats {
        let messages: Vec<Message> = case
            .messages
            .iter()
            .map(|(role, content)| Message::new(role, content))
            .collect();
        let end = match case.answer {
            true => ChatEnd::Reply,
            false => ChatEnd::Messages,
        };
        let chat = ChatPrompt::new(messages.clone()).with_end(end);
        let prepared = model.prepare_chat(&chat).unwrap();
        assert_eq!(prepared.text, case.text);
        if case.answer {
            assert_eq!(prepared.ids, case.ids, "{messages:?}");
            let options = inference::GenerateOptions::default().with_max_tokens(1);
            let output = model
                .chat(&messages, &options)
                .unwrap()
                .collect_output()
                .unwrap();
            assert_eq!(output.metrics.prompt_tokens, case.ids.len(), "{messages:?}");
        }
    }
}

#[test]
fn the_golden_file_covers_what_it_should() {
    let golden = golden();
    assert!(golden.texts.len() >= 40 && golden.chats.len() >= 8);
    let ids = golden
        .texts
        .iter()
        .flat_map(|t| t.ids.iter().chain(&t.plain));
    let ids = ids.chain(golden.chats.iter().flat_map(|c| &c.ids));
    assert!(
        ids.clone()
            .all(|id| usize::try_from(*id).is_ok_and(|id| id < golden.vocab_size))
    );
    // Encoding as markup and as plain text must differ exactly if a text contains a control token
    // (ids 0 to 16).
    for case in &golden.texts {
        assert!(case.plain.iter().all(|id| *id > 16), "{:?}", case.text);
        assert_eq!(
            case.ids == case.plain,
            case.ids.iter().all(|id| *id > 16),
            "{:?}",
            case.text
        );
    }
    // In each conversation, only the template may start a turn, and no message may.
    for case in &golden.chats {
        let count = |id: u32| case.ids.iter().filter(|i| **i == id).count();
        let system = usize::from(case.messages[0].0 != "system");
        let turns = case.messages.len() + system;
        assert_eq!(
            (count(1), count(2)),
            (turns + usize::from(case.answer), turns)
        );
    }
}
