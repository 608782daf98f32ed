//! What packed numbers are in tiles: `assembly.rs` makes them.

/// 16 and 256 as bfloat16, and the four bits that count ones in the first and sixteens in the other: so numbers below 16 become
/// bfloat16 that are greater by that, without a table.
pub(super) const BASES: [i16; 2] = [0x4180, 0x4380];
pub(super) const COUNTING: i16 = 0x0078;

/// What numbers of so many bits in tiles are greater than they should be.
pub(super) fn excess(bits: u32) -> f32 {
    if bits == 4 { 16.0 } else { 16.0 + 256.0 }
}
