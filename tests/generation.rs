//! Generation on tiny checkpoints: batches equal to solo runs, caches of every kind, reused
//! prefixes, guessed tokens.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::{fixture, greedy, tiny, tiny_names};
use inference::{
    BatchEvent, CancelToken, ErrorKind, FinishReason, GenerateOptions, LoadOptions, Prompt,
    RequestId, TextModel,
};

fn ids(from: u32, n: u32) -> Prompt {
    Prompt::Tokens(
        (0..n)
            .map(|i| 5 + (from * 31 + i * 7 + i * i % 11) % 90)
            .collect(),
    )
}

fn reply(model: &dyn TextModel, prompt: &Prompt, options: &GenerateOptions) -> Vec<u32> {
    let stream = model.generate(prompt, options).unwrap();
    stream.collect_output().unwrap().tokens
}

fn path_of(name: &str) -> std::path::PathBuf {
    fixture("tiny").join(name)
}

fn tiny_with(name: &str, options: &LoadOptions) -> Box<dyn TextModel> {
    inference::load_model(path_of(name), &options.clone().with_backend("cpu"))
        .unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Nothing is reused, so that runs can be compared.
fn fresh(n: usize) -> GenerateOptions {
    greedy(n).with_cache_prompt(false)
}

#[test]
fn a_batch_gives_what_each_gets_alone_in_every_checkpoint() {
    let prompts: Vec<Prompt> = [3, 40, 1, 17, 9].iter().map(|&n| ids(n, n)).collect();
    for name in tiny_names() {
        let model = tiny(&name);
        let solo: Vec<_> = prompts
            .iter()
            .map(|p| reply(model.as_ref(), p, &fresh(10)))
            .collect();
        // A small step cuts the prompts, so that rows in prefill and in decode meet.
        for step in [512, 16] {
            let options = fresh(10).with_prefill_step_size(step);
            let together = model.batch_generate(&prompts, &options).unwrap();
            for ((result, solo), prompt) in together.iter().zip(&solo).zip(&prompts) {
                assert!(result.error.is_none(), "{name}: {:?}", result.error);
                let got: Vec<u32> = result.tokens.iter().map(|t| t.id).collect();
                assert_eq!(&got, solo, "{name}, step {step}, {prompt:?}");
            }
        }
    }
}

#[test]
fn sixty_four_schedules_of_coming_and_going_equal_solo_runs() {
    let mut state = 12345u64;
    let mut random = |n: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % n
    };
    let mut removed = 0;
    for name in ["qwen3", "gemma3"] {
        let model = tiny(name);
        let solo: Vec<Vec<u32>> = (0..8)
            .map(|i| reply(model.as_ref(), &ids(i, 4 + 5 * i), &fresh(12)))
            .collect();
        for schedule in 0..32 {
            let mut session = model.batch_session().unwrap();
            let mut rows: BTreeMap<RequestId, (usize, Vec<u32>)> = BTreeMap::new();
            let (mut added, mut ended) = (0, 0);
            while ended < 8 {
                while added < 8 && (session.is_empty() || random(3) == 0) {
                    let i = random(8) as u32;
                    let options = fresh(12).with_prefill_step_size(1 + random(20) as usize);
                    let row = session.add(&ids(i, 4 + 5 * i), &options).unwrap();
                    rows.insert(row, (i as usize, Vec::new()));
                    added += 1;
                }
                for event in session.step().unwrap() {
                    let (i, got) = rows.get_mut(&event.row()).unwrap();
                    match event {
                        BatchEvent::Token { token, .. } => got.push(token.id),
                        BatchEvent::Done { reason, .. } => {
                            assert_eq!(got, &solo[*i], "{name}, schedule {schedule}");
                            assert!(matches!(reason, FinishReason::Length | FinishReason::Stop));
                            ended += 1;
                        }
                        other => panic!("{other:?}"),
                    }
                }
                // Anyone may be taken away, in prefill or in decode; one that ended is not there.
                if random(6) == 0 {
                    let at = random(rows.len() as u64) as usize;
                    let (&row, (i, got)) = rows.iter().nth(at).unwrap();
                    if session.remove(row) {
                        assert_eq!(got[..], solo[*i][..got.len()]);
                        ended += 1;
                        removed += 1;
                    }
                    assert!(!session.remove(row));
                }
            }
        }
    }
    assert!(removed >= 64, "{removed}");
}

