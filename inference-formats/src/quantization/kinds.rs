//! The kinds of blocks. Each type implements one of these traits, which parse its blocks.
//! `coding.rs` decodes and packs them.

use half::f16;

use super::layout::{GROUP, Layout};
use super::nibble_codes::NibbleCodes;

/// Blocks with a scale and a bias for each group of 32 weights.
pub(super) trait AffineBlocks {
    /// Bits of a code in memory.
    const BITS: u32;

    /// Calls `f` with codes, scale and bias of each group.
    fn groups(data: &[u8], f: impl FnMut(&[u8; GROUP], f32, f32));
}

/// Blocks with a float16 scale for each group of 32 weights. One code means zero.
pub(super) trait SymmetricBlocks {
    /// Bits of a code in memory.
    const BITS: u32;

    /// Calls `f` with codes and scale of each group.
    fn groups(data: &[u8], f: impl FnMut(&[u8; GROUP], f16));
}

/// K blocks of 256 weights: eight groups with 6-bit scales and minima.
pub(super) trait SuperAffineBlocks {
    /// Bits of a code in memory.
    const BITS: u32;

    /// Calls `f` with the first 16 bytes (`d`, `dmin`, scales and minima) and the codes of each
    /// block.
    fn blocks(data: &[u8], f: impl FnMut(&[u8; 16], [[u8; GROUP]; 8]));
}

/// Blocks of 4-bit codes that index a table of integers.
pub(super) trait TableBlocks {
    /// The layout: [`Layout::Table`] or [`Layout::TableSuper`].
    const LAYOUT: Layout;
    /// The integers.
    const CODES: NibbleCodes;

    /// Calls `f` with `d`, the scale and the 16 or 32 codes of each group. A weight is the product
    /// of `d`, the scale, the code's integer, and the unit.
    fn groups(data: &[u8], f: impl FnMut(f16, i8, &[u8]));
}
