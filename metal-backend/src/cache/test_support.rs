//! What the tests of bounded caches share: keys that say which position they are of.

use mlx_rs_core::Array;

use super::{KvView, Order, Stored};

/// Keys or values `[1, 1, n, 1]` of the positions from `from` on, each its own number.
pub fn part(from: i32, n: i32) -> Array {
    let values: Vec<f32> = (from..from + n).map(|i| i as f32).collect();
    Array::from_slice(&values, &[1, 1, n, 1]).unwrap()
}

/// The positions that a cache returned, as they stand.
pub fn positions(view: &KvView) -> Vec<i32> {
    match &view.keys {
        Stored::Plain(a) => {
            let values = a.to_vec::<f32>().unwrap();
            values.iter().map(|v| *v as i32).collect()
        }
        Stored::Quantized(_) => panic!("not plain"),
    }
}

/// Of these, what the query at `query` sees, in order; says also that they stand where the cache
/// says.
pub fn visible(view: &KvView, query: i32) -> Vec<i32> {
    let mut found = positions(view);
    if let Order::Run { kept, start } = view.order {
        let stand = (0..kept).chain(start..).take(found.len());
        assert_eq!(found, stand.collect::<Vec<_>>());
        let near = |k: i32| view.window.is_none_or(|w| k > query - w);
        found.retain(|&k| k <= query && (k < kept || near(k)));
    }
    found.sort_unstable();
    found
}