#[test]
fn one_bad_row_does_not_touch_the_others() {
    let model = tiny("llama");
    let good = ids(1, 8);
    let bad = Prompt::Tokens(vec![1, 4_000_000]);
    let results = model
        .batch_generate(&[good.clone(), bad, Prompt::Tokens(Vec::new())], &fresh(6))
        .unwrap();
    let expected = reply(model.as_ref(), &good, &fresh(6));
    let got: Vec<u32> = results[0].tokens.iter().map(|t| t.id).collect();
    assert_eq!(got, expected);
    for failed in &results[1..] {
        assert_eq!(
            failed.error.as_ref().unwrap().kind(),
            ErrorKind::InvalidOption
        );
    }
    let mut session = model.batch_session().unwrap();
    let cancel = CancelToken::new();
    let (a, b) = (
        session.add(&good, &fresh(6)).unwrap(),
        session
            .add(&good, &fresh(6).with_cancel(cancel.clone()))
            .unwrap(),
    );
    session.step().unwrap();
    cancel.cancel();
    let events = session.step().unwrap();
    assert!(events.iter().any(|e| matches!(
        e,
        BatchEvent::Failed { row, error } if *row == b && error.kind() == ErrorKind::Cancelled
    )));
    assert!(
        events
            .iter()
            .any(|e| matches!(e, BatchEvent::Token { row, .. } if *row == a))
    );
    model.close().unwrap();
    let events = session.step().unwrap();
    assert!(
        matches!(events.front(), Some(BatchEvent::Failed { error, .. })
        if error.kind() == ErrorKind::Closed)
    );
    assert!(session.is_empty());
}

#[test]
fn the_same_seed_draws_the_same_in_a_batch_and_alone() {
    let model = tiny("qwen2");
    let options = fresh(12).with_temperature(1.0).with_top_p(0.9).with_seed(7);
    let prompts: Vec<Prompt> = (1..5).map(|i| ids(i, 6 * i)).collect();
    let solo: Vec<_> = prompts
        .iter()
        .map(|p| reply(model.as_ref(), p, &options))
        .collect();
    let together = model.batch_generate(&prompts, &options).unwrap();
    for (result, solo) in together.iter().zip(&solo) {
        let got: Vec<u32> = result.tokens.iter().map(|t| t.id).collect();
        assert_eq!(&got, solo);
    }
}

#[test]
fn classification_of_many_equals_one_by_one() {
    let model = tiny("gemma2");
    let prompts: Vec<Prompt> = (0..16).map(|i| ids(i, 1 + (i * 5) % 23)).collect();
    let all = model.classify(&prompts, &fresh(1), true).unwrap();
    for (prompt, result) in prompts.iter().zip(&all) {
        let one = model
            .classify(std::slice::from_ref(prompt), &fresh(1), true)
            .unwrap();
        assert_eq!(result.token.id, one[0].token.id);
        let (a, b) = (
            result.logits.as_ref().unwrap(),
            one[0].logits.as_ref().unwrap(),
        );
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4));
    }
    let bad = [prompts[0].clone(), Prompt::Tokens(vec![u32::MAX])];
    assert!(model.classify(&bad, &fresh(1), false).is_err());
}

