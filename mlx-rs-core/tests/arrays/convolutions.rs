//! Compares convolutions of many geometries, and their first and second derivatives, with direct
//! sums. The values are small integers, so every sum is exact.

use std::collections::BTreeSet;

use mlx_rs_core::transforms::{grad, vmap};
use mlx_rs_core::{All, Array, Conv, Dtype, Result};
use proptest::prelude::*;

/// A convolution as a direct sum: `y[n, o, c] += x[n, i, d] * w[c, t, d]` where `stride * o +
/// dilation * t == input_dilation * i + low` along each axis.
#[derive(Debug, Clone)]
struct Direct {
    x: Vec<i32>,
    w: Vec<i32>,
    y: Vec<i32>,
    stride: Vec<i32>,
    dilation: Vec<i32>,
    input_dilation: Vec<i32>,
    low: Vec<i32>,
    groups: i32,
    flip: bool,
}

fn size(shape: &[i32]) -> usize {
    shape.iter().map(|&d| d as usize).product()
}

impl Direct {
    /// Calls `f` with the indices of each product's factors in `x` and `w`, and of its sum in `y`.
    fn each(&self, mut f: impl FnMut(usize, usize, usize)) {
        let axes = self.stride.len();
        let place = |shape: &[i32], first: i32, spatial: &[i32], last: i32| {
            let mut at = first as usize;
            for (i, &s) in spatial.iter().enumerate() {
                at = at * shape[i + 1] as usize + s as usize;
            }
            at * shape[axes + 1] as usize + last as usize
        };
        let all = |spatial: &[i32]| -> Vec<Vec<i32>> {
            spatial.iter().fold(vec![vec![]], |lists, &n| {
                lists
                    .iter()
                    .flat_map(|list| (0..n).map(move |i| [list.as_slice(), &[i]].concat()))
                    .collect()
            })
        };
        let (inputs, outputs) = (self.w[axes + 1], self.w[0] / self.groups);
        for o in all(&self.y[1..=axes]) {
            for t in all(&self.w[1..=axes]) {
                let mut from = Vec::new();
                for a in 0..axes {
                    let tap = if self.flip {
                        self.w[a + 1] - 1 - t[a]
                    } else {
                        t[a]
                    };
                    let at = self.stride[a] * o[a] + self.dilation[a] * tap - self.low[a];
                    let length = self.x[a + 1];
                    if at >= 0
                        && at % self.input_dilation[a] == 0
                        && at / self.input_dilation[a] < length
                    {
                        from.push(at / self.input_dilation[a]);
                    }
                }
                if from.len() < axes {
                    continue;
                }
                for n in 0..self.x[0] {
                    for c in 0..self.w[0] {
                        for d in 0..inputs {
                            let group = c / outputs;
                            f(
                                place(&self.x, n, &from, group * inputs + d),
                                place(&self.w, c, &t, d),
                                place(&self.y, n, &o, c),
                            );
                        }
                    }
                }
            }
        }
    }

    fn y(&self, x: &[f32], w: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; size(&self.y)];
        self.each(|i, t, o| y[o] += x[i] * w[t]);
        y
    }

    fn x(&self, w: &[f32], y: &[f32]) -> Vec<f32> {
        let mut x = vec![0.0; size(&self.x)];
        self.each(|i, t, o| x[i] += w[t] * y[o]);
        x
    }

    fn w(&self, x: &[f32], y: &[f32]) -> Vec<f32> {
        let mut w = vec![0.0; size(&self.w)];
        self.each(|i, t, o| w[t] += x[i] * y[o]);
        w
    }
}

/// Pseudo-random integers from -3 to 3.
fn numbers(shape: &[i32], seed: u32) -> Vec<f32> {
    (0..size(shape) as u32)
        .map(|i| ((i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40503)) >> 7) % 7)
        .map(|v| v as f32 - 3.0)
        .collect()
}

