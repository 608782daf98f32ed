//! Loads matrices of experts. Checkpoints store them as one stack or one matrix per expert.

use inference::Result;
use mlx_rs_core::{Array, Dtype, Quantized, eval, stack};

use super::{Weights, mlx_shape};
use crate::error::engine;
use crate::exec::{INTERLEAVED_ROWS, Weight};
use crate::nn::ExpertLinear;
use crate::nn::adapter::{SlotKind, SlotView};

/// The names under which a checkpoint may store one matrix of all experts.
pub struct ExpertNames<'a> {
    /// The prefix of the stack, `[experts, out, in]`.
    pub stacked: &'a str,
    /// The prefix of a single expert's matrix.
    pub single: &'a dyn Fn(i32) -> String,
}

impl Weights {
    /// Loads one matrix of all experts, `inputs -> outputs`.
    pub fn experts(
        &mut self,
        names: &ExpertNames<'_>,
        experts: i32,
        inputs: i32,
        outputs: i32,
        bias: bool,
    ) -> Result<ExpertLinear> {
        let stacked = self.contains(&format!("{}.weight", names.stacked));
        let weight = if stacked || !self.contains(&format!("{}.weight", (names.single)(0))) {
            self.stack(names.stacked, &[experts, outputs, inputs])?
        } else {
            let parts = (0..experts)
                .map(|e| self.stack(&(names.single)(e), &[outputs, inputs]))
                .collect::<Result<Vec<_>>>()?;
            join(&parts, self.dtype).map_err(engine("weights"))?
        };
        let bias = if bias {
            Some(self.tensor(&format!("{}.bias", names.stacked), &[experts, outputs])?)
        } else {
            None
        };
        let slot = self.slot(names.stacked, SlotKind::Matrix, &weight);
        let layer = match self.summed_over(names.stacked) {
            Some(_) => self.expert_output(weight, bias)?,
            None => self.expert_layer(weight, bias)?,
        };
        Ok(layer.at(SlotView::new(slot, None)))
    }
}

/// Returns the rows and columns of a matrix or of a stack that the kernels can store. The rows of a
/// stack are the rows of all experts, expert by expert. Returns `None` if an expert's rows are not
/// a multiple of a row block.
pub(super) fn kernel_rows(shape: &[usize]) -> Option<(usize, usize)> {
    let rows = match *shape {
        [rows, _] => rows,
        [experts, rows, _] if rows % INTERLEAVED_ROWS == 0 => experts.checked_mul(rows)?,
        _ => return None,
    };
    (rows > 0).then_some((rows, *shape.last()?))
}

/// Converts rows in the kernels' layout to a weight of this shape: a matrix or a stack.
pub(super) fn packed_weight(rows: Weight, shape: &[usize]) -> Weight {
    match *shape {
        [experts, _, _] => rows.into_experts(mlx_shape(&[experts])[0]),
        _ => rows,
    }
}

/// Stacks matrices of one format. Evaluates the stack immediately, so that the parts can be freed.
fn join(parts: &[Weight], dtype: Dtype) -> mlx_rs_core::Result<Weight> {
    let joined = |arrays: Vec<&Array>| -> mlx_rs_core::Result<Array> {
        let all = stack(&arrays, 0)?;
        eval([&all])?;
        Ok(all)
    };
    if let Some(stack) = Weight::joined(parts)? {
        return Ok(stack);
    }
    let quantized: Option<Vec<Quantized>> =
        (parts.iter().map(Weight::quantized)).collect::<mlx_rs_core::Result<_>>()?;
    let alike = |all: &[Quantized]| {
        all.windows(2).all(|pair| {
            let format = |q: &Quantized| (q.bits, q.group_size, q.mode);
            format(&pair[0]) == format(&pair[1])
        })
    };
    if let Some(all) = quantized
        && let Some(first) = all.first()
        && alike(&all)
    {
        let biases: Option<Vec<_>> = all.iter().map(|q| q.biases.as_ref()).collect();
        return Ok(Weight::Quantized(Quantized {
            weight: joined(all.iter().map(|q| &q.weight).collect())?,
            scales: joined(all.iter().map(|q| &q.scales).collect())?,
            biases: biases.map(joined).transpose()?,
            ..*first
        }));
    }
    // A stack has one format, so experts in different formats are dequantized.
    let stored = |part: &Weight| match part {
        Weight::Dense(w) => Some(w.dtype()),
        Weight::Mapped(m) => Some(m.dtype()),
        _ => None,
    };
    let first = parts.first().and_then(stored);
    let common = first.filter(|_| parts.iter().all(|part| stored(part) == first));
    let dense = parts
        .iter()
        .map(|part| part.dense(common.unwrap_or(dtype)))
        .collect::<mlx_rs_core::Result<Vec<_>>>()?;
    Ok(Weight::Dense(joined(dense.iter().collect())?))
}
