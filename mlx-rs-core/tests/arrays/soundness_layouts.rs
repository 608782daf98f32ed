//! Tests arrays with uncommon layouts: reversed, column-major, broadcast, or with an arbitrary
//! stride on an axis of one element. With these, MLX's CPU kernels access the wrong memory, abort
//! the process, or reorder elements.

use mlx_rs_core::cpu::DenseMatrix;
use mlx_rs_core::transforms::{compile, grad, vmap};
use mlx_rs_core::{
    All, Array, Device, Dtype, Element, Pad, Result, ScatterMode, Stream, arange, fast, linalg,
    random, where_, zeros,
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

/// MLX drops an unused step, but not the end that belongs to it.
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

/// Runs `work`, and ends the process if it takes longer than a minute. An ordinary exit would wait
/// for MLX's computation.
fn ends(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = std::sync::mpsc::channel();
    let work = std::thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    let limit = std::time::Duration::from_secs(60);
    if ended.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        eprintln!("no end in {limit:?}");
        std::process::abort();
    }
    work.join().unwrap();
}

/// For some empty views, MLX counts elements down from zero and does not end.
#[test]
fn empty_views_come_to_an_end() {
    ends(|| {
        for shape in [&[0, 3, 4][..], &[2, 0], &[0, 1, 2], &[0]] {
            let a = zeros(shape, Dtype::Float16).unwrap().transpose().unwrap();
            let last = a.shape()[a.ndim() - 1];
            let weight = zeros(&[last], Dtype::Float16).unwrap();
            let results = [
                fast::rms_norm(&a, Some(&weight), 1e-5),
                fast::rms_norm(&a, None, 1e-5),
                fast::layer_norm(&a, Some(&weight), Some(&weight), 1e-5),
                linalg::norm(&a, linalg::Norm::L2, All, false),
                linalg::norm(&a, linalg::Norm::L2, 0, false),
                a.softmax(-1, true),
                a.logsumexp(-1, true),
                a.mean(All, false),
                a.var(All, false, 0),
            ];
            for result in results {
                let Ok(result) = result else { continue };
                result.eval().unwrap();
            }
            assert!(a.array_equal(&a).unwrap());
            assert!(a.all_close(&a, 1e-3, 1e-3).unwrap());
        }
    });
}

/// For some empty views, MLX's reductions read lengths from uninitialized stack memory.
#[test]
fn empty_views_add_up_to_nothing() {
    ends(|| {
        let large = zeros(&[16, 3, 64], Dtype::Float32).unwrap();
        let large = large.add(&Array::scalar(1.0f32).unwrap()).unwrap();
        let large = large.transpose_axes(&[1, 2, 0]).unwrap();
        let empty = zeros(&[2, 0], Dtype::Float32).unwrap();
        let x = Array::vector(&[1.0f32, 2.0]).unwrap();
        for _ in 0..20 {
            for axes in [&[1][..], &[0, 1], &[2, 0]] {
                large.sum(axes, false).unwrap().eval().unwrap();
                let a = empty.transpose().unwrap();
                is(linalg::norm(&a, linalg::Norm::L2, 0, false), &[0.0, 0.0]);
                large.sum(axes, false).unwrap().eval().unwrap();
                is(
                    linalg::norm(&a, linalg::Norm::P(1.0), 0, false),
                    &[0.0, 0.0],
                );
                large.sum(axes, false).unwrap().eval().unwrap();
                assert!(a.array_equal(&a.negative().unwrap()).unwrap());
                large.sum(axes, false).unwrap().eval().unwrap();
                assert!(a.all_close(&x, 0.0, 0.0).unwrap());
                // The gradient of a broadcast is a sum.
                for wide in [
                    |x: &Array| x.broadcast_to(&[0, 2]),
                    |x: &Array| x.add(&zeros(&[0, 2], Dtype::Float32)?),
                ] {
                    large.sum(axes, false).unwrap().eval().unwrap();
                    let slope = grad(
                        move |x: &[Array]| -> Result<Vec<Array>> {
                            let turned = wide(&x[0])?.transpose()?;
                            let squares = x[0].square()?.sum(All, false)?;
                            Ok(vec![turned.square()?.sum(All, false)?.add(&squares)?])
                        },
                        &[0],
                    )(std::slice::from_ref(&x));
                    is(Ok(slope.unwrap().remove(0)), &[2.0, 4.0]);
                }
            }
        }
    });
}

/// Empty arguments, their gradients and their batches keep their shapes.
#[test]
fn shapes_of_nothing() {
    let x = zeros(&[3, 0], Dtype::Float16).unwrap().transpose().unwrap();
    let total =
        |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].transpose()?.exp()?.sum(All, false)?]) };
    let slope = grad(total, &[0])(std::slice::from_ref(&x))
        .unwrap()
        .remove(0);
    assert_eq!(
        (slope.shape(), slope.dtype()),
        (&[0, 3][..], Dtype::Float16)
    );
    slope.eval().unwrap();
    let mut rows = vmap(
        |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].exp()?, x[0].sum(All, false)?]) },
        0,
        0,
    );
    let of_rows = rows(std::slice::from_ref(&x)).unwrap();
    assert_eq!(
        (of_rows[0].shape(), of_rows[1].shape()),
        (&[0, 3][..], &[0][..])
    );
    let columns = x.transpose().unwrap();
    let of_columns = rows(std::slice::from_ref(&columns)).unwrap();
    assert_eq!(of_columns[0].shape(), [3, 0]);
    is(of_columns[1].astype(Dtype::Float32), &[0.0; 3]);
    let compiled = mlx_rs_core::transforms::compile(total);
    is(
        compiled.call(&[x]).unwrap()[0].astype(Dtype::Float32),
        &[0.0],
    );
}

