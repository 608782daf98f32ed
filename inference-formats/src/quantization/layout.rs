//! Layouts of packed matrices in memory, as kernels read them. `coding.rs` writes them from blocks.

use std::fmt;

use super::nibble_codes::NibbleCodes;

/// Number of weights that share a scale. It differs for [`Layout::SuperScaled`] (16),
/// [`Layout::SuperAffine`] and [`Layout::TableSuper`] (16 or 32).
pub const GROUP: usize = 32;

/// The layout in memory of a type's matrices. Codes have MLX's packing: code `i` of a row is at bit
/// `i * bits` of a little-endian stream of 32-bit words.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Floats without scales. Types with this layout are decoded.
    Floats,
    /// `w = scale * q + bias`, with a scale and a bias for each [`GROUP`]: MLX's affine form. An
    /// engine chooses the type of scales and biases.
    Affine {
        /// Bits of a code.
        bits: u32,
    },
    /// `w = scale * (q - zero)`, with a float16 scale for each [`GROUP`]. `zero` is the middle
    /// code: 1 for 2 bits, otherwise half of the number of codes.
    Symmetric {
        /// Bits of a code.
        bits: u32,
    },
    /// `w = d * scale * q - m * minimum`. `scale` and `minimum` are bytes, one each per group. `d`
    /// and `m` are float16, one each per 8 groups.
    SuperAffine {
        /// Bits of a code.
        bits: u32,
        /// Number of weights that share the two bytes: 16 or 32.
        group: usize,
    },
    /// `w = d * scale * (q - 32)` with codes of 6 bits. `scale` is a signed byte, one for each 16
    /// weights. `d` is a float16, one for each 256 weights.
    SuperScaled,
    /// 4-bit floats (E2M1), scaled by a power of two for each [`GROUP`]. A byte stores the exponent
    /// plus 127. MLX calls this format `mxfp4`.
    Powers,
    /// 4-bit codes that index a table of integers, with a float16 scale for each [`GROUP`].
    Table {
        /// The integers.
        codes: NibbleCodes,
    },
    /// 4-bit codes that index a table of integers. A group's scale is a signed byte times a float16
    /// that 256 weights share.
    TableSuper {
        /// The integers.
        codes: NibbleCodes,
        /// Number of weights that share the signed byte: 16 or 32.
        group: usize,
    },
}

/// The type of a part's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartType {
    /// Words of packed codes.
    U32,
    /// Exponents.
    U8,
    /// Scales and minima.
    I8,
    /// IEEE half precision.
    F16,
}

impl PartType {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            Self::U32 => 4,
            Self::U8 | Self::I8 => 1,
            Self::F16 => 2,
        }
    }
}

/// One array of a packed matrix. It has one row per row of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The type of its elements.
    pub kind: PartType,
    /// The number of elements for 256 weights.
    per_256: usize,
}

impl Part {
    const fn new(kind: PartType, per_256: usize) -> Self {
        Self { kind, per_256 }
    }

    /// Number of elements for `weights` weights. `weights` must be a multiple of the group.
    pub const fn elements(self, weights: usize) -> usize {
        // Divides first, because multiplying all weights first could overflow.
        weights / 256 * self.per_256 + weights % 256 * self.per_256 / 256
    }

    /// The number of bytes for `weights` weights.
    pub const fn bytes(self, weights: usize) -> usize {
        self.elements(weights).saturating_mul(self.kind.size())
    }
}

impl Layout {
    /// The arrays of a packed matrix, in order: codes, scales, scales of scales. Empty for
    /// [`Self::Floats`] and [`Self::Affine`], for which the engine chooses the types.
    pub fn parts(self) -> Vec<Part> {
        let words = |bits: u32| Part::new(PartType::U32, 8 * bits as usize);
        match self {
            Self::Floats | Self::Affine { .. } => Vec::new(),
            Self::Symmetric { bits } => vec![words(bits), Part::new(PartType::F16, 8)],
            Self::SuperAffine { bits, group } => {
                let groups = 256 / group.max(1);
                vec![
                    words(bits),
                    Part::new(PartType::I8, 2 * groups),
                    Part::new(PartType::F16, groups / 4),
                ]
            }
            Self::SuperScaled => vec![
                words(6),
                Part::new(PartType::I8, 16),
                Part::new(PartType::F16, 1),
            ],
            Self::Powers => vec![words(4), Part::new(PartType::U8, 8)],
            Self::Table { .. } => vec![words(4), Part::new(PartType::F16, 8)],
            Self::TableSuper { group, .. } => vec![
                words(4),
                Part::new(PartType::I8, 256 / group.max(1)),
                Part::new(PartType::F16, 1),
            ],
        }
    }

    /// The number of bytes for `weights` weights in all [parts](Self::parts).
    pub fn bytes(self, weights: u64) -> u64 {
        let parts = self.parts();
        let per_256: usize = parts.iter().map(|part| part.bytes(256)).sum();
        weights.saturating_mul(per_256 as u64) / 256
    }

    /// Bits per code, if MLX's affine form with groups of [`GROUP`] can represent equal values.
    pub const fn affine_bits(self) -> Option<u32> {
        match self {
            Self::Affine { bits }
            | Self::Symmetric { bits }
            | Self::SuperAffine { bits, group: GROUP } => Some(bits),
            _ => None,
        }
    }

    /// Whether scales and biases in the affine form are products, which need more than 16 bits.
    pub const fn has_product_scales(self) -> bool {
        matches!(self, Self::SuperAffine { .. })
    }
}

/// Why blocks were not packed.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misfit {
    /// The type's layout has no parts.
    Layout,
    /// The data is not a whole number of blocks, or a part has the wrong length.
    Size,
    /// The exponent of a scale is 255, which means NaN.
    Scale,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Layout => "is of a type that is not packed",
            Self::Size => "has rows that are not a whole number of blocks",
            Self::Scale => "has a scale that is not a number (exponent 255)",
        })
    }
}

impl std::error::Error for Misfit {}
