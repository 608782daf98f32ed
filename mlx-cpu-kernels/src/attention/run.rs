//! Attention over KV caches as one operation. It reads the packed projection and the caches, and
//! computes norm and rotation of queries, scores, softmax and the weighted sum. For each panel of
//! queries it chooses flash or decode attention.

use std::cell::RefCell;
use std::ops::Range;

use crate::attention::attend::{Attention, AttentionTask, KvRows};
use crate::attention::flash_attention::{self, FlashHead, FlashPanel};
use crate::attention::key_blocks::VisibleKeys;
use crate::attention::kv_type::KvType;
use crate::attention::kv_write::NewKv;
use crate::attention::rope::rope_table;
use crate::layout::aligned::AlignedVec;
use crate::layout::tile::LANES;
use crate::partition::{SharedOutput, parallel_parts};
use crate::pool;
use crate::work::{Input, Work};

/// Parts of flash panels per thread. With several parts, other threads can run some parts of a slow
/// thread.
const PARTS: usize = 16;

/// The number of panel runs per thread, over all heads.
const RUNS: usize = 4;

thread_local! {
    static PACKED: RefCell<PackedScratch> = RefCell::default();
}

/// Memory for keys and values of a head.
#[derive(Default)]
struct PackedScratch {
    packed: [AlignedVec; 2],
    wide: Vec<f32>,
}

/// Adjacent panels of a sequence.
struct PanelRun {
    sequence: usize,
    /// The panels, with the visible keys of each query. Key indices are relative to `keys.start`.
    panels: Vec<(Range<usize>, Vec<VisibleKeys>)>,
    /// The keys that any query attends to.
    keys: Range<usize>,
}

impl Work for Attention {
    fn outputs(&self) -> usize {
        self.queries.len() * self.heads * self.head_dim
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        self.run_with(inputs, None, output);
    }
}

impl Attention {
    /// Like [`Work::run`], but first stores the new keys and values of all queries.
    ///
    /// # Safety
    /// The obligations of [`Work::run`]. Nothing else may use the keys and values during the call.
    pub unsafe fn run_with_new_kv(&self, inputs: &[Input], new_kv: &NewKv<'_>, output: &mut [f32]) {
        self.run_with(inputs, Some(new_kv), output);
    }

    /// Runs the operation; `new_kv` is as in [`Self::run_with_new_kv`].
    fn run_with(&self, inputs: &[Input], new_kv: Option<&NewKv<'_>>, output: &mut [f32]) {
        let mut inputs = inputs.iter();
        let packed = inputs.next();
        let norm = self.eps.map(|eps| (inputs.next(), eps));
        let sinks = if self.sinks { inputs.next() } else { None };
        fn slice(i: Option<&Input>) -> &[f32] {
            // SAFETY: `Heads::attend` passes float32 arrays.
            i.map_or(&[][..], |i| unsafe { i.as_slice::<f32>() })
        }
        let (packed, sinks) = (slice(packed), sinks.map(|i| slice(Some(i))));
        let norm = norm.map(|(weight, eps)| (slice(weight), eps));
        let (mut flash_panels, mut decode_queries) = (Vec::new(), Vec::new());
        for panel in self.panels() {
            if panel.len() >= flash_attention::MIN_PANEL_QUERIES
                && flash_attention::fits(self.head_dim)
            {
                flash_panels.push(panel);
            } else {
                decode_queries.extend(panel);
            }
        }
        let rotation = self.rotation.as_ref().map(|r| {
            let positions: Vec<i32> = self.queries.iter().map(|q| q.position).collect();
            (r, rope_table(r, &positions))
        });
        let rotation = rotation.as_ref().map(|(r, rope_table)| (*r, &**rope_table));
        // With a single new token per row, the thread that reads a head's keys first writes the new
        // key.
        let by_head = self.by_head(&decode_queries);
        let mut deferred = None;
        if let Some(new_kv) = new_kv {
            if flash_panels.is_empty() && new_kv.is_single_token() && by_head {
                deferred = Some(new_kv);
            } else {
                let rope_table = rotation.map_or(&[][..], |(_, rope_table)| rope_table);
                // SAFETY: the caller of `run_with_new_kv` guarantees caches that nothing else uses.
                unsafe { new_kv.write_all(packed, rope_table) };
            }
        }
        // SAFETY: `Heads::attend` passes arrays of this type. The new keys and values are already
        // stored, or the thread that stores them also reads them.
        let of = |(input, kv_type)| unsafe { KvRows::from_input(input, kv_type) };
        // Keys and values of each sequence.
        let types = self.plans.iter().flat_map(|plan| [plan.kv_type; 2]);
        let rest: Vec<KvRows<'_>> = inputs.zip(types).map(of).collect();
        let task = AttentionTask {
            attend: self,
            packed,
            norm,
            rotation,
            kv: &rest,
            sinks,
            out: SharedOutput::new(output),
        };
        task.flash_panels(&flash_panels);
        if by_head {
            task.decode_by_head(&decode_queries, deferred);
        } else {
            task.decode_by_block(&decode_queries);
        }
    }

