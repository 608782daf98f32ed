//! Tests operations that MLX computes wrongly, under `vmap`, in derivatives or alone. Random
//! programs (see `programs/`) found them. Small cases are compared with the operation on each
//! example.

use mlx_rs_core::fast::{self, RopeBase};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::transforms::{VmapAxes, grad, vmap};
use mlx_rs_core::{All, Array, Conv, Dtype, Result, ScatterMode, arange, array, f16, fft, stack};

fn count(shape: &[i32], dtype: Dtype) -> Array {
    let size: i32 = shape.iter().product();
    arange(0.0, f64::from(size), 1.0, Dtype::Float32)
        .and_then(|a| a.reshape(shape)?.astype(dtype))
        .unwrap()
}

fn numbers(a: &Array) -> Vec<f32> {
    if a.dtype() == Dtype::Complex64 {
        return [a.real().unwrap(), a.imag().unwrap()]
            .iter()
            .flat_map(numbers)
            .collect();
    }
    a.astype(Dtype::Float32).unwrap().to_vec::<f32>().unwrap()
}

type Function<'a> = dyn Fn(&[Array]) -> Result<Vec<Array>> + 'a;

/// Compares `f`, mapped over every choice of axes, with `f` on each of two examples. The second
/// example has the elements of the first in reverse.
fn maps(what: &str, f: &Function<'_>, args: &[Array]) {
    let choices: Vec<Vec<Option<i32>>> = args.iter().fold(vec![vec![]], |lists, a| {
        let each = [None].into_iter().chain((0..=a.ndim() as i32).map(Some));
        let each: Vec<Option<i32>> = each.collect();
        let with = |list: &Vec<Option<i32>>, axis| [list.as_slice(), &[axis]].concat();
        lists
            .iter()
            .flat_map(|list| {
                each.iter()
                    .map(|&axis| with(list, axis))
                    .collect::<Vec<_>>()
            })
            .collect()
    });
    for axes in choices {
        if axes.iter().all(Option::is_none) {
            continue;
        }
        let reversed = |a: &Array| {
            let flat = a.reshape(&[-1])?.slice(&[i32::MAX], &[i32::MIN], &[-1])?;
            flat.reshape(a.shape())
        };
        let other: Vec<Array> = args
            .iter()
            .zip(&axes)
            .map(|(a, axis)| {
                if axis.is_some() {
                    reversed(a).unwrap()
                } else {
                    a.clone()
                }
            })
            .collect();
        let batch: Vec<Array> = args
            .iter()
            .zip(&other)
            .zip(&axes)
            .map(|((a, b), axis)| {
                axis.map_or_else(|| a.clone(), |axis| stack(&[a, b], axis).unwrap())
            })
            .collect();
        let each = [f(args).unwrap(), f(&other).unwrap()];
        let got = vmap(f, VmapAxes::Each(axes.clone()), 0)(&batch).unwrap();
        for (i, got) in got.iter().enumerate() {
            let expected = stack(&[&each[0][i], &each[1][i]], 0).unwrap();
            assert_eq!(
                (got.shape(), got.dtype()),
                (expected.shape(), expected.dtype()),
                "{what} over {axes:?}"
            );
            let (got, expected) = (numbers(got), numbers(&expected));
            let near = got
                .iter()
                .zip(&expected)
                .all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(1.0));
            assert!(near, "{what} over {axes:?}: {got:?} against {expected:?}");
        }
    }
}

fn one(result: Result<Array>) -> Result<Vec<Array>> {
    result.map(|a| vec![a])
}

