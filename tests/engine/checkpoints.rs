//! Tests of the second turn of long conversations, for models whose states cannot be trimmed. The
//! engine continues at a checkpoint, so it computes only the new tokens and a few before them.

use std::collections::BTreeMap;

use crate::common::{fixture, greedy};
use inference::{
    BatchEvent, ChatPrompt, GenerateOptions, LoadOptions, Message, Precision, Prompt, RequestId,
    TextModel,
};

/// Models that are recurrent, hybrids of several kinds, or have sliding windows.
const NAMES: [&str; 6] = [
    "lfm2",
    "qwen3-next",
    "falcon-h1",
    "gemma3",
    "gemma3-text",
    "xlstm",
];

/// The number of tokens that may be computed again.
const AGAIN: usize = 64;

fn load(name: &str, slots: usize) -> Box<dyn TextModel> {
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact)
        .with_parallel_slots(slots);
    inference::load_model(fixture("tiny").join(name), &options).unwrap()
}

/// The ids of a chat, ready for a reply.
fn chat(model: &dyn TextModel, messages: &[Message]) -> Vec<u32> {
    let tokens = model.as_token_model().unwrap();
    let prompt = ChatPrompt::new(messages.to_vec());
    tokens.prepare_chat(&prompt).unwrap().ids
}

/// A text of about `n` tokens of the tiny vocabularies.
fn text(seed: usize, n: usize) -> String {
    let letter = |i: usize| char::from(b'a' + ((i * i + i * 7 + seed * 5) % 26) as u8);
    (0..n).map(letter).collect()
}

fn reply(model: &dyn TextModel, prompt: &[u32], options: &GenerateOptions) -> (Vec<u32>, usize) {
    let stream = model.generate(&Prompt::Tokens(prompt.to_vec()), options);
    let output = stream.unwrap().collect_output().unwrap();
    assert_eq!(output.metrics.prompt_tokens, prompt.len());
    (output.tokens, prompt.len() - output.metrics.cached_tokens)
}

fn fresh(n: usize) -> GenerateOptions {
    greedy(n).with_cache_prompt(false)
}

/// The number of tokens of `next` after its common prefix with `last`.
fn new_tokens(last: &[u32], next: &[u32]) -> usize {
    let common = last.iter().zip(next).take_while(|(a, b)| a == b).count();
    next.len() - common
}

#[test]
fn a_second_turn_computes_its_new_tokens() {
    if crate::alone::ran_elsewhere("checkpoints::a_second_turn_computes_its_new_tokens") {
        return;
    }
    for name in NAMES {
        for slots in [1, 4] {
            let model = load(name, slots);
            let model = model.as_ref();
            let mut messages = vec![Message::system(text(1, 300)), Message::user(text(2, 1700))];
            let first = chat(model, &messages);
            assert!(first.len() >= 2000, "{}", first.len());
            let (_, computed) = reply(model, &first, &greedy(30));
            assert_eq!(computed, first.len(), "{name}");
            // The next prompt contains another reply, as if a client had dropped its reasoning.
            messages.extend([Message::assistant(text(3, 25)), Message::user(text(4, 40))]);
            let second = chat(model, &messages);
            let new = new_tokens(&first, &second);
            assert!((65..100).contains(&new), "{new}");
            let (expected, _) = reply(model, &second, &fresh(20));
            let (actual, computed) = reply(model, &second, &greedy(20));
            assert_eq!(actual, expected, "{name}, {slots} slots");
            assert!(
                computed <= new + AGAIN,
                "{name}, {slots} slots: {computed} of {new}"
            );

            // The same prompt runs again, as if the user wanted another reply.
            let (again, computed) = reply(model, &second, &greedy(20));
            assert_eq!(again, expected, "{name}");
            assert!(computed <= AGAIN, "{name}, {slots} slots: {computed}");

            // The third turn continues the second turn.
            messages.extend([Message::assistant(text(5, 9)), Message::user(text(6, 30))]);
            let third = chat(model, &messages);
            let new = new_tokens(&second, &third);
            let (expected, _) = reply(model, &third, &fresh(20));
            let (actual, computed) = reply(model, &third, &greedy(20));
            assert_eq!(actual, expected, "{name}");
            assert!(
                computed <= new + AGAIN,
                "{name}, {slots} slots: {computed} of {new}"
            );
        }
    }
}

