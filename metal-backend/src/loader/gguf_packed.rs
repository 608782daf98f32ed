//! Loads matrices of GGUF types that store codes, scales, and scales of scales as separate parts.
//! The table in `inference_formats::quantization` defines the layout of each type.

use inference::Result;
use mlx_rs_core::{Dtype, Error as CoreError, ErrorKind, QuantMode, Quantized};

use super::experts::{kernel_rows, packed_weight};
use super::from_gguf::GgufRows;
use super::gguf_part::GgufPart;
use super::streaming::{Chunks, PartLayout, Parts, Scratch, all_of, one};
use super::{Weights, mlx_shape};
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::quantization::{GROUP, Layout, PartType, pack_into};
use crate::error::engine;
use crate::exec::{self, MatrixParts, RowBlocks};
use crate::nn::Weight;

impl Weights {
    /// Loads a matrix or a stack of matrices in the layout of its type. The kernels support all
    /// layouts, MLX only [`Layout::Powers`]. Returns `None` if neither can compute with the tensor.
    pub(super) fn gguf_packed(
        &self,
        tensor: &GgufPart,
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
        let packed = Packed {
            rows: self.gguf_rows(tensor)?,
            blocks: kernel_rows.and_then(|_| RowBlocks::of(tensor.kind)),
            tensor: tensor.clone(),
        };
        let Some((rows, _)) = kernel_rows else {
            let [weight, scales] = all_of(self.gguf_at_once(&packed, &layouts)?)?;
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
        // These blocks may contain invalid exponents, which loading must report, so they are packed
        // now. Other blocks are always valid, so they are packed later.
        let parts = match in_mlx {
            true => self.gguf_at_once(&packed, &layouts)?.into(),
            false => self.gguf_later(packed, &layouts)?,
        };
        let rows = mlx_shape(&[rows])[0];
        let matrix = Weight::from_layout(parts, rows, layout).map_err(engine("weights"))?;
        Ok(matrix.map(|rows| packed_weight(rows, shape)))
    }

    /// Packs a tensor immediately.
    fn gguf_at_once(&self, packed: &Packed, layouts: &[PartLayout]) -> Result<Parts> {
        self.in_chunks(packed.rows.stored(), layouts, |range, out, scratch| {
            packed.rows.read(range, out, scratch, |bytes, out, _| {
                packed.convert(bytes, out)
            })
        })
    }

    /// Packs a tensor in the background after loading, or when its matrix is first used.
    fn gguf_later(&self, packed: Packed, layouts: &[PartLayout]) -> Result<MatrixParts> {
        let chunks = self.chunks(packed.rows.stored(), layouts);
        let arrays = chunks.arrays();
        let fill = move |scratch: &mut Scratch, chunk: usize, out: &mut [&mut [u8]]| {
            let done = packed.fill(&chunks, chunk, out, scratch);
            done.map_err(|e| CoreError::new(ErrorKind::Io, "weights", e.to_string()))
        };
        let later = self
            .packer
            .parts(&arrays, exec::threads(), Scratch::default, fill);
        later.map_err(engine("weights"))
    }
}

/// A tensor whose blocks are converted to packed parts.
struct Packed {
    tensor: GgufPart,
    rows: GgufRows,
    /// The kernels that pack its blocks, if there are any.
    blocks: Option<RowBlocks>,
}

impl Packed {
    /// Writes the packed parts of some rows.
    fn convert(&self, bytes: &[u8], out: &mut [&mut [u8]]) -> Result<()> {
        pack_into(self.tensor.kind, bytes, out).map_err(|misfit| {
            wrong_tensor(
                self.tensor.gguf.path(),
                &self.tensor.name,
                misfit.to_string(),
            )
        })
    }

    /// Writes a chunk of interleaved parts.
    fn fill(
        &self,
        chunks: &Chunks,
        chunk: usize,
        out: &mut [&mut [u8]],
        scratch: &mut Scratch,
    ) -> Result<()> {
        if let Some(blocks) = self.blocks
            && self.rows.pack(blocks, chunks.range(chunk), out, scratch)?
        {
            return Ok(());
        }
        chunks.fill(chunk, out, scratch, |range, out, scratch| {
            self.rows.read(range, out, scratch, |bytes, out, _| {
                self.convert(bytes, out)
            })
        })
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
