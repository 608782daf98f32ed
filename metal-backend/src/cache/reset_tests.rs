//! Tests that a reset state equals the state of a new sequence: it frees its memory, and later
//! results are equal.

use mlx_rs_core::Array;

use super::*;

/// Keys or values of `n` positions from `from` on. The heads are wide enough for quantization.
fn part(from: i32, n: i32) -> Array {
    let values: Vec<f32> = (from * 32..(from + n) * 32)
        .map(|i| ((i * 37) % 101) as f32 * 0.01)
        .collect();
    Array::from_slice(&values, &[1, 1, n, 32]).unwrap()
}

fn layout() -> std::sync::Arc<StateLayout> {
    StateLayout::new("toy", vec![StatePart::new("sum", &[3])])
}

fn packed(start: i32) -> Box<dyn LayerState> {
    Box::new(QuantizedCache::new(Packing {
        bits: 4,
        group_size: 32,
        start,
    }))
}

fn pair() -> Box<dyn LayerState> {
    let keys = Box::new(WindowedCache::new(6, 1, 3));
    Box::new(PairState::new(keys, RecurrentState::new(&layout())))
}

/// Adds `n` positions, and returns the elements of the view that their queries read.
fn fill(state: &mut dyn LayerState, from: i32, n: i32) -> Vec<f32> {
    let mut seen = Vec::new();
    if let Some(keys) = state.as_kv_mut() {
        let view = keys.update(&part(from, n), &part(from, n)).unwrap();
        seen.push(view.offset as f32);
        for stored in [&view.keys, &view.values] {
            let plain = stored.plain(&part(0, 1)).unwrap();
            seen.extend(plain.to_f32_vec().unwrap());
        }
    }
    if let Some(state) = state.as_recurrent_mut() {
        seen.push(state.offset() as f32);
        for part in state.parts().unwrap() {
            seen.extend(part.to_f32_vec().unwrap());
        }
        let sum = Array::from_slice(&[(from + n) as f32; 3], &[1, 3]).unwrap();
        state.advance(vec![sum], n).unwrap();
    }
    assert!(!seen.is_empty());
    seen
}

#[test]
fn the_length_of_a_bounded_cache_is_what_it_holds() {
    let bounded: [Box<dyn LayerState>; 2] = [
        Box::new(RotatingCache::new(6, 1)),
        Box::new(WindowedCache::new(6, 1, 3)),
    ];
    for mut cache in bounded {
        let kind = cache.kind();
        let mut at = 0;
        for (n, length) in [(4, 4), (1, 5), (1, 6), (1, 6), (9, 6), (1, 6)] {
            fill(cache.as_mut(), at, n);
            at += n;
            assert_eq!((cache.offset(), cache.len()), (at, length), "{kind}");
        }
        cache.reset();
        assert_eq!((cache.offset(), cache.len()), (0, 0), "{kind}");
    }
    let mut unbounded = InPlaceCache::new();
    fill(&mut unbounded, 0, 9);
    assert_eq!(unbounded.len(), 9);
}

#[test]
fn every_kind_of_state_begins_anew() {
    type Make = fn() -> Box<dyn LayerState>;
    let kinds: [(&str, Make); 8] = [
        ("chunked", || Box::new(super::chunked::ChunkedCache::new())),
        ("in place", || Box::new(InPlaceCache::new())),
        ("rotating", || Box::new(RotatingCache::new(6, 1))),
        ("windowed", || Box::new(WindowedCache::new(6, 1, 3))),
        ("packed from the start", || packed(0)),
        ("packed later", || packed(5)),
        ("recurrent", || Box::new(RecurrentState::new(&layout()))),
        ("pair", pair),
    ];
    for (name, make) in kinds {
        let (mut used, mut fresh) = (make(), make());
        // The sequence exceeds the windows and the start of quantization, at once and in steps.
        for n in [9, 1, 1, 4] {
            fill(used.as_mut(), 50, n);
        }
        assert!(used.nbytes() > 0, "{name}");
        used.reset();
        assert!(used.is_empty(), "{name}");
        assert_eq!(used.nbytes(), fresh.nbytes(), "{name}");
        assert!(used.snapshot().unwrap().arrays.is_empty(), "{name}");
        let mut at = 0;
        for n in [3, 1, 8, 1] {
            let (again, first) = (fill(used.as_mut(), at, n), fill(fresh.as_mut(), at, n));
            assert_eq!(again, first, "{name}, at {at}");
            at += n;
            assert_eq!((used.offset(), used.kind()), (at, fresh.kind()), "{name}");
        }
    }
}
