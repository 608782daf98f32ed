//! Attention masks, computed from the window and from the order of the positions in the cache.

use mlx_rs_core::{Array, Dtype, Result, concatenate};

use crate::cache::{KvView, Order, Stored};

/// Returns the smaller of two windows; `None` means no limit.
pub(super) fn nearer(a: Option<i32>, b: Option<i32>) -> Option<i32> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// The keys that a query attends to.
pub(super) enum AttentionMask {
    /// Every query attends to every key.
    None,
    /// A query attends to no later key.
    Causal,
    /// A boolean array `[L, n]`.
    Array(Array),
}

/// Returns the keys and values that `length` queries from position `offset` on need, with their
/// mask. `window` and `chunk` are the layer's window and chunk length in positions.
pub(super) fn attention_mask(
    (window, chunk): (Option<i32>, Option<i32>),
    view: &KvView,
    offset: i32,
    length: i32,
) -> Result<(Stored, Stored, AttentionMask)> {
    let both = || (view.keys.clone(), view.values.clone());
    let total = view.keys.positions()?;
    let mut window = nearer(window, view.window);
    // If all positions are in the first chunk, chunked attention equals causal attention.
    let chunk = chunk.filter(|chunk| offset + length > *chunk);
    if let Some(chunk) = chunk {
        if length > 1 {
            let spans = (window, Some(chunk));
            let mask = visible(view.order, offset, length, total, spans)?;
            let (keys, values) = both();
            return Ok((keys, values, AttentionMask::Array(mask)));
        }
        window = nearer(window, Some(offset % chunk + 1));
    }
    let (keep, everything) = match view.order {
        Order::Any => (0, true),
        Order::Run { keep, .. } => (keep, window.is_none_or(|w| total - keep <= w)),
    };
    let mask = match window {
        // The last query's window contains the farthest key, so the windows of all queries do.
        _ if everything && length == 1 => AttentionMask::None,
        _ if everything => AttentionMask::Causal,
        Some(window) if length == 1 && keep == 0 => {
            // A single query attends to the last `window` positions, so no mask is needed.
            let tail = |s: &Stored| s.range(total - window, total);
            return Ok((tail(&view.keys)?, tail(&view.values)?, AttentionMask::None));
        }
        window => AttentionMask::Array(visible(view.order, offset, length, total, (window, None))?),
    };
    let (keys, values) = both();
    Ok((keys, values, mask))
}

/// Returns a boolean mask `[length, total]`. A query at position `p` attends to the first `keep`
/// keys and to keys in `(p - window, p]`. With chunks, it attends only to keys of its own chunk.
pub(super) fn visible(
    order: Order,
    offset: i32,
    length: i32,
    total: i32,
    (window, chunk): (Option<i32>, Option<i32>),
) -> Result<Array> {
    let range = |start: i32, n: i32| {
        mlx_rs_core::arange(
            f64::from(start),
            f64::from(start) + f64::from(n),
            1.0,
            Dtype::Int32,
        )
    };
    let (keep, start) = match order {
        Order::Run { keep, start } => (keep, start),
        Order::Any => (0, 0),
    };
    let queries = range(offset, length)?.expand_dims(1)?;
    let keys = match keep {
        0 => range(start, total)?,
        _ => concatenate(&[&range(0, keep)?, &range(start, total - keep)?], 0)?,
    };
    let keys = keys.expand_dims(0)?;
    let mut causal = keys.less_equal(&queries)?;
    if let Some(chunk) = chunk {
        let chunk = Array::scalar(chunk)?;
        let same = (keys.floor_divide(&chunk)?).equal(&queries.floor_divide(&chunk)?)?;
        causal = causal.logical_and(&same)?;
    }
    let Some(window) = window else {
        return Ok(causal);
    };
    let mut near = keys.add(&Array::scalar(window)?)?.greater(&queries)?;
    if keep > 0 {
        near = near.logical_or(&keys.less(&Array::scalar(keep)?)?)?;
    }
    causal.logical_and(&near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_causal_and_near_and_keep_what_is_kept() {
        let mask = |order, offset, length, total, window| {
            visible(order, offset, length, total, (window, None))
                .unwrap()
                .to_vec::<bool>()
                .unwrap()
        };
        let run = |keep, start| Order::Run { keep, start };
        let expected = [
            [false, true, true, false, false],
            [false, false, true, true, false],
            [false, false, false, true, true],
        ];
        assert_eq!(mask(run(0, 0), 2, 3, 5, Some(2)), expected.concat());
        assert_eq!(mask(run(0, 0), 0, 2, 2, None), [true, false, true, true]);
        // The keys are at positions 0, 7, 8 and 9. Each query attends to key 0, which is always
        // kept, and to two other keys.
        let expected = [[true, true, true, false], [true, false, true, true]];
        assert_eq!(mask(run(1, 7), 8, 2, 4, Some(2)), expected.concat());
    }

    #[test]
    fn queries_see_their_own_chunk() {
        // Chunks of 3 positions. Keys begin at position 1, queries at position 2.
        let order = Order::Run { keep: 0, start: 1 };
        let mask = visible(order, 2, 3, 4, (None, Some(3))).unwrap();
        let expected = [
            [true, true, false, false],
            [false, false, true, false],
            [false, false, true, true],
        ];
        assert_eq!(mask.to_vec::<bool>().unwrap(), expected.concat());
        let keys = Array::from_slice(&[0.0f32, 1.0, 2.0, 3.0, 4.0], &[1, 1, 5, 1]).unwrap();
        let view = KvView {
            keys: Stored::Plain(keys.clone()),
            values: Stored::Plain(keys),
            offset: 4,
            order: Order::Run { keep: 0, start: 0 },
            window: None,
            reach: 0,
        };
        // A single query at position 4 must attend to the keys at 3 and 4.
        let (keys, _, mask) = attention_mask((None, Some(3)), &view, 4, 1).unwrap();
        assert!(matches!(mask, AttentionMask::None));
        let Stored::Plain(keys) = keys else {
            panic!("keys were packed");
        };
        assert_eq!(keys.to_vec::<f32>().unwrap(), [3.0, 4.0]);
    }
}
