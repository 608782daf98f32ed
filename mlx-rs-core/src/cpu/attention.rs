//! Attention over a cache as one operation: norms and rotation of queries and keys, scores, softmax and the
//! weighted sum, for rows of any length, straight from the packed projection and the caches.

use std::ops::Range;

use super::glance::{self, Found, Glance};
use super::heads::count;
use super::host_op::{Input, Work};
use super::kernel::Isa;
use super::rotation::{Rotation, rotate, turns};
use super::share::{Output, share};
use super::store::normalize;
use super::sweep::{self, Sweep};
use super::tile::LANES;

/// One query: of which lane, where in the packed rows, and its position.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query {
    pub lane: usize,
    pub row: usize,
    pub position: i32,
}

/// What the queries of a lane may see.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    /// So many keys count.
    pub n: usize,
    /// As in [`super::Lane`].
    pub order: Option<(usize, i32)>,
    /// As in [`super::Lane`].
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

/// Attention as [`super::Heads`] plans it.
pub(super) struct Attend {
    pub heads: usize,
    /// Query heads for each head of keys and values.
    pub repeats: usize,
    pub d: usize,
    /// Elements of a packed row.
    pub width: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// Of the norm of queries.
    pub eps: Option<f32>,
    pub sinks: bool,
    pub rotation: Option<Rotation>,
    pub queries: Vec<Query>,
    /// Of each lane.
    pub plans: Vec<Plan>,
    pub isa: Isa,
}

/// Keys or values of a row of a batch.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    data: &'a [f32],
    /// Elements from one head to the next.
    head: usize,
    /// Elements from one position to the next.
    pub position: usize,
}

impl<'a> Rows<'a> {
    /// Everything from the first element of position `from` to the last before position `to`.
    pub(super) fn reach(&self, h: usize, from: usize, to: usize, d: usize) -> &'a [f32] {
        let start = h * self.head + from * self.position;
        &self.data[start..start + (to - from - 1) * self.position + d]
    }
}

impl Work for Attend {
    fn outputs(&self) -> usize {
        self.queries.len() * self.heads * self.d
    }

    fn run(&self, inputs: &[Input], output: &mut [f32]) {
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
        let rest: Vec<Rows<'_>> = inputs
            .map(|i| {
                let strides = i.strides();
                Rows {
                    // SAFETY: as above; the strides say how far the elements reach.
                    data: unsafe { i.as_reach::<f32>() },
                    head: strides[1],
                    position: strides[2],
                }
            })
            .collect();
        let rotation = self.rotation.as_ref().map(|r| {
            let positions: Vec<i32> = self.queries.iter().map(|q| q.position).collect();
            (r, turns(r, &positions))
        });
        let rotation = rotation.as_ref().map(|(r, turns)| (*r, &**turns));
        let task = Task {
            attend: self,
            packed,
            norm,
            rotation,
            rest: &rest,
            sinks,
            out: Output::new(output),
        };
        let (mut sweeps, mut singles) = (Vec::new(), Vec::new());
        for panel in self.panels() {
            if panel.len() >= sweep::MANY && sweep::fits(self.d) {
                sweeps.push(panel);
            } else {
                singles.extend(panel);
            }
        }
        task.sweeps(&sweeps);
        task.glances(&singles);
    }
}

impl Attend {
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
struct Task<'a> {
    attend: &'a Attend,
    packed: &'a [f32],
    norm: Option<(&'a [f32], f32)>,
    rotation: Option<(&'a Rotation, &'a [(f32, f32)])>,
    /// Keys and values of each row.
    rest: &'a [Rows<'a>],
    sinks: Option<&'a [f32]>,
    out: Output,
}

