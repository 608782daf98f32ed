//! Jamba.

use serde_json::{Map, Value, json};

use super::gguf::GgufChange;
use super::{
    Defaults, Family, GgufFamily, GgufHeader, Recurrence, Windows, fill, list_layers,
    list_mixtures, mamba,
};
use crate::error::Result;
use crate::limits;

/// The descriptor of this family.
pub static FAMILY: Family = Family {
    complete,
    recurrence: Recurrence::Listed,
    names: &[
        (".feed_forward.", ".mlp."),
        (".pre_ff_layernorm.", ".post_attention_layernorm."),
        ("model.final_layernorm.", "model.norm."),
    ],
    gguf: Some(GgufFamily {
        layers_differ: true,
        read,
        write,
        changes: &[
            // GGUF files store the rate. Directories store `ln(-rate)`.
            (
                ".mamba.rates",
                GgufChange::NegatedExponentials(".mamba.A_log"),
            ),
            (".mamba.conv1d.weight", GgufChange::Convolution),
        ],
        overrides: mamba::names!(
            "mamba",
            ("ssm_dt_norm", "mamba.dt_layernorm"),
            ("ssm_b_norm", "mamba.b_layernorm"),
            ("ssm_c_norm", "mamba.c_layernorm"),
            ("ffn_gate_inp", "mlp.router"),
        ),
        unsuffixed: mamba::vectors!("mamba"),
        ..GgufFamily::new("jamba")
    }),
    tensor_parallel: super::TensorParallel::Heads,
    ..Family::new(
        "jamba",
        "JambaForCausalLM",
        Defaults {
            norm_eps: 1e-6,
            rope_theta: 10_000.0,
            windows: Windows::Never,
        },
    )
};

/// Fills in missing fields, and lists which layers have attention and which have experts. Periods
/// and offsets in the file determine these layers.
fn complete(map: &mut Map<String, Value>) {
    fill(
        map,
        json!({"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2,
            "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
            "tie_word_embeddings": false}),
    );
    mamba::rank(map, "mamba_dt_rank");
    let number = |map: &Map<String, Value>, name: &str, otherwise: u64| {
        let value = map.get(name).and_then(Value::as_u64);
        usize::try_from(value.unwrap_or(otherwise)).unwrap_or(usize::MAX)
    };
    let (period, offset) = (
        number(map, "attn_layer_period", 8).max(1),
        number(map, "attn_layer_offset", 4),
    );
    list_layers(map, |layer| match layer % period == offset {
        true => "attention",
        false => "mamba",
    });
    let (experts, period, offset) = (
        number(map, "num_experts", 16),
        number(map, "expert_layer_period", 2).max(1),
        number(map, "expert_layer_offset", 1),
    );
    list_mixtures(map, |layer| experts > 1 && layer % period == offset);
}

/// Reads the fields of a GGUF file. A layer with key heads is an attention layer.
fn read(header: &GgufHeader<'_>) -> Result<Value> {
    let keys = &header.keys;
    let heads = header.by_layer("attention.head_count_kv", (0, limits::HEADS))?;
    let heads = heads.unwrap_or_else(|| vec![header.heads; header.layers]);
    let kind = |n: &usize| match n {
        0 => "mamba",
        _ => "attention",
    };
    let inner = keys.required("ssm.inner_size", limits::INTERMEDIATE)?;
    if !inner.is_multiple_of(header.hidden) {
        let message = format!("is {inner}; it must be a multiple of {}", header.hidden);
        return Err(keys.wrong("ssm.inner_size", message));
    }
    let experts = header.experts()?.unwrap_or(1);
    Ok(json!({
        "layer_types": heads.iter().map(kind).collect::<Vec<_>>(),
        "mlp_layer_types": header.mixtures(),
        "num_experts": experts,
        "num_experts_per_tok": keys.uint("expert_used_count", 1, experts)?,
        "mamba_d_state": keys.required("ssm.state_size", limits::HEAD_DIM)?,
        "mamba_dt_rank": keys.required("ssm.time_step_rank", limits::HIDDEN)?,
        "mamba_d_conv": keys.required("ssm.conv_kernel", limits::HIDDEN)?,
        "mamba_expand": inner / header.hidden,
        "mamba_proj_bias": header.has("ssm_in.bias"),
        "mamba_conv_bias": header.has("ssm_conv1d.bias"),
    }))
}

/// Replaces lists of layers by the fields of transformers, in which attention and experts have a
/// period. transformers does not accept such lists.
fn write(map: &mut Map<String, Value>) {
    for (list, kind, names) in [
        (
            "layer_types",
            "attention",
            ["attn_layer_period", "attn_layer_offset"],
        ),
        (
            "mlp_layer_types",
            "sparse",
            ["expert_layer_period", "expert_layer_offset"],
        ),
    ] {
        let kinds = map.get(list).and_then(Value::as_array);
        if let Some(found) = kinds.and_then(|kinds| period(kinds, kind)) {
            map.remove(list);
            for (name, number) in names.into_iter().zip(found) {
                map.insert(name.to_owned(), json!(number));
            }
        }
    }
}

/// The period and the offset of the layers of a kind; `None` if there are none, or if they have no
/// period. If only one layer is of this kind, the period is the number of layers.
fn period(kinds: &[Value], kind: &str) -> Option<[usize; 2]> {
    let is_kind = |layer: usize| kinds.get(layer).is_some_and(|other| other == kind);
    let mut places = (0..kinds.len()).filter(|layer| is_kind(*layer));
    let offset = places.next()?;
    let period = places.next().map_or(kinds.len(), |next| next - offset);
    let fits = (0..kinds.len()).all(|layer| is_kind(layer) == (layer % period == offset));
    fits.then_some([period, offset])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_at_equal_distances_have_a_period() {
        let of = |kinds: &str| {
            let kinds: Vec<Value> = kinds.chars().map(|kind| json!(kind.to_string())).collect();
            period(&kinds, "a")
        };
        assert_eq!(of("mmam"), Some([4, 2]));
        assert_eq!(of("mamama"), Some([2, 1]));
        assert_eq!(of("mmammamma"), Some([3, 2]));
        assert_eq!(of("aaa"), Some([1, 0]));
        assert_eq!(of("mmm"), None);
        assert_eq!(of("mmama"), None);
        assert_eq!(of("mamma"), Some([3, 1]));
    }
}
