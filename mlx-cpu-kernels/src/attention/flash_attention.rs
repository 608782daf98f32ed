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

/// The maximum number of query heads that share converted keys and values.
pub(crate) const MOST_HEADS: usize = 4;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    /// The panel's queries, `[heads, D, LANES]`.
    queries: AlignedVec,
    /// Scores, `[heads, BLOCK_KEYS, LANES]`.
    scores: AlignedVec,
    /// Weighted sums of values, `[heads, LANES, D]`.
    sums: AlignedVec,
    /// The softmax of each head.
    states: Vec<PanelRunning>,
    /// Weighted sums of the values of a block, `[LANES, D]`.
    of_block: AlignedVec,
    /// Converted keys or values of a block, `[BLOCK_KEYS, D]`.
    wide: Vec<f32>,
}

impl Scratch {
    fn resize(&mut self, heads: usize, d: usize) {
        self.queries.resize(heads * d * LANES);
        self.scores.resize(heads * BLOCK_KEYS * LANES);
        self.sums.resize(heads * LANES * d);
        self.of_block.resize(LANES * d);
    }
}

/// The inputs of a panel of queries.
pub(crate) struct FlashPanel<'a> {
    pub attend: &'a Attention,
    /// Keys and values of the panel's batch row.
    pub keys: KvRows<'a>,
    pub values: KvRows<'a>,
    /// The key head.
    pub group: usize,
    /// Query heads that share the key head, at most [`MOST_HEADS`].
    pub heads: &'a [FlashHead<'a>],
    /// The position of each query.
    pub positions: [f32; LANES],
    /// The visible keys of each query, at most `LANES`.
    pub visible_keys: &'a [VisibleKeys],
}

/// A query head of a panel.
pub(crate) struct FlashHead<'a> {
    /// The sink score.
    pub sink: Option<f32>,
    /// The factor of distances; `None` without slopes.
    pub slope: Option<f32>,
    /// The queries and the factor on them, if they need no norm and no rotation.
    pub queries: Option<[ScaledRow<'a>; LANES]>,
}

/// Whether flash attention supports this head size.
pub(crate) fn fits(d: usize) -> bool {
    d.is_multiple_of(LANES)
}

