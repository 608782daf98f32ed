//! Tile registers, and rows of tiles in memory.

use std::arch::asm;
use std::marker::PhantomData;

use crate::layout::packed::{GroupParams, INTERLEAVED_ROWS, PackedMatrix};

/// The most rows of a tile, and the outputs of one.
pub(crate) const TILE_ROWS: usize = 16;

/// Inputs that a tile has of each row.
pub(crate) const TILE_K: usize = 32;

/// The most tiles of inputs that are multiplied with a group's codes before the next group. They
/// and their totals must stay in the L1 cache.
pub(crate) const TILES_PER_CHUNK: usize = 6;

/// A row of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TileRow(pub [u16; TILE_K]);

/// Outputs of a row of inputs.
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct OutputRow(pub [f32; TILE_ROWS]);

/// Bytes from a row of a tile to the next, wherever one is in memory.
pub(crate) const ROW_BYTES: usize = size_of::<TileRow>();

/// Two tiles' outputs: sixteen rows of a matrix each, or eight where the matrix ends, or the same
/// twice.
#[derive(Clone, Copy)]
pub(crate) struct TilePair<'a>(pub [PackedMatrix<'a>; 2]);

/// Tile registers, set up for this thread.
pub(crate) struct TileRegisters {
    /// The registers are this thread's.
    own: PhantomData<*const ()>,
}

impl TileRegisters {
    /// For whole tiles.
    ///
    /// # Safety
    /// The system must let the process use AMX, as for `Isa::Amx`.
    pub(crate) unsafe fn new() -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::with([TILE_ROWS; 8]) }
    }

    /// Registers with `rows` rows, at most [`TILE_ROWS`] each, of the longest lines.
    ///
    /// # Safety
    /// As of [`Self::new`].
    pub(crate) unsafe fn with(rows: [usize; 8]) -> Self {
        #[repr(C, align(64))]
        struct Setting([u8; 64]);
        let mut setting = Setting([0; 64]);
        // The only palette; bytes of a row, two each, from 16 on; rows from 48 on.
        setting.0[0] = 1;
        for (register, rows) in rows.into_iter().enumerate() {
            setting.0[16 + 2 * register] = ROW_BYTES as u8;
            setting.0[48 + register] = rows as u8;
        }
        // SAFETY: it reads 64 bytes; that the registers are there is the caller's promise.
        unsafe { asm!("ldtilecfg [{}]", in(reg) setting.0.as_ptr(), options(nostack)) };
        Self { own: PhantomData }
    }
}

impl Drop for TileRegisters {
    fn drop(&mut self) {
        // SAFETY: who made this has the registers.
        unsafe { asm!("tilerelease", options(nostack)) };
    }
}

/// The rows of two tiles: the two row blocks of each, or the same twice. Also the likely distance
/// of the next call's rows, adjacent ones of one matrix or of two.
#[derive(Clone, Copy)]
pub(crate) struct TileSources<'a> {
    pub words: [[*const u32; 2]; 2],
    pub scales: [GroupParams<'a>; 2],
    pub biases: [GroupParams<'a>; 2],
    /// From the first row block's scales and biases to those of the second.
    pub second: [usize; 2],
    pub ahead: [usize; 2],
}

impl<'a> TileSources<'a> {
    pub(crate) fn of(TilePair([one, other]): TilePair<'a>) -> Self {
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
