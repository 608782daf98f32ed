//! Tests arrays with uncommon layouts: reversed, column-major, broadcast, or with an arbitrary
//! stride on an axis of one element. With these, MLX's CPU kernels access the wrong memory, abort
//! the process, or reorder elements.

mod views;

use mlx_rs_core::transforms::{grad, vmap};
use mlx_rs_core::{
    All, Array, Dtype, Pad, Result, ScatterMode, arange, linalg, random, where_, zeros,
};

/// `0, 1, 2, ..` in this shape.
fn count(shape: &[i32]) -> Array {
    let size: i32 = shape.iter().product();
    arange(0.0, f64::from(size), 1.0, Dtype::Float32)
        .and_then(|a| a.reshape(shape))
        .unwrap()
}

fn reversed(a: &Array) -> Array {
    let n = a.ndim();
    a.slice(&vec![i32::MAX; n], &vec![i32::MIN; n], &vec![-1; n])
        .unwrap()
}

/// A copy with the same values, row-major.
fn copied(a: &Array) -> Array {
    Array::from_slice(&a.to_vec::<f32>().unwrap(), a.shape()).unwrap()
}

fn same(got: &Array, expected: &Array) {
    assert_eq!(got.shape(), expected.shape());
    assert_eq!(
        got.to_vec::<f32>().unwrap(),
        expected.to_vec::<f32>().unwrap()
    );
}

fn is(got: Result<Array>, expected: &[f32]) {
    assert_eq!(got.unwrap().to_vec::<f32>().unwrap(), expected);
}

type Scan = fn(&Array, i32, bool, bool) -> Result<Array>;

/// MLX divides by the stride of the axis, which is zero in these arrays.
#[test]
fn scans_of_one_element() {
    let scans: [(Scan, f32); 5] = [
        (Array::cumsum, 0.0),
        (Array::cumprod, 1.0),
        (Array::cummax, f32::NEG_INFINITY),
        (Array::cummin, f32::INFINITY),
        (Array::logcumsumexp, f32::NEG_INFINITY),
    ];
    let two = Array::scalar(2.0f32).unwrap();
    let vector = two.broadcast_to(&[1]).unwrap();
    let sum = vector.add(&two).unwrap().subtract(&two).unwrap();
    let backwards = reversed(&count(&[3])).slice_axis(0, 0, 1).unwrap();
    let column = count(&[3]).slice_axis(0, 2, 3).unwrap();
    for (scan, none) in scans {
        for a in [&vector, &sum, &backwards, &column] {
            for reverse in [false, true] {
                is(scan(a, 0, reverse, true), &[2.0]);
                is(scan(a, 0, reverse, false), &[none]);
            }
        }
        let matrix = count(&[1, 3]).transpose().unwrap();
        is(scan(&matrix, 1, false, true), &[0.0, 1.0, 2.0]);
        is(scan(&matrix, 1, false, false), &[none; 3]);
        let singular = linalg::singular_values(&count(&[3, 1])).unwrap();
        assert_eq!(scan(&singular, -1, false, true).unwrap().size(), 1);
        let total = move |x: &[Array]| -> Result<Vec<Array>> {
            Ok(vec![scan(&x[0], 0, false, true)?.sum(All, false)?])
        };
        is(
            Ok(grad(total, &[0])(std::slice::from_ref(&vector))
                .unwrap()
                .remove(0)),
            &[1.0],
        );
        let mapped =
            move |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![scan(&x[0], 0, false, true)?]) };
        let rows = two.broadcast_to(&[3, 1]).unwrap();
        is(
            Ok(vmap(mapped, [Some(0)], 0)(&[rows]).unwrap().remove(0)),
            &[2.0; 3],
        );
    }
    let mask = Array::scalar(true).unwrap().broadcast_to(&[1]).unwrap();
    is(vector.masked_scatter(&mask, &count(&[2])), &[0.0]);
}

#[test]
fn scans_of_one_element_of_every_type() {
    use Dtype::{Bfloat16, Bool, Float16, Float32, Int8, Int32, Uint8, Uint64};
    for dtype in [Bool, Uint8, Uint64, Int8, Int32, Float16, Bfloat16, Float32] {
        let two = Array::from_slice(&[1.0f32, 1.0], &[2]).unwrap();
        let two = two.astype(dtype).unwrap();
        let one = two.slice_axis(0, 0, 1).unwrap();
        for scan in [Array::cumsum, Array::cumprod, Array::cummax, Array::cummin] {
            for inclusive in [false, true] {
                // The result must equal the first element of a scan over a longer axis.
                let expected = scan(&two, 0, false, inclusive).unwrap();
                let got = scan(&one, 0, false, inclusive).unwrap();
                assert_eq!(got.dtype(), expected.dtype());
                let as_f32 = |a: &Array| a.astype(Float32).unwrap().to_vec::<f32>().unwrap();
                assert_eq!(as_f32(&got), as_f32(&expected)[..1], "{dtype} {inclusive}");
            }
        }
    }
}

