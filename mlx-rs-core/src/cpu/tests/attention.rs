//! Tests attention of many queries, and of rows with different lengths.

use super::*;

/// The attention of a row by its definition. A query attends to a key if `sees(query, key)`.
#[allow(clippy::too_many_arguments, reason = "the parts of a definition")]
fn attention(
    heads: &Heads,
    packed: &[f32],
    (keys, values): (&[f32], &[f32]),
    (length, n): (usize, usize),
    sinks: Option<&[f32]>,
    sees: &dyn Fn(usize, usize) -> bool,
) -> Vec<f64> {
    biased_attention(
        heads,
        packed,
        (keys, values),
        (length, n),
        sinks,
        &|_, q, key| sees(q, key).then_some(0.0),
    )
}

/// The attention of a row by its definition. `bias(head, query, key)` is added to the score; `None`
/// hides the key.
fn biased_attention(
    heads: &Heads,
    packed: &[f32],
    (keys, values): (&[f32], &[f32]),
    (length, n): (usize, usize),
    sinks: Option<&[f32]>,
    bias: &dyn Fn(usize, usize, usize) -> Option<f64>,
) -> Vec<f64> {
    let (h, kv, d) = (
        heads.n_heads as usize,
        heads.n_kv_heads as usize,
        heads.head_dim as usize,
    );
    let mut out = Vec::new();
    for q in 0..length {
        for head in 0..h {
            let query = &packed[q * (h + 2 * kv) * d + head * d..][..d];
            let group = head / (h / kv);
            let row = |of: &[f32], key: usize| -> Vec<f64> {
                of[(group * n + key) * d..][..d]
                    .iter()
                    .map(|v| f64::from(*v))
                    .collect()
            };
            let mut total = sinks.map_or(0.0, |s| f64::from(s[head]).exp());
            let mut sum = vec![0.0; d];
            for key in 0..n {
                let Some(bias) = bias(head, q, key) else {
                    continue;
                };
                let pairs = query.iter().zip(row(keys, key));
                let mut score: f64 = pairs.map(|(q, k)| f64::from(*q) * k).sum::<f64>();
                score *= f64::from(heads.scale);
                if let Some(cap) = heads.softcap {
                    score = (score / f64::from(cap)).tanh() * f64::from(cap);
                }
                let share = (score + bias).exp();
                total += share;
                for (sum_element, value) in sum.iter_mut().zip(row(values, key)) {
                    *sum_element += share * value;
                }
            }
            out.extend(sum.iter().map(|v| v / total));
        }
    }
    out
}

