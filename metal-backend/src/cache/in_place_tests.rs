use super::*;
use mlx_rs_core::cpu::{Block, DenseMatrix, Gate, KvSlot, Matrix};
use mlx_rs_core::{Device, Dtype, Stream, zeros};

/// A matrix of zeros, if the kernels are enabled.
fn none() -> Option<Matrix> {
    let zeros = zeros(&[2, 2], Dtype::Float32).unwrap();
    DenseMatrix::new(&zeros).unwrap().map(Matrix::Dense)
}

fn heads() -> Heads {
    heads_of(2)
}

fn heads_of(head_dim: i32) -> Heads {
    Heads {
        n_heads: 1,
        n_kv_heads: 1,
        head_dim,
        scale: 1.0,
        softcap: None,
        q_norm: None,
        k_norm: None,
        rotation: None,
        sinks: None,
    }
}

fn block<'a>(heads: &'a Heads, none: &'a Matrix) -> Block<'a> {
    Block {
        heads,
        attention_norm: None,
        projections: [(none, None); 3],
        output: (none, None),
        feed_norm: None,
        gate: Gate::Silu,
        gate_up: [(none, None); 2],
        down: (none, None),
    }
}

/// Returns the capacity after `prompt` tokens if `expected` positions are announced, and the
/// capacity after the token that exceeds the first capacity.
fn capacities(expected: Option<i32>, prompt: i32) -> (i32, i32) {
    let heads = heads();
    let mut capacities = (0, 0);
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        let none = none().unwrap();
        let mut cache = InPlaceCache::new();
        if let Some(expected) = expected {
            cache.expect(expected);
        }
        let memory = cache
            .memory(&heads, prompt, &mut KvAllocator::new(1))
            .unwrap();
        capacities.0 = memory.capacity();
        let slot = KvSlot {
            length: capacities.0,
            offset: 0,
            memory,
            window: None,
        };
        let x = zeros(&[1, capacities.0, 2], Dtype::Float32).unwrap();
        block(&heads, &none).step(&x, &mut [slot]).unwrap();
        cache.advance(capacities.0);
        capacities.1 = cache
            .memory(&heads, 1, &mut KvAllocator::new(1))
            .unwrap()
            .capacity();
    });
    capacities
}

/// Appends tokens whose keys and values are zeros.
fn write(cache: &mut InPlaceCache, tokens: i32) {
    let (heads, none, offset) = (heads(), none().unwrap(), cache.offset());
    let slot = KvSlot {
        length: tokens,
        offset,
        memory: cache
            .memory(&heads, tokens, &mut KvAllocator::new(1))
            .unwrap(),
        window: None,
    };
    let x = zeros(&[1, tokens, 2], Dtype::Float32).unwrap();
    block(&heads, &none).step(&x, &mut [slot]).unwrap();
    cache.advance(tokens);
}

/// A copy must have separate memory, with capacity for the expected positions. Appending to one
/// cache must not change the other.
#[test]
fn a_copy_stays_in_place_and_goes_on_by_itself() {
    if none().is_none() {
        return; // the kernels are disabled
    }
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        let mut cache = InPlaceCache::new();
        cache.expect(20);
        write(&mut cache, 5);
        let mut copy = cache.copy().unwrap();
        assert_eq!(copy.arrays().len(), 1, "one array says that all is there");
        copy.trim(2);
        write(&mut cache, 1);
        let kernels = copy.as_kv_mut().unwrap().in_place_mut().unwrap();
        let memory = kernels
            .memory(&heads(), 1, &mut KvAllocator::new(1))
            .unwrap();
        assert_eq!(memory.capacity(), 32);
        assert!(memory.copy(5).is_ok() && memory.copy(6).is_err());
        assert_eq!((cache.offset(), copy.offset()), (6, 3));
        // Keys and values of 32 positions, each with two float32 elements.
        assert_eq!(copy.nbytes(), 32 * 2 * 2 * 4);
        copy.reset();
        assert!(copy.is_empty() && copy.nbytes() == 0 && cache.len() == 6);
        // An empty cache has nothing to copy.
        assert_eq!(InPlaceCache::new().copy().unwrap().offset(), 0);
    });
}

/// A copy of few positions must allocate memory only for these positions, with equal contents.
#[test]
fn a_part_is_copied_without_the_memory_of_the_rest() {
    if none().is_none() {
        return; // the kernels are disabled
    }
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        let mut cache = InPlaceCache::new();
        write(&mut cache, 700);
        let mut part = InPlaceCache::copy_all(&[&cache], 5).unwrap().remove(0);
        assert_eq!((cache.offset(), part.offset()), (700, 5));
        assert!(part.nbytes() * 2 < cache.nbytes());
        write(&mut part, 3);
        assert_eq!((cache.offset(), part.offset()), (700, 8));
        // Arrays must be truncated, too.
        cache.chunks().unwrap();
        let part = InPlaceCache::copy_all(&[&cache], 5).unwrap().remove(0);
        let (keys, _) = part.as_chunks().unwrap().valid().unwrap().unwrap();
        assert_eq!(keys.shape(), [1, 1, 5, 2]);
    });
}

