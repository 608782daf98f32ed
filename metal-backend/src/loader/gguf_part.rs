//! Reads a tensor of a GGUF file, or the slice of it that one process of a group needs.

use std::ops::Range;
use std::sync::Arc;

use inference::{Error, ErrorKind, Result};

use super::Weights;
use super::part::Part;
use super::streaming::rows_and_cols;
use crate::checkpoint::gguf::{GgmlType, Gguf, GgufTensor};

/// A tensor of a GGUF file, or this process's slice of it.
#[derive(Debug, Clone)]
pub(super) struct GgufPart {
    /// The file.
    pub gguf: Arc<Gguf>,
    /// The tensor's name in the file.
    pub name: String,
    /// The type of its blocks.
    pub kind: GgmlType,
    /// The shape of the slice.
    pub shape: Vec<usize>,
    /// Bytes of the slice in the file.
    pub nbytes: usize,
    whole: GgufTensor,
    /// The slice in units of blocks, and the bytes of a block; `None` for a complete tensor.
    cut: Option<(Part, usize)>,
}

impl GgufPart {
    /// Creates a complete tensor.
    pub(super) fn whole(gguf: &Arc<Gguf>, name: String, whole: &GgufTensor) -> Self {
        Self {
            gguf: Arc::clone(gguf),
            name,
            kind: whole.kind,
            shape: whole.shape.clone(),
            nbytes: whole.nbytes,
            whole: whole.clone(),
            cut: None,
        }
    }

    /// Creates a slice of a tensor.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the slice cuts a block.
    pub(super) fn cut(
        gguf: &Arc<Gguf>,
        name: String,
        whole: &GgufTensor,
        part: &Part,
    ) -> Result<Self> {
        let fault = |message: String| {
            let message = format!("tensor `{name}`: {message}");
            Err(Error::new(ErrorKind::Unsupported, message).with_path(gguf.path()))
        };
        let Some((weights, bytes)) = whole.kind.block() else {
            return fault(format!("{} is not supported", whole.kind.name()));
        };
        let Some(blocks) = part.in_blocks(weights) else {
            let columns = |shape: &[usize]| shape.last().copied().unwrap_or(0);
            return fault(format!(
                "a process's part of its {} inputs is {}, which does not divide into blocks of \
                 {weights} ({})",
                columns(&whole.shape),
                columns(&part.shape),
                whole.kind.name(),
            ));
        };
        let count: usize = blocks.shape.iter().product();
        Ok(Self {
            kind: whole.kind,
            shape: part.shape.clone(),
            nbytes: count * bytes,
            cut: Some((blocks, bytes)),
            gguf: Arc::clone(gguf),
            name,
            whole: whole.clone(),
        })
    }

    /// Returns the tensor's byte range in the file; `None` if it is a slice, which may not be
    /// contiguous.
    pub(super) fn bytes(&self) -> Option<Range<usize>> {
        let first = usize::try_from(self.gguf.position(&self.whole)).ok()?;
        let end = first.checked_add(self.nbytes)?;
        self.cut.is_none().then_some(first..end)
    }

    /// Returns the bytes of one row of the slice. All axes but the last count as rows.
    pub(super) fn row_bytes(&self) -> usize {
        let (rows, _) = rows_and_cols(&self.shape);
        self.nbytes / rows.max(1)
    }

    /// Reads some rows of the slice, in the order of the file. `out` must have their size.
    pub(super) fn read_rows(&self, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        let read = |at: usize, out: &mut [u8]| Ok(self.gguf.read_into(&self.whole, at, out)?);
        match &self.cut {
            None => read(rows.start * self.row_bytes(), out),
            Some((blocks, bytes)) => blocks.read_into(read, (*bytes, rows), out, &mut Vec::new()),
        }
    }
}