/// Views bytes at every offset as every wider type. Typed slices must be aligned and have the right
/// values.
#[test]
fn views_as_wider_types_begin_where_the_type_can() -> Result<()> {
    fn check<T: Element>(bytes: &[u8], a: &Array) -> Result<()> {
        assert!(a.data::<T>()?.as_ptr().is_aligned());
        assert_eq!(&a.bytes()?[..], bytes, "{a:?}");
        Ok(())
    }
    let bytes: Vec<u8> = (0..64u8).map(|i| i.wrapping_mul(37) & 0x3f).collect();
    let bytes_array = Array::from_slice(&bytes, &[64])?;
    for from in 0..9 {
        let part = &bytes[from as usize..from as usize + 32];
        let views = [
            // In order: a lazy slice of data, a lazy slice of a computation, an evaluated slice, a
            // slice of a slice, a donated buffer, and a slice of a Rust vector.
            bytes_array.slice_axis(0, from, from + 32)?,
            bytes_array
                .maximum(&bytes_array)?
                .slice_axis(0, from, from + 32)?,
            {
                let a = bytes_array.slice_axis(0, from, from + 32)?;
                a.eval()?;
                a
            },
            bytes_array.slice_axis(0, from, 64)?.slice_axis(0, 0, 32)?,
            {
                let minimum = bytes_array.minimum(&bytes_array)?;
                minimum.slice_axis(0, from, from + 32)?.abs()?
            },
            Array::from_vec(bytes.clone(), &[64])?.slice_axis(0, from, from + 32)?,
        ];
        for a in &views {
            check::<u16>(part, &a.view(Dtype::Uint16)?)?;
            check::<u32>(part, &a.view(Dtype::Uint32)?)?;
            check::<f32>(part, &a.view(Dtype::Float32)?)?;
            check::<u64>(part, &a.view(Dtype::Uint64)?)?;
            check::<f64>(part, &a.view(Dtype::Float64)?)?;
            check::<u64>(part, &a.view(Dtype::Complex64)?.view(Dtype::Uint64)?)?;
            // Two rows: contiguous, transposed and back, flattened, and split.
            let rows = a.reshape(&[2, 16])?.view(Dtype::Uint32)?;
            check::<u32>(part, &rows.contiguous()?)?;
            check::<u32>(part, &rows.transpose()?.transpose()?)?;
            check::<u32>(part, &rows.flatten(0, -1)?)?;
            let halves = rows.split(2, 0)?;
            check::<u32>(&part[16..], &halves[1])?;
            // Values computed from a view of wider elements.
            let sum = rows.add(&rows)?.to_vec::<u32>()?;
            let words = part
                .chunks(4)
                .map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
            assert_eq!(sum, words.map(|w| w.wrapping_add(w)).collect::<Vec<_>>());
        }
    }
    // `vmap` over rows that begin at unaligned addresses.
    let rows = bytes_array.as_strided(&[3, 8], &[9, 1], 1)?;
    let got = vmap(|x: &[Array]| Ok(vec![x[0].view(Dtype::Uint32)?]), 0, 0)(&[rows])?;
    let expected: Vec<u8> = [1, 10, 19]
        .iter()
        .flat_map(|&i| bytes[i..i + 8].to_vec())
        .collect();
    check::<u32>(&expected, &got[0])?;
    // In a traced function, the address of an argument is unknown.
    let compiled = compile(|x: &[Array]| Ok(vec![x[0].view(Dtype::Uint32)?]));
    for from in 0..4 {
        let part = bytes_array.slice_axis(0, from, from + 8)?;
        let got = compiled.call(&[part])?;
        check::<u32>(&bytes[from as usize..from as usize + 8], &got[0])?;
    }
    Ok(())
}

/// This crate's kernels must read unaligned views like MLX's own operations.
#[test]
fn kernels_read_views_that_begin_anywhere() -> Result<()> {
    Stream::default_of(Device::cpu())?.scope(|| {
        let odd = |values: &[f32], shape: &[i32]| -> Result<Array> {
            let mut bytes = vec![0u8; 3];
            bytes.extend(values.iter().flat_map(|v| v.to_ne_bytes()));
            let n = bytes.len() as i32;
            let all = Array::from_slice(&bytes, &[n])?.slice_axis(0, 3, n)?;
            all.view(Dtype::Float32)?.reshape(shape)
        };
        let numbers: Vec<f32> = (0..32 * 64)
            .map(|i| ((i * 7) % 19) as f32 * 0.25 - 2.0)
            .collect();
        let w = Array::from_slice(&numbers, &[32, 64])?;
        let x = Array::from_slice(&numbers[..128], &[2, 64])?;
        let expected = x.matmul(&w.transpose()?)?.to_vec::<f32>()?;
        let Some(matrix) = DenseMatrix::new(&odd(&numbers, &[32, 64])?)? else {
            return Ok(());
        };
        let got = matrix
            .product(&odd(&numbers[..128], &[2, 64])?)?
            .to_vec::<f32>()?;
        for (a, b) in got.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-3 * (1.0 + b.abs()), "{a}, not {b}");
        }
        Ok(())
    })
}