#[derive(Debug, Clone)]
struct Case {
    x: Vec<i32>,
    w: Vec<i32>,
    conv: Conv,
    transposed: bool,
}

impl Case {
    fn run(&self, x: &Array, w: &Array) -> Result<Array> {
        if self.transposed {
            x.conv_transpose(w, &self.conv)
        } else {
            x.conv(w, &self.conv)
        }
    }

    /// The direct sum; `None` if the result would be empty.
    fn direct(&self) -> Option<Direct> {
        let axes = self.x.len() - 2;
        let at = |list: &[i32], i: usize, default| list.get(i).copied().unwrap_or(default);
        let mut direct = Direct {
            x: self.x.clone(),
            w: self.w.clone(),
            y: vec![self.x[0]],
            stride: vec![],
            dilation: vec![],
            input_dilation: vec![],
            low: vec![],
            groups: self.conv.groups.max(1),
            flip: self.conv.flip != self.transposed,
        };
        for i in 0..axes {
            let stride = at(&self.conv.stride, i, 1);
            let padding = at(&self.conv.padding, i, 0);
            let dilation = at(&self.conv.dilation, i, 1);
            let between = at(&self.conv.input_dilation, i, 1);
            let extra = at(&self.conv.output_padding, i, 0);
            let (n, k) = (self.x[i + 1], self.w[i + 1]);
            direct.dilation.push(dilation);
            let span = dilation * (k - 1);
            let places = if self.transposed {
                direct.stride.push(1);
                direct.input_dilation.push(stride);
                direct.low.push(span - padding);
                (n - 1) * stride - 2 * padding + span + 1 + extra
            } else {
                direct.stride.push(stride);
                direct.input_dilation.push(between);
                direct.low.push(padding);
                ((n - 1) * between + 2 * padding - span).div_euclid(stride) + 1
            };
            if places <= 0 {
                return None;
            }
            direct.y.push(places);
        }
        direct.y.push(self.w[0]);
        Some(direct)
    }

    /// Whether MLX runs the convolution without dilations, groups and reversed kernels.
    fn is_plain(&self) -> bool {
        let axes = self.x.len() - 2;
        let one = |list: &[i32], i: usize| list.get(i).is_none_or(|&v| v == 1);
        let dilated = (0..axes).any(|i| {
            let input = if self.transposed {
                !one(&self.conv.stride, i)
            } else {
                !one(&self.conv.input_dilation, i) && one(&self.conv.stride, i)
            };
            input || !one(&self.conv.dilation, i)
        });
        let reversed = self.conv.flip != self.transposed && !self.w[1..=axes].contains(&1);
        !dilated && !reversed && self.conv.groups < 2
    }

