//! Attention over a cache as one operation: norms and rotation of queries and keys, scores, softmax and the
//! weighted sum, for rows of any length, straight from the packed projection and the caches.

use std::ops::Range;

use crate::attention::attend::{Attend, Rows, Task};
use crate::attention::flash_attention::{self, Sweep};
use crate::attention::kv_write::Fresh;
use crate::attention::rope::turns;
use crate::layout::tile::LANES;
use crate::partition::{Output, spread};
use crate::pool;
use crate::work::{Input, Work};

/// Parts of a thread's sweeps, so that others can take what a late one has not begun.
const PARTS: usize = 16;

impl Work for Attend {
    fn outputs(&self) -> usize {
        self.queries.len() * self.heads * self.d
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        self.run_with(inputs, None, output);
    }
}

impl Attend {
    /// The same for keys and values of all queries that are to be stored before.
    ///
    /// # Safety
    /// As of [`Work::run`]; keys and values must be float32, and nothing else may use them meanwhile.
    pub unsafe fn run_storing(&self, inputs: &[Input], fresh: &Fresh<'_>, output: &mut [f32]) {
        self.run_with(inputs, Some(fresh), output);
    }

    /// What is `fresh` is as [`Self::run_storing`] is told.
    fn run_with(&self, inputs: &[Input], fresh: Option<&Fresh<'_>>, output: &mut [f32]) {
        let mut inputs = inputs.iter();
        let packed = inputs.next();
        let norm = self.eps.map(|eps| (inputs.next(), eps));
        let sinks = if self.sinks { inputs.next() } else { None };
        fn slice(i: Option<&Input>) -> &[f32] {
            // SAFETY: `Heads::attend` gave arrays of float32.
            i.map_or(&[][..], |i| unsafe { i.as_slice::<f32>() })
        }
        let (packed, sinks) = (slice(packed), sinks.map(|i| slice(Some(i))));
        let norm = norm.map(|(weight, eps)| (slice(weight), eps));
        let (mut sweeps, mut singles) = (Vec::new(), Vec::new());
        for panel in self.panels() {
            if panel.len() >= flash_attention::MANY && flash_attention::fits(self.d) {
                sweeps.push(panel);
            } else {
                singles.extend(panel);
            }
        }
        let rotation = self.rotation.as_ref().map(|r| {
            let positions: Vec<i32> = self.queries.iter().map(|q| q.position).collect();
            (r, turns(r, &positions))
        });
        let rotation = rotation.as_ref().map(|(r, turns)| (*r, &**turns));
        // Whoever looks at a head's keys writes the fresh one before, where there is but one.
        let by_head = self.by_head(&singles);
        let mut later = None;
        if let Some(fresh) = fresh {
            if sweeps.is_empty() && fresh.single() && by_head {
                later = Some(fresh);
            } else {
                let turns = rotation.map_or(&[][..], |(_, turns)| turns);
                // SAFETY: what `run_storing` is promised.
                unsafe { fresh.store(packed, turns) };
            }
        }
        // SAFETY: as of `slice`; they are stored, or are read by whom stores them.
        let rest: Vec<Rows<'_>> = inputs.map(|i| unsafe { Rows::of(i) }).collect();
        let task = Task {
            attend: self,
            packed,
            norm,
            rotation,
            rest: &rest,
            sinks,
            out: Output::new(output),
        };
        task.sweeps(&sweeps);
        if by_head {
            task.glances_by_head(&singles, later);
        } else {
            task.glances_by_segment(&singles);
        }
    }

    /// The queries in runs of one row, of as many as a sweep takes.
    fn panels(&self) -> Vec<Range<usize>> {
        let mut panels = Vec::new();
        let mut from = 0;
        while from < self.queries.len() {
            let lane = self.queries[from].lane;
            let most = (from + LANES).min(self.queries.len());
            let to = (from..most)
                .find(|&i| self.queries[i].lane != lane)
                .unwrap_or(most);
            panels.push(from..to);
            from = to;
        }
        panels
    }
}

impl Task<'_> {
    /// Many queries of a row at a time.
    fn sweeps(&self, panels: &[Range<usize>]) {
        let heads = self.attend.heads;
        let work = self.work(panels.iter().cloned().flatten());
        let units = panels.len() * heads;
        let size = units.div_ceil(PARTS * pool::pool().width());
        let parts = units.div_ceil(size.max(1));
        spread(parts, work, &|own| {
            for part in own {
                let first = backward(part, parts) * size;
                for unit in first..units.min(first + size) {
                    self.sweep(panels[unit / heads].clone(), unit % heads);
                }
            }
        });
    }

    fn sweep(&self, panel: Range<usize>, h: usize) {
        let queries = &self.attend.queries[panel.clone()];
        let lane = queries[0].lane;
        let plan = &self.attend.plans[lane];
        let seen: Vec<_> = queries.iter().map(|q| plan.seen(q.position)).collect();
        let sweep = Sweep {
            attend: self.attend,
            keys: self.rest[2 * lane],
            values: self.rest[2 * lane + 1],
            group: h / self.attend.repeats,
            sink: self.sinks.map(|s| s[h]),
            seen: &seen,
        };
        sweep.run(
            |i, query| self.query(panel.start + i, h, query),
            |i, found| {
                // SAFETY: this head of this query is this unit's alone.
                unsafe { self.place(panel.start + i, h) }.copy_from_slice(found);
            },
        );
    }
}

/// Which of so many parts is number `i` of those that threads take: each has its own, the last of them first. That one sees the most
/// keys, and should not be left over for one thread; the thread's own rows are those that it has projected.
fn backward(i: usize, parts: usize) -> usize {
    let own = pool::pool().around(parts, i);
    own.start + own.end - 1 - i
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_is_each_part_once() {
        for parts in 1..100 {
            let mut all: Vec<usize> = (0..parts).map(|i| backward(i, parts)).collect();
            let first = pool::pool().around(parts, parts - 1).start;
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
