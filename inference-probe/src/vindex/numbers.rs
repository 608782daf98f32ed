//! Conversions between numbers and bytes.

use half::f16;

use super::index::Numbers;

/// The bytes of several lists of numbers, one after another.
pub(super) fn bytes_of(parts: &[&[f32]], numbers: Numbers) -> Vec<u8> {
    let count: usize = parts.iter().map(|part| part.len()).sum();
    let size = numbers.size() as usize;
    let mut bytes = vec![0; count * size];
    let mut rest = bytes.as_mut_slice();
    for part in parts {
        let (target, after) = rest.split_at_mut(part.len() * size);
        match numbers {
            Numbers::Float32 => {
                for (to, value) in target.as_chunks_mut::<4>().0.iter_mut().zip(*part) {
                    *to = value.to_le_bytes();
                }
            }
            Numbers::Float16 => {
                for (to, value) in target.as_chunks_mut::<2>().0.iter_mut().zip(*part) {
                    *to = f16::from_f32(*value).to_le_bytes();
                }
            }
        }
        rest = after;
    }
    bytes
}

/// The numbers that the bytes encode.
pub(super) fn floats(bytes: &[u8], numbers: Numbers) -> Vec<f32> {
    match numbers {
        Numbers::Float32 => (bytes.as_chunks::<4>().0.iter())
            .map(|v| f32::from_le_bytes(*v))
            .collect(),
        Numbers::Float16 => (bytes.as_chunks::<2>().0.iter())
            .map(|v| f16::from_le_bytes(*v).to_f32())
            .collect(),
    }
}

/// Whether a number exceeds the largest float16.
pub(super) fn too_great(values: &[f32]) -> bool {
    let most = f16::MAX.to_f32();
    values.iter().any(|v| v.is_finite() && v.abs() > most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back() {
        let (a, b) = ([1.5f32, -2.0, f32::MIN_POSITIVE], [65504.0f32]);
        let all = floats(&bytes_of(&[&a, &b], Numbers::Float32), Numbers::Float32);
        assert_eq!(all, [1.5, -2.0, f32::MIN_POSITIVE, 65504.0]);
        let halves = bytes_of(&[&a, &b], Numbers::Float16);
        assert_eq!(halves.len(), 8);
        assert_eq!(floats(&halves, Numbers::Float16), [1.5, -2.0, 0.0, 65504.0]);
        assert!(too_great(&[1.0, -70000.0]) && !too_great(&[65504.0, f32::INFINITY]));
    }
}
