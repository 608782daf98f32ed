//! Tests the mLSTM recurrence against its definition: loops in float64, position by position.

use mlx_rs_core::{eval, zeros};
use proptest::prelude::*;

use super::*;

const EPS: f32 = 1e-6;

/// The sizes and values of one sequence. Gates are raw projection outputs.
#[derive(Debug, Clone)]
struct Case {
    heads: usize,
    dk: usize,
    dv: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    i: Vec<f32>,
    f: Vec<f32>,
}

impl Case {
    fn length(&self) -> usize {
        self.i.len() / self.heads
    }

    /// Returns the values of the case as arrays: heads `[1, H, L, D]`, gates `[1, H, L]`.
    fn inputs(&self) -> Inputs {
        let (h, l) = (self.heads as i32, self.length() as i32);
        let wide = |a: &[f32], d: usize| Array::from_slice(a, &[1, h, l, d as i32]).unwrap();
        let gate = |a: &[f32]| Array::from_slice(a, &[1, h, l]).unwrap();
        Inputs {
            q: wide(&self.q, self.dk),
            k: wide(&self.k, self.dk),
            v: wide(&self.v, self.dv),
            i: gate(&self.i),
            f: log_sigmoid(&gate(&self.f)).unwrap(),
        }
    }

    fn empty(&self) -> Memory {
        let (h, dk, dv) = (self.heads as i32, self.dk as i32, self.dv as i32);
        let zero = |shape: &[i32]| zeros(shape, Dtype::Float32).unwrap();
        Memory {
            c: zero(&[1, h, dk, dv]),
            n: zero(&[1, h, dk]),
            m: zero(&[1, h]),
        }
    }

    /// Computes the definition. Returns the outputs, and the error of each output under relative
    /// rounding errors of 1e-6. If terms cancel in numerator or denominator, this error exceeds
    /// 1e-6 of the output.
    fn defined(&self) -> (Vec<f64>, Vec<f64>) {
        let (l, dk, dv) = (self.length(), self.dk, self.dv);
        let (mut out, mut unsure) = (Vec::new(), Vec::new());
        for head in 0..self.heads {
            let (mut c, mut n) = (vec![0.0; dk * dv], vec![0.0; dk]);
            let (mut c_abs, mut n_abs) = (c.clone(), n.clone());
            let mut m = 0.0f64;
            for t in 0..l {
                let at = head * l + t;
                let row = |a: &[f32], d: usize| -> Vec<f64> {
                    a[at * d..(at + 1) * d]
                        .iter()
                        .map(|&x| f64::from(x))
                        .collect()
                };
                let (q, k, v) = (row(&self.q, dk), row(&self.k, dk), row(&self.v, dv));
                let (i, f) = (f64::from(self.i[at]), f64::from(self.f[at]));
                let f = -(-f).max(0.0) - (-f.abs()).exp().ln_1p();
                let next = (f + m).max(i);
                let (keep, take) = ((f + m - next).exp(), (i - next).exp());
                m = next;
                for a in 0..dk {
                    n[a] = keep * n[a] + take * k[a];
                    n_abs[a] = keep * n_abs[a] + take * k[a].abs();
                    for b in 0..dv {
                        let new = take * k[a] * v[b];
                        c[a * dv + b] = keep * c[a * dv + b] + new;
                        c_abs[a * dv + b] = keep * c_abs[a * dv + b] + new.abs();
                    }
                }
                let dot: f64 = (0..dk).map(|a| q[a] * n[a]).sum();
                let dot_abs: f64 = (0..dk).map(|a| q[a].abs() * n_abs[a]).sum();
                let den = dot.abs().max((-m).exp()) + f64::from(EPS);
                for b in 0..dv {
                    let num: f64 = (0..dk).map(|a| q[a] * c[a * dv + b]).sum();
                    let num_abs: f64 = (0..dk).map(|a| q[a].abs() * c_abs[a * dv + b]).sum();
                    out.push(num / den);
                    unsure.push((num_abs + (num / den).abs() * dot_abs) / den);
                }
            }
        }
        (out, unsure)
    }

