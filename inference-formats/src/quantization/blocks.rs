//! Block types whose codes are integers. The functions convert bytes to integer codes with a scale
//! and a bias. Comments list the fields of a block in order: `d`, `m` and `dmin` are float16, and
//! `q` are the codes.
//!
//! The product of a float16 scale and a small integer is exact in float32. Therefore the operations
//! here give bit-identical results to the reference.

use half::f16;

use super::kinds::{AffineBlocks, SuperAffineBlocks, SymmetricBlocks};
use super::layout::GROUP;

fn half(bytes: &[u8; 2]) -> f32 {
    half_of(bytes).to_f32()
}

pub(super) fn half_of(bytes: &[u8; 2]) -> f16 {
    f16::from_le_bytes(*bytes)
}

/// The bytes of a block at a fixed position.
pub(super) fn part<const AT: usize, const LEN: usize, const N: usize>(
    block: &[u8; N],
) -> &[u8; LEN] {
    const {
        assert!(AT + LEN <= N, "the part lies in the block");
    }
    // The assertion above makes this branch unreachable.
    block
        .get(AT..AT + LEN)
        .and_then(|p| p.try_into().ok())
        .unwrap_or(&[0; LEN])
}

/// `d, q: 128 x 1 bit`. A set bit means plus; the first weight is in the lowest bit of a byte.
pub(super) struct Q1_0;

impl SymmetricBlocks for Q1_0 {
    /// The codes are those of the ternary types. Code 1, which means zero, does not occur.
    const BITS: u32 = 2;

    fn groups(data: &[u8], mut f: impl FnMut(&[u8; GROUP], f16)) {
        for block in data.as_chunks::<18>().0 {
            let d = half_of(part::<0, 2, 18>(block));
            for bytes in part::<2, 16, 18>(block).as_chunks::<4>().0 {
                let signs = u32::from_le_bytes(*bytes);
                f(&std::array::from_fn(|i| 2 * (signs >> i & 1) as u8), d);
            }
        }
    }
}

/// `d, q: 32 x 4 bits`.
pub(super) struct Q4_0;

impl SymmetricBlocks for Q4_0 {
    const BITS: u32 = 4;

    fn groups(data: &[u8], mut f: impl FnMut(&[u8; GROUP], f16)) {
        for block in data.as_chunks::<18>().0 {
            let d = half_of(part::<0, 2, 18>(block));
            f(&nibbles(part::<2, 16, 18>(block)), d);
        }
    }
}

/// `d, m, q: 32 x 4 bits`.
pub(super) struct Q4_1;

impl AffineBlocks for Q4_1 {
    const BITS: u32 = 4;

    fn groups(data: &[u8], mut f: impl FnMut(&[u8; GROUP], f32, f32)) {
        for block in data.as_chunks::<20>().0 {
            let (d, m) = (half(part::<0, 2, 20>(block)), half(part::<2, 2, 20>(block)));
            f(&nibbles(part::<4, 16, 20>(block)), d, m);
        }
    }
}

/// `d, fifth bits: 32, q: 32 x 4 bits`.
pub(super) struct Q5_0;

impl SymmetricBlocks for Q5_0 {
    const BITS: u32 = 5;

    fn groups(data: &[u8], mut f: impl FnMut(&[u8; GROUP], f16)) {
        for block in data.as_chunks::<22>().0 {
            let d = half_of(part::<0, 2, 22>(block));
            let high = u32::from_le_bytes(*part::<2, 4, 22>(block));
            f(&five_bits(part::<6, 16, 22>(block), high), d);
        }
    }
}

/// `d, m, fifth bits: 32, q: 32 x 4 bits`.
pub(super) struct Q5_1;

impl AffineBlocks for Q5_1 {
    const BITS: u32 = 5;

    fn groups(data: &[u8], mut f: impl FnMut(&[u8; GROUP], f32, f32)) {
        for block in data.as_chunks::<24>().0 {
            let (d, m) = (half(part::<0, 2, 24>(block)), half(part::<2, 2, 24>(block)));
            let high = u32::from_le_bytes(*part::<4, 4, 24>(block));
            f(&five_bits(part::<8, 16, 24>(block), high), d, m);
        }
    }
}

/// `d, q: 32 signed bytes`.
pub(super) struct Q8_0;

impl SymmetricBlocks for Q8_0 {
    const BITS: u32 = 8;

