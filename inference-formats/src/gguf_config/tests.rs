//! Tests of converting metadata to a configuration and tokenizer parts: complete, missing and wrong
//! keys.

use super::*;
use crate::config::RopeScaling;
use crate::gguf::testing::Writer;

/// A llama file's metadata and embedding, without the keys in `left_out`.
fn file(architecture: &str, left_out: &[&str]) -> Writer {
    let mut w = Writer::default();
    if !left_out.contains(&"general.architecture") {
        w = w.str("general.architecture", architecture);
    }
    for (key, value) in [
        ("embedding_length", 64),
        ("block_count", 2),
        ("feed_forward_length", 128),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("context_length", 2048),
        ("rope.dimension_count", 16),
    ] {
        if !left_out.contains(&key) {
            w = w.u32(&format!("{architecture}.{key}"), value);
        }
    }
    for (key, value) in [
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("rope.freq_base", 1e5),
    ] {
        if !left_out.contains(&key) {
            w = w.f32(&format!("{architecture}.{key}"), value);
        }
    }
    w.tensor("token_embd.weight", &[64, 3], 1, &[0; 384])
}

fn tokenizer(w: Writer) -> Writer {
    w.str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "smollm")
        .strings("tokenizer.ggml.tokens", &["a", "b", "ab"])
        .strings("tokenizer.ggml.merges", &["a b"])
        .array(
            "tokenizer.ggml.token_type",
            5,
            3,
            &[1, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0],
        )
        .u32("tokenizer.ggml.eos_token_id", 2)
        .u32("tokenizer.ggml.eot_token_id", 1)
        .str("tokenizer.chat_template", "{{ messages }}")
        .str("tokenizer.chat_template.tool_use", "{{ tools }}")
        .raw("tokenizer.ggml.add_bos_token", 7, &[0])
}

fn read_config(w: &Writer) -> Result<ModelConfig> {
    let (_dir, path) = w.file();
    config(&Gguf::open(&path)?)
}

fn parts(w: &Writer) -> Result<GgufTokenizerParts> {
    let (_dir, path) = w.file();
    tokenizer_parts(&Gguf::open(&path)?)
}

#[test]
fn a_configuration_is_read() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        let c = read_config(&file(architecture, &[])).unwrap();
        assert_eq!(c.model_type.as_deref(), Some(architecture));
        assert_eq!(
            (c.hidden_size, c.num_hidden_layers, c.intermediate_size),
            (64, 2, 128)
        );
        assert_eq!((c.num_attention_heads, c.num_key_value_heads), (4, 2));
        assert_eq!((c.rms_norm_eps, c.rope.theta), (1e-5, 1e5));
        assert_eq!((c.vocab_size, c.max_position_embeddings), (3, Some(2048)));
        assert_eq!(
            (c.tie_word_embeddings, c.rope_traditional),
            (Some(true), false)
        );
    }
    let untied = file("llama", &[]).tensor("output.weight", &[64, 3], 1, &[0; 384]);
    assert_eq!(
        read_config(&untied).unwrap().tie_word_embeddings,
        Some(false)
    );
    // Some files repeat an equal value for each layer.
    let per_layer = file("llama", &["attention.head_count_kv"]).array(
        "llama.attention.head_count_kv",
        5,
        2,
        &[2, 0, 0, 0, 2, 0, 0, 0],
    );
    assert_eq!(read_config(&per_layer).unwrap().num_key_value_heads, 2);
    let absent = file(
        "llama",
        &[
            "attention.head_count_kv",
            "rope.freq_base",
            "context_length",
        ],
    );
    let c = read_config(&absent).unwrap();
    assert_eq!((c.num_key_value_heads, c.rope.theta), (4, 10_000.0));
    let linear = file("llama", &[])
        .str("llama.rope.scaling.type", "linear")
        .f32("llama.rope.scaling.factor", 2.0);
    assert_eq!(
        read_config(&linear).unwrap().rope.scaling,
        RopeScaling::Linear { factor: 2.0 }
    );
}