#[test]
fn many_queries_find_what_the_definition_says() {
    // Length, number of earlier keys, kept keys, start of the other keys, window, cap, sinks, and
    // head_dim.
    let cases = [
        (1, 5, 0, 0, None, None, false, 32),
        (3, 0, 0, 0, None, None, false, 16),
        (5, 0, 0, 0, None, None, false, 64),
        (16, 0, 0, 0, None, None, true, 16),
        (37, 200, 0, 0, None, Some(2.0), false, 32),
        (250, 10, 0, 0, Some(7), None, true, 16),
        (33, 300, 4, 50, Some(64), None, false, 48),
        // This head size is not a multiple of the vector width, so queries are computed one by one.
        (20, 3, 0, 0, None, None, false, 24),
    ];
    for (length, before, fixed, start, window, softcap, with_sinks, d) in cases {
        let (h, kv) = (6usize, 2usize);
        // The first `fixed` keys have positions 0, 1, ...; key `fixed` has position `start`. The
        // keys between were dropped.
        let n = before + length - (start - fixed.min(start));
        let packed = noise(length * (h + 2 * kv) * d, 1);
        let (keys, values) = (noise(kv * n * d, 2), noise(kv * n * d, 3));
        let own_sinks = noise(h, 4);
        on_cpu(|| {
            let kv_shape = [1, kv as i32, n as i32, d as i32];
            let heads = Heads {
                n_heads: h as i32,
                n_kv_heads: kv as i32,
                head_dim: d as i32,
                scale: 0.7,
                softcap,
                q_norm: None,
                k_norm: None,
                rotation: None,
                sinks: with_sinks.then(|| array(&own_sinks, &[h as i32])),
            };
            let sequence = |order| KvView {
                length: length as i32,
                offset: before as i32,
                keys: array(&keys, &kv_shape),
                values: array(&values, &kv_shape),
                packing: None,
                filled: n as i32,
                order,
                window,
            };
            let packed_array = array(&packed, &[1, length as i32, ((h + 2 * kv) * d) as i32]);
            let sinks = with_sinks.then_some(own_sinks.as_slice());
            let sees = |q: usize, key: usize| {
                let position = before + q;
                if key < fixed {
                    return key <= position;
                }
                let at = start + key - fixed;
                at <= position && window.is_none_or(|w| at + w as usize > position)
            };
            let both = (keys.as_slice(), values.as_slice());
            let wanted = attention(&heads, &packed, both, (length, n), sinks, &sees);
            let all = attention(&heads, &packed, both, (length, n), sinks, &|_, _| true);
            with_each(|isa| {
                let what = format!("{length} {before} {fixed} {window:?} {d} {isa:?}");
                let order = Some((fixed as i32, start as i32));
                let actual = heads
                    .attend(&packed_array, &[sequence(order)], false)
                    .unwrap();
                close(&host(&actual), &wanted, 1e-5, &what);
                let actual = heads
                    .attend(&packed_array, &[sequence(order)], true)
                    .unwrap();
                close(&host(&actual), &wanted[(length - 1) * h * d..], 1e-5, &what);
                if window.is_none() {
                    let actual = heads
                        .attend(&packed_array, &[sequence(None)], false)
                        .unwrap();
                    close(&host(&actual), &all, 1e-5, &what);
                }
            });
        });
    }
}

/// Sums are in float32. Over 2,048 keys, they must differ from float64 by at most a millionth.
#[test]
fn long_sequences_stay_within_a_millionth_of_float64() {
    let (h, kv, n) = (4usize, 2usize, 2048usize);
    for (length, d) in [(1usize, 64usize), (24, 64), (24, 128)] {
        let packed = noise(length * (h + 2 * kv) * d, 1);
        let (keys, values) = (noise(kv * n * d, 2), noise(kv * n * d, 3));
        let heads = Heads {
            n_heads: h as i32,
            n_kv_heads: kv as i32,
            head_dim: d as i32,
            scale: (d as f32).powf(-0.5),
            softcap: None,
            q_norm: None,
            k_norm: None,
            rotation: None,
            sinks: None,
        };
        let both = (keys.as_slice(), values.as_slice());
        let sees = |q: usize, key: usize| key <= n - length + q;
        let wanted = attention(&heads, &packed, both, (length, n), None, &sees);
        on_cpu(|| {
            let kv_shape = [1, kv as i32, n as i32, d as i32];
            let view = || KvView {
                length: length as i32,
                offset: (n - length) as i32,
                keys: array(&keys, &kv_shape),
                values: array(&values, &kv_shape),
                packing: None,
                filled: n as i32,
                order: Some((0, 0)),
                window: None,
            };
            let packed = array(&packed, &[1, length as i32, ((h + 2 * kv) * d) as i32]);
            with_each(|isa| {
                let actual = host(&heads.attend(&packed, &[view()], false).unwrap());
                let worst = (actual.iter().zip(&wanted))
                    .map(|(a, b)| (f64::from(*a) - b).abs())
                    .fold(0.0, f64::max);
                assert!(worst < 1e-6, "{isa:?}, {length} of {d}: {worst}");
                // The keys and values of the pass are stored, so its queries suffice.
                let queries = packed.slice_axis(2, 0, (h * d) as i32).unwrap();
                let by_queries = host(&heads.attend(&queries, &[view()], false).unwrap());
                assert_eq!(by_queries, actual, "{isa:?}, {length} of {d}");
            });
        });
    }
}

