//! bfloat16 matrices on AMX. Tiles are loaded directly from the matrix in memory. Inputs are the
//! operand that AMX reads in pairs, so sums are `[outputs, input rows]`.

use std::arch::asm;

use super::activations::{natural_order, split};
use super::tiles::{OutputRow, ROW_BYTES, TILE_K, TILE_ROWS, TileRegisters, TileRow};

/// The number of output tiles that are multiplied together. Each has a register for its sums.
pub(crate) const TILES_TOGETHER: usize = 4;

/// Up to [`TILE_ROWS`] input rows in tiles. For each block of inputs, it has the high parts, with
/// one line per two inputs, and then the remainders.
#[derive(Default)]
pub(crate) struct Bf16Panel {
    lines: Vec<TileRow>,
}

impl Bf16Panel {
    /// Whether a row of `k` inputs consists of whole blocks.
    pub(crate) fn fits(k: usize) -> bool {
        k > 0 && k.is_multiple_of(TILE_K)
    }

    /// Resizes for rows of `k` inputs, and sets all to zero.
    pub(crate) fn clear(&mut self, k: usize) {
        assert!(Self::fits(k));
        self.lines.clear();
        self.lines
            .resize(2 * TILE_ROWS * (k / TILE_K), TileRow([0; TILE_K]));
    }

    /// Writes row `lane`: each element times the factor and, if given, its weight.
    ///
    /// # Safety
    /// The processor must have avx512f and avx512bw.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
    pub(crate) unsafe fn row(
        &mut self,
        lane: usize,
        x: &[f32],
        (factor, weight): (f32, Option<&[f32]>),
    ) {
        let blocks = self.lines.len() / (2 * TILE_ROWS);
        assert!(lane < TILE_ROWS && x.len() == blocks * TILE_K);
        assert!(weight.is_none_or(|w| w.len() == x.len()));
        let code_order = natural_order();
        for (block, tiles) in self.lines.chunks_exact_mut(2 * TILE_ROWS).enumerate() {
            let mut parts = [TileRow([0; TILE_K]); 2];
            let [high, low] = &mut parts;
            let weight = weight.map(|w| w[block * TILE_K..].as_ptr());
            // SAFETY: `TILE_K` elements and weights follow, as asserted. The caller guarantees the
            // features.
            unsafe {
                split(
                    x[block * TILE_K..].as_ptr(),
                    (factor, weight),
                    &code_order,
                    (high, low),
                )
            };
            for (tile, part) in tiles.chunks_exact_mut(TILE_ROWS).zip(&parts) {
                for (line, pair) in tile.iter_mut().zip(part.0.as_chunks::<2>().0) {
                    line.0[2 * lane..2 * lane + 2].copy_from_slice(pair);
                }
            }
        }
    }
}

impl TileRegisters {
    /// Configures the tile registers for [`products`].
    ///
    /// # Safety
    /// The system must permit the process to use AMX, as for `Isa::Amx`.
    pub(crate) unsafe fn full() -> Self {
        // SAFETY: the caller guarantees that the process may use AMX.
        unsafe { Self::with([TILE_ROWS; 8]) }
    }
}

/// Multiplies up to [`TILES_TOGETHER`] output tiles with a panel: `[tiles, TILE_ROWS outputs,
/// TILE_ROWS input rows]`. A tile is [`TILE_ROWS`] adjacent rows of a matrix. Explicit prefetches
/// are slower than the hardware prefetcher alone.
///
/// # Panics
/// If the sizes of tiles, panel and output do not match.
pub(crate) fn products(
    tiles: &[&[u16]],
    panel: &Bf16Panel,
    _: &TileRegisters,
    out: &mut [OutputRow],
) {
    let blocks = panel.lines.len() / (2 * TILE_ROWS);
    let k = blocks * TILE_K;
    assert!((1..=TILES_TOGETHER).contains(&tiles.len()) && out.len() == tiles.len() * TILE_ROWS);
    assert!(tiles.iter().all(|tile| tile.len() == TILE_ROWS * k));
    // SAFETY: the registers are configured, as their type guarantees. The number of blocks is that
    // of tiles and panel, and `out` has space for all tiles.
    unsafe {
        zero();
        let (panel, tile) = (panel.lines.as_ptr(), |i: usize| tiles[i].as_ptr());
        match tiles.len() {
            1 => multiply::<1>([tile(0); 4], k, panel, blocks),
            2 => multiply::<2>([tile(0), tile(1), tile(0), tile(0)], k, panel, blocks),
            3 => multiply::<3>([tile(0), tile(1), tile(2), tile(0)], k, panel, blocks),
            _ => multiply::<4>([tile(0), tile(1), tile(2), tile(3)], k, panel, blocks),
        }
        store(tiles.len(), out.as_mut_ptr());
    }
}

