//! The tables of integers that 4-bit codes index.

/// The integers that 4-bit codes index. A weight is the product of its integer, a unit, and the
/// scale of its group.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NibbleCodes {
    /// `MXFP4`: the 4-bit floats (E2M1), doubled.
    E2m1,
    /// `IQ4_NL` and `IQ4_XS`.
    Iq4,
    /// `IQ3_XXS`: three bits of magnitude below a sign.
    Iq3Xxs,
    /// `IQ3_S`: three bits of magnitude below a sign.
    Iq3S,
    /// `IQ2_XXS`, `IQ2_XS`, `IQ2_S`: two bits of magnitude, and the sign in the highest bit.
    Iq2,
    /// `IQ1_S`, `IQ1_M`, in eighths. Codes 0 to 2 are -1, 0 and 1 plus an eighth; codes 4 to 6 are
    /// these numbers minus an eighth.
    Iq1,
    /// `Q3_K`: the integers -4 to 3.
    Q3k,
}

impl NibbleCodes {
    /// The integers of all codes, and the factor that scales them.
    pub fn integers(self) -> ([i8; 16], f32) {
        match self {
            Self::E2m1 => (
                [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
                0.5,
            ),
            Self::Iq4 => (
                [
                    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
                ],
                1.0,
            ),
            Self::Iq3Xxs => (with_signs([4, 12, 20, 28, 36, 44, 52, 62]), 0.25),
            Self::Iq3S => (with_signs([1, 3, 5, 7, 9, 11, 13, 15]), 1.0),
            Self::Iq2 => (with_signs([8, 25, 43, 0, 0, 0, 0, 0]), 0.125),
            Self::Iq1 => ([-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0], 0.125),
            Self::Q3k => ([-4, -3, -2, -1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0], 1.0),
        }
    }
}

/// The magnitudes, followed by their negatives.
fn with_signs(magnitudes: [i8; 8]) -> [i8; 16] {
    std::array::from_fn(|code| {
        let magnitude = magnitudes[code % 8];
        if code < 8 { magnitude } else { -magnitude }
    })
}
