//! Gathers, scatters and gathered matrix multiplications must return correct values, and must never
//! access memory out of bounds.

use mlx_rs_core::fast::{self, Mask, RopeBase};
use mlx_rs_core::{
    Array, Dtype, ErrorKind, MatrixIndices, QuantMode, Quantized, ScatterMode, einsum, eval,
};

fn iota(shape: &[i32]) -> Array {
    let n: i32 = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
    Array::from_slice(&values, shape).unwrap()
}

fn read(a: Array) -> Vec<f32> {
    a.to_vec::<f32>().unwrap()
}

/// Index arrays of every integer type, with values far out of range.
fn wild() -> Vec<Array> {
    vec![
        Array::vector(&[u8::MAX]).unwrap(),
        Array::vector(&[u16::MAX]).unwrap(),
        Array::vector(&[u32::MAX]).unwrap(),
        Array::vector(&[u64::MAX]).unwrap(),
        Array::vector(&[i8::MIN, i8::MAX]).unwrap(),
        Array::vector(&[i16::MIN, i16::MAX]).unwrap(),
        Array::vector(&[i32::MIN, i32::MAX]).unwrap(),
        Array::vector(&[i64::MIN, i64::MAX]).unwrap(),
    ]
}

#[test]
fn gather_takes_blocks_and_counts_from_the_end() {
    let a = iota(&[4, 3]);
    let rows = Array::vector(&[0i32, -1]).unwrap();
    let got = a.gather(&[&rows], &[0], &[1, 3]).unwrap();
    assert_eq!(got.shape(), [2, 1, 3]);
    assert_eq!(read(got), [0.0, 1.0, 2.0, 9.0, 10.0, 11.0]);
    let cols = Array::vector(&[2u32, 1]).unwrap();
    let got = a.gather(&[&rows, &cols], &[0, 1], &[1, 1]).unwrap();
    assert_eq!(read(got), [2.0, 10.0]);
    for index in wild() {
        let got = a.gather(&[&index], &[0], &[2, 3]).unwrap();
        for pair in read(got).chunks(6) {
            assert!(pair[0] == 0.0 || pair[0] == 6.0, "{pair:?}");
        }
    }
    assert!(a.gather(&[&rows], &[2], &[1, 3]).is_err());
    assert!(a.gather(&[&rows, &rows], &[0, 0], &[1, 1]).is_err());
    assert!(a.gather(&[&rows], &[0], &[5, 3]).is_err());
    assert!(a.gather(&[&rows], &[0], &[-1, 3]).is_err());
    assert!(a.gather(&[&rows], &[0], &[1]).is_err());
    assert!(a.gather(&[], &[0], &[1, 1]).is_err());
    let e = a.gather(&[&iota(&[2])], &[0], &[1, 1]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Dtype);
}

#[test]
fn scatter_writes_where_it_should_and_nowhere_else() {
    let a = iota(&[4]);
    let at = Array::vector(&[1i32, -1, 1]).unwrap();
    let v = Array::from_slice(&[10.0f32, 20.0, 30.0], &[3, 1]).unwrap();
    let with = |mode| read(a.scatter(&[&at], &v, &[0], mode).unwrap());
    assert_eq!(with(ScatterMode::Add), [0.0, 41.0, 2.0, 23.0]);
    assert_eq!(with(ScatterMode::Prod), [0.0, 300.0, 2.0, 60.0]);
    assert_eq!(with(ScatterMode::Max), [0.0, 30.0, 2.0, 20.0]);
    assert_eq!(with(ScatterMode::Min), [0.0, 1.0, 2.0, 3.0]);
    let r = with(ScatterMode::Replace);
    assert!(r[1] == 10.0 || r[1] == 30.0);
    for index in wild() {
        let n = index.size() as i32;
        let v = Array::from_slice(&vec![7.0f32; 2 * n as usize], &[n, 2]).unwrap();
        let got = read(
            a.scatter(&[&index], &v, &[0], ScatterMode::Replace)
                .unwrap(),
        );
        assert!(got[..2] == [7.0, 7.0] || got[2..] == [7.0, 7.0], "{got:?}");
    }
    assert!(
        a.scatter(&[&at], &iota(&[3, 5]), &[0], ScatterMode::Add)
            .is_err()
    );
    assert!(
        a.scatter(&[&at], &iota(&[]), &[0], ScatterMode::Add)
            .is_err()
    );
    assert!(
        a.scatter(&[&at], &iota(&[2, 1]), &[0], ScatterMode::Add)
            .is_err()
    );
    let mask = Array::vector(&[true, false, true]).unwrap();
    assert_eq!(
        a.scatter(&[&mask], &v, &[0], ScatterMode::Add)
            .unwrap_err()
            .kind(),
        ErrorKind::Dtype
    );
    let add = a
        .scatter_add_axis(
            &Array::vector(&[0u32, 0, u32::MAX]).unwrap(),
            &iota(&[3]),
            0,
        )
        .unwrap();
    assert_eq!(read(add), [1.0, 1.0, 2.0, 5.0]);
}

