//! Choosing from long rows: the greatest elements, and a draw by weight. MLX partitions and sorts whole
//! rows, draws a random number for every element, and computes its exponentials one by one; one pass
//! over a row does here what the choice needs.

use super::host_op::{self, Input, Meaning, Work};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// Longest row: an index beyond is not exact as float32, in which results come.
const LONGEST: usize = 1 << 24;

/// Logits this far below the greatest weigh nothing: together less than the rounding of the rest.
const DEPTH: f32 = 60.0;

/// How far `x` lies below the greatest: 0 or less. Infinities that are the greatest are level.
pub(super) fn depth(x: f32, max: f32) -> f32 {
    if x == max { 0.0 } else { x - max }
}

/// The greatest of a row; minus infinity where there is no number.
pub(super) fn greatest_of(row: &[f32]) -> f32 {
    row.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

/// The sizes of `[rows, n]` in float32, as the kernels here need it.
fn size(op: &'static str, logits: &Array) -> Result<(usize, usize)> {
    match *logits.shape() {
        [rows, n] if rows > 0 && n > 0 && logits.dtype() == Dtype::Float32 => {
            let (rows, n) = (rows.unsigned_abs() as usize, n.unsigned_abs() as usize);
            if n <= LONGEST {
                return Ok((rows, n));
            }
        }
        _ => {}
    }
    Err(Error::new(
        ErrorKind::Shape,
        op,
        format!("needs float32 [rows, n], not empty, n at most {LONGEST}"),
    )
    .with_inputs(&[logits]))
}

/// The greatest elements of each row of `[rows, n]`.
#[derive(Debug, Clone)]
pub struct Greatest {
    /// How far each lies below the greatest of its row, ascending: float32 `[rows, k]`.
    pub values: Array,
    /// Where each stands: uint32 `[rows, k]`.
    pub indices: Array,
    /// `log(sum(exp(x - max)))` of the whole row: float32 `[rows, 1]`. Taken off a value it gives the
    /// logarithm of its probability.
    pub log_total: Array,
}

/// The `k` greatest elements of each row of float32 `[rows, n]`; of equals those behind. On the CPU.
///
/// # Errors
/// [`ErrorKind::Shape`] when `logits` is of another type or shape; [`ErrorKind::Index`] when `k` is 0
/// or more than `n`; MLX's message when the current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let found = cpu::greatest(&Array::from_slice(&[3.0f32, 7.0, 5.0], &[1, 3])?, 2)?;
///     assert_eq!(found.indices.to_vec::<u32>()?, [2, 1]);
///     assert_eq!(found.values.to_vec::<f32>()?, [-2.0, 0.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn greatest(logits: &Array, k: usize) -> Result<Greatest> {
    const OP: &str = "cpu::greatest";
    let (rows, n) = size(OP, logits)?;
    if k == 0 || k > n {
        return Err(Error::new(
            ErrorKind::Index,
            OP,
            format!("{k} elements of rows of {n}; it must be 1 to {n}"),
        )
        .with_inputs(&[logits]));
    }
    let (rows_i, k_i) = (rows as i32, k as i32); // both were dimensions, or are below one
    let out = host_op::add(
        OP,
        Meaning::Opaque,
        Select { rows, n, k },
        &[logits],
        &[rows_i, 2 * k_i + 1],
    )?;
    Ok(Greatest {
        values: out.slice_axis(1, 0, k_i)?,
        indices: out.slice_axis(1, k_i, 2 * k_i)?.astype(Dtype::Uint32)?,
        log_total: out.slice_axis(1, 2 * k_i, 2 * k_i + 1)?,
    })
}

struct Select {
    rows: usize,
    n: usize,
    k: usize,
}

impl Work for Select {
    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `greatest` passes one array, of float32.
        let logits: &[f32] = unsafe { inputs[0].as_slice() };
        let width = 2 * self.k + 1;
        let rows = logits.chunks_exact(self.n);
        for (row, out) in rows.zip(output.chunks_exact_mut(width)) {
            let max = greatest_of(row);
            let best = select(row, self.k);
            let (values, rest) = out.split_at_mut(self.k);
            let (indices, total) = rest.split_at_mut(self.k);
            for (((value, index), v), i) in best.into_iter().zip(values).zip(indices) {
                *v = depth(value, max);
                *i = index as f32;
            }
            if max == f32::NEG_INFINITY {
                total[0] = max;
                continue;
            }
            let sum: f64 = row
                .iter()
                .map(|&x| depth(x, max))
                .filter(|&below| below > -DEPTH)
                .map(|below| f64::from(below.exp()))
                .sum();
            total[0] = sum.ln() as f32;
        }
    }

    fn outputs(&self) -> usize {
        self.rows * (2 * self.k + 1)
    }
}