/// If all axes of a part are reversed, MLX treats the part as a scalar and reads one element.
#[test]
fn parts_of_reversed_arrays() {
    for shape in [&[8][..], &[4, 6], &[2, 4, 6]] {
        let a = reversed(&count(shape));
        let reference = copied(&a);
        for axis in 0..shape.len() as i32 {
            for parts in [1, 2, shape[axis as usize]] {
                let got = a.split(parts, axis).unwrap();
                for (got, expected) in got.iter().zip(reference.split(parts, axis).unwrap()) {
                    same(&got.square().unwrap(), &expected.square().unwrap());
                    same(&got.add(got).unwrap(), &expected.add(&expected).unwrap());
                }
            }
            let got = a.split_at(&[1, 2], axis).unwrap();
            for (got, expected) in got.iter().zip(reference.split_at(&[1, 2], axis).unwrap()) {
                same(&got.abs().unwrap(), &expected);
            }
        }
    }
    let (a, b) = (
        reversed(&count(&[5, 3])),
        count(&[5, 3]).add(&Array::scalar(1.0f32).unwrap()).unwrap(),
    );
    let crossed = linalg::cross(&a, &b, -1).unwrap();
    same(&crossed, &linalg::cross(&copied(&a), &b, -1).unwrap());
}

/// MLX alone writes as many blocks as the array has space for, instead of one.
#[test]
fn slices_at_computed_places_write_nowhere_else() {
    for shape in [
        &[5, 6][..],
        &[4, 5, 6],
        &[4, 4, 4, 4],
        &[3, 4, 3, 4, 3],
        &[2, 1, 3, 2, 1, 3],
    ] {
        let a = count(shape);
        let axes: Vec<i32> = (0..shape.len() as i32).collect();
        let sizes: Vec<i32> = shape.iter().map(|&n| (n / 2).max(1)).collect();
        let from: Vec<i32> = shape.iter().map(|&n| i32::from(n > 1)).collect();
        let stop: Vec<i32> = from.iter().zip(&sizes).map(|(f, s)| f + s).collect();
        let start = Array::vector(&from).unwrap();
        let expected = a.slice(&from, &stop, &vec![1; shape.len()]).unwrap();
        for _ in 0..20 {
            same(&a.slice_at(&start, &axes, &sizes).unwrap(), &expected);
        }
        same(
            &a.transpose()
                .unwrap()
                .slice_at(
                    &start.slice_axis(0, 0, 0).unwrap(),
                    &[],
                    &vec![1; shape.len()],
                )
                .unwrap(),
            &zeros(&vec![1; shape.len()], Dtype::Float32).unwrap(),
        );
        // In MLX, the gradient of a slice update uses a slice, and the gradient of a slice uses an
        // update.
        let weights = count(shape);
        let (factors, at, names, lengths) =
            (weights.clone(), start.clone(), axes.clone(), sizes.clone());
        let update = move |x: &[Array]| -> Result<Vec<Array>> {
            let all = x[0].slice_update_at(&x[1], &at, &names)?;
            let part = all.slice_at(&at, &names, &lengths)?;
            Ok(vec![
                all.multiply(&factors)?
                    .sum(All, false)?
                    .add(&part.sum(All, false)?)?,
            ])
        };
        let derived = grad(update, &[0, 1])(&[a.clone(), count(&sizes)]).unwrap();
        let one = Array::scalar(1.0f32).unwrap();
        let inner = weights.slice(&from, &stop, &vec![1; shape.len()]).unwrap();
        same(&derived[1], &inner.add(&one).unwrap());
        let none = zeros(&sizes, Dtype::Float32).unwrap();
        let outer = weights.slice_update(&none, &from, &stop, &vec![1; shape.len()]);
        same(&derived[0], &outer.unwrap());
    }
}