    /// Returns the greatest difference between `h` `[1, H, L, DV]` and the definition, in units of
    /// the rounding error.
    fn distance(&self, h: &Array) -> f64 {
        let (defined, unsure) = self.defined();
        let actual = h.to_vec::<f32>().unwrap();
        assert_eq!(actual.len(), defined.len());
        (actual.iter().zip(&defined).zip(&unsure))
            .map(|((&f, &d), &u)| {
                assert!(f.is_finite(), "{f} instead of {d}");
                (f64::from(f) - d).abs() / (u + 1e-6)
            })
            .fold(0.0, f64::max)
    }
}

fn numbers(n: usize, seed: u64, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2) + 1;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
        })
        .collect()
}

fn case(
    (heads, length, dk, dv): (usize, usize, usize, usize),
    seed: u64,
    gate: impl Fn(f32) -> f32,
) -> Case {
    let part = |n: usize, seed: u64| numbers(heads * length * n, seed, 1.0);
    let gates = |seed| part(1, seed).into_iter().map(&gate).collect();
    Case {
        heads,
        dk,
        dv,
        q: part(dk, seed),
        k: part(dk, seed + 1),
        v: part(dv, seed + 2),
        i: gates(seed + 3),
        f: gates(seed + 4),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Varies sizes, chunks, and gates from small to extreme.
    #[test]
    fn every_chunk_length_equals_the_definition(
        heads in 1usize..4,
        length in 1usize..70,
        dk in 1usize..7,
        dv in 1usize..9,
        chunk in 1i32..80,
        spread in prop_oneof![Just(1.0f32), Just(15.0), Just(200.0)],
        seed in 0u64..1000,
    ) {
        let case = case((heads, length, dk, dv), seed, |x| x * spread);
        let (h, _) = scan(&case.inputs(), case.empty(), chunk, EPS).unwrap();
        let off = case.distance(&h);
        // Exponents up to 200 have an absolute rounding error of about 1e-5.
        prop_assert!(off < 1e-5 * f64::from(spread.max(4.0)), "{off}");
    }
}

#[test]
fn gates_at_their_extremes_give_numbers() {
    let extremes = [-200.0f32, 0.0, 200.0];
    for (a, &i) in extremes.iter().enumerate() {
        for (b, &f) in extremes.iter().enumerate() {
            let mut case = case((2, 33, 4, 6), (a * 3 + b) as u64, |x| x);
            case.i.fill(i);
            case.f.fill(f);
            // In the mixed case, every third gate has another extreme value.
            let mut mixed = case.clone();
            for (at, gate) in mixed.i.iter_mut().chain(&mut mixed.f).enumerate() {
                if at % 3 == 0 {
                    *gate = extremes[at / 3 % 3];
                }
            }
            for case in [case, mixed] {
                for chunk in [1, 16, 64] {
                    let (h, memory) = scan(&case.inputs(), case.empty(), chunk, EPS).unwrap();
                    let off = case.distance(&h);
                    assert!(off < 1e-4, "i {i}, f {f}, chunks of {chunk}: {off}");
                    for part in [memory.c, memory.n, memory.m] {
                        let all = part.to_vec::<f32>().unwrap();
                        assert!(all.iter().all(|x| x.is_finite()), "i {i}, f {f}");
                    }
                }
            }
        }
    }
}

#[test]
fn two_thousand_positions_are_the_same_step_by_step_and_in_chunks() {
    // Forget gates near 1, as in trained models, make the memory span many chunks.
    let mut case = case((2, 2000, 8, 12), 7, |x| x * 3.0);
    case.f.iter_mut().for_each(|f| *f += 4.0);
    let (inputs, mut memory) = (case.inputs(), case.empty());
    let (chunked, after) = scan(&inputs, case.empty(), 64, EPS).unwrap();
    let mut steps = Vec::new();
    for at in 0..2000 {
        let (h, next) = step(&inputs.range(at, at + 1).unwrap(), &memory, EPS).unwrap();
        memory = next;
        if at % 100 == 99 {
            eval([&memory.c, &memory.n, &memory.m]).unwrap();
        }
        steps.push(h);
    }
    let stepped = mlx_rs_core::concatenate(&steps.iter().collect::<Vec<_>>(), 2).unwrap();
    assert!(case.distance(&stepped) < 1e-5 && case.distance(&chunked) < 1e-5);
    let largest = stepped.abs().unwrap().max(mlx_rs_core::All, false).unwrap();
    let largest = largest.item::<f32>().unwrap();
    let (a, b) = (
        stepped.to_vec::<f32>().unwrap(),
        chunked.to_vec::<f32>().unwrap(),
    );
    let apart = a
        .iter()
        .zip(&b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(apart < 1e-5 * largest.max(1.0), "{apart} of {largest}");
    for (a, b) in [
        (&memory.c, &after.c),
        (&memory.n, &after.n),
        (&memory.m, &after.m),
    ] {
        assert!(a.all_close(b, 1e-4, 1e-4).unwrap());
    }
}

#[test]
fn cutting_a_sequence_anywhere_changes_nothing() {
    let case = case((1, 50, 4, 6), 3, |x| x * 5.0);
    let inputs = case.inputs();
    let uncut = scan(&inputs, case.empty(), 16, EPS).unwrap().0;
    for cut in [1, 15, 16, 17, 49] {
        let (a, memory) = scan(&inputs.range(0, cut).unwrap(), case.empty(), 16, EPS).unwrap();
        let (b, _) = scan(&inputs.range(cut, 50).unwrap(), memory, 16, EPS).unwrap();
        let both = mlx_rs_core::concatenate(&[&a, &b], 2).unwrap();
        assert!(both.all_close(&uncut, 1e-4, 1e-5).unwrap(), "{cut}");
    }
}

/// Compares each gradient of a weighted sum of the outputs with finite differences of the
/// definition. Queries and keys are positive, so no denominator is at the point where its maximum
/// is not differentiable.
#[test]
fn gradients_are_slopes_of_the_definition() {
    let mut case = case((1, 11, 3, 2), 5, |x| x * 2.0);
    case.q
        .iter_mut()
        .chain(&mut case.k)
        .for_each(|x| *x = x.abs() + 0.3);
    let weights = numbers(22, 99, 1.0);
    let loss = |case: &Case| -> f64 {
        let (out, _) = case.defined();
        out.iter()
            .zip(&weights)
            .map(|(o, &w)| o * f64::from(w))
            .sum()
    };
    let sum = Array::from_slice(&weights, &[1, 1, 11, 2]).unwrap();
    for chunk in [1, 4, 64] {
        let run = |args: &[Array]| -> Result<Vec<Array>> {
            let [q, k, v, i, f] = args else {
                return Err(Error::new(ErrorKind::Value, "test", "five arguments"));
            };
            let inputs = Inputs {
                q: q.clone(),
                k: k.clone(),
                v: v.clone(),
                i: i.clone(),
                f: log_sigmoid(f)?,
            };
            let (h, _) = scan(&inputs, case.empty(), chunk, EPS)?;
            Ok(vec![h.multiply(&sum)?.sum(mlx_rs_core::All, false)?])
        };
        let raw = |a: &[f32], shape: &[i32]| Array::from_slice(a, shape).unwrap();
        let args = [
            raw(&case.q, &[1, 1, 11, 3]),
            raw(&case.k, &[1, 1, 11, 3]),
            raw(&case.v, &[1, 1, 11, 2]),
            raw(&case.i, &[1, 1, 11]),
            raw(&case.f, &[1, 1, 11]),
        ];
        let gradients = mlx_rs_core::transforms::grad(run, &[0, 1, 2, 3, 4])(&args).unwrap();
        for (part, gradient) in gradients.iter().enumerate() {
            for (at, &slope) in gradient.to_vec::<f32>().unwrap().iter().enumerate() {
                let moved = |by: f32| {
                    let mut case = case.clone();
                    let all = [
                        &mut case.q,
                        &mut case.k,
                        &mut case.v,
                        &mut case.i,
                        &mut case.f,
                    ];
                    let value = &mut all.into_iter().nth(part).unwrap()[at];
                    *value += by;
                    (f64::from(*value), loss(&case))
                };
                let ((x1, y1), (x0, y0)) = (moved(1e-3), moved(-1e-3));
                let expected = (y1 - y0) / (x1 - x0);
                let off = (f64::from(slope) - expected).abs();
                let what = format!("part {part}, {at}, chunks of {chunk}");
                assert!(
                    off < 1e-3 * (1.0 + expected.abs()),
                    "{what}: {slope}, {expected}"
                );
            }
        }
    }
}
