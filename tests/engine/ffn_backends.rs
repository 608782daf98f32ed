//! Tests feed-forward backends through `metal_backend::ffn`. The engine's own backends are compared
//! with their definitions; other backends are defined in this file.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{fixture, greedy, max_difference, order_bound, tiny, tiny_names};
use inference::{ErrorKind, Interrupt, LoadOptions, Precision, Prompt, Result, TextModel};
use metal_backend::ffn::{
    self, CachedFfn, DenseFfn, FfnBackend, FfnPart, FfnRouter, HighwayFfn, SparseFfn,
};
use mlx_rs_core::Array;

/// float32 options, because tests compare backends with the plain pass.
fn cpu() -> LoadOptions {
    LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact)
}

fn routed(name: &str, router: &FfnRouter) -> Result<Box<dyn TextModel>> {
    ffn::load_model(fixture("tiny").join(name), &cpu(), router)
}

fn uniform(name: &str, backend: impl FfnBackend + 'static) -> Result<Box<dyn TextModel>> {
    routed(name, &FfnRouter::uniform(Arc::new(backend)))
}

fn logits(model: &dyn TextModel, tokens: &[u32]) -> Vec<f32> {
    let prompt = Prompt::Tokens(tokens.to_vec());
    let tokens = model.as_token_model().unwrap();
    tokens
        .logits(&prompt, false, &Interrupt::new())
        .unwrap()
        .logits
}

/// The greatest difference, relative to the greatest absolute value.
fn relative(ours: &[f32], expected: &[f32]) -> f32 {
    let greatest = expected.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    max_difference(ours, expected) / greatest
}

#[test]
fn dense_everywhere_is_the_plain_pass() {
    if crate::alone::ran_elsewhere("ffn_backends::dense_everywhere_is_the_plain_pass") {
        return;
    }
    let tokens: Vec<u32> = (3..23).collect();
    let mut compared = 0;
    for name in tiny_names() {
        let model = match uniform(&name, DenseFfn) {
            Ok(model) => model,
            // Blocks of this model fuse the feed-forward part with other parts, so no backend can
            // replace it.
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}: {error}");
                continue;
            }
        };
        let plain = tiny(&name);
        let bound = match plain.info().quantization_bits {
            Some(_) => 2e-3,
            None => order_bound(1e-5),
        };
        let expected = logits(plain.as_ref(), &tokens);
        let difference = relative(&logits(model.as_ref(), &tokens), &expected);
        assert!(difference < bound, "{name}: {difference}");
        let routed = model.as_routed().unwrap();
        let prompt = Prompt::Tokens(tokens.clone());
        let trained = routed.routed_logits(&prompt, true, &Interrupt::new());
        assert!(
            relative(&trained.unwrap().logits, &expected) < 1e-6,
            "{name}"
        );
        compared += 1;
    }
    assert!(compared > 45, "{compared}");
}

#[test]
fn backends_are_what_plans_are() {
    let tokens: Vec<u32> = (5..25).collect();
    for name in ["llama", "gpt2", "gemma2", "olmo2", "cohere2"] {
        let plan = |plan: &str| {
            let options = cpu().with_feed_forward(plan.parse().unwrap());
            let model = inference::load_model(fixture("tiny").join(name), &options).unwrap();
            logits(model.as_ref(), &tokens)
        };
        let expected = logits(tiny(name).as_ref(), &tokens);
        let none = logits(uniform(name, HighwayFfn).unwrap().as_ref(), &tokens);
        assert_eq!(none, plan("attention-only"), "{name}");
        let few = logits(
            uniform(name, SparseFfn { top_k: 9 }).unwrap().as_ref(),
            &tokens,
        );
        assert_eq!(few, plan("sparse:9"), "{name}");
        assert!(relative(&few, &expected) > 1e-3, "{name}");
        // A router and a plan must not cover the same layers.
        let router = FfnRouter::new().with_layers(1, Some(1), Arc::new(HighwayFfn));
        let options = cpu().with_feed_forward("0=sparse:9".parse().unwrap());
        let both = ffn::load_model(fixture("tiny").join(name), &options, &router.unwrap());
        let both = logits(both.unwrap().as_ref(), &tokens);
        assert_eq!(both, plan("0=sparse:9,1=attention-only"), "{name}");
    }
}

#[test]
fn a_recorded_prompt_is_replayed_bit_for_bit() {
    let tokens: Vec<u32> = (3..23).collect();
    let prompt = Prompt::Tokens(tokens.clone());
    for name in ["llama", "gpt2", "llama-q4", "mixtral", "gemma4-small"] {
        let cached = Arc::new(CachedFfn::new());
        let model = routed(name, &FfnRouter::uniform(cached.clone())).unwrap();
        let layers = model.info().num_layers;
        let before = logits(model.as_ref(), &tokens);
        assert_eq!((cached.len(), cached.hits()), (0, 0), "{name}");
        let rows = cached.calibrate(model.as_ref(), &prompt).unwrap();
        // The last block computes only the last position, so it adds one row.
        assert_eq!(rows, (layers - 1) * tokens.len() + 1, "{name}");
        let misses = cached.misses();
        let replayed = logits(model.as_ref(), &tokens);
        assert_eq!(cached.misses(), misses, "{name}: a layer was computed");
        assert_eq!(cached.hits(), rows as u64, "{name}");
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same(&before, &replayed), "{name}");
        // For a prompt with a common beginning, the recorded rows are reused, and the others are
        // computed.
        let mut longer = tokens[..9].to_vec();
        longer.extend([40, 41, 42]);
        let ours = logits(model.as_ref(), &longer);
        let bound = match model.info().quantization_bits {
            Some(_) => 2e-3,
            None => order_bound(1e-5),
        };
        let expected = logits(tiny(name).as_ref(), &longer);
        assert!(relative(&ours, &expected) < bound, "{name}");
        assert!(cached.misses() > misses, "{name}");
        cached.clear();
        assert!(cached.is_empty());
    }
    let cached = CachedFfn::new();
    let other = uniform("llama", DenseFfn).unwrap();
    for model in [tiny("llama"), other] {
        let error = cached.calibrate(model.as_ref(), &prompt).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
}

