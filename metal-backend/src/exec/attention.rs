//! Which attention layers our kernels have. How MLX computes them is in `nn/attention.rs`.

use std::sync::Arc;

use inference::AttentionSums;
use mlx_rs_core::{Array, cpu};

use super::matrix::NormSpec;

/// An attention layer as the kernels take it, and what they read and write of caches. Other rooms
/// hand these on.
pub use mlx_rs_core::cpu::{Heads, KvBuffer, KvView as PlainView, Rotation, TokenRange};

/// What an attention layer is.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpec<'a> {
    /// Query heads.
    pub n_heads: i32,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: i32,
    /// Elements per head.
    pub head_dim: i32,
    /// Factor on the scores.
    pub scale: f32,
    /// Scores are squeezed into `-cap..cap` by a tanh.
    pub softcap: Option<f32>,
    /// Of queries, before rotation.
    pub q_norm: NormSpec<'a>,
    /// Of keys, before rotation.
    pub k_norm: NormSpec<'a>,
    /// Of values.
    pub v_norm: NormSpec<'a>,
    /// Whether norms are over all heads together instead of each.
    pub across_heads: bool,
    /// Whether the norms of queries and keys stand after rotation.
    pub after_rotation: bool,
    /// Rotary positions.
    pub rotary: RotarySpec<'a>,
    /// A score for each head that takes its share and adds nothing, `[n_heads]`.
    pub sinks: Option<&'a Array>,
    /// The type in which the layer computes.
    pub sums: AttentionSums,
    /// Whether the result must have derivatives.
    pub differentiated: bool,
}

/// How queries and keys are rotated.
#[derive(Debug, Clone, Copy)]
pub enum RotarySpec<'a> {
    /// Not at all.
    None,
    /// In one way, whatever the number of positions.
    Fixed {
        /// The angle of each pair at position 1.
        radians: &'a Arc<[f32]>,
        /// Neighbors rotate rather than halves.
        traditional: bool,
        /// Factor on what rotates.
        amplitude: f32,
    },
    /// In a way that changes with the number of positions.
    Changing,
}

impl AttentionSpec<'_> {
    /// The layer for the kernels; `None` where they do not have all of it.
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