impl Task<'_> {
    /// Head `h` of query `q`, through norm and rotation, scaled.
    fn query(&self, q: usize, h: usize, query: &mut [f32]) {
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
        if let Some((rotation, turns)) = self.rotation {
            let pairs = rotation.radians.len();
            rotate(rotation, &turns[q * pairs..(q + 1) * pairs], query);
        }
        query.iter_mut().for_each(|v| *v *= scale);
    }

    /// Where head `h` of query `q` goes.
    ///
    /// # Safety
    /// Nobody else may use it.
    #[allow(
        clippy::mut_from_ref,
        reason = "each query and head has a place of its own"
    )]
    unsafe fn place(&self, q: usize, h: usize) -> &mut [f32] {
        let Attend { d, heads, .. } = *self.attend;
        // SAFETY: the caller's promise.
        unsafe { self.out.part((q * heads + h) * d, d) }
    }

    /// Multiplications for queries, roughly.
    fn work(&self, queries: impl Iterator<Item = usize>) -> usize {
        let Attend { heads, d, .. } = *self.attend;
        let keys: usize = queries
            .map(|q| {
                let (kept, range) = self.seen(q);
                kept + range.len() + 16
            })
            .sum();
        2 * keys * heads * d
    }

    /// The keys that a query sees.
    fn seen(&self, q: usize) -> (usize, Range<usize>) {
        let Query { lane, position, .. } = self.attend.queries[q];
        self.attend.plans[lane].seen(position)
    }

    /// Many queries of a row at a time.
    fn sweeps(&self, panels: &[Range<usize>]) {
        let heads = self.attend.heads;
        let work = self.work(panels.iter().cloned().flatten());
        share(panels.len() * heads, work, &|from, to| {
            for unit in from..to {
                // The longest first, so that none of them is left over for one thread.
                let (panel, h) = (panels.len() - 1 - unit / heads, unit % heads);
                self.sweep(panels[panel].clone(), h);
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

    /// Single queries: the heads that share keys together, segment by segment.
    fn glances(&self, queries: &[usize]) {
        let Attend {
            d, repeats, heads, ..
        } = *self.attend;
        if queries.is_empty() {
            return;
        }
        let groups = heads / repeats;
        // Each query's segments begin here.
        let mut begins = Vec::with_capacity(queries.len() + 1);
        let mut count = 0;
        for &q in queries {
            begins.push(count);
            let (kept, range) = self.seen(q);
            count += glance::segments(kept + range.len());
        }
        begins.push(count);
        let mut sums = vec![0.0f32; count * heads * d];
        let mut states = vec![(0.0f32, 0.0f32); count * heads];
        let (all_sums, all_states) = (Output::new(&mut sums), Output::new(&mut states));
        share(
            count * groups,
            self.work(queries.iter().copied()),
            &|from, to| {
                let (mut own, mut scores) = (vec![0.0f32; repeats * d], Vec::new());
                let mut known = None;
                for unit in from..to {
                    // The segments of a group stand one after another, so that one thread makes its queries once.
                    let at = begins.partition_point(|&begin| begin * groups <= unit) - 1;
                    let own_unit = unit - begins[at] * groups;
                    let segments = begins[at + 1] - begins[at];
                    let (group, segment) = (own_unit / segments, own_unit % segments);
                    let part = begins[at] + segment;
                    let q = queries[at];
                    if known != Some((q, group)) {
                        for (i, own) in own.chunks_exact_mut(d).enumerate() {
                            self.query(q, group * repeats + i, own);
                        }
                        known = Some((q, group));
                    }
                    let lane = self.attend.queries[q].lane;
                    let (kept, range) = self.seen(q);
                    let glance = Glance {
                        isa: self.attend.isa,
                        d,
                        softcap: self.attend.softcap,
                        keys: self.rest[2 * lane],
                        values: self.rest[2 * lane + 1],
                        group,
                        runs: [0..kept, range],
                    };
                    let head = part * heads + group * repeats;
                    // SAFETY: these heads of this segment are this unit's alone.
                    let found = unsafe {
                        Found {
                            sums: all_sums.part(head * d, repeats * d),
                            states: all_states.part(head, repeats),
                        }
                    };
                    glance.look(segment, &own, &mut scores, found);
                }
            },
        );
        let pieces = count * heads * d;
        share(queries.len() * heads, pieces, &|from, to| {
            for unit in from..to {
                let (at, h) = (unit / heads, unit % heads);
                let parts = (begins[at]..begins[at + 1]).map(|part| {
                    let head = part * heads + h;
                    (&sums[head * d..(head + 1) * d], states[head])
                });
                // SAFETY: this head of this query is this unit's alone.
                let place = unsafe { self.place(queries[at], h) };
                glance::together(parts, self.sinks.map(|s| s[h]), place);
            }
        });
    }
}
