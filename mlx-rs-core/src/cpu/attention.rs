//! Attention over a cache as one operation: norms and rotation of queries and keys, scores, softmax and the
//! weighted sum, for rows of any length, straight from the packed projection and the caches.

use std::ops::Range;

use super::glance::{self, Found, Glance};
use super::host_op::{self, Input, Meaning, Work};
use super::kernel::Isa;
use super::rotation::{Rotation, rotate, turns};
use super::share::{Output, share};
use super::store::{Keys, Store, Tokens, normalize};
use super::sweep::{self, Sweep};
use super::tile::LANES;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// A norm by the root of the mean square over each head.
#[derive(Debug, Clone)]
pub struct HeadNorm {
    /// Float32 `[head_dim]`.
    pub weight: Array,
    /// Added under the root.
    pub eps: f32,
}

/// The heads of an attention layer.
/// ```
/// use mlx_rs_core::{Array, Device, Dtype, Stream, cpu::{Heads, Lane, Tokens}, zeros};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let heads = Heads {
///         n_heads: 1,
///         n_kv_heads: 1,
///         head_dim: 2,
///         scale: 1.0,
///         softcap: None,
///         q_norm: None,
///         k_norm: None,
///         rotation: None,
///         sinks: None,
///     };
///     // One token: its query, its key and its value, side by side.
///     let packed = Array::from_slice(&[1.0f32, 0.0, 1.0, 0.0, 5.0, 6.0], &[1, 1, 6])?;
///     assert_eq!(heads.keys(&packed, &[(1, 0)])?.to_vec::<f32>()?, [1.0, 0.0]);
///     // A cache with room for four.
///     let tokens = Tokens { first: 0, length: 1, offset: 0 };
///     let empty = zeros(&[1, 1, 4, 2], Dtype::Float32)?;
///     let lane = Lane {
///         length: 1,
///         offset: 0,
///         keys: heads.store_keys(&empty, &packed, tokens)?,
///         values: heads.store_values(&empty, &packed, tokens)?,
///         filled: 1,
///         order: Some((0, 0)),
///         window: None,
///     };
///     let found = heads.attend(&packed, &[lane], false)?;
///     assert_eq!(found.to_vec::<f32>()?, [5.0, 6.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Heads {
    /// Query heads.
    pub n_heads: i32,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: i32,
    /// Elements per head.
    pub head_dim: i32,
    /// Factor on the scores.
    pub scale: f32,
    /// Scores are squeezed into `-cap..cap` by a tanh.
    pub softcap: Option<f32>,
    /// Of queries, before rotation.
    pub q_norm: Option<HeadNorm>,
    /// Of keys, before rotation.
    pub k_norm: Option<HeadNorm>,
    /// `None` for a layer without positions.
    pub rotation: Option<Rotation>,
    /// A score for each head that takes its share and adds nothing, float32 `[n_heads]`.
    pub sinks: Option<Array>,
}

/// One row of a packed batch.
#[derive(Debug, Clone)]
pub struct Lane {
    /// Its positions in this pass.
    pub length: i32,
    /// Positions before them.
    pub offset: i32,
    /// Float32 `[1, Hkv, n, D]`.
    pub keys: Array,
    /// Float32 `[1, Hkv, n, D]`.
    pub values: Array,
    /// So many of the `n` positions count, from the first on.
    pub filled: i32,
    /// The first `kept` keys stand at `0..kept`, the others from `start` on; `None`: anyhow, and every
    /// query sees all.
    pub order: Option<(i32, i32)>,
    /// A query sees the kept keys and the last so many others.
    pub window: Option<i32>,
}

fn fault(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Shape, "cpu::attention", message)
}

/// The sum of the lengths of rows with these lengths and offsets, whose positions all are numbers.
pub(super) fn total(rows: impl Iterator<Item = (i32, i32)>) -> Result<i32> {
    let mut total = 0i32;
    for (length, offset) in rows {
        let possible = length >= 0 && offset.checked_add(length).is_some();
        total = (total.checked_add(length).filter(|_| possible))
            .ok_or_else(|| fault("a row has impossible positions"))?;
    }
    Ok(total)
}

/// A count of the caller's, which is not negative.
pub(super) fn count(n: i32) -> usize {
    usize::try_from(n).unwrap_or(0)
}

impl Heads {
    /// Elements of a packed projection: queries, keys, values. `None` for heads that there cannot be.
    fn width(&self) -> Option<i32> {
        let sane = self.n_heads.min(self.n_kv_heads).min(self.head_dim) > 0
            && self.n_heads % self.n_kv_heads == 0;
        let heads = self.n_kv_heads.checked_mul(2)?.checked_add(self.n_heads)?;
        heads.checked_mul(self.head_dim).filter(|_| sane)
    }

