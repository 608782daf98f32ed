//! Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434). The keys and values of all
//! heads are projections of one latent vector per position, and the cache stores only this vector.
//! The layer does not expand the cache. Instead, it applies the expansion matrices to queries and
//! results. The layer is then attention of many query heads with one key head, which our kernels
//! compute.

use mlx_rs_core::{Array, Result, concatenate, zeros};

use super::attention::{Attention, Positions};
use super::attention_mask::visible;
use super::attention_parts::furthest;
use super::head_matrices::HeadMatrices;
use super::hooks::Watch;
use super::indexer::{IndexQueries, Indexer, selected};
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::{Norm, through};
use crate::cache::{CacheOptions, KvView, LayerState, Row, Switch, lengths};

/// How queries are computed from hidden states.
#[derive(Debug)]
pub enum LatentQueries {
    /// One matrix, `[hidden] -> [heads * (plain + rotated)]`.
    Direct(Linear),
    /// Two matrices with a norm between them.
    Latent(Box<ShortQueries>),
}

/// A low-rank projection of queries.
#[derive(Debug)]
pub struct ShortQueries {
    /// `[hidden] -> [rank]`.
    pub down: Linear,
    /// The norm between the matrices.
    pub norm: Norm,
    /// `[rank] -> [heads * (plain + rotated)]`.
    pub up: Linear,
}

/// A latent attention layer.
#[derive(Debug)]
pub struct LatentAttention {
    /// The projection of queries.
    pub queries: LatentQueries,
    /// `[hidden] -> [rank + rotated]`: the latent vector, and the rotated part of keys.
    pub kv_down: Linear,
    /// The norm of the latent vector.
    pub kv_norm: Norm,
    /// `[heads, plain, rank]`: maps the unrotated part of queries to the latent space.
    pub to_latent: HeadMatrices,
    /// `[heads, rank, values]`: maps attention outputs from the latent space to values.
    pub from_latent: HeadMatrices,
    /// Elements of a query head that do not rotate.
    pub plain: i32,
    /// Elements of a query head that rotate.
    pub rotated: i32,
    /// Elements of a value head.
    pub values: i32,
    /// The indexer of sparse attention (`DeepSeek` V3.2). Its keys are stored as the last elements
    /// of the cached keys.
    pub indexer: Option<Indexer>,
    /// Attention with one key head of `rotated + rank` elements, whose first `rotated` elements
    /// rotate. The keys of the indexer, if there is one, follow. Its output matrix is the layer's
    /// output matrix, `[heads * values] -> [hidden]`. Its other matrices are absent.
    pub core: Attention,
}

impl LatentAttention {
    /// Returns the number of elements of the latent vector.
    fn rank(&self) -> i32 {
        let marks = self.indexer.as_ref().map_or(0, |indexer| indexer.dim);
        self.core.head_dim - self.rotated - marks
    }

    /// Returns the input of the last projection of queries, `[1, T, query rank]`.
    fn query_input(&self, x: &Array) -> Result<Array> {
        match &self.queries {
            LatentQueries::Direct(_) => Ok(x.clone()),
            LatentQueries::Latent(short) => short.norm.forward(&short.down.forward(x)?),
        }
    }

    /// Returns queries `[1, T, heads * head_dim]` before rotation, from the input of their last
    /// projection. The elements that correspond to an indexer's keys are zero.
    fn queries(&self, input: &Array) -> Result<Array> {
        let q = match &self.queries {
            LatentQueries::Direct(linear) => linear.forward(input)?,
            LatentQueries::Latent(short) => short.up.forward(input)?,
        };
        let (length, heads) = (q.dim(1)?, self.core.n_heads);
        let (plain, all) = (self.plain, self.plain + self.rotated);
        let q = q.reshape(&[1, length, heads, all])?;
        let turning = q.slice_axis(-1, plain, all)?;
        let still = self.to_latent.forward(&q.slice_axis(-1, 0, plain)?)?;
        let width = heads * self.core.head_dim;
        let queries = match &self.indexer {
            None => concatenate(&[&turning, &still], -1)?,
            Some(indexer) => {
                let none = zeros(&[1, length, heads, indexer.dim], still.dtype())?;
                concatenate(&[&turning, &still, &none], -1)?
            }
        };
        queries.reshape(&[1, length, width])
    }

    /// Returns the key of each position `[1, T, rotated + rank]` before rotation.
    fn keys(&self, x: &Array) -> Result<Array> {
        let both = self.kv_down.forward(x)?;
        let rank = self.rank();
        let all = rank + self.rotated;
        let short = self.kv_norm.forward(&both.slice_axis(-1, 0, rank)?)?;
        concatenate(&[&both.slice_axis(-1, rank, all)?, &short], -1)
    }

    /// Returns values `[1, T, heads * values]`, computed from the heads' latent outputs `[1, T,
    /// heads * (rotated + rank)]`.
    fn expanded(&self, attended: &Array) -> Result<Array> {
        let (length, heads, all) = (attended.dim(1)?, self.core.n_heads, self.core.head_dim);
        let attended = attended.reshape(&[1, length, heads, all])?;
        let short = attended.slice_axis(-1, self.rotated, self.rotated + self.rank())?;
        let values = self.from_latent.forward(&short)?;
        values.reshape(&[1, length, heads * self.values])
    }

