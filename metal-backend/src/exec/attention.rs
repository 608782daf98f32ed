//! Describes attention layers for our kernels. `nn/attention.rs` computes attention with MLX.

use std::sync::Arc;

use inference::AttentionSums;
use mlx_rs_core::{Array, cpu};

use super::matrix::NormSpec;

/// The kernels' types for attention layers, views of caches, and buffers. Other modules import
/// these types from here.
pub use mlx_rs_core::cpu::{
    Heads, KvBuffer, KvPacking, KvType, KvView as PlainView, Locality, Rotation, TokenRange,
    join_kv, pack_kv, unpack_kv,
};

/// The properties of an attention layer.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpec<'a> {
    /// Query heads.
    pub n_heads: i32,
    /// Key and value heads; this number divides `n_heads`.
    pub n_kv_heads: i32,
    /// Elements per head.
    pub head_dim: i32,
    /// Factor on the scores.
    pub scale: f32,
    /// Cap on scores: `cap * tanh(score / cap)` keeps scores within `-cap..cap`.
    pub softcap: Option<f32>,
    /// The norm of queries, before rotation.
    pub q_norm: NormSpec<'a>,
    /// The norm of keys, before rotation.
    pub k_norm: NormSpec<'a>,
    /// The norm of values.
    pub v_norm: NormSpec<'a>,
    /// Whether a norm covers all heads together instead of each head.
    pub across_heads: bool,
    /// Whether queries and keys are normalized after the rotation.
    pub after_rotation: bool,
    /// Rotary positions.
    pub rotary: RotarySpec<'a>,
    /// Attention sinks `[n_heads]`: a score per head that enters the softmax's denominator and adds
    /// no value.
    pub sinks: Option<&'a Array>,
    /// The type of scores, softmax and sums over values.
    pub sums: AttentionSums,
    /// Whether the result needs gradients.
    pub differentiated: bool,
}

/// The rotation of queries and keys.
#[derive(Debug, Clone, Copy)]
pub enum RotarySpec<'a> {
    /// There is no rotation.
    None,
    /// The rotation does not depend on the number of positions.
    Fixed {
        /// The rotation angle of each pair at position 1, in radians.
        radians: &'a Arc<[f32]>,
        /// Whether adjacent elements form pairs, instead of elements of the two halves.
        traditional: bool,
        /// A factor on the rotated elements.
        amplitude: f32,
    },
    /// The rotation changes with the length of the sequence.
    Changing,
}

impl AttentionSpec<'_> {
    /// Returns the layer in the kernels' form; `None` if the kernels do not support the layer.
    pub fn heads(&self) -> Option<Heads> {
        let across = self.across_heads && !matches!(self.q_norm, NormSpec::None);
        let across = across || self.after_rotation;
        if self.sums != AttentionSums::Native
            || self.differentiated
            || across
            || !matches!(self.v_norm, NormSpec::None)
        {
            return None;
        }
        let norm = |norm: NormSpec<'_>| {
            let head_norm = |(weight, eps): (&Array, f32)| cpu::HeadNorm {
                weight: weight.clone(),
                eps,
            };
            norm.kernel().map(|norm| norm.map(head_norm))
        };
        Some(Heads {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            scale: self.scale,
            softcap: self.softcap,
            q_norm: norm(self.q_norm)?,
            k_norm: norm(self.k_norm)?,
            rotation: match self.rotary {
                RotarySpec::None => None,
                RotarySpec::Fixed {
                    radians,
                    traditional,
                    amplitude,
                } => Some(Rotation {
                    radians: Arc::clone(radians),
                    traditional,
                    amplitude,
                }),
                RotarySpec::Changing => return None,
            },
            sinks: self.sinks.cloned(),
        })
    }
}
