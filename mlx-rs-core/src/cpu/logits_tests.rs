//! Compares log-probabilities with sums in float64.

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
            // Values are multiples of a quarter, so that some are equal.
            ((state >> 20) as f32 / 100.0).floor() / 4.0 - 3.0
        })
        .collect()
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
        log_probabilities(
            &nothing.flatten(0, -1).unwrap(),
            &Array::vector(&[0u32]).unwrap(),
            1,
        ),
        log_probabilities(
            &Array::from_slice(&[1i32, 2], &[1, 2]).unwrap(),
            &Array::vector(&[0u32]).unwrap(),
            1,
        ),
    ];
    assert!(wrong.iter().all(Result::is_err));
}
