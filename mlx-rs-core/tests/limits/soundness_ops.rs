//! Calls every operation on every type, on empty and odd shapes, and with axes and numbers at their
//! limits. No argument may end the process. Whether the answer is a result or an error does not
//! matter. Results are evaluated, and must have the shape and type that they declared before.

use std::panic::{AssertUnwindSafe, catch_unwind};

use mlx_rs_core::fast::{self, Mask, RopeBase};
use mlx_rs_core::linalg::{self, Norm, Triangle};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::{
    All, Array, Conv, Device, Dtype, GridIndexing, Pad, QuantMode, Quantized, Result, ScatterMode,
    Stream, arange, broadcast_arrays, concatenate, concatenate_flat, einsum, eval, eye, fft, full,
    linspace, memory, meshgrid, ones, stack, tri, where_, zeros,
};
use proptest::prelude::*;

use crate::operations::{Call, OPERATIONS, One, of_two};

const SHAPES: [&[i32]; 9] = [
    &[],
    &[0],
    &[1],
    &[5],
    &[0, 3],
    &[3, 0],
    &[2, 3],
    &[1, 2, 0],
    &[2, 1, 3],
];
/// The values for axes, shifts, ranks, counts and diagonals.
const NUMBERS: [i32; 8] = [0, 1, -1, 2, -3, i32::MAX, i32::MIN, i32::MIN + 1];

fn array(shape: &[i32], dtype: Dtype) -> Array {
    let n: i32 = shape.iter().product();
    let values: Vec<i32> = (0..n).map(|i| (i * 7 + 3) % 5).collect();
    Array::from_slice(&values, shape)
        .unwrap()
        .astype(dtype)
        .unwrap()
}

/// Limits memory, because some of the numbers lead to results of gigabytes.
fn limited() {
    memory::set_budget(1 << 22);
}

/// Evaluates the results, and checks that they have their declared shape and type.
fn settle(name: &str, result: Result<Vec<Array>>) {
    let Ok(arrays) = result else { return };
    let before: Vec<_> = arrays
        .iter()
        .map(|a| (a.shape().to_vec(), a.dtype()))
        .collect();
    if eval(&arrays).is_err() {
        return;
    }
    for (a, before) in arrays.iter().zip(before) {
        assert_eq!((a.shape().to_vec(), a.dtype()), before, "{name}");
        assert!(a.shape().iter().all(|&d| d >= 0), "{name}: {a:?}");
    }
}

/// Applies [`settle`] to many results: together, or one by one if any of them fails.
fn settle_all(name: &str, results: Vec<Array>) {
    if eval(&results).is_ok() {
        return settle(name, Ok(results));
    }
    for a in results {
        settle(name, one(Ok(a)));
    }
}

fn one(a: Result<Array>) -> Result<Vec<Array>> {
    Ok(vec![a?])
}

fn two(pair: Result<(Array, Array)>) -> Result<Vec<Array>> {
    let (a, b) = pair?;
    Ok(vec![a, b])
}

type Unary = Box<dyn Fn(&Array) -> Result<Array>>;
type Numbered = Box<dyn Fn(&Array, i32, i32) -> Result<Vec<Array>>>;

