//! Attention of many queries of one sequence, as in a prompt. Panels of sixteen queries pass over
//! blocks of keys with a running softmax, in register tiles (Milakov and Gimelshein 2018; Dao et
//! al. 2022). `decode_attention.rs` handles single queries.

use std::cell::RefCell;
use std::ops::Range;

use crate::attention::attend::{Attention, KvRows};
use crate::attention::key_blocks::{self, BLOCK_KEYS, PanelRunning, VisibleKeys};
use crate::layout::aligned::AlignedVec;
use crate::layout::tile::{LANES, ScaledRow, TileA, TileB, TileC};
use crate::simd::{flash_attention, transpose};

/// The minimum number of queries per row for this kernel.
pub(crate) const MIN_PANEL_QUERIES: usize = 4;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    /// The panel's queries, `[D, LANES]`.
    queries: AlignedVec,
    /// Scores, `[BLOCK_KEYS, LANES]`.
    scores: AlignedVec,
    /// Weighted sums of values, `[LANES, D]`.
    sums: AlignedVec,
    /// Weighted sums of the values of a block, `[LANES, D]`.
    of_block: AlignedVec,
    /// Converted keys or values of a block, `[BLOCK_KEYS, D]`.
    wide: Vec<f32>,
}

/// The inputs of a panel of queries.
pub(crate) struct FlashPanel<'a> {
    pub attend: &'a Attention,
    /// Keys and values of the panel's batch row.
    pub keys: KvRows<'a>,
    pub values: KvRows<'a>,
    /// The key head.
    pub group: usize,
    /// The sink score of the query head.
    pub sink: Option<f32>,
    /// The slope of the query head, and the position of each query; `None` without slopes.
    pub distances: Option<(f32, [f32; LANES])>,
    /// The queries and the factor on them, if they need no norm and no rotation.
    pub queries: Option<[ScaledRow<'a>; LANES]>,
    /// The visible keys of each query, at most `LANES`.
    pub visible_keys: &'a [VisibleKeys],
}

/// Whether flash attention supports this head size.
pub(crate) fn fits(d: usize) -> bool {
    d.is_multiple_of(LANES)
}

