//! GGUF blocks as numbers: decoded to `f32`, or repacked without loss to MLX's affine layout where
//! it has the same format. These are pure functions of bytes.
//!
//! A tensor `[rows, cols]` is stored row after row; each row is a whole number of blocks. A block
//! holds 32 weights (`Q4_0` to `Q8_0`, `MXFP4`, `IQ4_NL`) or 256 (other K, IQ and TQ types). Groups
//! of 32 or 16 weights of the simple and the K types have one scale and one bias each:
//! `w = scale * q + bias`. Block layouts are those of ggml. MLX packs element `i` of a row at bit
//! `i * bits` of a little-endian stream of 32-bit words.

mod blocks;
mod grids;
mod iq;
mod nibbles;
mod rows;
#[cfg(test)]
mod tests;

use super::gguf::GgmlType;

pub use iq::NibbleCodes;
pub use nibbles::{NibbleFormat, NibblePacked, NibbleScales, repack_nibbles};
pub use rows::unpermute_rows;

/// Weights that share a scale in every repacked format.
const GROUP: usize = 32;

/// A matrix in MLX's affine layout: `w = scale * q + bias`, group after group.
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

/// A matrix of 6 bits. Its scales are a signed byte for each 16 weights times a float16 for each
/// 256: `w = super_scale * scale * (q - 32)`.
#[derive(Debug, Clone, PartialEq)]
pub struct SuperPacked {
    /// The packed codes `q`, `[rows, cols * 6 / 32]`.
    pub packed: Vec<u32>,
    /// A byte for each group of 16, `[rows, cols / 16]`.
    pub scales: Vec<i8>,
    /// A float16 for each block of 256, `[rows, cols / 256]`.
    pub supers: Vec<half::f16>,
}

/// Decodes `data`, whole blocks of `kind`, exactly as ggml's reference does. Integers (`I8` to
/// `I64`) and `F64` become the nearest `f32`. `None` for a type that is not decoded, or when `data`
/// is not a whole number of blocks.
pub fn dequantize(kind: GgmlType, data: &[u8]) -> Option<Vec<f32>> {
    let (weights, blocks) = count_blocks(kind, data)?;
    let mut out = Vec::with_capacity(blocks * weights);
    match kind {
        GgmlType::F32 => elements(data, &mut out, f32::from_le_bytes),
        GgmlType::F64 => elements(data, &mut out, |b| f64::from_le_bytes(b) as f32),
        GgmlType::F16 => elements(data, &mut out, |b| half::f16::from_le_bytes(b).to_f32()),
        GgmlType::BF16 => elements(data, &mut out, |b| half::bf16::from_le_bytes(b).to_f32()),
        GgmlType::I8 => elements(data, &mut out, |b| i8::from_le_bytes(b).into()),
        GgmlType::I16 => elements(data, &mut out, |b| i16::from_le_bytes(b).into()),
        GgmlType::I32 => elements(data, &mut out, |b| i32::from_le_bytes(b) as f32),
        GgmlType::I64 => elements(data, &mut out, |b| i64::from_le_bytes(b) as f32),
        GgmlType::Q2K => blocks::q2_k(data, |group| extend(&mut out, group)),
        GgmlType::Q6K => blocks::q6_k(data, |d, scale, codes| {
            let scale = d.to_f32() * f32::from(scale);
            // The integer first: zero keeps the sign of the scale.
            out.extend(codes.map(|q| scale * (f32::from(q) - 32.0)));
        }),
        _ if NibbleCodes::of(kind).is_some() => iq::dequantize(kind, data, &mut out)?,
        _ => {
            let middle = middle(kind);
            blocks::affine(kind, data, |q, scale, bias| match middle {
                Some(middle) => out.extend(q.iter().map(|&q| scale * (f32::from(q) - middle))),
                None => out.extend(q.iter().map(|&q| scale * f32::from(q) + bias)),
            })?;
        }
    }
    Some(out)
}

/// The integer that stands for zero, in types without a bias. Its weight is a zero with the sign of
/// the scale; `scale * q + bias` would lose that sign.
fn middle(kind: GgmlType) -> Option<f32> {
    match kind {
        GgmlType::Q4_0 => Some(8.0),
        GgmlType::Q5_0 => Some(16.0),
        GgmlType::Q8_0 => Some(128.0),
        GgmlType::TQ1_0 | GgmlType::TQ2_0 => Some(1.0),
        _ => None,
    }
}

fn elements<const N: usize>(data: &[u8], out: &mut Vec<f32>, decode: impl Fn([u8; N]) -> f32) {
    out.extend(data.as_chunks::<N>().0.iter().map(|&bytes| decode(bytes)));
}

