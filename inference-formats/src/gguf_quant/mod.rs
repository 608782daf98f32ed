//! Converts GGUF blocks to numbers: decoded to `f32`, or repacked without loss to MLX's affine
//! layout if that has the same format. These are pure functions of bytes.
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

/// A matrix in MLX's affine layout: `w = scale * q + bias`, with a scale and a bias for each group.
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

/// A matrix of 6 bits. It has a signed byte for every 16 weights and a float16 for every 256: `w =
/// super_scale * scale * (q - 32)`.
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
            // The integer is computed first, so that a zero keeps the sign of the scale.
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

/// The code that stands for zero, in types without a bias. Its weight is a zero with the sign of
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
    let mut all = AffinePacked {
        bits,
        packed: vec![0; groups * bits.unsigned_abs() as usize],
        scales: vec![0.0; groups],
        biases: vec![0.0; groups],
    };
    let AffinePacked {
        packed,
        scales,
        biases,
        ..
    } = &mut all;
    repack_into(kind, data, packed, scales, biases)?;
    Some(all)
}

/// As [`repack`], into slices of exactly the lengths of its results. `None` if the lengths differ,
/// too.
pub fn repack_into(
    kind: GgmlType,
    data: &[u8],
    packed: &mut [u32],
    scales: &mut [f32],
    biases: &mut [f32],
) -> Option<()> {
    let bits = affine_bits(kind)?.unsigned_abs() as usize;
    let (weights, blocks) = count_blocks(kind, data)?;
    let groups = blocks * (weights / GROUP);
    if (packed.len(), scales.len(), biases.len()) != (groups * bits, groups, groups) {
        return None;
    }
    let factors = scales.iter_mut().zip(biases.iter_mut());
    match bits {
        2 => fill::<2>(kind, data, packed, factors, |q| {
            let [low, high] = [0, 16].map(|at| pack_pairs(sixteen(q, at)));
            [low, high]
        }),
        4 => fill::<4>(kind, data, packed, factors, |q| {
            let [a, b, c, d] = quarters(q);
            [a, b, c, d].map(|eight| pack_nibbles(&eight))
        }),
        5 => fill::<5>(kind, data, packed, factors, pack_five),
        8 => fill::<8>(kind, data, packed, factors, |q| {
            let mut words = [0; 8];
            for (word, bytes) in words.iter_mut().zip(q.as_chunks::<4>().0) {
                *word = u32::from_le_bytes(*bytes);
            }
            words
        }),
        _ => None,
    }
}

/// Writes the words, the scale and the bias of each group.
#[inline(always)]
fn fill<'a, const BITS: usize>(
    kind: GgmlType,
    data: &[u8],
    packed: &mut [u32],
    mut factors: impl Iterator<Item = (&'a mut f32, &'a mut f32)>,
    pack: impl Fn(&[u8; GROUP]) -> [u32; BITS],
) -> Option<()> {
    let mut words = packed.as_chunks_mut::<BITS>().0.iter_mut();
    blocks::affine(kind, data, |q, scale, bias| {
        if let (Some(words), Some((s, b))) = (words.next(), factors.next()) {
            *words = pack(q);
            *s = scale;
            *b = bias;
        }
    })
}

/// Bits of a weight in a type without biases: each group has a float16 scale, and one code stands
/// for zero.
pub fn symmetric_bits(kind: GgmlType) -> Option<i32> {
    middle(kind).and_then(|_| affine_bits(kind))
}

/// Whether [`repack_super_scaled`] packs `kind`.
pub(crate) fn has_super_scales(kind: GgmlType) -> bool {
    kind == GgmlType::Q6K
}

/// Repacks `data`, whole blocks of `Q6_K`, without loss: the same integers and the same scales, in
/// as many bits. `None` for other types, and when `data` is not a whole number of blocks.
pub fn repack_super_scaled(kind: GgmlType, data: &[u8]) -> Option<SuperPacked> {
    let (_, blocks) = count_blocks(kind, data)?;
    let mut all = SuperPacked {
        packed: vec![0; blocks * SUPER_GROUPS * 3],
        scales: vec![0; blocks * SUPER_GROUPS],
        supers: vec![half::f16::ZERO; blocks],
    };
    let SuperPacked {
        packed,
        scales,
        supers,
    } = &mut all;
    repack_super_scaled_into(kind, data, packed, scales, supers)?;
    Some(all)
}

