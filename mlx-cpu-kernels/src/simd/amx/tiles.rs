//! Tile registers, and rows of tiles in memory.

use std::arch::asm;
use std::marker::PhantomData;

use crate::layout::packed::{GroupParams, INTERLEAVED_ROWS, PackedMatrix};

/// The maximum number of rows of a tile, and of outputs per tile.
pub(crate) const TILE_ROWS: usize = 16;

/// The number of inputs per row of a tile.
pub(crate) const TILE_K: usize = 32;

/// The maximum number of input tiles that are multiplied with a group's codes before the next
/// group. These tiles and their totals must stay in the L1 cache.
pub(crate) const TILES_PER_CHUNK: usize = 6;

/// A row of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TileRow(pub [u16; TILE_K]);

/// Sixteen outputs of an input row.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct OutputRow(pub [f32; TILE_ROWS]);

/// The row stride of tiles in memory, in bytes.
pub(crate) const ROW_BYTES: usize = size_of::<TileRow>();

/// The matrix rows of two output tiles. Each tile has sixteen rows, or eight where the matrix ends.
/// Both may be the same rows.
#[derive(Clone, Copy)]
pub(crate) struct TilePair<'a>(pub [PackedMatrix<'a>; 2]);

/// Tile registers, configured for this thread.
pub(crate) struct TileRegisters {
    /// Prevents moving the value to another thread, because the registers are configured for this
    /// thread.
    marker: PhantomData<*const ()>,
}

impl TileRegisters {
    /// Configures the registers as full tiles.
    ///
    /// # Safety
    /// The system must permit the process to use AMX, as for `Isa::Amx`.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: the caller guarantees that the process may use AMX.
        unsafe { Self::with([TILE_ROWS; 8]) }
    }

    /// Configures registers with `rows` rows, at most [`TILE_ROWS`] each, of the maximum width.
    ///
    /// # Safety
    /// The obligations of [`Self::new`].
    pub(crate) unsafe fn with(rows: [usize; 8]) -> Self {
        #[repr(C, align(64))]
        struct Setting([u8; 64]);
        let mut setting = Setting([0; 64]);
        // Byte 0 is the palette; there is only one. Bytes 16 and later are the row length of each
        // register in bytes, two bytes each. Bytes 48 and later are the numbers of rows.
        setting.0[0] = 1;
        for (register, rows) in rows.into_iter().enumerate() {
            setting.0[16 + 2 * register] = ROW_BYTES as u8;
            setting.0[48 + register] = rows as u8;
        }
        // SAFETY: the instruction reads 64 bytes. The caller guarantees that the registers exist.
        unsafe { asm!("ldtilecfg [{}]", in(reg) setting.0.as_ptr(), options(nostack)) };
        Self {
            marker: PhantomData,
        }
    }
}

impl Drop for TileRegisters {
    fn drop(&mut self) {
        // SAFETY: the constructor's caller guaranteed that the registers exist.
        unsafe { asm!("tilerelease", options(nostack)) };
    }
}

/// The matrix rows of two output tiles. A tile has two row blocks, or the same row block twice. The
/// next call probably uses the following rows of the same one or two matrices, which are `ahead`
/// words later.
#[derive(Clone, Copy)]
pub(crate) struct TileSources<'a> {
    pub words: [[*const u32; 2]; 2],
    pub scales: [GroupParams<'a>; 2],
    pub biases: [GroupParams<'a>; 2],
    /// The distance between the scales and biases of the two row blocks.
    pub second: [usize; 2],
    pub ahead: [usize; 2],
}

impl<'a> TileSources<'a> {
    pub(crate) fn from_pair(TilePair([one, other]): TilePair<'a>) -> Self {
        let words = |b: PackedMatrix<'a>| {
            let at = b.words.as_ptr();
            [
                at,
                at.wrapping_add((b.row_blocks() - 1) * b.words.len() / 2),
            ]
        };
        let second = |b: PackedMatrix<'a>| (b.row_blocks() - 1) * b.groups * INTERLEAVED_ROWS;
        let (lengths, ends) = (
            (one.words.len(), other.words.len()),
            one.words.as_ptr_range(),
        );
        let ahead = if ends.end == other.words.as_ptr() {
            [lengths.0 + lengths.1; 2]
        } else {
            [lengths.0, lengths.1]
        };
        Self {
            words: [words(one), words(other)],
            scales: [one.scales, other.scales],
            biases: [one.biases, other.biases],
            second: [second(one), second(other)],
            ahead,
        }
    }
}
