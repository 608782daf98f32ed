//! The table of GGUF's element types. Its rows are the only description of a type. Readers,
//! writers, the loader, memory estimates and type lists use the table.

use super::blocks::{Q1_0, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q8_0, TQ1_0, TQ2_0};
use super::codes::{IQ1M, IQ1S, IQ2S, IQ2XS, IQ2XXS, IQ3S, IQ3XXS, IQ4NL, IQ4XS, Q3K};
use super::coding::{
    Coding, affine, floats, powers, super_affine, super_affine_2_bits, super_scaled, symmetric,
    table,
};
use super::encode::{self, Encode};
use super::layout::Layout;
use super::numbers;

/// A row of the table: a type's names and sizes, and how it is converted.
pub struct BlockType {
    /// The type.
    pub kind: GgmlType,
    /// The type's number in files (`ggml_type` in ggml).
    pub id: u32,
    /// The type's name in ggml.
    pub name: &'static str,
    /// Weights of a block; 1 for a type without blocks.
    pub weights: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Values of `general.file_type` with their names, for files in which most tensors have this
    /// type (`llama_ftype` in llama.cpp).
    pub file_types: &'static [(u32, &'static str)],
    /// Bits and group size for lists of models, if one pair describes the whole type.
    pub uniform: Option<(u32, u32)>,
    /// Byte offsets of the float16 numbers in a block.
    pub halves: &'static [usize],
    pub(super) encode: Option<Encode>,
    pub(super) coding: Coding,
}

impl BlockType {
    /// A row without its type, which the macro below sets.
    const fn row(
        id: u32,
        name: &'static str,
        weights: usize,
        bytes: usize,
        coding: Coding,
    ) -> Self {
        Self {
            kind: GgmlType::Other(id),
            id,
            name,
            weights,
            bytes,
            file_types: &[],
            uniform: None,
            halves: &[],
            encode: None,
            coding,
        }
    }

    const fn file_types(mut self, file_types: &'static [(u32, &'static str)]) -> Self {
        self.file_types = file_types;
        self
    }

    const fn uniform(mut self, bits: u32, group: u32) -> Self {
        self.uniform = Some((bits, group));
        self
    }

    const fn halves(mut self, at: &'static [usize]) -> Self {
        self.halves = at;
        self
    }

    const fn written(mut self, encode: Encode) -> Self {
        self.encode = Some(encode);
        self
    }

    /// Bits of a weight in a file.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.weights as f64
    }

    /// The memory layout of matrices of this type.
    pub fn layout(&self) -> Layout {
        self.coding.layout
    }

    /// Whether this workspace can encode the type; see [`super::encode`].
    pub fn is_written(&self) -> bool {
        self.encode.is_some()
    }
}

