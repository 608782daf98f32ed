//! Tests request options on the Python backend. The first test compares their effects with those
//! on the native engine.

use super::*;

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn options_do_what_they_do_on_cpu() {
    let (ours, theirs) = (load(&tiny("llama")), theirs(&tiny("llama")));
    let plain = tokens(theirs.as_ref(), &greedy(16));
    let stop_at = plain[5];
    let same = [
        greedy(0),
        greedy(1),
        greedy(16).with_repeat_penalty(1.5),
        greedy(16).with_repeat_penalty(1.5).with_repeat_window(2),
        greedy(16).with_repeat_penalty(0.7).with_repeat_window(0),
        greedy(16).with_stop_tokens(vec![stop_at]),
        greedy(16).with_temperature(1.0).with_top_k(1).with_seed(3),
        greedy(16).with_temperature(1.0).with_min_p(1.0),
    ];
    for options in &same {
        let run = |model: &dyn TextModel| {
            let stream = model.generate(&prompt(), options).unwrap();
            let output = stream.collect_output().unwrap();
            (output.tokens, output.text, output.finish_reason)
        };
        assert_eq!(run(ours.as_ref()), run(theirs.as_ref()), "{options:?}");
    }
    // A stop string ends the reply at the same place in both engines.
    let stream = theirs.generate(&prompt(), &greedy(16)).unwrap();
    let text = stream.text().unwrap();
    let characters: Vec<char> = text.chars().collect();
    let stop: String = characters[3..5].iter().collect();
    let options = greedy(16).with_stop(vec![stop.clone()]);
    let run = |model: &dyn TextModel| {
        let output = model.generate(&prompt(), &options).unwrap();
        let output = output.collect_output().unwrap();
        (output.text, output.finish_reason)
    };
    assert_eq!(run(ours.as_ref()), run(theirs.as_ref()));
    assert_eq!(
        run(theirs.as_ref()),
        (
            text[..text.find(&stop).unwrap()].into(),
            Some(FinishReason::Stop)
        )
    );
    // Each layer keeps only the last 16 positions. A longer reply must continue.
    let narrow = LoadOptions::new().with_context_len(16);
    let bounded = backend().load_model(&tiny("llama"), &narrow).unwrap();
    let (all, some) = (greedy(24), tokens(bounded.as_ref(), &greedy(24)));
    let all = tokens(theirs.as_ref(), &all);
    assert_eq!(some.len(), 24);
    assert_eq!(some[..8], all[..8]);
    assert_ne!(some, all);
    // Options that affect only speed must not change the reply. A missing feature must be refused.
    let faster = greedy(16)
        .with_cache_prompt(false)
        .with_prompt_lookup(3)
        .with_prefill_step_size(2);
    assert_eq!(tokens(theirs.as_ref(), &faster), plain);
    let refused = |options: LoadOptions| {
        let loaded = backend().load_model(&tiny("llama"), &options);
        loaded.map(|_| ()).unwrap_err().kind()
    };
    let packed = LoadOptions::new().with_kv_bits(8);
    assert_eq!(refused(packed), ErrorKind::InvalidOption);
    let draft = LoadOptions::new().with_draft_model(tiny("llama"));
    assert_eq!(refused(draft), ErrorKind::Unsupported);
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn draws_follow_the_seed_and_the_filters() {
    let model = theirs(&tiny("llama"));
    let warm = || greedy(24).with_temperature(1.0);
    let seeded = |seed: u64| tokens(model.as_ref(), &warm().with_seed(seed));
    assert_eq!(seeded(7), seeded(7));
    assert_ne!(seeded(7), seeded(8));
    assert_eq!(seeded(u64::MAX), seeded(u64::MAX));
    assert_ne!(
        tokens(model.as_ref(), &warm()),
        tokens(model.as_ref(), &warm())
    );
    let all = model
        .as_token_model()
        .unwrap()
        .logits(&prompt(), false, &Interrupt::new())
        .unwrap();
    let mut best: Vec<u32> = (0..all.logits.len() as u32).collect();
    best.sort_by(|&a, &b| all.logits[b as usize].total_cmp(&all.logits[a as usize]));
    let first = |options: GenerateOptions| {
        let mut seen: Vec<u32> = (0..60)
            .map(|seed| tokens(model.as_ref(), &options.clone().with_seed(seed))[0])
            .collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    };
    let one = || {
        GenerateOptions::new()
            .with_max_tokens(1)
            .with_ignore_eos(true)
            .with_temperature(1.0)
    };
    let mut three = best[..3].to_vec();
    three.sort_unstable();
    assert_eq!(first(one().with_temperature(5.0).with_top_k(3)), three);
    // Among the tokens above the threshold, XTC removes all but the least probable.
    let xtc = one()
        .with_xtc_probability(1.0)
        .with_xtc_threshold(0.0)
        .with_top_k(1);
    assert_eq!(first(xtc), [best[best.len() - 1]]);
    let xtc = one()
        .with_xtc_probability(0.0)
        .with_xtc_threshold(0.0)
        .with_top_k(1);
    assert_eq!(first(xtc), [best[0]]);
}

#[test]
#[cfg_attr(
    not(test_python),
    ignore = "installs Python packages: set MLX_TEST_PYTHON=1"
)]
fn what_changes_logits_changes_the_reply() {
    let model = theirs(&tiny("llama"));
    let run = |options: &GenerateOptions| tokens(model.as_ref(), options);
    let plain = run(&greedy(24));
    // A large bias selects its token at every step, and a ban removes the token.
    let biased = greedy(6).with_logit_bias([(77, 1e4)]);
    assert_eq!(run(&biased), [77; 6]);
    let banned = run(&biased.clone().with_banned_tokens(vec![77, u32::MAX]));
    assert_eq!(banned, plain[..6]);
    let error = model.generate(&prompt(), &greedy(6).with_logit_bias([(300, 1.0)]));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidOption);
    // After one occurrence, this penalty outweighs all other logits, so no token occurs twice.
    for options in [
        greedy(24).with_presence_penalty(1e4),
        greedy(24).with_frequency_penalty(1e4),
    ] {
        let mut reply = run(&options);
        assert_eq!(reply[0], plain[0]);
        reply.sort_unstable();
        reply.dedup();
        assert_eq!(reply.len(), 24, "{options:?}");
    }
    // The penalty grows with each occurrence. The bias outweighs the penalty of the first three
    // occurrences, so a fourth may follow. It does not outweigh the penalty of four.
    let counted = greedy(8)
        .with_logit_bias([(77, 100.0)])
        .with_frequency_penalty(30.0);
    let times = run(&counted).iter().filter(|&&id| id == 77).count();
    assert!((3..=4).contains(&times), "{times}");
    let forced = run(&greedy(6).with_forced_tokens(vec![9, 10, 11]));
    assert_eq!(forced[..3], [9, 10, 11]);
    let after = Prompt::Tokens(vec![40, 41, 42, 43, 9, 10, 11]);
    let stream = model.generate(&after, &greedy(3)).unwrap();
    assert_eq!(stream.collect_output().unwrap().tokens, forced[3..]);
    // A minimal length delays the end of the reply.
    let first = plain[0];
    let ends = greedy(24).with_stop_tokens(vec![first]);
    assert_eq!(run(&ends), [0; 0]);
    assert!(run(&ends.with_min_tokens(2)).len() >= 2);
}