/// The functions of one array: those of the table, and others with fixed further arguments.
fn unary() -> Vec<(&'static str, Unary)> {
    let mut all: Vec<(&str, Unary)> = Vec::new();
    for operation in OPERATIONS {
        all.extend(match operation.call {
            Call::One(f) => Some((operation.name, Box::new(f) as Unary)),
            Call::Reduce(f) => Some((
                operation.name,
                Box::new(move |a: &Array| f(a, All.into(), true)) as _,
            )),
            Call::FourierN(f) => Some((
                operation.name,
                Box::new(move |a: &Array| f(a, None, All.into())) as _,
            )),
            Call::Shift(f) => Some((
                operation.name,
                Box::new(move |a: &Array| f(a, All.into())) as _,
            )),
            _ => None,
        });
    }
    let with_arguments: [(&str, One); 22] = [
        ("var", |a| a.var(All, false, 1)),
        ("std", |a| a.std(All, true, i32::MAX)),
        ("argmax", |a| a.argmax_flat(true)),
        ("argmin", |a| a.argmin_flat(false)),
        ("nan_to_num", |a| a.nan_to_num(0.0, None, Some(1.0))),
        ("clip", |a| a.clip(Some(a), None)),
        ("masked_scatter", |a| {
            a.masked_scatter(&a.astype(Dtype::Bool)?, a)
        }),
        ("hadamard", |a| a.hadamard_transform(None)),
        ("einsum", |a| einsum("...i->...", &[a])),
        ("eigvals", linalg::eigvals),
        ("eigvalsh", |a| linalg::eigvalsh(a, Triangle::Upper)),
        ("cholesky", |a| linalg::cholesky(a, false)),
        ("norm", |a| linalg::norm(a, Norm::L2, All, false)),
        ("nuclear", |a| linalg::norm(a, Norm::Nuclear, All, false)),
        ("rms_norm", |a| fast::rms_norm(a, None, 1e-5)),
        ("layer_norm", |a| fast::layer_norm(a, None, None, 1e-5)),
        ("attention", |a| {
            fast::scaled_dot_product_attention(a, a, a, 1.0, Mask::Causal)
        }),
        ("matmul", |a| a.matmul(&a.swap_axes(-1, -2)?)),
        ("quantize", |a| {
            Ok(Quantized::quantize(a, 32, 4, QuantMode::Affine)?.weight)
        }),
        ("concatenate", |a| concatenate_flat(&[a, a])),
        ("display", |a| {
            Ok({
                let _ = a.to_string();
                a.clone()
            })
        }),
        ("bernoulli", |a| {
            random::bernoulli(a, a.shape(), &Key::new(1)?)
        }),
    ];
    all.extend(with_arguments.map(|(name, f)| (name, Box::new(f) as Unary)));
    all
}

/// The functions of an array and integers.
fn numbered() -> Vec<(&'static str, Numbered)> {
    let mut all: Vec<(&str, Numbered)> = Vec::new();
    for operation in OPERATIONS {
        let calls: Vec<Numbered> = match operation.call {
            Call::One(_) | Call::Two(_) => Vec::new(),
            Call::Reduce(f) => vec![
                Box::new(move |a, n, _| one(f(a, n.into(), false))),
                Box::new(move |a, n, m| one(f(a, (&[n, m]).into(), true))),
            ],
            Call::Scan(f) => vec![
                Box::new(move |a, n, _| one(f(a, n, true, false))),
                Box::new(move |a, n, _| one(f(a, n, false, true))),
            ],
            Call::Axis(f) => vec![Box::new(move |a, n, _| one(f(a, n)))],
            Call::Numbers(f) => vec![Box::new(move |a, n, m| one(f(a, n, m)))],
            Call::Fourier(f) => vec![Box::new(move |a, n, m| one(f(a, Some(n), m)))],
            Call::Fourier2(f) => vec![Box::new(move |a, n, m| one(f(a, Some([n, 2]), [m, 0])))],
            Call::FourierN(f) => vec![Box::new(move |a, n, m| {
                one(f(a, Some(&[n]), (&[m]).into()))
            })],
            Call::Shift(f) => vec![Box::new(move |a, n, m| one(f(a, (&[n, m]).into())))],
        };
        all.extend(calls.into_iter().map(|call| (operation.name, call)));
    }
    all.extend(with_numbers());
    all
}