/// Rows of different lengths in one pass must have the same results as alone, including norms and
/// rotation.
#[test]
fn rows_of_a_batch_do_not_see_each_other() {
    let (h, kv, d) = (4usize, 2usize, 32usize);
    let width = (h + 2 * kv) * d;
    let lengths = [20usize, 1, 17, 3];
    let total: usize = lengths.iter().sum();
    let packed = noise(total * width, 1);
    on_cpu(|| {
        let norm = |seed| {
            Some(HeadNorm {
                weight: array(&noise(d, seed), &[d as i32]),
                eps: 1e-6,
            })
        };
        let radians: Arc<[f32]> = (0..d / 2).map(|i| 0.9f32.powi(i as i32)).collect();
        let heads = Heads {
            n_heads: h as i32,
            n_kv_heads: kv as i32,
            head_dim: d as i32,
            scale: 0.3,
            softcap: None,
            q_norm: norm(2),
            k_norm: norm(3),
            rotation: Some(Rotation {
                radians,
                traditional: false,
                amplitude: 1.0,
            }),
            sinks: None,
        };
        let places: Vec<(i32, i32)> = lengths.iter().map(|n| (*n as i32, 2)).collect();
        let sequences: Vec<KvView> = lengths
            .iter()
            .enumerate()
            .map(|(i, &length)| {
                let shape = [1, kv as i32, length as i32 + 2, d as i32];
                let values = |seed| array(&noise(kv * (length + 2) * d, seed), &shape);
                KvView {
                    length: length as i32,
                    offset: 2,
                    keys: values(10 + i as u32),
                    values: values(20 + i as u32),
                    packing: None,
                    filled: length as i32 + 2,
                    order: Some((0, 0)),
                    window: None,
                }
            })
            .collect();
        with_each(|isa| {
            let all = array(&packed, &[1, total as i32, width as i32]);
            let together = host(&heads.attend(&all, &sequences, false).unwrap());
            let keys = host(&heads.keys(&all, &places).unwrap());
            let mut at = 0;
            for (i, sequence) in sequences.iter().enumerate() {
                let sequence_alone = array(
                    &packed[at * width..(at + lengths[i]) * width],
                    &[1, sequence.length, width as i32],
                );
                let alone = host(
                    &heads
                        .attend(&sequence_alone, std::slice::from_ref(sequence), false)
                        .unwrap(),
                );
                let rows = &together[at * h * d..(at + lengths[i]) * h * d];
                let exact: Vec<f64> = alone.iter().map(|v| f64::from(*v)).collect();
                close(rows, &exact, 1e-6, &format!("row {i}, {isa:?}"));
                let alone = host(&heads.keys(&sequence_alone, &places[i..=i]).unwrap());
                for head in 0..kv {
                    let rows = &keys[(head * total + at) * d..][..lengths[i] * d];
                    let alone = &alone[head * lengths[i] * d..][..lengths[i] * d];
                    assert_eq!(rows, alone, "keys of row {i}, {isa:?}");
                }
                at += lengths[i];
            }
        });
    });
}

