//! Converts packed codes to bfloat16 in tiles without a table. `asm_macros.rs` has the
//! instructions.

/// The bfloat16 of 16. There, a unit of the mantissa's upper four bits is worth 1. So a 4-bit code
/// in these bits becomes the bfloat16 of the code plus 16, without a table.
pub(crate) const BF16_SIXTEEN: i16 = 0x4180;
pub(crate) const MANTISSA_NIBBLE: i16 = 0x0078;

/// The mask of an 8-bit code in 16 bits, and the bits that turn a float16 into a bfloat16. The last
/// three mantissa bits are dropped, because such codes do not use them. The exponent becomes three
/// bits wider and gets an offset of 16. Zero becomes 2, which is 2^-15 times the encoding of one.
pub(crate) const LOW_BYTE: i16 = 0x00ff;
pub(crate) const BF16_EXPONENT_FILL: i16 = 2;

/// The offset that codes of this bit width have in tiles, and the factor of their products.
pub(crate) fn code_offset_and_scale(bits: u32) -> (f32, f32) {
    if bits == 4 {
        (16.0, 1.0)
    } else {
        (0.0, 1.0 / 65_536.0)
    }
}