impl FlashPanel<'_> {
    /// Computes the panel. Unless a head has `queries`, `query(head, i, place)` writes its scaled
    /// query `i` to `place`. `output(head, i)` returns the memory for the output of query `i`.
    pub(crate) fn run<'o>(
        &self,
        mut query: impl FnMut(usize, usize, &mut [f32]),
        mut output: impl FnMut(usize, usize) -> &'o mut [f32],
    ) {
        let d = self.attend.head_dim;
        assert!(self.heads.len() <= MOST_HEADS);
        SCRATCH.with_borrow_mut(|scratch| {
            let n = self.visible_keys.len();
            scratch.resize(self.heads.len(), d);
            scratch.states.clear();
            let places = scratch.queries.chunks_exact_mut(d * LANES);
            let places = places.zip(scratch.sums.chunks_exact_mut(d * LANES));
            for (h, (head, (queries, sums))) in self.heads.iter().zip(places).enumerate() {
                let mut rows: [ScaledRow<'_>; LANES] = [(&[], 1.0); LANES];
                match &head.queries {
                    Some(all) => rows = *all,
                    None => {
                        // The queries are first written as rows.
                        for (i, place) in sums.chunks_exact_mut(d).take(n).enumerate() {
                            query(h, i, place);
                        }
                        for (row, sum) in rows.iter_mut().zip(sums.chunks_exact(d)) {
                            row.0 = sum;
                        }
                    }
                }
                transpose::pack_rows(self.attend.isa, &rows[..n], None, queries);
                sums.fill(0.0);
                scratch.states.push(PanelRunning::new(head.sink));
            }
            // The kept keys come first, then the other keys that any query of the panel attends to.
            // All queries use the same cache. So the difference between a key's position and its
            // index in memory is equal for all queries.
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
                    self.block((at..next, position, is_kept), scratch);
                    at = next;
                }
            }
            let sums = scratch.sums.chunks_exact(d * LANES);
            for (h, (sums, state)) in sums.zip(&scratch.states).enumerate() {
                for (i, row) in sums.chunks_exact(d).take(n).enumerate() {
                    flash_attention::divide(self.attend.isa, row, state.total[i], output(h, i));
                }
            }
        });
    }

    /// Adds a block of keys, which begins at a position, to the weighted sums.
    fn block(&self, (keys, position, is_kept): (Range<usize>, usize, bool), scratch: &mut Scratch) {
        let (isa, d, n) = (self.attend.isa, self.attend.head_dim, keys.len());
        let Range {
            start: from,
            end: to,
        } = keys;
        let Scratch {
            queries,
            scores,
            sums,
            states,
            of_block,
            wide,
        } = scratch;
        let (keys, position_stride) = (self.keys).widened(isa, self.group, (from, to), (d, wide));
        let keys = (keys.as_ptr(), position_stride);
        let mut factors = [[[0.0; LANES]; 2]; MOST_HEADS];
        let places = queries.chunks_exact(d * LANES);
        let places = places.zip(scores.chunks_exact_mut(BLOCK_KEYS * LANES));
        let places = places.zip(states).zip(&mut factors);
        for (head, (((queries, scores), state), factors)) in self.heads.iter().zip(places) {
            let scores = &mut scores[..n * LANES];
            // SAFETY: `keys` spans `n` rows of `d` elements. The queries have `d` times `LANES`
            // elements and the scores `n` times `LANES`. The chunks and the slice guarantee it.
            unsafe {
                flash_attention::scores(isa, (n, d), keys, queries.as_ptr(), scores.as_mut_ptr());
            }
            let lanes = scores.as_chunks_mut::<LANES>().0;
            self.mask((from, to, is_kept), lanes);
            if let Some(cap) = self.attend.softcap {
                flash_attention::cap(lanes, cap);
            }
            if let Some(slope) = head.slope {
                for (position, lanes) in (position..).zip(lanes.iter_mut()) {
                    for (score, query) in lanes.iter_mut().zip(&self.positions) {
                        *score -= key_blocks::distance_bias(slope, *query, position);
                    }
                }
            }
            let block = flash_attention::softmax(isa, lanes, position);
            *factors = state.add(isa, &block);
        }
        let (values, position_stride) =
            (self.values).widened(isa, self.group, (from, to), (d, wide));
        let right = TileB {
            data: values.as_ptr(),
            stride: position_stride,
        };
        let count = self.visible_keys.len();
        assert!(count <= LANES && d.is_multiple_of(LANES));
        let places = scores.chunks_exact(BLOCK_KEYS * LANES);
        let factors = &factors[..self.heads.len()];
        let places = places.zip(sums.chunks_exact_mut(LANES * d)).zip(factors);
        for ((scores, sums), factors) in places {
            let left = TileA {
                data: scores.as_ptr(),
                row_stride: 1,
                stride: LANES,
            };
            let product = TileC {
                data: sums.as_mut_ptr(),
                row_stride: d,
                accumulate: true,
            };
            let (product, operands) = ((product, factors), (left, right));
            // SAFETY: the scores have `n` times `LANES` elements. `values` spans `n` rows of `d`
            // elements. The sums have a row of `d` elements for each query: there are at most
            // `LANES`, as asserted.
            unsafe { flash_attention::add_values(isa, (count, n, d), operands, product, of_block) };
        }
    }

    /// Sets the scores of keys `from..to` to minus infinity where a query does not attend to the
    /// key.
    fn mask(&self, (from, to, is_kept): (usize, usize, bool), scores: &mut [[f32; LANES]]) {
        for (i, visible) in self.visible_keys.iter().enumerate() {
            let sees = if is_kept {
                0..visible.kept
            } else {
                visible.ranges[0].clone()
            };
            if sees.start <= from && sees.end >= to {
                continue;
            }
            for (key, lanes) in (from..).zip(scores.iter_mut()) {
                if !sees.contains(&key) {
                    lanes[i] = f32::NEG_INFINITY;
                }
            }
        }
    }
}
