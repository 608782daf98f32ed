//! Converts Rust values to arrays and back: nested lists, scalars, vectors whose memory an array
//! keeps, iteration, and `ndarray`.

use mlx_rs_core::{Array, Complex32, Dtype, Element, ErrorKind, array, bf16, f16, zeros};
use proptest::prelude::*;

#[test]
fn literals_have_the_types_python_gives_them() {
    let dtype = |a: mlx_rs_core::Result<Array>| a.unwrap().dtype();
    assert_eq!(dtype(array!(1)), Dtype::Int32);
    assert_eq!(dtype(array!(1.5)), Dtype::Float32);
    assert_eq!(dtype(array!(true)), Dtype::Bool);
    assert_eq!(dtype(array!([])), Dtype::Float32);
    assert_eq!(dtype(array!([]; u16)), Dtype::Uint16);
    assert_eq!(dtype(array!([1, 2]; f16)), Dtype::Float16);
    assert_eq!(dtype(array!([[1.0], [2.0]]; f64)), Dtype::Float64);
    assert_eq!(dtype(array!([1.5f32; 3])), Dtype::Float32);
    assert_eq!(dtype(array!([1u8, 2])), Dtype::Uint8);
    assert_eq!(dtype(array!([Complex32::new(1.0, 2.0)])), Dtype::Complex64);
    // A double keeps its precision if `f64` is requested.
    let third = array!(1.0 / 3.0; f64).unwrap();
    assert_eq!(third.item::<f64>().unwrap(), 1.0 / 3.0);
    let third = array!(1.0 / 3.0).unwrap();
    assert_eq!(third.item::<f32>().unwrap(), (1.0f64 / 3.0) as f32);
    let cube = array!([[[1, 2], [3, 4], [5, 6]]]).unwrap();
    assert_eq!(cube.shape(), [1, 3, 2]);
    assert_eq!(cube.to_vec::<i32>().unwrap(), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn ragged_and_empty_lists() {
    let e = Array::from_nested(&vec![vec![1], vec![2, 3]]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Shape);
    assert!(e.message().contains("differ in length"));
    assert!(Array::from_nested(&vec![vec![vec![1]], vec![vec![2], vec![3]]]).is_err());
    assert!(Array::from_nested(&vec![vec![], vec![1]]).is_err());
    let none: Vec<Vec<f32>> = Vec::new();
    assert_eq!(Array::from_nested(&none).unwrap().shape(), [0, 0]);
    assert_eq!(
        Array::from_nested(&vec![none.clone(), none])
            .unwrap()
            .shape(),
        [2, 0, 0]
    );
}

#[test]
fn every_element_type_goes_there_and_back() {
    fn check<T: Element>(one: T) {
        let two = vec![one, T::default()];
        let a = Array::from_vec(two.clone(), &[2]).unwrap();
        assert_eq!(a.dtype(), T::DTYPE);
        assert_eq!(Vec::<T>::try_from(&a).unwrap(), two);
        assert_eq!(
            Array::try_from(two.clone()).unwrap().to_vec::<T>().unwrap(),
            two
        );
        let rows = vec![two.clone(), two.clone(), two];
        let a = Array::try_from(rows.clone()).unwrap();
        assert_eq!(a.shape(), [3, 2]);
        assert_eq!(Vec::<Vec<T>>::try_from(&a).unwrap(), rows);
        assert_eq!(a.bytes().unwrap().len(), 6 * size_of::<T>());
    }
    check(true);
    check(1u8);
    check(1u16);
    check(1u32);
    check(u64::MAX);
    check(-1i8);
    check(-1i16);
    check(-1i32);
    check(i64::MIN);
    check(f16::from_f32(0.5));
    check(bf16::from_f32(0.5));
    check(0.1f32);
    check(0.1f64);
    check(Complex32::new(1.0, -2.0));
}

#[test]
fn conversions_back_check_axes_and_types() {
    let a = array!([[1, 2, 3], [4, 5, 6]]).unwrap();
    assert_eq!(
        Vec::<i32>::try_from(&a).unwrap_err().kind(),
        ErrorKind::Shape
    );
    assert_eq!(
        Vec::<Vec<f32>>::try_from(&a).unwrap_err().kind(),
        ErrorKind::Dtype
    );
    assert_eq!(i32::try_from(&a).unwrap_err().kind(), ErrorKind::Shape);
    assert_eq!(i32::try_from(&array!([[7]]).unwrap()).unwrap(), 7);
    assert_eq!(
        f32::try_from(&array!(7).unwrap()).unwrap_err().kind(),
        ErrorKind::Dtype
    );
    let t = a.transpose().unwrap();
    assert_eq!(
        Vec::<Vec<i32>>::try_from(&t).unwrap(),
        [[1, 4], [2, 5], [3, 6]]
    );
    let cube = a.reshape(&[3, 2, 1]).unwrap();
    let lists = Vec::<Vec<Vec<i32>>>::try_from(&cube).unwrap();
    assert_eq!(lists, [[[1], [2]], [[3], [4]], [[5], [6]]]);
    let empty = zeros(&[2, 0], Dtype::Int32).unwrap();
    assert_eq!(Vec::<Vec<i32>>::try_from(&empty).unwrap(), [[0; 0], []]);
    assert_eq!(Array::try_from(2.5f32).unwrap().ndim(), 0);
    assert_eq!(Array::try_from([[1u8, 2], [3, 4]]).unwrap().shape(), [2, 2]);
    assert_eq!(
        Array::try_from(&[1i64, 2][..]).unwrap().dtype(),
        Dtype::Int64
    );
}

#[test]
fn a_vector_taken_over_must_fit_its_shape() {
    for shape in [&[3][..], &[-4], &[2, 3], &[], &[i32::MAX, i32::MAX]] {
        let e = Array::from_vec(vec![1, 2, 3, 4], shape).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Shape, "{shape:?}");
    }
    assert_eq!(
        Array::from_vec(Vec::<f32>::new(), &[0, 3]).unwrap().shape(),
        [0, 3]
    );
    // The memory of the vector outlives its array while a value computed from it needs the memory.
    // No write to it becomes visible.
    let a = Array::from_vec((0..10_000).collect::<Vec<i32>>(), &[100, 100]).unwrap();
    let b = a.add(&array!(1).unwrap()).unwrap();
    let view = a.transpose().unwrap();
    drop(a);
    assert_eq!(b.to_vec::<i32>().unwrap()[9_999], 10_000);
    assert_eq!(view.to_vec::<i32>().unwrap()[1], 100);
}

#[test]
fn vectors_are_taken_over_and_released_in_many_threads() {
    std::thread::scope(|scope| {
        for t in 0..8i64 {
            scope.spawn(move || {
                for n in 1..60 {
                    let a = Array::from_vec(vec![t; n * 97], &[n as i32, 97]).unwrap();
                    let sum = a.sum(mlx_rs_core::All, false).unwrap();
                    drop(a);
                    assert_eq!(sum.item::<i64>().unwrap(), t * n as i64 * 97);
                }
            });
        }
    });
}

#[test]
fn the_first_axis_is_iterated_from_both_ends() {
    let a = array!([[1, 2], [3, 4], [5, 6]]).unwrap();
    let rows: Vec<Vec<i32>> = a.iter().map(|r| r.unwrap().to_vec().unwrap()).collect();
    assert_eq!(rows, [[1, 2], [3, 4], [5, 6]]);
    let mut row_iter = a.iter();
    assert_eq!(row_iter.len(), 3);
    assert_eq!(
        row_iter
            .next_back()
            .unwrap()
            .unwrap()
            .to_vec::<i32>()
            .unwrap(),
        [5, 6]
    );
    assert_eq!(row_iter.next().unwrap().unwrap().shape(), [2]);
    assert_eq!(row_iter.len(), 1);
    row_iter.next();
    assert!(row_iter.next().is_none() && row_iter.next_back().is_none());
    let mut count = 0;
    for row in &zeros(&[0, 4], Dtype::Float32).unwrap() {
        row.unwrap();
        count += 1;
    }
    assert_eq!(count, 0);
    let scalar = array!(1).unwrap();
    let items: Vec<_> = scalar.iter().collect();
    assert_eq!(items.len(), 1);
    assert_eq!(items[0].as_ref().unwrap_err().kind(), ErrorKind::Shape);
}

proptest! {
    #[test]
    fn any_shape_survives_being_taken_over(
        shape in prop::collection::vec(0i32..5, 0..5),
        extra in 0usize..3,
    ) {
        let n: i32 = shape.iter().product();
        let mut values: Vec<u16> = (0..n as u16).collect();
        values.reserve(extra);
        let a = Array::from_vec(values.clone(), &shape).unwrap();
        prop_assert_eq!(a.shape(), &shape[..]);
        prop_assert_eq!(a.to_vec::<u16>().unwrap(), values);
    }
}

#[cfg(feature = "ndarray")]
mod ndarray_arrays {
    use super::*;
    use ndarray::{Array1, Array2, ArrayD, Ix1, Ix2, s};

    #[test]
    fn any_layout_goes_in_and_comes_back() {
        let n = Array2::from_shape_fn((3, 4), |(i, j)| (10 * i + j) as f32);
        for view in [
            n.view(),
            n.t(),
            n.slice(s![..; -1, ..]),
            n.slice(s![1.., ..; 2]),
            n.slice(s![0..0, ..]),
        ] {
            let a = Array::from_ndarray(&view).unwrap();
            assert_eq!(a.to_ndarray::<f32>().unwrap(), view.into_dyn());
            let owned = Array::try_from(view.to_owned()).unwrap();
            assert_eq!(owned.to_ndarray::<f32>().unwrap(), view.into_dyn());
        }
        // The array owns its data and is row-major, but its elements begin at an offset in its
        // vector.
        let part = n.clone().slice_move(s![1.., ..]);
        let a = Array::try_from(part.clone()).unwrap();
        assert_eq!(ndarray::Array::<f32, Ix2>::try_from(&a).unwrap(), part);
        let part = n.clone().slice_move(s![..2, ..]);
        let a = Array::try_from(part.clone()).unwrap();
        assert_eq!(ndarray::Array::<f32, Ix2>::try_from(&a).unwrap(), part);
        let scalar = Array::try_from(ndarray::arr0(2.5f32)).unwrap();
        assert_eq!((scalar.ndim(), scalar.item::<f32>().unwrap()), (0, 2.5));
    }

    #[test]
    fn axes_and_types_are_checked() {
        let a = array!([[1, 2], [3, 4]]).unwrap();
        assert_eq!(
            ndarray::Array::<i32, Ix1>::try_from(&a).unwrap_err().kind(),
            ErrorKind::Shape
        );
        assert_eq!(a.to_ndarray::<f32>().unwrap_err().kind(), ErrorKind::Dtype);
        let t = a.transpose().unwrap();
        let data = t.data::<i32>().unwrap();
        assert_eq!(data.view(&[2, 2]).unwrap()[[0, 1]], 3);
        assert_eq!(data.view(&[3]).unwrap_err().kind(), ErrorKind::Shape);
        assert_eq!(data.view(&[-4]).unwrap_err().kind(), ErrorKind::Shape);
        assert_eq!(data.view(&[4]).unwrap().len(), 4);
        // A broadcast array needs no memory for its length, so its axis can be longer than
        // `i32::MAX`.
        let one = Array1::from_vec(vec![0u8]);
        let long = one.broadcast(1 << 31).unwrap();
        assert_eq!(
            Array::from_ndarray(&long).unwrap_err().kind(),
            ErrorKind::Shape
        );
        let empty = ArrayD::<f32>::zeros(vec![0, 2]);
        assert_eq!(Array::try_from(empty).unwrap().shape(), [0, 2]);
    }
}