#[test]
fn what_the_prompts_of_a_batch_begin_with_is_computed_once() {
    let plain = LoadOptions::default();
    let cases = [
        ("llama", plain.clone()),
        ("gemma3", plain.clone()),
        ("mistral-window", plain.clone()),
        ("qwen3", plain.clone().with_context_len(24)),
        ("qwen3-q8", plain.with_kv_bits(8).with_kv_group_size(32)),
    ];
    let alike: Vec<u32> = (0..40).map(|i| 5 + (i * 7 + i * i % 11) % 90).collect();
    let prompts: Vec<Prompt> = [(40, 3), (40, 9), (25, 4), (40, 1), (0, 30)]
        .into_iter()
        .zip(1..)
        .map(|((common, own), i)| {
            let own = (0..own).map(|j| 6 + (i * 17 + j * 5) % 90);
            Prompt::Tokens(alike[..common].iter().copied().chain(own).collect())
        })
        .collect();
    for (name, load) in cases {
        let model = tiny_with(name, &load);
        let solo: Vec<_> = prompts
            .iter()
            .map(|p| reply(model.as_ref(), p, &fresh(10)))
            .collect();
        for step in [512, 16] {
            let options = fresh(10).with_prefill_step_size(step);
            let mut session = model.batch_session().unwrap();
            let mut rows = BTreeMap::new();
            for (i, prompt) in prompts.iter().enumerate().take(4) {
                rows.insert(session.add(prompt, &options).unwrap(), (i, Vec::new()));
            }
            let mut cached = [0; 6];
            while !session.is_empty() {
                for event in session.step().unwrap() {
                    let (i, got) = rows.get_mut(&event.row()).unwrap();
                    match event {
                        BatchEvent::Token { token, .. } => got.push(token.id),
                        BatchEvent::Done { metrics, .. } => {
                            cached[*i] = metrics.cached_tokens;
                            let expected = &solo[*i % 5];
                            assert_eq!(got, expected, "{name}, step {step}, prompt {i}");
                        }
                        other => panic!("{other:?}"),
                    }
                }
                // One that is like no other, and the first again, beside those that decode.
                if rows.len() == 4 && rows.values().all(|(_, got)| got.len() > 1) {
                    rows.insert(session.add(&prompts[4], &options).unwrap(), (4, Vec::new()));
                    rows.insert(session.add(&prompts[0], &options).unwrap(), (5, Vec::new()));
                }
            }
            assert_eq!(rows.len(), 6, "{name}, step {step}");
            assert_eq!(cached[..5], [0, 40, 25, 40, 0], "{name}, step {step}");
            // What a circle has lost is computed again.
            if name == "llama" {
                assert_eq!(cached[5], 42);
            }
        }
    }
}

#[test]
fn a_prompt_that_begins_alike_is_not_computed_again() {
    for name in ["llama", "gemma3", "mistral-window"] {
        let model = tiny(name);
        let Prompt::Tokens(first) = ids(2, 12) else {
            unreachable!()
        };
        let output = model
            .generate(
                &Prompt::Tokens(first.clone()),
                &greedy(5).with_ignore_eos(true),
            )
            .unwrap()
            .collect_output()
            .unwrap();
        assert_eq!(output.metrics.cached_tokens, 0);
        // The next turn: prompt, reply, and more.
        let mut second = first.clone();
        second.extend(&output.tokens);
        second.extend([20, 21, 22]);
        let expected = reply(model.as_ref(), &Prompt::Tokens(second.clone()), &fresh(8));
        let output = model
            .generate(&Prompt::Tokens(second.clone()), &greedy(8))
            .unwrap()
            .collect_output()
            .unwrap();
        assert_eq!(output.tokens, expected, "{name}");
        // The last token of a reply is never fed.
        assert_eq!(output.metrics.cached_tokens, 16, "{name}");
        // Another ending: cut back to the common prefix.
        let mut third = second[..9].to_vec();
        third.push(30);
        let expected = reply(model.as_ref(), &Prompt::Tokens(third.clone()), &fresh(8));
        let output = model
            .generate(&Prompt::Tokens(third), &greedy(8))
            .unwrap()
            .collect_output()
            .unwrap();
        assert_eq!(output.tokens, expected, "{name}");
        if name == "llama" {
            assert_eq!(output.metrics.cached_tokens, 9);
        }
    }
}