    /// Returns [`Self::width`].
    fn check(&self, packed: &Array, total: i32) -> Result<usize> {
        let width = self.check_parts()?;
        let fits = |shape: &[i32]| matches!(*shape, [1, tokens, last] if tokens == total && count(last) == width);
        if packed.dtype() != Dtype::Float32 || !fits(packed.shape()) {
            let wanted = format!("needs float32 [1, {total}, {width}]");
            return Err(fault(wanted).with_inputs(&[packed]));
        }
        Ok(width)
    }

    /// Checks what does not depend on the tokens. Returns [`Self::width`].
    pub(super) fn check_parts(&self) -> Result<usize> {
        let Some(width) = self.width() else {
            return Err(fault(format!(
                "{} query heads and {} key heads of {} elements cannot be",
                self.n_heads, self.n_kv_heads, self.head_dim
            )));
        };
        if let Some(rotation) = &self.rotation
            && rotation.radians.len() * 2 > count(self.head_dim)
        {
            return Err(fault("more elements rotate than a head has"));
        }
        for (norm, n) in [
            (self.q_norm.as_ref().map(|n| &n.weight), self.head_dim),
            (self.k_norm.as_ref().map(|n| &n.weight), self.head_dim),
            (self.sinks.as_ref(), self.n_heads),
        ] {
            if let Some(a) = norm
                && (a.dtype() != Dtype::Float32 || a.shape() != [n])
            {
                return Err(fault(format!("needs float32 [{n}]")).with_inputs(&[a]));
            }
        }
        Ok(count(width))
    }

    /// Keys with norm and rotation from a packed projection `[1, T, (H + 2 Hkv) * D]` of rows with these
    /// lengths and offsets: `[1, Hkv, T, D]`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when shapes or types do not fit; MLX's message when the current stream is not
    /// on the CPU.
    pub fn keys(&self, packed: &Array, rows: &[(i32, i32)]) -> Result<Array> {
        let total = total(rows.iter().copied())?;
        let width = self.check(packed, total)?;
        let mut inputs = vec![packed];
        inputs.extend(self.k_norm.iter().map(|norm| &norm.weight));
        let work = Keys(Store {
            n: count(self.n_kv_heads),
            room: count(total),
            d: count(self.head_dim),
            width,
            first: count(self.n_heads) * count(self.head_dim),
            from: 0,
            slot: 0,
            positions: positions(rows),
            eps: self.k_norm.as_ref().map(|norm| norm.eps),
            rotation: self.rotation.clone(),
            isa: Isa::detect(),
        });
        let shape = [1, self.n_kv_heads, total, self.head_dim];
        host_op::add("cpu::keys", Meaning::Opaque, work, &inputs, &shape)
    }

    /// `cache` `[1, Hkv, n, D]` with the keys, with norm and rotation, of some tokens of a packed projection
    /// at their positions. The cache's memory is used where nobody else needs it.
    ///
    /// # Errors
    /// As [`Self::keys`], also when tokens or positions are not there.
    pub fn store_keys(&self, cache: &Array, packed: &Array, tokens: Tokens) -> Result<Array> {
        let mut inputs = vec![cache, packed];
        inputs.extend(self.k_norm.iter().map(|norm| &norm.weight));
        let total = packed.dim(1)?;
        self.check(packed, total)?;
        let work = self.plan_keys(cache, total, tokens)?;
        host_op::add_in_place("cpu::store_keys", work, &inputs, cache.shape())
    }

    /// Work that stores the keys of some of `total` packed rows.
    pub(super) fn plan_keys(&self, cache: &Array, total: i32, tokens: Tokens) -> Result<Store> {
        Ok(Store {
            eps: self.k_norm.as_ref().map(|norm| norm.eps),
            rotation: self.rotation.clone(),
            ..self.plan_store(cache, total, tokens, count(self.n_heads))?
        })
    }

    /// Work that stores the values of some of `total` packed rows.
    pub(super) fn plan_values(&self, cache: &Array, total: i32, tokens: Tokens) -> Result<Store> {
        let before = count(self.n_heads) + count(self.n_kv_heads);
        self.plan_store(cache, total, tokens, before)
    }

    /// As [`Self::store_keys`], with values as they are.
    ///
    /// # Errors
    /// As [`Self::store_keys`].
    pub fn store_values(&self, cache: &Array, packed: &Array, tokens: Tokens) -> Result<Array> {
        let total = packed.dim(1)?;
        self.check(packed, total)?;
        let work = self.plan_values(cache, total, tokens)?;
        host_op::add_in_place("cpu::store_values", work, &[cache, packed], cache.shape())
    }