/// As [`repack_super_scaled`], into slices of exactly the lengths of its results. `None` if the
/// lengths differ, too.
pub fn repack_super_scaled_into(
    kind: GgmlType,
    data: &[u8],
    packed: &mut [u32],
    scales: &mut [i8],
    supers: &mut [half::f16],
) -> Option<()> {
    if !has_super_scales(kind) {
        return None;
    }
    let (_, blocks) = count_blocks(kind, data)?;
    let groups = blocks * SUPER_GROUPS;
    if (packed.len(), scales.len(), supers.len()) != (groups * 3, groups, blocks) {
        return None;
    }
    let mut words = packed.as_chunks_mut::<3>().0.iter_mut();
    let mut scales = scales.as_chunks_mut::<SUPER_GROUPS>().0.iter_mut();
    for (block, d) in data.as_chunks::<210>().0.iter().zip(supers) {
        *d = blocks::half_of(blocks::part::<208, 2, 210>(block));
        if let Some(scales) = scales.next() {
            *scales = blocks::part::<192, 16, 210>(block).map(|scale| scale as i8);
        }
        blocks::q6_k(block, |_, _, codes| {
            if let Some(words) = words.next() {
                *words = pack_six(&codes);
            }
        });
    }
    Some(())
}

/// Bits of a weight when [`repack_super_affine_into`] packs `kind`.
pub fn super_affine_bits(kind: GgmlType) -> Option<i32> {
    match kind {
        GgmlType::Q4K => Some(4),
        GgmlType::Q5K => Some(5),
        _ => None,
    }
}

/// Repacks `data`, whole blocks of `Q4_K` or `Q5_K`, without loss: codes as [`repack`] packs them,
/// the scale and the minimum of each group of 32 as two neighbors of `bytes`, and the factors of
/// each 256 weights as two neighbors of `supers`. So `w = d * scale * q - m * min`. `None` for other
/// types and for slices of other lengths: for each block, 8 times as many words as bits, 16 bytes
/// and 2 factors.
pub fn repack_super_affine_into(
    kind: GgmlType,
    data: &[u8],
    packed: &mut [u32],
    bytes: &mut [i8],
    supers: &mut [half::f16],
) -> Option<()> {
    let bits = super_affine_bits(kind)?.unsigned_abs() as usize;
    let (weights, blocks) = count_blocks(kind, data)?;
    let groups = blocks * (weights / GROUP);
    if (packed.len(), bytes.len(), supers.len()) != (groups * bits, 2 * groups, 2 * blocks) {
        return None;
    }
    let (size, starts) = (data.len() / blocks.max(1), bytes.as_chunks_mut::<16>().0);
    let supers = supers.as_chunks_mut::<2>().0;
    for ((block, bytes), supers) in data.chunks_exact(size.max(1)).zip(starts).zip(supers) {
        let start = block.first_chunk::<16>()?;
        *supers = [
            blocks::half_of(blocks::part::<0, 2, 16>(start)),
            blocks::half_of(blocks::part::<2, 2, 16>(start)),
        ];
        let pairs = bytes.as_chunks_mut::<2>().0;
        for (pair, (scale, min)) in pairs.iter_mut().zip(blocks::k_scales(start)) {
            // Six bits each.
            *pair = [scale as i8, min as i8];
        }
    }
    match bits {
        4 => fill_codes::<4>(kind, data, packed, |q| {
            quarters(q).map(|eight| pack_nibbles(&eight))
        }),
        _ => fill_codes::<5>(kind, data, packed, pack_five),
    }
}

