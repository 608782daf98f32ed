//! Top-p as an operation of MLX's graph.

use mlx_cpu_kernels::TopP;

use super::host_op::{self, OpKind};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// Float32 `logits` `[.., n]` with only the smallest set of most probable elements whose
/// probability reaches `p`. All others are minus infinity. There is one `p` a row. Of equal logits
/// at the border the ones behind stay. The most probable stays whatever `p` is. On the CPU,
/// float32.
///
/// # Errors
/// [`ErrorKind::Shape`] when `logits` is of another type, empty, or `p` has another number of rows;
/// MLX's message when the current stream is not on the CPU.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let logits = Array::from_slice(&[0.1f32.ln(), 0.6f32.ln(), 0.3f32.ln()], &[1, 3])?;
///     let left = cpu::top_p(&logits, &[0.8])?.to_vec::<f32>()?;
///     assert_eq!(left[0], f32::NEG_INFINITY);
///     assert!(left[1].is_finite() && left[2].is_finite());
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn top_p(logits: &Array, p: &[f32]) -> Result<Array> {
    let n = logits
        .shape()
        .last()
        .map_or(0, |&n| n.unsigned_abs() as usize);
    let rows = logits.size().checked_div(n).unwrap_or(0);
    if logits.dtype() != Dtype::Float32 || rows == 0 || rows != p.len() {
        return Err(Error::new(
            ErrorKind::Shape,
            "cpu::top_p",
            format!("needs float32 [{}, n] for {} values of p", p.len(), p.len()),
        )
        .with_inputs(&[logits]));
    }
    let work = TopP { n, p: p.to_vec() };
    host_op::add(
        "cpu::top_p",
        OpKind::Opaque,
        work,
        &[logits],
        logits.shape(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Stream};

    const NO: f32 = f32::NEG_INFINITY;

    /// What the definition says, by sorting everything.
    fn reference(row: &[f32], p: f32) -> Vec<f32> {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[a].total_cmp(&row[b]));
        let max = f64::from(row[order[row.len() - 1]]);
        let weight = |i: usize| (f64::from(row[i]) - max).exp();
        let total: f64 = (0..row.len()).map(weight).sum();
        let mut out = row.to_vec();
        let mut sum = 0.0;
        for &i in &order[..row.len() - 1] {
            sum += weight(i);
            if sum <= (1.0 - f64::from(p)) * total {
                out[i] = NO;
            }
        }
        out
    }

    fn kept(rows: &[Vec<f32>], p: &[f32]) -> Vec<Vec<f32>> {
        let n = rows[0].len();
        let x = Array::from_slice(&rows.concat(), &[rows.len() as i32, n as i32]).unwrap();
        let y = Stream::default_of(Device::cpu())
            .unwrap()
            .scope(|| top_p(&x, p)?.to_vec::<f32>())
            .unwrap();
        y.chunks(n).map(<[f32]>::to_vec).collect()
    }

    #[test]
    fn the_nucleus_is_that_of_a_full_sort() {
        let mut state = 1u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        for spread in [0.01, 1.0, 6.0, 30.0, 300.0] {
            for p in [0.05, 0.31, 0.5, 0.9, 0.95, 0.999] {
                let rows: Vec<Vec<f32>> = (0..3)
                    .map(|_| (0..2000).map(|_| (next() - 0.5) * spread).collect())
                    .collect();
                let got = kept(&rows, &[p; 3]);
                for (row, got) in rows.iter().zip(&got) {
                    assert_eq!(got, &reference(row, p), "spread {spread}, p {p}");
                }
            }
        }
    }

    #[test]
    fn the_ends() {
        // Ties at the border: exactly as many as needed, the ones behind.
        assert_eq!(kept(&[vec![1.0; 4]], &[0.5])[0], [NO, NO, 1.0, 1.0]);
        assert_eq!(kept(&[vec![1.0; 4]], &[1e-9])[0], [NO, NO, NO, 1.0]);
        assert_eq!(kept(&[vec![1.0; 4]], &[1.0])[0], [1.0; 4]);
        assert_eq!(kept(&[vec![NO, 2.0, NO]], &[0.9])[0], [NO, 2.0, NO]);
        assert_eq!(kept(&[vec![NO, NO]], &[0.9])[0], [NO, NO]);
        // An infinite logit is certain.
        let inf = f32::INFINITY;
        assert_eq!(
            kept(&[vec![inf, 1e38, inf, NO]], &[0.9])[0],
            [inf, NO, inf, NO]
        );
        // Each row has its own p.
        let rows = [vec![0.0, 0.0, 0.0, 9.0], vec![0.0, 0.0, 0.0, 0.0]];
        assert_eq!(
            kept(&rows, &[0.5, 0.75]),
            [vec![NO, NO, NO, 9.0], vec![NO, 0.0, 0.0, 0.0]]
        );
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let x = Array::from_slice(&[1.0f32, 2.0], &[1, 2]).unwrap();
        assert_eq!(top_p(&x, &[0.5, 0.5]).unwrap_err().kind(), ErrorKind::Shape);
        let x = Array::from_slice(&[1i32, 2], &[1, 2]).unwrap();
        assert_eq!(top_p(&x, &[0.5]).unwrap_err().kind(), ErrorKind::Shape);
        let x = Array::from_slice(&[0.0f32; 0], &[1, 0]).unwrap();
        assert!(top_p(&x, &[]).is_err());
    }
}