/// Copying several layers together must equal separate copies. The layers differ: with memory, with
/// arrays, with other capacities, and empty.
#[test]
fn layers_are_copied_together() {
    if none().is_none() {
        return; // the kernels are disabled
    }
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        let mut allocator = KvAllocator::new(2);
        let mut layers: Vec<InPlaceCache> = (0..5).map(|_| InPlaceCache::new()).collect();
        for layer in &mut layers[..4] {
            let capacity = layer
                .memory(&heads(), 5, &mut allocator)
                .unwrap()
                .capacity();
            assert_eq!(capacity, 8);
            write(layer, 5);
        }
        layers[1].chunks().unwrap();
        for expected in [8, 40] {
            layers[3].expect(expected);
            let all: Vec<&InPlaceCache> = layers.iter().collect();
            let mut copies = InPlaceCache::copy_all(&all, i32::MAX).unwrap();
            let kinds: Vec<bool> = copies.iter().map(|copy| copy.memory.is_some()).collect();
            assert_eq!(kinds, [true, false, true, true, false]);
            let offsets: Vec<i32> = copies.iter().map(LayerState::offset).collect();
            assert_eq!(offsets, [5, 5, 5, 5, 0]);
            let capacity = |copy: &mut InPlaceCache| {
                let memory = copy.memory(&heads(), 1, &mut KvAllocator::new(1)).unwrap();
                assert!(memory.copy(5).is_ok());
                memory.capacity()
            };
            assert_eq!(capacity(&mut copies[0]), 8);
            assert_eq!(capacity(&mut copies[3]), if expected == 8 { 8 } else { 64 });
        }
    });
}

#[test]
fn capacity_is_made_for_what_is_expected_and_then_by_chunks() {
    if none().is_none() {
        return; // the kernels are disabled
    }
    assert_eq!(capacities(None, 5), (8, 256));
    // The capacity must include the first token after the prompt.
    assert_eq!(capacities(None, 8), (16, 256));
    assert_eq!(capacities(Some(80), 16), (128, 256));
    assert_eq!(capacities(Some(3), 16), (32, 256));
    assert_eq!(capacities(Some(100_000), 16), (256, 512));
    assert_eq!(capacities(Some(600), 300), (512, 768));
    assert_eq!(capacities(None, 300), (512, 768));
}

/// A float16 cache must keep its type in memory, in arrays, in a file and in a copy.
#[test]
fn float16_caches_keep_their_type() {
    if none().is_none() {
        return; // the kernels are disabled
    }
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        let empty = || InPlaceCache::new().with_half(true);
        let mut cache = empty();
        write(&mut cache, 5);
        assert_eq!(cache.nbytes(), 8 * 2 * 2 * 2);
        let mut copy = InPlaceCache::copy_all(&[&cache], 3).unwrap().remove(0);
        write(&mut copy, 10);
        assert_eq!((cache.offset(), copy.offset()), (5, 13));
        // MLX's operations append float32.
        let part = Array::from_slice(&[0.1f32, 7e4, -1e9, 2.0], &[1, 1, 2, 2]).unwrap();
        let view = copy.update(&part, &part).unwrap();
        let crate::cache::Stored::Plain(keys) = view.keys else {
            panic!("not plain");
        };
        assert_eq!(keys.dtype(), Dtype::Float16);
        let keys = keys.astype(Dtype::Float32).unwrap();
        let last = keys.slice_axis(2, 13, 15).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(last, [0.099_975_586, 65_504.0, -65_504.0, 2.0]);
        // The kernels continue with this cache, and a reset must keep the type.
        write(&mut copy, 1);
        let snapshot = copy.snapshot().unwrap();
        assert_eq!(snapshot.arrays["keys"].dtype(), Dtype::Float16);
        copy.reset();
        write(&mut copy, 1);
        assert_eq!(copy.nbytes(), 2 * 2 * 2 * 2);
        // A file of either type must be readable into either cache.
        let wide = {
            let mut wide = InPlaceCache::new();
            wide.restore(snapshot.clone()).unwrap();
            wide.snapshot().unwrap()
        };
        assert_eq!(wide.arrays["keys"].dtype(), Dtype::Float32);
        for snapshot in [snapshot.clone(), wide] {
            let mut other = empty();
            other.restore(snapshot).unwrap();
            let again = other.snapshot().unwrap();
            assert_eq!(other.offset(), 16);
            let keys = again.arrays["keys"].astype(Dtype::Float32).unwrap();
            let keys = keys.slice_axis(2, 13, 15).unwrap();
            assert_eq!(keys.to_vec::<f32>().unwrap(), last);
            assert_eq!(again.kind, "chunked:float16");
            write(&mut other, 1);
        }
    });
}

