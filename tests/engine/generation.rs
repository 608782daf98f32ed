//! Tests of generation on tiny checkpoints: batches, every kind of cache, reused prefixes and
//! speculative decoding. Replies must equal those of single, uncached runs.

mod batches;
mod speculative;

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{fixture, greedy, tiny, tiny_names};
use inference::{
    BatchEvent, CancelToken, ErrorKind, FinishReason, GenerateMetrics, GenerateOptions, Grammar,
    Interrupt, LoadOptions, Precision, Prompt, RequestId, TextModel,
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

/// Loads a model with exact prefill, unless the options set a precision. Tests compare replies of
/// equal tokens that were divided into different steps.
fn tiny_with(name: &str, options: &LoadOptions) -> Box<dyn TextModel> {
    let mut options = options.clone().with_backend("cpu");
    options.precision = options.precision.or(Some(Precision::Exact));
    inference::load_model(path_of(name), &options).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Options that reuse no cached prefix, so that separate runs are comparable.
fn fresh(n: usize) -> GenerateOptions {
    greedy(n).with_cache_prompt(false)
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
        // The prompt of the next turn: first prompt, reply, and more tokens.
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
        // The last token of a reply is never fed to the model, so it is not cached.
        assert_eq!(output.metrics.cached_tokens, 16, "{name}");
        // If the prompt ends differently, the cache is trimmed to the common prefix.
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
fn computed_prompts_stay_within_their_memory_limit() {
    let cached = |bytes: Option<u64>| {
        let options = LoadOptions::new().with_prompt_cache_bytes(bytes);
        let model = tiny_with("llama", &options);
        let run = || {
            let stream = model.generate(&ids(3, 20), &greedy(4)).unwrap();
            stream.collect_output().unwrap()
        };
        let (first, second) = (run(), run());
        assert_eq!(first.tokens, second.tokens);
        second.metrics.cached_tokens
    };
    assert_eq!(cached(None), 19);
    assert_eq!(cached(Some(1 << 30)), 19);
    // A single prompt needs more than a byte.
    assert_eq!(cached(Some(1)), 0);
    assert_eq!(cached(Some(0)), 0);
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
            let one_pass = reply(model.as_ref(), &prompt, &fresh(40).with_ignore_eos(true));
            assert_eq!(one_pass.len(), 40);
            for step in [1, 7, 30] {
                let options = fresh(40).with_ignore_eos(true).with_prefill_step_size(step);
                let got = reply(model.as_ref(), &prompt, &options);
                assert_eq!(got, one_pass, "{name}, bound {bound}, step {step}");
            }
        }
        // While the sequence fits into the bound, a bounded cache gives exact replies.
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
    // A bound below 16 keeps no initial tokens.
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
    // The prompt exceeds the cache's first chunk of 256 positions, so quantized caches must grow.
    let prompt = ids(8, 270);
    let logits = |model: &dyn TextModel| {
        let tokens = model.as_token_model().unwrap();
        tokens
            .logits(&prompt, true, &Interrupt::new())
            .unwrap()
            .logits
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
        // The prompt ends before position 5,000, where quantization starts. So the reply equals the
        // unquantized one.
        let (never, reply) = distance(&options.clone().with_quantized_kv_start(5000));
        assert_eq!(reply, expected, "{name}");
        assert!(never == 0.0, "{name}: {never}");
        assert!(
            0.0 < eight && eight < 0.02 && eight < four && four < 0.5,
            "{name}: {eight} {four}"
        );
    }
    // No group size divides these heads, so the error must name `kv_group_size`.
    let options = LoadOptions::new().with_kv_bits(8).with_backend("cpu");
    let error = inference::load_model(path_of("llama"), &options)
        .err()
        .unwrap();
    assert!(error.to_string().contains("kv_group_size"), "{error}");
}

#[test]
fn a_prompt_cache_on_disk_belongs_to_its_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prompt.safetensors");
    let Prompt::Tokens(start) = ids(9, 30) else {
        unreachable!()
    };
    let mut full_prompt = start.clone();
    full_prompt.extend([33, 34]);
    let full_prompt = Prompt::Tokens(full_prompt);
    for name in ["llama", "gemma3"] {
        let writer = tiny(name);
        let prompt_cache = writer.as_prompt_cache().unwrap();
        let n = prompt_cache
            .save_prompt_cache(&Prompt::Tokens(start.clone()), &path, &Interrupt::new())
            .unwrap();
        assert_eq!(n, start.len());
        let expected = reply(writer.as_ref(), &full_prompt, &fresh(10));
        let reader = tiny(name);
        let tokens = reader
            .as_prompt_cache()
            .unwrap()
            .load_prompt_cache(&path)
            .unwrap();
        assert_eq!(tokens, start);
        let output = reader
            .generate(&full_prompt, &greedy(10))
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
    // The thread that reads tokens cancels, so no further token may arrive.
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
    // Another thread cancels at any time, so at most the token in progress may still arrive.
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
