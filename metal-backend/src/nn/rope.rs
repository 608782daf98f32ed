//! Rotary position embedding and the ways checkpoints stretch it to longer contexts.

use std::f32::consts::TAU;

use mlx_rs_core::{Array, Result, fast};

use crate::checkpoint::config::RopeScaling;

/// A configured rotary embedding.
#[derive(Debug, Clone)]
pub struct Rope {
    dims: i32,
    theta: f32,
    scale: f32,
    traditional: bool,
    /// Wavelength factors, where the powers of theta alone do not say it.
    freqs: Option<Array>,
}

impl Rope {
    /// Rotates the first `dims` elements of each head.
    ///
    /// # Errors
    /// When MLX cannot allocate the frequencies.
    pub fn new(dims: i32, theta: f32, traditional: bool, scaling: &RopeScaling) -> Result<Self> {
        let mut rope = Self {
            dims,
            theta,
            scale: 1.0,
            traditional,
            freqs: None,
        };
        match *scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => rope.scale = 1.0 / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let freqs: Vec<f32> = powers(dims, theta)
                    .map(|f| {
                        llama3_factor(
                            f,
                            factor,
                            low_freq_factor,
                            high_freq_factor,
                            original_context,
                        )
                    })
                    .collect();
                rope.freqs = Some(Array::vector(&freqs)?);
            }
        }
        Ok(rope)
    }

    /// With each pair's wavelength multiplied by `factors` `[dims / 2]`, as GGUF files store it.
    ///
    /// # Errors
    /// When MLX cannot allocate the frequencies.
    pub fn with_factors(mut self, factors: &[f32]) -> Result<Self> {
        let freqs: Vec<f32> = powers(self.dims, self.theta)
            .zip(factors)
            .map(|(f, &by)| f * by)
            .collect();
        self.freqs = Some(Array::vector(&freqs)?);
        Ok(self)
    }

    /// Rotates `x` `[B, H, L, D]` at positions `offset..offset + L`.
    ///
    /// # Errors
    /// When the shape does not fit.
    pub fn forward(&self, x: &Array, offset: i32) -> Result<Array> {
        let base = match &self.freqs {
            Some(freqs) => fast::RopeBase::Freqs(freqs),
            None => fast::RopeBase::Theta(self.theta),
        };
        fast::rope(x, self.dims, self.traditional, base, self.scale, offset)
    }
}

/// `theta^(2i / dims)` for each pair.
fn powers(dims: i32, theta: f32) -> impl Iterator<Item = f32> {
    (0..dims / 2).map(move |i| theta.powf(2.0 * i as f32 / dims as f32))
}

fn llama3_factor(freq: f32, factor: f32, low: f32, high: f32, context: f32) -> f32 {
    let wavelength = TAU * freq;
    if wavelength > context / low {
        freq * factor
    } else if wavelength < context / high {
        freq
    } else {
        let smooth = (context / wavelength - low) / (high - low);
        freq / ((1.0 - smooth) / factor + smooth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_and_stretches_long_wavelengths() {
        let at = |f| llama3_factor(f, 8.0, 1.0, 4.0, 8192.0);
        assert_eq!(at(1.0), 1.0);
        assert_eq!(at(1.0e6), 8.0e6);
        // Between 8192/4 and 8192/1 the stretch lies strictly between the ends.
        let middle = 4096.0 / TAU;
        assert!(at(middle) > middle && at(middle) < 8.0 * middle);
    }
}
