//! Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434). The keys and values of all
//! heads are projections of one latent vector per position, and the cache stores only this vector.
//! The layer does not expand the cache: it applies the expansion matrices to queries and results.
//! So the layer becomes attention of many query heads with one key head, which our kernels compute.

use mlx_rs_core::{Array, Result, concatenate};

use super::attention::{Attention, Positions, furthest};
use super::hooks::Watch;
use super::linear::Linear;
use super::mixer::Mixer;
use super::norm::{Norm, through};
use crate::cache::{CacheOptions, LayerState, Row, Switch, lengths};

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
    pub to_latent: Array,
    /// `[heads, rank, values]`: maps attention outputs from the latent space to values.
    pub from_latent: Array,
    /// Elements of a query head that do not rotate.
    pub plain: i32,
    /// Elements of a query head that rotate.
    pub rotated: i32,
    /// Elements of a value head.
    pub values: i32,
    /// Attention with one key head of `rotated + rank` elements, whose first `rotated` elements
    /// rotate. Its output matrix is the layer's output matrix, `[heads * values] -> [hidden]`. Its
    /// other matrices are absent.
    pub core: Attention,
}

impl LatentAttention {
    /// The size of the latent vector in elements.
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

    /// Values `[1, T, heads * values]`, computed from the heads' latent outputs `[1, T, heads *
    /// (rotated + rank)]`.
    fn expanded(&self, attended: &Array) -> Result<Array> {
        let (length, heads, all) = (attended.dim(1)?, self.core.n_heads, self.core.head_dim);
        let attended = attended.reshape(&[1, length, heads, all])?;
        let short = attended.slice_axis(-1, self.rotated, all)?;
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
        let attended = match heads.filter(|_| !watch.wants_attention()) {
            Some(heads) => {
                // The values are the keys before rotation. `expanded` drops the rotated part of the
                // result.
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
