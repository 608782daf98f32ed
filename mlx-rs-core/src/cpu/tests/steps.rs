//! Tests the parts of a decode step besides products and attention, and a block as one operation.

use super::*;

/// Storing in place must have the same result as a copy, and must not change arrays that others
/// use.
#[test]
fn stored_keys_and_values_stand_where_they_belong() {
    let (n, d, capacity) = (2usize, 16usize, 10usize);
    let heads = Heads {
        n_heads: 4,
        n_kv_heads: n as i32,
        head_dim: d as i32,
        scale: 1.0,
        softcap: None,
        q_norm: None,
        k_norm: None,
        rotation: Some(Rotation {
            radians: (0..d / 2).map(|i| 0.8f32.powi(i as i32)).collect(),
            traditional: true,
            amplitude: 1.0,
        }),
        sinks: None,
    };
    let width = (4 + 2 * n) * d;
    on_cpu(|| {
        let packed = noise(5 * width, 1);
        let packed = array(&packed, &[1, 5, width as i32]);
        let before = noise(n * capacity * d, 2);
        let shape = [1, n as i32, capacity as i32, d as i32];
        let cache = array(&before, &shape);
        let tokens = TokenRange {
            first: 1,
            length: 3,
            offset: 6,
        };
        let keys = host(&heads.keys(&packed, &[(1, 5), (3, 6), (1, 0)]).unwrap());
        let shared = heads.store_keys((&cache, None), &packed, tokens).unwrap();
        let values = heads.store_values((&cache, None), &packed, tokens).unwrap();
        // Nothing else uses this array.
        let fresh = heads
            .store_keys((&cache.add(&cache).unwrap(), None), &packed, tokens)
            .unwrap();
        let (shared, values, fresh, row) =
            (host(&shared), host(&values), host(&fresh), host(&packed));
        assert_eq!(host(&cache), before);
        for h in 0..n {
            for at in 0..capacity {
                let place = (h * capacity + at) * d..(h * capacity + at + 1) * d;
                let wanted: Vec<f32> = if (6..9).contains(&at) {
                    keys[(h * 5 + at - 5) * d..][..d].to_vec()
                } else {
                    before[place.clone()].to_vec()
                };
                assert_eq!(shared[place.clone()], wanted, "{h} {at}");
                if (6..9).contains(&at) {
                    assert_eq!(fresh[place.clone()], wanted);
                    let start = (at - 5) * width + (4 + n + h) * d;
                    assert_eq!(values[place], row[start..start + d]);
                } else {
                    assert_eq!(values[place.clone()], wanted);
                    let twice: Vec<f32> = wanted.iter().map(|v| v + v).collect();
                    assert_eq!(fresh[place], twice);
                }
            }
        }
        for (first, length, offset) in [
            (3, 3, 0),
            (-1, 1, 0),
            (0, 3, 8),
            (0, 0, 0),
            (0, 11, 0),
            (0, 1, -1),
        ] {
            let tokens = TokenRange {
                first,
                length,
                offset,
            };
            assert!(heads.store_keys((&cache, None), &packed, tokens).is_err());
            assert!(heads.store_values((&cache, None), &packed, tokens).is_err());
        }
    });
}

