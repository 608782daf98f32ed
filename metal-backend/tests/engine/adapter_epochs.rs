//! Tests that adapters can be exchanged while requests run. A request with one adapter must not
//! reuse keys or values that were computed with another. The tests cover every way to compute a
//! request and every cache and file that stores keys.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::training_common::{cpu, distance, fixtures, tiny};
use inference::{
    BatchEvent, ErrorKind, GenerateOptions, Interrupt, LoadOptions, Prompt, TextModel, TokenStream,
};

fn adapter(name: &str) -> PathBuf {
    fixtures().join("training").join(name)
}

fn open(options: &LoadOptions) -> Box<dyn TextModel> {
    inference::load_model(tiny("llama"), options).unwrap()
}

fn prompt() -> Prompt {
    Prompt::Tokens((0..30).map(|i| 5 + (i * 7 + i * i % 11) % 90).collect())
}

fn options() -> GenerateOptions {
    GenerateOptions::new()
        .with_max_tokens(12)
        .with_ignore_eos(true)
        .with_logits(true)
}

/// The ids and logits of a reply, and the number of prompt tokens whose keys were reused.
struct Reply {
    ids: Vec<u32>,
    logits: Vec<f32>,
    cached: usize,
}

fn drain(mut stream: TokenStream) -> Reply {
    let (mut ids, mut logits) = (Vec::new(), Vec::new());
    for token in &mut stream {
        let token = token.unwrap();
        ids.push(token.id);
        logits.extend_from_slice(&token.logits.unwrap());
    }
    let cached = stream.metrics().cached_tokens;
    Reply {
        ids,
        logits,
        cached,
    }
}

fn say(model: &dyn TextModel, options: &GenerateOptions) -> Reply {
    drain(model.generate(&prompt(), options).unwrap())
}

/// Returns the reply of a model that has only ever had this adapter.
fn alone(adapter: Option<&str>) -> Reply {
    let load = match adapter {
        Some(name) => cpu().with_adapter_path(self::adapter(name)),
        None => cpu(),
    };
    say(open(&load).as_ref(), &options().with_num_draft_tokens(0))
}

fn swap(model: &dyn TextModel, to: Option<&str>) {
    let trainable = model.as_trainable().unwrap();
    match to {
        Some(name) => {
            trainable.load_adapter(&adapter(name)).unwrap();
        }
        None => trainable.remove_adapter().unwrap(),
    }
}

fn assert_same(actual: &Reply, expected: &Reply, what: &str) {
    assert_eq!(actual.ids, expected.ids, "{what}");
    let error = distance(&actual.logits, &expected.logits);
    assert!(error < 1e-4, "{what}: {error}");
}

/// Returns the ways to compute a request: name, loading options and request options.
fn ways() -> Vec<(&'static str, LoadOptions, GenerateOptions)> {
    let plain = options().with_num_draft_tokens(0);
    let drafted = cpu().with_draft_model(tiny("llama"));
    vec![
        ("plain", cpu(), plain.clone()),
        ("in steps", cpu(), plain.with_prefill_step_size(7)),
        ("draft model", drafted, options().with_num_draft_tokens(3)),
        ("prompt lookup", cpu(), options().with_prompt_lookup(2)),
    ]
}

#[test]
fn a_request_during_a_swap_leaves_nothing_for_the_next() {
    let changes = [
        (Some("llama-1"), None),
        (None, Some("llama-1")),
        (Some("llama-1"), Some("llama-4")),
    ];
    for (from, to) in changes {
        let expected = alone(to);
        assert!(distance(&expected.logits, &alone(from).logits) > 1e-2);
        for (way, load, options) in ways() {
            for pulled in [1, 4] {
                let what = format!("{way}, {from:?} to {to:?}, {pulled} tokens");
                let model = open(&load);
                swap(model.as_ref(), from);
                let mut stream = model.generate(&prompt(), &options).unwrap();
                for _ in 0..pulled {
                    stream.next().unwrap().unwrap();
                }
                swap(model.as_ref(), to);
                assert_eq!(drain(stream).ids.len() + pulled, expected.ids.len());
                let next = say(model.as_ref(), &options);
                assert_eq!(next.cached, 0, "{what}");
                assert_same(&next, &expected, &what);
                // The first request with the new adapter must have cached the prefix.
                let again = say(model.as_ref(), &options);
                assert_eq!(again.cached, 29, "{what}");
                assert_same(&again, &expected, &what);
            }
        }
    }
}

