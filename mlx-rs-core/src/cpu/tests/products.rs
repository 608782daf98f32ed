//! Tests multiplication of few and many rows with every kind of matrix.

use super::*;
use mlx_cpu_kernels::testing::exact_gate;

/// The definition: `x [rows, k]` times the transpose of `w [n, k]`, in float64.
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

/// How a matrix is stored.
#[derive(Debug, Clone, Copy)]
enum Storage {
    Dense(Dtype),
    /// The bits and the group size.
    Quantized(i32, i32),
}

/// Dense, and each quantized format that `k` inputs allow.
fn storages(k: usize) -> Vec<Storage> {
    let formats = [2, 3, 4, 5, 6, 8]
        .into_iter()
        .flat_map(|bits| [32, 64, 128].map(|group| (bits, group)));
    let fitting = formats.filter(|(_, group)| k.is_multiple_of(*group as usize));
    let dense = [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16].map(Storage::Dense);
    let quantized = fitting.map(|(bits, group)| Storage::Quantized(bits, group));
    dense.into_iter().chain(quantized).collect()
}

/// A matrix in this storage, and the values that it represents.
fn stored(w: &Array, storage: Storage) -> (Matrix, Vec<f32>) {
    match storage {
        Storage::Dense(dtype) => {
            let w = w.astype(dtype).unwrap();
            let dense = DenseMatrix::new(&w).unwrap().expect("kernels are on");
            (
                Matrix::Dense(dense),
                host(&w.astype(Dtype::Float32).unwrap()),
            )
        }
        Storage::Quantized(bits, group) => {
            let q = Quantized::quantize(w, group, bits, QuantMode::Affine).unwrap();
            // Some formats have scales that are exact in float16, and are stored so.
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
    }
}

/// Multiplication of few and many rows must equal the definition, in every storage and with every
/// kernel.
#[test]
fn products_of_few_and_many_rows_equal_the_definition() {
    // With this many rows, each thread computes all outputs of its own rows on AMX. Its parts have
    // two or three `TilePlace`s, so pairs of places and single places occur.
    let apart = 64 * threads() + 5;
    for (rows, n, k) in [
        (apart, 300, 128),
        (1, 9, 64),
        (3, 7, 96),
        (15, 11, 384),
        (16, 8, 32),
        (17, 50, 96),
        (40, 130, 288),
        (530, 24, 64),
        (18, 30, 384),
        // The rows are longer than the part that is converted to float32 at once.
        (2, 3, 2080),
        (8, 75, 576),
        // The matrix has few groups, and its outputs end within a tile.
        (8, 40, 32),
        (2, 100, 64),
        (7, 41, 96),
        (8, 130, 128),
        (5, 70, 384),
        (64, 20, 320),
        // There are more input tiles than are multiplied at once.
        (100, 37, 576),
        // The outputs are whole tiles.
        (1, 16, 64),
        (20, 80, 96),
        (300, 48, 160),
    ] {
        let (x, residual) = (noise(rows * k, 1), noise(rows * n, 2));
        let (norm, bias) = (noise(k, 3), noise(n, 4));
        let shape = [1, rows as i32, k as i32];
        for storage in storages(k) {
            on_cpu(|| {
                let plain =
                    [noise(n * k, 5), noise(n * k, 6)].map(|w| array(&w, &[n as i32, k as i32]));
                let (matrices, values): (Vec<Matrix>, Vec<Vec<f32>>) =
                    plain.iter().map(|w| stored(w, storage)).unzip();
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
                    let what = format!("{rows} {n} {k} {storage:?} {isa:?}");
                    let with_bias = Projection {
                        parts: &[(&matrices[0], Some(&bias))],
                        norm: None,
                        then: Epilogue::Add(&after),
                    };
                    let wanted: Vec<f64> = first
                        .iter()
                        .enumerate()
                        .map(|(i, v)| v + f64::from(residual[i]) + f64::from(host(&bias)[i % n]))
                        .collect();
                    close(&host(&with_bias.of(&x).unwrap()), &wanted, tolerance, &what);
                    let added = Projection {
                        parts: &[(&matrices[0], None)],
                        norm: None,
                        then: Epilogue::Add(&after),
                    };
                    let sums = first.iter().zip(&residual);
                    let wanted: Vec<f64> = sums.map(|(v, r)| v + f64::from(*r)).collect();
                    close(&host(&added.of(&x).unwrap()), &wanted, tolerance, &what);
                    let both = [(&matrices[0], None), (&matrices[1], Some(&bias))];
                    let packed = Projection {
                        parts: &both,
                        norm: Some((&norm, 1e-5)),
                        then: Epilogue::None,
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
                    for gate in [Gate::Silu, Gate::Gelu, Gate::GeluTanh, Gate::Relu] {
                        let gated = Projection {
                            parts: &both,
                            norm: Some((&norm, 1e-5)),
                            then: Epilogue::Gate(gate),
                        };
                        let wanted: Vec<f64> = before
                            .iter()
                            .zip(&biased)
                            .map(|(g, u)| u * exact_gate(gate, *g))
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

/// Combines matrices of several formats on one input, with and without a gate.
#[test]
fn formats_go_together() {
    let k = 128usize;
    for rows in [1usize, 5, 12, 40, 100] {
        on_cpu(|| {
            let x = array(&noise(rows * k, 1), &[rows as i32, k as i32]);
            let made = |n: usize, bits: i32, group: i32| {
                let w = array(&noise(n * k, bits as u32), &[n as i32, k as i32]);
                let q = Quantized::quantize(&w, group, bits, QuantMode::Affine).unwrap();
                let values = host(&q.dequantize(Dtype::Float32).unwrap());
                let matrix = QuantizedMatrix::new(&q).unwrap().expect("their format");
                (Matrix::Quantized(matrix), product(&host(&x), &values, k), n)
            };
            let parts = [
                made(40, 4, 32),
                made(7, 8, 64),
                made(33, 4, 64),
                made(16, 4, 32),
            ];
            let (gate, up) = (made(20, 4, 32), made(20, 8, 32));
            with_each(|isa| {
                let what = format!("{rows} {isa:?}");
                let all = parts.each_ref().map(|(matrix, ..)| (matrix, None));
                let packed = Projection {
                    parts: &all,
                    norm: None,
                    then: Epilogue::None,
                };
                let wanted: Vec<f64> = (0..rows)
                    .flat_map(|row| {
                        let alone = move |(_, w, n): &(Matrix, Vec<f64>, usize)| {
                            w[row * n..(row + 1) * n].to_vec()
                        };
                        parts.iter().flat_map(alone).collect::<Vec<_>>()
                    })
                    .collect();
                close(&host(&packed.of(&x).unwrap()), &wanted, 3e-4, &what);
                let gated = Projection {
                    parts: &[(&gate.0, None), (&up.0, None)],
                    norm: None,
                    then: Epilogue::Gate(Gate::Silu),
                };
                let both = gate.1.iter().zip(&up.1);
                let wanted: Vec<f64> = both.map(|(g, u)| exact_gate(Gate::Silu, *g) * u).collect();
                close(&host(&gated.of(&x).unwrap()), &wanted, 2e-3, &what);
            });
        });
    }
}

/// Inputs may have any layout: transposed, reversed, broadcast, or sliced.
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
        let heads = plain_heads(2, 1, 16);
        let wide = array(&noise(6 * 80, 4), &[1, 6, 80]);
        let packed = wide.slice_axis(2, 3, 67).unwrap();
        // In these keys, the elements of a head are not adjacent.
        let keys = array(&noise(16 * 6, 5), &[1, 1, 16, 6])
            .swap_axes(2, 3)
            .unwrap();
        let sequence = |keys: &Array| KvView {
            length: 6,
            offset: 0,
            keys: keys.clone(),
            values: keys.clone(),
            packing: None,
            filled: 6,
            order: Some((0, 0)),
            window: None,
        };
        let got = heads.attend(&packed, &[sequence(&keys)], false).unwrap();
        let copies = (packed.contiguous().unwrap(), keys.contiguous().unwrap());
        let wanted = heads
            .attend(&copies.0, &[sequence(&copies.1)], false)
            .unwrap();
        assert_eq!(host(&got), host(&wanted));
    });
}

/// A row with a NaN or an infinity has NaN outputs, and other rows must not change. This could fail
/// because rows are prepared together.
#[test]
fn what_is_no_number_stays_in_its_row() {
    let (n, k) = (11usize, 96usize);
    for (bits, group) in [(4, 32), (8, 32)] {
        on_cpu(|| {
            let w = array(&noise(n * k, 5), &[n as i32, k as i32]);
            let q = Quantized::quantize(&w, group, bits, QuantMode::Affine).unwrap();
            let matrix = QuantizedMatrix::new(&q).unwrap().expect("their format");
            with_each(|isa| {
                for (rows, wrong) in [(1usize, 0usize), (3, 1), (8, 7), (9, 8), (70, 69)] {
                    let none = f32::from_bits(0x7fff_ffff);
                    for value in [f32::NAN, none, f32::INFINITY, f32::NEG_INFINITY] {
                        for place in [0, 5, 32, 71] {
                            let shape = [rows as i32, k as i32];
                            let mut x = noise(rows * k, 1);
                            let before = host(&matrix.product(&array(&x, &shape)).unwrap());
                            x[wrong * k + place] = value;
                            let got = host(&matrix.product(&array(&x, &shape)).unwrap());
                            let parts = got.chunks(n).zip(before.chunks(n)).enumerate();
                            for (row, (got, before)) in parts {
                                if row == wrong {
                                    let none = got.iter().all(|v| !v.is_finite());
                                    assert!(none, "{isa:?} {bits} {value} {place}: {got:?}");
                                } else {
                                    assert_eq!(got, before, "{isa:?} {bits} {value} {row}");
                                }
                            }
                        }
                    }
                }
            });
        });
    }
}

/// An activation as epilogue must equal the plain product followed by the activation, for few and
/// many rows and each storage. With two matrices it must be an error.
#[test]
fn products_go_through_an_activation() {
    for (rows, n, k) in [(1, 9, 64), (5, 40, 96), (33, 50, 128), (600, 24, 64)] {
        let (x, bias) = (noise(rows * k, 1), noise(n, 4));
        for storage in storages(k) {
            on_cpu(|| {
                let w = array(&noise(n * k, 5), &[n as i32, k as i32]);
                let (matrix, _) = stored(&w, storage);
                let bias = array(&bias, &[n as i32]);
                let x = array(&x, &[1, rows as i32, k as i32]);
                let parts = [(&matrix, Some(&bias))];
                let with = |then| {
                    let norm = None;
                    let parts = &parts;
                    host(&Projection { parts, norm, then }.of(&x).unwrap())
                };
                with_each(|isa| {
                    let plain = with(Epilogue::None);
                    let actual = with(Epilogue::Activate(Gate::Gelu));
                    let wanted: Vec<f64> = plain
                        .iter()
                        .map(|v| exact_gate(Gate::Gelu, f64::from(*v)))
                        .collect();
                    close(
                        &actual,
                        &wanted,
                        1e-5,
                        &format!("{storage:?} {rows} {isa:?}"),
                    );
                });
            });
        }
    }
    on_cpu(|| {
        let w = array(&noise(64, 5), &[2, 32]);
        let (matrix, _) = stored(&w, Storage::Dense(Dtype::Float32));
        let parts = [(&matrix, None), (&matrix, None)];
        let two = Projection {
            parts: &parts,
            norm: None,
            then: Epilogue::Activate(Gate::Relu),
        };
        assert!(two.of(&array(&noise(32, 1), &[1, 32])).is_err());
    });
}