/// A fused block must equal its separate parts, in steps with one and several rows. Each step
/// continues from the row's last position.
#[test]
fn a_block_is_its_parts() {
    let (hidden, inner, n, groups, d) = (64usize, 96usize, 4usize, 2usize, 16usize);
    with_each(|isa| {
        on_cpu(|| {
            let heads = Heads {
                n_heads: n as i32,
                n_kv_heads: groups as i32,
                head_dim: d as i32,
                scale: 0.25,
                softcap: None,
                q_norm: None,
                k_norm: Some(HeadNorm {
                    weight: array(&noise(d, 31), &[d as i32]),
                    eps: 1e-5,
                }),
                rotation: Some(Rotation {
                    radians: (0..d / 2).map(|i| 0.8f32.powi(i as i32)).collect(),
                    traditional: false,
                    amplitude: 1.0,
                }),
                sinks: None,
            };
            let matrix = |rows: usize, k: usize, seed: u32| {
                let w = array(&noise(rows * k, seed), &[rows as i32, k as i32]);
                let packed = Quantized::quantize(&w, 32, 4, QuantMode::Affine).unwrap();
                QuantizedMatrix::new(&packed)
                    .unwrap()
                    .map(Matrix::Quantized)
            };
            let all = [
                matrix(n * d, hidden, 1),
                matrix(groups * d, hidden, 2),
                matrix(groups * d, hidden, 3),
                matrix(hidden, n * d, 4),
                matrix(inner, hidden, 5),
                matrix(inner, hidden, 6),
                matrix(hidden, inner, 7),
            ];
            let [
                Some(q),
                Some(k),
                Some(v),
                Some(o),
                Some(gate),
                Some(up),
                Some(down),
            ] = &all
            else {
                return; // the kernels are disabled
            };
            let bias = array(&noise(hidden, 8), &[hidden as i32]);
            let norms = [9, 10].map(|seed| array(&noise(hidden, seed), &[hidden as i32]));
            let block = Block {
                heads: &heads,
                attention_norm: Some((&norms[0], 1e-5)),
                projections: [(q, None), (k, None), (v, None)],
                output: (o, Some(&bias)),
                feed_norm: Some((&norms[1], 1e-5)),
                gate: Gate::Silu,
                gate_up: [(gate, None), (up, None)],
                down: (down, None),
            };
            let project = |parts: &[Biased<'_>], norm, then: Epilogue<'_>, x: &Array| {
                Projection { parts, norm, then }.of(x).unwrap()
            };
            // The rows, each with its buffer, and the expected keys and values as arrays.
            let mut memories = [8, 8]
                .map(|capacity| KvBuffer::empty((groups as i32, d as i32), capacity).unwrap());
            let empty = array(&[0.0; 2 * 32 * 16], &[1, groups as i32, 32, d as i32]);
            let mut arrays = [0, 1].map(|_| (empty.clone(), empty.clone()));
            let mut offsets = [0i32; 2];
            for (step, lengths) in [[3, 5], [1, 1], [1, 2], [2, 1], [1, 7]].iter().enumerate() {
                let total: i32 = lengths.iter().sum();
                let x = noise(total as usize * hidden, 40 + step as u32);
                let x = array(&x, &[1, total, hidden as i32]);
                for (row, memory) in memories.iter_mut().enumerate() {
                    if offsets[row] + lengths[row] > memory.capacity() {
                        memory.grow(offsets[row], 32).unwrap();
                    }
                }
                let mut slots: Vec<KvSlot<'_>> = memories
                    .iter_mut()
                    .enumerate()
                    .map(|(row, memory)| KvSlot {
                        length: lengths[row],
                        offset: offsets[row],
                        memory,
                        window: (row == 1).then_some(4),
                    })
                    .collect();
                let got = block.step(&x, &mut slots).unwrap();
                let packed = project(&block.projections, block.attention_norm, Epilogue::None, &x);
                let mut sequences = Vec::new();
                let mut first = 0;
                for (row, (keys, values)) in arrays.iter_mut().enumerate() {
                    let tokens = TokenRange {
                        first,
                        length: lengths[row],
                        offset: offsets[row],
                    };
                    *keys = heads.store_keys((keys, None), &packed, tokens).unwrap();
                    *values = heads.store_values((values, None), &packed, tokens).unwrap();
                    first += lengths[row];
                    sequences.push(KvView {
                        length: lengths[row],
                        offset: offsets[row],
                        keys: keys.clone(),
                        values: values.clone(),
                        packing: None,
                        filled: offsets[row] + lengths[row],
                        order: Some((0, 0)),
                        window: (row == 1).then_some(4),
                    });
                }
                let actual = heads.attend(&packed, &sequences, false).unwrap();
                let attended = project(&[block.output], None, Epilogue::Add(&x), &actual);
                let gated = Epilogue::Gate(Gate::Silu);
                let gated = project(&block.gate_up, block.feed_norm, gated, &attended);
                let wanted = project(&[block.down], None, Epilogue::Add(&attended), &gated);
                assert_eq!(host(&got), host(&wanted), "{isa:?}, step {step}");
                for row in 0..2 {
                    offsets[row] += lengths[row];
                    let (keys, values) = memories[row].copy(offsets[row]).unwrap();
                    let cut = |a: &Array| a.slice_axis(2, 0, offsets[row]).unwrap();
                    assert_eq!(
                        host(&keys),
                        host(&cut(&arrays[row].0).contiguous().unwrap())
                    );
                    assert_eq!(
                        host(&values),
                        host(&cut(&arrays[row].1).contiguous().unwrap())
                    );
                }
            }
            // Invalid input must be an error and change nothing.
            let x = array(&noise(hidden, 3), &[1, 1, hidden as i32]);
            let known = memories[0].copy(offsets[0] + 1);
            assert!(known.unwrap_err().to_string().contains("written"));
            for (length, offset) in [
                (1, offsets[0] + 1),
                (1, 32),
                (0, 0),
                (2, 0),
                (1, -1),
                (1, i32::MAX),
            ] {
                let slot = KvSlot {
                    length,
                    offset,
                    memory: &mut memories[0],
                    window: None,
                };
                assert!(block.step(&x, &mut [slot]).is_err(), "{length} {offset}");
            }
            let wrong = Block {
                output: (gate, None),
                ..block
            };
            let slot = KvSlot {
                length: 1,
                offset: 0,
                memory: &mut memories[0],
                window: None,
            };
            let e = wrong.step(&x, &mut [slot]).unwrap_err();
            assert!(e.to_string().contains("block needs"), "{e}");
        });
    });
}

/// Fused blocks must be bitwise equal to single blocks. Existing buffers, and operations between
/// the blocks, must not change the results.
#[test]
fn blocks_in_a_row_are_their_steps() {
    on_cpu(|| {
        let (d, hidden, inner) = (16i32, 32i32, 48i32);
        let heads = plain_heads(2, 1, d);
        let matrix = |rows: i32, k: i32, seed: u32| {
            let w = array(&noise((rows * k) as usize, seed), &[rows, k]);
            DenseMatrix::new(&w).unwrap().map(Matrix::Dense)
        };
        let some: Vec<Matrix> = (0..3)
            .flat_map(|i| {
                let seed = 10 * i;
                [
                    matrix(2 * d, hidden, seed),
                    matrix(d, hidden, seed + 1),
                    matrix(d, hidden, seed + 2),
                    matrix(hidden, 2 * d, seed + 3),
                    matrix(inner, hidden, seed + 4),
                    matrix(inner, hidden, seed + 5),
                    matrix(hidden, inner, seed + 6),
                ]
            })
            .flatten()
            .collect();
        if some.is_empty() {
            return; // the kernels are disabled
        }
        let norm = array(&noise(hidden as usize, 99), &[hidden]);
        let blocks: Vec<Block<'_>> = some
            .chunks(7)
            .map(|m| Block {
                heads: &heads,
                attention_norm: Some((&norm, 1e-5)),
                projections: [(&m[0], None), (&m[1], None), (&m[2], None)],
                output: (&m[3], None),
                feed_norm: None,
                gate: Gate::Silu,
                gate_up: [(&m[4], None), (&m[5], None)],
                down: (&m[6], None),
            })
            .collect();
        let empty =
            || [0, 1, 2].map(|_| [4, 8].map(|capacity| KvBuffer::empty((1, d), capacity).unwrap()));
        let (mut alone, mut together) = (empty(), empty());
        fn slots<'a>(
            memories: &'a mut [KvBuffer; 2],
            lengths: &[i32; 2],
            offsets: &[i32; 2],
        ) -> Vec<KvSlot<'a>> {
            let places = lengths.iter().zip(offsets);
            (memories.iter_mut().zip(places))
                .map(|(memory, (&length, &offset))| KvSlot {
                    length,
                    offset,
                    memory,
                    window: None,
                })
                .collect()
        }
        let mut offsets = [0; 2];
        // The fourth step has more tokens than the limit for kept buffers.
        for (step, lengths) in [[2, 3], [1, 1], [1, 2], [70, 1], [1, 1]].iter().enumerate() {
            let total: i32 = lengths.iter().sum();
            let x = array(
                &noise((total * hidden) as usize, 40 + step as u32),
                &[1, total, hidden],
            );
            for memory in alone.iter_mut().chain(&mut together) {
                for (memory, (length, offset)) in
                    memory.iter_mut().zip(lengths.iter().zip(&offsets))
                {
                    if offset + length > memory.capacity() {
                        memory.grow(*offset, 100).unwrap();
                    }
                }
            }
            let mut wanted = x.clone();
            for (block, memories) in blocks.iter().zip(&mut alone) {
                let mut slots = slots(memories, lengths, &offsets);
                wanted = block.step(&wanted, &mut slots).unwrap();
            }
            // In one step, the first block runs alone and the others together. In other steps, all
            // run together.
            let mut got = x;
            let first = usize::from(step == 2);
            for (block, memories) in blocks[..first].iter().zip(&mut together) {
                let mut slots = slots(memories, lengths, &offsets);
                got = block.step(&got, &mut slots).unwrap();
            }
            let mut all: Vec<Vec<KvSlot<'_>>> = together[first..]
                .iter_mut()
                .map(|memories| slots(memories, lengths, &offsets))
                .collect();
            let mut steps: Vec<_> = (blocks[first..].iter().zip(&mut all))
                .map(|(block, slots)| (block, slots.as_mut_slice()))
                .collect();
            let got = Block::steps(&got, &mut steps).unwrap();
            offsets
                .iter_mut()
                .zip(lengths)
                .for_each(|(offset, length)| *offset += length);
            let copies = together
                .each_ref()
                .map(|memories| [0, 1].map(|row| memories[row].copy(offsets[row]).unwrap()));
            // In one step, results are not evaluated before the next step is planned.
            if step != 1 {
                assert_eq!(host(&got), host(&wanted), "step {step}");
                for (copies, memories) in copies.iter().zip(&alone) {
                    for (row, (keys, values)) in copies.iter().enumerate() {
                        let copy = memories[row].copy(offsets[row]).unwrap();
                        assert_eq!((host(keys), host(values)), (host(&copy.0), host(&copy.1)));
                    }
                }
            }
        }
        // All blocks have the same sizes, and a row has the same tokens in each block.
        let x = array(&noise(hidden as usize, 3), &[1, 1, hidden]);
        let (mut one, mut other) = (empty(), empty());
        let mut first = slots(&mut one[0], &[1, 0], &[0, 0]);
        first.pop();
        let mut second = slots(&mut other[0], &[1, 1], &[0, 0]);
        let mut steps = [(&blocks[0], &mut first[..]), (&blocks[1], &mut second[..])];
        assert!(Block::steps(&x, &mut steps).is_err());
        assert!(Block::steps(&x, &mut []).is_err());
    });
}

