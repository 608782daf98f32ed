//! Compares the fused sampling operation with its separate stages, in float64 and with full sorts.

use std::sync::Arc;

use mlx_cpu_kernels::testing::{MOST_CANDIDATES, ascending, relative_logit, tail};
use mlx_cpu_kernels::{CountPenalties, DrawParams, Pick, RepetitionPenalty};
use proptest::prelude::*;

use super::*;
use crate::{Device, Stream};

const NO: f32 = f32::NEG_INFINITY;

/// The test skips draws with a value this close to a threshold, because rounding could decide them.
const MARGIN: f64 = 1e-5;

fn chosen(logits: &[Vec<f32>], rows: &[(SampleParams, Vec<u32>)]) -> Vec<u32> {
    let n = logits[0].len();
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        let x = Array::from_slice(&logits.concat(), &[logits.len() as i32, n as i32]).unwrap();
        let rows = rows.iter().map(|(row, seen)| SampleRow {
            seen: (!seen.is_empty()).then(|| Array::vector(seen).unwrap()),
            params: row.clone(),
        });
        let tokens = sample(&x, rows.collect()).unwrap();
        tokens.to_vec::<u32>().unwrap()
    })
}

/// The logits after penalties, biases and bans.
fn changed(logits: &[f32], seen: &[u32], row: &SampleParams) -> Vec<f32> {
    let mut x = logits.to_vec();
    for (id, x) in x.iter_mut().enumerate() {
        let id = id as u32;
        let times = |last| tail(seen, last).iter().filter(|&&t| t == id).count();
        if let Some(r) = row.repeat
            && times(r.last) > 0
        {
            *x = if *x < 0.0 {
                *x * r.penalty
            } else {
                *x / r.penalty
            };
        }
        if let Some(c) = row.count
            && times(c.last) > 0
        {
            *x -= times(c.last) as f32 * c.frequency;
            *x -= c.presence;
        }
        for (of, bias) in &*row.bias {
            if *of == id {
                *x += bias;
            }
        }
        let bit = |words: &Vec<u32>| {
            let word = words.get(id as usize / 32);
            word.is_some_and(|w| w >> (id % 32) & 1 == 1)
        };
        if row.banned.contains(&id) || !row.allowed.as_ref().is_none_or(bit) {
            *x = NO;
        }
    }
    x
}

fn below(x: f32, max: f32) -> f64 {
    if x == max {
        0.0
    } else {
        f64::from(x) - f64::from(max)
    }
}

fn top_k(of: &[(f32, u32)]) -> f32 {
    of.iter().map(|f| f.0).fold(NO, f32::max)
}

/// The tokens that top-n-sigma keeps, and whether rounding could change them.
fn within_deviations(order: &mut Vec<(f32, u32)>, n: f32) -> bool {
    let max = top_k(order);
    let possible: Vec<f64> = order
        .iter()
        .map(|o| below(o.0, max))
        .filter(|r| r.is_finite())
        .collect();
    let count = possible.len() as f64;
    let mean = possible.iter().sum::<f64>() / count;
    let variance = possible.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / count;
    let least = -f64::from(n) * variance.sqrt();
    let near = |r: &f64| (r - least).abs() < 1e-5 * (1.0 - least);
    let near = variance > 0.0 && possible.iter().any(near);
    order.retain(|o| below(o.0, max) >= least);
    near
}