    /// Divides the queries into panels. A panel has queries of one row only, at most as many as fit
    /// flash attention.
    fn panels(&self) -> Vec<Range<usize>> {
        let mut panels = Vec::new();
        let mut from = 0;
        while from < self.queries.len() {
            let sequence = self.queries[from].sequence;
            let most = (from + LANES).min(self.queries.len());
            let to = (from..most)
                .find(|&i| self.queries[i].sequence != sequence)
                .unwrap_or(most);
            panels.push(from..to);
            from = to;
        }
        panels
    }
}

impl AttentionTask<'_> {
    /// Computes panels of queries with flash attention.
    fn flash_panels(&self, panels: &[Range<usize>]) {
        if panels.is_empty() {
            return;
        }
        if self.attend.plans.iter().all(|plan| plan.around.is_some()) {
            return self.flash_runs(panels);
        }
        let at_once = self.heads_at_once(panels.len());
        let heads = self.attend.heads / at_once;
        let work = self.multiplications(panels.iter().cloned().flatten());
        let units = panels.len() * heads;
        let size = units.div_ceil(PARTS * pool::pool().threads());
        let parts = units.div_ceil(size.max(1));
        parallel_parts(parts, work, &|indices| {
            for part in indices {
                let first = last_first(part, parts) * size;
                for unit in first..units.min(first + size) {
                    let (panel, h) = (panels[unit / heads].clone(), unit % heads * at_once);
                    let plan = &self.attend.plans[self.attend.queries[panel.start].sequence];
                    let positions = self.attend.queries[panel.clone()]
                        .iter()
                        .map(|q| q.position);
                    let visible: Vec<_> = positions.map(|p| plan.visible_keys(p)).collect();
                    let [keys, values] = self.kv(self.attend.queries[panel.start].sequence);
                    let group = h / self.attend.queries_per_kv;
                    let heads = h..h + at_once;
                    self.flash_panel((panel, heads), [keys, values], group, &visible);
                }
            }
        });
    }

    /// The number of query heads that share keys and values converted to float32.
    fn heads_at_once(&self, panels: usize) -> usize {
        let Attention {
            heads,
            queries_per_kv,
            ref plans,
            ..
        } = *self.attend;
        match plans.iter().all(|plan| plan.kv_type == KvType::Float32) {
            // Nothing is converted.
            true => 1,
            false => heads_at_once((heads, queries_per_kv), panels, pool::pool().threads()),
        }
    }

    /// Like [`Self::flash_panels`], for bidirectional attention. All panels of a run read the same
    /// keys. So each part copies the keys and values of a head into contiguous rows. Rows of a
    /// projection are far apart in memory, and would compete for few cache sets.
    fn flash_runs(&self, panels: &[Range<usize>]) {
        let (heads, d, isa) = (self.attend.heads, self.attend.head_dim, self.attend.isa);
        let work = self.multiplications(panels.iter().cloned().flatten());
        let runs = self.panel_runs(panels);
        parallel_parts(runs.len() * heads, work, &|indices| {
            PACKED.with_borrow_mut(|scratch| {
                for unit in indices {
                    let (run, h) = (&runs[unit / heads], unit % heads);
                    let group = h / self.attend.queries_per_kv;
                    let [keys, values] = self.kv(run.sequence);
                    let (from, to) = (run.keys.start, run.keys.end);
                    let [packed_keys, packed_values] = &mut scratch.packed;
                    let wide = &mut scratch.wide;
                    let [keys, values] = match run.panels.len() {
                        // A single panel reads each key only once, so a copy would not pay off.
                        1 => [keys, values].map(|rows| rows.of_head(group, (from, to), d)),
                        _ => [
                            keys.contiguous_head(isa, (group, from, to), d, (packed_keys, wide)),
                            values.contiguous_head(
                                isa,
                                (group, from, to),
                                d,
                                (packed_values, wide),
                            ),
                        ],
                    };
                    for (panel, visible) in &run.panels {
                        let heads = h..h + 1;
                        self.flash_panel((panel.clone(), heads), [keys, values], 0, visible);
                    }
                }
            });
        });
    }

    /// Divides the panels into runs, each of one sequence. There are several runs for each thread,
    /// if there are enough panels.
    fn panel_runs(&self, panels: &[Range<usize>]) -> Vec<PanelRun> {
        let queries = &self.attend.queries;
        let sequence = |panel: &Range<usize>| queries[panel.start].sequence;
        let sequences: Vec<_> = panels.chunk_by(|a, b| sequence(a) == sequence(b)).collect();
        let wanted = RUNS * pool::pool().threads();
        let parts = wanted.div_ceil(sequences.len().max(1) * self.attend.heads);
        let mut runs = Vec::new();
        for panels in sequences {
            for panels in panels.chunks(panels.len().div_ceil(parts.max(1))) {
                let sequence = sequence(&panels[0]);
                let plan = &self.attend.plans[sequence];
                let visible = |panel: &Range<usize>| {
                    let positions = queries[panel.clone()].iter().map(|q| q.position);
                    positions.map(|p| plan.visible_keys(p)).collect()
                };
                let mut panels: Vec<(_, Vec<VisibleKeys>)> = (panels.iter())
                    .map(|panel| (panel.clone(), visible(panel)))
                    .collect();
                let all = || panels.iter().flat_map(|(_, visible)| visible);
                let start = all().map(|v| v.ranges[0].start).min().unwrap_or(0);
                let end = all().map(|v| v.ranges[0].end).max().unwrap_or(0);
                for visible in panels.iter_mut().flat_map(|(_, visible)| visible) {
                    let range = &mut visible.ranges[0];
                    *range = range.start - start..range.end - start;
                }
                runs.push(PanelRun {
                    sequence,
                    panels,
                    keys: start..end,
                });
            }
        }
        runs
    }

    /// Computes a panel of queries of some heads, over keys and values of head `group` of `kv`.
    fn flash_panel(
        &self,
        (panel, heads): (Range<usize>, Range<usize>),
        [keys, values]: [KvRows<'_>; 2],
        group: usize,
        visible_keys: &[VisibleKeys],
    ) {
        let mut positions = [0.0; LANES];
        for (position, query) in positions
            .iter_mut()
            .zip(&self.attend.queries[panel.clone()])
        {
            *position = query.position as f32;
        }
        let head = |h: usize| FlashHead {
            sink: self.sinks.map(|s| s[h]),
            slope: self.attend.slopes.get(h).copied(),
            queries: self.plain_queries(&panel, h),
        };
        let flash_panel = FlashPanel {
            attend: self.attend,
            keys,
            values,
            group,
            heads: &heads.clone().map(head).collect::<Vec<_>>(),
            positions,
            visible_keys,
        };
        flash_panel.run(
            |h, i, query| self.query(panel.start + i, heads.start + h, query),
            |h, i| {
                // SAFETY: no other unit of work writes these heads of this query.
                unsafe { self.output(panel.start + i, heads.start + h) }
            },
        );
    }
}

