//! Tests of batches. Rows of any length and age must equal single runs, and the batch must compute
//! a common prefix only once.

use super::*;

#[test]
fn a_batch_gives_what_each_gets_alone_in_every_checkpoint() {
    if crate::alone::ran_elsewhere(
        "generation::batches::a_batch_gives_what_each_gets_alone_in_every_checkpoint",
    ) {
        return;
    }
    let prompts: Vec<Prompt> = [3, 40, 1, 17, 9].iter().map(|&n| ids(n, n)).collect();
    for name in tiny_names() {
        let model = tiny(&name);
        let solo: Vec<_> = prompts
            .iter()
            .map(|p| reply(model.as_ref(), p, &fresh(10)))
            .collect();
        // A small step size divides the prompts, so prefilling rows and decoding rows share steps.
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
    if crate::alone::ran_elsewhere(
        "generation::batches::sixty_four_schedules_of_coming_and_going_equal_solo_runs",
    ) {
        return;
    }
    let mut state = 12345u64;
    let mut random = |n: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) % n
    };
    let mut removed = 0;
    for name in ["qwen3", "gemma3", "lfm2"] {
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
                // Any active row may be removed, during prefill or decode. A row that has ended can
                // not.
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

/// Runs all requests of a session. Returns for each request the reply's tokens, the number of
/// computed prompt tokens, and the step of the first token, counted from 1.
fn run_all(
    model: &dyn TextModel,
    prompts: &[Prompt],
    options: &GenerateOptions,
) -> Vec<(Vec<u32>, usize, usize)> {
    let mut session = model.batch_session().unwrap();
    let rows: Vec<RequestId> = prompts
        .iter()
        .map(|prompt| session.add(prompt, options).unwrap())
        .collect();
    let mut all = vec![(Vec::new(), 0, 0); prompts.len()];
    for step in 1.. {
        if session.is_empty() {
            break;
        }
        for event in session.step().unwrap() {
            let at = rows.iter().position(|row| *row == event.row()).unwrap();
            let (got, computed, first) = &mut all[at];
            match event {
                BatchEvent::Token { token, .. } => {
                    got.push(token.id);
                    if *first == 0 {
                        *first = step;
                    }
                }
                BatchEvent::Done { metrics, .. } => {
                    *computed = metrics.prompt_tokens - metrics.cached_tokens;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    all
}

#[test]
fn a_system_prompt_is_computed_once_for_thirty_two_clients() {
    let system: Vec<u32> = (0..1000).map(|i| 5 + (i * 7 + i * i % 11) % 90).collect();
    // After the system prompt, the first token of each client differs, so only the system prompt is
    // shared.
    let client_tokens = |client: u32| (0..5).map(move |j| 6 + (client + j * 32) % 90);
    let prompts: Vec<Prompt> = (0..32)
        .map(|client| {
            Prompt::Tokens(
                system
                    .iter()
                    .copied()
                    .chain(client_tokens(client))
                    .collect(),
            )
        })
        .collect();
    for name in ["llama", "qwen3"] {
        let load = || tiny_with(name, &LoadOptions::new().with_parallel_slots(8));
        let expected: Vec<Vec<u32>> = [0, 9, 31]
            .map(|i| reply(load().as_ref(), &prompts[i], &fresh(4)))
            .into();
        let check = |all: &[(Vec<u32>, usize, usize)], steps: usize| {
            assert_eq!(all.len(), 32);
            for (i, expected) in [0, 9, 31].into_iter().zip(&expected) {
                assert_eq!(&all[i].0, expected, "{name}, client {i}");
            }
            let computed: usize = all.iter().map(|(_, computed, _)| computed).sum();
            assert_eq!(computed, 1000 + 32 * 5, "{name}");
            // Without sharing, 8 prompts of 256 tokens need 32 steps. An incomplete character
            // delays a token's report by up to three steps.
            let last = all.iter().map(|(_, _, first)| *first).max().unwrap();
            assert!(last <= steps + 3, "{last} steps to the first token");
        };
        let options = greedy(4).with_prefill_step_size(256);
        // With all requests at once, rows of the batch share the prefix.
        check(&run_all(load().as_ref(), &prompts, &options), 6);
        // With eight requests at a time, later requests reuse the cached prefix of earlier ones.
        let model = load();
        let waves = prompts.chunks(8);
        let all: Vec<_> = waves
            .flat_map(|wave| run_all(model.as_ref(), wave, &options))
            .collect();
        check(&all, 6);
        assert!(all[8..].iter().all(|(_, computed, _)| *computed <= 5));
        // The first client and the last client send a second turn.
        for client in [0, 31] {
            let Prompt::Tokens(mut next) = prompts[client].clone() else {
                unreachable!()
            };
            next.extend(&all[client].0);
            next.extend([20, 21]);
            let next = [Prompt::Tokens(next)];
            let again = run_all(model.as_ref(), &next, &options);
            // The last token of a reply was never fed to the model, so it must be computed now.
            assert_eq!(again[0].1, 3, "{name}, client {client}");
            let fresh = reply(load().as_ref(), &next[0], &fresh(4));
            assert_eq!(again[0].0, fresh, "{name}, client {client}");
        }
    }
}

#[test]
fn short_prompts_do_not_starve_a_long_one_nor_does_it_stall_them() {
    let model = tiny("llama");
    let options = fresh(1).with_prefill_step_size(16);
    let expected = reply(model.as_ref(), &ids(3, 200), &fresh(1));
    let mut session = model.batch_session().unwrap();
    // This row decodes until the test ends.
    let talker = fresh(1000).with_ignore_eos(true).with_prefill_step_size(16);
    let talker = session.add(&ids(1, 4), &talker).unwrap();
    session.step().unwrap();
    let long = session.add(&ids(3, 200), &options).unwrap();
    let mut came = BTreeMap::new();
    for step in 0..50 {
        // Together, the two prompts fill a prefill step.
        for i in 0..2 {
            let prompt = ids(10 + 2 * step + i, 8);
            came.insert(session.add(&prompt, &options).unwrap(), step);
        }
        let mut talked = 0;
        let mut done = false;
        for event in session.step().unwrap() {
            let BatchEvent::Token { row, token } = event else {
                continue;
            };
            if row == talker {
                talked += 1;
            } else if row == long {
                assert_eq!([token.id], expected[..]);
                done = true;
            } else {
                came.remove(&row);
            }
        }
        assert_eq!(talked, 1, "one token a step, whatever prompts there are");
        if done {
            // The long prompt gets half of each step, 8 tokens. So its 200 tokens need 25 steps.
            assert!((24..=26).contains(&step), "{step}");
            // The other half served the two short prompts that arrived with each step.
            assert!(came.len() as u32 <= step + 2, "{} wait", came.len());
            return;
        }
    }
    panic!("half of a step is 8 of its 200 tokens, and 50 steps were not enough");
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
        .map(|((common, own_tokens), i)| {
            let own_tokens = (0..own_tokens).map(|j| 6 + (i * 17 + j * 5) % 90);
            Prompt::Tokens(alike[..common].iter().copied().chain(own_tokens).collect())
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
                // A new prompt and a copy of the first prompt join while other rows decode.
                if rows.len() == 4 && rows.values().all(|(_, got)| got.len() > 1) {
                    rows.insert(session.add(&prompts[4], &options).unwrap(), (4, Vec::new()));
                    rows.insert(session.add(&prompts[0], &options).unwrap(), (5, Vec::new()));
                }
            }
            assert_eq!(rows.len(), 6, "{name}, step {step}");
            assert_eq!(cached[..5], [0, 40, 25, 40, 0], "{name}, step {step}");
            // The ring buffer has dropped some tokens, so they must be computed again.
            if name == "llama" {
                assert_eq!(cached[5], 42);
            }
        }
    }
}