    fn groups(data: &[u8], mut f: impl FnMut(&[u8; GROUP], f16)) {
        for block in data.as_chunks::<34>().0 {
            let d = half_of(part::<0, 2, 34>(block));
            // Converts signed -128..=127 to unsigned 0..=255.
            f(&part::<2, 32, 34>(block).map(|b| b ^ 0x80), d);
        }
    }
}

/// `240 ternary digits, five per byte; 16 digits, four per byte; d`. See [`ternary`].
pub(super) struct TQ1_0;

impl SymmetricBlocks for TQ1_0 {
    const BITS: u32 = 2;

    fn groups(data: &[u8], mut f: impl FnMut(&[u8; GROUP], f16)) {
        for block in data.as_chunks::<54>().0 {
            let d = half_of(part::<52, 2, 54>(block));
            for q in ternary(part::<0, 52, 54>(block)).as_chunks::<GROUP>().0 {
                f(q, d);
            }
        }
    }
}

/// `q: 256 x 2 bits, d`. Each 32 bytes contain four groups: group `g` has bits `2g` and `2g + 1` of
/// each byte.
pub(super) struct TQ2_0;

impl SymmetricBlocks for TQ2_0 {
    const BITS: u32 = 2;

    fn groups(data: &[u8], mut f: impl FnMut(&[u8; GROUP], f16)) {
        for block in data.as_chunks::<66>().0 {
            let d = half_of(part::<64, 2, 66>(block));
            for bytes in part::<0, 64, 66>(block).as_chunks::<GROUP>().0 {
                for shift in [0, 2, 4, 6] {
                    f(&bytes.map(|byte| byte >> shift & 3), d);
                }
            }
        }
    }
}

/// `d, dmin, scales and minima: 16 x 6 bits, q: 256 x 4 bits`.
pub(super) struct Q4K;

impl SuperAffineBlocks for Q4K {
    const BITS: u32 = 4;

    fn blocks(data: &[u8], mut f: impl FnMut(&[u8; 16], [[u8; GROUP]; 8])) {
        for block in data.as_chunks::<144>().0 {
            let qs = part::<16, 128, 144>(block);
            let groups = std::array::from_fn(|g| k_nibbles(qs, g));
            f(part::<0, 16, 144>(block), groups);
        }
    }
}

/// `d, dmin, scales and minima: 16 x 6 bits, fifth bits: 256, q: 256 x 4 bits`.
pub(super) struct Q5K;

impl SuperAffineBlocks for Q5K {
    const BITS: u32 = 5;

    fn blocks(data: &[u8], mut f: impl FnMut(&[u8; 16], [[u8; GROUP]; 8])) {
        for block in data.as_chunks::<176>().0 {
            let high = part::<16, 32, 176>(block);
            let qs = part::<48, 128, 176>(block);
            let groups = std::array::from_fn(|g| {
                let mut q = k_nibbles(qs, g);
                for (q, high) in q.iter_mut().zip(high) {
                    *q |= (high >> g & 1) << 4;
                }
                q
            });
            f(part::<0, 16, 176>(block), groups);
        }
    }
}

/// Elements 0..16 are the low nibbles, elements 16..32 the high ones.
pub(super) fn nibbles(qs: &[u8; 16]) -> [u8; GROUP] {
    let mut q = [0; GROUP];
    let (low, high) = q.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(qs) {
        *low = byte & 15;
        *high = byte >> 4;
    }
    q
}

/// Like [`nibbles`], with bit `i` of `high` as the fifth bit of element `i`.
fn five_bits(qs: &[u8; 16], high: u32) -> [u8; GROUP] {
    let mut q = nibbles(qs);
    for (i, q) in q.iter_mut().enumerate() {
        *q |= ((high >> i & 1) as u8) << 4;
    }
    q
}

/// The ternary digits (0 to 2) of a `TQ1_0` block: 48 bytes with five digits each, and 4 bytes with
/// four. A byte is a fraction of 256, written in base 3. Each multiplication by three moves the
/// next digit into the integer part.
fn ternary(bytes: &[u8; 52]) -> [u8; 256] {
    let number = |byte: u8, n: usize| {
        let rest = (0..n).fold(byte, |rest, _| rest.wrapping_mul(3));
        ((u16::from(rest) * 3) >> 8) as u8
    };
    std::array::from_fn(|i| match i {
        0..160 => number(bytes[i % 32], i / 32),
        160..240 => number(bytes[32 + i % 16], (i - 160) / 16),
        _ => number(bytes[48 + i % 4], (i - 240) / 4),
    })
}

