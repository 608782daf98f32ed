//! Compares the nucleus of a row with a full sort in float64.

use super::*;
use crate::sampling::softmax_pass::max_of;
use crate::testing::with_each;

const NO: f32 = f32::NEG_INFINITY;

/// Pseudo-random values in `[0, 1)`.
fn uniform() -> impl FnMut() -> f32 {
    let mut state = 3u32;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    }
}

/// The indices that the definition of top-p keeps, ascending, from a full sort.
fn reference(row: &[f32], p: f32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    order.sort_by(|&a, &b| row[a as usize].total_cmp(&row[b as usize]));
    let max = f64::from(row[order[row.len() - 1] as usize]);
    let weight = |&i: &u32| match f64::from(row[i as usize]) {
        x if x == max => 1.0,
        x => (x - max).exp(),
    };
    let total: f64 = order.iter().map(weight).sum();
    let mut gone = 0.0;
    let dropped = order[..row.len() - 1].iter().take_while(|&i| {
        gone += weight(i);
        gone <= (1.0 - f64::from(p)) * total
    });
    let mut nucleus = order[dropped.count()..].to_vec();
    nucleus.sort_unstable();
    nucleus
}

/// The candidates that the kernel keeps, in its order.
fn kept(isa: Isa, row: &[f32], p: f32) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    Workspace::with(|workspace| {
        workspace.find_block_maxima(isa, row);
        let max = max_of(&workspace.block_maxima);
        keep_top_p(isa, row, (max, NO), p, workspace);
        candidates.clone_from(&workspace.candidates);
    });
    candidates
}

fn places(row: &[f32], p: f32) -> Vec<u32> {
    kept(Isa::detect(), row, p).iter().map(|f| f.1).collect()
}

#[test]
fn the_nucleus_is_that_of_a_full_sort() {
    with_each(|isa| {
        let mut next = uniform();
        for spread in [0.01, 1.0, 6.0, 30.0, 300.0] {
            for p in [0.05, 0.31, 0.5, 0.9, 0.95, 0.999] {
                for _ in 0..3 {
                    let row: Vec<f32> = (0..2000).map(|_| (next() - 0.5) * spread).collect();
                    let expected: Vec<Candidate> = reference(&row, p)
                        .into_iter()
                        .map(|i| (row[i as usize], i))
                        .collect();
                    assert_eq!(kept(isa, &row, p), expected, "{isa:?} {spread} {p}");
                }
            }
        }
    });
}

#[test]
fn the_ends() {
    // Of equal values at the limit, the nucleus contains only as many as needed: those with the
    // greatest indices.
    assert_eq!(places(&[1.0; 4], 0.5), [2, 3]);
    assert_eq!(places(&[1.0; 4], 1e-9), [3]);
    assert_eq!(places(&[1.0; 4], 1.0), [0, 1, 2, 3]);
    assert_eq!(places(&[NO, 2.0, NO], 0.9), [1]);
    // A token with an infinite logit has all the probability.
    let inf = f32::INFINITY;
    assert_eq!(places(&[inf, 1e38, inf, NO], 0.9), [0, 2]);
    assert_eq!(places(&[0.0, 0.0, 0.0, 9.0], 0.5), [3]);
    assert_eq!(places(&[0.0; 4], 0.75), [1, 2, 3]);
    assert_eq!(places(&[f32::NAN, 0.0, 0.0], 0.9), [1, 2]);
}

#[test]
fn what_is_not_wanted_changes_nothing_of_the_rest() {
    let mut next = uniform();
    // A large spread leaves a few probable tokens; a small one makes all tokens nearly equally
    // probable.
    for spread in [40.0f32, 12.0, 6.0, 2.0, 0.5] {
        let row: Vec<f32> = (0..5000).map(|_| next() * spread).collect();
        for p in [0.0, 0.05, 0.5, 0.9, 0.99, 1.0] {
            for min_p in [0.0f32, 1e-4, 0.02, 0.2, 0.5, 1.0] {
                Workspace::with(|workspace| {
                    let isa = Isa::detect();
                    workspace.find_block_maxima(isa, &row);
                    let max = max_of(&workspace.block_maxima);
                    let least = max + min_p.ln();
                    let wanted = |workspace: &Workspace| {
                        let all = workspace.candidates.iter().copied();
                        all.filter(|f| f.0 >= least).collect::<Vec<_>>()
                    };
                    keep_top_p(isa, &row, (max, NO), p, workspace);
                    let all = wanted(workspace);
                    keep_top_p(isa, &row, (max, least), p, workspace);
                    assert_eq!(wanted(workspace), all, "{spread} {p} {min_p}");
                    assert!(!all.is_empty());
                });
            }
        }
    }
}
