//! Conversion of packed codes to bfloat16 in tiles without a table. `asm_macros.rs` implements it.

/// The bfloat16 of 16, in which the mantissa's upper four bits count ones. So codes below 16 become
/// bfloat16 with an offset of 16, without a table.
pub(crate) const BF16_SIXTEEN: i16 = 0x4180;
pub(crate) const MANTISSA_NIBBLE: i16 = 0x0078;

/// The mask of an 8-bit code in 16 bits, and the bits that turn a float16 into a bfloat16. The last
/// three mantissa bits are dropped; such codes do not use them. The exponent gets three more bits,
/// and an offset of 16. Zero becomes 2, a 2^15th of what one becomes.
pub(crate) const LOW_BYTE: i16 = 0x00ff;
pub(crate) const BF16_EXPONENT_FILL: i16 = 2;

/// The offset of codes with this bit width in tiles, and the factor of their products.
pub(crate) fn code_offset_and_scale(bits: u32) -> (f32, f32) {
    if bits == 4 {
        (16.0, 1.0)
    } else {
        (0.0, 1.0 / 65_536.0)
    }
}