/// Functions of integers whose argument lists differ from those of the table above.
fn with_numbers() -> Vec<(&'static str, Numbered)> {
    type Call = fn(&Array, i32, i32) -> Result<Vec<Array>>;
    let all: [(&str, Call); 39] = [
        ("var", |a, n, m| one(a.var(n, false, m))),
        ("argmax", |a, n, _| one(a.argmax(n, true))),
        ("argmin", |a, n, _| one(a.argmin(n, false))),
        ("partition_flat", |a, n, _| one(a.partition_flat(n))),
        ("topk_flat", |a, n, _| one(a.topk_flat(n))),
        ("roll", |a, n, m| one(a.roll(n, m))),
        ("roll_axes", |a, n, m| one(a.roll_axes(&[n, m], &[0, 1]))),
        ("tile", |a, n, m| one(a.tile(&[n, m]))),
        ("pad", |a, n, m| one(a.pad(&[0], &[n], &[m], Pad::Edge))),
        ("pad axis", |a, n, m| {
            one(a.pad(&[n], &[1], &[m], Pad::Zero))
        }),
        (
            "pad_symmetric",
            |a, n, _| one(a.pad_symmetric(n, Pad::Zero)),
        ),
        ("unflatten", |a, n, m| one(a.unflatten(n, &[m, -1]))),
        ("reshape", |a, n, m| one(a.reshape(&[n, m]))),
        ("expand_dims", |a, n, m| one(a.expand_dims_axes(&[n, m]))),
        ("squeeze", |a, n, m| one(a.squeeze_axes(&[n, m]))),
        ("transpose", |a, n, m| one(a.transpose_axes(&[n, m]))),
        ("split", |a, n, m| a.split(n, m)),
        ("split_at", |a, n, m| a.split_at(&[n], m)),
        ("slice", |a, n, m| one(a.slice(&[n, n], &[m, m], &[1, -1]))),
        ("slice strides", |a, n, m| one(a.slice(&[0], &[n], &[m]))),
        ("diagonal", |a, n, m| one(a.diagonal(n, m, 0))),
        ("diag", |a, n, _| one(a.diag(n))),
        ("tril", |a, n, _| one(a.tril(n))),
        ("triu", |a, n, _| one(a.triu(n))),
        ("trace", |a, n, m| one(a.trace(n, 0, m, Dtype::Float32))),
        ("take_along_axis", |a, n, _| {
            one(a.take_along_axis(&a.astype(Dtype::Int32)?, n))
        }),
        ("as_strided", |a, n, m| {
            one(a.as_strided(&[n, 2], &[i64::from(m), i64::MAX], 1))
        }),
        ("broadcast_to", |a, n, m| one(a.broadcast_to(&[n, m, 1]))),
        ("round", |a, n, _| one(a.round(n))),
        ("tensordot", |a, n, m| one(a.tensordot_axes(a, &[n], &[m]))),
        ("norm", |a, n, m| {
            one(linalg::norm(a, Norm::P(f64::from(n)), m, true))
        }),
        ("number_of_elements", |a, n, m| {
            one(a.number_of_elements(&[n, m], true, Dtype::Float32))
        }),
        ("repeat_flat", |a, n, _| one(a.repeat_flat(n))),
        ("argpartition_flat", |a, n, _| one(a.argpartition_flat(n))),
        ("full", |a, n, m| one(full(&[n, m], a, Dtype::Float32))),
        ("arange", |_, n, m| {
            one(arange(0.0, f64::from(n), f64::from(m), Dtype::Int64))
        }),
        ("slice_update", |a, n, m| {
            one(a.slice_update(a, &[n], &[m], &[1]))
        }),
        ("gather_axis", |a, n, m| {
            one(a.gather_axis(&Array::scalar(n)?, m, &[1]))
        }),
        ("scatter_axis", |a, n, m| {
            one(a.scatter_axis(
                &Array::vector(&[n])?,
                &a.expand_dims(0)?,
                m,
                ScatterMode::Max,
            ))
        }),
    ];
    all.map(|(name, f)| (name, Box::new(f) as Numbered)).into()
}

#[test]
fn functions_of_one_array() {
    limited();
    for (name, f) in unary() {
        for shape in SHAPES {
            for dtype in Dtype::ALL {
                settle(name, one(f(&array(shape, dtype))));
            }
        }
    }
}

