//! Attention by our kernels. If the kernels do not support a layer's norms or rotation, MLX's
//! operations compute these first.

use mlx_rs_core::{Array, Dtype, Result, concatenate};

use super::attention::{Attention, Positions, each_row, store};
use super::attention_mask::nearer;
use super::attention_parts::{Furthest, Growth};
use super::hooks::Watch;
use super::norm::through;
use crate::cache::{KvView, Order, Row, Stored, Switch, in_place, lengths};
use crate::exec::{AttentionSpec, Heads, NormSpec, PlainView, RotarySpec, on_kernels};

/// The steps of attention that MLX's operations compute before the kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Precomputed {
    /// Nothing: the kernels compute norms and rotation.
    Nothing,
    /// The norms, and the growth of queries.
    Norms,
    /// The norms, the rotation, and the growth of queries.
    Rotation,
}

impl Attention {
    /// Returns the layer in the kernels' form for sequences of these lengths; `None` if the kernels
    /// do not support the layer.
    pub(super) fn kernel_heads(&self, furthest: Furthest) -> Option<Heads> {
        let grows = |growth: &Growth| growth.is_felt(furthest.position);
        if self.is_divided(furthest) || self.growth.as_ref().is_some_and(grows) {
            return None;
        }
        match self.switch() {
            Some(Switch::Gradual(length)) if furthest.reach > length => None,
            _ => self.spec().heads(),
        }
    }

    /// Returns the layer in the kernels' form, and the steps that MLX's operations compute first.
    /// `None` if the kernels do not support the layer, or do not run on the current device.
    pub(super) fn heads_for_kernels(
        &self,
        furthest: Furthest,
    ) -> Result<Option<(Heads, Precomputed)>> {
        if self.is_divided(furthest) || !on_kernels()? {
            return Ok(None);
        }
        if let Some(heads) = self.kernel_heads(furthest) {
            return Ok(Some((heads, Precomputed::Nothing)));
        }
        let spec = self.spec();
        let changes = match self.switch() {
            Some(Switch::Gradual(length)) => furthest.reach > length,
            _ => matches!(spec.rotary, RotarySpec::Changing),
        };
        let precomputed = match self.norms.after_rotation || changes {
            true => Precomputed::Rotation,
            false => Precomputed::Norms,
        };
        let rotary = match precomputed {
            Precomputed::Rotation => RotarySpec::None,
            _ => spec.rotary,
        };
        let heads = self.without_norms(rotary).heads();
        Ok(heads.map(|heads| (heads, precomputed)))
    }

    /// Whether any query is in another chunk than the first key.
    fn is_divided(&self, furthest: Furthest) -> bool {
        self.chunk.is_some_and(|chunk| furthest.position > chunk)
    }

    /// Returns the layer for kernels that compute no norms, with this rotation.
    fn without_norms<'a>(&'a self, rotary: RotarySpec<'a>) -> AttentionSpec<'a> {
        AttentionSpec {
            q_norm: NormSpec::None,
            k_norm: NormSpec::None,
            v_norm: NormSpec::None,
            across_heads: false,
            after_rotation: false,
            rotary,
            ..self.spec()
        }
    }

    /// Stores the keys and values in `raw`, and returns the attention output of its queries, `[1, T
    /// or rows, H * D]`. `raw` `[1, T, (H + 2 * Hkv) * D]` contains queries, keys and values before
    /// head norms and rotation. `heads` and `precomputed` come from [`Self::heads_for_kernels`].
    pub(super) fn attend_packed(
        &self,
        (heads, precomputed): (&Heads, Precomputed),
        raw: &Array,
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
    ) -> Result<Array> {
        let ready = match precomputed {
            Precomputed::Nothing => raw.clone(),
            _ => self.precompute(raw, precomputed, rows, layer)?,
        };
        let packed = &ready;
        let places: Vec<(i32, i32)> = rows
            .iter()
            .map(|row| {
                let cache = row.caches.get(layer);
                (row.length, cache.map_or(0, |cache| cache.offset()))
            })
            .collect();
        let last = positions == Positions::Last;
        if let Some(kernel_views) = self.stored(heads, packed, rows, &places, layer)? {
            return heads.attend(packed, &kernel_views, last);
        }
        let keys = heads.keys(packed, &places)?; // [1, Hkv, T, D]
        let (n, d) = (self.n_kv_heads, self.head_dim);
        let first = (self.n_heads + n) * d;
        let total = packed.dim(1)?;
        let values = packed
            .slice_axis(2, first, first + n * d)?
            .reshape(&[1, total, n, d])?
            .transpose_axes(&[0, 2, 1, 3])?;
        let views = store(rows, layer, &keys, &values)?;
        let kernel_views: Option<Vec<PlainView>> = (views.iter().zip(&places))
            .map(|(view, &place)| self.plain_view(view, place))
            .collect();
        if let Some(kernel_views) = kernel_views {
            return heads.attend(packed, &kernel_views, last);
        }
        // Our kernels cannot read caches that MLX packed, so MLX's operations compute the rest.
        let lengths = lengths(rows);
        let queries = positions
            .of(raw, &lengths)?
            .slice_axis(2, 0, self.n_heads * d)?;
        let queries = self.heads(&queries, self.n_heads, self.norms.before()[0])?;
        let watch = &mut Watch::nothing();
        self.attend_queries(&queries, &views, &lengths, positions, (layer, watch))
    }

