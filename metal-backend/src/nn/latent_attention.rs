//! Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): keys and values of all heads are
//! products of one short vector a position, and the cache holds that vector. The matrices that would
//! expand it are applied to queries and results instead. So the layer is attention of many query
//! heads to one key head, which our kernels compute.

use mlx_rs_core::{Array, Result, concatenate};

use super::attention::{Attention, Positions, furthest};
use super::hooks::Watch;
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::{Norm, through};
use crate::cache::{CacheOptions, LayerState, Row, lengths};

/// How queries are made.
#[derive(Debug)]
pub enum LatentQueries {
    /// By one matrix, `[hidden] -> [heads * (plain + rotated)]`.
    Direct(Linear),
    /// Through a short vector with a norm.
    Latent(Box<ShortQueries>),
}

/// Queries through a short vector.
#[derive(Debug)]
pub struct ShortQueries {
    /// `[hidden] -> [rank]`.
    pub down: Linear,
    /// Of the short vector.
    pub norm: Norm,
    /// `[rank] -> [heads * (plain + rotated)]`.
    pub up: Linear,
}

/// One layer.
#[derive(Debug)]
pub struct LatentAttention {
    /// Queries.
    pub queries: LatentQueries,
    /// `[hidden] -> [rank + rotated]`: the short vector, and the part of keys that rotates.
    pub kv_down: Linear,
    /// Of the short vector.
    pub kv_norm: Norm,
    /// `[heads, plain, rank]`: from queries to those that meet the short vector.
    pub to_latent: Array,
    /// `[heads, rank, values]`: from what they find to values.
    pub from_latent: Array,
    /// Elements of a query head that do not rotate.
    pub plain: i32,
    /// Elements that rotate.
    pub rotated: i32,
    /// Elements of a value head.
    pub values: i32,
    /// Attention with one key head of `rotated + rank` elements, of which the first rotate. Its
    /// output matrix is that of the layer, `[heads * values] -> [hidden]`. Its other matrices are
    /// absent.
    pub core: Attention,
}

impl LatentAttention {
    /// Elements of the short vector.
    fn rank(&self) -> i32 {
        self.core.head_dim - self.rotated
    }

    /// Queries `[1, T, heads * (rotated + rank)]` before rotation.
    fn queries(&self, x: &Array) -> Result<Array> {
        let q = match &self.queries {
            LatentQueries::Direct(linear) => linear.forward(x)?,
            LatentQueries::Latent(short) => {
                let x = short.norm.forward(&short.down.forward(x)?)?;
                short.up.forward(&x)?
            }
        };
        let (length, heads) = (q.dim(1)?, self.core.n_heads);
        let (plain, all) = (self.plain, self.plain + self.rotated);
        let q = q.reshape(&[1, length, heads, all])?;
        let turning = q.slice_axis(-1, plain, all)?;
        let still = q.slice_axis(-1, 0, plain)?.transpose_axes(&[0, 2, 1, 3])?;
        // [1, H, T, plain] x [H, plain, rank]
        let still = still.matmul(&self.to_latent)?;
        let still = still.transpose_axes(&[0, 2, 1, 3])?;
        let width = heads * self.core.head_dim;
        concatenate(&[&turning, &still], -1)?.reshape(&[1, length, width])
    }

    /// The key of each position `[1, T, rotated + rank]` before rotation.
    fn keys(&self, x: &Array) -> Result<Array> {
        let both = self.kv_down.forward(x)?;
        let (rank, all) = (self.rank(), self.core.head_dim);
        let short = self.kv_norm.forward(&both.slice_axis(-1, 0, rank)?)?;
        concatenate(&[&both.slice_axis(-1, rank, all)?, &short], -1)
    }

    /// Values `[1, T, heads * values]` of what the heads found, `[1, T, heads * (rotated + rank)]`.
    fn expanded(&self, found: &Array) -> Result<Array> {
        let (length, heads, all) = (found.dim(1)?, self.core.n_heads, self.core.head_dim);
        let found = found.reshape(&[1, length, heads, all])?;
        let short = found.slice_axis(-1, self.rotated, all)?;
        let short = short.transpose_axes(&[0, 2, 1, 3])?;
        let values = short.matmul(&self.from_latent)?; // [1, H, T, values]
        let width = heads * self.values;
        values
            .transpose_axes(&[0, 2, 1, 3])?
            .reshape(&[1, length, width])
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
        let keys = self.keys(&x)?;
        let heads = self.core.kernel_heads(furthest(rows));
        let found = match heads.filter(|_| !watch.wants_attention()) {
            Some(heads) => {
                // Values are the keys, unrotated: what rotates is dropped from the result.
                let packed = concatenate(&[&self.queries(&x)?, &keys, &keys], -1)?;
                (self.core).attend_packed(&heads, &packed, rows, layer, positions)?
            }
            None => {
                let queries = self.queries(&positions.of(&x, &lengths)?)?;
                let views = self.core.update_projected(&keys, &keys, rows, layer)?;
                let shown = (layer, watch);
                (self.core).attend_projected(&queries, &views, &lengths, positions, shown)?
            }
        };
        let values = self.expanded(&found)?;
        (self.core.o_proj).forward_from(None, &values, residual.as_ref())
    }

    fn new_state(&self, options: &CacheOptions) -> Box<dyn LayerState> {
        options.cache(None)
    }

    fn switch(&self) -> Option<i32> {
        self.core.switch()
    }
}