/// Results must be bitwise equal, whether a thread computes all keys of a head (many rows) or a
/// segment of them (one row). Positions beyond the valid ones are uninitialized, so they must not
/// be read.
#[test]
fn single_queries_find_the_same_alone_and_among_others() {
    let (h, kv, d) = (6usize, 2usize, 64usize);
    let width = (h + 2 * kv) * d;
    let lengths = [1usize, 1, 1, 1, 1, 1, 1, 18];
    let filled = [130usize, 64, 65, 200, 1, 129, 100, 150];
    let total: usize = lengths.iter().sum();
    let packed = noise(total * width, 1);
    on_cpu(|| {
        let heads = plain_heads(h as i32, kv as i32, d as i32);
        let sequences: Vec<KvView> = (lengths.iter().zip(filled).zip(0..))
            .map(|((&length, filled), seed)| {
                let n = filled + 10;
                let cache = |seed| {
                    let mut values = noise(kv * n * d, seed);
                    for head in values.chunks_exact_mut(n * d) {
                        head[filled * d..].fill(f32::NAN);
                    }
                    array(&values, &[1, kv as i32, n as i32, d as i32])
                };
                KvView {
                    length: length as i32,
                    offset: (filled - length) as i32,
                    keys: cache(10 + seed),
                    values: cache(30 + seed),
                    packing: None,
                    filled: filled as i32,
                    order: Some((0, 0)),
                    window: None,
                }
            })
            .collect();
        with_each(|isa| {
            for rows in [&sequences[..7], &sequences[..]] {
                let total: i32 = rows.iter().map(|sequence| sequence.length).sum();
                let flat_rows = &packed[..total as usize * width];
                let all = array(flat_rows, &[1, total, width as i32]);
                let together = host(&heads.attend(&all, rows, false).unwrap());
                let mut at = 0;
                for (i, sequence) in rows.iter().enumerate() {
                    let flat = &packed[at * width..(at + lengths[i]) * width];
                    let flat = array(flat, &[1, sequence.length, width as i32]);
                    let one = std::slice::from_ref(sequence);
                    let alone = host(&heads.attend(&flat, one, false).unwrap());
                    assert!(alone.iter().all(|v| v.is_finite()), "row {i}, {isa:?}");
                    let actual = &together[at * h * d..(at + lengths[i]) * h * d];
                    assert_eq!(actual, alone, "row {i} of {}, {isa:?}", rows.len());
                    at += lengths[i];
                }
            }
        });
    });
}

/// Sizes that exceed an axis must be errors, and must not wrap around.
#[test]
fn heads_that_cannot_be_are_errors() {
    let heads = |n_heads, n_kv_heads, head_dim| plain_heads(n_heads, n_kv_heads, head_dim);
    let sequence = |length, offset, d| KvView {
        length,
        offset,
        keys: array(&vec![0.0; d], &[1, 1, 1, d as i32]),
        values: array(&vec![0.0; d], &[1, 1, 1, d as i32]),
        packing: None,
        filled: 1,
        order: Some((0, 0)),
        window: None,
    };
    on_cpu(|| {
        // 65,538 heads of 65,536 elements are 2^32 + 131,072 elements, which wrap around to
        // 131,072.
        let (large, width) = (heads(65_536, 1, 65_536), 131_072);
        let packed = array(&vec![0.0; width], &[1, 1, width as i32]);
        let token = TokenRange {
            first: 0,
            length: 1,
            offset: 0,
        };
        let sequences = [sequence(1, 0, 65_536)];
        let cache = &sequences[0].keys;
        assert!(large.attend(&packed, &sequences, false).is_err());
        assert!(large.keys(&packed, &[(1, 0)]).is_err());
        assert!(large.store_keys((cache, None), &packed, token).is_err());
        assert!(large.store_values((cache, None), &packed, token).is_err());
        let packed = array(&[0.0; 6], &[1, 1, 6]);
        for (a, b, d) in [
            (0, 1, 2),
            (1, 0, 2),
            (1, 1, 0),
            (-1, -1, -2),
            (i32::MAX, i32::MAX, 2),
        ] {
            let odd = heads(a, b, d);
            assert!(odd.attend(&packed, &[sequence(1, 0, 2)], false).is_err());
            assert!(
                odd.store_values((&sequence(1, 0, 2).keys, None), &packed, token)
                    .is_err()
            );
        }
        let usual = heads(1, 1, 2);
        for rows in [
            &[(1, i32::MAX)][..],
            &[(i32::MAX, 0), (i32::MAX, 0), (3, 0)],
            &[(-2, 0), (3, 0)],
            &[(i32::MIN, 0), (i32::MIN, 0), (1, 0)],
        ] {
            let sequences: Vec<KvView> = rows.iter().map(|&(n, at)| sequence(n, at, 2)).collect();
            assert!(usual.keys(&packed, rows).is_err(), "{rows:?}");
            assert!(
                usual.attend(&packed, &sequences, false).is_err(),
                "{rows:?}"
            );
        }
    });
}

