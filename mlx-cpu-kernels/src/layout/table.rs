//! Tables that map 4-bit codes to integers, for GGUF's IQ types and Q3_K. The tables do not depend
//! on the file format.

/// Integer tables for 4-bit codes. A weight is the table's integer, times the group's scale, times
/// a power of two of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// IQ4_NL and IQ4_XS.
    Iq4,
    /// IQ3_XXS: three bits of magnitude below a sign.
    Iq3Xxs,
    /// IQ3_S: three bits of magnitude below a sign.
    Iq3S,
    /// IQ2_XXS, IQ2_XS and IQ2_S: two bits of magnitude, and a sign in the highest bit.
    Iq2,
    /// IQ1_S and IQ1_M, in eighths. The codes are -1, 0 and 1 plus an eighth, then -1, 0 and 1
    /// minus an eighth.
    Iq1,
    /// Q3_K: consecutive integers from -4 on.
    Q3k,
}

impl Table {
    /// The integer of each code.
    pub(crate) const fn integers(self) -> &'static [i8; 16] {
        match self {
            Self::Iq4 => &[
                -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
            ],
            Self::Iq3Xxs => &[
                4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62,
            ],
            Self::Iq3S => &[1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15],
            Self::Iq2 => &[8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0],
            Self::Iq1 => &[-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            Self::Q3k => &[-4, -3, -2, -1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    }

    /// A power of two. When it is added, all integers are non-negative.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn offset(self) -> u8 {
        match self {
            Self::Iq4 => 128,
            Self::Iq3Xxs | Self::Iq2 => 64,
            Self::Iq3S | Self::Iq1 => 16,
            Self::Q3k => 4,
        }
    }

    /// The factor on every product of an integer and a group's scale; a power of two.
    pub(crate) const fn unit(self) -> f32 {
        match self {
            Self::Iq4 | Self::Iq3S | Self::Q3k => 1.0,
            Self::Iq3Xxs => 0.25,
            Self::Iq2 | Self::Iq1 => 0.125,
        }
    }
}
