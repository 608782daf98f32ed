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
