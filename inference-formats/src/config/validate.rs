//! Checks that the numbers of a configuration are possible, and limits the size of a model.

use std::ops::RangeInclusive;

use crate::error::{Error, ErrorKind, Result};

use super::quant_format::fits;
use super::{ModelConfig, RopeScaling, limits};

/// The maximum number of bytes of weights. A configuration with more is assumed to be a mistake.
const MAX_WEIGHT_BYTES: u64 = 1 << 44;

fn fault(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn within(field: &str, value: usize, range: RangeInclusive<usize>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(fault(format!(
        "{field} is {value}; it must be from {} to {}",
        range.start(),
        range.end()
    )))
}

fn positive(field: &str, value: f32) -> Result<()> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(fault(format!(
        "{field} is {value}; it must be a finite number above 0"
    )))
}

impl ModelConfig {
    /// Checks ranges, divisibility, and the resulting model size. Configurations that were read
    /// from files have passed this check. After changing a configuration, call it again.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`]; the message names field, value and allowed values.
    pub fn validate(&self) -> Result<()> {
        within("hidden_size", self.hidden_size, 1..=limits::HIDDEN)?;
        within(
            "num_hidden_layers",
            self.num_hidden_layers,
            1..=limits::LAYERS,
        )?;
        within(
            "intermediate_size",
            self.intermediate_size,
            1..=limits::INTERMEDIATE,
        )?;
        within(
            "num_attention_heads",
            self.num_attention_heads,
            1..=limits::HEADS,
        )?;
        within(
            "num_key_value_heads",
            self.num_key_value_heads,
            1..=limits::HEADS,
        )?;
        within("vocab_size", self.vocab_size, 1..=limits::VOCAB)?;
        if !self
            .num_attention_heads
            .is_multiple_of(self.num_key_value_heads)
        {
            return Err(fault(format!(
                "num_key_value_heads is {}; it must divide num_attention_heads, which is {}",
                self.num_key_value_heads, self.num_attention_heads
            )));
        }
        match self.head_dim {
            Some(dim) => check_head_dim(dim)?,
            None if self.hidden_size / self.num_attention_heads < 2 => {
                return Err(fault(format!(
                    "num_attention_heads is {}; without head_dim it must be at most half of \
                     hidden_size, which is {}",
                    self.num_attention_heads, self.hidden_size
                )));
            }
            None => {}
        }
        for (field, value) in [
            ("max_position_embeddings", self.max_position_embeddings),
            ("sliding_window", self.sliding_window),
        ] {
            value.map_or(Ok(()), |n| within(field, n, 1..=limits::POSITIONS))?;
        }
        positive("rms_norm_eps", self.rms_norm_eps)?;
        if self.rms_norm_eps > 1.0 {
            return Err(fault(format!(
                "rms_norm_eps is {}; it must be at most 1",
                self.rms_norm_eps
            )));
        }
        for rope in [Some(&self.rope), self.rope_sliding.as_ref()]
            .into_iter()
            .flatten()
        {
            positive("rope_theta", rope.theta)?;
            positive("partial_rotary_factor", rope.partial)?;
            check_scaling(&rope.scaling)?;
        }
        self.check_quantization()?;
        match self.estimated_weight_bytes() {
            Some(bytes) if bytes <= MAX_WEIGHT_BYTES => Ok(()),
            bytes => Err(fault(format!(
                "the numbers make a model of {} bytes; at most {MAX_WEIGHT_BYTES} are accepted: \
                 hidden_size {}, num_hidden_layers {}, intermediate_size {}, vocab_size {}",
                bytes.map_or_else(|| String::from("uncountably many"), |b| b.to_string()),
                self.hidden_size,
                self.num_hidden_layers,
                self.intermediate_size,
                self.vocab_size
            ))),
        }
    }

    fn check_quantization(&self) -> Result<()> {
        let mut all = self
            .quantization
            .iter()
            .chain(self.quantization_overrides.values().flatten());
        all.try_for_each(fits).map_err(fault)
    }

