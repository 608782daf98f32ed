//! Blocks whose codes of one to four bits stand for integers of a table (IQ, Q3_K, MXFP4). They are
//! unpacked, group after group, to codes of four bits: a magnitude and, in most types, a sign above
//! it. Scales have so few digits that their products with these integers are exact in `f32`.
//!
//! Blocks are those of ggml. Comments list the fields of a block in their order: `d` is a float16,
//! `q` are the codes.

use half::f16;

use super::blocks::{self, half_of, nibbles, part};
use super::grids;
use super::kinds::TableBlocks;
use super::layout::Layout;
use super::nibble_codes::NibbleCodes;

/// `2^(exponent - 127)`, for exponents below 255.
pub(super) fn power_of_two(exponent: u8) -> f32 {
    match exponent {
        0 => f32::MIN_POSITIVE / 2.0,
        _ => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// Calls `f` with the exponent and the codes of each block: `exponent, q: 32 x 4 bits`.
pub(super) fn mxfp4(data: &[u8], mut f: impl FnMut(u8, [u8; 32])) {
    for block in data.as_chunks::<17>().0 {
        f(block[0], nibbles(part::<1, 16, 17>(block)));
    }
}

/// Declares types that implement [`TableBlocks`]: name, integers, codes in a group (`none` if each
/// group has only a float16), and the function that reads blocks.
macro_rules! table_blocks {
    ($($(#[$doc:meta])* $name:ident: $codes:ident, $group:tt, $read:path;)*) => {$(
        $(#[$doc])*
        pub(super) struct $name;

        impl TableBlocks for $name {
            const LAYOUT: Layout = table_blocks!(@layout $codes, $group);
            const CODES: NibbleCodes = NibbleCodes::$codes;

            fn groups(data: &[u8], f: impl FnMut(f16, i8, &[u8])) {
                $read(data, f);
            }
        }
    )*};
    (@layout $codes:ident, none) => {
        Layout::Table {
            codes: NibbleCodes::$codes,
        }
    };
    (@layout $codes:ident, $group:literal) => {
        Layout::TableSuper {
            codes: NibbleCodes::$codes,
            group: $group,
        }
    };
}

table_blocks! {
    /// See [`iq4_nl`].
    IQ4NL: Iq4, none, iq4_nl;
    /// See [`iq4_xs`].
    IQ4XS: Iq4, 32, iq4_xs;
    /// See [`iq3_xxs`].
    IQ3XXS: Iq3Xxs, 32, iq3_xxs;
    /// See [`iq3_s`].
    IQ3S: Iq3S, 32, iq3_s;
    /// See [`iq2_xxs`].
    IQ2XXS: Iq2, 32, iq2_xxs;
    /// See [`iq2_xs`].
    IQ2XS: Iq2, 16, iq2_xs;
    /// See [`iq2_s`].
    IQ2S: Iq2, 16, iq2_s;
    /// See [`iq1_s`].
    IQ1S: Iq1, 32, iq1_s;
    /// See [`iq1_m`].
    IQ1M: Iq1, 16, iq1_m;
    /// See [`blocks::q3_k`].
    Q3K: Q3k, 16, q3_k;
}

/// See [`blocks::q3_k`].
fn q3_k(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    blocks::q3_k(data, |d, scale, codes| f(d, scale, &codes));
}

/// `d, q: 32 x 4 bits`.
fn iq4_nl(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    for block in data.as_chunks::<18>().0 {
        let d = half_of(part::<0, 2, 18>(block));
        f(d, 1, &nibbles(part::<2, 16, 18>(block)));
    }
}

/// `d, upper 2 bits of 8 scales, lower 4 bits of 8 scales, q: 256 x 4 bits`.
fn iq4_xs(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    for block in data.as_chunks::<136>().0 {
        let d = half_of(part::<0, 2, 136>(block));
        let high = u16::from_le_bytes(*part::<2, 2, 136>(block));
        let low = part::<4, 4, 136>(block);
        for (g, qs) in part::<8, 128, 136>(block)
            .as_chunks::<16>()
            .0
            .iter()
            .enumerate()
        {
            let high = (high >> (2 * g) & 3) as u8;
            let scale = (nibble(low, g) | high << 4) as i8 - 32;
            f(d, scale, &nibbles(qs));
        }
    }
}

/// Eight signs from seven bits: the eighth bit makes the number of set bits even.
fn signs_of_seven(bits: u32) -> u8 {
    let seven = (bits & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

/// Returns the eight codes that a table entry of IQ2 represents. A set bit of `signs` means a
/// negative value.
fn iq2_codes(entry: u16, signs: u8) -> [u8; 8] {
    std::array::from_fn(|i| (entry >> (2 * i) & 3) as u8 | (signs >> i & 1) << 3)
}

/// Returns the eight codes that two table entries of IQ3 represent, with their signs.
fn iq3_codes(entries: [u16; 2], signs: u8) -> [u8; 8] {
    std::array::from_fn(|i| (entries[i / 4] >> (3 * (i % 4)) & 7) as u8 | (signs >> i & 1) << 3)
}

/// Returns the eight codes that a table entry of IQ1 represents.
fn iq1_codes(entry: u16, down: bool) -> [u8; 8] {
    let entry = grids::IQ1[usize::from(entry & 2047)];
    std::array::from_fn(|i| (entry >> (2 * i) & 3) as u8 | u8::from(down) << 2)
}

/// Nibble `i` of `bytes`. The lower nibble of a byte is first.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

/// An odd scale: `2 n + 1`.
fn odd(n: u8) -> i8 {
    2 * (n & 15) as i8 + 1
}

/// Joins `N` runs of eight codes to a group.
fn group<const N: usize>(eight: impl Fn(usize) -> [u8; 8]) -> [[u8; 8]; N] {
    std::array::from_fn(eight)
}

/// `d, 8 x (4 entries of 8 bits, 4 signs of 7 bits and a scale of 4)`.
fn iq2_xxs(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    for block in data.as_chunks::<66>().0 {
        let d = half_of(part::<0, 2, 66>(block));
        for stored in part::<2, 64, 66>(block).as_chunks::<8>().0 {
            let bits = u32::from_le_bytes(*part::<4, 4, 8>(stored));
            let codes = group::<4>(|l| {
                let entry = grids::IQ2_XXS[usize::from(stored[l])];
                iq2_codes(entry, signs_of_seven(bits >> (7 * l)))
            });
            f(d, odd((bits >> 28) as u8), codes.as_flattened());
        }
    }
}

/// `d, 32 x (entry of 9 bits, signs of 7), 16 scales of 4 bits`.
fn iq2_xs(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    for block in data.as_chunks::<74>().0 {
        let d = half_of(part::<0, 2, 74>(block));
        let scales = part::<66, 8, 74>(block);
        let (entries, _) = part::<2, 64, 74>(block).as_chunks::<2>();
        for g in 0..16 {
            let codes = group::<2>(|l| {
                let q = u16::from_le_bytes(entries[2 * g + l]);
                let entry = grids::IQ2_XS[usize::from(q & 511)];
                iq2_codes(entry, signs_of_seven(u32::from(q >> 9)))
            });
            f(d, odd(nibble(scales, g)), codes.as_flattened());
        }
    }
}

/// `d, 32 x lower 8 bits of an entry, 32 x 8 signs, 32 x upper 2 bits, 16 scales of 4 bits`.
fn iq2_s(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    for block in data.as_chunks::<82>().0 {
        let d = half_of(part::<0, 2, 82>(block));
        let (low, signs) = (part::<2, 32, 82>(block), part::<34, 32, 82>(block));
        let (high, scales) = (part::<66, 8, 82>(block), part::<74, 8, 82>(block));
        for g in 0..16 {
            let codes = group::<2>(|l| {
                let i = 2 * g + l;
                let high = u16::from(high[i / 4] >> (2 * (i % 4)) & 3);
                let entry = grids::IQ2_S[usize::from(u16::from(low[i]) | high << 8)];
                iq2_codes(entry, signs[i])
            });
            f(d, odd(nibble(scales, g)), codes.as_flattened());
        }
    }
}

/// `d, 64 entries of 8 bits, 8 x (4 signs of 7 bits and a scale of 4)`.
fn iq3_xxs(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    for block in data.as_chunks::<98>().0 {
        let d = half_of(part::<0, 2, 98>(block));
        let stored = part::<2, 64, 98>(block).as_chunks::<8>().0;
        let bits = part::<66, 32, 98>(block).as_chunks::<4>().0;
        for (stored, bits) in stored.iter().zip(bits) {
            let bits = u32::from_le_bytes(*bits);
            let codes = group::<4>(|l| {
                let entry = |i: usize| grids::IQ3_XXS[usize::from(stored[i])];
                let signs = signs_of_seven(bits >> (7 * l));
                iq3_codes([entry(2 * l), entry(2 * l + 1)], signs)
            });
            f(d, odd((bits >> 28) as u8), codes.as_flattened());
        }
    }
}

/// `d, 64 x lower 8 bits of an entry, 64 x its ninth bit, 32 x 8 signs, 8 scales of 4 bits`.
fn iq3_s(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    for block in data.as_chunks::<110>().0 {
        let d = half_of(part::<0, 2, 110>(block));
        let (low, high) = (part::<2, 64, 110>(block), part::<66, 8, 110>(block));
        let (signs, scales) = (part::<74, 32, 110>(block), part::<106, 4, 110>(block));
        for g in 0..8 {
            let codes = group::<4>(|l| {
                let entry = |i: usize| {
                    let ninth = u16::from(high[i / 8] >> (i % 8) & 1);
                    grids::IQ3_S[usize::from(u16::from(low[i]) | ninth << 8)]
                };
                let i = 8 * g + 2 * l;
                iq3_codes([entry(i), entry(i + 1)], signs[4 * g + l])
            });
            f(d, odd(nibble(scales, g)), codes.as_flattened());
        }
    }
}

/// `d, 32 x lower 8 bits of an entry, 8 x (4 x upper 3 bits, scale of 3 bits, sign of the added
/// eighth)`.
fn iq1_s(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    for block in data.as_chunks::<50>().0 {
        let d = half_of(part::<0, 2, 50>(block));
        let low = part::<2, 32, 50>(block).as_chunks::<4>().0;
        let high = part::<34, 16, 50>(block).as_chunks::<2>().0;
        for (low, high) in low.iter().zip(high) {
            let high = u16::from_le_bytes(*high);
            let codes = group::<4>(|l| {
                let entry = u16::from(low[l]) | (high >> (3 * l) & 7) << 8;
                iq1_codes(entry, high >> 15 != 0)
            });
            f(d, odd((high >> 12 & 7) as u8), codes.as_flattened());
        }
    }
}

/// `32 x lower 8 bits of an entry, 32 x (upper 3 bits, sign of the added eighth), 16 scales of 3
/// bits in four words of 12`. The upper bits of these words are `d`.
fn iq1_m(data: &[u8], mut f: impl FnMut(f16, i8, &[u8])) {
    for block in data.as_chunks::<56>().0 {
        let (low, high) = (part::<0, 32, 56>(block), part::<32, 16, 56>(block));
        let (pairs, _) = part::<48, 8, 56>(block).as_chunks::<2>();
        let words: [u16; 4] = std::array::from_fn(|i| u16::from_le_bytes(pairs[i]));
        let d = (0..4).fold(0, |d, i| d | (words[i] >> 12) << (4 * i));
        for g in 0..16 {
            let codes = group::<2>(|l| {
                let high = nibble(high, 2 * g + l);
                let entry = u16::from(low[2 * g + l]) | u16::from(high & 7) << 8;
                iq1_codes(entry, high & 8 != 0)
            });
            let scale = (words[g / 4] >> (3 * (g % 4)) & 7) as u8;
            f(f16::from_bits(d), odd(scale), codes.as_flattened());
        }
    }
}