/// The tokens that typical-p keeps, and whether rounding could change them.
fn typical(order: &mut Vec<(f32, u32)>, p: f32) -> bool {
    let max = top_k(order);
    let total: f64 = order.iter().map(|o| below(o.0, max).exp()).sum();
    let share = |x: f32| below(x, max).exp() / total;
    let shares = order.iter().map(|o| share(o.0)).filter(|q| *q > 0.0);
    let entropy: f64 = shares.map(|q| -q * q.ln()).sum();
    let distance = |x: f32| (-share(x).ln() - entropy).abs();
    let mut by_distance = order.clone();
    by_distance.sort_by(|a, b| distance(a.0).total_cmp(&distance(b.0)));
    let (mut sum, mut limit, mut near) = (0.0, 0.0, false);
    for o in &by_distance {
        limit = distance(o.0);
        sum += share(o.0);
        near |= (sum - f64::from(p)).abs() < MARGIN;
        if sum >= f64::from(p) {
            break;
        }
    }
    // Tokens with equal logits are kept or removed together.
    let level = |o: &&(f32, u32)| (distance(o.0) - limit).abs() < 1e-5 * (1.0 + limit);
    let mut level: Vec<u32> = order
        .iter()
        .filter(level)
        .map(|o| (o.0 + 0.0).to_bits())
        .collect();
    level.dedup();
    near |= level.len() > 1 || !limit.is_finite();
    order.retain(|o| distance(o.0) <= limit);
    near
}

/// [`left`] with the temperature first, then top-n-sigma, top-k, top-p, min-p, typical-p and XTC.
/// Each filter uses the result of the previous one.
fn left_after_temperature(x: &[f32], f: &DrawParams) -> Option<Vec<(u32, f64)>> {
    let mut near = false;
    let max = x.iter().copied().fold(NO, f32::max); // ignores NaN
    if max == NO {
        return Some(vec![(0, 1.0)]);
    }
    let scaled = |x: f32| {
        let y = relative_logit(x, max) * f.scale;
        if y.is_nan() { NO } else { y }
    };
    let mut order: Vec<(f32, u32)> = x.iter().map(|&x| scaled(x)).zip(0..).collect();
    order.sort_by(ascending);
    if f.top_n_sigma > 0.0 {
        near |= within_deviations(&mut order, f.top_n_sigma);
    }
    if f.top_k > 0 && f.top_k < order.len() {
        order.drain(..order.len() - f.top_k);
    }
    let sum = |of: &[(f32, u32)]| of.iter().map(|o| f64::from(o.0).exp()).sum::<f64>();
    if f.top_p < 1.0 {
        let total = sum(&order);
        let mut first = order.len();
        let mut before = 0.0;
        while first > 0 && before < f64::from(f.top_p) {
            first -= 1;
            before += f64::from(order[first].0).exp() / total;
            near |= (before - f64::from(f.top_p)).abs() < MARGIN;
        }
        order.drain(..first);
    }
    if f.min_p > 0.0 {
        let least = f.min_p.ln();
        order.retain(|o| o.0 >= least);
    }
    if f.typical_p < 1.0 {
        near |= typical(&mut order, f.typical_p);
    }
    if let Some((threshold, spared)) = &f.xtc {
        let total = sum(&order);
        let of = |y: f32| (f64::from(y).exp() / total) as f32;
        let threshold_near = |o: &(f32, u32)| f64::from((of(o.0) - threshold).abs()) < MARGIN;
        near |= *threshold > 0.0 && order.iter().any(threshold_near);
        let above = order.iter().map(|o| of(o.0)).filter(|p| p > threshold);
        let least = above.fold(f32::INFINITY, f32::min);
        near |= least < MARGIN as f32;
        // Values that are equal in float32 may differ in float64.
        let twin = |o: &(f32, u32)| of(o.0) != least && (of(o.0) / least - 1.0).abs() < 1e-5;
        near |= least.is_finite() && order.iter().any(twin);
        order.retain(|o| of(o.0) <= least || spared.contains(&o.1));
    }
    order.sort_by_key(|o| o.1);
    let max = top_k(&order);
    let left = order.iter().map(|o| (o.1, below(o.0, max).exp())).collect();
    (!near).then_some(left)
}

