//! Whole operations against their definitions in double precision, on each instruction set: products with
//! few and many rows, and attention of many queries.

use std::sync::Arc;

use super::kernel::tests::{noise, with_each};
use super::tile;
use super::*;
use crate::array::Array;
use crate::dtype::Dtype;
use crate::ops::{QuantMode, Quantized};
use crate::{Device, Stream};

fn on_cpu(f: impl FnOnce()) {
    Stream::default_of(Device::cpu()).unwrap().scope(f);
}

fn array(data: &[f32], shape: &[i32]) -> Array {
    Array::from_slice(data, shape).unwrap()
}

fn host(a: &Array) -> Vec<f32> {
    a.to_vec::<f32>().unwrap()
}

fn close(got: &[f32], wanted: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let difference = (f64::from(*got) - wanted).abs();
        assert!(
            difference <= tolerance,
            "{what}: {got} is not {wanted} at {i}"
        );
    }
}

#[test]
fn exponentials_and_tangents() {
    for i in -2000..2000 {
        let x = i as f32 * 0.0435;
        let (got, exact) = (f64::from(tile::exp(x)), f64::from(x).exp());
        assert!((got - exact).abs() <= 4e-7 * exact, "{x}: {got} {exact}");
        let difference = (f64::from(tile::tanh(x)) - f64::from(x).tanh()).abs();
        assert!(difference < 4e-7, "{x}");
    }
    assert_eq!(tile::exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(tile::exp(-1000.0), 0.0);
    assert!(tile::exp(f32::NAN).is_nan());
    assert!(tile::exp(1000.0).is_finite() && tile::exp(0.0) == 1.0);
}

/// `x [rows, k]` times the transpose of `w [n, k]`.
fn product(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    x.chunks(k)
        .flat_map(|x| {
            w.chunks(k).map(move |w| {
                let pairs = x.iter().zip(w);
                pairs.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
            })
        })
        .collect()
}

/// Dense, and each format of quantized matrices that so many inputs allow: bits and group.
fn packings(k: usize) -> Vec<Option<(i32, i32)>> {
    let formats = [4, 8]
        .into_iter()
        .flat_map(|bits| [32, 64, 128].map(|group| (bits, group)));
    let fitting = formats.filter(|(_, group)| k.is_multiple_of(*group as usize));
    std::iter::once(None).chain(fitting.map(Some)).collect()
}

/// The same with scales and biases that are numbers of float16.
pub(super) fn in_few_digits(q: Quantized) -> Quantized {
    let rounded = |a: &Array| {
        let half = a.astype(Dtype::Float16).unwrap();
        half.astype(Dtype::Float32).unwrap()
    };
    Quantized {
        scales: rounded(&q.scales),
        biases: q.biases.as_ref().map(rounded),
        ..q
    }
}

/// All ways that a product with so many rows can go.
#[test]
fn products_of_few_and_many_rows_equal_the_definition() {
    for (rows, n, k) in [
        (1, 9, 64),
        (3, 7, 96),
        (15, 11, 384),
        (16, 8, 32),
        (17, 50, 96),
        (40, 130, 288),
        (530, 24, 64),
        (18, 30, 384),
    ] {
        let (x, residual) = (noise(rows * k, 1), noise(rows * n, 2));
        let (norm, bias) = (noise(k, 3), noise(n, 4));
        let shape = [1, rows as i32, k as i32];
        for packing in packings(k) {
            on_cpu(|| {
                let plain =
                    [noise(n * k, 5), noise(n * k, 6)].map(|w| array(&w, &[n as i32, k as i32]));
                let (matrices, values): (Vec<Matrix>, Vec<Vec<f32>>) = plain
                    .iter()
                    .map(|w| match packing {
                        None => {
                            let dense = DenseMatrix::new(w).unwrap().expect("kernels are on");
                            (Matrix::Dense(dense), host(w))
                        }
                        Some((bits, group)) => {
                            let q = Quantized::quantize(w, group, bits, QuantMode::Affine).unwrap();
                            // Some are kept as float16.
                            let q = if (bits == 4) == (group == 32) {
                                in_few_digits(q)
                            } else {
                                q
                            };
                            let kernel = QuantizedMatrix::new(&q).unwrap().expect("their format");
                            (
                                Matrix::Quantized(kernel),
                                host(&q.dequantize(Dtype::Float32).unwrap()),
                            )
                        }
                    })
                    .unzip();
                let normed: Vec<f32> = x
                    .chunks(k)
                    .flat_map(|x| {
                        let square: f32 = x.iter().map(|v| v * v).sum::<f32>() / k as f32;
                        let factor = 1.0 / (square + 1e-5).sqrt();
                        x.iter().zip(&norm).map(move |(x, w)| x * factor * w)
                    })
                    .collect();
                let (first, second) = (product(&x, &values[0], k), product(&normed, &values[1], k));
                let before = product(&normed, &values[0], k);
                let (x, norm) = (array(&x, &shape), array(&norm, &[k as i32]));
                let (bias, after) = (
                    array(&bias, &[n as i32]),
                    array(&residual, &[1, rows as i32, n as i32]),
                );
                let tolerance = 2e-5 * (k as f64).sqrt();
                with_each(|isa| {
                    let what = format!("{rows} {n} {k} {packing:?} {isa:?}");
                    let with_bias = Projection {
                        parts: &[(&matrices[0], Some(&bias))],
                        norm: None,
                        then: Then::Add(&after),
                    };
                    let wanted: Vec<f64> = first
                        .iter()
                        .enumerate()
                        .map(|(i, v)| v + f64::from(residual[i]) + f64::from(host(&bias)[i % n]))
                        .collect();
                    close(&host(&with_bias.of(&x).unwrap()), &wanted, tolerance, &what);
                    let both = [(&matrices[0], None), (&matrices[1], Some(&bias))];
                    let packed = Projection {
                        parts: &both,
                        norm: Some((&norm, 1e-5)),
                        then: Then::Nothing,
                    };
                    let biased: Vec<f64> = second
                        .iter()
                        .enumerate()
                        .map(|(i, v)| v + f64::from(host(&bias)[i % n]))
                        .collect();
                    let wanted: Vec<f64> = before
                        .chunks(n)
                        .zip(biased.chunks(n))
                        .flat_map(|(a, b)| a.iter().chain(b).copied())
                        .collect();
                    close(&host(&packed.of(&x).unwrap()), &wanted, tolerance, &what);
                    for gate in [Gate::Silu, Gate::GeluTanh, Gate::Relu] {
                        let gated = Projection {
                            parts: &both,
                            norm: Some((&norm, 1e-5)),
                            then: Then::Gate(gate),
                        };
                        let wanted: Vec<f64> = before
                            .iter()
                            .zip(&biased)
                            .map(|(g, u)| u * exact(gate, *g))
                            .collect();
                        close(
                            &host(&gated.of(&x).unwrap()),
                            &wanted,
                            4.0 * tolerance,
                            &what,
                        );
                    }
                });
            });
        }
    }
}

fn exact(gate: Gate, x: f64) -> f64 {
    match gate {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::GeluTanh => 0.5 * x * (1.0 + (0.797_884_560_8 * (x + 0.044_715 * x.powi(3))).tanh()),
        Gate::Relu => x.max(0.0),
    }
}

/// Attention of a lane whose queries see what `sees(query, key)` says.
#[allow(clippy::too_many_arguments, reason = "the parts of a definition")]
fn attention(
    heads: &Heads,
    packed: &[f32],
    (keys, values): (&[f32], &[f32]),
    (length, n): (usize, usize),
    sinks: Option<&[f32]>,
    sees: &dyn Fn(usize, usize) -> bool,
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
            let mut found = vec![0.0; d];
            for key in (0..n).filter(|key| sees(q, *key)) {
                let pairs = query.iter().zip(row(keys, key));
                let mut score: f64 = pairs.map(|(q, k)| f64::from(*q) * k).sum::<f64>();
                score *= f64::from(heads.scale);
                if let Some(cap) = heads.softcap {
                    score = (score / f64::from(cap)).tanh() * f64::from(cap);
                }
                let share = score.exp();
                total += share;
                for (found, value) in found.iter_mut().zip(row(values, key)) {
                    *found += share * value;
                }
            }
            out.extend(found.iter().map(|v| v / total));
        }
    }
    out
}