/// A backend that multiplies the trained part's output by a number, and counts its calls.
#[derive(Debug)]
struct Times(f32, AtomicUsize);

impl FfnBackend for Times {
    fn name(&self) -> &str {
        "times"
    }

    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> mlx_rs_core::Result<Array> {
        self.1.fetch_add(1, Ordering::Relaxed);
        part.forward(x)?.multiply(&Array::scalar(self.0)?)
    }
}

#[test]
fn a_backend_of_the_program_computes_its_layers() {
    let tokens: Vec<u32> = (3..23).collect();
    let prompt = Prompt::Tokens(tokens.clone());
    let trace = |model: &dyn TextModel| {
        let inspector = model.as_attention_inspector().unwrap();
        let last = [tokens.len() - 1];
        let trace = inspector.trace_residuals(&prompt, &last, &Interrupt::new());
        trace.unwrap()
    };
    let twice = Arc::new(Times(2.0, AtomicUsize::new(0)));
    let router = FfnRouter::new()
        .with_layers(1, Some(1), twice.clone())
        .unwrap();
    let model = routed("llama", &router).unwrap();
    let (ours, dense_trace) = (trace(model.as_ref()), trace(tiny("llama").as_ref()));
    assert_eq!(twice.1.load(Ordering::Relaxed), 1);
    assert_eq!(ours.layers[0].residual, dense_trace.layers[0].residual);
    let doubled: Vec<f32> = dense_trace.layers[1]
        .feed_forward
        .iter()
        .map(|x| 2.0 * x)
        .collect();
    assert!(relative(&ours.layers[1].feed_forward, &doubled) < 1e-5);
    // This backend has no activations to inspect, and must return an error that says so.
    let inspector = model.as_attention_inspector().unwrap();
    let error = inspector.feed_forward_activations(&prompt, &[0], &Interrupt::new());
    assert!(format!("{:#}", error.unwrap_err()).contains("times shows no activations"));
    // A reply computed with a KV cache must equal whole passes.
    let output = model.generate(&prompt, &greedy(6).with_cache_prompt(false));
    let output = output.unwrap().collect_output().unwrap();
    let mut all = tokens.clone();
    for token in output.tokens {
        let one_pass = logits(model.as_ref(), &all);
        let best = one_pass.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
        assert!(best - one_pass[token as usize] < 1e-4);
        all.push(token);
    }
    // A prompt cache on disk is valid for one engine only, because a backend's name does not
    // determine what the backend computes.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("kept.safetensors");
    let cache = |model: &dyn TextModel, save: bool| {
        let cache = model.as_prompt_cache().unwrap();
        match save {
            true => cache
                .save_prompt_cache(&prompt, &file, &Interrupt::new())
                .map(drop),
            false => cache.load_prompt_cache(&file).map(drop),
        }
    };
    cache(model.as_ref(), true).unwrap();
    cache(model.as_ref(), false).unwrap();
    let again = routed("llama", &router).unwrap();
    assert!(cache(again.as_ref(), false).is_err());
    assert!(cache(tiny("llama").as_ref(), false).is_err());
}

/// A backend that returns an array of another shape than its input.
#[derive(Debug)]
struct Wrong;

impl FfnBackend for Wrong {
    fn name(&self) -> &str {
        "wrong"
    }

    fn forward(&self, _: &FfnPart<'_>, x: &Array) -> mlx_rs_core::Result<Array> {
        x.slice_axis(-1, 0, 1)
    }
}

#[test]
fn what_cannot_be_is_an_error() {
    let refused = |name: &str, router: &FfnRouter, options: &LoadOptions| {
        let model = ffn::load_model(fixture("tiny").join(name), options, router);
        model.map(drop).unwrap_err()
    };
    // Broadcasting would accept this shape and silently give a wrong result, so the engine must
    // check.
    let model = uniform("llama", Wrong).unwrap();
    let tokens = model.as_token_model().unwrap();
    let error = tokens
        .logits(&Prompt::Tokens(vec![1, 2]), false, &Interrupt::new())
        .unwrap_err();
    assert!(
        format!("{error:#}").contains("the backend wrong gave"),
        "{error:#}"
    );
    let beyond = FfnRouter::new()
        .with_layers(2, Some(3), Arc::new(DenseFfn))
        .unwrap();
    let error = refused("llama", &beyond, &cpu());
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(error.to_string().contains("the model has 3"), "{error}");
    let first = FfnRouter::new()
        .with_layers(0, Some(0), Arc::new(DenseFfn))
        .unwrap();
    let twice = cpu().with_feed_forward("sparse:3".parse().unwrap());
    let error = refused("llama", &first, &twice);
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(
        error.to_string().contains("leave one of them out"),
        "{error}"
    );
    let sparse = FfnRouter::uniform(Arc::new(SparseFfn { top_k: 3 }));
    let error = refused("mixtral", &sparse, &cpu());
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("several experts"), "{error}");
    let error = refused("llama", &first, &LoadOptions::new().with_backend("mlx_lm"));
    assert_eq!(error.kind(), ErrorKind::UnknownBackend);
    let split = cpu().with_split(inference::Split::Tensor);
    assert_eq!(
        refused("llama", &first, &split).kind(),
        ErrorKind::InvalidOption
    );
}