#[test]
fn integers_in_batches() {
    for dtype in [Dtype::Int32, Dtype::Uint8, Dtype::Bool] {
        let a = count(&[2, 3], dtype);
        let b = count(&[2, 3], Dtype::Int32)
            .remainder(&array!(3).unwrap())
            .unwrap()
            .astype(dtype)
            .unwrap();
        let pair = [a, b];
        maps("and", &|x| one(x[0].bitwise_and(&x[1])), &pair);
        maps("or", &|x| one(x[0].bitwise_or(&x[1])), &pair);
        maps("xor", &|x| one(x[0].bitwise_xor(&x[1])), &pair);
        maps("left", &|x| one(x[0].left_shift(&x[1])), &pair);
        maps("right", &|x| one(x[0].right_shift(&x[1])), &pair);
        maps(
            "operators",
            &|x| Ok(vec![&x[0] ^ &x[1], &x[0] & &x[1], &x[0] << &x[1]]),
            &pair,
        );
        maps("not equal", &|x| one(x[0].not_equal(&x[1])), &pair);
        maps("floor divide", &|x| one(x[0].floor_divide(&x[1])), &pair);
        maps(
            "divmod",
            &|x| x[0].divmod(&x[1]).map(|(q, r)| vec![q, r]),
            &pair,
        );
    }
    let wide = count(&[2, 2], Dtype::Int64);
    let divide = |x: &[Array]| one(x[0].floor_divide(&x[1]));
    assert!(vmap(divide, [Some(0), Some(0)], 0)(&[wide.clone(), wide]).is_err());
}

#[test]
fn orders_in_batches() {
    let a = count(&[3, 4], Dtype::Float32)
        .subtract(&array!(5.0).unwrap())
        .unwrap()
        .abs()
        .unwrap();
    for axis in [-1, 0, 1] {
        maps("sort", &|x| one(x[0].sort(axis)), std::slice::from_ref(&a));
        maps(
            "argsort",
            &|x| one(x[0].argsort(axis)),
            std::slice::from_ref(&a),
        );
        maps(
            "partition",
            &|x| one(x[0].partition(1, axis)?.sort(axis)),
            std::slice::from_ref(&a),
        );
        maps(
            "argpartition",
            &|x| {
                let order = x[0].argpartition(2, axis)?;
                one(x[0].take_along_axis(&order, axis)?.sort(axis))
            },
            std::slice::from_ref(&a),
        );
        maps(
            "topk",
            &|x| one(x[0].topk(2, axis)?.sort(axis)),
            std::slice::from_ref(&a),
        );
        maps(
            "median",
            &|x| one(x[0].median(axis, true)),
            std::slice::from_ref(&a),
        );
    }
    maps(
        "median",
        &|x| one(x[0].median(All, true)),
        std::slice::from_ref(&a),
    );
}

#[test]
fn shapes_and_types_in_batches() {
    let a = count(&[3, 4], Dtype::Float32);
    maps(
        "twice",
        &|x| Ok(vec![x[0].clone(), x[0].clone()]),
        std::slice::from_ref(&a),
    );
    maps(
        "twice",
        &|x| x[0].exp().map(|e| vec![e.clone(), e]),
        &[array!([0.1, 0.2]).unwrap()],
    );
    maps(
        "split",
        &|x| x[0].split_at(&[0, 0, 2], 0),
        std::slice::from_ref(&a),
    );
    maps(
        "expand",
        &|x| one(x[0].expand_dims_axes(&[0, 2, 4])),
        std::slice::from_ref(&a),
    );
    maps(
        "smaller",
        &|x| one(x[0].view(Dtype::Uint8)),
        std::slice::from_ref(&a),
    );
    let bytes = count(&[3, 4], Dtype::Uint16);
    maps("larger", &|x| one(x[0].view(Dtype::Uint32)), &[bytes]);
    maps(
        "rfft2",
        &|x| one(fft::rfft2(&x[0], None, [0, 1])),
        std::slice::from_ref(&a),
    );
    maps(
        "irfft2",
        &|x| one(fft::irfft2(&x[0], None, [0, 1])),
        std::slice::from_ref(&a),
    );
}

