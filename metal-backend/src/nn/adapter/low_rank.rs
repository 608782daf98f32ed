//! The low-rank term of an adapter at one slot.

use std::collections::BTreeMap;
use std::sync::Arc;

use mlx_rs_core::{Array, Result};
use parking_lot::Mutex;

use super::SlotKind;
use crate::exec::{Matrix, Weight};

/// A low-rank term, added to the matrix product of a layer: `x W^T + scale * (x A^T) B^T` (Hu et
/// al. 2021). For experts, A and B have an additional leading axis.
#[derive(Debug, Clone)]
pub struct LowRank {
    /// A, `[rank, in]`.
    pub a: Array,
    /// B, `[out, rank]`.
    pub b: Array,
    /// The lengths `[out]` to which the rows of the sum are scaled (DoRA, Liu et al. 2024); `None`
    /// for LoRA.
    pub m: Option<Array>,
    /// Factor on the product of A and B.
    pub scale: f32,
    /// Dropout probability for the inputs of A during training.
    pub dropout: f32,
    /// A and B prepared for the CPU kernels.
    pub prepared: PreparedPair,
}

type PairsByRows = BTreeMap<Option<(i32, i32)>, (Matrix, Matrix)>;

/// A and B of a low-rank term as matrices of the CPU kernels, created by the first product. The
/// result of a product with them does not depend on the other rows of the pass. The keys are the
/// rows of B that a layer uses.
#[derive(Debug, Clone, Default)]
pub struct PreparedPair(Arc<Mutex<PairsByRows>>);

impl PreparedPair {
    /// Computes `(x A^T) B^T` with the kernels, for B `[out, rank]` with these rows.
    pub(super) fn product(
        &self,
        x: &Array,
        a: &Array,
        b: &Array,
        rows: Option<(i32, i32)>,
    ) -> Result<Array> {
        let known = self.0.lock().get(&rows).cloned();
        let (a, b) = match known {
            Some(pair) => pair,
            None => {
                let of = |m: &Array| Matrix::new(Weight::Dense(m.clone()), true);
                let pair = (of(a)?, of(b)?);
                self.0.lock().insert(rows, pair.clone());
                pair
            }
        };
        b.product(&a.product(x, false)?, false)
    }
}

impl LowRank {
    /// Returns the trainable parameters at a slot of `kind`, each with the suffix of its name. For
    /// an embedding, the suffixes of A and B are exchanged, as in mlx-lm, where `lora_a` has one
    /// row per token.
    pub fn parts(&self, kind: SlotKind) -> impl Iterator<Item = (&'static str, &Array)> {
        let (a, b) = ends(kind);
        [
            (a, Some(&self.a)),
            (b, Some(&self.b)),
            ("m", self.m.as_ref()),
        ]
        .into_iter()
        .filter_map(|(end, part)| Some((end, part?)))
    }
}

/// Returns the name suffixes of A and B at a slot.
pub fn ends(kind: SlotKind) -> (&'static str, &'static str) {
    match kind {
        SlotKind::Table => ("lora_b", "lora_a"),
        _ => ("lora_a", "lora_b"),
    }
}
