//! Divides a decode attention among threads. Each thread computes whole heads if there are enough
//! heads. Otherwise threads compute blocks of the cache, which are then combined. The arithmetic
//! is in `decode_attention.rs`.

use std::cell::RefCell;

use crate::attention::attend::{Attention, AttentionTask};
use crate::attention::decode_attention::{self, BlockScratch, DecodeTask, PartialSoftmax};
use crate::attention::key_blocks::BLOCK_KEYS;
use crate::attention::kv_write::NewKv;
use crate::memory::resize;
use crate::partition::{SharedOutput, parallel_parts, parallel_ranges};
use crate::pool;
use crate::simd::prefetch;

/// Scratch memory of a thread.
#[derive(Default)]
struct DecodeScratch {
    /// Queries that are computed together, `[heads, D]`.
    queries: Vec<f32>,
    block: BlockScratch,
    /// Weighted sums of values, `[blocks, heads, D]`.
    sums: Vec<f32>,
    /// Maximum score and sum of exponentials, `[blocks, heads]`.
    states: Vec<(f32, f32)>,
}

thread_local! {
    static SCRATCH: RefCell<DecodeScratch> = RefCell::default();
}

impl Attention {
    /// Whether a single thread computes each key head: if no query has more than one block of keys,
    /// or if whole heads balance the load between threads.
    pub(crate) fn by_head(&self, queries: &[usize]) -> bool {
        let groups = self.heads / self.queries_per_kv;
        let (mut most, mut all) = (0, 0);
        for &q in queries {
            let keys = self.visible_count(q);
            most = most.max(keys);
            all += keys;
        }
        most <= BLOCK_KEYS || 4 * most * pool::pool().threads() <= groups * all
    }
}