#[test]
fn places_in_batches() {
    let a = count(&[4, 3], Dtype::Float32);
    let (rows, new) = (array!([2, 0]).unwrap(), count(&[2, 1, 3], Dtype::Float32));
    for mode in [ScatterMode::Replace, ScatterMode::Add, ScatterMode::Max] {
        maps(
            "scatter",
            &|x| one(x[0].scatter(&[&x[1]], &x[2], &[0], mode)),
            &[a.clone(), rows.clone(), new.clone()],
        );
        let block = count(&[2, 3], Dtype::Float32);
        maps(
            "without indices",
            &|x| one(x[0].scatter(&[], &x[1], &[], mode)),
            &[a.clone(), block],
        );
    }
    let flat = count(&[4, 1, 1], Dtype::Float32);
    maps(
        "diagonal",
        &|x| one(x[0].transpose()?.diagonal(0, 0, 1)),
        std::slice::from_ref(&flat),
    );
    let columns = [count(&[1, 3, 4], Dtype::Float32)];
    maps(
        "take",
        &|x| one(x[0].transpose()?.take_clamped(&array!([0])?, 2)),
        &columns,
    );
    let start = array!([1, 1]).unwrap();
    let block = count(&[2, 2], Dtype::Float32);
    maps(
        "slice_at",
        &|x| one(x[0].slice_at(&x[1], &[0, 1], &[2, 2])),
        &[a.clone(), start.clone()],
    );
    maps(
        "slice_update_at",
        &|x| one(x[0].slice_update_at(&x[1], &x[2], &[0, 1])),
        &[a, block, start],
    );
}

#[test]
fn groups_in_batches() {
    let (x, w) = (
        count(&[1, 4, 4], Dtype::Float32),
        count(&[4, 2, 2], Dtype::Float32),
    );
    let conv = Conv {
        groups: 2,
        ..Conv::default()
    };
    maps("conv", &|a| one(a[0].conv(&a[1], &conv)), &[x, w]);
}

/// The derivative of the sum of `f` times weights `0, 1, 2, ..`, where the weights are
/// column-major.
fn slope(
    f: &'static (dyn Fn(&[Array]) -> Result<Array> + Sync),
    args: &[Array],
    by: usize,
) -> Vec<f32> {
    let total = move |x: &[Array]| {
        let y = f(x)?;
        let back: Vec<i32> = y.shape().iter().rev().copied().collect();
        let weights = count(y.shape(), Dtype::Float32)
            .transpose()?
            .contiguous()?
            .reshape(&back)?;
        one(y.multiply(&weights.transpose()?)?.sum(All, false))
    };
    numbers(&grad(total, &[by])(args).unwrap()[0])
}

#[test]
fn slopes() {
    let a = array!([3.0, 1.0, 4.0, 2.0, 0.0]).unwrap();
    let one = std::slice::from_ref(&a);
    assert_eq!(slope(&|x| x[0].sort(-1), one, 0), [3., 1., 4., 2., 0.]);
    assert_eq!(slope(&|x| x[0].sort_flat(), one, 0), [3., 1., 4., 2., 0.]);
    assert_eq!(
        slope(&|x| x[0].partition(2, 0)?.sort(0), one, 0),
        [3., 1., 4., 2., 0.]
    );
    assert_eq!(
        slope(&|x| x[0].topk(2, 0)?.sort(0), one, 0),
        [0., 0., 1., 0., 0.]
    );
    assert_eq!(
        slope(
            &|x| x[0].median(All, false)?.multiply(&array!([0.0, 1.0])?),
            one,
            0
        ),
        [0., 0., 0., 1., 0.]
    );
    let x = count(&[1, 1, 2, 4], Dtype::Float32);
    let turned = slope(
        &|x| fast::rope(&x[0], 2, true, RopeBase::Theta(100.0), 1.0, 0),
        std::slice::from_ref(&x),
        0,
    );
    // The first position is not rotated.
    assert_eq!(turned[..4], [0., 1., 2., 3.]);
    assert!((turned[4] - (4.0 * 1f32.cos() + 5.0 * 1f32.sin())).abs() < 1e-5);
    let (a, i) = (count(&[1, 2, 3], Dtype::Float32), array!(0).unwrap());
    let place = [a.clone(), i, count(&[1, 2, 2], Dtype::Float32)];
    let got = slope(
        &|x| x[0].scatter(&[&x[1]], &x[2], &[0], ScatterMode::Add),
        &place,
        2,
    );
    assert_eq!(got, [0., 1., 3., 4.]);
}