/// Generates [`GgmlType`] and [`TYPES`] from the rows.
macro_rules! block_types {
    ($($(#[$doc:meta])* $kind:ident = $row:expr;)*) => {
        /// How a GGUF tensor's elements are stored.
        #[non_exhaustive]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum GgmlType {
            $($(#[$doc])* $kind,)*
            /// A type that this crate cannot decode, by its number.
            Other(u32),
        }

        /// All types that this crate decodes, in the order of their numbers.
        pub static TYPES: &[BlockType] = &[
            $(BlockType { kind: GgmlType::$kind, ..$row },)*
        ];
    };
}

// The arguments of `row`: number, name, weights of a block, bytes of a block, conversions.
block_types! {
    /// IEEE single precision.
    F32 = BlockType::row(0, "F32", 1, 4, floats(numbers::f32))
        .file_types(&[(0, "F32")])
        .written(encode::f32);
    /// IEEE half precision.
    F16 = BlockType::row(1, "F16", 1, 2, floats(numbers::f16))
        .file_types(&[(1, "F16")])
        .halves(&[0])
        .written(encode::f16);
    /// 32 weights: 4 bits, a scale.
    Q4_0 = BlockType::row(2, "Q4_0", 32, 18, symmetric::<Q4_0>())
        .file_types(&[(2, "Q4_0")])
        .uniform(4, 32)
        .halves(&[0]);
    /// 32 weights: 4 bits, a scale and a minimum.
    Q4_1 = BlockType::row(3, "Q4_1", 32, 20, affine::<Q4_1>())
        .file_types(&[(3, "Q4_1")])
        .uniform(4, 32)
        .halves(&[0, 2]);
    /// 32 weights: 5 bits, a scale.
    Q5_0 = BlockType::row(6, "Q5_0", 32, 22, symmetric::<Q5_0>())
        .file_types(&[(8, "Q5_0")])
        .uniform(5, 32)
        .halves(&[0]);
    /// 32 weights: 5 bits, a scale and a minimum.
    Q5_1 = BlockType::row(7, "Q5_1", 32, 24, affine::<Q5_1>())
        .file_types(&[(9, "Q5_1")])
        .uniform(5, 32)
        .halves(&[0, 2]);
    /// 32 weights: 8 bits, a scale.
    Q8_0 = BlockType::row(8, "Q8_0", 32, 34, symmetric::<Q8_0>())
        .file_types(&[(7, "Q8_0")])
        .uniform(8, 32)
        .halves(&[0])
        .written(encode::q8_0);
    /// 256 weights: 2 bits in groups of 16.
    Q2K = BlockType::row(10, "Q2_K", 256, 84, super_affine_2_bits())
        .file_types(&[(10, "Q2_K"), (21, "Q2_K_S")])
        .halves(&[80, 82]);
    /// 256 weights: 3 bits in groups of 16.
    Q3K = BlockType::row(11, "Q3_K", 256, 110, table::<Q3K>())
        .file_types(&[(11, "Q3_K_S"), (12, "Q3_K_M"), (13, "Q3_K_L")])
        .halves(&[108]);
    /// 256 weights: 4 bits in groups of 32.
    Q4K = BlockType::row(12, "Q4_K", 256, 144, super_affine::<Q4K>())
        .file_types(&[(14, "Q4_K_S"), (15, "Q4_K_M")])
        .halves(&[0, 2]);
    /// 256 weights: 5 bits in groups of 32.
    Q5K = BlockType::row(13, "Q5_K", 256, 176, super_affine::<Q5K>())
        .file_types(&[(16, "Q5_K_S"), (17, "Q5_K_M")])
        .halves(&[0, 2]);
    /// 256 weights: 6 bits in groups of 16.
    Q6K = BlockType::row(14, "Q6_K", 256, 210, super_scaled())
        .file_types(&[(18, "Q6_K")])
        .halves(&[208]);
    /// 256 weights: an 8-bit index into a table for every 8.
    IQ2XXS = BlockType::row(16, "IQ2_XXS", 256, 66, table::<IQ2XXS>())
        .file_types(&[(19, "IQ2_XXS")])
        .halves(&[0]);
    /// 256 weights: a 9-bit index into a table for every 8.
    IQ2XS = BlockType::row(17, "IQ2_XS", 256, 74, table::<IQ2XS>())
        .file_types(&[(20, "IQ2_XS")])
        .halves(&[0]);
    /// 256 weights: an 8-bit index into a table for every 4.
    IQ3XXS = BlockType::row(18, "IQ3_XXS", 256, 98, table::<IQ3XXS>())
        .file_types(&[(23, "IQ3_XXS")])
        .halves(&[0]);
    /// 256 weights: an 11-bit index into a table for every 8, in groups of 32.
    IQ1S = BlockType::row(19, "IQ1_S", 256, 50, table::<IQ1S>())
        .file_types(&[(24, "IQ1_S")])
        .halves(&[0]);
    /// 32 weights: 4 bits that index a table of integers, and a scale.
    IQ4NL = BlockType::row(20, "IQ4_NL", 32, 18, table::<IQ4NL>())
        .file_types(&[(25, "IQ4_NL")])
        .halves(&[0]);
    /// 256 weights: a 9-bit index into a table for every 4.
    IQ3S = BlockType::row(21, "IQ3_S", 256, 110, table::<IQ3S>())
        .file_types(&[(22, "IQ3_XS"), (26, "IQ3_S"), (27, "IQ3_M")])
        .halves(&[0]);
    /// 256 weights: a 10-bit index into a table for every 8.
    IQ2S = BlockType::row(22, "IQ2_S", 256, 82, table::<IQ2S>())
        .file_types(&[(28, "IQ2_S"), (29, "IQ2_M")])
        .halves(&[0]);
    /// 256 weights: 4 bits as in `IQ4_NL`, in groups of 32.
    IQ4XS = BlockType::row(23, "IQ4_XS", 256, 136, table::<IQ4XS>())
        .file_types(&[(30, "IQ4_XS")])
        .halves(&[0]);
    /// Signed, 8 bits.
    I8 = BlockType::row(24, "I8", 1, 1, floats(numbers::i8));
    /// Signed, 16 bits.
    I16 = BlockType::row(25, "I16", 1, 2, floats(numbers::i16));
    /// Signed, 32 bits.
    I32 = BlockType::row(26, "I32", 1, 4, floats(numbers::i32));
    /// Signed, 64 bits.
    I64 = BlockType::row(27, "I64", 1, 8, floats(numbers::i64));
    /// IEEE double precision.
    F64 = BlockType::row(28, "F64", 1, 8, floats(numbers::f64));
    /// 256 weights: an 11-bit index into a table for every 8, in groups of 16.
    IQ1M = BlockType::row(29, "IQ1_M", 256, 56, table::<IQ1M>()).file_types(&[(31, "IQ1_M")]);
    /// The upper half of an `f32`.
    BF16 = BlockType::row(30, "BF16", 1, 2, floats(numbers::bf16))
        .file_types(&[(32, "BF16")])
        .written(encode::bf16);
    /// 256 weights: -1, 0 or 1, five to a byte, a scale.
    TQ1_0 = BlockType::row(34, "TQ1_0", 256, 54, symmetric::<TQ1_0>())
        .file_types(&[(36, "TQ1_0")])
        .halves(&[52]);
    /// 256 weights: -1, 0 or 1 in 2 bits, a scale.
    TQ2_0 = BlockType::row(35, "TQ2_0", 256, 66, symmetric::<TQ2_0>())
        .file_types(&[(37, "TQ2_0")])
        .halves(&[64]);
    /// 32 weights: floats of 4 bits, and a scale that is a power of two.
    MXFP4 = BlockType::row(39, "MXFP4", 32, 17, powers()).file_types(&[(38, "MXFP4")]);
    /// 128 weights: -1 or 1 in 1 bit, a scale.
    Q1_0 = BlockType::row(41, "Q1_0", 128, 18, symmetric::<Q1_0>())
        .file_types(&[(40, "Q1_0")])
        .uniform(1, 128)
        .halves(&[0]);
}

/// Types that are known only by name: number, name, value of `general.file_type`.
const NAMED: [(u32, &str, Option<u32>); 3] = [
    (9, "Q8_1", None),
    (15, "Q8_K", None),
    (40, "NVFP4", Some(39)),
];

impl GgmlType {
    /// The type's row; `None` for [`Self::Other`].
    pub fn row(self) -> Option<&'static BlockType> {
        TYPES.iter().find(|row| row.kind == self)
    }

    /// The type with the number `id` in files.
    pub(crate) fn from_id(id: u32) -> Self {
        TYPES
            .iter()
            .find(|row| row.id == id)
            .map_or(Self::Other(id), |row| row.kind)
    }

    /// The type's number in files.
    pub fn id(self) -> u32 {
        match self {
            Self::Other(id) => id,
            known => known.row().map_or(u32::MAX, |row| row.id),
        }
    }

    /// Weights per block, and bytes per block. A type without blocks has one weight per block.
    /// `None` for [`Self::Other`].
    pub fn block(self) -> Option<(usize, usize)> {
        self.row().map(|row| (row.weights, row.bytes))
    }

    /// The memory layout of matrices of this type.
    pub fn layout(self) -> Layout {
        self.row().map_or(Layout::Floats, BlockType::layout)
    }

    /// The name in ggml, or the number of a type without a known name.
    pub fn name(self) -> String {
        self.known_name()
            .map_or_else(|| format!("type {}", self.id()), str::to_owned)
    }

    /// Whether [`Self::name`] is a name rather than a number.
    pub(crate) fn is_named(self) -> bool {
        self.known_name().is_some()
    }

    fn known_name(self) -> Option<&'static str> {
        let named = || NAMED.iter().find(|(id, ..)| *id == self.id());
        let decoded = self.row().map(|row| row.name);
        decoded.or_else(|| named().map(|(_, name, _)| *name))
    }
}

/// The name of a value of `general.file_type`, such as `Q4_K_M` for 15.
pub fn file_type_name(number: u32) -> Option<&'static str> {
    let known = TYPES.iter().flat_map(|row| row.file_types.iter().copied());
    let named = NAMED
        .iter()
        .filter_map(|&(_, name, number)| Some((number?, name)));
    known
        .chain(named)
        .find(|(n, _)| *n == number)
        .map(|(_, name)| name)
}