/// An axis of one element may have any stride. MLX uses that stride to step through the bytes.
#[test]
fn views_as_smaller_types() {
    let bytes = |a: &Array| a.view(Dtype::Uint8).unwrap();
    let scalar = Array::scalar(1.5f32).unwrap();
    let cases = [
        scalar.broadcast_to(&[1]).unwrap(),
        count(&[1, 3]).transpose().unwrap(),
        count(&[1, 3, 2]).transpose().unwrap(),
        count(&[3, 2]).slice_axis(1, 1, 2).unwrap(),
        reversed(&count(&[3, 1])),
        scalar.broadcast_to(&[3, 1]).unwrap(),
        count(&[3, 4]).transpose().unwrap(),
    ];
    for a in cases {
        let (got, expected) = (bytes(&a), bytes(&copied(&a)));
        assert_eq!(got.shape(), expected.shape());
        let as_is = |a: &Array| a.to_vec::<u8>().unwrap();
        assert_eq!(as_is(&got), as_is(&expected));
        let more = |a: &Array| as_is(&a.slice_axis(-1, 1, 3).unwrap());
        assert_eq!(more(&got), more(&expected));
    }
}

/// MLX returns the blocks of a column-major array in memory order.
#[test]
fn blocks_of_column_major_arrays() {
    let a = count(&[5, 2, 3]).transpose().unwrap();
    let i = Array::vector(&[1, 0]).unwrap();
    for axis in 0..3 {
        let reference = copied(&a);
        same(
            &a.take(&i, axis).unwrap(),
            &reference.take(&i, axis).unwrap(),
        );
        same(
            &a.take_clamped(&i, axis).unwrap(),
            &reference.take(&i, axis).unwrap(),
        );
        let mut sizes = a.shape().to_vec();
        sizes[axis as usize] = 1;
        same(
            &a.gather(&[&i], &[axis], &sizes).unwrap(),
            &reference.gather(&[&i], &[axis], &sizes).unwrap(),
        );
        same(
            &a.scatter(
                &[&i],
                &reference.gather(&[&i], &[axis], &sizes).unwrap(),
                &[axis],
                ScatterMode::Replace,
            )
            .unwrap(),
            &reference,
        );
    }
    same(
        &a.gather(&[], &[], &[3, 2, 4]).unwrap(),
        &copied(&a).slice_axis(2, 0, 4).unwrap(),
    );
    let single = count(&[4, 2, 1]).transpose().unwrap();
    let zero = Array::vector(&[0]).unwrap();
    same(
        &single.take(&zero, 0).unwrap(),
        &copied(&single).take(&zero, 0).unwrap(),
    );
}

/// MLX keeps the column-major flag of an array after its axes are split, which makes the flag
/// wrong.
#[test]
fn column_major_arrays_with_cut_axes() {
    let a = count(&[3, 4]).transpose().unwrap();
    let b = count(&[3, 2, 2]).transpose().unwrap();
    for cut in [
        a.reshape(&[2, 2, 3]).unwrap(),
        a.unflatten(0, &[2, 2]).unwrap(),
    ] {
        same(
            &cut.add(&b).unwrap(),
            &copied(&cut).add(&copied(&b)).unwrap(),
        );
        let mask = b.greater(&cut).unwrap();
        let chosen = where_(&mask, &cut, &b).unwrap();
        let plain = copied(&b).greater(&copied(&cut)).unwrap();
        same(
            &chosen,
            &where_(&plain, &copied(&cut), &copied(&b)).unwrap(),
        );
    }
}

#[test]
fn windows_of_vectors_with_gaps() {
    let a = count(&[8]).slice(&[0], &[8], &[2]).unwrap();
    is(
        a.as_strided(&[3, 2], &[1, 1], 0),
        &[0.0, 2.0, 2.0, 4.0, 4.0, 6.0],
    );
}