#[test]
fn olmo2_with_a_window_is_olmo3_and_exaone4_may_have_one() {
    let windows = |w: &Writer| -> Result<(String, Vec<bool>)> {
        let c = read_config(w)?;
        let slides: Vec<_> = (0..5).map(|i| c.window(i).is_some()).collect();
        Ok((c.model_type.clone().unwrap(), slides))
    };
    let plain = |architecture: &str| {
        file(architecture, &["block_count"]).u32(&format!("{architecture}.block_count"), 5)
    };
    for (architecture, without, with) in [
        ("olmo2", "olmo2", "olmo3"),
        ("exaone4", "exaone4", "exaone4"),
    ] {
        let (model_type, slides) = windows(&plain(architecture)).unwrap();
        assert_eq!((model_type.as_str(), slides), (without, vec![false; 5]));
        if architecture == "exaone4" {
            // Unless the layers are listed, transformers divides by this missing pattern and fails.
            let (_dir, path) = plain(architecture).file();
            let fields = fields(&Gguf::open(&path).unwrap()).unwrap();
            assert_eq!(fields["layer_types"], json!(vec!["full_attention"; 5]));
        }
        let key = format!("{architecture}.attention.sliding_window");
        let pattern = format!("{key}_pattern");
        let file = plain(architecture).u32(&key, 64);
        let bools: &[u8] = &[1, 0, 1, 1, 0, 1];
        for (w, expected) in [
            (file.clone(), [true, true, true, false, true]),
            (
                file.clone().u32(&pattern, 2),
                [true, false, true, false, true],
            ),
            (file.clone().u32(&pattern, 0), [true; 5]),
            (
                file.clone().array(&pattern, 7, 5, &bools[..5]),
                [true, false, true, true, false],
            ),
            (
                file.clone().array(&pattern, 7, 6, bools),
                [true, false, true, true, false],
            ),
        ] {
            let (model_type, slides) = windows(&w).unwrap();
            assert_eq!((model_type.as_str(), slides), (with, expected.to_vec()));
        }
        for w in [
            file.clone().array(&pattern, 7, 4, &bools[..4]),
            file.clone().str(&pattern, "LLLG"),
            file.clone().u32(&pattern, u32::MAX),
        ] {
            let error = windows(&w).unwrap_err();
            assert!(error.message().contains(&pattern), "{error}");
        }
    }
    // Scaling applies to full layers only. The file may have a separate base for sliding layers.
    let scaled = plain("olmo2")
        .u32("olmo2.attention.sliding_window", 64)
        .str("olmo2.rope.scaling.type", "yarn")
        .f32("olmo2.rope.scaling.factor", 8.0)
        .f32("olmo2.rope.scaling.yarn_beta_fast", 16.0)
        .f32("olmo2.rope.scaling.yarn_beta_slow", 2.0)
        .u32("olmo2.rope.scaling.original_context_length", 256);
    let c = read_config(&scaled).unwrap();
    assert_eq!(c.rope_of(0).scaling, RopeScaling::None);
    assert_eq!(c.rope_of(0).theta, 1e5);
    assert!(matches!(
        c.rope_of(3).scaling,
        RopeScaling::Yarn { beta_fast, beta_slow, .. } if (beta_fast, beta_slow) == (16.0, 2.0)
    ));
    let c = read_config(&scaled.f32("olmo2.rope.freq_base_swa", 2e4)).unwrap();
    assert_eq!((c.rope_of(0).theta, c.rope_of(3).theta), (2e4, 1e5));
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    for key in [
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
        "general.architecture",
    ] {
        let e = read_config(&file("llama", &[key])).unwrap_err();
        assert!(
            e.message().contains(key) && e.message().contains("missing"),
            "{e}"
        );
    }
    let u32s = [
        ("embedding_length", 0),
        ("embedding_length", u32::MAX),
        ("block_count", 0),
        ("block_count", u32::MAX),
        ("attention.head_count", 0),
        ("attention.head_count", u32::MAX),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 7),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 32),
        ("context_length", 0),
        ("expert_count", 8),
    ];
    for (key, value) in u32s {
        let w = file("llama", &[key]).u32(&format!("llama.{key}"), value);
        let e = read_config(&w).expect_err(key);
        assert!(e.path().is_some(), "{e}");
    }
    for (key, value) in [
        ("rope.freq_base", f32::NAN),
        ("attention.layer_norm_rms_epsilon", 0.0),
    ] {
        let w = file("llama", &[key]).f32(&format!("llama.{key}"), value);
        assert!(read_config(&w).unwrap_err().message().contains(key));
    }
    let differs = file("llama", &["attention.head_count"]).array(
        "llama.attention.head_count",
        4,
        2,
        &[4, 0, 0, 0, 2, 0, 0, 0],
    );
    assert_eq!(
        read_config(&differs).unwrap_err().kind(),
        ErrorKind::Unsupported
    );
    let text = file("llama", &["block_count"]).str("llama.block_count", "2");
    assert!(read_config(&text).unwrap_err().message().contains("string"));
    let e = read_config(&file("gemma9", &[])).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert!(e.message().contains("qwen3"));
    for scaling in ["dynamic", "longrope"] {
        let w = file("llama", &[]).str("llama.rope.scaling.type", scaling);
        assert_eq!(read_config(&w).unwrap_err().kind(), ErrorKind::Unsupported);
    }
    let e = read_config(&Writer::default().str("general.architecture", "llama")).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Invalid);
    let more = tokenizer(file("llama", &[])).u32("x", 0);
    assert!(read_config(&more).is_ok());
    let tokens = file("llama", &[]).strings("tokenizer.ggml.tokens", &["a", "b", "c", "d"]);
    assert!(
        read_config(&tokens)
            .unwrap_err()
            .message()
            .contains("4 tokens")
    );
}

