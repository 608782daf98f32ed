//! Types whose codes are indices into a table of integers: repacked without loss, with four bits
//! per code.

use half::f16;

use super::iq;
use super::{count_blocks, pack_nibbles};
use crate::gguf::GgmlType;

/// Codes of four bits and their scales. [`NibbleCodes`](super::NibbleCodes) defines the integer of
/// each code.
#[derive(Debug, Clone, PartialEq)]
pub struct NibblePacked {
    /// The packed codes, `[rows, cols / 8]`.
    pub packed: Vec<u32>,
    /// Their scales.
    pub scales: NibbleScales,
}

/// Scales of codes.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq)]
pub enum NibbleScales {
    /// `2^(byte - 127)` for each group, `[rows, cols / 32]`. 255 is NaN.
    Powers(Vec<u8>),
    /// A number for each group, `[rows, cols / 32]`.
    Halves(Vec<f16>),
    /// Signed bytes for each group, times a number for each 256 codes.
    Super {
        /// `[rows, cols / group]`.
        scales: Vec<i8>,
        /// `[rows, cols / 256]`.
        supers: Vec<f16>,
    },
}

/// How [`repack_nibbles`] packs a type.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NibbleFormat {
    /// [`NibbleScales::Powers`].
    Powers,
    /// [`NibbleScales::Halves`].
    Halves,
    /// [`NibbleScales::Super`].
    Super {
        /// Codes that share a byte: 16 or 32.
        group: usize,
    },
}

impl NibbleFormat {
    /// The format of a type; `None` for a type that is not packed this way.
    pub fn of(kind: GgmlType) -> Option<Self> {
        Some(match kind {
            GgmlType::MXFP4 => Self::Powers,
            GgmlType::IQ4NL => Self::Halves,
            GgmlType::IQ4XS
            | GgmlType::IQ3XXS
            | GgmlType::IQ3S
            | GgmlType::IQ2XXS
            | GgmlType::IQ1S => Self::Super { group: 32 },
            GgmlType::Q3K | GgmlType::IQ2XS | GgmlType::IQ2S | GgmlType::IQ1M => {
                Self::Super { group: 16 }
            }
            _ => return None,
        })
    }

    /// Codes that share a scale: 16 or 32.
    pub fn group(self) -> usize {
        match self {
            Self::Powers | Self::Halves => 32,
            Self::Super { group } => group,
        }
    }

    /// Bytes of 256 codes with their scales.
    pub fn bytes_of_256(self) -> u64 {
        let scales = match self {
            Self::Powers => 8,
            Self::Halves => 16,
            Self::Super { group: 32 } => 8 + 2,
            Self::Super { .. } => 16 + 2,
        };
        128 + scales
    }
}

/// Repacks `data`, whole blocks of a type that has a [`NibbleFormat`], without loss. `None` for
/// other types, and when `data` is not a whole number of blocks.
pub fn repack_nibbles(kind: GgmlType, data: &[u8]) -> Option<NibblePacked> {
    let format = NibbleFormat::of(kind)?;
    let (weights, blocks) = count_blocks(kind, data)?;
    let mut packed = Vec::with_capacity(blocks * weights / 8);
    let mut add = |codes: &[u8]| {
        packed.extend(codes.as_chunks::<8>().0.iter().map(pack_nibbles));
    };
    let scales = match format {
        NibbleFormat::Powers => {
            let mut powers = Vec::with_capacity(blocks);
            iq::mxfp4(data, |power, codes| {
                powers.push(power);
                add(&codes);
            });
            NibbleScales::Powers(powers)
        }
        NibbleFormat::Halves => {
            let mut halves = Vec::with_capacity(blocks);
            iq::groups(kind, data, |d, _, codes| {
                halves.push(d);
                add(codes);
            })?;
            NibbleScales::Halves(halves)
        }
        NibbleFormat::Super { group } => {
            let per = weights / group;
            let mut scales = Vec::with_capacity(per * blocks);
            let mut supers = Vec::with_capacity(blocks);
            iq::groups(kind, data, |d, scale, codes| {
                if scales.len() % per == 0 {
                    supers.push(d);
                }
                scales.push(scale);
                add(codes);
            })?;
            NibbleScales::Super { scales, supers }
        }
    };
    Some(NibblePacked { packed, scales })
}