/// Passes to `f` an operation that writes a token's key and value at a position. All eight elements
/// are set to a number.
fn with_writer(f: impl FnOnce(&dyn Fn(&mut KvBuffer, f32, i32) -> Array)) {
    on_cpu(|| {
        let d = 8i32;
        let heads = plain_heads(1, 1, d);
        let mut one = vec![0.0f32; 64];
        one.iter_mut().step_by(9).for_each(|v| *v = 1.0);
        let one = array(&one, &[d, d]);
        let Some(one) = DenseMatrix::new(&one).unwrap().map(Matrix::Dense) else {
            return;
        };
        let block = Block {
            heads: &heads,
            attention_norm: None,
            projections: [(&one, None); 3],
            output: (&one, None),
            feed_norm: None,
            gate: Gate::Relu,
            gate_up: [(&one, None); 2],
            down: (&one, None),
        };
        f(&|memory, value, offset| {
            let x = array(&[value; 8], &[1, 1, d]);
            let slot = KvSlot {
                length: 1,
                offset,
                memory,
                window: None,
            };
            block.step(&x, &mut [slot]).unwrap()
        });
    });
}

/// A copy must have the values that the buffer had when the copy was made. It may be computed after
/// the buffer was truncated and written again.
#[test]
fn copies_of_memory_come_before_what_is_written_after() {
    with_writer(|write| {
        let mut memory = KvBuffer::empty((1, 8), 4).unwrap();
        let _first = write(&mut memory, 1.0, 0);
        let copy = memory.copy(1).unwrap();
        // The output of this write is dropped without evaluation, but the write must still happen.
        drop(write(&mut memory, 2.0, 0));
        let later = memory.copy(1).unwrap();
        let last = write(&mut memory, 3.0, 0);
        last.eval().unwrap();
        assert_eq!(host(&memory.copy(1).unwrap().0), [3.0; 8]);
        assert_eq!(host(&later.1), [2.0; 8]);
        assert_eq!(host(&copy.0), [1.0; 8]);
        assert!(memory.copy(5).is_err() && memory.copy(0).is_err() && memory.grow(1, 0).is_err());
        assert!(KvBuffer::empty((0, 8), 1).is_err() && KvBuffer::empty((1, 8), -1).is_err());
        let keys = &copy.0;
        assert!(KvBuffer::holding(keys, keys, 2, 4).is_err());
        assert!(KvBuffer::holding(keys, &one_of(keys), 1, 4).is_err());
    });
}