#[test]
fn functions_of_two_arrays() {
    limited();
    type Binary = fn(&Array, &Array) -> Result<Array>;
    let with_arguments: [(&str, Binary); 11] = [
        ("is_close", |a, b| a.is_close(b, 1e-5, 1e-8, true)),
        ("where", |a, b| where_(a, b, a)),
        ("tensordot", |a, b| a.tensordot(b, 1)),
        ("concatenate", |a, b| concatenate(&[a, b], 0)),
        ("stack", |a, b| stack(&[a, b], -1)),
        ("take_flat", |a, b| a.take_flat(b)),
        ("cross", |a, b| linalg::cross(a, b, -1)),
        ("einsum", |a, b| einsum("...i,...i->...i", &[a, b])),
        ("full_like", |a, b| a.full_like(b, a.dtype())),
        ("from_fp8", |a, b| {
            a.astype(Dtype::Uint8)?.from_fp8(b.dtype())
        }),
        ("depends", |a, b| {
            Ok(mlx_rs_core::depends(&[a], &[b])?.remove(0))
        }),
    ];
    // One type of each kind, and the widest type of each kind.
    let types = [
        Dtype::Bool,
        Dtype::Uint8,
        Dtype::Int32,
        Dtype::Int64,
        Dtype::Uint64,
        Dtype::Bfloat16,
        Dtype::Float32,
        Dtype::Complex64,
    ];
    let all = of_two().map(|(o, f)| (o.name, f));
    for (name, f) in all.chain(with_arguments) {
        for a in SHAPES {
            // Each shape is tested with half of the types. The next shape has the other half.
            for (i, d) in types.iter().enumerate().skip(a.len() % 2).step_by(2) {
                let mut results = Vec::new();
                for b in SHAPES {
                    let other = types[(i + a.len() + 3 * b.len()) % types.len()];
                    let a = array(a, *d);
                    results.extend(f(&a, &array(b, *d)));
                    results.extend(f(&a, &array(b, other)));
                }
                settle_all(name, results);
            }
        }
    }
}

#[test]
fn functions_with_numbers() {
    limited();
    let all = numbered();
    // Tests every operation with every shape, every type and every pair of numbers, but not all
    // combinations. All combinations would take many minutes on a small machine.
    let types = [Dtype::Float32, Dtype::Int8, Dtype::Complex64];
    for (i, (name, f)) in all.into_iter().enumerate() {
        for (j, shape) in SHAPES.into_iter().enumerate() {
            let a = array(shape, types[(i + j) % types.len()]);
            let mut results = Vec::new();
            for (k, n) in NUMBERS.into_iter().enumerate() {
                for m in NUMBERS.into_iter().skip((j + k) % 2).step_by(2) {
                    let call = catch_unwind(AssertUnwindSafe(|| f(&a, n, m)));
                    let call = call.unwrap_or_else(|_| panic!("{name} of {a:?}, {n}, {m}"));
                    results.extend(call.unwrap_or_default());
                }
            }
            settle_all(name, results);
        }
    }
}

#[test]
fn functions_that_make_arrays() {
    limited();
    let key = Key::new(3).unwrap();
    for n in NUMBERS {
        for m in NUMBERS {
            for dtype in [Dtype::Float32, Dtype::Int8, Dtype::Float64] {
                settle("zeros", one(zeros(&[n, m], dtype)));
                settle("eye", one(eye(n, 3, m, dtype)));
                settle("tri", one(tri(3, n, m, dtype)));
                if n < 100 {
                    settle("linspace", one(linspace(f64::from(m), f64::NAN, n, dtype)));
                }
            }
            settle("bits", one(random::bits(&[n, m], 4, &key)));
            settle(
                "normal",
                one(random::normal(0.0, 1.0, &[n, m], Dtype::Float32, &key)),
            );
        }
    }
    let x = array(&[3], Dtype::Int32);
    let empty = array(&[0], Dtype::Int32);
    settle("meshgrid", meshgrid(&[&x, &empty], true, GridIndexing::Ij));
    settle("meshgrid", meshgrid(&[], true, GridIndexing::Ij));
    settle("broadcast_arrays", broadcast_arrays(&[]));
    settle("broadcast_arrays", broadcast_arrays(&[&x, &empty]));
    settle("concatenate", one(concatenate(&[&x, &empty], 0)));
    settle("einsum", one(einsum("", &[])));
    settle("eig", two(linalg::eig(&array(&[1, 1], Dtype::Complex64))));
    settle("qr", two(linalg::qr(&array(&[1, 4], Dtype::Float32))));
}