/// Writes the words of each group.
#[inline(always)]
fn fill_codes<const BITS: usize>(
    kind: GgmlType,
    data: &[u8],
    packed: &mut [u32],
    pack: impl Fn(&[u8; GROUP]) -> [u32; BITS],
) -> Option<()> {
    let mut words = packed.as_chunks_mut::<BITS>().0.iter_mut();
    blocks::affine(kind, data, |q, _, _| {
        if let Some(words) = words.next() {
            *words = pack(q);
        }
    })
}

/// Groups in a block of `Q6_K`.
const SUPER_GROUPS: usize = 16;

/// The number of weights per block, and the number of blocks in `data`. Their product fits: it is
/// at most 2 for each byte of `data`, or 6 for types of one and two bits.
fn count_blocks(kind: GgmlType, data: &[u8]) -> Option<(usize, usize)> {
    let (weights, bytes) = kind.block()?;
    data.len()
        .is_multiple_of(bytes)
        .then_some((weights, data.len() / bytes))
}

/// Packs 16 values of 2 bits into a word.
fn pack_pairs(q: &[u8; 16]) -> u32 {
    q.iter().rev().fold(0, |word, &q| word << 2 | u32::from(q))
}

/// The 16 values from `at` on.
fn sixteen(q: &[u8; GROUP], at: usize) -> &[u8; 16] {
    q.as_chunks::<16>().0.get(at / 16).unwrap_or(&[0; 16])
}

fn quarters(q: &[u8; GROUP]) -> [[u8; 8]; 4] {
    let mut all = [[0; 8]; 4];
    for (part, bytes) in all.iter_mut().zip(q.as_chunks::<8>().0) {
        *part = *bytes;
    }
    all
}

/// Joins neighbors in all pairs of fields at once. Each value has `width` bits in a field of
/// `field` bits. Each round halves the number of fields.
#[inline(always)]
fn join_pairs<const WIDTH: u32, const FIELD: u32>(x: u64, low: u64) -> u64 {
    (x & low) | (x >> (FIELD - WIDTH) & (low << WIDTH))
}

/// Packs eight values of four bits into a word.
#[inline(always)]
fn pack_nibbles(q: &[u8; 8]) -> u32 {
    let x = u64::from_le_bytes(*q);
    let x = join_pairs::<4, 8>(x, 0x000f_000f_000f_000f);
    let x = join_pairs::<8, 16>(x, 0x0000_00ff_0000_00ff);
    join_pairs::<16, 32>(x, 0x0000_0000_0000_ffff) as u32
}

/// Packs 16 values of 6 bits into 3 words.
#[inline(always)]
fn pack_six(q: &[u8; 16]) -> [u32; 3] {
    let eight = |q: &[u8; 8]| {
        let x = u64::from_le_bytes(*q);
        let x = join_pairs::<6, 8>(x, 0x003f_003f_003f_003f);
        let x = join_pairs::<12, 16>(x, 0x0000_0fff_0000_0fff);
        join_pairs::<24, 32>(x, 0x0000_0000_00ff_ffff)
    };
    let halves = q.as_chunks::<8>().0;
    let [low, high] = [0, 1].map(|i| halves.get(i).map_or(0, eight));
    [
        low as u32,
        (low >> 32 | high << 16) as u32,
        (high >> 16) as u32,
    ]
}

/// Packs 32 values of 5 bits into 5 words.
#[inline(always)]
fn pack_five(q: &[u8; GROUP]) -> [u32; 5] {
    // Forty bits each.
    let [a, b, c, d] = quarters(q).map(|q| {
        let x = u64::from_le_bytes(q);
        let x = join_pairs::<5, 8>(x, 0x001f_001f_001f_001f);
        let x = join_pairs::<10, 16>(x, 0x0000_03ff_0000_03ff);
        join_pairs::<20, 32>(x, 0x0000_0000_000f_ffff)
    });
    [
        a as u32,
        (a >> 32 | b << 8) as u32,
        (b >> 24 | c << 16) as u32,
        (c >> 16 | d << 24) as u32,
        (d >> 8) as u32,
    ]
}
