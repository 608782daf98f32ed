//! How packed codes become bfloat16 in tiles without a table. `asm_macros.rs` implements it.

/// 16 as bfloat16, and the four bits that count ones in it: so numbers below 16 become bfloat16
/// that are greater by that, without a table.
pub(crate) const BF16_SIXTEEN: i16 = 0x4180;
pub(crate) const MANTISSA_NIBBLE: i16 = 0x0078;

/// The byte of a number of eight bits in sixteen, and what comes before a float16 that makes it a
/// bfloat16, without its last three bits, which such numbers do not have: the exponent becomes
/// three bits longer, and greater by 16 than it should be. Zero becomes 2, a 2^15th of what one
/// becomes.
pub(crate) const LOW_BYTE: i16 = 0x00ff;
pub(crate) const BF16_EXPONENT_FILL: i16 = 2;

/// What numbers of this bit width in tiles are greater than they should be, and what they are to be
/// multiplied with after.
pub(crate) fn code_offset_and_scale(bits: u32) -> (f32, f32) {
    if bits == 4 {
        (16.0, 1.0)
    } else {
        (0.0, 1.0 / 65_536.0)
    }
}