/// The weights of the tokens that the filters keep, in the order of summation. `None` if rounding
/// may decide a filter.
fn left(x: &[f32], f: &DrawParams) -> Option<Vec<(u32, f64)>> {
    if f.temperature_first {
        return left_after_temperature(x, f);
    }
    let mut near = false;
    let mut order: Vec<(f32, u32)> = x
        .iter()
        .map(|&x| if x.is_nan() { NO } else { x })
        .zip(0..)
        .collect();
    order.sort_by(ascending);
    let max = top_k(&order);
    if max == NO {
        return Some(vec![(0, 1.0)]);
    }
    if f.top_n_sigma > 0.0 {
        near |= within_deviations(&mut order, f.top_n_sigma);
    }
    if f.typical_p < 1.0 {
        near |= typical(&mut order, f.typical_p);
    }
    let n = x.len();
    let max = top_k(&order);
    let sum = |of: &[(f32, u32)]| of.iter().map(|f| below(f.0, max).exp()).sum::<f64>();
    let total = sum(&order);
    let candidates = f.top_k > 0 && f.top_k < n && f.top_k <= MOST_CANDIDATES && f.xtc.is_none();
    if candidates && f.top_k < order.len() {
        order.drain(..order.len() - f.top_k);
    }
    if f.top_p < 1.0 {
        // Top-p keeps a token if the more probable tokens have a total probability below p.
        let mut first = order.len();
        let mut before = 0.0;
        while first > 0 && before < f64::from(f.top_p) {
            first -= 1;
            before += below(order[first].0, max).exp() / total;
            near |= (before - f64::from(f.top_p)).abs() < MARGIN;
        }
        order.drain(..first);
    }
    if f.min_p > 0.0 {
        let least = f.min_p.ln();
        order.retain(|o| match candidates {
            true => relative_logit(o.0, max) >= least,
            false => o.0 >= max + least,
        });
    }
    if let Some((threshold, spared)) = &f.xtc {
        let total = sum(&order);
        let of = |x: f32| (below(x, max).exp() / total) as f32;
        let threshold_near = |o: &(f32, u32)| f64::from((of(o.0) - threshold).abs()) < MARGIN;
        near |= *threshold > 0.0 && order.iter().any(threshold_near);
        let above = order.iter().map(|o| of(o.0)).filter(|p| p > threshold);
        let least = above.fold(f32::INFINITY, f32::min);
        // Weights near zero may become zero in float32, so rounding may decide.
        near |= least < MARGIN as f32;
        order.retain(|o| of(o.0) <= least || spared.contains(&o.1));
    }
    if f.top_k > 0 && f.top_k < order.len() {
        order.drain(..order.len() - f.top_k);
    }
    if !candidates {
        order.sort_by_key(|o| o.1);
    }
    let max = top_k(&order);
    let weight = |x: f32| match below(x, max) {
        0.0 => 1.0,
        f64::NEG_INFINITY => 0.0,
        below => (below * f64::from(f.scale)).exp(),
    };
    let left = order.iter().map(|o| (o.1, weight(o.0))).collect();
    (!near).then_some(left)
}

/// Checks every draw of `row`, except those that rounding may decide.
fn check(logits: &[f32], seen: &[u32], row: &SampleParams) {
    let x = changed(logits, seen, row);
    let Pick::Draw(filters) = &row.pick else {
        let best = x.iter().copied().fold(NO, f32::max);
        let expected = x.iter().position(|&x| x == best).unwrap_or(0);
        let got = chosen(&[logits.to_vec()], &[(row.clone(), seen.to_vec())]);
        assert_eq!(got, [expected as u32], "{row:?}");
        return;
    };
    let Some(left) = left(&x, filters) else {
        return;
    };
    let total: f64 = left.iter().map(|l| l.1).sum();
    let mut expected = Vec::new();
    let mut rows = Vec::new();
    let mut before = 0.0;
    for (id, w) in left {
        if w / total > MARGIN && rows.len() < 64 {
            let filters = DrawParams {
                uniform: (before + w / 2.0) / total,
                ..filters.clone()
            };
            let row = SampleParams {
                pick: Pick::Draw(filters),
                ..row.clone()
            };
            rows.push((row, seen.to_vec()));
            expected.push(id);
        }
        before += w;
    }
    let got = chosen(&vec![logits.to_vec(); rows.len()], &rows);
    assert_eq!(got, expected, "{row:?} of {logits:?}, {seen:?}");
}

