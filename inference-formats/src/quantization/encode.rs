//! Encodes values in the types that this workspace writes.

use half::{bf16 as Bf16, f16 as F16};

/// Encodes values; `None` if a value is out of the type's range.
pub(super) type Encode = fn(&[f32]) -> Option<Vec<u8>>;

pub(super) fn f32(numbers: &[f32]) -> Option<Vec<u8>> {
    Some(numbers.iter().flat_map(|x| x.to_le_bytes()).collect())
}

pub(super) fn f16(numbers: &[f32]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(numbers.len() * 2);
    for x in numbers {
        let half = F16::from_f32(*x);
        if half.is_infinite() && x.is_finite() {
            return None;
        }
        bytes.extend(half.to_le_bytes());
    }
    Some(bytes)
}

pub(super) fn bf16(numbers: &[f32]) -> Option<Vec<u8>> {
    let halves = numbers.iter().map(|x| Bf16::from_f32(*x));
    Some(halves.flat_map(Bf16::to_le_bytes).collect())
}

/// Encodes blocks of 32 values. As in ggml, the largest magnitude becomes 127, and codes are
/// computed with the scale before its rounding to float16.
pub(super) fn q8_0(numbers: &[f32]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(numbers.len().div_ceil(32) * 34);
    for block in numbers.chunks(32) {
        let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let scale = most / 127.0;
        let stored = F16::from_f32(scale);
        if stored.is_infinite() {
            return None;
        }
        bytes.extend(stored.to_le_bytes());
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        bytes.extend(block.iter().map(|x| ((x * inverse).round() as i8) as u8));
    }
    Some(bytes)
}