/// Packed sequences without a causal mask: each must have the result of the definition for it
/// alone.
#[test]
fn sequences_attend_to_what_is_around() {
    let (h, kv) = (4usize, 2usize);
    // Lengths for decode attention, for panels of queries, and for more keys than a block.
    let lengths = [1usize, 3, 20, 5, 210, 16];
    let total: usize = lengths.iter().sum();
    for (d, reach, softcap, slopes) in [
        (32, None, None, None),
        (16, Some(4), None, None),
        (24, Some(0), None, None),
        (48, Some(1000), Some(2.0), None),
        (32, None, None, Some([0.5f32, 0.25, 0.01, 1.0])),
        // Queries are computed one by one, and by panels.
        (24, None, Some(3.0), Some([0.5, 0.0, 0.3, 0.1])),
        (16, Some(9), None, Some([0.125, 0.5, 0.07, 2.0])),
    ] {
        let width = (h + 2 * kv) * d;
        let packed = noise(total * width, 1);
        on_cpu(|| {
            let heads = Heads {
                scale: 0.7,
                softcap,
                ..plain_heads(h as i32, kv as i32, d as i32)
            };
            let all = array(&packed, &[1, total as i32, width as i32]);
            let counts = lengths.map(|n| n as i32);
            let mut wanted = Vec::new();
            let mut rows = packed.chunks(width);
            for n in lengths {
                let own_rows: Vec<&[f32]> = rows.by_ref().take(n).collect();
                // Reorders `[T, kv, D]` to `[kv, T, D]`.
                let part = |first: usize| -> Vec<f32> {
                    let heads = (0..kv).flat_map(|g| own_rows.iter().map(move |row| (g, row)));
                    heads
                        .flat_map(|(g, row)| row[(first + g) * d..][..d].to_vec())
                        .collect()
                };
                let bias = |head: usize, q: usize, key: usize| {
                    let apart = q.abs_diff(key);
                    let slope = slopes.map_or(0.0, |slopes| f64::from(slopes[head]));
                    (reach.is_none_or(|r| apart <= r)).then(|| -slope * apart as f64)
                };
                let both = (&part(h)[..], &part(h + kv)[..]);
                wanted.extend(biased_attention(
                    &heads,
                    &own_rows.concat(),
                    both,
                    (n, n),
                    None,
                    &bias,
                ));
            }
            with_each(|isa| {
                let reach = reach.map(|r| r as i32);
                let locality = Locality {
                    reach,
                    slopes: slopes.as_ref().map(|slopes| &slopes[..]),
                };
                let actual = host(&heads.attend_around(&all, &counts, locality).unwrap());
                close(&actual, &wanted, 2e-5, &format!("{d} {reach:?} {isa:?}"));
            });
        });
    }
}

/// The positions of each sequence must begin at 0 for rotation.
#[test]
fn sequences_are_rotated_from_their_own_beginning() {
    on_cpu(|| {
        let heads = Heads {
            rotation: Some(Rotation {
                radians: [1.0f32, 0.3, 0.1, 0.01, 0.5, 0.2, 0.05, 0.7].into(),
                traditional: false,
                amplitude: 1.0,
            }),
            ..plain_heads(2, 2, 16)
        };
        let packed = noise(30 * 96, 5);
        let all = array(&packed, &[1, 30, 96]);
        let everywhere = Locality::default();
        let together = host(&heads.attend_around(&all, &[11, 19], everywhere).unwrap());
        let mut alone = Vec::new();
        for (from, n) in [(0, 11), (11, 19)] {
            let sequence_alone = array(&packed[from * 96..(from + n) * 96], &[1, n as i32, 96]);
            alone.extend(host(
                &heads
                    .attend_around(&sequence_alone, &[n as i32], everywhere)
                    .unwrap(),
            ));
        }
        assert_eq!(together, alone);
        let unturned = plain_heads(2, 2, 16);
        let other = host(&unturned.attend_around(&all, &[11, 19], everywhere).unwrap());
        assert_ne!(together, other, "the rotation does something");
        for (lengths, reach) in [
            (&[11, 18][..], None),
            (&[11, 20], None),
            (&[30, 0], None),
            (&[-1, 31], None),
            (&[i32::MAX, i32::MAX], None),
            (&[], None),
            (&[11, 19], Some(-1)),
        ] {
            let locality = Locality {
                reach,
                slopes: None,
            };
            let actual = heads.attend_around(&all, lengths, locality);
            assert!(actual.is_err(), "{lengths:?} {reach:?}");
        }
        let too_many = Locality {
            reach: None,
            slopes: Some(&[0.5; 3]),
        };
        assert!(heads.attend_around(&all, &[11, 19], too_many).is_err());
    });
}

