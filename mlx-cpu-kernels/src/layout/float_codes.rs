//! Quantized codes that are not plain integers: 4- or 8-bit floats (OCP Microscaling Formats 1.0;
//! NVFP4), and indices into tables of GGUF's types (`table.rs`). One lookup maps most of these
//! codes to integers, so the integer kernels can multiply them.

use crate::layout::table::Table;

/// E2M1 codes as non-negative integers. Each integer is twice the code's value plus [`FP4_OFFSET`].
pub(crate) const FP4_CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// The integer in [`FP4_CODES`] that represents zero.
const FP4_OFFSET: f32 = 12.0;

/// The factor from integers of [`FP4_CODES`] to values, in addition to the group's scale.
pub(crate) const FP4_SCALE: f32 = 0.5;

/// The bias that removes [`FP4_OFFSET`], in units of the group's scale.
pub(crate) const FP4_BIAS: f32 = -FP4_OFFSET * FP4_SCALE;

/// The kinds of codes, by the values that they represent before scales and biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codes {
    /// The code itself is the value.
    Integers,
    /// 4-bit floats (E2M1), mapped to integers by [`FP4_CODES`].
    E2m1,
    /// 8-bit floats (E4M3).
    E4m3,
    /// Indices into a table of integers. There are no biases.
    Table(Table),
}

impl Codes {
    /// The variants as constants for generic functions.
    pub(crate) const INTEGERS_ID: u32 = 0;
    pub(crate) const E2M1_ID: u32 = 1;
    pub(crate) const E4M3_ID: u32 = 2;
    pub(crate) const TABLE_ID: u32 = 3;

    /// The value that a code represents.
    #[inline(always)]
    pub(crate) fn number(self, code: u32) -> f32 {
        match self {
            Self::Integers => number::<{ Self::INTEGERS_ID }>(code),
            Self::E2m1 => number::<{ Self::E2M1_ID }>(code),
            Self::E4m3 => number::<{ Self::E4M3_ID }>(code),
            Self::Table(table) => f32::from(table.integers()[code as usize & 15]),
        }
    }
}

/// [`Codes::number`], with the kind of codes as a constant.
#[inline(always)]
pub(crate) fn number<const CODES: u32>(code: u32) -> f32 {
    match CODES {
        Codes::E2M1_ID => f32::from(FP4_CODES[code as usize & 15]),
        Codes::E4M3_ID => E4M3[code as usize & 255],
        // Conversion to float is faster from a signed integer than from an unsigned one.
        _ => code.cast_signed() as f32,
    }
}

/// The values of all 256 E4M3 bytes.
static E4M3: [f32; 256] = {
    let mut numbers = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        numbers[byte] = e4m3(byte as u8);
        byte += 1;
    }
    numbers
};

/// The type of a group's scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByteScales {
    /// A power of two.
    E8m0,
    /// A float with 4 exponent bits and 3 mantissa bits.
    E4m3,
}

impl ByteScales {
    /// The scale that a byte represents.
    pub(crate) fn decode(self, byte: u8) -> f32 {
        match self {
            Self::E8m0 => e8m0(byte),
            Self::E4m3 => e4m3(byte),
        }
    }
}

/// `2^(byte - 127)`. Byte 255, which is NaN in the format, gives infinity.
pub(crate) fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::MIN_POSITIVE / 2.0,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// The factor from float16 to E4M3: E4M3 exponents have a bias that is smaller by eight.
pub(crate) const E4M3_OVER_F16: f32 = 256.0;

/// Decodes a float with 4 exponent bits and 3 mantissa bits. As in MLX, NaN codes are read as 480.
pub(crate) const fn e4m3(byte: u8) -> f32 {
    let sign = (byte as u16 & 0x80) << 8;
    let half = half::f16::from_bits(sign | (byte as u16 & 0x7f) << 7);
    half.to_f32_const() * E4M3_OVER_F16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_numbers_of_the_formats() {
        let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (i, code) in FP4_CODES.iter().enumerate() {
            let sign = if i < 8 { 1.0 } else { -1.0 };
            let number = f32::from(*code) * FP4_SCALE + FP4_BIAS;
            assert_eq!(number, sign * e2m1[i % 8]);
        }
        for byte in 0..=255u8 {
            let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
            let sign = if byte < 128 { 1.0 } else { -1.0 };
            let number = match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            assert_eq!(f64::from(e4m3(byte)), sign * number);
            assert_eq!(Codes::E4m3.number(byte.into()), e4m3(byte));
            if byte < 255 {
                assert_eq!(f64::from(e8m0(byte)), 2f64.powi(i32::from(byte) - 127));
            }
        }
    }
}