#[test]
fn a_cancelled_request_leaves_nothing_behind() {
    let model = tiny("llama");
    let prompt = ids(3, 20);
    let expected = reply(model.as_ref(), &prompt, &greedy(10));
    let cancel = CancelToken::new();
    let mut stream = model
        .generate(&prompt, &greedy(10).with_cancel(cancel.clone()))
        .unwrap();
    stream.next().unwrap().unwrap();
    cancel.cancel();
    assert!(stream.any(|t| t.is_err()));
    drop(stream);
    let output = model
        .generate(&prompt, &greedy(10))
        .unwrap()
        .collect_output()
        .unwrap();
    assert_eq!(output.metrics.cached_tokens, 0);
    assert_eq!(output.tokens, expected);
}

#[test]
fn a_bounded_context_goes_on_however_the_prompt_is_cut() {
    for name in ["llama", "gemma3", "gpt-oss", "qwen3-moe"] {
        for bound in [1, 8, 24] {
            let options = LoadOptions::new().with_context_len(bound);
            let model = tiny_with(name, &options);
            let prompt = ids(5, 60);
            let whole = reply(model.as_ref(), &prompt, &fresh(40).with_ignore_eos(true));
            assert_eq!(whole.len(), 40);
            for step in [1, 7, 30] {
                let options = fresh(40).with_ignore_eos(true).with_prefill_step_size(step);
                let got = reply(model.as_ref(), &prompt, &options);
                assert_eq!(got, whole, "{name}, bound {bound}, step {step}");
            }
        }
        // A reply that fits is exact, to the last position.
        let prompt = ids(6, 20);
        let options = fresh(30).with_ignore_eos(true);
        let free = reply(tiny(name).as_ref(), &prompt, &options);
        for bound in [49, 100] {
            let roomy = tiny_with(name, &LoadOptions::new().with_context_len(bound));
            assert_eq!(reply(roomy.as_ref(), &prompt, &options), free, "{name}");
        }
    }
}