fn filters() -> DrawParams {
    DrawParams {
        scale: 1.25,
        uniform: 0.5,
        ..DrawParams::new()
    }
}

fn draw(f: DrawParams) -> SampleParams {
    SampleParams::new(Pick::Draw(f))
}

/// Logits on a coarse grid, so that values are equal or clearly different.
fn numbers() -> impl Strategy<Value = Vec<f32>> {
    let number = prop_oneof![
        20 => (-40i32..40).prop_map(|i| i as f32 * 0.25),
        4 => Just(NO),
        1 => Just(f32::NAN),
    ];
    let odd = prop_oneof![
        8 => Just(None),
        1 => Just(Some(f32::INFINITY)),
        1 => Just(Some(f32::MAX)),
        1 => Just(Some(90.0f32)),
    ];
    (
        prop::collection::vec(number, 1..200),
        odd,
        prop::sample::select(vec![0.0f32, 0.1, 1.0, 5.0]),
    )
        .prop_map(|(mut x, odd, spread)| {
            for x in &mut x {
                // Infinity is left unchanged, because infinity times zero is NaN.
                *x = if x.is_infinite() { *x } else { *x * spread };
            }
            if let Some(odd) = odd {
                let at = x.len() / 2;
                x[at] = odd;
                x[0] = odd;
            }
            x
        })
}

fn some_filters() -> impl Strategy<Value = DrawParams> {
    let xtc = prop_oneof![
        3 => Just(None),
        1 => (0.0f32..0.6, prop::collection::vec(0u32..300, 0..3))
            .prop_map(|(t, spared)| Some((t, spared.into()))),
        1 => Just(Some((0.0, Arc::default()))),
    ];
    (
        prop::sample::select(vec![1.0f32, 1.0, 0.999_99, 0.95, 0.613, 0.17, 1e-3]),
        prop::sample::select(vec![0.0f32, 0.0, 1e-4, 0.02, 0.43, 1.0]),
        xtc,
        prop::sample::select(vec![0usize, 0, 1, 2, 7, 40, 150, 199, 2000]),
        prop::sample::select(vec![0.0f32, 0.3, 1.0, 1.25, 20.0, f32::MAX]),
        any::<bool>(),
        prop::sample::select(vec![0.0f32, 0.0, 0.0, 0.4, 1.0, 2.5]),
        prop::sample::select(vec![1.0f32, 1.0, 1.0, 0.01, 0.4, 0.9, 0.999]),
    )
        .prop_map(
            |(top_p, min_p, xtc, top_k, scale, temperature_first, top_n_sigma, typical_p)| {
                DrawParams {
                    top_n_sigma,
                    typical_p,
                    top_p,
                    min_p,
                    xtc,
                    top_k,
                    scale,
                    temperature_first,
                    ..filters()
                }
            },
        )
}