/// MLX masks the one copy that broadcast batches share. For reversed batches it writes before the
/// copy. MLX 0.30.6 also sums blocks with the length of the stride, which exceeds the result, and
/// writes beyond it.
#[test]
fn sums_of_overlapping_windows() {
    let a = count(&[9]);
    // The shape, the strides and the axis.
    type Window<'a> = (&'a [i32], &'a [i64], i32);
    let windows: [Window<'_>; 6] = [
        (&[2, 3], &[2, 1], 0),
        (&[4, 5], &[1, 1], 0),
        (&[4, 5], &[1, 1], 1),
        (&[2, 2, 3], &[1, 2, 1], 1),
        (&[3, 2, 2], &[0, 2, 3], 1),
        (&[2, 3], &[-2, 1], 0),
    ];
    for (shape, strides, axis) in windows {
        let offset = if strides[0] < 0 { 2 } else { 0 };
        for dtype in [Dtype::Float32, Dtype::Float16, Dtype::Int8] {
            let view = || a.astype(dtype).unwrap().as_strided(shape, strides, offset);
            let values = view().unwrap().astype(Dtype::Float32).unwrap();
            let fresh = copied(&values).astype(dtype).unwrap();
            type Reduce = fn(&Array, i32) -> Result<Array>;
            let all: [Reduce; 6] = [
                |a, axis| a.sum(axis, true),
                |a, axis| a.prod(axis, true),
                |a, axis| a.max(axis, true),
                |a, axis| a.std(axis, true, 0),
                |a, axis| a.argmax(axis, true),
                |a, axis| a.cumsum(axis, false, true),
            ];
            for reduce in all {
                // The test is repeated, because memory beyond the result may belong to the heap by
                // chance.
                for _ in 0..20 {
                    let got = reduce(&view().unwrap(), axis).unwrap();
                    got.eval().unwrap();
                    let expected = reduce(&fresh, axis).unwrap();
                    assert!(
                        got.array_equal(&expected).unwrap(),
                        "{shape:?} {strides:?} {dtype}"
                    );
                }
            }
        }
    }
}

/// MLX 0.30.6 reads doubles as if they were float32.
#[test]
fn doubles_as_eight_bit_floats() {
    let a = count(&[33])
        .subtract(&Array::scalar(9.0f32).unwrap())
        .unwrap();
    let expected = a.to_fp8().unwrap().to_vec::<u8>().unwrap();
    let doubles = a.astype(Dtype::Float64).unwrap();
    assert_eq!(doubles.to_fp8().unwrap().to_vec::<u8>().unwrap(), expected);
}

#[test]
fn masked_products_of_batches() {
    let random = |shape: &[i32], seed| {
        random::normal(
            0.0,
            1.0,
            shape,
            Dtype::Float32,
            &random::Key::new(seed).unwrap(),
        )
        .unwrap()
    };
    let a = random(&[3, 64, 64], 1);
    let mask = |seed| {
        random(&[3, 2, 2], seed)
            .greater(&Array::scalar(0.0f32).unwrap())
            .unwrap()
    };
    let wide = |mask: &Array| {
        mask.repeat(32, -1)
            .unwrap()
            .repeat(32, -2)
            .unwrap()
            .astype(Dtype::Float32)
            .unwrap()
    };
    let (out, left, right) = (mask(2), mask(3), mask(4));
    for b in [
        random(&[64, 64], 5).broadcast_to(&[3, 64, 64]).unwrap(),
        reversed(&random(&[3, 64, 64], 6)),
        random(&[3, 64, 64], 7)
            .slice(&[i32::MAX, 0, 0], &[i32::MIN, 64, 64], &[-1, 1, 1])
            .unwrap(),
    ] {
        for factors in [false, true] {
            let of = |mask: &Array| {
                if factors {
                    mask.astype(Dtype::Float32).unwrap()
                } else {
                    mask.clone()
                }
            };
            let got = a
                .block_masked_mm(&b, 32, Some(&of(&out)), Some(&of(&left)), Some(&of(&right)))
                .unwrap();
            let expected = copied(&a)
                .multiply(&wide(&left))
                .unwrap()
                .matmul(&copied(&b).multiply(&wide(&right)).unwrap())
                .unwrap();
            let expected = expected.multiply(&wide(&out)).unwrap();
            assert!(got.all_close(&expected, 1e-4, 1e-4).unwrap());
        }
    }
}

/// For a slice of one element, MLX ignores the step, but still uses an end computed for that step.
#[test]
fn derivatives_of_slices_of_one_element() {
    let x = count(&[5]);
    for (start, stop, step, at) in [
        (0, 3, 5, 0),
        (2, 1, -1, 2),
        (4, i32::MIN, -9, 4),
        (1, 4, 3, 1),
        (3, 5, 2, 3),
    ] {
        let take = move |x: &[Array]| -> Result<Vec<Array>> {
            Ok(vec![x[0].slice(&[start], &[stop], &[step])?])
        };
        let sum =
            move |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![take(x)?[0].sum(All, false)?]) };
        let mut expected = [0.0; 5];
        expected[at] = 1.0;
        is(
            Ok(grad(sum, &[0])(std::slice::from_ref(&x)).unwrap().remove(0)),
            &expected,
        );
        let mapped = vmap(take, [Some(0)], 0)(&[x.broadcast_to(&[2, 5]).unwrap()]).unwrap();
        assert_eq!(mapped[0].shape(), [2, 1]);
        is(Ok(mapped[0].clone()), &[at as f32; 2]);
        let put = move |x: &[Array]| -> Result<Vec<Array>> {
            let put = x[0].slice_update(&x[1], &[start], &[stop], &[step])?;
            Ok(vec![put.multiply(&count(&[5]))?.sum(All, false)?])
        };
        let derived = grad(put, &[0, 1])(&[x.clone(), count(&[1])]).unwrap();
        let mut outer: Vec<f32> = (0..5u8).map(f32::from).collect();
        outer[at] = 0.0;
        is(Ok(derived[0].clone()), &outer);
        is(Ok(derived[1].clone()), &[at as f32]);
    }
}