    /// Work that stores what comes after so many heads of a packed row.
    fn plan_store(&self, cache: &Array, total: i32, tokens: Tokens, heads: usize) -> Result<Store> {
        let width = self.check_parts()?;
        let &[1, n, room, d] = cache.shape() else {
            return Err(fault("a cache needs four axes").with_inputs(&[cache]));
        };
        if n != self.n_kv_heads || d != self.head_dim || cache.dtype() != Dtype::Float32 {
            let wanted = format!(
                "needs float32 [1, {}, n, {}]",
                self.n_kv_heads, self.head_dim
            );
            return Err(fault(wanted).with_inputs(&[cache]));
        }
        let Tokens {
            first: from,
            length,
            offset,
        } = tokens;
        let within = |from: i32, most: i32| from >= 0 && from <= most - length;
        if length < 1 || length > room || !within(from, total) || !within(offset, room) {
            return Err(fault("tokens that are not there, or no room for them"));
        }
        Ok(Store {
            n: count(n),
            room: count(room),
            d: count(d),
            width,
            first: heads * count(d),
            from: count(from),
            slot: count(offset),
            positions: positions(&[(length, offset)]),
            eps: None,
            rotation: None,
            isa: Isa::detect(),
        })
    }

    /// What the queries of a packed projection find in the keys and values of their rows, after those of
    /// this pass were added: `[1, T, H * D]`, or `[1, rows, H * D]` for the last query of each row.
    ///
    /// # Errors
    /// As [`Self::keys`].
    pub fn attend(&self, packed: &Array, lanes: &[Lane], last: bool) -> Result<Array> {
        let total = total(lanes.iter().map(|lane| (lane.length, lane.offset)))?;
        self.check(packed, total)?;
        let mut inputs = vec![packed];
        inputs.extend(self.q_norm.iter().map(|norm| &norm.weight));
        inputs.extend(&self.sinks);
        let first = inputs.len();
        for lane in lanes {
            inputs.extend([&lane.keys, &lane.values]);
        }
        let work = self.plan_attention(lanes, last)?;
        let n = i32::try_from(work.queries.len()).unwrap_or(i32::MAX);
        let shape = [1, n, self.n_heads * self.head_dim];
        host_op::add_strided("cpu::attention", work, &inputs, first, &shape)
    }

    /// The work of an attention over these rows: it reads packed rows, the norm's weight and the sinks where
    /// there are any, and each row's keys and values.
    pub(super) fn plan_attention(&self, lanes: &[Lane], last: bool) -> Result<Attend> {
        let width = self.check_parts()?;
        let mut queries = Vec::new();
        let mut at = 0;
        let mut plans = Vec::with_capacity(lanes.len());
        for (i, lane) in lanes.iter().enumerate() {
            let n = lane.keys.dim(2)?;
            let shape = [1, self.n_kv_heads, n, self.head_dim];
            for a in [&lane.keys, &lane.values] {
                if a.shape() != shape || a.dtype() != Dtype::Float32 {
                    return Err(fault(format!("a row needs float32 {shape:?}")).with_inputs(&[a]));
                }
            }
            let kept = lane.order.map_or(0, |(kept, _)| kept);
            let filled = lane.filled;
            if lane.length < 1 || lane.offset < 0 || kept < 0 || kept > filled || filled > n {
                return Err(fault("a row has impossible positions"));
            }
            let skipped = if last { lane.length - 1 } else { 0 };
            for j in skipped..lane.length {
                queries.push(Query {
                    lane: i,
                    row: count(at + j),
                    position: lane.offset + j,
                });
            }
            at += lane.length;
            plans.push(Plan {
                n: count(filled),
                order: lane.order.map(|(kept, start)| (count(kept), start)),
                window: lane.window,
            });
        }
        Ok(Attend {
            heads: count(self.n_heads),
            repeats: count(self.n_heads / self.n_kv_heads),
            d: count(self.head_dim),
            width,
            scale: self.scale,
            softcap: self.softcap,
            eps: self.q_norm.as_ref().map(|n| n.eps),
            sinks: self.sinks.is_some(),
            rotation: self.rotation.clone(),
            queries,
            plans,
            isa: Isa::detect(),
        })
    }
}

/// The position of each token.
fn positions(rows: &[(i32, i32)]) -> Vec<i32> {
    rows.iter()
        .flat_map(|&(length, offset)| offset..offset + length)
        .collect()
}

/// One query: of which lane, where in the packed rows, and its position.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query {
    lane: usize,
    row: usize,
    position: i32,
}

/// What the queries of a lane may see.
#[derive(Debug, Clone, Copy)]
struct Plan {
    n: usize,
    order: Option<(usize, i32)>,
    window: Option<i32>,
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

pub(super) struct Attend {
    pub heads: usize,
    repeats: usize,
    pub d: usize,
    width: usize,
    scale: f32,
    pub softcap: Option<f32>,
    eps: Option<f32>,
    sinks: bool,
    rotation: Option<Rotation>,
    pub queries: Vec<Query>,
    plans: Vec<Plan>,
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