#[test]
fn many_queries_find_what_the_definition_says() {
    // Length, keys before, kept, start of the others, window, cap, sinks, head_dim.
    let cases = [
        (1, 5, 0, 0, None, None, false, 32),
        (3, 0, 0, 0, None, None, false, 16),
        (5, 0, 0, 0, None, None, false, 64),
        (16, 0, 0, 0, None, None, true, 16),
        (37, 200, 0, 0, None, Some(2.0), false, 32),
        (250, 10, 0, 0, Some(7), None, true, 16),
        (33, 300, 4, 50, Some(64), None, false, 48),
        // Not a multiple of the lanes: one by one.
        (20, 3, 0, 0, None, None, false, 24),
    ];
    for (length, before, kept, start, window, softcap, with_sinks, d) in cases {
        let (h, kv) = (6usize, 2usize);
        // Keys `kept..` stand at `start..`; what is between was dropped.
        let n = before + length - (start - kept.min(start));
        let packed = noise(length * (h + 2 * kv) * d, 1);
        let (keys, values) = (noise(kv * n * d, 2), noise(kv * n * d, 3));
        let own_sinks = noise(h, 4);
        on_cpu(|| {
            let lane_shape = [1, kv as i32, n as i32, d as i32];
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
            let lane = |order| Lane {
                length: length as i32,
                offset: before as i32,
                keys: array(&keys, &lane_shape),
                values: array(&values, &lane_shape),
                filled: n as i32,
                order,
                window,
            };
            let packed_array = array(&packed, &[1, length as i32, ((h + 2 * kv) * d) as i32]);
            let sinks = with_sinks.then_some(own_sinks.as_slice());
            let sees = |q: usize, key: usize| {
                let position = before + q;
                if key < kept {
                    return key <= position;
                }
                let at = start + key - kept;
                at <= position && window.is_none_or(|w| at + w as usize > position)
            };
            let both = (keys.as_slice(), values.as_slice());
            let wanted = attention(&heads, &packed, both, (length, n), sinks, &sees);
            let all = attention(&heads, &packed, both, (length, n), sinks, &|_, _| true);
            with_each(|isa| {
                let what = format!("{length} {before} {kept} {window:?} {d} {isa:?}");
                let order = Some((kept as i32, start as i32));
                let found = heads.attend(&packed_array, &[lane(order)], false).unwrap();
                close(&host(&found), &wanted, 1e-5, &what);
                let found = heads.attend(&packed_array, &[lane(order)], true).unwrap();
                close(&host(&found), &wanted[(length - 1) * h * d..], 1e-5, &what);
                if window.is_none() {
                    let found = heads.attend(&packed_array, &[lane(None)], false).unwrap();
                    close(&host(&found), &all, 1e-5, &what);
                }
            });
        });
    }
}

