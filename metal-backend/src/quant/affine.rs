//! The affine format: `weight = scale * code + bias`. Each group of adjacent weights in a row has
//! its own scale and bias.

use mlx_rs_core::{Array, Dtype, QuantMode, Quantized, Result, stack, where_};

use crate::convert::{FloatType, Packed};

/// Bits, group size, and the type in which scales and biases are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Affine {
    pub bits: i32,
    pub group_size: i32,
    pub factors: FloatType,
}

impl Affine {
    /// Returns the greatest code.
    pub fn most(self) -> f32 {
        (1u32 << self.bits.unsigned_abs()).saturating_sub(1) as f32
    }

    /// Rounds values to the stored type of scales and biases.
    pub fn stored(self, x: &Array) -> Result<Array> {
        let dtype = match self.factors {
            FloatType::F32 => return Ok(x.clone()),
            FloatType::F16 => Dtype::Float16,
            FloatType::BF16 => Dtype::Bfloat16,
        };
        x.astype(dtype)?.astype(Dtype::Float32)
    }

    /// Returns MLX's scales and biases for `weight` `[.., in]`: float32 `[.., groups]`, rounded to
    /// the type in which a checkpoint stores them.
    pub fn factors(self, weight: &Array) -> Result<(Array, Array)> {
        let q = Quantized::quantize(weight, self.group_size, self.bits, QuantMode::Affine)?;
        let biases = q.biases.unwrap_or_else(|| q.scales.clone());
        let scales = self.stored(&q.scales)?;
        // A scale may round to zero in the stored type, and codes would divide by zero.
        let one = scales.scalar_like(1.0)?;
        let zero = scales.scalar_like(0.0)?;
        let scales = where_(&scales.equal(&zero)?, &one, &scales)?;
        Ok((scales, self.stored(&biases)?))
    }

    /// Returns the nearest codes of `weight`, as float32. Scales and biases must broadcast to
    /// `weight`.
    pub fn codes(self, weight: &Array, scales: &Array, biases: &Array) -> Result<Array> {
        let codes = weight.subtract(biases)?.divide(scales)?.round(0)?;
        codes.clip(
            Some(&codes.scalar_like(0.0)?),
            Some(&codes.scalar_like(self.most())?),
        )
    }

    /// Rounds `weight` `[out, in]` to the nearest codes of MLX's scales and biases.
    pub fn rounded(self, weight: &Array) -> Result<Rounded> {
        let (scales, biases) = self.factors(weight)?;
        let grouped = self.grouped(weight)?;
        let codes = self.codes(&grouped, &scales.expand_dims(-1)?, &biases.expand_dims(-1)?)?;
        Ok(Rounded {
            codes: codes.reshape(weight.shape())?,
            scales,
            biases,
            affine: self,
        })
    }

    /// Reshapes `[.., in]` to `[.., groups, group_size]`.
    pub fn grouped(self, x: &Array) -> Result<Array> {
        let mut shape = x.shape().to_vec();
        shape.pop();
        shape.extend([-1, self.group_size]);
        x.reshape(&shape)
    }
}

/// A matrix in the affine format, with unpacked codes.
#[derive(Debug, Clone)]
pub(super) struct Rounded {
    /// float32 `[.., in]`.
    pub codes: Array,
    /// float32 `[.., groups]`.
    pub scales: Array,
    /// float32 `[.., groups]`.
    pub biases: Array,
    pub affine: Affine,
}

impl Rounded {
    /// Joins matrices into one stack.
    pub fn stacked(parts: &[Self], affine: Affine) -> Result<Self> {
        let joined = |part: fn(&Self) -> &Array| {
            let parts: Vec<&Array> = parts.iter().map(part).collect();
            stack(&parts, 0)
        };
        Ok(Self {
            codes: joined(|part| &part.codes)?,
            scales: joined(|part| &part.scales)?,
            biases: joined(|part| &part.biases)?,
            affine,
        })
    }

    /// Returns the dequantized weights, float32 `[.., in]`.
    pub fn dense(&self) -> Result<Array> {
        let codes = self.affine.grouped(&self.codes)?;
        codes
            .multiply(&self.scales.expand_dims(-1)?)?
            .add(&self.biases.expand_dims(-1)?)?
            .reshape(self.codes.shape())
    }

    /// Returns the matrix as a checkpoint stores it.
    pub fn packed(&self) -> Result<Packed> {
        let codes = self.codes.astype(Dtype::Uint8)?.to_vec::<u8>()?;
        Ok(Packed {
            weight: pack(&codes, self.affine.bits.unsigned_abs()),
            scales: self.scales.to_vec::<f32>()?,
            biases: self.biases.to_vec::<f32>()?,
        })
    }
}

/// Packs codes of `bits` bits in MLX's order: consecutively, from the lowest bit of the first word.
/// A row of a matrix fills complete words.
pub(super) fn pack(codes: &[u8], bits: u32) -> Vec<u32> {
    let mut words = Vec::with_capacity(codes.len() * bits as usize / 32 + 1);
    let (mut waiting, mut count) = (0u64, 0u32);
    for code in codes {
        waiting |= u64::from(*code) << count;
        count += bits;
        if count >= 32 {
            words.push(waiting as u32); // the lower half
            waiting >>= 32;
            count -= 32;
        }
    }
    if count > 0 {
        words.push(waiting as u32);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_packed_as_mlx_packs_them() {
        let values: Vec<f32> = (0..6 * 64)
            .map(|i: i32| ((i * 7919 + 13) % 211) as f32 * 0.01 - 1.0)
            .collect();
        let weight = Array::from_slice(&values, &[6, 64]).unwrap();
        for bits in [2, 3, 4, 5, 6, 8] {
            let affine = Affine {
                bits,
                group_size: 32,
                factors: FloatType::F32,
            };
            let theirs = Quantized::quantize(&weight, 32, bits, QuantMode::Affine).unwrap();
            let ours = affine.rounded(&weight).unwrap();
            let packed = ours.packed().unwrap();
            assert_eq!(packed.weight, theirs.weight.to_vec::<u32>().unwrap());
            assert_eq!(packed.scales, theirs.scales.to_vec::<f32>().unwrap());
            let dense = theirs.dequantize(Dtype::Float32).unwrap();
            assert!(ours.dense().unwrap().all_close(&dense, 1e-6, 1e-6).unwrap());
        }
    }
}
