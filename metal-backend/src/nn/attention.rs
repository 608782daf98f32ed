//! Grouped-query self-attention with a KV cache (Vaswani et al. 2017, Ainslie et al. 2023). Its
//! fields cover the differences between model families: biases, norms, windows, caps, sinks and
//! rotation.

use inference::{AttentionSums, Hook, StepPart};
use mlx_rs_core::{Array, Error, ErrorKind, Result, concatenate};

use super::adapter;
use super::attention_parts::furthest;
pub use super::attention_parts::{Growth, HeadNorms};
use super::linear::{Linear, project};
use super::norm::{Norm, apart, spec, through};
use super::rope::Rope;
use crate::cache::{KvView, Row, Stored, Switch, lengths};
use crate::exec::{AttentionSpec, Epilogue, NormSpec, RotarySpec};
use crate::nn::hooks::Watch;

/// One attention layer.
#[derive(Debug)]
pub struct Attention {
    /// `[hidden] -> [n_heads * head_dim]`.
    pub q_proj: Linear,
    /// `[hidden] -> [n_kv_heads * head_dim]`; `None` if the layer reuses another layer's keys.
    pub k_proj: Option<Linear>,
    /// `[hidden] -> [n_kv_heads * head_dim]`; `None` if `k_proj` also computes the values.
    pub v_proj: Option<Linear>,
    /// `[n_heads * head_dim] -> [hidden]`.
    pub o_proj: Linear,
    /// Queries, keys and values are clamped to `-clip..clip` after their projections (OLMo).
    pub clip: Option<f32>,
    /// Norms of queries, keys and values before the rotation.
    pub norms: HeadNorms,
    /// Rotary positions; `None` for a layer without positions.
    pub rope: Option<Rope>,
    /// Query heads.
    pub n_heads: i32,
    /// Key and value heads; this number divides `n_heads`.
    pub n_kv_heads: i32,
    /// Elements per head.
    pub head_dim: i32,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Sliding window: a query attends to this number of last positions, including its own.
    pub window: Option<i32>,
    /// Chunk length in positions: a query attends only to keys of its own chunk (Llama 4).
    pub chunk: Option<i32>,
    /// Cap on scores: `cap * tanh(score / cap)` keeps scores within `-cap..cap` (Gemma 2).
    pub softcap: Option<f32>,
    /// A factor on queries that grows with their position (Llama 4, Ministral 3).
    pub growth: Option<Growth>,
    /// Attention sinks `[n_heads]` (gpt-oss): a learned score per head. The score enters the
    /// softmax's denominator and adds no value.
    pub sinks: Option<Array>,
    /// The type in which scores, softmax and the sums over values are computed.
    pub sums: AttentionSums,
}

/// The positions of a step whose outputs the caller needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// All positions.
    All,
    /// Only the last position of each row. The keys and values of all positions are still stored.
    Last,
}

impl Positions {
    /// Selects the requested positions of `x` `[1, T, ..]`, which concatenates rows of the given
    /// lengths.
    ///
    /// # Errors
    /// If `x` has fewer positions than the rows together.
    pub fn of(self, x: &Array, lengths: &[i32]) -> Result<Array> {
        if self == Positions::All || lengths.iter().all(|&n| n == 1) {
            return Ok(x.clone());
        }
        if let [length] = lengths {
            return x.slice_axis(1, length - 1, *length);
        }
        let ends: Vec<u32> = lengths
            .iter()
            .scan(0i32, |end, &n| {
                *end += n;
                Some(end.unsigned_abs().saturating_sub(1))
            })
            .collect();
        x.take_ids(&ends, 1)
    }

    /// Returns the number of requested positions in a row of `length` positions.
    fn left(self, length: i32) -> i32 {
        match self {
            Positions::All => length,
            Positions::Last => length.min(1),
        }
    }
}

