//! Tests of speculative decoding. Drafted tokens may change the number of steps, never the reply.

use super::*;

#[test]
fn guessed_tokens_change_nothing_but_the_number_of_steps() {
    for name in ["llama", "gemma3", "mixtral-q4"] {
        let plain = tiny(name);
        let drafted = tiny_with(name, &LoadOptions::new().with_draft_model(path_of(name)));
        for (prompt, sampled) in [(ids(1, 30), false), (ids(2, 3), true), (ids(3, 1), false)] {
            let mut options = fresh(40).with_ignore_eos(true);
            if sampled {
                // With AMX, multiplications of one row and of several rows differ by some 1e-5. A
                // random number between the two cumulative sums would select another token. This
                // seed avoids that case.
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
                    // The model drafts for itself, so nearly all drafted tokens are accepted.
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
    // The reply exceeds the cache's bound several times. The drafter is another model, so most
    // drafts are rejected.
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
    // With sliding layers, drafted and plain requests use different kinds of cache. Each must find
    // its own cached prefix.
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
        // The last token of a reply is never fed to the model, so it is not cached.
        assert_eq!(two.metrics.cached_tokens, 20, "{name}");
        // The drafter reuses the same prefix, so its acceptance rate stays high.
        assert!(two.metrics.draft_acceptance() > 0.9, "{name}");
        let alone = Prompt::Tokens(second.clone());
        assert_eq!(
            two.tokens,
            reply(plain.as_ref(), &alone, &fresh(9)),
            "{name}"
        );
        // A cancelled request must leave no cache.
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
    // Without sliding layers, both decoders use one kind of cache. So a batch can continue a
    // sequence that speculative decoding began.
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

/// Runs requests with their options together; each request starts one step after the previous
/// request. Returns the replies with their metrics.
fn together(
    model: &dyn TextModel,
    requests: &[(Prompt, GenerateOptions)],
) -> Vec<(Vec<u32>, GenerateMetrics)> {
    let mut session = model.batch_session().unwrap();
    let mut rows = BTreeMap::new();
    let mut all = vec![(Vec::new(), GenerateMetrics::default()); requests.len()];
    let mut waiting = requests.iter().enumerate();
    loop {
        if let Some((i, (prompt, options))) = waiting.next() {
            rows.insert(session.add(prompt, options).unwrap(), i);
        } else if session.is_empty() {
            return all;
        }
        for event in session.step().unwrap() {
            let reply = &mut all[rows[&event.row()]];
            match event {
                BatchEvent::Token { token, .. } => reply.0.push(token.id),
                BatchEvent::Done { metrics, .. } => reply.1 = *metrics,
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn rows_of_a_batch_speculate_and_reply_as_alone() {
    if crate::alone::ran_elsewhere(
        "generation::speculative::rows_of_a_batch_speculate_and_reply_as_alone",
    ) {
        return;
    }
    for name in ["llama", "gemma3", "mixtral-q4"] {
        let options = LoadOptions::new().with_parallel_slots(4);
        let plain = tiny_with(name, &options);
        let own = tiny_with(name, &options.clone().with_draft_model(path_of(name)));
        let other = tiny_with(name, &options.with_draft_model(path_of("llama")));
        let base = fresh(40).with_ignore_eos(true);
        // As in the test of one request, the seed avoids random numbers near the limit between two
        // tokens.
        let sampled = (base.clone().with_temperature(0.8))
            .with_seed(5)
            .with_repeat_penalty(1.1);
        let one_token = fresh(1).with_ignore_eos(true);
        let stopping = fresh(30).with_stop_tokens((20..120).collect::<Vec<u32>>());
        let grammar =
            (fresh(12).with_ignore_eos(false)).with_grammar(Grammar::Regex("[ab]{6}".into()));
        let requests: Vec<(Prompt, GenerateOptions)> = vec![
            (ids(1, 30), base.clone()),
            (ids(2, 3), sampled.clone()),
            (ids(3, 1), base.clone()),
            (ids(4, 60), one_token),
            (ids(5, 9), stopping),
            (ids(6, 8), grammar),
            (ids(7, 70), base.clone().with_num_draft_tokens(8)),
            (ids(8, 30), base.clone().with_num_draft_tokens(0)),
        ];
        let expected: Vec<Vec<u32>> = (requests.iter())
            .map(|(prompt, options)| reply(plain.as_ref(), prompt, options))
            .collect();
        // A small step makes the draft model lag behind the model.
        for step in [512, 16] {
            let requests: Vec<_> = (requests.iter().cloned())
                .map(|(prompt, options)| (prompt, options.with_prefill_step_size(step)))
                .collect();
            let looked_up: Vec<_> = (requests.iter().cloned())
                .map(|(prompt, options)| (prompt, options.with_prompt_lookup(2)))
                .collect();
            for (model, requests, which) in [
                (&own, &requests, "own"),
                (&other, &requests, "other"),
                (&plain, &looked_up, "lookup"),
            ] {
                let got = together(model.as_ref(), requests);
                for (i, ((tokens, metrics), expected)) in got.iter().zip(&expected).enumerate() {
                    assert_eq!(tokens, expected, "{name}, {which}, {step}, request {i}");
                    // These requests draft nothing: 3 generates one token, 5 has a grammar, and 7
                    // sets the number of draft tokens to 0.
                    let guesses = ![3, 5, 7].contains(&i);
                    assert!(guesses || metrics.draft_tokens == 0, "{name}, {which}, {i}");
                    assert!(metrics.accepted_draft_tokens <= metrics.draft_tokens);
                    if which == "own" && [0, 2, 6].contains(&i) {
                        let share = metrics.draft_acceptance();
                        assert!(
                            metrics.draft_tokens > 0 && share > 0.9,
                            "{name}, {i}: {share}"
                        );
                    }
                }
                let drafted: usize = got.iter().map(|(_, m)| m.draft_tokens).sum();
                assert!(drafted > 0, "{name}, {which}");
            }
        }
    }
}

/// Drafted tokens of a row must not affect the caches that later requests reuse.
#[test]
fn speculating_rows_keep_what_was_computed() {
    for name in ["llama", "gemma3"] {
        let options = LoadOptions::new().with_parallel_slots(4);
        let plain = tiny_with(name, &options);
        let other = tiny_with(name, &options.with_draft_model(path_of("qwen3")));
        let Prompt::Tokens(start) = ids(2, 12) else {
            unreachable!()
        };
        let request = greedy(20).with_ignore_eos(true);
        let first = together(
            other.as_ref(),
            &[(Prompt::Tokens(start.clone()), request.clone())],
        );
        let next = [&start[..], &first[0].0, &[20, 21]].concat();
        let next = Prompt::Tokens(next);
        let again = together(other.as_ref(), &[(next.clone(), request.clone())]);
        assert_eq!(again[0].1.cached_tokens, 31, "{name}");
        let expected = reply(plain.as_ref(), &next, &request.with_cache_prompt(false));
        assert_eq!(again[0].0, expected, "{name}");
    }
}

/// At temperature 1 each token of a speculating row must be distributed as the model says.
#[test]
fn sampled_tokens_of_speculating_rows_follow_the_distribution() {
    let plain = tiny("llama");
    let drafted = tiny_with(
        "llama",
        &LoadOptions::new().with_draft_model(path_of("qwen3")),
    );
    let request = |seed: u64| {
        let options = fresh(6).with_ignore_eos(true).with_temperature(1.0);
        (ids(1, 20), options.with_seed(seed))
    };
    let requests: Vec<_> = (0..24).map(request).collect();
    let got = together(drafted.as_ref(), &requests);
    // Plain decoding draws the same tokens from the same seeds, unless a random number is near the
    // limit between two tokens.
    let same = requests
        .iter()
        .zip(&got)
        .filter(|((prompt, options), got)| reply(plain.as_ref(), prompt, options) == got.0);
    let same = same.count();
    assert!(same >= 22, "{same} of 24");
}

#[test]
fn a_recurrent_model_refuses_drafts_in_a_batch() {
    let model = tiny("lfm2");
    let mut session = model.batch_session().unwrap();
    let error = session.add(&ids(1, 8), &greedy(4).with_prompt_lookup(2));
    let error = error.unwrap_err();
    assert_eq!(error.kind(), inference::ErrorKind::Unsupported);
    assert!(error.to_string().contains("recurrent"), "{error}");
    assert!(session.is_empty());
}
