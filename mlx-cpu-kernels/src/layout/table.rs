//! Tables that turn codes of four bits into integers: the magnitudes of GGUF's IQ types and of
//! Q3_K, with signs. Facts of these formats; how files store them is no matter here.

/// What codes of four bits stand for, as integers. Times the scale of their group and a power of
/// two that each table has, they are weights.
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
    /// IQ1_S and IQ1_M, in eighths: -1, 0 and 1, an eighth more; then an eighth less.
    Iq1,
    /// Q3_K: integers above -5.
    Q3k,
}

impl Table {
    /// What each code stands for.
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

    /// The power of two that makes all integers non-negative when it is added.
    pub(crate) const fn offset(self) -> u8 {
        match self {
            Self::Iq4 => 128,
            Self::Iq3Xxs | Self::Iq2 => 64,
            Self::Iq3S | Self::Iq1 => 16,
            Self::Q3k => 4,
        }
    }

    /// What every product of an integer and a scale is multiplied with; a power of two.
    pub(crate) const fn unit(self) -> f32 {
        match self {
            Self::Iq4 | Self::Iq3S | Self::Q3k => 1.0,
            Self::Iq3Xxs => 0.25,
            Self::Iq2 | Self::Iq1 => 0.125,
        }
    }
}