#[test]
fn a_request_that_was_not_begun_is_of_the_new_adapter() {
    let expected = alone(Some("llama-4"));
    for (way, load, options) in ways() {
        let model = open(&load);
        swap(model.as_ref(), Some("llama-1"));
        say(model.as_ref(), &options);
        // The request reuses the previous request's prefix, but has computed nothing yet.
        let stream = model.generate(&prompt(), &options).unwrap();
        assert_eq!(stream.metrics().cached_tokens, 29, "{way}");
        swap(model.as_ref(), Some("llama-4"));
        let reply = drain(stream);
        assert_eq!(reply.cached, 0, "{way}");
        assert_same(&reply, &expected, way);
        let again = say(model.as_ref(), &options);
        assert_eq!(again.cached, 29, "{way}");
        assert_same(&again, &expected, way);
    }
}

/// Runs a session until no row is left, and changes the adapter before step `steps_before`. Returns
/// the replies in the order in which the rows were added.
fn run(model: &dyn TextModel, rows: usize, steps_before: usize, to: Option<&str>) -> Vec<Reply> {
    let options = options();
    let mut session = model.batch_session().unwrap();
    let ids: Vec<_> = (0..rows)
        .map(|_| session.add(&prompt(), &options).unwrap())
        .collect();
    let mut replies: Vec<Reply> = (0..rows)
        .map(|_| Reply {
            ids: Vec::new(),
            logits: Vec::new(),
            cached: 0,
        })
        .collect();
    let mut steps = 0;
    while !session.is_empty() {
        if steps == steps_before {
            swap(model, to);
        }
        steps += 1;
        for event in session.step().unwrap() {
            let row = ids.iter().position(|id| *id == event.row()).unwrap();
            match event {
                BatchEvent::Token { token, .. } => {
                    replies[row].ids.push(token.id);
                    replies[row]
                        .logits
                        .extend_from_slice(&token.logits.unwrap());
                }
                BatchEvent::Done { metrics, .. } => replies[row].cached = metrics.cached_tokens,
                other => panic!("{other:?}"),
            }
        }
    }
    replies
}

#[test]
fn rows_of_a_batch_leave_nothing_for_the_next() {
    for (from, to) in [(Some("llama-1"), None), (None, Some("llama-4"))] {
        let expected = alone(to);
        for steps in [0, 1, 5] {
            let what = format!("{from:?} to {to:?} before step {steps}");
            let model = open(&cpu());
            swap(model.as_ref(), from);
            let during = run(model.as_ref(), 2, steps, to);
            if steps == 0 {
                // The rows had not computed anything before the adapter changed, so they use the
                // new adapter.
                for reply in &during {
                    assert_same(reply, &expected, &what);
                }
            } else {
                // A row that had not computed anything before step 1 uses the new adapter, so a
                // later request may reuse its prefix.
                let next = say(model.as_ref(), &options());
                assert!(next.cached == 0 || steps == 1, "{what}");
                assert_same(&next, &expected, &what);
            }
            for reply in run(model.as_ref(), 2, usize::MAX, None) {
                assert!(reply.cached > 0, "{what}");
                assert_same(&reply, &expected, &what);
            }
        }
    }
}

#[test]
fn swaps_at_any_time_leave_nothing_behind() {
    let model = open(&cpu().with_parallel_slots(4));
    let options = options().with_max_tokens(4);
    let stop = AtomicBool::new(false);
    let (first, second) = (alone(Some("llama-1")), alone(Some("llama-4")));
    std::thread::scope(|scope| {
        for i in 0..2 {
            let (model, options, stop) = (model.as_ref(), &options, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    if i == 0 {
                        say(model, options);
                    } else {
                        run(model, 2, usize::MAX, None);
                    }
                }
            });
        }
        // Stops the other threads even if an assertion fails.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let _stop = Stop(&stop);
        for round in 0..20 {
            for (name, expected) in [("llama-1", &first), ("llama-4", &second)] {
                swap(model.as_ref(), Some(name));
                let actual = say(model.as_ref(), &options);
                let vocabulary = expected.logits.len() / expected.ids.len();
                let expected = Reply {
                    ids: expected.ids[..4].to_vec(),
                    logits: expected.logits[..4 * vocabulary].to_vec(),
                    cached: 0,
                };
                assert_same(&actual, &expected, &format!("round {round}, {name}"));
            }
        }
    });
}