fn number() -> impl Strategy<Value = i32> {
    prop_oneof![4 => -3i32..6, 1 => Just(0), 1 => Just(i32::MAX), 1 => Just(i32::MIN)]
}

fn small_shape(axes: std::ops::Range<usize>) -> impl Strategy<Value = Vec<i32>> {
    prop::collection::vec(0i32..4, axes)
}

fn any_dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn convolutions_of_any_geometry(
        x in small_shape(2..6), w in small_shape(2..6), stride in number(), padding in number(),
        dilation in number(), input_dilation in number(), output_padding in number(),
        groups in -1i32..4, flip in any::<bool>(), dtype in any_dtype(),
    ) {
        limited();
        let conv = Conv {
            stride: vec![stride], padding: vec![padding], dilation: vec![dilation],
            input_dilation: vec![input_dilation], output_padding: vec![output_padding], groups, flip,
        };
        let (x, w) = (array(&x, dtype), array(&w, dtype));
        settle("conv", one(x.conv(&w, &conv)));
        settle("conv_transpose", one(x.conv_transpose(&w, &conv)));
    }

    #[test]
    fn gathers_and_scatters_of_any_index(
        shape in small_shape(1..4), at in prop::collection::vec(number(), 0..4), axis in number(),
        sizes in small_shape(1..4), dtype in any_dtype(),
        kind in prop::sample::select(vec![Dtype::Int32, Dtype::Int64, Dtype::Uint8, Dtype::Uint64, Dtype::Float32]),
    ) {
        limited();
        let a = array(&shape, dtype);
        let i = Array::vector(&at).unwrap().astype(kind).unwrap();
        settle("take", one(a.take(&i, axis)));
        settle("take_clamped", one(a.take_clamped(&i, axis)));
        settle("take_flat", one(a.take_flat(&i)));
        settle("gather", one(a.gather(&[&i], &[axis], &sizes)));
        settle("slice_at", one(a.slice_at(&i, &[axis], &sizes)));
        settle("put_along_axis", one(a.put_along_axis(&i, &a, axis)));
        let mut updates = vec![at.len() as i32];
        updates.extend(&sizes);
        let updates = array(&updates, dtype);
        for mode in [ScatterMode::Replace, ScatterMode::Add, ScatterMode::Max] {
            settle("scatter", one(a.scatter(&[&i], &updates, &[axis], mode)));
        }
        settle("slice_update_at", one(a.slice_update_at(&array(&sizes, dtype), &i, &[axis])));
    }

    #[test]
    fn products_of_any_shape(a in small_shape(0..4), b in small_shape(0..4), i in prop::collection::vec(number(), 1..4), dtype in any_dtype()) {
        let (a, b) = (array(&a, dtype), array(&b, dtype));
        let i = Array::vector(&i).unwrap();
        settle("gather_mm", one(a.gather_mm(&b, None, &i, false)));
        settle("gather_mm", one(a.gather_mm(&b, &i, &i, true)));
        settle("segmented_mm", one(a.segmented_mm(&b, &i.reshape(&[-1, 1]).unwrap().tile(&[1, 2]).unwrap())));
        settle("block_masked_mm", one(a.block_masked_mm(&b, 32, None, None, None)));
        settle("addmm", one(a.addmm(&a, &b, 1.0, 2.0)));
    }

    #[test]
    fn attention_and_positions_of_any_shape(
        q in small_shape(2..5), k in small_shape(2..5), dims in number(), offset in number(),
        dtype in prop::sample::select(vec![Dtype::Float32, Dtype::Float16, Dtype::Int32]),
    ) {
        limited();
        let (q, k) = (array(&q, dtype), array(&k, dtype));
        for mask in [Mask::None, Mask::Causal, Mask::Array(&k)] {
            settle("attention", one(fast::scaled_dot_product_attention(&q, &k, &k, 1.0, mask)));
        }
        settle("rope", one(fast::rope(&q, dims, true, RopeBase::Theta(1e4), 1.0, offset)));
        let at = Array::vector(&[offset, offset]).unwrap();
        settle("rope_at", one(fast::rope_at(&q, dims, false, RopeBase::Freqs(&k), 1.0, &at)));
        settle("rms_norm", one(fast::rms_norm(&q, Some(&k), 1e-5)));
        settle("layer_norm", one(fast::layer_norm(&q, Some(&k), Some(&k), 1e-5)));
    }
}