/// Rows of several lengths in one pass are each what they are alone, norms and rotation included.
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
        let lanes: Vec<Lane> = lengths
            .iter()
            .enumerate()
            .map(|(i, &length)| {
                let shape = [1, kv as i32, length as i32 + 2, d as i32];
                let values = |seed| array(&noise(kv * (length + 2) * d, seed), &shape);
                Lane {
                    length: length as i32,
                    offset: 2,
                    keys: values(10 + i as u32),
                    values: values(20 + i as u32),
                    filled: length as i32 + 2,
                    order: Some((0, 0)),
                    window: None,
                }
            })
            .collect();
        with_each(|isa| {
            let all = array(&packed, &[1, total as i32, width as i32]);
            let together = host(&heads.attend(&all, &lanes, false).unwrap());
            let keys = host(&heads.keys(&all, &places).unwrap());
            let mut at = 0;
            for (i, lane) in lanes.iter().enumerate() {
                let own = array(
                    &packed[at * width..(at + lengths[i]) * width],
                    &[1, lane.length, width as i32],
                );
                let alone = host(
                    &heads
                        .attend(&own, std::slice::from_ref(lane), false)
                        .unwrap(),
                );
                let rows = &together[at * h * d..(at + lengths[i]) * h * d];
                let exact: Vec<f64> = alone.iter().map(|v| f64::from(*v)).collect();
                close(rows, &exact, 1e-6, &format!("row {i}, {isa:?}"));
                let alone = host(&heads.keys(&own, &places[i..=i]).unwrap());
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

/// Inputs may lie in memory as they like: transposed, reversed, broadcast, cut out of others.
#[test]
fn inputs_of_any_layout() {
    on_cpu(|| {
        let (n, k) = (5i32, 64i32);
        let w = DenseMatrix::new(&array(&noise((n * k) as usize, 1), &[n, k])).unwrap();
        let w = w.expect("kernels are on");
        let x = array(&noise(20 * k as usize, 2), &[k, 20]);
        let row = array(&noise(k as usize, 3), &[1, k]);
        let views = [
            x.transpose_axes(&[1, 0]).unwrap(),
            x.transpose_axes(&[1, 0])
                .unwrap()
                .slice_axis(0, 3, 6)
                .unwrap(),
            row.broadcast_to(&[3, k]).unwrap(),
            x.transpose_axes(&[1, 0])
                .unwrap()
                .slice(&[19, 0], &[-21, k], &[-1, 1])
                .unwrap(),
        ];
        for view in views {
            let copy = view.contiguous().unwrap();
            let (got, wanted) = (w.product(&view).unwrap(), w.product(&copy).unwrap());
            assert_eq!(host(&got), host(&wanted), "{:?}", view.shape());
        }
        let heads = Heads {
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 16,
            scale: 1.0,
            softcap: None,
            q_norm: None,
            k_norm: None,
            rotation: None,
            sinks: None,
        };
        let wide = array(&noise(6 * 80, 4), &[1, 6, 80]);
        let packed = wide.slice_axis(2, 3, 67).unwrap();
        // Keys whose elements of a head are no neighbors.
        let keys = array(&noise(16 * 6, 5), &[1, 1, 16, 6])
            .swap_axes(2, 3)
            .unwrap();
        let lane = |keys: &Array| Lane {
            length: 6,
            offset: 0,
            keys: keys.clone(),
            values: keys.clone(),
            filled: 6,
            order: Some((0, 0)),
            window: None,
        };
        let got = heads.attend(&packed, &[lane(&keys)], false).unwrap();
        let copies = (packed.contiguous().unwrap(), keys.contiguous().unwrap());
        let wanted = heads.attend(&copies.0, &[lane(&copies.1)], false).unwrap();
        assert_eq!(host(&got), host(&wanted));
    });
}

/// Storing in place is storing, and what others still have stays as it was.
#[test]
fn stored_keys_and_values_stand_where_they_belong() {
    let (n, d, room) = (2usize, 16usize, 10usize);
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
        let before = noise(n * room * d, 2);
        let shape = [1, n as i32, room as i32, d as i32];
        let cache = array(&before, &shape);
        let tokens = Tokens {
            first: 1,
            length: 3,
            offset: 6,
        };
        let keys = host(&heads.keys(&packed, &[(1, 5), (3, 6), (1, 0)]).unwrap());
        let shared = heads.store_keys(&cache, &packed, tokens).unwrap();
        let values = heads.store_values(&cache, &packed, tokens).unwrap();
        // Of an array that nobody else has.
        let own = heads
            .store_keys(&cache.add(&cache).unwrap(), &packed, tokens)
            .unwrap();
        let (shared, values, own, row) = (host(&shared), host(&values), host(&own), host(&packed));
        assert_eq!(host(&cache), before);
        for h in 0..n {
            for at in 0..room {
                let place = (h * room + at) * d..(h * room + at + 1) * d;
                let wanted: Vec<f32> = if (6..9).contains(&at) {
                    keys[(h * 5 + at - 5) * d..][..d].to_vec()
                } else {
                    before[place.clone()].to_vec()
                };
                assert_eq!(shared[place.clone()], wanted, "{h} {at}");
                if (6..9).contains(&at) {
                    assert_eq!(own[place.clone()], wanted);
                    let start = (at - 5) * width + (4 + n + h) * d;
                    assert_eq!(values[place], row[start..start + d]);
                } else {
                    assert_eq!(values[place.clone()], wanted);
                    let twice: Vec<f32> = wanted.iter().map(|v| v + v).collect();
                    assert_eq!(own[place], twice);
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
            let tokens = Tokens {
                first,
                length,
                offset,
            };
            assert!(heads.store_keys(&cache, &packed, tokens).is_err());
            assert!(heads.store_values(&cache, &packed, tokens).is_err());
        }
    });
}

/// A block in one operation is its parts one after another, in steps of one and several rows, each of which goes
/// on where it stopped.
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
                return; // switched off
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
            let project = |parts: &[Biased<'_>], norm, then: Then<'_>, x: &Array| {
                Projection { parts, norm, then }.of(x).unwrap()
            };
            // Rows, each with its memory, and what arrays of its keys and values hold.
            let mut memories =
                [8, 8].map(|room| KvMemory::empty((groups as i32, d as i32), room).unwrap());
            let empty = array(&[0.0; 2 * 32 * 16], &[1, groups as i32, 32, d as i32]);
            let mut arrays = [0, 1].map(|_| (empty.clone(), empty.clone()));
            let mut offsets = [0i32; 2];
            for (step, lengths) in [[3, 5], [1, 1], [1, 2], [2, 1], [1, 7]].iter().enumerate() {
                let total: i32 = lengths.iter().sum();
                let x = noise(total as usize * hidden, 40 + step as u32);
                let x = array(&x, &[1, total, hidden as i32]);
                for (row, memory) in memories.iter_mut().enumerate() {
                    if offsets[row] + lengths[row] > memory.room() {
                        memory.grow(offsets[row], 32).unwrap();
                    }
                }
                let mut rooms: Vec<Room<'_>> = memories
                    .iter_mut()
                    .enumerate()
                    .map(|(row, memory)| Room {
                        length: lengths[row],
                        offset: offsets[row],
                        memory,
                        window: (row == 1).then_some(4),
                    })
                    .collect();
                let got = block.step(&x, &mut rooms).unwrap();
                let packed = project(&block.projections, block.attention_norm, Then::Nothing, &x);
                let mut lanes = Vec::new();
                let mut first = 0;
                for (row, (keys, values)) in arrays.iter_mut().enumerate() {
                    let tokens = Tokens {
                        first,
                        length: lengths[row],
                        offset: offsets[row],
                    };
                    *keys = heads.store_keys(keys, &packed, tokens).unwrap();
                    *values = heads.store_values(values, &packed, tokens).unwrap();
                    first += lengths[row];
                    lanes.push(Lane {
                        length: lengths[row],
                        offset: offsets[row],
                        keys: keys.clone(),
                        values: values.clone(),
                        filled: offsets[row] + lengths[row],
                        order: Some((0, 0)),
                        window: (row == 1).then_some(4),
                    });
                }
                let found = heads.attend(&packed, &lanes, false).unwrap();
                let attended = project(&[block.output], None, Then::Add(&x), &found);
                let gated = Then::Gate(Gate::Silu);
                let gated = project(&block.gate_up, block.feed_norm, gated, &attended);
                let wanted = project(&[block.down], None, Then::Add(&attended), &gated);
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
            // What does not fit is an error, and changes nothing.
            let x = array(&noise(hidden, 3), &[1, 1, hidden as i32]);
            for (length, offset) in [(1, 32), (0, 0), (2, 0), (1, -1), (1, i32::MAX)] {
                let room = Room {
                    length,
                    offset,
                    memory: &mut memories[0],
                    window: None,
                };
                assert!(block.step(&x, &mut [room]).is_err(), "{length} {offset}");
            }
            let wrong = Block {
                output: (gate, None),
                ..block
            };
            let room = Room {
                length: 1,
                offset: 0,
                memory: &mut memories[0],
                window: None,
            };
            let e = wrong.step(&x, &mut [room]).unwrap_err();
            assert!(e.to_string().contains("block needs"), "{e}");
        });
    });
}

