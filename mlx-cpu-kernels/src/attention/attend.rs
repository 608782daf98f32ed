//! Attention over a cache as one operation: norms and rotation of queries and keys, scores, softmax and the
//! weighted sum, for rows of any length, straight from the packed projection and the caches.

use std::marker::PhantomData;
use std::ops::Range;

use crate::attention::flash_attention::{self, Sweep};
use crate::attention::kv_write::{Fresh, normalize};
use crate::attention::rope::{Rotation, rotate, turns};
use crate::partition::{Output, spread};
use crate::pool;
use crate::simd::dispatch::Isa;
use crate::simd::microkernel::LANES;
use crate::work::count;
use crate::work::{Input, Work};

/// Parts of a thread's sweeps, so that others can take what a late one has not begun.
const PARTS: usize = 16;

/// One query: of which lane, where in the packed rows, and its position.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    /// The lane of the batch.
    pub lane: usize,
    /// The packed row.
    pub row: usize,
    /// Its position in the sequence.
    pub position: i32,
}

/// What the queries of a lane may see.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// So many keys count.
    pub n: usize,
    /// The number of kept keys, which stand first, and the position of the first of the others. `None`: the
    /// keys are unordered, and a query sees all.
    pub order: Option<(usize, i32)>,
    /// A query sees the kept keys and this number of others, the last ones.
    pub window: Option<i32>,
}

impl Plan {
    /// The keys that a query sees: the first so many, and a range.
    fn seen(&self, position: i32) -> (usize, Range<usize>) {
        let Some((kept, start)) = self.order else {
            return (0, 0..self.n);
        };
        let kept_seen = kept.min(count(position.saturating_add(1)));
        // Key `kept + i` stands at `start + i`.
        let after = |p: i32| kept + count(p.saturating_sub(start)).min(self.n - kept);
        let end = after(position.saturating_add(1));
        let begin = match self.window {
            Some(window) => after(position.saturating_add(1).saturating_sub(window)),
            None => kept,
        };
        (kept_seen, begin.min(end)..end)
    }
}

/// Attention of packed queries over caches. Its inputs are float32: packed rows `[rows, width]`, the weight of
/// the norm of queries `[d]`, the sinks `[heads]`, and keys and values `[1, Hkv, n, d]` of each lane.
pub struct Attend {
    /// Query heads.
    pub heads: usize,
    /// Query heads for each head of keys and values.
    pub repeats: usize,
    /// Elements of a head.
    pub d: usize,
    /// Elements of a packed row.
    pub width: usize,
    /// The factor on scores.
    pub scale: f32,
    /// Scores are squeezed into `-cap..cap` by a tanh.
    pub softcap: Option<f32>,
    /// What the norm of queries adds under the root, where there is one.
    pub eps: Option<f32>,
    /// Whether there are sinks.
    pub sinks: bool,
    /// Rotary positions of queries.
    pub rotation: Option<Rotation>,
    /// The queries, one row of the output each.
    pub queries: Vec<Query>,
    /// Of each lane.
    pub plans: Vec<Plan>,
    /// The instruction set.
    pub isa: Isa,
}

/// Keys or values of a row of a batch.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    data: *const [f32],
    /// Elements from one head to the next.
    head: usize,
    /// Elements from one position to the next.
    pub position: usize,
    memory: PhantomData<&'a [f32]>,
}

// SAFETY: elements that no thread writes while one reads them, as promised to `Rows::of`.
unsafe impl Sync for Rows<'_> {}

impl<'a> Rows<'a> {
    /// # Safety
    /// The array must be of float32; what is asked of [`Self::reach`] must not be written any more.
    pub(crate) unsafe fn of(input: &'a Input) -> Self {
        let strides = input.strides();
        Self {
            // SAFETY: the caller's promise; the strides say how far the elements reach.
            data: unsafe { input.reach() },
            head: strides[1],
            position: strides[2],
            memory: PhantomData,
        }
    }

    /// Where a position begins, if it is there.
    pub(crate) fn place(&self, h: usize, at: usize) -> *const f32 {
        let first = self.data.cast::<f32>();
        first.wrapping_add(h * self.head + at * self.position)
    }

    /// Everything from the first element of position `from` to the last before position `to`.
    pub(crate) fn reach(&self, h: usize, from: usize, to: usize, d: usize) -> &'a [f32] {
        let start = h * self.head + from * self.position;
        let n = (to - from - 1) * self.position + d;
        assert!(start <= self.data.len() && n <= self.data.len() - start);
        // SAFETY: within what is there, which is not written any more.
        unsafe { std::slice::from_raw_parts(self.data.cast::<f32>().add(start), n) }
    }
}

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

    /// The keys that a query sees.
    pub(crate) fn seen(&self, q: usize) -> (usize, Range<usize>) {
        let Query { lane, position, .. } = self.queries[q];
        self.plans[lane].seen(position)
    }

    /// The first position that a query sees.
    pub(crate) fn first_seen(&self, q: usize) -> usize {
        match self.seen(q) {
            (0, range) => range.start,
            _ => 0,
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

/// What all units of an operation read, and where they write.
pub(crate) struct Task<'a> {
    pub attend: &'a Attend,
    pub packed: &'a [f32],
    norm: Option<(&'a [f32], f32)>,
    rotation: Option<(&'a Rotation, &'a [f32])>,
    /// Keys and values of each row.
    pub rest: &'a [Rows<'a>],
    pub sinks: Option<&'a [f32]>,
    out: Output,
}

impl Task<'_> {
    /// Head `h` of query `q`, through norm and rotation, scaled.
    pub(crate) fn query(&self, q: usize, h: usize, query: &mut [f32]) {
        let Attend {
            d,
            width,
            isa,
            scale,
            ..
        } = *self.attend;
        let start = self.attend.queries[q].row * width + h * d;
        query.copy_from_slice(&self.packed[start..start + d]);
        if let Some((weight, eps)) = self.norm {
            normalize(isa, weight, eps, query);
        }
        if let Some((rotation, _)) = self.rotation {
            rotate(isa, rotation, self.turns(q), query);
        }
        query.iter_mut().for_each(|v| *v *= scale);
    }

    /// The packed row of query `q`.
    pub(crate) fn packed_row(&self, q: usize) -> &[f32] {
        let width = self.attend.width;
        &self.packed[self.attend.queries[q].row * width..][..width]
    }

    /// Of the position of query `q`.
    pub(crate) fn turns(&self, q: usize) -> &[f32] {
        let Some((rotation, turns)) = self.rotation else {
            return &[];
        };
        // A sine and a cosine.
        let each = 2 * rotation.radians.len();
        &turns[q * each..(q + 1) * each]
    }

    /// Where head `h` of query `q` goes.
    ///
    /// # Safety
    /// Nobody else may use it.
    #[allow(
        clippy::mut_from_ref,
        reason = "each query and head has a place of its own"
    )]
    pub(crate) unsafe fn place(&self, q: usize, h: usize) -> &mut [f32] {
        let Attend { d, heads, .. } = *self.attend;
        // SAFETY: the caller's promise.
        unsafe { self.out.part((q * heads + h) * d, d) }
    }

    /// Multiplications for queries, roughly.
    pub(crate) fn work(&self, queries: impl Iterator<Item = usize>) -> usize {
        let Attend { heads, d, .. } = *self.attend;
        let keys: usize = queries
            .map(|q| {
                let (kept, range) = self.attend.seen(q);
                kept + range.len() + 16
            })
            .sum();
        2 * keys * heads * d
    }

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
