//! Blocks of GGUF files that kernels convert directly to the packed layout.

/// The number of weights of a row that kernels convert at once.
pub(crate) const PIECE: usize = 256;

/// A type of blocks in GGUF files. The blocks of a row are consecutive.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockKind {
    /// 32 codes of 4 bits after a float16.
    Q4_0,
    /// 32 codes of 5 bits after a float16. The fifth bits precede the other bits.
    Q5_0,
    /// 32 signed bytes after a float16.
    Q8_0,
    /// 256 codes of 4 bits after two float16, and scales and minima of 6 bits.
    Q4K,
    /// [`Self::Q4K`], with a fifth bit of each code before the other bits.
    Q5K,
    /// 256 codes of 6 bits, then 16 signed scales and a float16.
    Q6K,
    /// A float16, then 32 codes of 4 bits, which are indices into a table.
    Iq4Nl,
    /// A float16 and scales of 6 bits, then 256 codes of 4 bits, which are indices into a table.
    Iq4Xs,
}

impl BlockKind {
    /// The number of weights in a block.
    pub const fn weights(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::Iq4Nl => 32,
            Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
        }
    }

    /// The size of a block in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q5_0 => 22,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq4Xs => 136,
        }
    }

    /// The number of bits of a code in the packed layout.
    pub const fn bits(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4K | Self::Iq4Nl | Self::Iq4Xs => 4,
            Self::Q5_0 | Self::Q5K => 5,
            Self::Q6K => 6,
            Self::Q8_0 => 8,
        }
    }

    /// The number of bytes of [`PackedBlockMut::scales`] for 32 weights: a float16, or one byte for
    /// each of one or two groups.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::Iq4Xs => 1,
            _ => 2,
        }
    }

    /// The number of float16 in [`PackedBlockMut::supers`] per block; 0 if the layout has none.
    pub const fn supers(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::Iq4Nl => 0,
            Self::Q4K | Self::Q5K => 2,
            Self::Q6K | Self::Iq4Xs => 1,
        }
    }
}

/// The memory of one row block in each array of a packed matrix.
#[derive(Debug)]
pub struct PackedBlockMut<'a> {
    /// Packed codes, `[words, 8]`.
    pub words: &'a mut [u32],
    /// Bytes of the scales: float16 or bytes `[groups, 8]`.
    pub scales: &'a mut [u8],
    /// float16 values that all weights of a block share, `[blocks, supers, 8]`, as raw bits.
    pub supers: &'a mut [u16],
}