impl AttentionTask<'_> {
    /// Computes each key head in one thread. The thread first writes its part of `new_kv`, so all
    /// queries of a row see the new keys and values.
    pub(crate) fn decode_by_head(&self, queries: &[usize], new_kv: Option<&NewKv<'_>>) {
        let Attention {
            head_dim: d,
            queries_per_kv,
            heads,
            ..
        } = *self.attend;
        if queries.is_empty() {
            return;
        }
        let groups = heads / queries_per_kv;
        let work = self.multiplications(queries.iter().copied());
        let unit = |unit: usize| {
            let (at, group) = (unit / groups, unit % groups);
            let q = queries[at];
            if group == 0 {
                // Another thread may have written the first packed rows, so this core's cache may
                // lack them.
                for &q in queries[at..].iter().take(2) {
                    prefetch::read(self.packed_row(q));
                }
            }
            if let Some(new_kv) = new_kv {
                let row = self.attend.queries[q].sequence;
                // SAFETY: the caller of `Attention::run_with_new_kv` guarantees the caches. Each
                // row has one token, and only this unit uses this head of that token.
                unsafe { new_kv.write_kv_head(self.packed, self.rope_table(q), (row, 0, group)) };
            }
            SCRATCH.with_borrow_mut(|scratch| {
                self.fill_queries(q, group, &mut scratch.queries);
                let blocks = self.attend.visible_keys(q).blocks();
                resize(&mut scratch.sums, blocks * queries_per_kv * d, 0.0);
                resize(&mut scratch.states, blocks * queries_per_kv, (0.0, 0.0));
                let decode_task = self.decode_task(&queries[at..], group);
                let each = scratch.sums.chunks_exact_mut(queries_per_kv * d);
                let each = each.zip(scratch.states.chunks_exact_mut(queries_per_kv));
                for (block, (sums, states)) in each.enumerate() {
                    let partial = PartialSoftmax { sums, states };
                    decode_task.run_block(block, &scratch.queries, &mut scratch.block, partial);
                }
                for i in 0..queries_per_kv {
                    let parts = (0..blocks).map(|block| {
                        let head = block * queries_per_kv + i;
                        (
                            &scratch.sums[head * d..(head + 1) * d],
                            scratch.states[head],
                        )
                    });
                    self.add_blocks(q, group * queries_per_kv + i, parts);
                }
            });
        };
        parallel_parts(queries.len() * groups, work, &|units| units.for_each(unit));
    }

    /// Computes blocks of all heads, then combines the blocks.
    pub(crate) fn decode_by_block(&self, queries: &[usize]) {
        let Attention {
            head_dim: d,
            queries_per_kv,
            heads,
            ..
        } = *self.attend;
        if queries.is_empty() {
            return;
        }
        let groups = heads / queries_per_kv;
        // The index of each query's first block.
        let mut begins = Vec::with_capacity(queries.len() + 1);
        let mut count = 0;
        for &q in queries {
            begins.push(count);
            count += self.attend.visible_keys(q).blocks();
        }
        begins.push(count);
        let (mut sums, mut states) = (Vec::new(), Vec::new());
        resize(&mut sums, count * heads * d, 0.0f32);
        resize(&mut states, count * heads, (0.0f32, 0.0f32));
        let (all_sums, all_states) = (SharedOutput::new(&mut sums), SharedOutput::new(&mut states));
        let work = self.multiplications(queries.iter().copied());
        parallel_ranges(count * groups, work, &|from, to| {
            SCRATCH.with_borrow_mut(|scratch| {
                let mut known = None;
                for unit in from..to {
                    // The blocks of a key head are adjacent, so a thread prepares their queries
                    // only once.
                    let at = begins.partition_point(|&begin| begin * groups <= unit) - 1;
                    let own_unit = unit - begins[at] * groups;
                    let blocks = begins[at + 1] - begins[at];
                    let (group, block) = (own_unit / blocks, own_unit % blocks);
                    let part = begins[at] + block;
                    let q = queries[at];
                    if known != Some((q, group)) {
                        self.fill_queries(q, group, &mut scratch.queries);
                        known = Some((q, group));
                    }
                    let head = part * heads + group * queries_per_kv;
                    // SAFETY: no other unit of work writes these heads of this block.
                    let partial = unsafe {
                        PartialSoftmax {
                            sums: all_sums.slice_mut(head * d, queries_per_kv * d),
                            states: all_states.slice_mut(head, queries_per_kv),
                        }
                    };
                    let decode_task = self.decode_task(&queries[at..], group);
                    decode_task.run_block(block, &scratch.queries, &mut scratch.block, partial);
                }
            });
        });
        let pieces = count * heads * d;
        parallel_ranges(queries.len() * heads, pieces, &|from, to| {
            for unit in from..to {
                let (at, h) = (unit / heads, unit % heads);
                let parts = (begins[at]..begins[at + 1]).map(|part| {
                    let head = part * heads + h;
                    (&sums[head * d..(head + 1) * d], states[head])
                });
                self.add_blocks(queries[at], h, parts);
            }
        });
    }

    /// Writes the queries of the heads in `group`, `[heads, D]`.
    fn fill_queries(&self, q: usize, group: usize, queries: &mut Vec<f32>) {
        let Attention {
            head_dim: d,
            queries_per_kv,
            ..
        } = *self.attend;
        resize(queries, queries_per_kv * d, 0.0);
        for (i, query) in queries.chunks_exact_mut(d).enumerate() {
            self.query(q, group * queries_per_kv + i, query);
        }
    }

    /// The task for a key head and the first of these queries.
    fn decode_task(&self, queries: &[usize], group: usize) -> DecodeTask<'_> {
        let q = queries[0];
        let sequence = |q: usize| self.attend.queries[q].sequence;
        let first = |q: usize, group: usize| {
            self.kv(sequence(q))[0].ptr(group, self.attend.first_visible(q))
        };
        let after = match queries.get(1) {
            _ if group + 1 < self.attend.heads / self.attend.queries_per_kv => first(q, group + 1),
            Some(&next) => first(next, 0),
            None => std::ptr::null(),
        };
        DecodeTask {
            isa: self.attend.isa,
            d: self.attend.head_dim,
            softcap: self.attend.softcap,
            distances: (
                (self.attend.slopes)
                    .get(group * self.attend.queries_per_kv..)
                    .unwrap_or_default(),
                self.attend.queries[q].position as f32,
            ),
            keys: self.kv(sequence(q))[0],
            values: self.kv(sequence(q))[1],
            group,
            visible: self.attend.visible_keys(q),
            after,
        }
    }

    /// Combines the blocks of head `h` of query `q`. Only one thread may do this for each head
    /// and query.
    fn add_blocks<'a>(
        &self,
        q: usize,
        h: usize,
        parts: impl Iterator<Item = (&'a [f32], (f32, f32))>,
    ) {
        // SAFETY: only the caller writes this head of this query.
        let place = unsafe { self.output(q, h) };
        decode_attention::add_blocks(self.attend.isa, parts, self.sinks.map(|s| s[h]), place);
    }
}