#[test]
fn tokenizer_parts_are_read_and_fit_each_other() {
    let p = parts(&tokenizer(Writer::default())).unwrap();
    assert_eq!(
        (p.model.as_str(), p.pre.as_deref()),
        ("gpt2", Some("smollm"))
    );
    assert_eq!(
        (p.tokens.len(), p.merges.as_slice()),
        (3, &["a b".to_owned()][..])
    );
    assert_eq!(p.token_types, Some(vec![1, 3, 1]));
    assert_eq!(
        (p.bos_id, p.eos_id, p.extra_eos_ids),
        (None, Some(2), vec![1])
    );
    assert_eq!((p.add_bos, p.add_eos), (Some(false), None));
    assert_eq!(p.chat_template.as_deref(), Some("{{ messages }}"));
    assert_eq!(p.tool_use_template.as_deref(), Some("{{ tools }}"));

    let none = tokenizer(Writer::default()).u32("tokenizer.ggml.padding_token_id", u32::MAX);
    assert_eq!(parts(&none).unwrap().pad_id, None);
    let minus = tokenizer(Writer::default()).raw("tokenizer.ggml.padding_token_id", 5, &[255; 4]);
    assert_eq!(parts(&minus).unwrap().pad_id, None);
    for (w, why) in [
        (Writer::default(), "model is missing"),
        (
            Writer::default().str("tokenizer.ggml.model", "gpt2"),
            "tokens is missing",
        ),
        (
            tokenizer(Writer::default()).u32("tokenizer.ggml.bos_token_id", 3),
            "bos_token_id is 3",
        ),
        (
            tokenizer(Writer::default()).u32("tokenizer.ggml.eom_token_id", 9),
            "there are 3 tokens",
        ),
        (
            tokenizer(Writer::default()).array("tokenizer.ggml.scores", 6, 1, &[0; 4]),
            "scores has 1",
        ),
        (
            tokenizer(Writer::default()).str("tokenizer.ggml.scores", "x"),
            "string",
        ),
    ] {
        let e = parts(&w).unwrap_err();
        assert!(e.message().contains(why), "{e} does not say {why}");
    }
}

#[test]
fn names_translate() {
    let llama = GgufNames::new("llama");
    let t = |name| llama.tensor(name).unwrap_or_default();
    assert_eq!(t("model.embed_tokens.weight"), "token_embd.weight");
    assert_eq!(t("model.norm.weight"), "output_norm.weight");
    assert_eq!(t("lm_head.weight"), "output.weight");
    assert_eq!(
        t("model.layers.12.self_attn.q_proj.bias"),
        "blk.12.attn_q.bias"
    );
    assert_eq!(
        t("model.layers.0.self_attn.q_norm.weight"),
        "blk.0.attn_q_norm.weight"
    );
    assert_eq!(
        t("model.layers.0.mlp.down_proj.weight"),
        "blk.0.ffn_down.weight"
    );
    assert_eq!(t("rope_freqs.weight"), "rope_freqs.weight");
    for unknown in [
        "",
        "x",
        "model.layers.0",
        "model.layers.0.mlp.weight",
        "lm_head.scales",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ] {
        assert_eq!(llama.tensor(unknown), None);
    }
    let of = |family: &str, name: &str| GgufNames::new(family).tensor(name).unwrap_or_default();
    assert_eq!(
        of("gemma2", "model.layers.1.post_attention_layernorm.weight"),
        "blk.1.post_attention_norm.weight"
    );
    assert_eq!(
        of("gemma2", "model.layers.1.pre_feedforward_layernorm.weight"),
        "blk.1.ffn_norm.weight"
    );
    assert_eq!(
        of("phi3", "model.layers.0.mlp.gate_up_proj.weight"),
        "blk.0.ffn_up.weight"
    );
    assert_eq!(of("gpt2", "h.3.attn.c_attn.bias"), "blk.3.attn_qkv.bias");
    assert_eq!(
        of(
            "mixtral",
            "model.layers.0.block_sparse_moe.switch_mlp.up_proj.weight"
        ),
        "blk.0.ffn_up_exps.weight"
    );
}
