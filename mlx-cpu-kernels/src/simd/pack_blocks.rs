//! Packs row blocks from the blocks of GGUF files. The instruction set determines the kernel.

use crate::isa::Isa;
use crate::layout::blocks::{BlockKind, PIECE, PackedBlockMut};
use crate::layout::packed::INTERLEAVED_ROWS;
#[cfg(target_arch = "x86_64")]
use crate::simd::avx2;

/// Whether the instruction set has kernels for [`pack_row_block`].
/// ```
/// if mlx_cpu_kernels::instruction_set() == "avx2" {
///     assert!(mlx_cpu_kernels::packs_row_blocks());
/// }
/// ```
pub fn packs_row_blocks() -> bool {
    match Isa::detect() {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => true,
        _ => false,
    }
}

/// Packs eight rows of GGUF blocks as one row block, with exactly the codes and scales of the
/// blocks. Returns `false`, and writes nothing, unless
/// [`packs_row_blocks`].
///
/// Codes have MLX's packing. Codes of 8 bits are unsigned, with 128 for zero. With
/// [`BlockKind::Q4K`] and [`BlockKind::Q5K`], `out.scales` has eight scales of a group, then its
/// eight minima.
///
/// ```
/// use mlx_cpu_kernels::{BlockKind, PackedBlockMut, pack_row_block};
/// let row = [[0u8; 34]; 2].concat(); // two blocks of Q8_0
/// let (mut words, mut scales) = ([0u32; 16 * 8], [1u8; 4 * 8]);
/// let mut out = PackedBlockMut { words: &mut words, scales: &mut scales, supers: &mut [] };
/// if pack_row_block(BlockKind::Q8_0, [&row; 8], &mut out) {
///     assert_eq!((words, scales), ([0x8080_8080; 16 * 8], [0; 4 * 8]));
/// }
/// ```
///
/// # Panics
/// If the rows differ in length or do not consist of whole blocks, or an array of `out` has the
/// wrong length.
pub fn pack_row_block(
    kind: BlockKind,
    rows: [&[u8]; INTERLEAVED_ROWS],
    out: &mut PackedBlockMut<'_>,
) -> bool {
    let length = rows[0].len();
    assert!(length.is_multiple_of(kind.bytes()) && rows.iter().all(|row| row.len() == length));
    let weights = length / kind.bytes() * kind.weights();
    let of_rows = |n: usize| n * INTERLEAVED_ROWS;
    assert_eq!(out.words.len(), of_rows(weights / 32 * kind.bits()));
    assert_eq!(out.scales.len(), of_rows(weights / 32 * kind.scale_bytes()));
    assert_eq!(out.supers.len(), of_rows(weights / PIECE * kind.supers()));
    match Isa::detect() {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => {
            // SAFETY: only `detect` makes these, on processors with avx2.
            unsafe { avx2::pack_blocks::pack_row_block(kind, rows, weights, out) };
            true
        }
        _ => false,
    }
}
