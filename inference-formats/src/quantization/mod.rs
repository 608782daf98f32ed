//! Types of quantized matrices in GGUF files. [`TYPES`] is the table of names, numbers, block sizes
//! and memory layouts. Blocks can be decoded to `f32`, packed without loss into a [`Layout`] that
//! kernels read, or repacked to MLX's affine form if it can represent equal values. All functions
//! are pure functions of bytes.
//!
//! A tensor `[rows, cols]` is stored row after row; each row is a whole number of blocks, as ggml
//! defines them. MLX packs element `i` of a row at bit `i * bits` of a little-endian stream of
//! 32-bit words.
//!
//! ```
//! use inference_formats::quantization::{GgmlType, Layout, TYPES, dequantize};
//! let row = TYPES.iter().find(|row| row.name == "Q8_0").unwrap();
//! assert_eq!((row.weights, row.bytes, row.bits_per_weight()), (32, 34, 8.5));
//! assert_eq!(GgmlType::Q8_0.layout(), Layout::Symmetric { bits: 8 });
//! assert_eq!(dequantize(row.kind, &[0; 34]).unwrap(), [0.0; 32]);
//! ```

mod bits;
mod blocks;
mod codes;
mod coding;
mod encode;
mod grids;
mod kinds;
mod layout;
mod nibble_codes;
mod numbers;
mod rows;
mod table;
#[cfg(test)]
mod tests;

pub use layout::{GROUP, Layout, Misfit, Part, PartType};
pub use nibble_codes::NibbleCodes;
pub use rows::{permuted_row, unpermute_into, unpermute_rows};
pub use table::{BlockType, GgmlType, TYPES, file_type_name};

/// A matrix in MLX's affine form: `w = scale * q + bias`, with a scale and a bias for each group.
#[derive(Debug, Clone, PartialEq)]
pub struct AffinePacked {
    /// Bits of a weight: 2, 4, 5 or 8.
    pub bits: i32,
    /// The packed weights, `[rows, cols * bits / 32]`.
    pub packed: Vec<u32>,
    /// A scale for each group, `[rows, cols / 32]`.
    pub scales: Vec<f32>,
    /// A bias for each group, `[rows, cols / 32]`.
    pub biases: Vec<f32>,
}

/// Decodes `data`, whole blocks of `kind`, with the exact results of ggml's reference. Integers
/// (`I8` to `I64`) and `F64` become the nearest `f32`. Returns `None` for a type that cannot be
/// decoded, or if `data` is not a whole number of blocks.
pub fn dequantize(kind: GgmlType, data: &[u8]) -> Option<Vec<f32>> {
    let weights = count_weights(kind, data)?;
    let mut out = Vec::with_capacity(weights);
    (kind.row()?.coding.decode)(data, &mut out);
    Some(out)
}

/// Encodes `numbers` as blocks of `kind`. Returns `None` for a type without an encoder, for a
/// partial block, or for a value out of the type's range.
pub fn encode(kind: GgmlType, numbers: &[f32]) -> Option<Vec<u8>> {
    let row = kind.row()?;
    if !numbers.len().is_multiple_of(row.weights) {
        return None;
    }
    row.encode.and_then(|encode| encode(numbers))
}

/// Packs `data`, whole blocks of `kind`, without loss into the [parts](Layout::parts) of its
/// layout. Each part has exactly [`Part::bytes`] bytes, aligned for its elements.
///
/// # Errors
/// [`Misfit::Layout`] for a type whose layout has no parts, [`Misfit::Size`] for other lengths, and
/// [`Misfit::Scale`] for a scale that is NaN.
pub fn pack_into(kind: GgmlType, data: &[u8], out: &mut [&mut [u8]]) -> Result<(), Misfit> {
    let row = kind.row().ok_or(Misfit::Layout)?;
    let parts = row.layout().parts();
    if parts.is_empty() {
        return Err(Misfit::Layout);
    }
    let weights = count_weights(kind, data).ok_or(Misfit::Size)?;
    let fits = parts.len() == out.len()
        && (parts.iter().zip(&*out)).all(|(part, out)| part.bytes(weights) == out.len());
    if !fits {
        return Err(Misfit::Size);
    }
    (row.coding.pack)(data, out)
}

/// Repacks `data`, whole blocks of `kind`, to MLX's affine form without loss. The integers stay
/// unchanged; scale and bias become `f32`. Returns `None` for types without
/// [`Layout::affine_bits`], or if `data` is not a whole number of blocks.
pub fn repack(kind: GgmlType, data: &[u8]) -> Option<AffinePacked> {
    let bits = kind.layout().affine_bits()?;
    let groups = count_weights(kind, data)? / GROUP;
    let mut all = AffinePacked {
        bits: bits.cast_signed(),
        packed: vec![0; groups * bits as usize],
        scales: vec![0.0; groups],
        biases: vec![0.0; groups],
    };
    repack_into(
        kind,
        data,
        &mut all.packed,
        &mut all.scales,
        &mut all.biases,
    )?;
    Some(all)
}

/// Like [`repack`], but writes to slices. Also returns `None` if a slice does not have the exact
/// length of its result.
pub fn repack_into(
    kind: GgmlType,
    data: &[u8],
    packed: &mut [u32],
    scales: &mut [f32],
    biases: &mut [f32],
) -> Option<()> {
    let coding = &kind.row()?.coding;
    let bits = coding.layout.affine_bits()? as usize;
    let groups = count_weights(kind, data)? / GROUP;
    if (packed.len(), scales.len(), biases.len()) != (groups * bits, groups, groups) {
        return None;
    }
    coding.affine?(data, packed, (scales, biases));
    Some(())
}

/// Number of weights in `data`, if `data` is a whole number of blocks. A byte stores at most eight
/// weights, so the number cannot overflow for data in memory.
fn count_weights(kind: GgmlType, data: &[u8]) -> Option<usize> {
    let (weights, bytes) = kind.block()?;
    data.len()
        .is_multiple_of(bytes)
        .then(|| data.len() / bytes * weights)
}