/// A fork keeps the content at its creation, whenever it is computed. Writes to the fork and to the
/// original must not affect each other.
#[test]
fn forks_of_memory_go_on_by_themselves() {
    with_writer(|write| {
        let of = firsts;
        let mut memory = KvBuffer::empty((1, 8), 4).unwrap();
        drop(write(&mut memory, 1.0, 0));
        drop(write(&mut memory, 2.0, 1));
        let mut fork = memory.fork(2, 8).unwrap();
        let short = memory.fork(1, 1).unwrap();
        // None of these operations has been evaluated yet.
        drop(write(&mut memory, 3.0, 0));
        let last = write(&mut fork, 4.0, 2);
        let fork_of_fork = fork.fork(3, 3).unwrap();
        drop(write(&mut fork, 5.0, 1));
        last.eval().unwrap();
        assert_eq!(of(&memory, 2), [3.0, 2.0]);
        assert_eq!(of(&fork, 3), [1.0, 5.0, 4.0]);
        assert_eq!(of(&fork_of_fork, 3), [1.0, 2.0, 4.0]);
        assert_eq!(of(&short, 1), [1.0]);
        // Forking must fail beyond the written positions, and with too small a capacity.
        assert!(memory.fork(3, 8).is_err() && memory.fork(2, 1).is_err());
    });
}

