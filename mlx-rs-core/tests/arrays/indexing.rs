//! Tests indexing with the golden cases of numpy (tools/golden/indexing.py), with properties
//! against plain loops, and with indices that must be errors.

use mlx_rs_core::indexing::{Ellipsis, Index, NewAxis, Span, clamped};
use mlx_rs_core::{Array, Dtype, Element, ErrorKind, array, bf16, f16, idx, zeros};
use proptest::prelude::*;
use serde_json::Value;

fn iota(shape: &[i32]) -> Array {
    let n: i32 = shape.iter().product();
    Array::from_vec((0..n).collect::<Vec<i32>>(), shape).unwrap()
}

fn ints(value: &Value) -> Vec<i32> {
    let list = value.as_array().unwrap();
    list.iter().map(|v| v.as_i64().unwrap() as i32).collect()
}

fn shaped<T: Element>(value: &Value, f: impl Fn(i32) -> T) -> Array {
    let values = ints(&value[1]).into_iter().map(f).collect();
    Array::from_vec(values, &ints(&value[0])).unwrap()
}

/// An index from the fixture. `n` varies the Rust type in which it is written.
fn entry(value: &Value, n: usize) -> Index<'static> {
    if value.is_null() {
        return NewAxis.into();
    }
    if value == "..." {
        return Ellipsis.into();
    }
    if let Some(b) = value.as_bool() {
        return b.into();
    }
    if let Some(i) = value.as_i64() {
        return i.into();
    }
    if let Some(slice) = value.get("slice") {
        let at = |i: usize| slice[i].as_i64();
        let span: Span = match (at(0), at(1)) {
            (Some(a), Some(b)) => (a..b).into(),
            (Some(a), None) => (a..).into(),
            (None, Some(b)) => (..b).into(),
            (None, None) => (..).into(),
        };
        return Index::stepped(span, at(2).unwrap_or(1));
    }
    if let Some(mask) = value.get("mask") {
        if mask[0].as_array().unwrap().len() == 1 && n.is_multiple_of(2) {
            return ints(&mask[1])
                .into_iter()
                .map(|v| v != 0)
                .collect::<Vec<bool>>()
                .into();
        }
        return shaped(mask, |v| v != 0).into();
    }
    let ids = &value["ids"];
    let one_axis = ids[0].as_array().unwrap().len() == 1;
    match n % 5 {
        0 if one_axis => ints(&ids[1]).into(),
        1 => shaped(ids, i64::from).into(),
        2 => shaped(ids, |v| v as i8).into(),
        3 if ints(&ids[1]).iter().all(|&v| v >= 0) => shaped(ids, |v| v as u64).into(),
        _ => shaped(ids, |v| v).into(),
    }
}

#[test]
fn reads_updates_and_refusals_agree_with_numpy() {
    let text = include_str!("../fixtures/indexing.json");
    let golden: Value = serde_json::from_str(text).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    let (mut reads, mut updates, mut errors) = (0, 0, 0);
    for (n, case) in cases.iter().enumerate() {
        let a = iota(&ints(&case["shape"]));
        let index: Vec<Index<'_>> = case["index"]
            .as_array()
            .unwrap()
            .iter()
            .map(|v| entry(v, n))
            .collect();
        if let Some(part) = case.get("part") {
            reads += 1;
            let got = a.get(&index).unwrap_or_else(|e| panic!("{case}: {e}"));
            assert_eq!(got.shape(), ints(&part[0]), "{case}");
            assert_eq!(got.to_vec::<i32>().unwrap(), ints(&part[1]), "{case}");
        } else if let Some(update) = case.get("update") {
            updates += 1;
            let value = shaped(&case["value"], |v| v);
            let at = a.at_idx(&index);
            let got = match update.as_str().unwrap() {
                "set" => {
                    let mut b = a.clone();
                    b.set(&index, &value)
                        .unwrap_or_else(|e| panic!("{case}: {e}"));
                    let same = at.set(&value).unwrap();
                    assert_eq!(b.to_vec::<i32>().unwrap(), same.to_vec::<i32>().unwrap());
                    Ok(b)
                }
                "add" => at.add(&value),
                "subtract" => at.subtract(&value),
                "multiply" => at.multiply(&value),
                "maximum" => at.maximum(&value),
                _ => at.minimum(&value),
            };
            let got = got.unwrap_or_else(|e| panic!("{case}: {e}"));
            assert_eq!(got.shape(), a.shape(), "{case}");
            assert_eq!(got.to_vec::<i32>().unwrap(), ints(&case["after"]), "{case}");
            // The update must not change the array that it was made from.
            let before: Vec<i32> = (0..a.size() as i32).collect();
            assert_eq!(a.to_vec::<i32>().unwrap(), before, "{case}");
        } else {
            errors += 1;
            let e = a.get(&index).expect_err(&case.to_string());
            assert!(
                matches!(e.kind(), ErrorKind::Index | ErrorKind::Shape),
                "{case}: {e}"
            );
            assert!(a.at_idx(&index).set(0).is_err(), "{case}");
        }
    }
    assert!(reads >= 700 && updates >= 500 && errors >= 100);
}