#[test]
fn prompt_files_of_an_adapter_are_for_its_engine_and_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prompt.safetensors");
    let load = |model: &dyn TextModel| model.as_prompt_cache().unwrap().load_prompt_cache(&path);
    let save = |model: &dyn TextModel| {
        let cache = model.as_prompt_cache().unwrap();
        cache
            .save_prompt_cache(&prompt(), &path, &Interrupt::new())
            .unwrap()
    };
    // Both engines have changed their adapter once. So their files can only be distinguished by the
    // identity of the adapter.
    let [one, other] =
        ["llama-1", "llama-4"].map(|name| open(&cpu().with_adapter_path(adapter(name))));
    assert_eq!(save(one.as_ref()), 30);
    let error = load(other.as_ref()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel);
    load(one.as_ref()).unwrap();
    assert_eq!(say(one.as_ref(), &options()).cached, 29);
    swap(one.as_ref(), Some("llama-1"));
    assert!(load(one.as_ref()).is_err());
    // A file that was saved without an adapter belongs to the base model, even if it replaces a
    // file that was saved with one.
    swap(one.as_ref(), None);
    save(one.as_ref());
    let base = open(&cpu());
    load(base.as_ref()).unwrap();
    let reply = say(base.as_ref(), &options());
    assert_eq!(reply.cached, 29);
    assert_same(&reply, &alone(None), "base");
}

/// Returns the logits of `model` for [`prompt`].
fn logits(model: &dyn TextModel) -> Vec<f32> {
    let tokens = model.as_token_model().unwrap();
    tokens
        .logits(&prompt(), false, &Interrupt::new())
        .unwrap()
        .logits
}

#[test]
fn a_pass_sees_all_of_a_change_or_nothing_of_it() {
    let model = open(&cpu());
    let names = [Some("llama-1"), Some("llama-4"), None];
    let references = names.map(|name| {
        swap(model.as_ref(), name);
        logits(model.as_ref())
    });
    let stop = AtomicBool::new(false);
    let (done, mut passes, mut seen) = (AtomicUsize::new(0), 0, [false; 3]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // On a busy machine, the other thread may get little time. So the loop continues until
            // there are enough passes. The time limit applies if that thread has failed.
            let enough = || done.load(Ordering::Acquire) > 20;
            let began = std::time::Instant::now();
            let mut round = 0;
            while round < 150 || !(enough() || began.elapsed().as_secs() > 120) {
                for name in names {
                    swap(model.as_ref(), name);
                    // In the first round, waits until a complete pass has used each adapter.
                    let begun = done.load(Ordering::Acquire);
                    let since = std::time::Instant::now();
                    while round == 0 && done.load(Ordering::Acquire) < begun + 2 {
                        // The other thread may have failed, so the wait has a time limit.
                        if since.elapsed() > std::time::Duration::from_secs(20) {
                            break;
                        }
                        std::thread::yield_now();
                    }
                }
                round += 1;
            }
            stop.store(true, Ordering::Release);
        });
        while !stop.load(Ordering::Acquire) {
            let actual = logits(model.as_ref());
            let error = references
                .each_ref()
                .map(|reference| distance(reference, &actual));
            let nearest = (0..3)
                .min_by(|&a, &b| error[a].total_cmp(&error[b]))
                .unwrap();
            assert!(error[nearest] < 1e-4, "pass {passes}: {error:?}");
            seen[nearest] = true;
            passes += 1;
            done.store(passes, Ordering::Release);
        }
    });
    assert!(
        passes > 20 && seen == [true; 3],
        "{passes} passes: {seen:?}"
    );
}
