//! Builds the attention layer that most families use.

use inference::{Error, ErrorKind, Result};

use super::build::{Builder, invalid};
use crate::nn::{Attention, HeadNorms, Linear, Rope};

/// The variations of an attention layer with the usual tensor names.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionParts {
    /// Biases on queries, keys and values.
    pub qkv_bias: bool,
    /// A bias on the output.
    pub o_bias: bool,
    /// One matrix, `qkv_proj`, computes queries, keys and values.
    pub fused: bool,
    /// In the fused matrix, the query heads of a group come first, then their key head and value
    /// head.
    pub grouped: bool,
    /// The rotary embedding pairs adjacent elements, instead of elements from the two halves of a
    /// head.
    pub traditional: bool,
    /// No rotary embedding.
    pub no_rope: bool,
    /// The output projection is named `out_proj` instead of `o_proj`.
    pub out_proj: bool,
    /// The query projection also computes gates of the same width.
    pub gated: bool,
}

impl Builder<'_> {
    /// Returns whether a GGUF file has one matrix for queries, keys and values (`attn_qkv`),
    /// although directories of the family have three.
    fn fuses_qkv(&self, name: &str, parts: AttentionParts) -> Result<bool> {
        let fuses = self.weights.is_gguf() && self.weights.contains(&format!("{name}.weight"));
        let family = self.config.family().and_then(|family| family.gguf.as_ref());
        // The order of rows in such a matrix is unknown.
        if fuses && !parts.grouped && (parts.gated || family.is_some_and(|gguf| gguf.permuted)) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "attn_qkv: files of this architecture need attn_q, attn_k and attn_v",
            ));
        }
        Ok(fuses)
    }

    /// Builds the attention of layer `layer` at this prefix, with the usual tensor names.
    pub fn attention(
        &mut self,
        layer: usize,
        prefix: &str,
        parts: AttentionParts,
    ) -> Result<Attention> {
        let dims = self.dims;
        let (q_dim, kv_dim) = (
            dims.n_heads * dims.head_dim,
            dims.n_kv_heads * dims.head_dim,
        );
        let name = |part: &str| format!("{prefix}.{part}");
        let gates = if parts.gated { 2 } else { 1 };
        let fused = parts.fused || self.fuses_qkv(&name("qkv_proj"), parts)?;
        let [q_proj, k_proj, v_proj] = if parts.grouped {
            self.grouped_qkv(&name("qkv_proj"), parts.qkv_bias)?
        } else if fused {
            let fused = self.fused(
                &name("qkv_proj"),
                dims.hidden,
                &[q_dim, kv_dim, kv_dim],
                parts.qkv_bias,
            )?;
            <[Linear; 3]>::try_from(fused)
                .map_err(|_| invalid("a fused matrix must have three parts"))?
        } else {
            let bias = parts.qkv_bias;
            [
                self.linear(&name("q_proj"), dims.hidden, q_dim * gates, bias)?,
                self.linear(&name("k_proj"), dims.hidden, kv_dim, bias)?,
                self.linear(&name("v_proj"), dims.hidden, kv_dim, bias)?,
            ]
        };
        let rope = if parts.no_rope {
            None
        } else {
            Some(self.rope(layer, dims.head_dim, parts.traditional)?)
        };
        let output = if parts.out_proj { "out_proj" } else { "o_proj" };
        // Old checkpoints store the inverse frequencies. The tensor is ignored, because the
        // configuration determines them.
        self.weights.ignore(&name("rotary_emb.inv_freq"));
        let o_proj = self.linear(&name(output), q_dim, dims.hidden, parts.o_bias)?;
        Ok(Attention {
            n_kv_heads: dims.n_kv_heads,
            window: self.window(layer)?,
            ..self.plain_attention([q_proj, k_proj, v_proj], o_proj, rope)
        })
    }

    /// Returns an attention layer without a window and without norms, in which each query head has
    /// a separate key head. Families overwrite the fields that differ.
    pub fn plain_attention(
        &self,
        [q_proj, k_proj, v_proj]: [Linear; 3],
        o_proj: Linear,
        rope: Option<Rope>,
    ) -> Attention {
        let dims = self.dims;
        Attention {
            q_proj,
            k_proj: Some(k_proj),
            v_proj: Some(v_proj),
            o_proj,
            norms: HeadNorms::default(),
            rope,
            n_heads: dims.n_heads,
            n_kv_heads: dims.n_heads,
            head_dim: dims.head_dim,
            scale: (dims.head_dim as f32).powf(-0.5),
            window: None,
            softcap: None,
            growth: None,
            clip: None,
            chunk: None,
            sinks: None,
            sums: self.weights.attention_sums(),
        }
    }

    /// Loads the norms that are applied to query and key heads before rotation: `q_norm` and
    /// `k_norm` below `prefix`.
    pub fn head_norms(&mut self, prefix: &str) -> Result<HeadNorms> {
        let dim = self.dims.head_dim;
        Ok(HeadNorms {
            q: Some(self.norm(&format!("{prefix}.q_norm"), dim)?),
            k: Some(self.norm(&format!("{prefix}.k_norm"), dim)?),
            ..HeadNorms::default()
        })
    }
}