impl Attention {
    /// Computes attention for `x` `[1, T, hidden]`, after `norm` if there is one: `[1, T or rows,
    /// hidden]`. `x` concatenates several rows. Appends the keys and values of `x` to each row's
    /// cache; each row attends only to its own cache. `layer` is the index of the cache in a row.
    /// If `add` is set, adds the result to `x`.
    ///
    /// # Errors
    /// If shapes do not match, or a cache is full.
    pub fn forward(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let lengths = lengths(rows);
        let residual = add.then(|| positions.of(x, &lengths)).transpose()?;
        let (mut x, mut norm) = apart(watch, layer, norm, x)?;
        // Fused projections support only RMS norms, so other norms are computed first.
        if matches!(spec(norm), NormSpec::Other) {
            (x, norm) = (through(norm, &x)?, None);
        }
        let (x, norm) = (&x, &norm);
        let heads = self.heads_for_kernels(furthest(rows))?;
        if let Some((heads, precomputed)) = heads.filter(|_| !watch.wants_attention())
            && let Some(packed) = self.packed(*norm, x)?
        {
            let packed = self.clipped(packed)?;
            watch.lap(layer, StepPart::Qkv, &[&packed])?;
            let heads = (&heads, precomputed);
            let attended = self.attend_packed(heads, &packed, rows, layer, positions)?;
            watch.lap(layer, StepPart::Attention, &[&attended])?;
            return self.output(&attended, residual.as_ref(), (layer, watch));
        }
        let x = through(*norm, x)?;
        let views = self.update_kv(&x, rows, layer)?;
        let attended = self.attend_heads(&x, &views, &lengths, positions, (layer, &mut *watch))?;
        self.output(&attended, residual.as_ref(), (layer, watch))
    }

    /// Applies the output projection to the heads' outputs, and adds `residual`.
    fn output(
        &self,
        attended: &Array,
        residual: Option<&Array>,
        (layer, watch): (usize, &mut Watch<'_>),
    ) -> Result<Array> {
        let attended = watch.states_at(layer, Hook::Heads, attended.clone())?;
        let y = self.o_proj.forward_from(None, &attended, residual)?;
        watch.lap(layer, StepPart::Output, &[&y])?;
        Ok(y)
    }

    /// Returns how the rotation depends on the length of the sequence; see [`Rope::switch`].
    pub fn switch(&self) -> Option<Switch> {
        self.rope.as_ref().and_then(Rope::switch)
    }

    /// Returns the layer's parameters for the kernels.
    pub fn spec(&self) -> AttentionSpec<'_> {
        AttentionSpec {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            scale: self.scale,
            softcap: self.softcap,
            q_norm: spec(self.norms.q.as_ref()),
            k_norm: spec(self.norms.k.as_ref()),
            v_norm: spec(self.norms.v.as_ref()),
            across_heads: self.norms.across_heads,
            after_rotation: self.norms.after_rotation,
            rotary: self.rope.as_ref().map_or(RotarySpec::None, Rope::spec),
            sinks: self.sinks.as_ref(),
            sums: self.sums,
            differentiated: adapter::differentiated(),
        }
    }

    /// Computes queries, keys and values of `norm(x)` in one array, `[1, T, (H + 2 * Hkv) * D]`,
    /// before head norms and rotation. Returns `None` if our kernels do not support the
    /// projections.
    fn packed(&self, norm: Option<&Norm>, x: &Array) -> Result<Option<Array>> {
        match (&self.k_proj, &self.v_proj) {
            (None, _) => Ok(None),
            (Some(k_proj), Some(v_proj)) => {
                project(&[&self.q_proj, k_proj, v_proj], norm, Epilogue::None, x)
            }
            (Some(k_proj), None) => {
                let both = project(&[&self.q_proj, k_proj], norm, Epilogue::None, x)?;
                let first = self.n_heads * self.head_dim;
                both.map(|both| {
                    let values = both.slice_axis(2, first, both.dim(2)?)?;
                    concatenate(&[&both, &values], 2)
                })
                .transpose()
            }
        }
    }

