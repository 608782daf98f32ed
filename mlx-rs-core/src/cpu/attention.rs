//! Attention over a cache as one operation: norms and rotation of queries and keys, scores, softmax and the
//! weighted sum, for rows of any length, straight from the packed projection and the caches.

use std::ops::Range;

use super::host_op::{self, Input, Meaning, Work};
use super::kernel::{self, Isa};
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
fn total(rows: impl Iterator<Item = (i32, i32)>) -> Result<i32> {
    let mut total = 0i32;
    for (length, offset) in rows {
        let possible = length >= 0 && offset.checked_add(length).is_some();
        total = (total.checked_add(length).filter(|_| possible))
            .ok_or_else(|| fault("a row has impossible positions"))?;
    }
    Ok(total)
}

/// A count of the caller's, which is not negative.
fn count(n: i32) -> usize {
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
        let Some(width) = self.width() else {
            return Err(fault(format!(
                "{} query heads and {} key heads of {} elements cannot be",
                self.n_heads, self.n_kv_heads, self.head_dim
            )));
        };
        if packed.dtype() != Dtype::Float32 || packed.shape() != [1, total, width] {
            let wanted = format!("needs float32 [1, {total}, {width}]");
            return Err(fault(wanted).with_inputs(&[packed]));
        }
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
        let work = self.store(cache, packed, tokens, count(self.n_heads))?;
        let work = Store {
            eps: self.k_norm.as_ref().map(|norm| norm.eps),
            rotation: self.rotation.clone(),
            ..work
        };
        host_op::add_in_place("cpu::store_keys", work, &inputs, cache.shape())
    }

    /// As [`Self::store_keys`], with values as they are.
    ///
    /// # Errors
    /// As [`Self::store_keys`].
    pub fn store_values(&self, cache: &Array, packed: &Array, tokens: Tokens) -> Result<Array> {
        let before = count(self.n_heads) + count(self.n_kv_heads);
        let work = self.store(cache, packed, tokens, before)?;
        host_op::add_in_place("cpu::store_values", work, &[cache, packed], cache.shape())
    }

    /// Work that stores what comes after so many heads of a packed row.
    fn store(&self, cache: &Array, packed: &Array, tokens: Tokens, heads: usize) -> Result<Store> {
        let width = self.check(packed, packed.dim(1)?)?;
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
        if length < 1 || length > room || !within(from, packed.dim(1)?) || !within(offset, room) {
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
        let width = self.check(packed, total)?;
        let mut queries = Vec::new();
        let mut at = 0;
        let mut plans = Vec::with_capacity(lanes.len());
        let mut inputs = vec![packed];
        if let Some(norm) = &self.q_norm {
            inputs.push(&norm.weight);
        }
        if let Some(sinks) = &self.sinks {
            inputs.push(sinks);
        }
        let first = inputs.len();
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
            inputs.push(&lane.keys);
            inputs.push(&lane.values);
        }
        let n = i32::try_from(queries.len()).unwrap_or(i32::MAX);
        let shape = [1, n, self.n_heads * self.head_dim];
        let work = Attend {
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
        };
        host_op::add_strided("cpu::attention", work, &inputs, first, &shape)
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
struct Query {
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
    heads: usize,
    repeats: usize,
    pub d: usize,
    width: usize,
    scale: f32,
    pub softcap: Option<f32>,
    eps: Option<f32>,
    sinks: bool,
    rotation: Option<Rotation>,
    queries: Vec<Query>,
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
    fn at(&self, h: usize, i: usize, d: usize) -> &'a [f32] {
        let start = h * self.head + i * self.position;
        &self.data[start..start + d]
    }

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
        let panels = self.panels();
        let units = panels.len() * self.heads;
        let work: usize = self
            .queries
            .iter()
            .map(|q| {
                let (kept, range) = self.plans[q.lane].seen(q.position);
                kept + range.len() + 16
            })
            .sum();
        share(units, 2 * work * self.heads * self.d, &|from, to| {
            let (mut query, mut scores) = (vec![0.0f32; self.d], Vec::new());
            for unit in from..to {
                // The longest first, so that none of them is left over for one thread.
                let (panel, h) = (panels.len() - 1 - unit / self.heads, unit % self.heads);
                let panel = panels[panel].clone();
                if panel.len() >= sweep::MANY && sweep::fits(self.d) {
                    task.sweep(panel, h);
                } else {
                    for q in panel {
                        task.single(q, h, &mut query, &mut scores);
                    }
                }
            }
        });
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

    /// One query, key by key.
    fn single(&self, q: usize, h: usize, query: &mut [f32], scores: &mut Vec<f32>) {
        let Attend { d, isa, .. } = *self.attend;
        self.query(q, h, query);
        let Query { lane, position, .. } = self.attend.queries[q];
        let (keys, values) = (self.rest[2 * lane], self.rest[2 * lane + 1]);
        let (kept, range) = self.attend.plans[lane].seen(position);
        let group = h / self.attend.repeats;
        let seen = || (0..kept).chain(range.clone());
        scores.clear();
        scores.extend(seen().map(|i| kernel::inner(isa, query, keys.at(group, i, d))));
        if let Some(cap) = self.attend.softcap {
            scores.iter_mut().for_each(|s| *s = (*s / cap).tanh() * cap);
        }
        let total = softmax(scores, self.sinks.map(|s| s[h]));
        // SAFETY: this head of this query is this unit's alone.
        let found = unsafe { self.place(q, h) };
        found.fill(0.0);
        for (i, share) in seen().zip(&*scores) {
            kernel::add_scaled(isa, found, *share, values.at(group, i, d));
        }
        found.iter_mut().for_each(|v| *v /= total);
    }
}

/// `exp(s - max)` in place; returns their sum, with that of a sink.
fn softmax(scores: &mut [f32], sink: Option<f32>) -> f32 {
    let greatest = scores
        .iter()
        .copied()
        .fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max);
    let mut total = sink.map_or(0.0, |s| (s - greatest).exp());
    for s in scores {
        *s = (*s - greatest).exp();
        total += *s;
    }
    total
}
