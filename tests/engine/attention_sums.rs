//! Tests of the option for attention in double precision. It must reach every kind of attention
//! layer, change only roundings, and be refused where it would have no effect.
//! `metal-backend/src/nn/attention_tests.rs` compares values with numpy.

use inference::{
    AttentionSums, EmbedOptions, ErrorKind, Interrupt, LoadOptions, Precision, Prompt, TextModel,
};

use crate::common::{fixture, floats, golden, greedy, ids, max_difference};

fn load(name: &str, sums: AttentionSums) -> Box<dyn TextModel> {
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact)
        .with_attention_sums(sums);
    inference::load_model(fixture(name), &options).unwrap()
}

/// The models cover biases, sliding windows, caps on scores, sinks, head norms, gates, latent
/// attention, keys shared between layers, and recurrent layers.
#[test]
fn double_precision_changes_roundings_alone() {
    let mut far = Vec::new();
    for name in [
        "llama",
        "llama-tied-gqa",
        "llama-q4",
        "gpt2",
        "gemma2",
        "gemma3-text",
        "gpt-oss",
        "olmo2",
        "qwen3-next",
        "deepseek-v2",
        "gemma4-small",
        "falcon-h1",
        "ministral3",
        "cohere2",
    ] {
        let path = format!("tiny/{name}");
        let golden = golden(&fixture(&path));
        let [native, wide] = [AttentionSums::Native, AttentionSums::Float64];
        let [native, wide] = [native, wide].map(|sums| load(&path, sums));
        let mut changed = 0;
        for case in golden["prompts"].as_array().unwrap() {
            let prompt = Prompt::Tokens(ids(&case["tokens"]));
            let logits = |model: &dyn TextModel| {
                let model = model.as_token_model().unwrap();
                model
                    .logits(&prompt, false, &Interrupt::new())
                    .unwrap()
                    .logits
            };
            let (native, double) = (logits(native.as_ref()), logits(wide.as_ref()));
            let wanted = floats(&case["logits"]);
            let greatest = wanted.iter().fold(1.0f32, |most, v| most.max(v.abs()));
            // The bound is the bound of golden.rs. `apart` measures the effect of rounding in
            // float32.
            let off = max_difference(&double, &wanted) / greatest;
            let apart = max_difference(&native, &double) / greatest;
            // Unfused blocks round in another order, and multiplications with packed matrices round
            // their inputs. Gemma 4 magnifies both errors. With MLX_CPU_KERNELS=off the two results
            // differ by less than 1e-5.
            let bound = match name {
                "gemma4-small" => 2e-4,
                "llama-q4" => 1e-4,
                _ => 2e-5,
            };
            if off >= 1e-3 || apart >= bound {
                far.push(format!("{name}: {off} of the golden, {apart} of float32"));
            }
            changed += usize::from(apart > 0.0);
            let options = greedy(8);
            let stream = wide.generate(&prompt, &options).unwrap();
            let reply = stream.collect_output().unwrap().tokens;
            assert_eq!(reply, ids(&case["greedy"])[..8], "{name}");
        }
        assert!(changed > 0, "{name}: the option changes nothing");
    }
    assert!(far.is_empty(), "{far:?}");
}

#[test]
fn encoders_have_it_too() {
    let texts = ["The rivers, of water.", "A name of three."].map(Prompt::from);
    for name in ["bert", "modernbert", "nomic-bert", "jina-bert"] {
        let path = format!("encoders/{name}");
        let [native, wide] = [AttentionSums::Native, AttentionSums::Float64].map(|sums| {
            let model = load(&path, sums);
            let embedder = model.as_embedding_model().unwrap();
            let actual = embedder.embed(&texts, &EmbedOptions::new(), &Interrupt::new());
            actual.unwrap().concat()
        });
        let apart = max_difference(&native, &wide);
        assert!(apart > 0.0 && apart < 1e-5, "{name}: {apart}");
    }
}

#[test]
fn where_it_says_nothing_it_is_refused() {
    let wide = LoadOptions::new().with_attention_sums(AttentionSums::Float64);
    for name in ["xlstm", "mamba2"] {
        let options = wide.clone().with_backend("cpu");
        let error = inference::load_model(fixture("tiny").join(name), &options).err();
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.message().contains("attention_sums"), "{error}");
    }
    let packed = wide.with_kv_bits(4).with_backend("cpu");
    let error = inference::load_model(fixture("tiny/llama"), &packed).err();
    assert_eq!(error.unwrap().kind(), ErrorKind::InvalidOption);
}