    /// Computes the steps in `precomputed`. `packed` `[1, T, (H + 2 * Hkv) * D]` contains queries,
    /// keys and values before head norms and rotation. The result has the same shape.
    fn precompute(
        &self,
        packed: &Array,
        precomputed: Precomputed,
        rows: &[Row<'_>],
        layer: usize,
    ) -> Result<Array> {
        let (n, n_kv, d) = (self.n_heads, self.n_kv_heads, self.head_dim);
        let total = packed.dim(1)?;
        let part = |from: i32, heads: i32| packed.slice_axis(2, from * d, (from + heads) * d);
        let before = self.norms.before();
        let queries = self.heads(&part(0, n)?, n, before[0])?;
        let keys = self.heads(&part(n, n_kv)?, n_kv, before[1])?;
        let after = self.norms.after();
        let rotated = |heads: Array, norm, offset, total| match precomputed {
            Precomputed::Rotation => through(norm, &self.rotate(&heads, offset, total)?),
            _ => Ok(heads),
        };
        let queries = each_row(&queries, rows, layer, |queries, offset, total| {
            self.grown(&rotated(queries, after[0], offset, total)?, offset)
        })?;
        let keys = each_row(&keys, rows, layer, |keys, offset, total| {
            rotated(keys, after[1], offset, total)
        })?;
        let flat = |heads: &Array, n: i32| {
            let positions_first = heads.transpose_axes(&[0, 2, 1, 3])?;
            positions_first.reshape(&[1, total, n * d])
        };
        let values = part(n + n_kv, n_kv)?;
        let values = match &self.norms.v {
            None => values,
            Some(norm) => {
                let values = norm.forward(&values.reshape(&[1, total, n_kv, d])?)?;
                values.reshape(&[1, total, n_kv * d])?
            }
        };
        concatenate(&[&flat(&queries, n)?, &flat(&keys, n_kv)?, &values], 2)
    }

    /// Makes the kernels write keys and values into the caches, if all caches support it.
    fn stored(
        &self,
        heads: &Heads,
        packed: &Array,
        rows: &mut [Row<'_>],
        places: &[(i32, i32)],
        layer: usize,
    ) -> Result<Option<Vec<PlainView>>> {
        let stores = |row: &mut Row<'_>| {
            let cache = row.caches.get_mut(layer);
            cache.is_some_and(|cache| in_place(cache).is_some())
        };
        if !rows.iter_mut().all(stores) {
            return Ok(None);
        }
        let mut first = 0;
        let mut kernel_views = Vec::with_capacity(rows.len());
        for (row, &(length, offset)) in rows.iter_mut().zip(places) {
            let cache = row.caches.get_mut(layer);
            let Some(cache) = cache.and_then(in_place) else {
                return Ok(None);
            };
            let (keys, values) = cache.store(heads, packed, (first, length))?;
            let packing = cache.packing();
            kernel_views.push(PlainView {
                length,
                offset,
                keys,
                values,
                packing,
                filled: offset + length,
                order: Some((0, 0)),
                window: self.window,
            });
            first += length;
        }
        Ok(Some(kernel_views))
    }

    /// Returns the view in the kernels' form, for `length` queries from position `offset` on.
    /// `None` if MLX packed its keys.
    fn plain_view(&self, view: &KvView, (length, offset): (i32, i32)) -> Option<PlainView> {
        let (Stored::Plain(keys), Stored::Plain(values)) = (&view.keys, &view.values) else {
            return None;
        };
        Some(PlainView {
            length,
            offset,
            keys: keys.clone(),
            values: values.clone(),
            packing: None,
            filled: keys.dim(2).unwrap_or(0),
            order: match view.order {
                Order::Run { keep, start } => Some((keep, start)),
                Order::Any => None,
            },
            window: nearer(self.window, view.window),
        })
    }

    /// Returns the attention output `[1, L, H * D]` of queries `[1, H, L, D]` of one row, after
    /// norms and rotation, computed by the kernels. `place` is the number of queries and the
    /// position of the first query. `None` if the kernels do not support the layer.
    pub(super) fn attend_on_kernels(
        &self,
        queries: &Array,
        view: &KvView,
        place: (i32, i32),
    ) -> Result<Option<Array>> {
        let (length, offset) = place;
        let furthest = Furthest {
            position: offset + length,
            reach: 0,
        };
        if self.is_divided(furthest) || queries.dtype() != Dtype::Float32 || !on_kernels()? {
            return Ok(None);
        }
        let (Some(heads), Some(view)) = (
            self.without_norms(RotarySpec::None).heads(),
            self.plain_view(view, place),
        ) else {
            return Ok(None);
        };
        let queries = queries.transpose_axes(&[0, 2, 1, 3])?;
        let queries = queries.reshape(&[1, length, self.n_heads * self.head_dim])?;
        heads.attend(&queries, &[view], false).map(Some)
    }
}
