//! Mixtures of experts in GGUF files, for families with `DeepSeek`'s field names.

use serde_json::{Value, json};

use super::GgufHeader;
use crate::error::Result;
use crate::limits;

/// Values that readers assume if a file does not contain them.
pub(super) struct Usual {
    /// How scores become weights.
    pub scoring: &'static str,
    /// Whether the weights of the chosen experts are scaled to a sum of 1.
    pub normalized: bool,
}

/// Sigmoids, scaled to a sum of 1.
pub(super) const NORMALIZED_SIGMOIDS: Usual = Usual {
    scoring: "sigmoid",
    normalized: true,
};

/// Sigmoids.
pub(super) const SIGMOIDS: Usual = Usual {
    normalized: false,
    ..NORMALIZED_SIGMOIDS
};

/// A softmax. The weights of the chosen experts are then scaled to a sum of 1.
pub(super) const NORMALIZED_SOFTMAX: Usual = Usual {
    scoring: "softmax",
    ..NORMALIZED_SIGMOIDS
};

/// A softmax.
pub(super) const SOFTMAX: Usual = Usual {
    normalized: false,
    ..NORMALIZED_SOFTMAX
};

/// As [`read`], and whether attention has norms of heads.
///
/// # Errors
/// As [`read`].
pub(super) fn with_head_norms(header: &GgufHeader<'_>, usual: &Usual) -> Result<Value> {
    let mut fields = read(header, usual)?;
    fields["use_qk_norm"] = json!(header.has("attn_q_norm.weight"));
    Ok(fields)
}

/// Reads the fields of a mixture.
///
/// # Errors
/// When a key is missing or out of range, or the file has another scoring function.
pub(super) fn read(header: &GgufHeader<'_>, usual: &Usual) -> Result<Value> {
    let keys = &header.keys;
    let experts = header
        .experts()?
        .ok_or_else(|| keys.metadata.missing(&keys.key("expert_count")))?;
    let width = match keys.uint("expert_feed_forward_length", 1, limits::INTERMEDIATE)? {
        Some(width) => width,
        // Without dense blocks, the usual key has the width of an expert.
        None => keys.required("feed_forward_length", limits::INTERMEDIATE)?,
    };
    let (shared, shared_width) = shared(header)?;
    let groups = keys.uint("expert_group_count", 0, limits::EXPERTS)?;
    let used = keys.uint("expert_group_used_count", 0, limits::EXPERTS)?;
    let (groups, used) = match (groups, used) {
        (Some(groups), Some(used)) if groups > 1 => (groups, used),
        _ => (1, 1),
    };
    let normalized = keys.metadata.bool(&keys.key("expert_weights_norm"))?;
    Ok(json!({
        "n_routed_experts": experts,
        "num_experts_per_tok": keys.required("expert_used_count", limits::EXPERTS)?,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "moe_shared_expert_intermediate_size": shared_width,
        "first_k_dense_replace": keys.uint("leading_dense_block_count", 0, limits::LAYERS)?,
        "norm_topk_prob": normalized.unwrap_or(usual.normalized),
        "routed_scaling_factor": keys.positive("expert_weights_scale")?,
        "scoring_func": scoring(header)?.unwrap_or(usual.scoring),
        "n_group": groups,
        "topk_group": used,
    }))
}

/// The function that turns scores into weights; `None` if the file does not state it.
///
/// # Errors
/// When the file has another function than the known ones.
pub(super) fn scoring(header: &GgufHeader<'_>) -> Result<Option<&'static str>> {
    const NAME: &str = "expert_gating_func";
    let keys = &header.keys;
    Ok(match keys.uint(NAME, 0, usize::MAX)? {
        None | Some(0) => None,
        Some(1) => Some("softmax"),
        Some(2) => Some("sigmoid"),
        Some(4) => Some("sqrtsoftplus"),
        Some(other) => {
            let message = format!(
                "is {other}, which is not supported; supported are 1 (softmax), 2 (sigmoid) and 4 \
                 (root of softplus)"
            );
            return Err(keys.unsupported(NAME, message));
        }
    })
}

/// The number of shared experts and the width of each. The stored matrices have the width of all
/// shared experts together, which some files state wrongly.
fn shared(header: &GgufHeader<'_>) -> Result<(usize, Option<usize>)> {
    const NAME: &str = "expert_shared_count";
    let keys = &header.keys;
    let stated = keys.uint(NAME, 0, limits::EXPERTS)?.unwrap_or(0);
    let matrix = (0..header.layers).find_map(|layer| {
        let name = format!("blk.{layer}.ffn_up_shexp.weight");
        header.file.tensors().get(&name)?.shape.first().copied()
    });
    match matrix {
        None => Ok((0, None)),
        Some(rows) if rows.is_multiple_of(stated.max(1)) => {
            Ok((stated.max(1), Some(rows / stated.max(1))))
        }
        Some(rows) => {
            let message =
                format!("is {stated}, which does not divide the {rows} rows of the shared experts");
            Err(keys.wrong(NAME, message))
        }
    }
}

/// Names in blocks with shared experts.
macro_rules! names {
    ($($more:expr),* $(,)?) => {
        &[
            ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
            ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
            $($more),*
        ]
    };
}

/// The bias that changes the choice of experts and not their weights.
pub(super) const CHOICE_BIAS: super::Names =
    &[("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")];

pub(super) use names;