/// The first element of each of the first `n` values in the buffer.
fn firsts(memory: &KvBuffer, n: i32) -> Vec<f32> {
    let values = host(&memory.copy(n).unwrap().1);
    values.chunks(8).map(|v| v[0]).collect()
}

/// Layers that share an array must not affect each other when one is written, grows or is dropped.
/// Large layers do not share an array.
#[test]
fn layers_made_together_are_apart() {
    with_writer(|write| {
        let mut layers = KvBuffer::several(3, (1, 8), 2).unwrap();
        for (i, layer) in layers.iter_mut().enumerate() {
            assert!(layer.written().is_none() && layer.copy(1).is_err());
            drop(write(layer, 1.0 + i as f32, 0));
            drop(write(layer, 4.0 + i as f32, 1));
        }
        let first = layers.remove(0);
        layers[0].grow(2, 3).unwrap();
        drop(write(&mut layers[0], 7.0, 2));
        assert_eq!(firsts(&first, 2), [1.0, 4.0]);
        drop(first);
        assert_eq!(firsts(&layers[0], 3), [2.0, 5.0, 7.0]);
        assert_eq!(firsts(&layers[1], 2), [3.0, 6.0]);
        // The layer is already evaluated, so no operation must run first.
        drop(write(&mut layers[1], 8.0, 0));
        assert_eq!(firsts(&layers[1], 2), [8.0, 6.0]);

        let mut large = KvBuffer::several(2, (8, 8), 1 << 16).unwrap();
        assert_eq!(large[1].shape(), [1, 8, 1 << 16, 8]);
        assert!(large[1].grow(0, 4).is_ok() && large.len() == 2);
        assert!(KvBuffer::several(0, (1, 8), 2).unwrap().is_empty());
        assert!(KvBuffer::several(2, (1, 0), 2).is_err());
        assert!(KvBuffer::several(2, (i32::MAX, i32::MAX), i32::MAX).is_err());
    });
}

/// Forks of several layers must equal single forks, whether the layers share an array, and whether
/// their shapes are equal.
#[test]
fn layers_are_forked_together() {
    with_writer(|write| {
        let mut layers = KvBuffer::several(2, (1, 8), 2).unwrap();
        layers.push(KvBuffer::empty((1, 8), 4).unwrap());
        for (i, layer) in layers.iter_mut().enumerate() {
            drop(write(layer, 1.0 + i as f32, 0));
        }
        let pair = array(&[9.0; 4], &[1, 2, 1, 2]);
        layers.push(KvBuffer::holding(&pair, &pair, 1, 1).unwrap());
        let all: Vec<&KvBuffer> = layers.iter().collect();
        let mut forks = KvBuffer::fork_all(&all, 1, 3).unwrap();
        assert!(KvBuffer::fork_all(&all, 2, 3).is_err() && KvBuffer::fork_all(&all, 1, 0).is_err());
        let slots: Vec<i32> = forks.iter().map(KvBuffer::capacity).collect();
        assert_eq!((forks.len(), slots), (4, vec![3; 4]));
        // Neither operation has been evaluated yet.
        drop(write(&mut layers[1], 5.0, 0));
        drop(write(&mut forks[2], 6.0, 1));
        forks[0].written().unwrap().eval().unwrap();
        assert_eq!(firsts(&layers[1], 1), [5.0]);
        assert_eq!(firsts(&forks[0], 1), [1.0]);
        assert_eq!(firsts(&forks[1], 1), [2.0]);
        assert_eq!(firsts(&forks[2], 2), [3.0, 6.0]);
        assert_eq!(host(&forks[3].copy(1).unwrap().0), [9.0; 4]);
    });
}

/// An array with another shape than `a`.
fn one_of(a: &Array) -> Array {
    a.reshape(&[-1]).unwrap()
}
