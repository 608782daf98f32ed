//! Loads matrices of GGUF types that store codes, scales, and scales of scales as separate parts.
//! The table of types (`inference_formats::quantization`) has the layout of each type.

use inference::Result;
use mlx_rs_core::{Dtype, QuantMode, Quantized};

use super::experts::{kernel_rows, packed_weight};
use super::gguf_part::GgufPart;
use super::streaming::{PartLayout, all_of, one};
use super::{Weights, mlx_shape};
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::quantization::{GROUP, Layout, PartType, pack_into};
use crate::error::engine;
use crate::exec;
use crate::nn::Weight;

impl Weights {
    /// Loads a matrix, or a stack of matrices, in the layout of its type. The kernels have all
    /// layouts; MLX has only [`Layout::Powers`]. `None` if neither can compute with the tensor.
    pub(super) fn gguf_packed(
        &self,
        tensor: &GgufPart<'_>,
        shape: &[usize],
        for_kernels: bool,
    ) -> Result<Option<Weight>> {
        const MLX_GROUP: i32 = GROUP as i32; // `GROUP` is small, so the cast is exact
        let layout = tensor.kind.layout();
        let (parts, Some((&cols, outer))) = (layout.parts(), shape.split_last()) else {
            return Ok(None);
        };
        if parts.is_empty() {
            return Ok(None);
        }
        let in_mlx = layout == Layout::Powers;
        let keeps_packed = match in_mlx {
            true => exec::keeps_packed(QuantMode::Mxfp4, 4, MLX_GROUP, self.dtype),
            false => exec::keeps_gguf_bits(self.dtype),
        };
        let kernel_rows = kernel_rows(shape).filter(|_| for_kernels && keeps_packed);
        if kernel_rows.is_none() && (!in_mlx || outer.is_empty()) {
            return Ok(None);
        }
        let layouts: Vec<PartLayout> = (parts.iter())
            .map(|part| PartLayout {
                interleaved: kernel_rows.is_some(),
                ..PartLayout::rows(part.elements(cols), dtype_of(part.kind))
            })
            .collect();
        let made = self.gguf_chunks(tensor, &layouts, |bytes, out, _| {
            pack_into(tensor.kind, bytes, out).map_err(|misfit| {
                wrong_tensor(tensor.gguf.path(), &tensor.name, misfit.to_string())
            })
        })?;
        let Some((rows, _)) = kernel_rows else {
            let [weight, scales] = all_of(made)?;
            let with_last = |n: usize| [outer, &[n]].concat();
            return Ok(Some(Weight::Quantized(Quantized {
                weight: one(vec![weight], &with_last(cols / 8))?,
                scales: one(vec![scales], &with_last(cols / GROUP))?,
                biases: None,
                group_size: MLX_GROUP,
                bits: 4,
                mode: QuantMode::Mxfp4,
            })));
        };
        let rows = mlx_shape(&[rows])[0];
        let matrix = Weight::from_layout(made, rows, layout).map_err(engine("weights"))?;
        Ok(matrix.map(|rows| packed_weight(rows, shape)))
    }
}

fn dtype_of(part: PartType) -> Dtype {
    match part {
        PartType::U32 => Dtype::Uint32,
        PartType::U8 => Dtype::Uint8,
        PartType::I8 => Dtype::Int8,
        PartType::F16 => Dtype::Float16,
    }
}