/// After a failed evaluation, MLX frees arrays while their operations still write them. On a CPU,
/// gathered matrix multiplications support only `float32`, and MLX reports this only during
/// evaluation.
#[test]
fn a_failed_evaluation_frees_nothing_that_is_in_use() {
    limited();
    let stream = Stream::new(Device::cpu()).unwrap();
    let x = array(&[64, 64], Dtype::Float32);
    for round in 0..200 {
        let started = x.exp().unwrap().sin().unwrap().sort(-1).unwrap();
        let half = started
            .astype(Dtype::Float16)
            .unwrap()
            .expand_dims(0)
            .unwrap();
        let ids = Array::vector(&[0u32]).unwrap();
        let run = || {
            let product = half.gather_mm(&half, None, &ids, false)?;
            if round % 2 == 0 {
                product.eval()
            } else {
                eval([&product])
            }
        };
        let failed = if round % 3 == 0 {
            stream.scope(run)
        } else {
            Stream::default_of(Device::cpu()).unwrap().scope(run)
        };
        assert!(failed.unwrap_err().message().contains("float32"));
    }
    let sum = ones(&[8], Dtype::Float32).unwrap().sum(All, false).unwrap();
    assert_eq!(sum.item::<f32>().unwrap(), 8.0);
}

#[test]
fn eight_threads_at_once() {
    limited();
    let shared = array(&[16, 16], Dtype::Float32);
    let expected = shared.matmul(&shared).unwrap().sum(All, false).unwrap();
    let expected = expected.item::<f32>().unwrap();
    std::thread::scope(|scope| {
        for seed in 0..8u64 {
            let shared = &shared;
            scope.spawn(move || {
                let key = Key::new(seed).unwrap();
                for _ in 0..30 {
                    let noise = random::uniform(0.0, 1.0, &[16, 16], Dtype::Float32, &key).unwrap();
                    let sorted = noise.sort(-1).unwrap();
                    let spectrum = fft::rfft(&sorted, None, -1).unwrap();
                    let back = fft::irfft(&spectrum, Some(16), -1).unwrap();
                    assert!(back.all_close(&sorted, 1e-4, 1e-4).unwrap());
                    let spread = sorted
                        .matmul(&sorted.transpose().unwrap())
                        .and_then(|g| g.add(&eye(16, 16, 0, Dtype::Float32)?))
                        .unwrap();
                    let unit = linalg::inv(&spread).unwrap().matmul(&spread).unwrap();
                    let identity = eye(16, 16, 0, Dtype::Float32).unwrap();
                    assert!(unit.all_close(&identity, 1e-2, 1e-2).unwrap());
                    assert!(linalg::inv(&ones(&[2, 3], Dtype::Float32).unwrap()).is_err());
                    let sum = shared.matmul(shared).unwrap().sum(All, false).unwrap();
                    assert_eq!(sum.item::<f32>().unwrap(), expected);
                }
            });
        }
    });
}