/// MLX's own padding fails under `vmap`.
#[test]
fn paddings_can_be_mapped_and_derived() {
    let x = count(&[2, 3]);
    let seven = Array::scalar(7.0f32).unwrap();
    let pad = |x: &[Array]| -> Result<Vec<Array>> {
        Ok(vec![x[0].pad(&[0], &[1], &[2], Pad::Value(&x[1]))?])
    };
    let mapped = vmap(pad, [Some(0), None], 0)(&[x.clone(), seven.clone()]).unwrap();
    is(
        Ok(mapped[0].clone()),
        &[7., 0., 1., 2., 7., 7., 7., 3., 4., 5., 7., 7.],
    );
    let total = |x: &[Array]| -> Result<Vec<Array>> {
        let padded = x[0].pad(&[1], &[1], &[2], Pad::Value(&x[1]))?;
        Ok(vec![padded.multiply(&count(&[2, 6]))?.sum(All, false)?])
    };
    let derived = grad(total, &[0, 1])(&[x, seven]).unwrap();
    is(Ok(derived[0].clone()), &[1., 2., 3., 7., 8., 9.]);
    is(Ok(derived[1].clone()), &[36.0]);
    is(count(&[2]).pad_symmetric(1, Pad::Zero), &[0., 0., 1., 0.]);
    is(count(&[0]).pad(&[0], &[1], &[1], Pad::Zero), &[0., 0.]);
}

/// In gradients, MLX treats blocks of several elements as single elements.
#[test]
fn derivatives_of_scattered_blocks() {
    let a = count(&[4, 5, 3]);
    let rows = Array::vector(&[0, 2]).unwrap();
    let columns = Array::vector(&[3, 1]).unwrap();
    let updates = count(&[2, 2, 2, 3]).negative().unwrap();
    let axes = [1, 0];
    let f = {
        let weights = a.clone();
        let (rows, columns) = (rows.clone(), columns.clone());
        move |x: &[Array]| -> Result<Vec<Array>> {
            let put = x[0].scatter(&[&columns, &rows], &x[1], &axes, ScatterMode::Replace)?;
            let got = x[0].gather(&[&columns, &rows], &axes, &[2, 2, 3])?;
            let sum = put.multiply(&weights)?.sum(All, false)?;
            Ok(vec![sum.add(&got.square()?.sum(All, false)?)?])
        }
    };
    let derived = grad(f, &[0, 1])(&[a.clone(), updates.clone()]).unwrap();
    let to_vec = |a: &Array| a.to_vec::<f32>().unwrap();
    let (values, mut outer) = (to_vec(&a), to_vec(&a));
    let mut put = values.clone();
    let (mut blocks, mut inner) = (Vec::new(), Vec::new());
    for (row, column) in [(0, 3), (2, 1)] {
        for (i, j, k) in
            (0..2).flat_map(|i| (0..2).flat_map(move |j| (0..3).map(move |k| (i, j, k))))
        {
            let at = ((row + i) * 5 + column + j) * 3 + k;
            put[at] = -(blocks.len() as f32);
            blocks.push(values[at]);
            inner.push(values[at]);
            outer[at] = 2.0 * values[at];
        }
    }
    is(a.gather(&[&columns, &rows], &axes, &[2, 2, 3]), &blocks);
    is(
        a.scatter(&[&columns, &rows], &updates, &axes, ScatterMode::Replace),
        &put,
    );
    is(Ok(derived[0].clone()), &outer);
    is(Ok(derived[1].clone()), &inner);
    let total = |x: &[Array]| -> Result<Vec<Array>> {
        Ok(vec![
            mlx_rs_core::full(&[2, 3], &x[0], Dtype::Float32)?.sum(All, false)?,
        ])
    };
    let seven = Array::scalar(7.0f32).unwrap();
    is(Ok(grad(total, &[0])(&[seven]).unwrap().remove(0)), &[6.0]);
}
