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
    /// A type that this crate does not decode, by its number.
    Other(u32),
}

/// Types that are decoded: number, type, name, weights in a block, bytes of a block.
const KNOWN: [(u32, GgmlType, &str, usize, usize); 18] = [
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
    (24, GgmlType::I8, "I8", 1, 1),
    (25, GgmlType::I16, "I16", 1, 2),
    (26, GgmlType::I32, "I32", 1, 4),
    (27, GgmlType::I64, "I64", 1, 8),
    (28, GgmlType::F64, "F64", 1, 8),
    (30, GgmlType::BF16, "BF16", 1, 2),
];

/// Types that are only named: number and name (`ggml_type` in ggml).
const NAMED: [(u32, &str); 15] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

impl GgmlType {
    /// The type that files give the number `id`.
    pub(super) fn from_id(id: u32) -> Self {
        KNOWN
            .iter()
            .find(|k| k.0 == id)
            .map_or(Self::Other(id), |k| k.1)
    }

    /// The number that files give it.
    pub(super) fn id(self) -> u32 {
        match self {
            Self::Other(id) => id,
            known => KNOWN
                .iter()
                .find(|k| k.1 == known)
                .map_or(u32::MAX, |k| k.0),
        }
    }

    /// Weights in a block and bytes of a block; a type without blocks has one weight in each.
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