fn some_row() -> impl Strategy<Value = SampleParams> {
    let pick = prop_oneof![
        1 => Just(Pick::Greedy),
        6 => some_filters().prop_map(Pick::Draw),
    ];
    let penalties = (
        prop::option::of((0usize..12, prop::sample::select(vec![0.5f32, 1.1, 2.0]))),
        prop::option::of((0usize..12, -1i32..3, -1i32..3)),
    );
    (
        pick,
        penalties,
        prop::collection::btree_map(0u32..300, (-8i32..9).prop_map(|b| b as f32), 0..4),
        prop::collection::vec(0u32..300, 0..4),
        prop::option::weighted(0.2, prop::collection::vec(any::<u32>(), 0..7)),
    )
        .prop_map(
            |(pick, (repeat, count), bias, banned, allowed)| SampleParams {
                repeat: repeat.map(|(last, penalty)| RepetitionPenalty { last, penalty }),
                count: count.map(|(last, presence, frequency)| CountPenalties {
                    last,
                    presence: presence as f32 * 0.5,
                    frequency: frequency as f32 * 0.25,
                }),
                bias: bias.into_iter().collect(),
                banned: banned.into(),
                allowed,
                pick,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn a_row_goes_through_its_stages(
        logits in numbers(),
        seen in prop::collection::vec(0u32..250, 0..12),
        row in some_row(),
    ) {
        check(&logits, &seen, &row);
    }
}

#[test]
fn long_rows_do_as_short_ones() {
    let mut state = 5u32;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    // Flat rows, as from models, and steep rows. The nucleus of each ends in a different search
    // range.
    for spread in [0.5, 20.0, 60.0, 200.0] {
        let logits: Vec<f32> = (0..5000)
            .map(|_| (next() * spread * 4.0).round() / 4.0)
            .collect();
        for f in [
            filters(),
            DrawParams {
                top_p: 0.9,
                ..filters()
            },
            DrawParams {
                top_p: 0.999_9,
                ..filters()
            },
            DrawParams {
                min_p: 0.05,
                ..filters()
            },
            DrawParams {
                top_p: 0.95,
                min_p: 0.02,
                top_k: 40,
                ..filters()
            },
            DrawParams {
                top_p: 0.95,
                xtc: Some((1e-3, [17, 18].into())),
                top_k: 40,
                ..filters()
            },
            DrawParams {
                xtc: Some((1e-3, Arc::default())),
                ..filters()
            },
            DrawParams {
                top_k: 1500,
                ..filters()
            },
            DrawParams {
                top_n_sigma: 1.0,
                ..filters()
            },
            DrawParams {
                typical_p: 0.5,
                top_k: 40,
                ..filters()
            },
        ]
        .into_iter()
        .flat_map(|f| {
            [false, true].map(|temperature_first| DrawParams {
                temperature_first,
                ..f.clone()
            })
        }) {
            let row = SampleParams {
                repeat: Some(RepetitionPenalty {
                    last: 64,
                    penalty: 1.1,
                }),
                bias: [(3, 1.5)].into(),
                ..draw(f)
            };
            check(&logits, &[1, 2, 3, 4, 4, 4999, 5000], &row);
        }
    }
}

#[test]
fn the_ends() {
    let at = |logits: &[f32], f: DrawParams, uniform: f64| {
        chosen(
            &[logits.to_vec()],
            &[(draw(DrawParams { uniform, ..f }), Vec::new())],
        )[0]
    };
    let p = |top_p, top_k| DrawParams {
        top_p,
        top_k,
        ..filters()
    };
    let last = 1.0 - f64::EPSILON / 2.0;
    // With equal values at the threshold, no more tokens than needed are kept, those with greater
    // indices. The most probable token is kept for any p.
    for (f, first) in [
        (p(0.5, 0), 2),
        (p(0.5, 3), 2),
        (p(1e-9, 0), 3),
        (p(1e-9, 2), 3),
        (p(1.0, 3), 1),
        (p(0.75, 3), 1),
    ] {
        assert_eq!(at(&[1.0; 4], f.clone(), 0.0), first, "{f:?}");
        assert_eq!(at(&[1.0; 4], f.clone(), last), 3, "{f:?}");
    }
    let inf = f32::INFINITY;
    for f in [p(1.0, 0), p(0.9, 0), p(0.9, 2), p(1.0, 3)] {
        // Tokens with an infinite logit share all the probability. Without a logit above minus
        // infinity, the result is token 0.
        assert_eq!(at(&[inf, 1e38, inf, NO], f.clone(), 0.4), 0, "{f:?}");
        assert_eq!(at(&[inf, 1e38, inf, NO], f.clone(), 0.6), 2, "{f:?}");
        assert_eq!(at(&[NO, NO, -7.0, NO], f.clone(), 0.0), 2, "{f:?}");
        assert_eq!(at(&[NO, NO, -7.0, NO], f.clone(), last), 2, "{f:?}");
        assert_eq!(at(&[NO; 4], f.clone(), 0.7), 0, "{f:?}");
        assert_eq!(at(&[f32::NAN; 4], f.clone(), 0.7), 0, "{f:?}");
        let f = DrawParams {
            temperature_first: true,
            ..f
        };
        assert_eq!(at(&[inf, 1e38, inf, NO], f.clone(), 0.4), 0, "{f:?}");
        assert_eq!(at(&[inf, 1e38, inf, NO], f.clone(), 0.6), 2, "{f:?}");
        assert_eq!(at(&[NO, NO, -7.0, NO], f.clone(), last), 2, "{f:?}");
        assert_eq!(at(&[NO; 4], f.clone(), 0.7), 0, "{f:?}");
        assert_eq!(at(&[f32::NAN, 1.0, NO], f.clone(), 0.7), 1, "{f:?}");
    }
}

#[test]
fn rows_are_chosen_each_in_its_own_way() {
    let logits = vec![vec![4.0f32, 3.0, 2.0, 1.0]; 5];
    let rows = [
        (SampleParams::new(Pick::Forced(77)), vec![]),
        (SampleParams::new(Pick::Greedy), vec![]),
        (
            SampleParams {
                repeat: Some(RepetitionPenalty {
                    last: 1,
                    penalty: 8.0,
                }),
                ..SampleParams::new(Pick::Greedy)
            },
            vec![1, 0],
        ),
        (
            SampleParams {
                allowed: Some(vec![0b1000]),
                ..draw(filters())
            },
            vec![],
        ),
        (
            SampleParams {
                banned: [0, 1, 9].into(),
                ..draw(DrawParams {
                    scale: f32::MAX,
                    ..filters()
                })
            },
            vec![],
        ),
    ];
    assert_eq!(chosen(&logits, &rows), [77, 0, 1, 3, 2]);
    // With this many rows, threads share the rows.
    let many: Vec<_> = (0..400).map(|i| rows[i % 5].clone()).collect();
    let expected = [77, 0, 1, 3, 2].repeat(80);
    assert_eq!(chosen(&vec![logits[0].clone(); 400], &many), expected);
}

#[test]
fn what_does_not_fit_is_an_error() {
    let x = Array::from_slice(&[1.0f32, 2.0], &[1, 2]).unwrap();
    let row = || SampleRow::from(SampleParams::new(Pick::Greedy));
    let kind = |r: Result<Array>| r.unwrap_err().kind();
    assert_eq!(kind(sample(&x, vec![])), ErrorKind::Shape);
    assert_eq!(kind(sample(&x, vec![row(), row()])), ErrorKind::Shape);
    let seen = SampleRow {
        seen: Some(Array::vector(&[1.0f32]).unwrap()),
        ..row()
    };
    assert_eq!(kind(sample(&x, vec![seen])), ErrorKind::Shape);
    let x = Array::from_slice(&[1i32, 2], &[1, 2]).unwrap();
    assert_eq!(kind(sample(&x, vec![row()])), ErrorKind::Shape);
}

/// Tokens are returned as float32, which does not distinguish 2^24 and 2^24 + 1.
#[test]
fn forced_tokens_are_exact_or_refused() {
    let logits = Array::from_slice(&[0.0f32, 1.0], &[1, 2]).unwrap();
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        let forced = |id| sample(&logits, vec![SampleParams::new(Pick::Forced(id)).into()]);
        let last = (1 << 24) - 1;
        assert_eq!(forced(last).unwrap().to_vec::<u32>().unwrap(), [last]);
        for id in [1 << 24, (1 << 24) + 1, u32::MAX] {
            assert_eq!(forced(id).unwrap_err().kind(), ErrorKind::Index, "{id}");
        }
    });
}
