//! Compares top-k, log-probabilities and draws on long rows with a full sort in float64 and with
//! the definition of a draw.

use super::*;
use crate::testing::with_each;

const NO: f32 = f32::NEG_INFINITY;

/// Values on a coarse grid, so that some are equal.
fn numbers(n: usize) -> Vec<f32> {
    let mut state = 3u32;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 20) as f32 / 100.0).floor() / 4.0 - 3.0
        })
        .collect()
}

/// The `k` greatest elements: their distances to the maximum, their indices, and the logarithm of
/// the sum of all weights.
fn greatest(isa: Isa, row: &[f32], k: usize) -> (Vec<f32>, Vec<f32>, f32) {
    let (mut values, mut places, mut total) = (vec![0.0; k], vec![0.0; k], 0.0);
    Workspace::with(|workspace| {
        let max = rank(isa, row, workspace, &mut values, &mut places);
        total = log_total(isa, row, max, workspace);
    });
    (values, places, total)
}

#[test]
fn the_greatest_are_those_of_a_full_sort() {
    let numbers = numbers(6000);
    with_each(|isa| {
        for row in [&numbers[..3000], &numbers[3000..]] {
            for k in [1usize, 2, 40, 1024, 2999, 3000] {
                let (values, places, log_total) = greatest(isa, row, k);
                let mut order: Vec<usize> = (0..3000).collect();
                order.sort_by(|&a, &b| row[a].total_cmp(&row[b]));
                let max = row[order[2999]];
                for ((&value, &place), &i) in values.iter().zip(&places).zip(&order[3000 - k..]) {
                    assert_eq!((place, value), (i as f32, row[i] - max), "{isa:?} {k}");
                }
                let total: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
                assert!((f64::from(log_total) - total.ln()).abs() < 1e-5);
            }
        }
    });
}

#[test]
fn infinities_have_their_place() {
    let inf = f32::INFINITY;
    let of = |row: &[f32]| greatest(Isa::detect(), row, 3);
    let (values, places, total) = of(&[NO, inf, 1.0, inf]);
    assert_eq!((values, places), (vec![NO, 0.0, 0.0], vec![2.0, 1.0, 3.0]));
    assert!((total - 2f32.ln()).abs() < 1e-6, "{total}");
    let (_, places, total) = of(&[NO; 4]);
    assert_eq!((places, total), (vec![1.0, 2.0, 3.0], NO));
    let (_, places, _) = of(&[f32::NAN, -0.0, 0.0, NO]);
    assert_eq!(places, [3.0, 1.0, 2.0]);
}

#[test]
fn draws_pass_through_the_distribution_in_order() {
    let draw = |row: &[f32], by: f32, uniform: f64| {
        let mut drawn = usize::MAX;
        Workspace::with(|workspace| {
            let isa = Isa::detect();
            workspace.find_block_maxima(isa, row);
            let max = max_of(&workspace.block_maxima);
            drawn = draw_from(isa, row, Scale { max, by }, uniform, workspace);
        });
        drawn
    };
    let row: Vec<f32> = [0.1f32, 0.0, 0.2, 0.7].iter().map(|p| p.ln()).collect();
    for (uniform, token) in [
        (0.0, 0),
        (0.09, 0),
        (0.11, 2),
        (0.29, 2),
        (0.31, 3),
        (0.999_999, 3),
    ] {
        assert_eq!(draw(&row, 1.0, uniform), token, "{uniform}");
    }
    // A huge scale (low temperature) leaves only the best token. Scale 0 makes all possible tokens
    // equally probable.
    assert_eq!([0.0, 0.99].map(|u| draw(&row, f32::MAX, u)), [3, 3]);
    assert_eq!([0.3, 0.4, 0.7].map(|u| draw(&row, 0.0, u)), [0, 2, 3]);
    assert_eq!(draw(&[NO, NO], 1.0, 0.0), 0);
    assert_eq!(draw(&[NO, -5.0], 1.0, 0.5), 1);
    assert_eq!(draw(&[1.0, f32::INFINITY], 1.0, 0.0), 1);
}

#[test]
fn draws_of_long_rows_pass_where_the_running_sum_does() {
    let row = numbers(1000);
    let max = row.iter().copied().fold(NO, f32::max);
    with_each(|isa| {
        for by in [0.3f32, 1.0, 1.25] {
            let weight = |&x: &f32| (f64::from(x - max) * f64::from(by)).exp();
            let total: f64 = row.iter().map(weight).sum();
            let mut before = 0.0;
            for (place, w) in row.iter().map(weight).enumerate() {
                // `uniform` is in the middle of a token's range, so rounding cannot change the
                // drawn token.
                let uniform = (before + w / 2.0) / total;
                before += w;
                if w / total < 1e-5 {
                    continue;
                }
                Workspace::with(|workspace| {
                    workspace.find_block_maxima(isa, &row);
                    let drawn = draw_from(isa, &row, Scale { max, by }, uniform, workspace);
                    assert_eq!(drawn, place, "{isa:?} {by} {uniform}");
                });
            }
        }
    });
}