/// Returns a query, a key and a value for each of `n` tokens from `from` on, concatenated per
/// token.
fn projected(from: i32, n: i32, d: i32) -> Array {
    let width = 3 * d;
    let value = |i: i32| ((i * 37) % 101 - 50) as f32 * 0.02;
    let values: Vec<f32> = (from * width..(from + n) * width).map(value).collect();
    Array::from_slice(&values, &[1, n, width]).unwrap()
}

/// Returns keys and values of a cache as float32, concatenated.
fn contents(cache: &InPlaceCache) -> Vec<f32> {
    let Some(portable) = cache.portable().unwrap() else {
        return Vec::new();
    };
    let parts = match portable {
        Portable::All { keys, values } => [keys, values],
        Portable::Packed { keys, values } => {
            [keys, values].map(|q| q.dequantize(Dtype::Float32).unwrap())
        }
        Portable::Recent { .. } => panic!("not a bounded cache"),
    };
    parts
        .iter()
        .flat_map(|a| a.to_vec::<f32>().unwrap())
        .collect()
}

/// The kernels (in arrays and in memory) and MLX's operations must pack the same contents. The
/// cache may switch between all three, and its first positions may be unpacked.
#[test]
fn packed_positions_are_those_that_mlx_packs() {
    if none().is_none() {
        return; // the kernels are disabled
    }
    let (d, heads) = (64, heads_of(64));
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        for (bits, group_size) in [(8, 64), (4, 32), (3, 32), (6, 64)] {
            for start in [0, 5, 400] {
                let packing = Packing {
                    bits,
                    group_size,
                    start,
                };
                let mut cache = InPlaceCache::with_packing(packing).unwrap();
                let mut wanted = QuantizedCache::new(packing);
                let mut at = 0;
                for (i, n) in [3, 1, 1, 250, 1, 1, 30, 1].into_iter().enumerate() {
                    let packed = projected(at, n, d);
                    let part = |i: i32| {
                        let part = packed.slice_axis(2, i * d, (i + 1) * d).unwrap();
                        part.reshape(&[1, 1, n, d]).unwrap()
                    };
                    let (keys, values) = (part(1), part(2));
                    wanted.update(&keys, &values).unwrap();
                    match i % 3 {
                        // MLX's operations.
                        2 => drop(cache.update(&keys, &values).unwrap()),
                        // The kernels, into arrays and into memory.
                        1 => drop(cache.store(&heads, &packed, (0, n)).unwrap()),
                        _ => {
                            let mut allocator = KvAllocator::new(1);
                            let memory = cache.memory(&heads, n, &mut allocator).unwrap();
                            assert_eq!(memory.shape()[1], 1);
                            drop(cache.store(&heads, &packed, (0, n)).unwrap());
                        }
                    }
                    at += n;
                    assert_eq!((cache.offset(), wanted.offset()), (at, at));
                    assert_eq!(cache.kind(), wanted.kind());
                }
                let same = |cache: &InPlaceCache, wanted: &QuantizedCache, what: &str| {
                    let mut other = InPlaceCache::with_packing(packing).unwrap();
                    other.restore(wanted.snapshot().unwrap()).unwrap();
                    assert!(contents(cache) == contents(&other), "{what} {packing:?}");
                };
                same(&cache, &wanted, "packed");
                // A copy of fewer positions, a file, and a trimmed cache.
                let part = InPlaceCache::copy_all(&[&cache], 100).unwrap().remove(0);
                let mut fewer = wanted.clone();
                fewer.trim(at - 100);
                same(&part, &fewer, "a copy");
                let mut restored = QuantizedCache::new(packing);
                restored.restore(cache.snapshot().unwrap()).unwrap();
                same(&cache, &restored, "a file");
                cache.trim(at - 2);
                fewer.trim(98);
                same(&cache, &fewer, "fewer");
                cache.trim(2);
                assert_eq!((cache.is_empty(), cache.nbytes()), (true, 0));
            }
        }
    });
}

#[test]
fn packings_and_heads_without_kernels_are_refused() {
    let packing = |bits, group_size| Packing {
        bits,
        group_size,
        start: 0,
    };
    assert!(InPlaceCache::with_packing(packing(7, 64)).is_none());
    assert!(InPlaceCache::with_packing(packing(8, 16)).is_none());
    if none().is_none() {
        return; // the kernels are disabled
    }
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        let mut cache = InPlaceCache::with_packing(packing(8, 64)).unwrap();
        let error = cache.store(&heads_of(32), &projected(0, 1, 32), (0, 1));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("groups of 64"), "{error}");
    });
}