/// What was copied stays as it was, whenever it is computed, though the memory is written again where it was cut.
#[test]
fn copies_of_memory_come_before_what_is_written_after() {
    on_cpu(|| {
        let d = 8i32;
        let heads = Heads {
            n_heads: 1,
            n_kv_heads: 1,
            head_dim: d,
            scale: 1.0,
            softcap: None,
            q_norm: None,
            k_norm: None,
            rotation: None,
            sinks: None,
        };
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
        let mut memory = KvMemory::empty((1, d), 4).unwrap();
        let write = |memory: &mut KvMemory, value: f32, offset: i32| {
            let x = array(&[value; 8], &[1, 1, d]);
            let room = Room {
                length: 1,
                offset,
                memory,
                window: None,
            };
            block.step(&x, &mut [room]).unwrap()
        };
        let _first = write(&mut memory, 1.0, 0);
        let copy = memory.copy(1).unwrap();
        // Never looked at, but written.
        drop(write(&mut memory, 2.0, 0));
        let later = memory.copy(1).unwrap();
        let last = write(&mut memory, 3.0, 0);
        last.eval().unwrap();
        assert_eq!(host(&memory.copy(1).unwrap().0), [3.0; 8]);
        assert_eq!(host(&later.1), [2.0; 8]);
        assert_eq!(host(&copy.0), [1.0; 8]);
        assert!(memory.copy(5).is_err() && memory.copy(0).is_err() && memory.grow(1, 0).is_err());
        assert!(KvMemory::empty((0, 8), 1).is_err() && KvMemory::empty((1, 8), -1).is_err());
        let keys = &copy.0;
        assert!(KvMemory::holding(keys, keys, 2, 4).is_err());
        assert!(KvMemory::holding(keys, &one_of(keys), 1, 4).is_err());
    });
}

