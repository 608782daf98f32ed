//! Helpers for tests of bounded caches. The value of each key is its position.

use mlx_rs_core::Array;

use super::{Caches, KvView, LayerState, Order, RecurrentState, StateLayout, StatePart, Stored};

/// Returns keys or values `[1, 1, n, 1]` of positions from `from` on, each equal to its position.
pub fn part(from: i32, n: i32) -> Array {
    let values: Vec<f32> = (from..from + n).map(|i| i as f32).collect();
    Array::from_slice(&values, &[1, 1, n, 1]).unwrap()
}

/// Returns the positions in a view, in storage order.
pub fn positions(view: &KvView) -> Vec<i32> {
    match &view.keys {
        Stored::Plain(a) => {
            let values = a.to_vec::<f32>().unwrap();
            values.iter().map(|v| *v as i32).collect()
        }
        Stored::Quantized(_) => panic!("not plain"),
    }
}

/// Returns the positions that the query at position `query` attends to, in order. Also checks the
/// view's order.
pub fn visible(view: &KvView, query: i32) -> Vec<i32> {
    let mut visible = positions(view);
    if let Order::Run { keep, start } = view.order {
        let stand = (0..keep).chain(start..).take(visible.len());
        assert_eq!(visible, stand.collect::<Vec<_>>());
        let near = |k: i32| view.window.is_none_or(|w| k > query - w);
        visible.retain(|&k| k <= query && (k < keep || near(k)));
    }
    visible.sort_unstable();
    visible
}

/// Returns a recurrent state after `n` positions.
pub fn recurrent(n: i32) -> Caches {
    let layout = StateLayout::new("toy", vec![StatePart::new("sum", &[2])]);
    let mut state = RecurrentState::new(&layout);
    if n > 0 {
        let sum = Array::from_slice(&[n as f32; 2], &[1, 2]).unwrap();
        state.advance(vec![sum], n).unwrap();
    }
    Caches::from(Box::new(state) as Box<dyn LayerState>)
}