#[test]
fn dynamic_slices_stay_inside() {
    let a = iota(&[4, 3]);
    let start = |v: &[i32]| Array::vector(v).unwrap();
    let got = a.slice_at(&start(&[2]), &[0], &[2, 3]).unwrap();
    assert_eq!(read(got), [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
    for wild in [i32::MIN, -1, 100, i32::MAX] {
        let got = read(a.slice_at(&start(&[wild, wild]), &[1, 0], &[2, 2]).unwrap());
        assert!(
            got == [0.0, 1.0, 3.0, 4.0] || got == [7.0, 8.0, 10.0, 11.0],
            "{got:?}"
        );
        let put = a
            .slice_update_at(&iota(&[1, 3]), &start(&[wild]), &[0])
            .unwrap();
        assert_eq!(put.shape(), [4, 3]);
        put.eval().unwrap();
    }
    assert!(a.slice_at(&start(&[0]), &[0], &[5, 3]).is_err());
    assert!(a.slice_at(&start(&[0]), &[0], &[-1, 3]).is_err());
    assert!(a.slice_at(&start(&[0, 0]), &[0], &[1, 3]).is_err());
    assert!(a.slice_update_at(&iota(&[3]), &start(&[0]), &[0]).is_err());
    assert!(
        a.slice_update_at(&iota(&[5, 3]), &start(&[0]), &[0])
            .is_err()
    );
}

#[test]
fn masked_scatter_repeats_the_last_value_rather_than_reading_on() {
    let a = iota(&[4]);
    let mask = Array::vector(&[true, false, true, true]).unwrap();
    let got = a.masked_scatter(&mask, &Array::vector(&[9.0f32, 8.0, 7.0]).unwrap());
    assert_eq!(read(got.unwrap()), [9.0, 1.0, 8.0, 7.0]);
    let got = a.masked_scatter(&mask, &Array::vector(&[9.0f32]).unwrap());
    assert_eq!(read(got.unwrap()), [9.0, 1.0, 9.0, 9.0]);
    let rows = iota(&[3, 2])
        .masked_scatter(
            &Array::vector(&[true, false, true]).unwrap(),
            &Array::from_slice(&[-1.0f32, -2.0, -3.0, -4.0], &[2, 2]).unwrap(),
        )
        .unwrap();
    assert_eq!(read(rows), [-1.0, -2.0, 2.0, 3.0, -3.0, -4.0]);
    let scalar = a.masked_scatter(&mask, &Array::scalar(5.0f32).unwrap());
    assert_eq!(read(scalar.unwrap()), [5.0, 1.0, 5.0, 5.0]);
    assert!(a.masked_scatter(&a, &a).is_err());
    assert!(
        a.masked_scatter(&Array::vector(&[true]).unwrap(), &a)
            .is_err()
    );
}

#[test]
fn gathered_products_equal_their_loops_and_clamp() {
    let x = iota(&[3, 2, 4]);
    let w = iota(&[5, 4, 3]);
    let lhs = Array::vector(&[2u32, 0]).unwrap();
    let rhs = Array::vector(&[4u32, 1]).unwrap();
    let got = x.gather_mm(&w, &lhs, &rhs, false).unwrap();
    let one = |i, j| {
        let a = x.take_ids(&[i], 0).unwrap();
        read(a.matmul(&w.take_ids(&[j], 0).unwrap()).unwrap())
    };
    let expected = [one(2, 4), one(0, 1)].concat();
    assert_eq!(read(got), expected);
    let ready = MatrixIndices::new(&rhs, 5).unwrap();
    assert_eq!(
        read(x.gather_mm(&w, &lhs, &ready, false).unwrap()),
        expected
    );
    assert!(x.gather_mm(&iota(&[2, 4, 3]), &lhs, &ready, false).is_err());
    let outs: Vec<Array> = wild()
        .iter()
        .map(|i| {
            x.gather_mm(&w, None, i.slice_axis(0, 0, 1).as_ref().ok(), false)
                .unwrap()
        })
        .collect();
    eval(&outs).unwrap();
    assert!(x.gather_mm(&w, &x, &rhs, false).is_err());
    assert!(iota(&[4]).gather_mm(&w, &lhs, &rhs, false).is_err());
}

#[test]
fn quantized_gathers_in_all_modes() {
    let w = iota(&[4, 8, 64])
        .multiply(&Array::scalar(0.001f32).unwrap())
        .unwrap();
    let x = iota(&[4, 1, 64])
        .multiply(&Array::scalar(0.01f32).unwrap())
        .unwrap();
    for (mode, group, bits) in [
        (QuantMode::Affine, 64, 4),
        (QuantMode::Affine, 32, 8),
        (QuantMode::Mxfp4, 32, 4),
        (QuantMode::Mxfp8, 32, 8),
        (QuantMode::Nvfp4, 16, 4),
    ] {
        let q = Quantized::quantize(&w, group, bits, mode).unwrap();
        let dense = q.dequantize(Dtype::Float32).unwrap();
        let rhs = Array::vector(&[3u32, 0, u32::MAX, 2]).unwrap();
        let got = q.gather_matmul(&x, None, &rhs, true, false).unwrap();
        let t = dense.swap_axes(1, 2).unwrap();
        let want = x.gather_mm(&t, None, &rhs, false).unwrap();
        assert!(got.all_close(&want, 1e-3, 1e-3).unwrap(), "{mode:?}");
        assert!(
            q.matmul_transposed(&x)
                .unwrap()
                .all_close(&x.matmul(&t).unwrap(), 1e-3, 1e-3)
                .unwrap(),
            "{mode:?}"
        );
        let y = iota(&[4, 2, 8]);
        assert!(
            q.matmul(&y)
                .unwrap()
                .all_close(&y.matmul(&dense).unwrap(), 1e-3, 1e-2)
                .unwrap(),
            "{mode:?}"
        );
        assert!(q.matmul(&iota(&[2, 8])).is_err());
        assert!(
            q.gather_matmul(&iota(&[64]), None, &rhs, true, false)
                .is_err()
        );
    }
}

#[test]
fn segments_are_cut_to_the_inner_axis() {
    let (a, b) = (iota(&[2, 4]), iota(&[4, 2]));
    let seg = Array::from_slice(&[0u32, 2, 2, 4, 3, 1, 1, u32::MAX], &[4, 2]).unwrap();
    let got = a.segmented_mm(&b, &seg).unwrap();
    let part = |s, e| {
        let l = a.slice_axis(1, s, e).unwrap();
        read(l.matmul(&b.slice_axis(0, s, e).unwrap()).unwrap())
    };
    let want = [part(0, 2), part(2, 4), vec![0.0; 4], part(1, 4)].concat();
    assert_eq!(read(got), want);
    assert!(a.segmented_mm(&iota(&[3, 2]), &seg).is_err());
}

#[test]
fn rope_takes_offsets_as_arrays() {
    let x = iota(&[2, 3, 4, 8]);
    let at = |o: i32| fast::rope(&x, 8, false, RopeBase::Theta(1e4), 1.0, o).unwrap();
    let each = fast::rope_at(
        &x,
        8,
        false,
        RopeBase::Theta(1e4),
        1.0,
        &Array::vector(&[3i32, 11]).unwrap(),
    )
    .unwrap();
    let want = [
        read(at(3).slice_axis(0, 0, 1).unwrap()),
        read(at(11).slice_axis(0, 1, 2).unwrap()),
    ]
    .concat();
    let got = read(each);
    assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-3));
    let freqs = Array::vector(&[1.0f32, 10.0, 100.0, 1000.0]).unwrap();
    let f = fast::rope_at(
        &x,
        8,
        false,
        RopeBase::Freqs(&freqs),
        1.0,
        &Array::scalar(3i64).unwrap(),
    );
    assert!(f.unwrap().all_close(&at(3), 1e-3, 1e-2).unwrap());
    let bad = |o: Array| fast::rope_at(&x, 8, false, RopeBase::Theta(1e4), 1.0, &o).is_err();
    assert!(bad(Array::vector(&[1i32, 2, 3]).unwrap()));
    assert!(bad(Array::scalar(1.0f32).unwrap()));
    assert!(bad(Array::from_slice(&[1i32, 2], &[2, 1]).unwrap()));
}