/// The `k` greatest and their places, ascending; of equals those behind.
fn select(row: &[f32], k: usize) -> Vec<(f32, u32)> {
    let order = |a: &(f32, u32), b: &(f32, u32)| {
        // Descending. Adding zero makes -0 the 0 that it equals.
        (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(b.1.cmp(&a.1))
    };
    let mut best: Vec<(f32, u32)> = Vec::with_capacity(2 * k);
    let mut least = f32::NEG_INFINITY;
    for (i, &x) in row.iter().enumerate() {
        // What is no number ranks last.
        let x = if x.is_nan() { f32::NEG_INFINITY } else { x };
        if x < least {
            continue;
        }
        best.push((x, i as u32)); // below `LONGEST`
        if best.len() == 2 * k {
            best.select_nth_unstable_by(k - 1, order);
            best.truncate(k);
            least = best[k - 1].0;
        }
    }
    if best.len() > k {
        best.select_nth_unstable_by(k - 1, order);
        best.truncate(k);
    }
    best.sort_unstable_by(|a, b| order(b, a));
    best
}

/// One index (uint32 `[rows]`) of each row of float32 `[rows, n]`, drawn with probabilities
/// `softmax(logits * scale)`: the one at which the running sum passes `uniform`, a number in `[0, 1)`.
/// `scale` and `uniform` have one value a row. A row of nothing but minus infinity gives 0. On the CPU.
///
/// # Errors
/// [`ErrorKind::Shape`] when `logits` is of another type or shape, or the parameters are not one a
/// row; MLX's message when the current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     // Probabilities of a quarter and three: the running sum passes 0.5 at the second.
///     let logits = Array::from_slice(&[0.25f32.ln(), 0.75f32.ln()], &[1, 2])?;
///     assert_eq!(cpu::draw(&logits, &[1.0], &[0.5])?.to_vec::<u32>()?, [1]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn draw(logits: &Array, scale: &[f32], uniform: &[f64]) -> Result<Array> {
    const OP: &str = "cpu::draw";
    let (rows, n) = size(OP, logits)?;
    if scale.len() != rows || uniform.len() != rows {
        return Err(Error::new(
            ErrorKind::Shape,
            OP,
            format!(
                "{} scales and {} uniform numbers for {rows} rows; each row needs its own",
                scale.len(),
                uniform.len()
            ),
        )
        .with_inputs(&[logits]));
    }
    let work = Draw {
        n,
        scale: scale.to_vec(),
        uniform: uniform.to_vec(),
    };
    host_op::add(OP, Meaning::Opaque, work, &[logits], &[rows as i32])?.astype(Dtype::Uint32)
}

struct Draw {
    n: usize,
    /// Of each row.
    scale: Vec<f32>,
    uniform: Vec<f64>,
}

impl Work for Draw {
    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `draw` passes one array, of float32.
        let logits: &[f32] = unsafe { inputs[0].as_slice() };
        let mut weights = Vec::with_capacity(self.n);
        let parameters = self.scale.iter().zip(&self.uniform);
        for ((row, out), (&scale, &uniform)) in
            logits.chunks_exact(self.n).zip(output).zip(parameters)
        {
            *out = pick(row, scale, uniform, &mut weights) as f32;
        }
    }

    fn outputs(&self) -> usize {
        self.scale.len()
    }
}

fn pick(row: &[f32], scale: f32, uniform: f64, weights: &mut Vec<f32>) -> usize {
    let max = greatest_of(row);
    if max == f32::NEG_INFINITY {
        return 0;
    }
    weights.clear();
    weights.extend(row.iter().map(|&x| {
        let below = depth(x, max) * scale;
        if below > -DEPTH { below.exp() } else { 0.0 }
    }));
    let total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    let target = uniform * total;
    let mut sum = 0.0;
    let mut last = 0;
    for (i, &w) in weights.iter().enumerate() {
        if w > 0.0 {
            sum += f64::from(w);
            last = i;
            if sum > target {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
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
                let g = greatest(&array(&rows), k).unwrap();
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
        let g = on_cpu(|| greatest(&array(&rows), 3)).unwrap();
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
        // Cold: the best alone; hot: all that is possible alike.
        assert_eq!([at(f32::MAX, 0.0), at(f32::MAX, 0.99)], [3, 3]);
        assert_eq!([at(0.0, 0.3), at(0.0, 0.4), at(0.0, 0.7)], [0, 2, 3]);
        let rows = [vec![NO, NO], vec![NO, -5.0], vec![1.0, f32::INFINITY]];
        let tokens = on_cpu(|| draw(&array(&rows), &[1.0; 3], &[0.0, 0.5, 0.0])).unwrap();
        assert_eq!(tokens.to_vec::<u32>().unwrap(), [0, 1, 1]);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let x = array(&[vec![1.0, 2.0]]);
        let kind = |r: Result<Greatest>| r.unwrap_err().kind();
        assert_eq!(kind(greatest(&x, 0)), ErrorKind::Index);
        assert_eq!(kind(greatest(&x, 3)), ErrorKind::Index);
        assert_eq!(
            kind(greatest(&x.flatten(0, -1).unwrap(), 1)),
            ErrorKind::Shape
        );
        let e = draw(&x, &[1.0, 1.0], &[0.5]).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Shape);
        let x = Array::from_slice(&[1i32, 2], &[1, 2]).unwrap();
        assert_eq!(
            draw(&x, &[1.0], &[0.5]).unwrap_err().kind(),
            ErrorKind::Shape
        );
    }
}
