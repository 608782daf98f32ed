//! The types in which KV caches store elements, and the conversions from and to float32. Sums are
//! always float32. `kv_packing.rs` has the packed types.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use crate::attention::kv_packing::{KvPacking, scratch};
use crate::isa::Isa;
use crate::simd::vmath;

/// The element type of keys and values in a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KvType {
    /// float32.
    #[default]
    Float32,
    /// float16. Values beyond its range become its greatest value, 65,504, with their sign.
    Float16,
    /// Codes of a few bits, with a scale and a bias for each group of a head's elements.
    Packed(KvPacking),
}

impl KvType {
    /// The number of bytes of a stored item: an element, or a 32-bit word of a packed head.
    /// ```
    /// assert_eq!(mlx_cpu_kernels::KvType::Float16.size(), 2);
    /// ```
    pub const fn size(self) -> usize {
        match self {
            Self::Float32 | Self::Packed(_) => 4,
            Self::Float16 => 2,
        }
    }

    /// The number of stored items of a head with `d` elements: `d`, or the words of a packed head.
    /// ```
    /// use mlx_cpu_kernels::{KvPacking, KvType};
    /// assert_eq!(KvType::Float16.row(64), 64);
    /// // 64 bytes, a scale and a bias.
    /// let packing = KvPacking::new(8, 64).ok_or("no such packing")?;
    /// assert_eq!(KvType::Packed(packing).row(64), 18);
    /// # Ok::<(), &str>(())
    /// ```
    pub const fn row(self, d: usize) -> usize {
        match self {
            Self::Float32 | Self::Float16 => d,
            Self::Packed(packing) => packing.words(d),
        }
    }
}

/// A stored item of a cache.
pub(crate) trait KvElement: Copy + Send + Sync + 'static {
    /// Whether a cache of this type stores such items.
    fn stores(kv_type: KvType) -> bool;

    /// Fills `to`, a head with `d` elements. `compute` writes it as float32.
    fn fill(kv_type: KvType, to: &mut [Self], d: usize, compute: impl FnOnce(&mut [f32]));
}

impl KvElement for f32 {
    fn stores(kv_type: KvType) -> bool {
        kv_type == KvType::Float32
    }

    fn fill(_: KvType, to: &mut [Self], _: usize, compute: impl FnOnce(&mut [f32])) {
        compute(to);
    }
}

/// Words of a packed head.
impl KvElement for u32 {
    fn stores(kv_type: KvType) -> bool {
        matches!(kv_type, KvType::Packed(_))
    }

    fn fill(kv_type: KvType, to: &mut [Self], d: usize, compute: impl FnOnce(&mut [f32])) {
        let KvType::Packed(packing) = kv_type else {
            unreachable!("only packed caches have words");
        };
        with_head(d, |head| {
            compute(head);
            packing.pack(head, to);
        });
    }
}

/// Calls `run` with scratch memory for a head of `d` elements.
fn with_head(d: usize, run: impl FnOnce(&mut [f32])) {
    /// The number of elements of usual heads. They need no heap memory.
    const USUAL: usize = 256;
    let mut stack = [0.0; USUAL];
    match stack.get_mut(..d) {
        Some(head) => run(head),
        None => run(scratch(&mut Vec::new(), d)),
    }
}

/// The bits of float16.
impl KvElement for u16 {
    fn stores(kv_type: KvType) -> bool {
        kv_type == KvType::Float16
    }

    fn fill(_: KvType, to: &mut [Self], d: usize, compute: impl FnOnce(&mut [f32])) {
        with_head(d, |head| {
            compute(head);
            round(head, to);
        });
    }
}

/// Writes the bits of the nearest float16 of each element, which is never infinite. It clamps the
/// elements in place.
///
/// # Panics
/// If the lengths differ.
fn round(head: &mut [f32], to: &mut [u16]) {
    let most = f32::from(f16::MAX);
    for value in head.iter_mut() {
        *value = value.clamp(-most, most);
    }
    to.reinterpret_cast_mut::<f16>()
        .convert_from_f32_slice(head);
}

/// Converts `n` rows of `d` float16 at a stride of `step` elements to adjacent rows of float32.
pub(crate) fn widen<'s>(
    isa: Isa,
    (from, step): (&[u16], usize),
    (n, d): (usize, usize),
    to: &'s mut Vec<f32>,
) -> &'s [f32] {
    let to = scratch(to, n * d);
    if step == d {
        vmath::f16_to_f32(isa, &from[..n * d], to);
    } else {
        for (i, row) in to.chunks_exact_mut(d).enumerate() {
            vmath::f16_to_f32(isa, &from[i * step..][..d], row);
        }
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::with_each;

    #[test]
    fn float16_is_never_infinite() {
        let of = |value: f32| {
            let mut bits = [0; 9];
            round(&mut [value; 9], &mut bits);
            assert!(bits.iter().all(|b| *b == bits[0]));
            f16::from_bits(bits[0]).to_f32()
        };
        assert_eq!(
            [of(1e6), of(-7e4), of(65_519.9)],
            [65_504.0, -65_504.0, 65_504.0]
        );
        assert_eq!([of(0.1), of(-0.0)], [0.099_975_586, 0.0]);
        assert_eq!(of(f32::NEG_INFINITY), -65_504.0);
        assert!(of(f32::NAN).is_nan());
    }

    #[test]
    fn heads_of_any_size_are_rounded_and_widened_alike() {
        for d in [1, 16, 80, 300] {
            let values: Vec<f32> = (0..3 * d).map(|i| i as f32 * 0.37 - 40.0).collect();
            let mut bits = vec![0u16; 3 * d];
            for (to, from) in bits.chunks_exact_mut(d).zip(values.chunks_exact(d)) {
                u16::fill(KvType::Float16, to, d, |head| head.copy_from_slice(from));
            }
            let wanted: Vec<f32> = (values.iter())
                .map(|v| f16::from_f32(*v).to_f32())
                .collect();
            with_each(|isa| {
                let mut scratch = Vec::new();
                assert_eq!(
                    widen(isa, (&bits, d), (3, d), &mut scratch),
                    wanted,
                    "{isa:?}"
                );
                let apart = widen(isa, (&bits, 2 * d), (2, d), &mut scratch);
                let rows = [&wanted[..d], &wanted[2 * d..]].concat();
                assert_eq!(apart, rows, "{isa:?}");
            });
        }
    }
}