    fn check(&self) {
        let (xs, ws) = (numbers(&self.x, 1), numbers(&self.w, 2));
        let x = Array::from_slice(&xs, &self.x).unwrap();
        let w = Array::from_slice(&ws, &self.w).unwrap();
        let Some(direct) = self.direct() else {
            assert!(self.run(&x, &w).is_err(), "{self:?}");
            return;
        };
        let y = self.run(&x, &w).unwrap();
        assert_eq!(y.shape(), direct.y, "{self:?}");
        let same = |what: &str, got: &Array, expected: &[f32]| {
            assert_eq!(got.to_vec::<f32>().unwrap(), expected, "{what} of {self:?}");
        };
        same("values", &y, &direct.y(&xs, &ws));

        // The gradient of `sum(c * conv(x, w))` with respect to each of `c`, `x` and `w` is one of
        // three convolutions. The gradients of those are again among the three.
        let cs = numbers(&direct.y, 3);
        let c = Array::from_slice(&cs, &direct.y).unwrap();
        let all = [x.clone(), w.clone(), c];
        let case_copy = self.clone();
        let total = move |a: &[Array]| -> Result<Vec<Array>> {
            Ok(vec![
                case_copy
                    .run(&a[0], &a[1])?
                    .multiply(&a[2])?
                    .sum(All, false)?,
            ])
        };
        let first = grad(total.clone(), &[0, 1])(&all).unwrap();
        same("d/dx", &first[0], &direct.x(&ws, &cs));
        same("d/dw", &first[1], &direct.w(&xs, &cs));

        // Second derivatives: the gradient of a first derivative times `v`. In the direct sum, `v`
        // replaces the argument of the first derivative.
        let vs = [numbers(&self.x, 4), numbers(&self.w, 5)];
        for by in 0..2usize {
            let v = Array::from_slice(&vs[by], all[by].shape()).unwrap();
            let inner = total.clone();
            let second = move |a: &[Array]| -> Result<Vec<Array>> {
                let d = grad(inner.clone(), &[by])(&a[..3])?.remove(0);
                Ok(vec![d.multiply(&a[3])?.sum(All, false)?])
            };
            let more = [&all[..], &[v]].concat();
            let other = 1 - by;
            let (x, w) = if by == 0 {
                (&vs[0], &ws)
            } else {
                (&xs, &vs[1])
            };
            // For a plain convolution, MLX computes the gradient with respect to the kernel from
            // several operations. The gradient of one of them, a padding, is wrong, so this case is
            // skipped.
            if by == 0 || !self.is_plain() {
                let got = grad(second.clone(), &[other])(&more).unwrap();
                let expected = if other == 0 {
                    direct.x(w, &cs)
                } else {
                    direct.w(x, &cs)
                };
                same(&format!("second derivative, {by}"), &got[0], &expected);
            }
            let got = grad(second, &[2])(&more).unwrap();
            same(
                &format!("second derivative by c, {by}"),
                &got[0],
                &direct.y(x, w),
            );
        }

        // Batches over the input, over the kernel, and over both. MLX computes the last one with
        // groups.
        let twice = |a: &Array| mlx_rs_core::stack(&[a, &a.multiply(&Array::scalar(2.0f32)?)?], 0);
        let (xx, ww) = (twice(&x).unwrap(), twice(&w).unwrap());
        let case = self.clone();
        let f = move |a: &[Array]| -> Result<Vec<Array>> { Ok(vec![case.run(&a[0], &a[1])?]) };
        for (axes, factor, inputs) in [
            ([Some(0), None], 2.0, [xx.clone(), w.clone()]),
            ([None, Some(0)], 2.0, [x, ww.clone()]),
            ([Some(0), Some(0)], 4.0, [xx, ww]),
        ] {
            // MLX supports no groups with three spatial axes.
            if self.x.len() == 5 && axes == [Some(0), Some(0)] {
                assert!(vmap(f.clone(), axes, 0)(&inputs).is_err());
                continue;
            }
            let mapped = vmap(f.clone(), axes, 0)(&inputs).unwrap();
            let once = direct.y(&xs, &ws);
            let more = once.iter().map(|v| v * factor);
            let expected: Vec<f32> = once.iter().copied().chain(more).collect();
            same(&format!("mapped over {axes:?}"), &mapped[0], &expected);
        }
    }
}

