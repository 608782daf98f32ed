//! Multiplication with quantized matrices in cases that MLX's kernels compute wrongly. The matrices
//! are dequantized first.

use super::quantized::{QuantMode, Quantized};
use crate::array::Array;
use crate::device::{DeviceKind, metal_is_available};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::{call, stream};

/// The number of rows that Metal's kernel computes at a time.
const METAL_ROWS: i32 = 8;

impl Quantized {
    /// Whether MLX multiplies wrongly with this matrix on the current device, without an error.
    ///
    /// - MLX 0.30.1 reads every mode except affine as mxfp4, on all devices.
    /// - On Metal, matrices with fewer than [`METAL_ROWS`] rows use a separate kernel, which
    ///   decodes only the scales of affine mode. In MLX 0.30.1 that kernel also writes out of
    ///   bounds, in all modes.
    pub(super) fn is_miscomputed(&self) -> Result<bool> {
        let old = cfg!(not(mlx_c_0_5));
        if old && matches!(self.mode, QuantMode::Mxfp8 | QuantMode::Nvfp4) {
            return Ok(true);
        }
        let few_rows = self.weight.shape().iter().nth_back(1) < Some(&METAL_ROWS);
        if !few_rows || !(old || self.mode != QuantMode::Affine) || !metal_is_available() {
            return Ok(false);
        }
        let _guard = call::enter("stream")?;
        Ok(stream::current_id()?.0 == DeviceKind::Gpu)
    }

    /// Multiplies `x` with the matrix, or with its transpose.
    pub(super) fn dequantized_product(&self, x: &Array, transpose: bool) -> Result<Array> {
        // For packed floats this is exact, because a float times a scale fits every type.
        let dtype = match self.mode {
            QuantMode::Affine => self.scales.dtype(),
            _ => x.dtype(),
        };
        x.matmul(&self.dequantized(dtype, transpose)?)
    }

    /// Like [`Quantized::gather_matmul`], for indices that are inside their batches. It computes in
    /// float32, the only type that MLX's gathered products support on CPUs.
    pub(super) fn dequantized_gather(
        &self,
        x: &Array,
        lhs: Option<&Array>,
        rhs: Option<&Array>,
        transpose: bool,
        sorted: bool,
    ) -> Result<Array> {
        let wide = x.astype(Dtype::Float32)?;
        let product = match rhs {
            // If fewer matrices are selected than exist, only the selected ones are dequantized.
            Some(chosen) if (1..self.matrices()).contains(&chosen.size()) => {
                let dense = self
                    .along_one_axis()?
                    .take_rows(chosen)?
                    .dequantized(Dtype::Float32, transpose)?;
                wide.gather_mm(&dense, lhs, None, sorted)
            }
            _ => {
                let dense = self.dequantized(Dtype::Float32, transpose)?;
                wide.gather_mm(&dense, lhs, rhs, sorted)
            }
        }?;
        // If the types differ, they promote to float32, which is the type of `product`.
        let scales = self.scales.dtype();
        if self.mode == QuantMode::Affine && scales != x.dtype() {
            return Ok(product);
        }
        product.astype(x.dtype())
    }

    fn dequantized(&self, dtype: Dtype, transpose: bool) -> Result<Array> {
        let dense = self.dequantize(dtype)?;
        if transpose {
            dense.swap_axes(-1, -2)
        } else {
            Ok(dense)
        }
    }

    /// The number of matrices.
    fn matrices(&self) -> usize {
        let shape = self.weight.shape();
        shape[..shape.len() - 2]
            .iter()
            .map(|&d| d as usize)
            .product()
    }

