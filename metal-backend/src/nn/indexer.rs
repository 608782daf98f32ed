//! The indexer of sparse attention (DeepSeek-AI 2025, `DeepSeek`-V3.2): a few small heads score all
//! earlier positions, and a query attends only to the positions with the greatest scores.
//!
//! The score of position `s` for the query at position `t` is the sum over the heads of `w_t
//! relu(q_t . k_s)`. All heads share the keys. The formula's positive constant factors are omitted,
//! because they do not change the order.

use mlx_rs_core::{Array, Dtype, Result, concatenate, where_, zeros};

use super::adapter;
use super::linear::Linear;
use super::norm::Norm;
use super::rope::Rope;
use crate::cache::{Row, offset};
use crate::exec::Activation;

/// Selects the positions to which each query attends.
#[derive(Debug)]
pub struct Indexer {
    /// The queries of all heads, `[query rank] -> [heads * dim]`.
    pub queries: Linear,
    /// The keys, `[hidden] -> [dim]`.
    pub keys: Linear,
    /// The norm of keys.
    pub key_norm: Norm,
    /// The heads' weights, `[hidden] -> [heads]`.
    pub weights: Linear,
    /// The rotation of the first elements of queries and keys.
    pub rope: Rope,
    /// Heads.
    pub heads: i32,
    /// Elements of a key.
    pub dim: i32,
    /// The number of positions to which a query attends.
    pub count: i32,
}

/// The queries of an indexer, for concatenated rows.
#[derive(Debug)]
pub struct IndexQueries {
    /// `[1, T, heads * dim]` before rotation.
    queries: Array,
    /// `[1, T, heads]`.
    weights: Array,
}

