use std::collections::BTreeSet;

use super::*;

#[test]
fn each_model_type_has_one_entry() {
    assert!(FAMILIES.is_sorted_by(|a, b| a.model_type < b.model_type));
    let all: Vec<_> = FAMILIES.iter().flat_map(|f| f.model_types()).collect();
    let distinct: BTreeSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), all.len());
    for family in FAMILIES {
        assert!(!family.class.is_empty());
        let Defaults {
            norm_eps,
            rope_theta,
            ..
        } = family.defaults;
        assert!(norm_eps > 0.0 && norm_eps < 1e-3, "{}", family.model_type);
        assert!(rope_theta >= 1e4, "{}", family.model_type);
    }
}

#[test]
fn each_architecture_of_gguf_has_one_family_to_begin_with() {
    let all = FAMILIES.iter().filter_map(|f| f.gguf.as_ref());
    for architecture in all.map(|g| g.architecture) {
        let entries = FAMILIES.iter().filter_map(|f| f.gguf.as_ref());
        let bases = entries.filter(|g| g.architecture == architecture && !g.is_variant);
        assert_eq!(bases.count(), 1, "{architecture}");
    }
}

#[test]
fn only_matrices_of_the_reference_are_transposed() {
    let gpt2 = &gpt2::FAMILY;
    let names = |name: &str| (gpt2.converted_name(name), gpt2.is_transposed(name));
    for (name, expected, transposed) in [
        (
            "transformer.h.0.mlp.c_fc.weight",
            Some("model.h.0.mlp.c_fc.weight"),
            true,
        ),
        (
            "h.0.attn.c_proj.weight",
            Some("model.h.0.attn.c_proj.weight"),
            true,
        ),
        (
            "model.h.0.attn.c_proj.weight",
            Some("model.h.0.attn.c_proj.weight"),
            false,
        ),
        ("wte.weight", Some("model.wte.weight"), false),
        ("h.1.attn.bias", None, false),
    ] {
        assert_eq!(
            names(name),
            (expected.map(str::to_owned), transposed),
            "{name}"
        );
    }
    let llama = &llama::FAMILY;
    let name = "model.layers.0.mlp.up_proj.weight";
    assert_eq!(llama.converted_name(name).as_deref(), Some(name));
    assert!(!llama.is_transposed(name));
}

#[test]
fn a_bert_with_alibi_is_another_family() {
    for (kind, family) in [
        (Some("alibi"), &jina_bert::FAMILY),
        (Some("absolute"), &bert::FAMILY),
        // The engine refuses other positions by their name.
        (Some("relative_key"), &bert::FAMILY),
        (None, &bert::FAMILY),
    ] {
        let mut fields = serde_json::json!({
            "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60,
        });
        if let Some(kind) = kind {
            fields["position_embedding_type"] = kind.into();
        }
        let Value::Object(fields) = fields else {
            unreachable!()
        };
        let config = crate::config::ModelConfig::from_map(fields).unwrap();
        let read = config.family().unwrap();
        assert_eq!(read.model_type, family.model_type, "{kind:?}");
        assert!(read.encoder);
    }
}