#[test]
fn values() {
    // Draws twice, one draw after the other, so that memory is reused.
    let flags =
        |seed| random::bernoulli(&array!(0.5).unwrap(), &[64], &Key::new(seed).unwrap()).unwrap();
    let (a, b) = (flags(1), flags(2));
    let expected = numbers(&a.not_equal(&b).unwrap());
    for _ in 0..4 {
        let inverted = |a: &Array| a.logical_not().unwrap();
        assert_eq!(
            numbers(&inverted(&a).bitwise_xor(&inverted(&b)).unwrap()),
            expected
        );
        assert_eq!(numbers(&(inverted(&a) ^ inverted(&b))), expected);
    }
    let (q, r) = array!([-3.5, 3.5])
        .unwrap()
        .divmod(&array!([2.0, -2.0]).unwrap())
        .unwrap();
    assert_eq!(
        (numbers(&q), numbers(&r)),
        (vec![-2., -2.], vec![0.5, -0.5])
    );
    // These arrays are column-major.
    let a = count(&[2, 3, 4], Dtype::Float32);
    let columns = count(&[4, 3, 2], Dtype::Float32).transpose().unwrap();
    let copy = Array::from_slice(&numbers(&columns), &[2, 3, 4]).unwrap();
    for axis in 0..3 {
        let key = Key::new(7).unwrap();
        let mixed = |a| numbers(&random::permutation(a, axis, &key).unwrap());
        assert_eq!(mixed(&columns), mixed(&copy));
        let other = (axis + 1) % 3;
        assert_eq!(
            numbers(&columns.diagonal(0, axis, other).unwrap()),
            numbers(&copy.diagonal(0, axis, other).unwrap())
        );
        assert_eq!(
            numbers(&columns.trace(1, axis, other, Dtype::Float32).unwrap()),
            numbers(&copy.trace(1, axis, other, Dtype::Float32).unwrap())
        );
    }
    assert_eq!(numbers(&a.diagonal(1, 1, 0).unwrap()), [12., 13., 14., 15.]);
    assert_eq!(
        numbers(&a.diagonal(-1, 1, 0).unwrap()),
        [4., 5., 6., 7., 20., 21., 22., 23.][..4]
            .to_vec()
            .iter()
            .zip([20., 21., 22., 23.])
            .flat_map(|(x, y)| [*x, y])
            .collect::<Vec<f32>>()
    );
    let (a, b) = (
        count(&[2, 4], Dtype::Float16),
        count(&[4, 2], Dtype::Float16),
    );
    let segments = array!([[0, 2], [2, 4]]).unwrap();
    let exact = |a: &Array| a.astype(Dtype::Float32).unwrap();
    let expected = exact(&a).segmented_mm(&exact(&b), &segments).unwrap();
    assert_eq!(
        numbers(&a.segmented_mm(&b, &segments).unwrap()),
        numbers(&expected)
    );
    for shape in [&[1, 7][..], &[1, 1], &[3, 1]] {
        let a = count(shape, Dtype::Float32);
        assert!(a.logsumexp(All, false).unwrap().shape().is_empty());
        assert!(a.logsumexp(&[0, 1], false).unwrap().shape().is_empty());
    }
    let strange: Vec<f16> = (0..40u16)
        .map(|i| {
            f16::from_f32(if i % 3 == 0 {
                f32::NAN
            } else {
                f32::from(40 - i)
            })
        })
        .collect();
    let sorted = numbers(&Array::vector(&strange).unwrap().sort(0).unwrap());
    assert!(
        sorted[..26].windows(2).all(|w| w[0] < w[1]) && sorted[26..].iter().all(|v| v.is_nan())
    );
    assert_eq!(
        array!([1_088_718_485])
            .unwrap()
            .round(1)
            .unwrap()
            .to_vec::<i32>()
            .unwrap(),
        [1_088_718_485]
    );
    let rows = count(&[3, 3, 1, 1], Dtype::Float32);
    assert_eq!(rows.logsumexp(&[2, 3], false).unwrap().shape(), [3, 3]);
    let zeros = array!([[-0.0, 0.0], [-0.0, 1.0]]).unwrap();
    for dtype in [Dtype::Float16, Dtype::Float32, Dtype::Float64] {
        let zeros = zeros.astype(dtype).unwrap();
        assert_eq!(
            zeros.any(1, false).unwrap().to_vec::<bool>().unwrap(),
            [false, true]
        );
        assert_eq!(
            zeros.all(0, false).unwrap().to_vec::<bool>().unwrap(),
            [false, false]
        );
    }
}