#[test]
fn a_bound_is_a_sliding_window_on_every_layer() {
    // A bound below 16 keeps nothing of the beginning.
    let with_window = |window: serde_json::Value| {
        let dir = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(path_of("mistral-window")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        let config = dir.path().join("config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["sliding_window"] = window;
        std::fs::write(&config, json.to_string()).unwrap();
        dir
    };
    let (none, eight) = (with_window(serde_json::Value::Null), with_window(8.into()));
    let load = |dir: &tempfile::TempDir, options: &LoadOptions| {
        inference::load_model(dir.path(), &options.clone().with_backend("cpu")).unwrap()
    };
    let bounded = load(&none, &LoadOptions::new().with_context_len(8));
    let windowed = load(&eight, &LoadOptions::new());
    let free = load(&none, &LoadOptions::new());
    let prompt = ids(4, 50);
    assert_eq!(
        reply(bounded.as_ref(), &prompt, &fresh(60)),
        reply(windowed.as_ref(), &prompt, &fresh(60)),
    );
    assert_ne!(
        reply(bounded.as_ref(), &prompt, &fresh(60)),
        reply(free.as_ref(), &prompt, &fresh(60)),
    );
}

#[test]
fn a_packed_cache_is_near_the_plain_one() {
    // Beyond the first chunk of 256 positions, so that packed parts grow.
    let prompt = ids(8, 270);
    let logits = |model: &dyn TextModel| {
        let tokens = model.as_token_model().unwrap();
        tokens.logits(&prompt, true).unwrap().logits
    };
    for name in ["qwen3-q8", "qwen3-q4"] {
        let exact = tiny(name);
        assert_eq!(exact.info().head_dim, 32);
        let plain = logits(exact.as_ref());
        let reply_of = |model: &dyn TextModel| reply(model, &prompt, &fresh(20));
        let expected = reply_of(exact.as_ref());
        let distance = |options: &LoadOptions| {
            let model = tiny_with(name, options);
            let packed = logits(model.as_ref());
            let total: f32 = packed.iter().zip(&plain).map(|(a, b)| (a - b).abs()).sum();
            (total / plain.len() as f32, reply_of(model.as_ref()))
        };
        let options = LoadOptions::new().with_kv_bits(8).with_kv_group_size(32);
        let (eight, _) = distance(&options);
        let (four, reply) = distance(&options.clone().with_kv_bits(4));
        assert_eq!(reply.len(), 20);
        // Nothing is packed before the 5,000th position; so the reply is the same, too.
        let (never, reply) = distance(&options.clone().with_quantized_kv_start(5000));
        assert_eq!(reply, expected, "{name}");
        assert!(never == 0.0, "{name}: {never}");
        assert!(
            0.0 < eight && eight < 0.02 && eight < four && four < 0.5,
            "{name}: {eight} {four}"
        );
    }
    // Heads that no group divides are refused, by name.
    let options = LoadOptions::new().with_kv_bits(8).with_backend("cpu");
    let error = inference::load_model(path_of("llama"), &options)
        .err()
        .unwrap();
    assert!(error.to_string().contains("kv_group_size"), "{error}");
}

#[test]
fn guessed_tokens_change_nothing_but_the_number_of_steps() {
    for name in ["llama", "gemma3", "mixtral-q4"] {
        let plain = tiny(name);
        let drafted = tiny_with(name, &LoadOptions::new().with_draft_model(path_of(name)));
        for (prompt, sampled) in [(ids(1, 30), false), (ids(2, 3), true), (ids(3, 1), false)] {
            let mut options = fresh(40).with_ignore_eos(true);
            if sampled {
                // With AMX, products of one row and of several round differently, by some 1e-5. A
                // random number between the sums of both would choose another token. Not with this
                // seed.
                options = options
                    .with_temperature(0.8)
                    .with_seed(5)
                    .with_repeat_penalty(1.1);
            }
            let expected = reply(plain.as_ref(), &prompt, &options);
            for n in [1, 3, 8] {
                let options = options.clone().with_num_draft_tokens(n);
                let output = drafted
                    .generate(&prompt, &options)
                    .unwrap()
                    .collect_output()
                    .unwrap();
                assert_eq!(output.tokens, expected, "{name}, {n} guessed");
                let m = &output.metrics;
                assert!(m.draft_tokens > 0);
                if !sampled {
                    // The model guesses as it decides.
                    assert!(
                        m.draft_acceptance() > 0.9,
                        "{name}: {}",
                        m.draft_acceptance()
                    );
                }
                let options = options.with_prompt_lookup(3);
                let output = plain
                    .generate(&prompt, &options)
                    .unwrap()
                    .collect_output()
                    .unwrap();
                assert_eq!(output.tokens, expected, "{name}, {n} looked up");
            }
        }
    }
    let other = LoadOptions::new()
        .with_backend("cpu")
        .with_draft_model(Path::new("nowhere").to_path_buf());
    assert!(inference::load_model(path_of("llama"), &other).is_err());
}

#[test]
fn guessed_tokens_go_on_in_a_circle_and_in_packed_caches() {
    let same = |name: &str, options: &LoadOptions, prompt: &Prompt| {
        let plain = tiny_with(name, options);
        let drafted = tiny_with(name, &options.clone().with_draft_model(path_of("llama")));
        let request = fresh(90).with_ignore_eos(true);
        let expected = reply(plain.as_ref(), prompt, &request);
        for (model, n) in [(&drafted, 4), (&drafted, 9), (&plain, 6)] {
            let request = request.clone().with_num_draft_tokens(n);
            let stream = model.generate(prompt, &request.with_prompt_lookup(2));
            let output = stream.unwrap().collect_output().unwrap();
            assert_eq!(output.tokens, expected, "{name}, {n}");
            assert!(output.metrics.draft_tokens > 0, "{name}, {n}");
        }
    };
    // The reply goes round several times; the guesses of another model are wrong mostly.
    for name in ["llama", "gemma3"] {
        for bound in [5, 20] {
            same(
                name,
                &LoadOptions::new().with_context_len(bound),
                &ids(4, 30),
            );
        }
    }
    let packed = LoadOptions::new().with_kv_bits(8).with_kv_group_size(32);
    same("qwen3-q8", &packed, &ids(4, 30));
}

#[test]
fn guessing_takes_and_keeps_what_was_computed() {
    // With sliding layers the caches of guessing are not those of others, but it finds its own.
    for name in ["llama", "gemma3"] {
        let plain = tiny(name);
        let drafted = tiny_with(name, &LoadOptions::new().with_draft_model(path_of(name)));
        let Prompt::Tokens(first) = ids(2, 12) else {
            unreachable!()
        };
        let request = greedy(9).with_ignore_eos(true).with_num_draft_tokens(4);
        let run = |model: &dyn TextModel, prompt: &[u32]| {
            let prompt = Prompt::Tokens(prompt.to_vec());
            let stream = model.generate(&prompt, &request).unwrap();
            stream.collect_output().unwrap()
        };
        let one = run(drafted.as_ref(), &first);
        assert_eq!(one.metrics.cached_tokens, 0);
        assert!(one.metrics.draft_acceptance() > 0.9, "{name}");
        let second = [&first[..], &one.tokens, &[20, 21]].concat();
        let two = run(drafted.as_ref(), &second);
        // The last token of a reply is never fed.
        assert_eq!(two.metrics.cached_tokens, 20, "{name}");
        // Guesses are as good as before: the guessing model remembers the same.
        assert!(two.metrics.draft_acceptance() > 0.9, "{name}");
        let alone = Prompt::Tokens(second.clone());
        assert_eq!(
            two.tokens,
            reply(plain.as_ref(), &alone, &fresh(9)),
            "{name}"
        );
        // A cancelled one leaves nothing.
        let cancel = CancelToken::new();
        let third = [&second[..], &two.tokens, &[30]].concat();
        let options = request.clone().with_cancel(cancel.clone());
        let mut stream = drafted
            .generate(&Prompt::Tokens(third.clone()), &options)
            .unwrap();
        stream.next().unwrap().unwrap();
        cancel.cancel();
        assert!(stream.any(|t| t.is_err()));
        drop(stream);
        assert_eq!(run(drafted.as_ref(), &third).metrics.cached_tokens, 0);
    }
    // Both use caches of the same kind: a batch begins where guessing ended.
    let model = tiny("llama");
    let Prompt::Tokens(start) = ids(5, 20) else {
        unreachable!()
    };
    let request = greedy(6).with_ignore_eos(true).with_prompt_lookup(3);
    let guessed = model.generate(&Prompt::Tokens(start.clone()), &request);
    let tokens = guessed.unwrap().collect_output().unwrap().tokens;
    let next = Prompt::Tokens([start, tokens, vec![9]].concat());
    let mut session = model.batch_session().unwrap();
    session.add(&next, &greedy(2)).unwrap();
    let mut cached = None;
    while !session.is_empty() {
        for event in session.step().unwrap() {
            if let BatchEvent::Done { metrics, .. } = event {
                cached = Some(metrics.cached_tokens);
            }
        }
    }
    assert_eq!(cached, Some(25));
}

#[test]
fn a_prompt_cache_on_disk_belongs_to_its_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prompt.safetensors");
    let Prompt::Tokens(start) = ids(9, 30) else {
        unreachable!()
    };
    let mut whole = start.clone();
    whole.extend([33, 34]);
    let whole = Prompt::Tokens(whole);
    for name in ["llama", "gemma3"] {
        let writer = tiny(name);
        let kept = writer.as_prompt_cache().unwrap();
        let n = kept
            .save_prompt_cache(&Prompt::Tokens(start.clone()), &path)
            .unwrap();
        assert_eq!(n, start.len());
        let expected = reply(writer.as_ref(), &whole, &fresh(10));
        let reader = tiny(name);
        let tokens = reader
            .as_prompt_cache()
            .unwrap()
            .load_prompt_cache(&path)
            .unwrap();
        assert_eq!(tokens, start);
        let output = reader
            .generate(&whole, &greedy(10))
            .unwrap()
            .collect_output()
            .unwrap();
        assert_eq!(output.metrics.cached_tokens, start.len());
        assert_eq!(output.tokens, expected, "{name}");
        let other = tiny("qwen3");
        let error = other
            .as_prompt_cache()
            .unwrap()
            .load_prompt_cache(&path)
            .unwrap_err();
        assert!(error.to_string().contains("another model"), "{error}");
    }
}

#[test]
fn progress_is_told_and_a_step_is_where_cancelling_takes_effect() {
    use std::sync::{Arc, Mutex};
    let model = tiny("llama");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let cancel = CancelToken::new();
    let progress = {
        let (seen, cancel) = (Arc::clone(&seen), cancel.clone());
        inference::Progress::new(move |done, total| {
            seen.lock().unwrap().push((done, total));
            if done >= 20 {
                cancel.cancel();
            }
        })
    };
    let options = fresh(4)
        .with_prefill_step_size(10)
        .with_cancel(cancel)
        .with_progress(progress);
    let mut stream = model.generate(&ids(1, 45), &options).unwrap();
    let error = stream.next().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(*seen.lock().unwrap(), [(0, 45), (10, 45), (20, 45)]);
}

#[test]
fn cancelling_takes_effect_within_a_token() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let model = tiny("llama");
    // By the reader of the tokens: none comes after.
    let cancel = CancelToken::new();
    let options = fresh(400).with_ignore_eos(true).with_cancel(cancel.clone());
    let mut stream = model.generate(&ids(1, 20), &options).unwrap();
    assert_eq!(stream.by_ref().take(7).filter(Result::is_ok).count(), 7);
    cancel.cancel();
    let rest: Vec<_> = stream.by_ref().collect();
    assert_eq!(rest.len(), 1);
    let error = rest[0].as_ref().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(stream.metrics().generated_tokens, 7);
    assert_eq!(stream.finish_reason(), Some(FinishReason::Cancelled));
    // By another thread, at any moment: at most the token in progress follows.
    for at in [0, 1, 5, 60, 200] {
        let cancel = CancelToken::new();
        let count = Arc::new(AtomicUsize::new(0));
        let other = {
            let (cancel, count) = (cancel.clone(), Arc::clone(&count));
            std::thread::spawn(move || {
                while count.load(Ordering::SeqCst) < at {
                    std::thread::yield_now();
                }
                cancel.cancel();
                count.load(Ordering::SeqCst)
            })
        };
        let options = fresh(100_000).with_ignore_eos(true).with_cancel(cancel);
        let mut error = None;
        for token in model.generate(&ids(1, 20), &options).unwrap() {
            match token {
                Ok(_) => drop(count.fetch_add(1, Ordering::SeqCst)),
                Err(e) => error = Some(e.kind()),
            }
        }
        assert_eq!(error, Some(ErrorKind::Cancelled));
        let (then, now) = (other.join().unwrap(), count.load(Ordering::SeqCst));
        assert!(now <= then + 1, "{then} tokens, {now} in the end");
    }
}