#[test]
fn attention_with_masks_and_sinks() {
    let small = |s: &[i32]| iota(s).multiply(&Array::scalar(0.01f32).unwrap()).unwrap();
    let (q, k, v) = (
        small(&[1, 4, 3, 8]),
        small(&[1, 2, 5, 8]),
        small(&[1, 2, 5, 8]),
    );
    let run = |m, s| fast::scaled_dot_product_attention_with_sinks(&q, &k, &v, 0.3, m, s).unwrap();
    // Query i of 3 sees keys up to i + 2 of 5.
    let seen: Vec<bool> = (0..3)
        .flat_map(|i| (0..5).map(move |j| j <= i + 2))
        .collect();
    let boolean = Array::from_slice(&seen, &[3, 5]).unwrap();
    let added: Vec<f32> = seen.iter().map(|&s| if s { 0.0 } else { -1e9 }).collect();
    let additive = Array::from_slice(&added, &[3, 5]).unwrap();
    let causal = run(Mask::Causal, None);
    assert!(
        causal
            .all_close(&run(Mask::Array(&boolean), None), 1e-5, 1e-6)
            .unwrap()
    );
    assert!(
        causal
            .all_close(&run(Mask::Array(&additive), None), 1e-5, 1e-6)
            .unwrap()
    );
    let never = Array::vector(&[-1e9f32; 4]).unwrap();
    assert!(
        causal
            .all_close(&run(Mask::Causal, Some(&never)), 1e-5, 1e-6)
            .unwrap()
    );
    let always = Array::vector(&[1e9f32; 4]).unwrap();
    let zero = run(Mask::None, Some(&always))
        .abs()
        .unwrap()
        .max(mlx_rs_core::All, false)
        .unwrap();
    assert!(zero.item::<f32>().unwrap() < 1e-6);
    let sdpa = fast::scaled_dot_product_attention_with_sinks;
    assert!(sdpa(&q, &k, &v, 0.3, Mask::None, Some(&iota(&[2]))).is_err());
    assert!(
        sdpa(
            &q,
            &iota(&[1, 0, 5, 8]),
            &iota(&[1, 0, 5, 8]),
            0.3,
            Mask::None,
            None
        )
        .is_err()
    );
    assert!(sdpa(&q, &k, &small(&[1, 2, 4, 8]), 0.3, Mask::None, None).is_err());
    assert!(sdpa(&iota(&[3, 8]), &k, &v, 0.3, Mask::None, None).is_err());
}

