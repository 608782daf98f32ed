//! Property tests over shapes, slices and types. Results must equal numpy's.

use mlx_rs_core::{Array, Dtype, zeros};
use proptest::prelude::*;

fn iota(shape: &[i32]) -> Array {
    let n: i32 = shape.iter().product();
    Array::from_slice(&(0..n).collect::<Vec<i32>>(), shape).unwrap()
}

/// Python's `range(*slice(start, stop, step).indices(n))`, from its documentation.
fn python_slice(n: i64, start: i64, stop: i64, step: i64) -> Vec<i32> {
    let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
    let fix = |x: i64| (if x < 0 { x + n } else { x }).clamp(low, high);
    let (mut at, stop) = (fix(start), fix(stop));
    let mut out = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        out.push(at as i32);
        at += step;
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn values_survive_the_round_trip(values in prop::collection::vec(any::<f32>(), 0..200)) {
        let back = Array::vector(&values).unwrap().to_vec::<f32>().unwrap();
        prop_assert!(values.iter().zip(&back).all(|(a, b)| a.to_bits() == b.to_bits()));
        prop_assert_eq!(values.len(), back.len());
    }

    #[test]
    fn any_shape_is_right_or_refused(shape in prop::collection::vec(-2i32..5, 0..5), n in 0usize..100) {
        let fits = shape.iter().all(|&d| d >= 0)
            && shape.iter().map(|&d| d as usize).product::<usize>() == n;
        let made = Array::from_slice(&vec![0u8; n], &shape);
        prop_assert_eq!(made.is_ok(), fits);
        if let Ok(a) = made {
            prop_assert_eq!(a.shape(), &shape[..]);
            prop_assert_eq!(a.size(), n);
        }
    }

    #[test]
    fn zeros_of_any_shape_never_crash(shape in prop::collection::vec(any::<i32>(), 0..6)) {
        if let Ok(a) = zeros(&shape, Dtype::Float64) {
            prop_assert_eq!(a.shape(), &shape[..]);
        }
    }

    #[test]
    fn slices_agree_with_python(
        n in 0i32..12,
        start in prop_oneof![-15i32..15, Just(i32::MIN), Just(i32::MAX)],
        stop in prop_oneof![-15i32..15, Just(i32::MIN), Just(i32::MAX)],
        step in prop_oneof![-4i32..0, 1i32..5],
    ) {
        let got = iota(&[n]).slice(&[start], &[stop], &[step]).unwrap().to_vec::<i32>().unwrap();
        prop_assert_eq!(got, python_slice(n.into(), start.into(), stop.into(), step.into()));
    }

    #[test]
    fn strided_views_read_what_their_definition_says(
        n in 1i32..30,
        shape in prop::collection::vec(0i32..5, 1..4),
        strides in prop::collection::vec(-4i64..5, 3),
        offset in 0usize..30,
    ) {
        let a = iota(&[n]);
        let strides = &strides[..shape.len()];
        if let Ok(view) = a.as_strided(&shape, strides, offset) {
            let mut expected = vec![offset as i64];
            for (&d, &s) in shape.iter().zip(strides) {
                expected = expected.iter().flat_map(|&b| (0..i64::from(d)).map(move |i| b + i * s)).collect();
            }
            prop_assert!(expected.iter().all(|e| (0..i64::from(n)).contains(e)));
            let got: Vec<i64> = view.to_vec::<i32>().unwrap().into_iter().map(i64::from).collect();
            prop_assert_eq!(got, expected);
        }
    }

    #[test]
    fn gathers_agree_with_indexing(ids in prop::collection::vec(0u32..9, 0..20)) {
        let a = iota(&[9, 2]);
        let expected: Vec<i32> = ids.iter().flat_map(|&i| [2 * i as i32, 2 * i as i32 + 1]).collect();
        let index = Array::vector(&ids).unwrap();
        prop_assert_eq!(a.take_ids(&ids, 0).unwrap().to_vec::<i32>().unwrap(), expected.clone());
        prop_assert_eq!(a.take(&index, 0).unwrap().to_vec::<i32>().unwrap(), expected.clone());
        prop_assert_eq!(a.take_clamped(&index, 0).unwrap().to_vec::<i32>().unwrap(), expected);
    }
}