/// Caches of float16 give the result of float32 caches with the same elements, and are written with
/// the nearest elements.
#[test]
fn float16_caches_are_read_and_written() {
    on_cpu(|| {
        let heads = plain_heads(4, 2, 16);
        let n = 9;
        let width = (4 + 2 * 2) * 16;
        let packed = array(&noise((n * width) as usize, 3), &[1, n, width]);
        let empty = |dtype| crate::zeros(&[1, 2, 12, 16], dtype).unwrap();
        let tokens = TokenRange {
            first: 0,
            length: n,
            offset: 0,
        };
        let half = Dtype::Float16;
        let store = |dtype| {
            let keys = heads
                .store_keys((&empty(dtype), None), &packed, tokens)
                .unwrap();
            let values = heads
                .store_values((&empty(dtype), None), &packed, tokens)
                .unwrap();
            (keys, values)
        };
        let (keys, values) = store(half);
        let (wide_keys, wide_values) = store(Dtype::Float32);
        assert_eq!(keys.dtype(), half);
        let as_half = |a: &Array| a.astype(half).unwrap().to_vec::<half::f16>().unwrap();
        assert_eq!(as_half(&keys), as_half(&wide_keys));
        assert_eq!(as_half(&values), as_half(&wide_values));
        let view = |keys: &Array, values: &Array, length: i32| KvView {
            length,
            offset: n - length,
            keys: keys.clone(),
            values: values.clone(),
            packing: None,
            filled: n,
            order: Some((0, 0)),
            window: None,
        };
        for length in [1, n] {
            let rows = packed.slice_axis(1, n - length, n).unwrap();
            let attend = |keys: &Array, values: &Array| {
                let out = heads.attend(&rows, &[view(keys, values, length)], false);
                out.unwrap().to_vec::<f32>().unwrap()
            };
            let again = |a: &Array| a.astype(Dtype::Float32).unwrap();
            let wanted = attend(&again(&keys), &again(&values));
            assert_eq!(attend(&keys, &values), wanted, "{length}");
        }
        // Both arrays of a row have one type.
        let one = packed.slice_axis(1, 0, 1).unwrap();
        assert!(
            heads
                .attend(&one, &[view(&keys, &wide_values, 1)], false)
                .is_err()
        );
        // The rows of a batch may have different types.
        let two = packed.slice_axis(1, 0, 2).unwrap();
        let mixed = [view(&keys, &values, 1), view(&wide_keys, &wide_values, 1)];
        let attend = |rows: &Array, views: &[KvView]| {
            let out = heads.attend(rows, views, false).unwrap();
            out.to_vec::<f32>().unwrap()
        };
        let alone = [0, 1].map(|i| {
            let row = packed.slice_axis(1, i as i32, i as i32 + 1).unwrap();
            attend(&row, &mixed[i..=i])
        });
        assert_eq!(attend(&two, &mixed), alone.concat());
        assert!(KvBuffer::holding(&keys, &wide_values, n, 16).is_err());
        // Memory has the type of the arrays that it is made from, in all copies.
        let mut memory = KvBuffer::holding(&keys, &values, n, 16).unwrap();
        assert_eq!(memory.kv_type(), KvType::Float16);
        memory.grow(n, 300).unwrap();
        let fork = memory.fork(7, 32).unwrap();
        for (memory, n) in [(&memory, n), (&fork, 7)] {
            let (copied, _) = memory.copy(n).unwrap();
            let wanted = keys.slice_axis(2, 0, n).unwrap();
            assert_eq!(as_half(&copied), as_half(&wanted));
        }
    });
}
