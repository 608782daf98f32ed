//! Choices from long rows against a full sort, float64 and what the draws are said to be.

use super::*;
use crate::{Device, Stream};

const NO: f32 = f32::NEG_INFINITY;

fn array(rows: &[Vec<f32>]) -> Array {
    let shape = [rows.len() as i32, rows[0].len() as i32];
    Array::from_slice(&rows.concat(), &shape).unwrap()
}

fn on_cpu<T>(f: impl FnOnce() -> T) -> T {
    Stream::default_of(Device::cpu()).unwrap().scope(f)
}

fn numbers(n: usize) -> Vec<f32> {
    let mut state = 3u32;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Coarse, so that there are equals.
            ((state >> 20) as f32 / 100.0).floor() / 4.0 - 3.0
        })
        .collect()
}

#[test]
fn the_greatest_are_those_of_a_full_sort() {
    let rows = [numbers(3000), numbers(6000)[3000..].to_vec()];
    for k in [1usize, 2, 40, 1024, 2999, 3000] {
        let (values, indices, totals) = on_cpu(|| {
            let g = top_k(&array(&rows), k).unwrap();
            (
                g.values.to_vec::<f32>().unwrap(),
                g.indices.to_vec::<u32>().unwrap(),
                g.log_total.to_vec::<f32>().unwrap(),
            )
        });
        for (r, row) in rows.iter().enumerate() {
            let mut order: Vec<u32> = (0..3000).collect();
            order.sort_by(|&a, &b| row[a as usize].total_cmp(&row[b as usize]));
            let max = row[order[2999] as usize];
            assert_eq!(indices[r * k..(r + 1) * k], order[3000 - k..], "k {k}");
            for (v, &i) in values[r * k..].iter().zip(&order[3000 - k..]) {
                assert_eq!(*v, row[i as usize] - max);
            }
            let total: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
            assert!((f64::from(totals[r]) - total.ln()).abs() < 1e-5);
        }
    }
}

#[test]
fn infinities_have_their_place() {
    let inf = f32::INFINITY;
    let rows = [
        vec![NO, inf, 1.0, inf],
        vec![NO, NO, NO, NO],
        vec![f32::NAN, -0.0, 0.0, NO],
    ];
    let g = on_cpu(|| top_k(&array(&rows), 3)).unwrap();
    assert_eq!(
        g.indices.to_vec::<u32>().unwrap(),
        [2, 1, 3, 1, 2, 3, 3, 1, 2]
    );
    let values = g.values.to_vec::<f32>().unwrap();
    assert_eq!(values[..3], [NO, 0.0, 0.0]);
    let totals = g.log_total.to_vec::<f32>().unwrap();
    assert!(
        (totals[0] - 2f32.ln()).abs() < 1e-6 && totals[1] == NO,
        "{totals:?}"
    );
}

#[test]
fn draws_pass_through_the_distribution_in_order() {
    let row: Vec<f32> = [0.1f32, 0.0, 0.2, 0.7].iter().map(|p| p.ln()).collect();
    let at = |scale: f32, u: f64| {
        on_cpu(|| draw(&array(std::slice::from_ref(&row)), &[scale], &[u]))
            .unwrap()
            .to_vec::<u32>()
            .unwrap()[0]
    };
    for (u, token) in [
        (0.0, 0),
        (0.09, 0),
        (0.11, 2),
        (0.29, 2),
        (0.31, 3),
        (0.999_999, 3),
    ] {
        assert_eq!(at(1.0, u), token, "{u}");
    }
    // Cold: the best alone; hot: all possible ones with equal probability.
    assert_eq!([at(f32::MAX, 0.0), at(f32::MAX, 0.99)], [3, 3]);
    assert_eq!([at(0.0, 0.3), at(0.0, 0.4), at(0.0, 0.7)], [0, 2, 3]);
    let rows = [vec![NO, NO], vec![NO, -5.0], vec![1.0, f32::INFINITY]];
    let tokens = on_cpu(|| draw(&array(&rows), &[1.0; 3], &[0.0, 0.5, 0.0])).unwrap();
    assert_eq!(tokens.to_vec::<u32>().unwrap(), [0, 1, 1]);
}

#[test]
fn logarithms_are_those_of_the_softmax() {
    let inf = f32::INFINITY;
    let rows = [
        numbers(100),
        [vec![inf, NO, inf, 3e38], vec![1.0; 96]].concat(),
    ];
    let chosen = Array::vector(&[7u32, 2]).unwrap();
    for k in [0usize, 1, 5, 100] {
        let (chosen, values, indices) = on_cpu(|| {
            let l = log_probabilities(&array(&rows), &chosen, k).unwrap();
            (
                l.chosen.to_vec::<f32>().unwrap(),
                l.values.to_vec::<f32>().unwrap(),
                l.indices.to_vec::<u32>().unwrap(),
            )
        });
        let max = rows[0].iter().copied().fold(NO, f32::max);
        let total: f64 = rows[0].iter().map(|x| f64::from(x - max).exp()).sum();
        let expected = f64::from(rows[0][7] - max) - total.ln();
        assert!((f64::from(chosen[0]) - expected).abs() < 1e-5);
        assert_eq!(chosen[1], -(2f32.ln()));
        assert_eq!((values.len(), indices.len()), (2 * k, 2 * k));
        for (value, &i) in values[..k].iter().zip(&indices) {
            let expected = f64::from(rows[0][i as usize] - max) - total.ln();
            assert!((f64::from(*value) - expected).abs() < 1e-5);
        }
        assert!(values[..k].is_sorted());
        if k > 1 {
            assert_eq!(indices[2 * k - 2..], [0, 2]);
        }
    }
    let nothing = array(&[vec![NO, NO]]);
    let l = on_cpu(|| log_probabilities(&nothing, &Array::vector(&[9u32]).unwrap(), 1));
    let l = on_cpu(|| l.unwrap().chosen.to_vec::<f32>().unwrap());
    assert_eq!(l, [NO]);
    let wrong = [
        log_probabilities(&nothing, &Array::vector(&[0u32]).unwrap(), 3),
        log_probabilities(&nothing, &Array::vector(&[0u32, 0]).unwrap(), 1),
        log_probabilities(&nothing, &Array::vector(&[0.0f32]).unwrap(), 1),
    ];
    assert!(wrong.iter().all(Result::is_err));
}

#[test]
fn what_does_not_fit_is_an_error() {
    let x = array(&[vec![1.0, 2.0]]);
    let kind = |r: Result<TopK>| r.unwrap_err().kind();
    assert_eq!(kind(top_k(&x, 0)), ErrorKind::Index);
    assert_eq!(kind(top_k(&x, 3)), ErrorKind::Index);
    assert_eq!(kind(top_k(&x.flatten(0, -1).unwrap(), 1)), ErrorKind::Shape);
    let e = draw(&x, &[1.0, 1.0], &[0.5]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Shape);
    let x = Array::from_slice(&[1i32, 2], &[1, 2]).unwrap();
    assert_eq!(
        draw(&x, &[1.0], &[0.5]).unwrap_err().kind(),
        ErrorKind::Shape
    );
}