fn case() -> impl Strategy<Value = Case> {
    let axis = || {
        (
            1..6i32,
            1..5i32,
            1..4i32,
            0..5i32,
            1..4i32,
            prop_oneof![Just(1), 1..4i32],
            0..4i32,
        )
    };
    let axes = prop_oneof![
        4 => prop::collection::vec(axis(), 1..2),
        3 => prop::collection::vec(axis(), 2..3),
        2 => prop::collection::vec(axis(), 3..4)
    ];
    (
        axes,
        (1..3i32, 1..3i32, 1..3i32, 1..3i32),
        any::<bool>(),
        any::<bool>(),
        prop_oneof![Just(0), Just(1), Just(2), Just(3)],
    )
        .prop_map(
            |(axes, (n, inputs, outputs, groups), flip, transposed, simple)| {
                let groups = if axes.len() > 2 { 1 } else { groups };
                let mut x = vec![n];
                let mut w = vec![outputs * groups];
                let mut conv = Conv {
                    groups,
                    flip,
                    ..Conv::default()
                };
                for (length, taps, stride, padding, dilation, between, extra) in axes {
                    x.push(length);
                    w.push(taps);
                    conv.padding.push(padding);
                    conv.stride.push(if simple & 1 == 1 { 1 } else { stride });
                    conv.dilation
                        .push(if simple & 2 == 2 { 1 } else { dilation });
                    conv.input_dilation
                        .push(if transposed { 1 } else { between });
                    conv.output_padding.push(if transposed { extra } else { 0 });
                }
                x.push(inputs * groups);
                w.push(inputs);
                Case {
                    x,
                    w,
                    conv,
                    transposed,
                }
            },
        )
}

fn cases() -> u32 {
    let times = std::env::var("MLX_FUZZ_TIMES")
        .ok()
        .and_then(|n| n.parse::<u32>().ok());
    600 * times.unwrap_or(1)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_geometry_is_a_sum_of_products(case in case()) {
        case.check();
    }
}

/// The padding exceeds the kernel's extent. MLX alone would write beyond the result.
#[test]
fn more_padding_than_results_is_safe() {
    for _ in 0..100 {
        Case {
            x: vec![1, 1, 1, 4, 1],
            w: vec![1, 4, 1, 1, 1],
            conv: Conv {
                padding: vec![3, 0, 0],
                dilation: vec![2, 1, 1],
                ..Conv::default()
            },
            transposed: true,
        }
        .check();
    }
}

/// Geometries of common networks. Their sizes need no rearrangement before MLX.
#[test]
fn ordinary_geometries_are_right() {
    for stride in 1..3 {
        for (taps, padding) in [(1, 0), (3, 1), (4, 1), (5, 2)] {
            for transposed in [false, true] {
                Case {
                    x: vec![2, 9, 10, 4],
                    w: vec![4, taps, taps, 4],
                    conv: Conv {
                        padding: vec![padding; 2],
                        stride: vec![stride; 2],
                        output_padding: if transposed {
                            vec![stride - 1; 2]
                        } else {
                            vec![]
                        },
                        ..Conv::default()
                    },
                    transposed,
                }
                .check();
            }
        }
    }
}

#[test]
fn every_type_of_number_has_every_geometry() {
    let shapes: BTreeSet<Vec<i32>> = [vec![3], vec![3, 4], vec![2, 3, 4]].into();
    for spatial in shapes {
        let x = [&[1], &spatial[..], &[2]].concat();
        let w = [&[2], &vec![2; spatial.len()][..], &[2]].concat();
        for dilation in 1..3 {
            let case = Case {
                x: x.clone(),
                w: w.clone(),
                conv: Conv {
                    padding: vec![3; spatial.len()],
                    dilation: vec![dilation; spatial.len()],
                    ..Conv::default()
                },
                transposed: false,
            };
            let (xs, ws) = (numbers(&x, 1), numbers(&w, 2));
            let expected = case.direct().unwrap().y(&xs, &ws);
            for dtype in [
                Dtype::Float16,
                Dtype::Bfloat16,
                Dtype::Float32,
                Dtype::Float64,
            ] {
                let as_type = |values: &[f32], shape: &[i32]| {
                    Array::from_slice(values, shape)
                        .unwrap()
                        .astype(dtype)
                        .unwrap()
                };
                let y = case.run(&as_type(&xs, &x), &as_type(&ws, &w)).unwrap();
                assert_eq!(y.dtype(), dtype);
                let y = y.astype(Dtype::Float32).unwrap();
                assert_eq!(y.to_vec::<f32>().unwrap(), expected, "{dtype} {case:?}");
            }
        }
    }
}