impl FlashPanel<'_> {
    /// Computes the panel. Unless there are `queries`, `query(i, place)` writes the scaled query
    /// `i` to `place`. `output(i)` returns the place for the output of query `i`.
    pub(crate) fn run<'o>(
        &self,
        mut query: impl FnMut(usize, &mut [f32]),
        mut output: impl FnMut(usize) -> &'o mut [f32],
    ) {
        let d = self.attend.head_dim;
        SCRATCH.with_borrow_mut(|scratch| {
            let Scratch {
                queries,
                scores,
                sums,
                of_block,
                wide,
            } = scratch;
            let n = self.visible_keys.len();
            queries.resize(d * LANES);
            scores.resize(BLOCK_KEYS * LANES);
            sums.resize(LANES * d);
            of_block.resize(LANES * d);
            let mut rows: [ScaledRow<'_>; LANES] = [(&[], 1.0); LANES];
            match &self.queries {
                Some(all) => rows = *all,
                None => {
                    // The queries are first written as rows.
                    for (i, place) in sums.chunks_exact_mut(d).take(n).enumerate() {
                        query(i, place);
                    }
                    for (row, sum) in rows.iter_mut().zip(sums.chunks_exact(d)) {
                        row.0 = sum;
                    }
                }
            }
            transpose::pack_rows(self.attend.isa, &rows[..n], None, queries);
            sums.fill(0.0);
            let mut states = PanelRunning::new(self.sink);
            // First the kept keys, then the other keys that any query of the panel attends to. The
            // queries have one cache, so the distance of a key's position and its place in memory
            // is the same for all.
            let visible = self.visible_keys;
            let kept = visible.iter().map(|v| v.kept).max().unwrap_or(0);
            let others = |v: &VisibleKeys| v.ranges[0].clone();
            let begin = visible.iter().map(|v| others(v).start).min().unwrap_or(0);
            let end = visible.iter().map(|v| others(v).end).max().unwrap_or(0);
            let apart = visible
                .first()
                .map_or(0, |v| v.position.wrapping_sub(v.ranges[0].start));
            for (from, to, apart, is_kept) in [(0, kept, 0, true), (begin, end, apart, false)] {
                let mut at = from;
                while at < to {
                    let position = at.wrapping_add(apart);
                    let next = to.min(at + BLOCK_KEYS - position % BLOCK_KEYS);
                    let keys = (at..next, position, is_kept);
                    let scratch = (&mut **scores, &mut **of_block, &mut *wide);
                    self.block(keys, queries, scratch, sums, &mut states);
                    at = next;
                }
            }
            for (i, row) in sums.chunks_exact(d).take(n).enumerate() {
                flash_attention::divide(self.attend.isa, row, states.total[i], output(i));
            }
        });
    }

    /// Adds a block of keys, which begins at a position, to the weighted sums.
    fn block(
        &self,
        (keys, position, is_kept): (Range<usize>, usize, bool),
        queries: &[f32],
        (scores, of_block, wide): (&mut [f32], &mut [f32], &mut Vec<f32>),
        sums: &mut [f32],
        states: &mut PanelRunning,
    ) {
        let (isa, d, n) = (self.attend.isa, self.attend.head_dim, keys.len());
        let Range {
            start: from,
            end: to,
        } = keys;
        let (keys, position_stride) = (self.keys).widened(isa, self.group, (from, to), (d, wide));
        let scores = &mut scores[..n * LANES];
        assert!(queries.len() >= d * LANES);
        let keys = (keys.as_ptr(), position_stride);
        // SAFETY: `keys` spans `n` rows of `d` elements. The queries have `d` times `LANES`
        // elements and the scores `n` times `LANES`. The assertion and the slice guarantee it.
        unsafe {
            flash_attention::scores(isa, (n, d), keys, queries.as_ptr(), scores.as_mut_ptr());
        }
        let lanes = scores.as_chunks_mut::<LANES>().0;
        for (i, visible) in self.visible_keys.iter().enumerate() {
            let sees = if is_kept {
                0..visible.kept
            } else {
                visible.ranges[0].clone()
            };
            if sees.start <= from && sees.end >= to {
                continue;
            }
            for (key, lanes) in (from..).zip(lanes.iter_mut()) {
                if !sees.contains(&key) {
                    lanes[i] = f32::NEG_INFINITY;
                }
            }
        }
        if let Some(cap) = self.attend.softcap {
            flash_attention::cap(lanes, cap);
        }
        if let Some((slope, queries)) = &self.distances {
            for (position, lanes) in (position..).zip(lanes.iter_mut()) {
                for (score, query) in lanes.iter_mut().zip(queries) {
                    *score -= key_blocks::distance_bias(*slope, *query, position);
                }
            }
        }
        let block = flash_attention::softmax(isa, lanes, position);
        let factors = states.add(isa, &block);
        let (values, position_stride) =
            (self.values).widened(isa, self.group, (from, to), (d, wide));
        let left = TileA {
            data: scores.as_ptr(),
            row_stride: 1,
            stride: LANES,
        };
        let right = TileB {
            data: values.as_ptr(),
            stride: position_stride,
        };
        let product = TileC {
            data: sums.as_mut_ptr(),
            row_stride: d,
            accumulate: true,
        };
        let (product, operands) = ((product, &factors), (left, right));
        let count = self.visible_keys.len();
        assert!(sums.len() >= count * d && count <= LANES && d.is_multiple_of(LANES));
        // SAFETY: the scores have `n` times `LANES` elements. `values` spans `n` rows of `d`
        // elements. The sums have a row of `d` elements for each query, as asserted.
        unsafe { flash_attention::add_values(isa, (count, n, d), operands, product, of_block) };
    }
}