impl Indexer {
    /// Returns the keys of `x` `[1, T, hidden]`, rotated at the positions of `rows`: `[1, T, dim]`.
    ///
    /// # Errors
    /// If `x` has fewer positions than the rows together.
    pub fn keys(&self, x: &Array, rows: &[Row<'_>], layer: usize) -> Result<Array> {
        let keys = self.key_norm.forward(&self.keys.forward(x)?)?;
        let mut from = 0;
        let mut rotated = Vec::with_capacity(rows.len());
        for row in rows {
            let to = from + row.length;
            let place = row.caches.get(layer).map_or(0, |cache| cache.offset());
            let end = (offset(row.caches) + row.length).max(row.caches.reach());
            let one = keys.slice_axis(1, from, to)?.expand_dims(1)?;
            rotated.push(self.rope.forward(&one, place, end)?.squeeze_axis(1)?);
            from = to;
        }
        match rotated.as_slice() {
            [one] => Ok(one.clone()),
            several => concatenate(&several.iter().collect::<Vec<_>>(), 1),
        }
    }

    /// Returns the index queries of `x` `[1, T, hidden]`. `low` `[1, T, query rank]` is the
    /// low-rank input from which attention computes its queries.
    ///
    /// # Errors
    /// If shapes do not match.
    pub fn queries(&self, x: &Array, low: &Array) -> Result<IndexQueries> {
        Ok(IndexQueries {
            queries: self.queries.forward(low)?,
            weights: self.weights.forward(x)?,
        })
    }

    /// Returns the scores of keys `[1, 1, n, dim]` for the queries `from..to`: `[1, to - from, n]`
    /// in float32. The first of these queries is at position `place` of a sequence of `total`
    /// positions.
    fn scores(
        &self,
        of: &IndexQueries,
        (from, to): (i32, i32),
        keys: &Array,
        (place, total): (i32, i32),
    ) -> Result<Array> {
        let length = to - from;
        let wide = |a: &Array| a.astype(Dtype::Float32);
        let queries = of
            .queries
            .slice_axis(1, from, to)?
            .reshape(&[1, length, self.heads, self.dim])?
            .transpose_axes(&[0, 2, 1, 3])?;
        let queries = wide(&self.rope.forward(&queries, place, total)?)?;
        let weights = wide(&of.weights.slice_axis(1, from, to)?)?
            .transpose_axes(&[0, 2, 1])?
            .expand_dims(-1)?; // [1, H, L, 1]
        let keys = wide(keys)?.swap_axes(-1, -2)?; // [1, 1, dim, n]
        let scored = |queries: &Array, weights: &Array| {
            let dots = Activation::Relu.apply(&queries.matmul(&keys)?)?;
            dots.multiply(weights)?.sum(1, false)
        };
        if length == 1 {
            return scored(&queries, &weights);
        }
        // One head at a time, because the scores of all heads would need too much memory.
        let one = |head: i32| {
            let of_head = |a: &Array| a.slice_axis(1, head, head + 1);
            scored(&of_head(&queries)?, &of_head(&weights)?)
        };
        let mut sum = one(0)?;
        for head in 1..self.heads {
            sum = sum.add(&one(head)?)?;
        }
        Ok(sum)
    }

    /// Returns the positions with the greatest scores for each of the queries `from..to`, `[1, to -
    /// from, count]`. `visible` `[to - from, n]` says whether a query may attend to a key. A query
    /// with fewer than `count` visible keys also gets invisible ones.
    ///
    /// # Errors
    /// If there are not more than `count` keys.
    pub fn select(
        &self,
        of: &IndexQueries,
        range: (i32, i32),
        keys: &Array,
        place: (i32, i32),
        visible: Option<&Array>,
    ) -> Result<Array> {
        let mut scores = self.scores(of, range, keys, place)?;
        if let Some(visible) = visible {
            scores = where_(visible, &scores, &Array::scalar(f32::NEG_INFINITY)?)?;
        }
        let total = scores.dim(-1)?;
        // `argpartition` puts the greatest scores last.
        let first = total - self.count;
        let ids = scores
            .argpartition(first, -1)?
            .slice_axis(-1, first, total)?;
        // A selection has no gradient.
        match adapter::differentiated() {
            true => ids.stop_gradient(),
            false => Ok(ids),
        }
    }
}

/// Returns a boolean array `[1, L, n]`: whether each of `n` keys is among the selected `ids` `[1,
/// L, count]`.
///
/// # Errors
/// If memory runs out.
pub fn selected(ids: &Array, total: i32) -> Result<Array> {
    let none = zeros(&[ids.dim(0)?, ids.dim(1)?, total], Dtype::Bool)?;
    none.put_along_axis(ids, &Array::scalar(true)?, -1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::config::RopeConfig;
    use crate::exec::Weight;

    /// Returns an indexer with one head of two elements, whose projections are identities.
    fn identity(count: i32) -> Indexer {
        let eye = || {
            let weight = Array::from_slice(&[1.0f32, 0.0, 0.0, 1.0], &[2, 2]).unwrap();
            Linear::new(Weight::Dense(weight), None, false).unwrap()
        };
        let ones = Array::from_slice(&[1.0f32, 1.0], &[1, 2]).unwrap();
        Indexer {
            queries: eye(),
            keys: eye(),
            key_norm: Norm::Identity,
            weights: Linear::new(Weight::Dense(ones), None, false).unwrap(),
            rope: Rope::new(2, &RopeConfig::plain(1e30), false, Dtype::Float32).unwrap(),
            heads: 1,
            dim: 2,
            count,
        }
    }

    #[test]
    fn the_greatest_scores_are_selected_among_visible_keys() {
        let indexer = identity(2);
        // At position 0, the rotation changes nothing.
        let x = Array::from_slice(&[1.0f32, 0.5], &[1, 1, 2]).unwrap();
        let queries = indexer.queries(&x, &x).unwrap();
        let keys = [1.0f32, 0.0, -3.0, 0.0, 2.0, 0.0, 3.0, 0.0];
        let keys = Array::from_slice(&keys, &[1, 1, 4, 2]).unwrap();
        let chosen = |visible: Option<&[bool]>| {
            let visible = visible.map(|v| Array::from_slice(v, &[1, 4]).unwrap());
            let ids = indexer.select(&queries, (0, 1), &keys, (0, 1), visible.as_ref());
            let mask = selected(&ids.unwrap(), 4).unwrap();
            mask.to_vec::<bool>().unwrap()
        };
        assert_eq!(chosen(None), [false, false, true, true]);
        let hidden = chosen(Some(&[true, true, true, false]));
        assert_eq!(hidden, [true, false, true, false]);
    }
}