/// Tests prompts without messages. The next prompt repeats a part of the first prompt, or all of it
/// and the reply.
#[test]
fn a_text_is_continued_where_it_ends_and_inside() {
    if crate::alone::ran_elsewhere("checkpoints::a_text_is_continued_where_it_ends_and_inside") {
        return;
    }
    let prompt: Vec<u32> = (0..2000)
        .map(|i| (i * 37 + i * i % 71) % 260 + 16)
        .collect();
    for name in NAMES {
        let model = load(name, 4);
        let model = model.as_ref();
        let (answer, _) = reply(model, &prompt, &greedy(30));
        let whole = [&prompt[..], &answer, &[20, 21, 22]].concat();
        let changed = [&prompt[..], &[33, 34, 35]].concat();
        // A checkpoint is at most a step of 512 tokens away.
        let inside = [&prompt[..1700], &[33, 34, 35]].concat();
        for (next, most) in [(&whole, 4), (&changed, 3 + AGAIN), (&inside, 3 + 512)] {
            let (expected, _) = reply(model, next, &fresh(20));
            let (actual, computed) = reply(model, next, &greedy(20));
            assert_eq!(actual, expected, "{name}");
            assert!(computed <= most, "{name}: {computed} of {most}");
        }
    }
}

/// Runs requests together. Returns their tokens, and the numbers of computed prompt tokens.
fn batch(
    model: &dyn TextModel,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Vec<(Vec<u32>, usize)> {
    let mut session = model.batch_session().unwrap();
    let rows: Vec<RequestId> = prompts
        .iter()
        .map(|ids| session.add(&Prompt::Tokens(ids.clone()), options).unwrap())
        .collect();
    let mut all: BTreeMap<RequestId, (Vec<u32>, usize)> = BTreeMap::new();
    while !session.is_empty() {
        for event in session.step().unwrap() {
            let row = all.entry(event.row()).or_default();
            match event {
                BatchEvent::Token { token, .. } => row.0.push(token.id),
                BatchEvent::Done { metrics, .. } => {
                    row.1 = metrics.prompt_tokens - metrics.cached_tokens;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    rows.iter().map(|row| all.remove(row).unwrap()).collect()
}

#[test]
fn conversations_of_a_batch_compute_their_new_tokens() {
    if crate::alone::ran_elsewhere("checkpoints::conversations_of_a_batch_compute_their_new_tokens")
    {
        return;
    }
    for name in NAMES {
        let model = load(name, 4);
        let model = model.as_ref();
        let system = Message::system(text(1, 300));
        let mut chats: Vec<Vec<Message>> = (0..3)
            .map(|i| vec![system.clone(), Message::user(text(20 + i, 1700))])
            .collect();
        let prompts = |chats: &[Vec<Message>]| -> Vec<Vec<u32>> {
            chats.iter().map(|messages| chat(model, messages)).collect()
        };
        let first = prompts(&chats);
        let computed: usize = batch(model, &first, &greedy(30)).iter().map(|r| r.1).sum();
        let all: usize = first.iter().map(Vec::len).sum();
        // One row computes the system prompt for the others.
        assert!(
            (300..all - 600).contains(&computed),
            "{name}: {computed} of {all}"
        );
        for (messages, i) in chats.iter_mut().zip(0..) {
            messages.extend([
                Message::assistant(text(30 + i, 25)),
                Message::user(text(40 + i, 40)),
            ]);
        }
        let second = prompts(&chats);
        let got = batch(model, &second, &greedy(20));
        for ((actual, computed), (first, second)) in got.iter().zip(first.iter().zip(&second)) {
            let (expected, _) = reply(model, second, &fresh(20));
            assert_eq!(*actual, expected, "{name}");
            let new = new_tokens(first, second);
            assert!(*computed <= new + AGAIN, "{name}: {computed} of {new}");
        }
        // New conversations begin with the same system prompt: one after the others, and one beside
        // the first request of a model, whose caches are in use.
        let other = vec![system, Message::user(text(50, 100))];
        let [other] = prompts(&[other]).try_into().unwrap();
        let new = new_tokens(&first[0], &other);
        let (expected, _) = reply(model, &other, &fresh(20));
        let got = batch(model, std::slice::from_ref(&other), &greedy(20));
        assert_eq!(got[0].0, expected, "{name}");
        assert!(got[0].1 <= new + AGAIN, "{name}: {} of {new}", got[0].1);
        let unused = load(name, 4);
        let mut session = unused.batch_session().unwrap();
        let running = Prompt::Tokens(first[0].clone());
        let running = session.add(&running, &greedy(200)).unwrap();
        let mut began = false;
        while !began {
            let events = session.step().unwrap();
            began = events.iter().any(|event| event.row() == running);
        }
        let added = session
            .add(&Prompt::Tokens(other.clone()), &greedy(20))
            .unwrap();
        let mut actual = Vec::new();
        let metrics = 'steps: loop {
            for event in session.step().unwrap() {
                match event {
                    BatchEvent::Token { row, token } if row == added => actual.push(token.id),
                    BatchEvent::Done { row, metrics, .. } if row == added => break 'steps metrics,
                    BatchEvent::Token { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        };
        assert_eq!(actual, expected, "{name}");
        let computed = metrics.prompt_tokens - metrics.cached_tokens;
        assert!(computed <= new + AGAIN, "{name}: {computed} of {new}");
    }
}