/// Something of another shape.
fn one_of(a: &Array) -> Array {
    a.reshape(&[-1]).unwrap()
}

/// Sizes beyond an axis are errors, rather than small once they wrap around.
#[test]
fn heads_that_cannot_be_are_errors() {
    let heads = |n_heads, n_kv_heads, head_dim| Heads {
        n_heads,
        n_kv_heads,
        head_dim,
        scale: 1.0,
        softcap: None,
        q_norm: None,
        k_norm: None,
        rotation: None,
        sinks: None,
    };
    let lane = |length, offset, d| Lane {
        length,
        offset,
        keys: array(&vec![0.0; d], &[1, 1, 1, d as i32]),
        values: array(&vec![0.0; d], &[1, 1, 1, d as i32]),
        filled: 1,
        order: Some((0, 0)),
        window: None,
    };
    on_cpu(|| {
        // 65,538 heads of 65,536 elements are 2 to the 32 and 131,072.
        let (large, width) = (heads(65_536, 1, 65_536), 131_072);
        let packed = array(&vec![0.0; width], &[1, 1, width as i32]);
        let token = Tokens {
            first: 0,
            length: 1,
            offset: 0,
        };
        let lanes = [lane(1, 0, 65_536)];
        let cache = &lanes[0].keys;
        assert!(large.attend(&packed, &lanes, false).is_err());
        assert!(large.keys(&packed, &[(1, 0)]).is_err());
        assert!(large.store_keys(cache, &packed, token).is_err());
        assert!(large.store_values(cache, &packed, token).is_err());
        let packed = array(&[0.0; 6], &[1, 1, 6]);
        for (a, b, d) in [
            (0, 1, 2),
            (1, 0, 2),
            (1, 1, 0),
            (-1, -1, -2),
            (i32::MAX, i32::MAX, 2),
        ] {
            let odd = heads(a, b, d);
            assert!(odd.attend(&packed, &[lane(1, 0, 2)], false).is_err());
            assert!(
                odd.store_values(&lane(1, 0, 2).keys, &packed, token)
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
            let lanes: Vec<Lane> = rows.iter().map(|&(n, at)| lane(n, at, 2)).collect();
            assert!(usual.keys(&packed, rows).is_err(), "{rows:?}");
            assert!(usual.attend(&packed, &lanes, false).is_err(), "{rows:?}");
        }
    });
}