#[test]
fn the_last_query_sees_every_key_whichever_are_more() {
    let v = iota(&[1, 1, 3, 8]);
    let q = iota(&[1, 1, 5, 8])
        .multiply(&Array::scalar(0.01f32).unwrap())
        .unwrap();
    let attend = |q: &Array, mask| {
        fast::scaled_dot_product_attention_with_sinks(q, &v, &v, 0.3, mask, None).unwrap()
    };
    let causal = attend(&q, Mask::Causal);
    let part = |a: &Array, axis, from, to| a.slice_axis(axis, from, to).unwrap();
    // With five queries and three keys, the first two queries see no key, and the third sees one.
    assert!(
        part(&causal, 2, 2, 3)
            .all_close(&part(&v, 2, 0, 1), 1e-5, 1e-5)
            .unwrap()
    );
    let last = part(&q, 2, 4, 5);
    assert!(
        part(&causal, 2, 4, 5)
            .all_close(&attend(&last, Mask::None), 1e-5, 1e-5)
            .unwrap()
    );
    let square = attend(&part(&q, 2, 2, 5), Mask::Causal);
    assert!(
        part(&causal, 2, 2, 5)
            .all_close(&square, 1e-5, 1e-5)
            .unwrap()
    );
}

#[test]
fn einsum_contracts() {
    let (a, b) = (iota(&[2, 3]), iota(&[3, 2]));
    assert_eq!(
        read(einsum("ij,jk->ik", &[&a, &b]).unwrap()),
        read(a.matmul(&b).unwrap())
    );
    assert_eq!(
        read(einsum("ij->ji", &[&a]).unwrap()),
        read(a.transpose().unwrap())
    );
    let batch = iota(&[4, 2, 3]);
    assert_eq!(
        read(einsum("...ij,jk", &[&batch, &b]).unwrap()),
        read(batch.matmul(&b).unwrap())
    );
    assert!(einsum("ii", &[&a]).is_err());
    assert!(einsum("%s%n", &[&a]).is_err());
}

#[test]
fn tile_and_roll() {
    let a = iota(&[2, 2]);
    assert_eq!(
        read(a.tile(&[2]).unwrap()),
        [0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 2.0, 3.0]
    );
    assert_eq!(a.tile(&[0, 1, 3]).unwrap().shape(), [0, 2, 6]);
    assert!(a.tile(&[-1]).is_err());
    assert!(a.tile(&[i32::MAX]).is_err());
    let v = iota(&[5]);
    assert_eq!(read(v.roll(2, 0).unwrap()), [3.0, 4.0, 0.0, 1.0, 2.0]);
    for shift in [i32::MIN, -7, 0, 5, i32::MAX] {
        let got = read(v.roll(shift, mlx_rs_core::All).unwrap());
        let at = shift.rem_euclid(5) as usize;
        assert_eq!(got[at], 0.0, "{shift}");
    }
    assert_eq!(iota(&[0, 2]).roll(1, 0).unwrap().shape(), [0, 2]);
    assert!(v.roll(1, 1).is_err());
    assert!(a.roll_axes(&[1], &[0, 1]).is_err());
}