fn extend(out: &mut Vec<f32>, group: blocks::Group16) {
    out.extend(
        group
            .q
            .iter()
            .map(|&q| group.scale * f32::from(q) + group.bias),
    );
}

/// Bits of a weight when [`repack`] packs `kind`; `None` when it cannot without loss.
pub(crate) fn affine_bits(kind: GgmlType) -> Option<i32> {
    Some(match kind {
        GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q4K => 4,
        GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q5K => 5,
        GgmlType::Q8_0 => 8,
        GgmlType::TQ1_0 | GgmlType::TQ2_0 => 2,
        _ => return None,
    })
}

/// Repacks `data`, whole blocks of `kind`, to MLX's affine layout without loss. The integers stay
/// the same, with scale and bias as `f32`. `None` for types without a layout in MLX (groups of 16,
/// and plain numbers), and when `data` is not a whole number of blocks. Those take [`dequantize`].
pub fn repack(kind: GgmlType, data: &[u8]) -> Option<AffinePacked> {
    let bits = affine_bits(kind)?;
    let (weights, blocks) = count_blocks(kind, data)?;
    let groups = blocks * (weights / GROUP);
    let mut packed: Vec<u32> = Vec::with_capacity(groups * bits.unsigned_abs() as usize);
    let mut scales = Vec::with_capacity(groups);
    let mut biases = Vec::with_capacity(groups);
    blocks::affine(kind, data, |q, scale, bias| {
        match bits {
            2 => packed.extend(q.as_chunks::<16>().0.iter().map(pack_pairs)),
            4 => packed.extend(q.as_chunks::<8>().0.iter().map(pack_nibbles)),
            8 => packed.extend(q.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b))),
            _ => packed.extend(pack_five(q)),
        }
        scales.push(scale);
        biases.push(bias);
    })?;
    Some(AffinePacked {
        bits,
        packed,
        scales,
        biases,
    })
}

/// Whether [`repack_super_scaled`] packs `kind`.
pub(crate) fn has_super_scales(kind: GgmlType) -> bool {
    kind == GgmlType::Q6K
}

/// Repacks `data`, whole blocks of `Q6_K`, without loss: the same integers and the same scales, in
/// as many bits. `None` for other types, and when `data` is not a whole number of blocks.
pub fn repack_super_scaled(kind: GgmlType, data: &[u8]) -> Option<SuperPacked> {
    const GROUPS: usize = 16; // of a block
    if !has_super_scales(kind) {
        return None;
    }
    let (_, blocks) = count_blocks(kind, data)?;
    let mut packed = Vec::with_capacity(blocks * GROUPS * 3);
    let mut scales = Vec::with_capacity(blocks * GROUPS);
    let mut supers = Vec::with_capacity(blocks);
    blocks::q6_k(data, |d, scale, codes| {
        // A block begins.
        if scales.len() % GROUPS == 0 {
            supers.push(d);
        }
        scales.push(scale);
        packed.extend(pack_six(&codes));
    });
    Some(SuperPacked {
        packed,
        scales,
        supers,
    })
}

/// The weights of a block, and the number of blocks in `data`. Their product fits: it is at most 2
/// for each byte of `data`, or 6 for types of one and two bits.
fn count_blocks(kind: GgmlType, data: &[u8]) -> Option<(usize, usize)> {
    let (weights, bytes) = kind.block()?;
    data.len()
        .is_multiple_of(bytes)
        .then_some((weights, data.len() / bytes))
}

/// 16 values of 2 bits are a word.
fn pack_pairs(q: &[u8; 16]) -> u32 {
    q.iter().rev().fold(0, |word, &q| word << 2 | u32::from(q))
}

fn pack_nibbles(q: &[u8; 8]) -> u32 {
    q.iter().rev().fold(0, |word, &q| word << 4 | u32::from(q))
}

/// 16 values of 6 bits are 3 words.
fn pack_six(q: &[u8; 16]) -> [u32; 3] {
    let all = q
        .iter()
        .rev()
        .fold(0u128, |all, &q| all << 6 | u128::from(q));
    [all as u32, (all >> 32) as u32, (all >> 64) as u32]
}

/// 32 values of 5 bits are 5 words.
fn pack_five(q: &[u8; GROUP]) -> [u32; 5] {
    let mut words = [0u32; 5];
    let mut pending = 0u64;
    let mut held = 0;
    let mut out = words.iter_mut();
    for &q in q {
        pending |= u64::from(q) << held;
        held += 5;
        if held >= 32 {
            if let Some(word) = out.next() {
                *word = pending as u32;
            }
            pending >>= 32;
            held -= 32;
        }
    }
    words
}