impl Weights {
    /// Returns the tensor with this name in transformers, or this process's slice of it. `shape` is
    /// the shape of the slice.
    pub(super) fn gguf_part(
        &self,
        gguf: &Arc<Gguf>,
        stored: String,
        name: &str,
        shape: &[usize],
    ) -> Result<GgufPart> {
        let tensor = (gguf.tensors().get(&stored)).ok_or_else(|| self.missing(&stored, shape))?;
        let part = self.part(name, shape)?;
        let expected = part.stored_shape();
        // Files may omit leading axes of length one.
        let used = |shape: &[usize]| shape.iter().position(|n| *n != 1).unwrap_or(shape.len());
        if tensor.shape[used(&tensor.shape)..] != expected[used(&expected)..] {
            return Err(self.wrong_shape(&stored, &tensor.shape, &expected));
        }
        match part.is_cut() {
            true => GgufPart::cut(gguf, stored, tensor, &part),
            false => Ok(GgufPart::whole(gguf, stored, tensor)),
        }
    }
}

#[cfg(test)]
mod tests {
    use inference_formats::split::TensorSplit;
    use mlx_rs_core::{Device, Dtype, Stream, distributed};

    use super::*;
    use crate::checkpoint::ModelConfig;
    use crate::checkpoint::gguf::testing::{Writer, blocks};
    use crate::checkpoint::quantization::dequantize;
    use crate::exec::PrefillInputs;
    use crate::loader::Member;

    const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 1,
        "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 40}"#;

    /// Returns the matrix at `prefix` that `rank` of `processes` loads from a file with one tensor
    /// of shape `[512, 512]`, and the file's decoded elements.
    fn loaded(
        (prefix, stored): (&str, &str),
        kind: GgmlType,
        (rank, processes): (usize, usize),
        part: [i32; 2],
    ) -> (Result<Vec<f32>>, Vec<f32>) {
        let (weights, _) = kind.block().unwrap();
        let bytes = blocks(kind, 512 * 512 / weights);
        let wanted = dequantize(kind, &bytes).unwrap();
        let (_dir, path) = Writer::default()
            .tensor(stored, &[512, 512], kind.id(), &bytes)
            .file();
        let config = ModelConfig::from_json(CONFIG.as_bytes()).unwrap();
        let mut all = Weights::from_gguf(Gguf::open(&path).unwrap(), &config, Dtype::Float32);
        all.use_cpu(PrefillInputs::Float32);
        all.use_member(Member {
            split: Arc::new(TensorSplit::new(&config, processes).unwrap()),
            rank,
            group: distributed::init(false).unwrap(),
        });
        let values = all
            .matrix(prefix, part[0], part[1])
            .map(|matrix| matrix.dense(Dtype::Float32).unwrap().to_f32_vec().unwrap());
        (values, wanted)
    }

    #[test]
    fn processes_read_their_blocks_alone() {
        let up = ("model.layers.0.mlp.up_proj", "blk.0.ffn_up.weight");
        let down = ("model.layers.0.mlp.down_proj", "blk.0.ffn_down.weight");
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            for kind in [
                GgmlType::Q4K,
                GgmlType::Q8_0,
                GgmlType::IQ4NL,
                GgmlType::F16,
            ] {
                for rank in 0..2 {
                    let (rows, wanted) = loaded(up, kind, (rank, 2), [256, 512]);
                    let first = rank * 256 * 512;
                    assert!(
                        rows.unwrap() == wanted[first..first + 256 * 512],
                        "{kind:?}"
                    );
                    let (columns, wanted) = loaded(down, kind, (rank, 2), [512, 256]);
                    let half = wanted.chunks(512).flat_map(|row| &row[rank * 256..][..256]);
                    assert!(columns.unwrap().iter().eq(half), "{kind:?}");
                }
            }
        });
    }

    #[test]
    fn a_block_that_would_be_cut_is_an_error() {
        let down = ("model.layers.0.mlp.down_proj", "blk.0.ffn_down.weight");
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let (cut, _) = loaded(down, GgmlType::Q4K, (0, 4), [512, 128]);
            let error = cut.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains("blocks of 256 (Q4_K)"), "{error}");
            let (fits, _) = loaded(down, GgmlType::Q8_0, (3, 4), [512, 128]);
            assert_eq!(fits.unwrap().len(), 512 * 128);
        });
    }
}
