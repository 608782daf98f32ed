//! Compares flash attention, with grouped heads, a causal mask and a score cap, with a step-by-step
//! computation. Prints the attention weights of the last position.
//!
//! ```text
//! cargo run --release -p rust-mlx-core --example attention_demo
//! ```

use mlx_rs_core::fast::{self, Mask};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{All, Array, Dtype, Result, tri, where_};

/// The number of positions, query heads, key heads, and elements of a head.
const SHAPE: (i32, i32, i32, i32) = (24, 8, 4, 32);

/// The attention weights `[H, L, L]`. A position attends to no later position.
fn weights(q: &Array, k: &Array, scale: f32, cap: Option<f32>) -> Result<Array> {
    let (length, heads, kv_heads, dim) = SHAPE;
    // [H, L, D] -> [Hkv, H / Hkv, L, D]: heads of a group share keys.
    let q = q.reshape(&[kv_heads, heads / kv_heads, length, dim])?;
    let mut scores = q
        .matmul(&k.expand_dims(1)?.swap_axes(-1, -2)?)?
        .multiply(&Array::scalar(scale)?)?;
    if let Some(cap) = cap {
        let cap = Array::scalar(cap)?;
        scores = scores.divide(&cap)?.tanh()?.multiply(&cap)?;
    }
    let seen = tri(length, length, 0, Dtype::Bool)?;
    let masked = where_(&seen, &scores, &Array::scalar(f32::NEG_INFINITY)?)?;
    masked.softmax(-1, true)?.reshape(&[heads, length, length])
}

/// Compares both computations, and prints the weights of the last position.
pub fn main() -> Result<()> {
    let (length, heads, kv_heads, dim) = SHAPE;
    let noise = |heads: i32, seed| -> Result<Array> {
        random::normal(
            0.0,
            1.0,
            &[heads, length, dim],
            Dtype::Float32,
            &Key::new(seed)?,
        )
    };
    let (q, k, v) = (noise(heads, 1)?, noise(kv_heads, 2)?, noise(kv_heads, 3)?);
    let scale = (dim as f32).powf(-0.5);

    let batch = |x: &Array| x.expand_dims(0);
    let fused = fast::scaled_dot_product_attention(
        &batch(&q)?,
        &batch(&k)?,
        &batch(&v)?,
        scale,
        Mask::Causal,
    )?;
    let shares = weights(&q, &k, scale, None)?;
    // The shapes are [Hkv, H / Hkv, L, L] x [Hkv, 1, L, D].
    let grouped = shares.reshape(&[kv_heads, heads / kv_heads, length, length])?;
    let steps = grouped
        .matmul(&v.expand_dims(1)?)?
        .reshape(&[1, heads, length, dim])?;
    let difference = fused
        .subtract(&steps)?
        .abs()?
        .max(All, false)?
        .item::<f32>()?;
    println!("{heads} heads on {kv_heads}, {length} positions: the two differ by {difference:e}");
    assert!(difference < 1e-5, "{difference}");

    // The last position attends to all positions: its weights sum to 1, and a cap makes them more
    // equal.
    let last = |shares: &Array| shares.slice_axis(1, length - 1, length);
    let capped = weights(&q, &k, scale, Some(0.5))?;
    for (name, shares) in [("plain", &shares), ("capped", &capped)] {
        let last_shares = last(shares)?;
        let sums = last_shares.sum(-1, false)?.to_vec::<f32>()?;
        assert!(sums.iter().all(|s| (s - 1.0).abs() < 1e-5), "{sums:?}");
        let greatest = last_shares.max(All, false)?.item::<f32>()?;
        println!("{name}: the last position's greatest share is {greatest:.3}");
    }
    let greatest = |shares: &Array| last(shares)?.max(All, false)?.item::<f32>();
    assert!(greatest(&capped)? < greatest(&shares)?);
    Ok(())
}