/// Sets the sums to zero.
///
/// # Safety
/// The registers must be configured.
#[inline]
unsafe fn zero() {
    // SAFETY: the caller guarantees configured registers.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nomem, nostack),
        );
    }
}

/// Multiplies the first `T` of `tiles` by the input tiles in `panel`, for `blocks` blocks of
/// columns. The products are added to the sums. Rows of the matrix are `k` elements apart.
///
/// # Safety
/// The registers must be configured. `tiles` and `panel` must be readable for all blocks.
#[inline]
unsafe fn multiply<const T: usize>(
    tiles: [*const u16; TILES_TOGETHER],
    k: usize,
    panel: *const TileRow,
    blocks: usize,
) {
    let [a, b, c, d] = tiles;
    macro_rules! for_blocks {
        ($($line:expr),*) => {
            asm!(
                "2:",
                "tileloadd tmm4, [{x} + {line}*1]",
                "tileloadd tmm5, [{x} + {line}*1 + 1024]",
                $($line,)*
                "add {x}, 2048",
                "add {a}, 64",
                "add {b}, 64",
                "add {c}, 64",
                "add {d}, 64",
                "dec {n}",
                "jnz 2b",
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                c = inout(reg) c => _,
                d = inout(reg) d => _,
                x = inout(reg) panel => _,
                n = inout(reg) blocks => _,
                row = in(reg) k * size_of::<u16>(),
                line = in(reg) ROW_BYTES,
                options(nostack, readonly),
            )
        };
    }
    macro_rules! tile {
        ($sums:literal, $matrix:literal, $at:literal) => {
            concat!(
                "tileloadd ",
                $matrix,
                ", [{",
                $at,
                "} + {row}*1]\n",
                "tdpbf16ps ",
                $sums,
                ", ",
                $matrix,
                ", tmm4\n",
                "tdpbf16ps ",
                $sums,
                ", ",
                $matrix,
                ", tmm5",
            )
        };
    }
    // SAFETY: the caller guarantees configured registers, and readable tiles and panel.
    unsafe {
        match T {
            1 => for_blocks!(tile!("tmm0", "tmm6", "a")),
            2 => for_blocks!(tile!("tmm0", "tmm6", "a"), tile!("tmm1", "tmm7", "b")),
            3 => for_blocks!(
                tile!("tmm0", "tmm6", "a"),
                tile!("tmm1", "tmm7", "b"),
                tile!("tmm2", "tmm6", "c")
            ),
            _ => for_blocks!(
                tile!("tmm0", "tmm6", "a"),
                tile!("tmm1", "tmm7", "b"),
                tile!("tmm2", "tmm6", "c"),
                tile!("tmm3", "tmm7", "d")
            ),
        }
    }
}

/// Stores the sums of `tiles` tiles.
///
/// # Safety
/// The registers must be configured, and the destination must exist.
#[inline]
unsafe fn store(tiles: usize, to: *mut OutputRow) {
    macro_rules! one {
        ($i:literal, $register:literal) => {
            if tiles > $i {
                asm!(
                    concat!("tilestored [{to} + {line}*1], ", $register),
                    to = in(reg) to.add($i * TILE_ROWS),
                    line = in(reg) ROW_BYTES,
                    options(nostack),
                );
            }
        };
    }
    // SAFETY: the caller guarantees configured registers, and that the destination exists.
    unsafe {
        one!(0, "tmm0");
        one!(1, "tmm1");
        one!(2, "tmm2");
        one!(3, "tmm3");
    }
}