#[test]
fn every_range_form_means_what_python_means() {
    let a = iota(&[10]);
    let get = |i: &[Index<'_>]| a.get(i).unwrap().to_vec::<i32>().unwrap();
    assert_eq!(get(idx![2..5]), [2, 3, 4]);
    assert_eq!(get(idx![2usize..5]), [2, 3, 4]);
    assert_eq!(get(idx![..=2]), [0, 1, 2]);
    assert_eq!(get(idx![7..=-1]), [7, 8, 9]);
    assert_eq!(get(idx![..=-2; 3]), [0, 3, 6]);
    assert_eq!(get(idx![-3..]), [7, 8, 9]);
    assert_eq!(get(idx![..-8]), [0, 1]);
    assert_eq!(get(idx![..; -4]), [9, 5, 1]);
    assert_eq!(get(idx![3..=0; -1]), [3, 2, 1, 0]);
    assert_eq!(get(idx![3..0; -1]), [3, 2, 1]);
    assert_eq!(get(idx![5..2]), [0; 0]);
    assert_eq!(get(idx![8..100; 1 << 40]), [8]);
    assert_eq!(get(idx![i64::MIN..i64::MAX]).len(), 10);
    assert_eq!(get(idx![..; i64::MIN]), [9]);
    assert_eq!(get(idx![u64::MAX..]), [0; 0]);
    let i = idx![1.., NewAxis];
    assert_eq!(a.get(i).unwrap().shape(), [9, 1]);
}

#[test]
fn what_cannot_be_indexed_says_why() {
    let a = iota(&[2, 3]);
    let kind = |i: &[Index<'_>]| a.get(i).unwrap_err().kind();
    assert_eq!(kind(idx![..; 0]), ErrorKind::Value);
    assert_eq!(kind(idx![u64::MAX]), ErrorKind::Index);
    assert_eq!(kind(idx![i64::MIN]), ErrorKind::Index);
    assert_eq!(kind(idx![&array!(1.5).unwrap()]), ErrorKind::Dtype);
    assert_eq!(
        kind(idx![clamped(&array!([true]).unwrap())]),
        ErrorKind::Dtype
    );
    for bad in [i64::MAX, i64::MIN, 2, -3] {
        assert_eq!(
            kind(idx![&array!([0, bad]; i64).unwrap()]),
            ErrorKind::Index
        );
        assert_eq!(kind(idx![[0, bad]]), ErrorKind::Index);
    }
    assert_eq!(kind(idx![&array!([u64::MAX]).unwrap()]), ErrorKind::Index);
    let e = a.get(idx![.., 3]).unwrap_err();
    assert!(
        e.message().contains("index 3") && e.message().contains("axis 1 of length 3"),
        "{e}"
    );
    // An index into an empty axis is an error, even if no element would be read.
    let empty = zeros(&[0, 2], Dtype::Float32).unwrap();
    assert!(empty.get(idx![[0]]).is_err());
    assert!(empty.get(idx![clamped(&array!([0]).unwrap())]).is_err());
    // A failed update must not change the array.
    let mut b = a.clone();
    assert_eq!(
        b.set(idx![0], iota(&[4])).unwrap_err().kind(),
        ErrorKind::Shape
    );
    assert_eq!(
        b.set(idx![0, 0], 1i64 << 40).unwrap_err().kind(),
        ErrorKind::Value
    );
    assert_eq!(
        a.at_idx(idx![0]).divide(2).unwrap_err().kind(),
        ErrorKind::Dtype
    );
    assert!(b.array_equal(&a).unwrap());
}

#[test]
fn masks_assign_scalars_rows_and_one_value_per_position() {
    let a = iota(&[2, 3]);
    let mut b = a.clone();
    b.set(idx![&a.greater(&array!(2).unwrap()).unwrap()], -1)
        .unwrap();
    assert_eq!(b.to_vec::<i32>().unwrap(), [0, 1, 2, -1, -1, -1]);
    b.set(idx![[true, false]], array!([7, 8, 9]).unwrap())
        .unwrap();
    assert_eq!(b.to_vec::<i32>().unwrap(), [7, 8, 9, -1, -1, -1]);
    b.set(
        idx![.., [false, true, true]],
        array!([[1, 2], [3, 4]]).unwrap(),
    )
    .unwrap();
    assert_eq!(b.to_vec::<i32>().unwrap(), [7, 1, 2, -1, 3, 4]);
    b.set(idx![.., [false, true, true]], array!([[5], [6]]).unwrap())
        .unwrap();
    assert_eq!(b.to_vec::<i32>().unwrap(), [7, 5, 5, -1, 6, 6]);
    assert!(b.set(idx![[true, true, true]], 0).is_err());
    let c = b.at_idx(idx![true]).add(1).unwrap();
    assert_eq!(c.to_vec::<i32>().unwrap(), [8, 6, 6, 0, 7, 7]);
    let c = b.at_idx(idx![false]).add(1).unwrap();
    assert!(c.array_equal(&b).unwrap());
}

#[test]
fn every_type_can_be_read_and_written() {
    for dtype in Dtype::ALL {
        let a = array!([[0, 1, 0], [1, 0, 1]])
            .unwrap()
            .astype(dtype)
            .unwrap();
        let ids = array!([1, 0, 1]).unwrap();
        let got = a.get(idx![&ids, 1..]).unwrap();
        assert_eq!((got.dtype(), got.shape()), (dtype, &[3, 2][..]));
        let mut b = a.clone();
        b.set(idx![.., &ids], array!(true).unwrap()).unwrap();
        b.set(idx![0, 2], 1).unwrap();
        assert_eq!(b.dtype(), dtype);
        let b = b.astype(Dtype::Int32).unwrap().to_vec::<i32>().unwrap();
        assert_eq!(b, [1, 1, 1, 1, 1, 1], "{dtype}");
    }
    // Assigned values, scalars and arrays alike, are converted to the array's type.
    let mut h = array!([1, 2, 3]; f16).unwrap();
    h.set(idx![0], 0.1).unwrap();
    h.set(idx![1], array!(0.2).unwrap()).unwrap();
    assert_eq!(h.dtype(), Dtype::Float16);
    assert_eq!(
        h.get(idx![0]).unwrap().item::<f16>().unwrap(),
        f16::from_f32(0.1)
    );
    let mut i = array!([1, 2]).unwrap();
    i.set(idx![0], 2.9).unwrap();
    assert_eq!(i.to_vec::<i32>().unwrap(), [2, 2]);
    let b = array!([1.0, 8.0]; bf16).unwrap();
    let b = b.at_idx(idx![[1, 1]]).divide(2.0).unwrap();
    assert_eq!(b.to_vec::<bf16>().unwrap(), [1.0, 2.0].map(bf16::from_f32));
}

#[test]
fn a_gather_of_a_view_and_of_a_large_array_is_right() {
    let a = iota(&[300, 200]);
    let t = a.transpose().unwrap();
    let got = t
        .get(idx![[7, -1], [5, 6]])
        .unwrap()
        .to_vec::<i32>()
        .unwrap();
    assert_eq!(got, [5 * 200 + 7, 6 * 200 + 199]);
    let mut t = t;
    t.set(idx![[7, -1], [5, 6]], array!([-1, -2]).unwrap())
        .unwrap();
    let back = t.transpose().unwrap();
    assert_eq!(back.at::<i32>(&[5, 7]).unwrap(), -1);
    assert_eq!(back.at::<i32>(&[6, 199]).unwrap(), -2);
    assert_eq!(back.at::<i32>(&[5, 6]).unwrap(), 5 * 200 + 6);
    assert_eq!(a.at::<i32>(&[5, 7]).unwrap(), 5 * 200 + 7);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn reads_agree_with_loops(
        (rows, cols) in (1i32..6, 1i32..6),
        ids in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        negative in any::<bool>(),
        start in -8i64..8,
        step in prop_oneof![-3i64..0, 1i64..4],
    ) {
        // Computes `a[ids, start::step]` with two loops.
        let a = iota(&[rows, cols]);
        let ids: Vec<i32> = ids.iter().map(|i| i.index(rows as usize) as i32).collect();
        let mut columns = Vec::new();
        let n = i64::from(cols);
        let low = if step > 0 { 0 } else { -1 };
        let high = if step > 0 { n } else { n - 1 };
        let mut c = (if start < 0 { start + n } else { start }).clamp(low, high);
        while (0..n).contains(&c) {
            columns.push(c as i32);
            c += step;
        }
        let expected: Vec<i32> =
            ids.iter().flat_map(|r| columns.iter().map(move |c| r * cols + c)).collect();
        let given: Vec<i32> = ids.iter().map(|&i| if negative { i - rows } else { i }).collect();
        let part = a.get(idx![&given, start..; step]).unwrap();
        prop_assert_eq!(part.shape(), &[ids.len() as i32, columns.len() as i32]);
        prop_assert_eq!(part.to_vec::<i32>().unwrap(), expected);
    }

    #[test]
    fn what_is_set_is_read_back(
        (rows, cols) in (1i32..6, 1i32..6),
        mask in prop::collection::vec(any::<bool>(), 36),
        seed in any::<i16>(),
    ) {
        let mut a = iota(&[rows, cols]);
        let mask = &mask[..(rows * cols) as usize];
        let count = mask.iter().filter(|&&m| m).count() as i32;
        let m = Array::from_slice(mask, &[rows, cols]).unwrap();
        let values: Vec<i32> = (0..count).map(|i| i32::from(seed) - i).collect();
        a.set(idx![&m], Array::vector(&values).unwrap()).unwrap();
        prop_assert_eq!(a.get(idx![&m]).unwrap().to_vec::<i32>().unwrap(), values.clone());
        let mut left = values.into_iter();
        let expected: Vec<i32> = mask.iter().zip(0..).map(|(&m, i)| if m { left.next().unwrap() } else { i }).collect();
        prop_assert_eq!(a.to_vec::<i32>().unwrap(), expected);
    }

    #[test]
    fn no_index_reaches_outside(
        shape in prop::collection::vec(0i32..4, 0..4),
        entries in prop::collection::vec((0usize..8, any::<i64>(), any::<i64>(), -3i64..4), 0..5),
    ) {
        // An index may be an error. Otherwise every result must consist of values of the array.
        let a = iota(&shape);
        let index: Vec<Index<'_>> = entries
            .iter()
            .map(|&(kind, x, y, step)| match kind {
                0 => (x % 5).into(),
                1 => x.into(),
                2 => Index::stepped((x % 6)..(y % 6), step),
                3 => Index::stepped(x..=y, step),
                4 => vec![x % 4, y % 4].into(),
                5 => Array::vector(&[(x % 4) as i16, (y % 4) as i16]).unwrap().into(),
                6 => NewAxis.into(),
                _ => Ellipsis.into(),
            })
            .collect();
        if let Ok(part) = a.get(&index) {
            let n = a.size() as i32;
            prop_assert!(part.to_vec::<i32>().unwrap().iter().all(|v| (0..n).contains(v)));
            let updated = a.at_idx(&index).set(-1).unwrap().to_vec::<i32>().unwrap();
            let changed = updated.iter().filter(|&&v| v == -1).count();
            prop_assert!(changed <= part.size());
        }
    }
}
