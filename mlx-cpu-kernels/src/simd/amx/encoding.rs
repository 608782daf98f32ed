//! How packed codes become bfloat16 in tiles without a table. `asm_macros.rs` implements it.

/// 16 as bfloat16, and the four bits that count ones in it. So codes below 16 become bfloat16 that
/// are greater by 16, without a table.
pub(crate) const BF16_SIXTEEN: i16 = 0x4180;
pub(crate) const MANTISSA_NIBBLE: i16 = 0x0078;

/// The byte of an 8-bit code in sixteen bits, and the bits before a float16 that make it a
/// bfloat16. The last three bits are left out, which such codes lack. The exponent becomes three
/// bits longer, and too great by 16. Zero becomes 2, a 2^15th of what one becomes.
pub(crate) const LOW_BYTE: i16 = 0x00ff;
pub(crate) const BF16_EXPONENT_FILL: i16 = 2;

/// The offset of codes of this bit width in tiles, and the factor of their products.
pub(crate) fn code_offset_and_scale(bits: u32) -> (f32, f32) {
    if bits == 4 {
        (16.0, 1.0)
    } else {
        (0.0, 1.0 / 65_536.0)
    }
}