/// The codes of group `g` (0..8) of a K block. Two groups share 32 bytes: the even group has the
/// low nibbles, the odd group the high ones.
fn k_nibbles(qs: &[u8; 128], g: usize) -> [u8; GROUP] {
    let (pairs, _) = qs.as_chunks::<GROUP>();
    let bytes = pairs.get(g / 2).copied().unwrap_or([0; GROUP]);
    let shift = 4 * (g % 2);
    bytes.map(|b| b >> shift & 15)
}

/// The 6-bit scales and minima of the 8 groups of a `Q4_K` or `Q5_K` block, from its first 16
/// bytes: `d`, `dmin`, scales and minima. The upper bits of groups 4..8 are in the bytes of groups
/// 0..4.
pub(super) fn k_scales(start: &[u8; 16]) -> [(u8, u8); 8] {
    let s = part::<4, 12, 16>(start);
    std::array::from_fn(|g| {
        if g < 4 {
            (s[g] & 63, s[g + 4] & 63)
        } else {
            (
                s[g + 4] & 15 | s[g - 4] >> 6 << 4,
                s[g + 4] >> 4 | s[g] >> 6 << 4,
            )
        }
    })
}

/// Calls `f` with the index of each group (0..16) and its position. The position is the half of the
/// block (0..2), the quarter of that half (0..4), and the first element in the quarter (0 or 16).
fn groups_of_16(mut f: impl FnMut(usize, usize, usize, usize)) {
    for group in 0..16 {
        f(group, group / 8, group / 2 % 4, group % 2 * 16);
    }
}

/// Calls `f` with `d` and `dmin`, the scale, the minimum and the codes of each group of 16. A block
/// is `scale and minimum: 16 x 4+4 bits, q: 256 x 2 bits, d, dmin`.
pub(super) fn q2_k(data: &[u8], mut f: impl FnMut([f16; 2], u8, u8, [u8; 16])) {
    for block in data.as_chunks::<84>().0 {
        let scales = part::<0, 16, 84>(block);
        let qs = part::<16, 64, 84>(block);
        let halves = [
            half_of(part::<80, 2, 84>(block)),
            half_of(part::<82, 2, 84>(block)),
        ];
        groups_of_16(|g, n, quarter, first| {
            let code = |l: usize| qs[32 * n + first + l] >> (2 * quarter) & 3;
            f(
                halves,
                scales[g] & 15,
                scales[g] >> 4,
                std::array::from_fn(code),
            );
        });
    }
}

/// Calls `f` with `d`, the scale and the codes of each group of 16. Codes are 0..8, and 4 means
/// zero. A block is `high bits: 256, q: 256 x 2 bits, scales: 16 x 6 bits, d`.
pub(super) fn q3_k(data: &[u8], mut f: impl FnMut(f16, i8, [u8; 16])) {
    for block in data.as_chunks::<110>().0 {
        let high = part::<0, 32, 110>(block);
        let qs = part::<32, 64, 110>(block);
        let s = part::<96, 12, 110>(block);
        let d = half_of(part::<108, 2, 110>(block));
        groups_of_16(|g, n, quarter, first| {
            let q = std::array::from_fn(|l| {
                let low = qs[32 * n + first + l] >> (2 * quarter) & 3;
                low | (high[first + l] >> (4 * n + quarter) & 1) << 2
            });
            let low = if g < 8 { s[g] & 15 } else { s[g - 8] >> 4 };
            let upper = s[8 + g % 4] >> (2 * (g / 4)) & 3;
            f(d, (low | upper << 4) as i8 - 32, q);
        });
    }
}

/// Calls `f` with `d`, the scale and the codes of each group of 16. Codes are 0..64, and 32 means
/// zero. A block is `q low: 256 x 4 bits, q high: 256 x 2 bits, scales: 16 signed bytes, d`.
pub(super) fn q6_k(data: &[u8], mut f: impl FnMut(f16, i8, [u8; 16])) {
    for block in data.as_chunks::<210>().0 {
        let low = part::<0, 128, 210>(block);
        let high = part::<128, 64, 210>(block);
        let scales = part::<192, 16, 210>(block);
        let d = f16::from_le_bytes(*part::<208, 2, 210>(block));
        groups_of_16(|g, n, quarter, first| {
            let q = std::array::from_fn(|l| {
                let l = first + l;
                let nibble = low[64 * n + 32 * (quarter % 2) + l] >> (4 * (quarter / 2)) & 15;
                let upper = high[32 * n + l] >> (2 * quarter) & 3;
                nibble | upper << 4
            });
            f(d, scales[g] as i8, q);
        });
    }
}
