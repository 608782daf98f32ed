//! Tests that one request of a batch fails when memory runs out, and that the replies of the other
//! requests do not change. The memory budget is global to the process, so each test runs alone.

use std::collections::BTreeMap;

use inference::{BatchEvent, ErrorKind, GenerateOptions, LoadOptions, Prompt, TextModel};
use mlx_rs_core::memory;

use crate::common::fixture;

type Replies = BTreeMap<usize, Result<Vec<u32>, ErrorKind>>;

fn prompt(seed: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + seed * 61) % 260 + 16).collect()
}

/// The replies to these prompts. Each prompt joins after this number of steps.
fn replies(model: &dyn TextModel, requests: &[(usize, Vec<u32>)], sampled: bool) -> Replies {
    let mut session = model.batch_session().unwrap();
    let (mut places, mut replies) = (BTreeMap::new(), Replies::new());
    for step in 0.. {
        for (place, (_, prompt)) in (requests.iter().enumerate()).filter(|(_, r)| r.0 == step) {
            let mut options = GenerateOptions::new()
                .with_max_tokens(24)
                .with_ignore_eos(true)
                .with_cache_prompt(false);
            options = match sampled {
                true => options.with_temperature(1.0).with_seed(place as u64 + 1),
                false => options.with_temperature(0.0),
            };
            let row = session
                .add(&Prompt::from(prompt.clone()), &options)
                .unwrap();
            places.insert(row, place);
            replies.insert(place, Ok(Vec::new()));
        }
        if session.is_empty() && requests.iter().all(|(first, _)| *first <= step) {
            return replies;
        }
        for event in session.step().unwrap() {
            match event {
                BatchEvent::Token { row, token } => {
                    let reply = replies.get_mut(&places[&row]).unwrap();
                    reply.as_mut().unwrap().push(token.id);
                }
                BatchEvent::Failed { row, error } => {
                    replies.insert(places[&row], Err(error.kind()));
                }
                _ => {}
            }
        }
    }
    unreachable!()
}

#[test]
fn the_longest_request_fails_and_the_others_reply_as_before() {
    crate::alone::alone(
        "out_of_memory::the_longest_request_fails_and_the_others_reply_as_before",
        the_longest_request_fails_and_the_others_reply_as_before_alone,
    );
}

fn the_longest_request_fails_and_the_others_reply_as_before_alone() {
    let options = LoadOptions::new().with_backend("cpu");
    let model = inference::load_model(fixture("tiny").join("llama"), &options).unwrap();
    let short = [(0, prompt(1, 8)), (0, prompt(2, 12)), (4, prompt(3, 10))];
    let long = prompt(4, 220);
    let all = memory::budget();
    // A budget for the short requests that is too small for the long one.
    let alone = |budget, requests: &[(usize, Vec<u32>)]| {
        memory::set_budget(budget);
        let replies = replies(model.as_ref(), requests, false);
        memory::set_budget(all);
        replies.values().all(Result::is_ok)
    };
    let budget = (10..22)
        .rev()
        .map(|power| 1 << power)
        .find(|&budget| !alone(budget, &[(0, long.clone())]))
        .expect("some budget is too small");
    assert!(
        alone(budget, &short),
        "{budget} bytes are too few for short requests"
    );

    for sampled in [false, true] {
        let expected = replies(model.as_ref(), &short, sampled);
        // The long request arrives with the others, in the middle, and with the last one.
        for arrives in [0, 2, 4] {
            let requests = [&short[..], &[(arrives, long.clone())]].concat();
            memory::set_budget(budget);
            let mut seen = replies(model.as_ref(), &requests, sampled);
            memory::set_budget(all);
            assert_eq!(
                seen.remove(&3),
                Some(Err(ErrorKind::OutOfMemory)),
                "{arrives}"
            );
            assert_eq!(seen, expected, "{arrives} {sampled}");
            // After the failure, all requests succeed again.
            let seen = replies(model.as_ref(), &requests, sampled);
            assert!(seen.values().all(Result::is_ok), "{seen:?}");
        }
    }
}