    /// Appends keys and values of `x` to the caches. Returns all keys and values of each row.
    ///
    /// # Errors
    /// If shapes do not match, or this layer has no key projection.
    pub fn update_kv(&self, x: &Array, rows: &mut [Row<'_>], layer: usize) -> Result<Vec<KvView>> {
        let fault = |message: &str| Error::new(ErrorKind::Value, "attention", message);
        let Some(k_proj) = &self.k_proj else {
            return Err(fault("a layer without keys needs those of another layer"));
        };
        let projected = self.clipped(k_proj.forward(x)?)?;
        let values = match &self.v_proj {
            Some(v_proj) => self.clipped(v_proj.forward(x)?)?,
            None => projected.clone(),
        };
        self.update_projected(&projected, &values, rows, layer)
    }

    /// Appends as [`Self::update_kv`], with keys and values `[1, T, Hkv * D]` before head norms and
    /// rotation.
    pub(super) fn update_projected(
        &self,
        keys: &Array,
        values: &Array,
        rows: &mut [Row<'_>],
        layer: usize,
    ) -> Result<Vec<KvView>> {
        let n = self.n_kv_heads;
        let keys = self.heads(keys, n, self.norms.before()[1])?;
        let values = self.heads(values, n, self.norms.v.as_ref())?;
        let keys = each_row(&keys, rows, layer, |keys, offset, total| {
            through(self.norms.after()[1], &self.rotate(&keys, offset, total)?)
        })?;
        store(rows, layer, &keys, &values)
    }

    /// Returns the attention output of the queries of `x` `[1, T, hidden]`: `[1, T or rows,
    /// hidden]`. `x` concatenates rows of `lengths` positions, and each row attends to the keys of
    /// its view. `watch` receives the queries and weights that it requests, with the index `layer`.
    pub fn attend(
        &self,
        x: &Array,
        views: &[KvView],
        lengths: &[i32],
        positions: Positions,
        (layer, watch): (usize, &mut Watch<'_>),
    ) -> Result<Array> {
        let attended = self.attend_heads(x, views, lengths, positions, (layer, &mut *watch))?;
        self.output(&attended, None, (layer, watch))
    }

    /// Computes [`Self::attend`] without the output projection: `[1, T or rows, H * D]`.
    fn attend_heads(
        &self,
        x: &Array,
        views: &[KvView],
        lengths: &[i32],
        positions: Positions,
        (layer, watch): (usize, &mut Watch<'_>),
    ) -> Result<Array> {
        let queries = self.clipped(self.q_proj.forward(&positions.of(x, lengths)?)?)?;
        if watch.measures() {
            let stored = views.iter().flat_map(|view| [&view.keys, &view.values]);
            let stored = stored.flat_map(Stored::arrays);
            let made: Vec<&Array> = stored.chain([&queries]).collect();
            watch.lap(layer, StepPart::Qkv, &made)?;
        }
        let attended =
            self.attend_projected(&queries, views, lengths, positions, (layer, &mut *watch))?;
        watch.lap(layer, StepPart::Attention, &[&attended])?;
        Ok(attended)
    }

    /// Computes [`Self::attend_heads`] for queries `[1, T or rows, H * D]` before head norms and
    /// rotation.
    pub(super) fn attend_projected(
        &self,
        queries: &Array,
        views: &[KvView],
        lengths: &[i32],
        positions: Positions,
        (layer, watch): (usize, &mut Watch<'_>),
    ) -> Result<Array> {
        let queries = self.heads(queries, self.n_heads, self.norms.before()[0])?;
        self.attend_queries(&queries, views, lengths, positions, (layer, watch))
    }

    /// Computes [`Self::attend_heads`] for queries `[1, H, T or rows, D]` before rotation.
    pub(super) fn attend_queries(
        &self,
        queries: &Array,
        views: &[KvView],
        lengths: &[i32],
        positions: Positions,
        (layer, watch): (usize, &mut Watch<'_>),
    ) -> Result<Array> {
        let width = self.n_heads * self.head_dim;
        let mut from = 0;
        let attended = lengths
            .iter()
            .zip(views)
            .map(|(&length, view)| {
                let left = positions.left(length);
                let to = from + left;
                let q = if lengths.len() == 1 {
                    queries.clone()
                } else {
                    queries.slice_axis(2, from, to)?
                };
                from = to;
                let end = view.offset + length;
                let q = self.rotate(&q, end - left, end.max(view.reach))?;
                let q = self.grown(&through(self.norms.after()[0], &q)?, end - left)?;
                watch.saw_queries(layer, &q)?;
                if watch.wants_weights() {
                    watch.saw_weights(layer, &self.last_weights(&q, view, end - 1)?)?;
                }
                if let Some(attended) = self.attend_on_kernels(&q, view, (left, end - left))? {
                    return Ok(attended);
                }
                // [1, H, L, D] -> [1, L, H*D]
                self.attend_row(&q, view, end - left, left)?
                    .transpose_axes(&[0, 2, 1, 3])?
                    .reshape(&[1, left, width])
            })
            .collect::<Result<Vec<_>>>()?;
        match attended.as_slice() {
            [one] => Ok(one.clone()),
            several => concatenate(&several.iter().collect::<Vec<_>>(), 1),
        }
    }

    /// Clamps the output of a projection to `-clip..clip`.
    fn clipped(&self, projected: Array) -> Result<Array> {
        let Some(clip) = self.clip else {
            return Ok(projected);
        };
        let bound = |value: f32| Array::scalar(value)?.astype(projected.dtype());
        projected.clip(Some(&bound(-clip)?), Some(&bound(clip)?))
    }

    /// Multiplies queries `[1, H, L, D]` by the growth factors of their positions, from `offset`
    /// on.
    pub(super) fn grown(&self, queries: &Array, offset: i32) -> Result<Array> {
        let length = queries.dim(2)?;
        match &self.growth {
            Some(growth) if growth.is_felt(offset + length) => {
                let factors: Vec<f32> = (offset..offset + length)
                    .map(|position| growth.factor(position))
                    .collect();
                let factors = Array::from_slice(&factors, &[1, 1, length, 1])?;
                queries.multiply(&factors.astype(queries.dtype())?)
            }
            _ => Ok(queries.clone()),
        }
    }

    pub(super) fn rotate(&self, x: &Array, offset: i32, total: i32) -> Result<Array> {
        match &self.rope {
            Some(rope) => rope.forward(x, offset, total),
            None => Ok(x.clone()),
        }
    }

    /// Splits a projection into heads: `[B, L, H*D] -> [B, H, L, D]`.
    pub(super) fn heads(&self, projected: &Array, n: i32, norm: Option<&Norm>) -> Result<Array> {
        let (batch, length) = (projected.dim(0)?, projected.dim(1)?);
        let shape = [batch, length, n, self.head_dim];
        let heads = if self.norms.across_heads {
            through(norm, projected)?.reshape(&shape)?
        } else {
            through(norm, &projected.reshape(&shape)?)?
        };
        heads.transpose_axes(&[0, 2, 1, 3])
    }
}

/// Applies `f` to each row's positions in heads `[1, n, T, D]` of concatenated rows. `f` also
/// receives the position of the row's first token, and the known length of the sequence.
pub(super) fn each_row(
    heads: &Array,
    rows: &[Row<'_>],
    layer: usize,
    f: impl Fn(Array, i32, i32) -> Result<Array>,
) -> Result<Array> {
    let mut from = 0;
    let mut parts = Vec::with_capacity(rows.len());
    for row in rows {
        let to = from + row.length;
        let part = match rows.len() {
            1 => heads.clone(),
            _ => heads.slice_axis(2, from, to)?,
        };
        from = to;
        let offset = row.caches.get(layer).map_or(0, |cache| cache.offset());
        let total = (offset + row.length).max(row.caches.reach());
        parts.push(f(part, offset, total)?);
    }
    match parts.as_slice() {
        [one] => Ok(one.clone()),
        several => concatenate(&several.iter().collect::<Vec<_>>(), 2),
    }
}

/// Appends keys and values `[1, Hkv, T, D]` of concatenated rows to their caches.
pub(super) fn store(
    rows: &mut [Row<'_>],
    layer: usize,
    keys: &Array,
    values: &Array,
) -> Result<Vec<KvView>> {
    let single_row = rows.len() == 1;
    let mut from = 0;
    rows.iter_mut()
        .map(|row| {
            let to = from + row.length;
            let cache = row
                .caches
                .get_mut(layer)
                .and_then(|cache| cache.as_kv_mut());
            let cache = cache.ok_or_else(|| {
                Error::new(ErrorKind::Value, "attention", "a row has no cache for keys")
            })?;
            let view = if single_row {
                cache.update(keys, values)
            } else {
                cache.update(
                    &keys.slice_axis(2, from, to)?,
                    &values.slice_axis(2, from, to)?,
                )
            };
            from = to;
            Ok(KvView {
                reach: row.caches.reach(),
                ..view?
            })
        })
        .collect()
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod cache_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_each_row_is_taken() {
        let x = Array::from_slice(&[0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0], &[1, 6, 1]).unwrap();
        let last = |lengths: &[i32]| {
            let x = Positions::Last.of(&x, lengths).unwrap();
            x.to_vec::<f32>().unwrap()
        };
        assert_eq!(last(&[6]), [5.0]);
        assert_eq!(last(&[1, 3, 2]), [0.0, 3.0, 5.0]);
        assert_eq!(last(&[1; 6]).len(), 6);
        assert_eq!(Positions::All.of(&x, &[4, 2]).unwrap().size(), 6);
    }
}