    /// A rough size of the weights in bytes, with two bytes per weight. For quantized matrices,
    /// scales and biases are included. `None` if the number overflows. [`crate::footprint`] counts
    /// exactly, from the tensors.
    pub fn estimated_weight_bytes(&self) -> Option<u64> {
        let (matrices, other) = self.counts()?;
        let element = 2u64;
        let matrix_bytes = match &self.quantization {
            None => matrices.checked_mul(element)?,
            Some(q) => {
                let groups = matrices / u64::from(q.group_size.unsigned_abs()).max(1);
                let packed = matrices.checked_mul(u64::from(q.bits.unsigned_abs()))? / 8;
                packed.checked_add(groups.checked_mul(2)?.checked_mul(element)?)?
            }
        };
        matrix_bytes.checked_add(other.checked_mul(element)?)
    }

    /// Number of matrix elements, and number of all other elements.
    fn counts(&self) -> Option<(u64, u64)> {
        let n = |v: usize| v as u64;
        let (hidden, inter, layers) = (
            n(self.hidden_size),
            n(self.intermediate_size),
            n(self.num_hidden_layers),
        );
        let (heads, kv_heads) = (n(self.num_attention_heads), n(self.num_key_value_heads));
        let head_dim = match self.head_dim {
            Some(dim) => n(dim),
            None => hidden.checked_div(heads)?,
        };
        let (q, kv) = (
            heads.checked_mul(head_dim)?,
            kv_heads.checked_mul(head_dim)?,
        );
        // q, o: [hidden, q] each; k, v: [hidden, kv] each; gate, up, down: [hidden, inter] each.
        let attention = hidden.checked_mul(q.checked_add(kv)?.checked_mul(2)?)?;
        // A mixture has a feed-forward block per expert. Its width may be in a separate field.
        let width = self
            .fields
            .get("moe_intermediate_size")
            .and_then(serde_json::Value::as_u64)
            .filter(|_| self.num_experts > 0)
            .unwrap_or(inter);
        let mlp = hidden
            .checked_mul(width)?
            .checked_mul(3)?
            .checked_mul(n(self.num_experts.max(1)))?;
        let blocks = layers.checked_mul(attention.checked_add(mlp)?)?;
        let embeddings = if self.tie_word_embeddings == Some(true) {
            1
        } else {
            2
        };
        let embedding = n(self.vocab_size)
            .checked_mul(hidden)?
            .checked_mul(embeddings)?;
        let norms = hidden.checked_mul(layers.checked_mul(2)?.checked_add(1)?)?;
        Some((blocks.checked_add(embedding)?, norms))
    }
}

fn check_scaling(scaling: &RopeScaling) -> Result<()> {
    match scaling {
        RopeScaling::None => Ok(()),
        RopeScaling::Linear { factor }
        | RopeScaling::Dynamic { factor, .. }
        | RopeScaling::Proportional { factor } => positive("rope_scaling.factor", *factor),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            positive("rope_scaling.factor", *factor)?;
            positive("rope_scaling.low_freq_factor", *low_freq_factor)?;
            positive("rope_scaling.high_freq_factor", *high_freq_factor)?;
            positive(
                "rope_scaling.original_max_position_embeddings",
                *original_context,
            )
        }
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
            ..
        } => {
            positive("rope_scaling.factor", *factor)?;
            positive("rope_scaling.beta_fast", *beta_fast)?;
            positive("rope_scaling.beta_slow", *beta_slow)?;
            positive("rope_scaling.attention_factor", *attention_factor)?;
            positive(
                "rope_scaling.original_max_position_embeddings",
                *original_context,
            )
        }
        RopeScaling::LongRope {
            attention_factor, ..
        } => positive("rope_scaling.attention_factor", *attention_factor),
    }
}

/// The rotation operates on pairs of elements, so the width must be even.
fn check_head_dim(dim: usize) -> Result<()> {
    within("head_dim", dim, 2..=limits::HEAD_DIM)?;
    if !dim.is_multiple_of(2) {
        return Err(fault(format!("head_dim is {dim}; it must be even")));
    }
    Ok(())
}
