//! Single queries of an attention, and which thread looks at what: at all keys of a head where there are enough heads
//! and rows for all threads, else at a segment of them, which are put together after.

use std::cell::RefCell;

use crate::attention::attend::{Attend, Task};
use crate::attention::decode_attention::{self, Found, Glance};
use crate::attention::kv_write::Fresh;
use crate::partition::{Output, share, spread};
use crate::pool;
use crate::simd::prefetch;

/// What a thread needs to look at the keys of a head.
#[derive(Default)]
struct Desk {
    /// `[heads, D]`: queries that look together.
    queries: Vec<f32>,
    scores: Vec<f32>,
    /// `[segments, heads, D]`
    sums: Vec<f32>,
    /// `[segments, heads]`
    states: Vec<(f32, f32)>,
}

thread_local! {
    static DESK: RefCell<Desk> = RefCell::default();
}

impl Attend {
    /// Whether one thread each looks at all keys of a head: none of them has much more to do than others then.
    pub(crate) fn by_head(&self, queries: &[usize]) -> bool {
        let groups = self.heads / self.repeats;
        let (mut most, mut all) = (0, 0);
        for &q in queries {
            let keys = self.keys_of(q);
            most = most.max(keys);
            all += keys;
        }
        decode_attention::segments(most) == 1 || 4 * most * pool::pool().width() <= groups * all
    }
}

impl Task<'_> {
    /// Each head of keys and values by one thread, which writes a `fresh` one's before. All queries of a row see it.
    pub(crate) fn glances_by_head(&self, queries: &[usize], fresh: Option<&Fresh<'_>>) {
        let Attend {
            d, repeats, heads, ..
        } = *self.attend;
        if queries.is_empty() {
            return;
        }
        let groups = heads / repeats;
        let work = self.work(queries.iter().copied());
        let unit = |unit: usize| {
            let (at, group) = (unit / groups, unit % groups);
            let q = queries[at];
            if group == 0 {
                // Another thread may have written them.
                for &q in queries[at..].iter().take(2) {
                    prefetch::read(self.packed_row(q));
                }
            }
            if let Some(fresh) = fresh {
                let row = self.attend.queries[q].lane;
                // SAFETY: what `Attend::run_storing` is promised; rows have one token, and this head of it is this unit's alone.
                unsafe { fresh.store_head(self.packed, self.turns(q), (row, 0, group)) };
            }
            DESK.with_borrow_mut(|desk| {
                self.fill_queries(q, group, &mut desk.queries);
                let segments = decode_attention::segments(self.attend.keys_of(q));
                desk.sums.resize(segments * repeats * d, 0.0);
                desk.states.resize(segments * repeats, (0.0, 0.0));
                let glance = self.glance(&queries[at..], group);
                let each = desk.sums.chunks_exact_mut(repeats * d);
                let each = each.zip(desk.states.chunks_exact_mut(repeats));
                for (segment, (sums, states)) in each.enumerate() {
                    let found = Found { sums, states };
                    glance.look(segment, &desk.queries, &mut desk.scores, found);
                }
                for i in 0..repeats {
                    let parts = (0..segments).map(|segment| {
                        let head = segment * repeats + i;
                        (&desk.sums[head * d..(head + 1) * d], desk.states[head])
                    });
                    self.conclude(q, group * repeats + i, parts);
                }
            });
        };
        spread(queries.len() * groups, work, &|own| own.for_each(unit));
    }

    /// Segment by segment.
    pub(crate) fn glances_by_segment(&self, queries: &[usize]) {
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
            count += decode_attention::segments(self.attend.keys_of(q));
        }
        begins.push(count);
        let mut sums = vec![0.0f32; count * heads * d];
        let mut states = vec![(0.0f32, 0.0f32); count * heads];
        let (all_sums, all_states) = (Output::new(&mut sums), Output::new(&mut states));
        let work = self.work(queries.iter().copied());
        share(count * groups, work, &|from, to| {
            DESK.with_borrow_mut(|desk| {
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
                        self.fill_queries(q, group, &mut desk.queries);
                        known = Some((q, group));
                    }
                    let head = part * heads + group * repeats;
                    // SAFETY: these heads of this segment are this unit's alone.
                    let found = unsafe {
                        Found {
                            sums: all_sums.part(head * d, repeats * d),
                            states: all_states.part(head, repeats),
                        }
                    };
                    let glance = self.glance(&queries[at..], group);
                    glance.look(segment, &desk.queries, &mut desk.scores, found);
                }
            });
        });
        let pieces = count * heads * d;
        share(queries.len() * heads, pieces, &|from, to| {
            for unit in from..to {
                let (at, h) = (unit / heads, unit % heads);
                let parts = (begins[at]..begins[at + 1]).map(|part| {
                    let head = part * heads + h;
                    (&sums[head * d..(head + 1) * d], states[head])
                });
                self.conclude(queries[at], h, parts);
            }
        });
    }

    /// The queries of the heads that share those of `group`, `[heads, D]`.
    fn fill_queries(&self, q: usize, group: usize, queries: &mut Vec<f32>) {
        let Attend { d, repeats, .. } = *self.attend;
        queries.resize(repeats * d, 0.0);
        for (i, own) in queries.chunks_exact_mut(d).enumerate() {
            self.query(q, group * repeats + i, own);
        }
    }

    /// For the first of these queries, and a head of keys and values.
    fn glance(&self, queries: &[usize], group: usize) -> Glance<'_> {
        let q = queries[0];
        let lane = |q: usize| self.attend.queries[q].lane;
        let first =
            |q: usize, group: usize| self.rest[2 * lane(q)].place(group, self.attend.first_seen(q));
        let after = match queries.get(1) {
            _ if group + 1 < self.attend.heads / self.attend.repeats => first(q, group + 1),
            Some(&next) => first(next, 0),
            None => std::ptr::null(),
        };
        let (kept, range) = self.attend.seen(q);
        Glance {
            isa: self.attend.isa,
            d: self.attend.d,
            softcap: self.attend.softcap,
            keys: self.rest[2 * lane(q)],
            values: self.rest[2 * lane(q) + 1],
            group,
            runs: [0..kept, range],
            after,
        }
    }

    /// Puts together what head `h` of query `q` found in all segments, of which nobody else does that.
    fn conclude<'a>(
        &self,
        q: usize,
        h: usize,
        parts: impl Iterator<Item = (&'a [f32], (f32, f32))> + Clone,
    ) {
        // SAFETY: this head of this query is the caller's alone.
        let place = unsafe { self.place(q, h) };
        decode_attention::together(parts, self.sinks.map(|s| s[h]), place);
    }
}