/// The number of query heads to compute at once: as many heads of a key head as possible, if each
/// thread still gets [`PARTS`] parts.
fn heads_at_once((heads, per_kv): (usize, usize), panels: usize, threads: usize) -> usize {
    let fits = |n: &usize| per_kv.is_multiple_of(*n) && panels * heads / n >= PARTS * threads;
    (1..=flash_attention::MOST_HEADS)
        .rev()
        .find(fits)
        .unwrap_or(1)
}

/// Returns the index of the part that is computed as the `i`-th. Each thread computes its parts
/// from the last to the first. The last part attends to the most keys and takes longest, so it
/// should not be the only one left at the end. A thread's parts are the rows that the same thread
/// has projected.
fn last_first(i: usize, parts: usize) -> usize {
    let indices = pool::pool().owner_parts(parts, i);
    indices.start + indices.end - 1 - i
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_computed_at_once_if_each_thread_gets_parts() {
        for (heads, panels, threads, wanted) in [
            ((32, 4), 32, 2, 4),
            ((16, 2), 32, 2, 2),
            ((24, 3), 32, 2, 3),
            ((25, 5), 32, 2, 1),
            ((24, 6), 32, 2, 3),
            ((32, 4), 2, 2, 2),
            ((16, 2), 1, 2, 1),
            ((32, 4), 32, 64, 1),
            ((32, 1), 32, 2, 1),
        ] {
            let at_once = heads_at_once(heads, panels, threads);
            assert_eq!(at_once, wanted, "{heads:?} {panels} {threads}");
        }
    }

    #[test]
    fn backward_is_each_part_once() {
        for parts in 1..100 {
            let mut all: Vec<usize> = (0..parts).map(|i| last_first(i, parts)).collect();
            let first = pool::pool().owner_parts(parts, parts - 1).start;
            assert_eq!(
                all[first],
                parts - 1,
                "the last is the first of its thread's"
            );
            all.sort_unstable();
            assert!(all.into_iter().eq(0..parts), "{parts}");
        }
    }
}