    /// The same matrices with a single batch axis.
    fn along_one_axis(&self) -> Result<Self> {
        let flat = |a: &Array| a.flatten(0, -3);
        Ok(Self {
            weight: flat(&self.weight)?,
            scales: flat(&self.scales)?,
            biases: self.biases.as_ref().map(flat).transpose()?,
            ..*self
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    const FORMATS: [(QuantMode, i32, i32); 12] = [
        (QuantMode::Affine, 32, 2),
        (QuantMode::Affine, 64, 3),
        (QuantMode::Affine, 64, 4),
        (QuantMode::Affine, 128, 4),
        (QuantMode::Affine, 32, 5),
        (QuantMode::Affine, 32, 6),
        (QuantMode::Affine, 64, 8),
        (QuantMode::Affine, 128, 8),
        (QuantMode::Affine, 32, 8),
        (QuantMode::Mxfp4, 32, 4),
        (QuantMode::Mxfp8, 32, 8),
        (QuantMode::Nvfp4, 16, 4),
    ];
    const TYPES: [(Dtype, f64); 3] = [
        (Dtype::Float32, 1e-4),
        (Dtype::Float16, 1e-2),
        (Dtype::Bfloat16, 6e-2),
    ];

    fn normal(shape: &[i32], dtype: Dtype, seed: u64) -> Array {
        let key = random::Key::new(seed).unwrap();
        let values = random::normal(0.0, 1.0, shape, Dtype::Float32, &key).unwrap();
        values.astype(dtype).unwrap()
    }

    fn row(values: &[u32]) -> Array {
        Array::vector(values).unwrap()
    }

    /// The elements of `w`, row by row, decoded by the definition of the format.
    fn decoded(q: &Quantized) -> Vec<f64> {
        let words = q.weight.to_vec::<u32>().unwrap();
        let (bits, group) = (q.bits as usize, q.group_size as usize);
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let code = |i: usize| {
            let bit = |b: usize| usize::from(bytes[b / 8] >> (b % 8) & 1);
            (0..bits).map(|b| bit(i * bits + b) << b).sum::<usize>()
        };
        let e4m3 = |code: usize| {
            let (exponent, mantissa) = ((code >> 3 & 15) as i32, (code & 7) as f64);
            let size = match exponent {
                0 => mantissa / 512.0,
                e => (1.0 + mantissa / 8.0) * f64::from(e - 7).exp2(),
            };
            if code & 128 == 0 { size } else { -size }
        };
        let e2m1 = |code: usize| {
            let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7];
            if code & 8 == 0 { size } else { -size }
        };
        let count = bytes.len() * 8 / bits;
        if q.mode == QuantMode::Affine {
            let wide = |a: &Array| {
                let a = a.astype(Dtype::Float32).unwrap();
                a.to_vec::<f32>().unwrap()
            };
            let (scales, biases) = (wide(&q.scales), wide(q.biases.as_ref().unwrap()));
            let one = |i: usize| {
                f64::from(scales[i / group]) * code(i) as f64 + f64::from(biases[i / group])
            };
            return (0..count).map(one).collect();
        }
        let scales = q.scales.to_vec::<u8>().unwrap();
        let one = |i: usize| {
            let scale = usize::from(scales[i / group]);
            match q.mode {
                QuantMode::Nvfp4 => e4m3(scale) * e2m1(code(i)),
                QuantMode::Mxfp4 => (scale as f64 - 127.0).exp2() * e2m1(code(i)),
                _ => (scale as f64 - 127.0).exp2() * e4m3(code(i)),
            }
        };
        (0..count).map(one).collect()
    }

    fn close(got: &Array, want: &[f64], tolerance: f64, what: &str) {
        let got = got.astype(Dtype::Float32).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(got.len(), want.len(), "{what}");
        let largest = want.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            let error = (f64::from(*g) - w).abs();
            assert!(error <= tolerance * largest, "{what}: {g} for {w} at {i}");
        }
    }

    /// `x [m, k]` times rows `[n, k]` transposed, or without `transpose` times `[k, n]`.
    fn reference(x: &Array, rows: &[f64], (n, k): (usize, usize), transpose: bool) -> Vec<f64> {
        let x = x.astype(Dtype::Float32).unwrap().to_vec::<f32>().unwrap();
        let (inner, outer) = if transpose { (k, n) } else { (n, k) };
        let at = |i: usize, o: usize| rows[if transpose { o * k + i } else { i * k + o }];
        let one = |x: &[f32], o| (0..inner).map(|i| f64::from(x[i]) * at(i, o)).sum();
        x.chunks(inner)
            .flat_map(|x| (0..outer).map(move |o| one(x, o)))
            .collect()
    }

    #[test]
    fn what_is_dequantized_is_what_the_formats_say() {
        for (mode, group, bits) in FORMATS {
            let w = normal(&[6, 256], Dtype::Float32, 1);
            let q = Quantized::quantize(&w, group, bits, mode).unwrap();
            let got = q.dequantize(Dtype::Float32).unwrap();
            close(&got, &decoded(&q), 1e-6, &format!("{mode:?} {bits}"));
        }
        // All codes of elements and scales, except NaN.
        for (mode, group, bits) in [
            (QuantMode::Mxfp4, 32, 4),
            (QuantMode::Mxfp8, 32, 8),
            (QuantMode::Nvfp4, 16, 4),
        ] {
            let codes: Vec<u8> = (0..=255).filter(|c| bits == 4 || c & 127 != 127).collect();
            let codes = [&codes[..], &codes[..2 * (256 - codes.len()) / 2]].concat();
            let scales: Vec<u8> = match mode {
                QuantMode::Nvfp4 => (0..=255).filter(|s| s & 127 != 127).collect(),
                _ => (1..=240).collect(),
            };
            let words: Vec<u32> = codes
                .chunks(4)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            let row_groups = codes.len() * 8 / bits as usize / group as usize;
            for scales in scales.chunks(row_groups) {
                let mut scales = scales.to_vec();
                scales.resize(row_groups, 127);
                scales.iter_mut().for_each(|s| {
                    if mode == QuantMode::Nvfp4 && *s & 127 == 127 {
                        *s = 56;
                    }
                });
                let q = Quantized {
                    weight: Array::from_slice(&words, &[1, words.len() as i32]).unwrap(),
                    scales: Array::from_slice(&scales, &[1, row_groups as i32]).unwrap(),
                    biases: None,
                    group_size: group,
                    bits,
                    mode,
                };
                let got = q.dequantize(Dtype::Float32).unwrap();
                let got = got.to_vec::<f32>().unwrap();
                for (i, (g, w)) in got.iter().zip(decoded(&q)).enumerate() {
                    assert!(f64::from(*g) == w, "{mode:?}: {g} for {w} at {i}");
                }
            }
        }
    }

    #[test]
    fn products_are_those_of_the_decoded_matrix() {
        for (mode, group, bits) in FORMATS {
            for (dtype, tolerance) in TYPES {
                for rows in [3, 32] {
                    let w = normal(&[rows, 256], dtype, 2);
                    let q = Quantized::quantize(&w, group, bits, mode).unwrap();
                    let size = (rows as usize, 256);
                    for transpose in [true, false] {
                        let x = normal(&[5, if transpose { 256 } else { rows }], dtype, 3);
                        let want = reference(&x, &decoded(&q), size, transpose);
                        let what = format!("{mode:?} {bits} {dtype} {rows} {transpose}");
                        let got = q.dequantized_product(&x, transpose).unwrap();
                        assert_eq!(got.dtype(), dtype, "{what}");
                        close(&got, &want, tolerance, &what);
                        // The public functions choose between MLX's kernels and this code.
                        let got = if transpose {
                            q.matmul_transposed(&x)
                        } else {
                            q.matmul(&x)
                        };
                        close(&got.unwrap(), &want, tolerance, &what);
                    }
                }
            }
        }
    }

    #[test]
    fn gathers_are_products_of_chosen_matrices() {
        let (few, many) = (row(&[2, 0]), row(&[1, 1, 0, 3, 2, 2, 3, 0]));
        for (mode, group, bits) in FORMATS {
            for (dtype, tolerance) in TYPES {
                let w = normal(&[2, 2, 32, 128], dtype, 4);
                let q = Quantized::quantize(&w, group, bits, mode).unwrap();
                let all = decoded(&q);
                for rhs in [&few, &many] {
                    for transpose in [true, false] {
                        let inner = if transpose { 128 } else { 32 };
                        let x = normal(&[3, 2, inner], dtype, 5);
                        let chosen = rhs.to_vec::<u32>().unwrap();
                        let lhs = row(&chosen.iter().map(|c| (c + 1) % 3).collect::<Vec<_>>());
                        let want: Vec<f64> = chosen
                            .iter()
                            .flat_map(|&c| {
                                let x = x.take_ids(&[(c + 1) % 3], 0).unwrap();
                                let matrix = &all[c as usize * 32 * 128..][..32 * 128];
                                reference(&x, matrix, (32, 128), transpose)
                            })
                            .collect();
                        let what = format!("{mode:?} {bits} {dtype} {rhs:?} {transpose}");
                        let one = Some(rhs);
                        let got = q
                            .dequantized_gather(&x, Some(&lhs), one, transpose, false)
                            .unwrap();
                        assert_eq!(got.dtype(), dtype, "{what}");
                        close(&got, &want, tolerance, &what);
                        let got = q.gather_matmul(&x, Some(&lhs), one, transpose, false);
                        close(&got.unwrap(), &want, tolerance, &what);
                    }
                }
            }
        }
    }
}