    /// Returns the attention output of queries `[1, T or rows, heads * head_dim]` before rotation.
    /// Each query attends only to the keys that the indexer selects.
    fn attend_selected(
        &self,
        (indexer, marks): (&Indexer, &IndexQueries),
        queries: &Array,
        views: &[KvView],
        (lengths, positions): (&[i32], Positions),
    ) -> Result<Array> {
        let core = &self.core;
        let queries = core.heads(queries, core.n_heads, None)?;
        let first_mark = self.rotated + self.rank();
        let mut from = 0;
        let mut outputs = Vec::with_capacity(lengths.len());
        for (&length, view) in lengths.iter().zip(views) {
            let left = match positions {
                Positions::All => length,
                Positions::Last => length.min(1),
            };
            let to = from + left;
            let end = view.offset + length;
            let (place, total) = (end - left, end.max(view.reach));
            let q = core.rotate(&queries.slice_axis(2, from, to)?, place, total)?;
            let stored = view.keys.positions()?;
            let attended = if stored <= indexer.count {
                core.attend_row(&q, view, place, left)?
            } else {
                let (keys, values) = (view.keys.plain(&q)?, view.values.plain(&q)?);
                let keys_of_index = keys.slice_axis(-1, first_mark, core.head_dim)?;
                let range = (from, to);
                // A single query may attend to all stored keys, so it needs no mask.
                let seen = match left {
                    1 => None,
                    _ => {
                        let spans = (view.window, None);
                        Some(visible(view.order, place, left, stored, spans)?)
                    }
                };
                let ids =
                    indexer.select(marks, range, &keys_of_index, (place, total), seen.as_ref())?;
                match &seen {
                    None => {
                        let ids = ids.reshape(&[indexer.count])?;
                        let of = |a: &Array| a.take_clamped(&ids, 2);
                        core.attend_masked(&q, &of(&keys)?, &of(&values)?, None)?
                    }
                    Some(seen) => {
                        let mask = selected(&ids, stored)?.logical_and(seen)?;
                        let mask = mask.expand_dims(1)?; // [1, 1, L, n]
                        core.attend_masked(&q, &keys, &values, Some(&mask))?
                    }
                }
            };
            let width = core.n_heads * core.head_dim;
            // [1, H, L, D] -> [1, L, H * D]
            let attended = attended.transpose_axes(&[0, 2, 1, 3])?;
            outputs.push(attended.reshape(&[1, left, width])?);
            from = to;
        }
        match outputs.as_slice() {
            [one] => Ok(one.clone()),
            several => concatenate(&several.iter().collect::<Vec<_>>(), 1),
        }
    }
}

impl Mixer for LatentAttention {
    fn forward(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let lengths = lengths(rows);
        let residual = add.then(|| positions.of(x, &lengths)).transpose()?;
        let x = through(norm, x)?;
        let mut keys = self.keys(&x)?;
        if let Some(indexer) = &self.indexer {
            keys = concatenate(&[&keys, &indexer.keys(&x, rows, layer)?], -1)?;
        }
        let end = furthest(rows);
        // With at most `count` positions, a query attends to all of them, so the indexer is not
        // needed.
        let indexer = self
            .indexer
            .as_ref()
            .filter(|indexer| end.position > indexer.count);
        if let Some(indexer) = indexer {
            let x = positions.of(&x, &lengths)?;
            let input = self.query_input(&x)?;
            let marks = indexer.queries(&x, &input)?;
            let queries = self.queries(&input)?;
            let views = self.core.update_projected(&keys, &keys, rows, layer)?;
            let of = (indexer, &marks);
            let attended = self.attend_selected(of, &queries, &views, (&lengths, positions))?;
            let values = self.expanded(&attended)?;
            return (self.core.o_proj).forward_from(None, &values, residual.as_ref());
        }
        let heads = self.core.heads_for_kernels(end)?;
        let attended = match heads.filter(|_| !watch.wants_attention()) {
            Some((heads, precomputed)) => {
                // The keys before rotation also serve as values; `expanded` drops the elements of
                // the result that belong to the rotated part.
                let packed =
                    concatenate(&[&self.queries(&self.query_input(&x)?)?, &keys, &keys], -1)?;
                (self.core).attend_packed((&heads, precomputed), &packed, rows, layer, positions)?
            }
            None => {
                let input = self.query_input(&positions.of(&x, &lengths)?)?;
                let queries = self.queries(&input)?;
                let views = self.core.update_projected(&keys, &keys, rows, layer)?;
                let shown = (layer, watch);
                (self.core).attend_projected(&queries, &views, &lengths, positions, shown)?
            }
        };
        let values = self.expanded(&attended)?;
        (self.core.o_proj).forward_from(None, &values, residual.as_ref())
    }

    fn new_state(&self, options: &CacheOptions) -> Box<dyn LayerState> {
        options.cache(None)
    }

    fn switch(&self) -> Option<Switch> {
        self.core.switch()
    }
}
