//! The element types of GGUF tensors: numbers, names and block sizes.

/// How a GGUF tensor's elements are stored.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GgmlType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an `f32`.
    BF16,
    /// IEEE double precision.
    F64,
    /// Signed, 8 bits.
    I8,
    /// Signed, 16 bits.
    I16,
    /// Signed, 32 bits.
    I32,
    /// Signed, 64 bits.
    I64,
    /// 32 weights: 4 bits, a scale.
    Q4_0,
    /// 32 weights: 4 bits, a scale and a minimum.
    Q4_1,
    /// 32 weights: 5 bits, a scale.
    Q5_0,
    /// 32 weights: 5 bits, a scale and a minimum.
    Q5_1,
    /// 32 weights: 8 bits, a scale.
    Q8_0,
    /// 256 weights: 2 bits in groups of 16.
    Q2K,
    /// 256 weights: 3 bits in groups of 16.
    Q3K,
    /// 256 weights: 4 bits in groups of 32.
    Q4K,
    /// 256 weights: 5 bits in groups of 32.
    Q5K,
    /// 256 weights: 6 bits in groups of 16.
    Q6K,
    /// 256 weights: an 8-bit index into a table for every 8.
    IQ2XXS,
    /// 256 weights: a 9-bit index into a table for every 8.
    IQ2XS,
    /// 256 weights: a 10-bit index into a table for every 8.
    IQ2S,
    /// 256 weights: an 8-bit index into a table for every 4.
    IQ3XXS,
    /// 256 weights: a 9-bit index into a table for every 4.
    IQ3S,
    /// 256 weights: an 11-bit index into a table for every 8, in groups of 32.
    IQ1S,
    /// 256 weights: an 11-bit index into a table for every 8, in groups of 16.
    IQ1M,
    /// 32 weights: 4 bits that index a table of integers, and a scale.
    IQ4NL,
    /// 256 weights: 4 bits as in `IQ4_NL`, in groups of 32.
    IQ4XS,
    /// 256 weights: -1, 0 or 1, five to a byte, a scale.
    TQ1_0,
    /// 256 weights: -1, 0 or 1 in 2 bits, a scale.
    TQ2_0,
    /// 32 weights: floats of 4 bits, and a scale that is a power of two.
    MXFP4,
    /// A type that this crate does not decode, by its number.
    Other(u32),
}

/// Types that are decoded: number, type, name, weights in a block, bytes of a block.
const KNOWN: [(u32, GgmlType, &str, usize, usize); 30] = [
    (0, GgmlType::F32, "F32", 1, 4),
    (1, GgmlType::F16, "F16", 1, 2),
    (2, GgmlType::Q4_0, "Q4_0", 32, 18),
    (3, GgmlType::Q4_1, "Q4_1", 32, 20),
    (6, GgmlType::Q5_0, "Q5_0", 32, 22),
    (7, GgmlType::Q5_1, "Q5_1", 32, 24),
    (8, GgmlType::Q8_0, "Q8_0", 32, 34),
    (10, GgmlType::Q2K, "Q2_K", 256, 84),
    (11, GgmlType::Q3K, "Q3_K", 256, 110),
    (12, GgmlType::Q4K, "Q4_K", 256, 144),
    (13, GgmlType::Q5K, "Q5_K", 256, 176),
    (14, GgmlType::Q6K, "Q6_K", 256, 210),
    (16, GgmlType::IQ2XXS, "IQ2_XXS", 256, 66),
    (17, GgmlType::IQ2XS, "IQ2_XS", 256, 74),
    (18, GgmlType::IQ3XXS, "IQ3_XXS", 256, 98),
    (19, GgmlType::IQ1S, "IQ1_S", 256, 50),
    (20, GgmlType::IQ4NL, "IQ4_NL", 32, 18),
    (21, GgmlType::IQ3S, "IQ3_S", 256, 110),
    (22, GgmlType::IQ2S, "IQ2_S", 256, 82),
    (23, GgmlType::IQ4XS, "IQ4_XS", 256, 136),
    (24, GgmlType::I8, "I8", 1, 1),
    (25, GgmlType::I16, "I16", 1, 2),
    (26, GgmlType::I32, "I32", 1, 4),
    (27, GgmlType::I64, "I64", 1, 8),
    (28, GgmlType::F64, "F64", 1, 8),
    (29, GgmlType::IQ1M, "IQ1_M", 256, 56),
    (30, GgmlType::BF16, "BF16", 1, 2),
    (34, GgmlType::TQ1_0, "TQ1_0", 256, 54),
    (35, GgmlType::TQ2_0, "TQ2_0", 256, 66),
    (39, GgmlType::MXFP4, "MXFP4", 32, 17),
];

/// Types of which only the name is known: number and name (`ggml_type` in ggml).
const NAMED: [(u32, &str); 3] = [(9, "Q8_1"), (15, "Q8_K"), (40, "NVFP4")];

impl GgmlType {
    /// The type with the number `id` in files.
    pub(super) fn from_id(id: u32) -> Self {
        KNOWN
            .iter()
            .find(|k| k.0 == id)
            .map_or(Self::Other(id), |k| k.1)
    }

    /// The type's number in files.
    pub(super) fn id(self) -> u32 {
        match self {
            Self::Other(id) => id,
            known => KNOWN
                .iter()
                .find(|k| k.1 == known)
                .map_or(u32::MAX, |k| k.0),
        }
    }

    /// Weights per block, and bytes per block. A type without blocks has one weight per block.
    /// `None` for [`Self::Other`].
    pub fn block(self) -> Option<(usize, usize)> {
        KNOWN.iter().find(|k| k.1 == self).map(|k| (k.3, k.4))
    }

    /// The name in ggml, or the number of a type without a known name.
    pub fn name(self) -> String {
        self.known_name()
            .map_or_else(|| format!("type {}", self.id()), str::to_owned)
    }

    /// Whether [`Self::name`] is a name rather than a number.
    pub(super) fn is_named(self) -> bool {
        self.known_name().is_some()
    }

    fn known_name(self) -> Option<&'static str> {
        let decoded = KNOWN.iter().find(|k| k.1 == self).map(|k| k.2);
        decoded.or_else(|| NAMED.iter().find(|k| k.0 == self.id()).map(|k| k.1))
    }
}
