//! Rotary position embedding (Su et al. 2021), and its scaling methods for longer contexts.

use std::f32::consts::TAU;
use std::sync::Arc;

use mlx_rs_core::{Array, Error, ErrorKind, Result, concatenate, fast};

use crate::cache::Switch;
use crate::checkpoint::config::{RopeConfig, RopeScaling, llama3_stretch};
use crate::exec::RotarySpec;

/// A configured rotary embedding.
#[derive(Debug, Clone)]
pub struct Rope {
    dims: i32,
    theta: f32,
    /// Factor on positions.
    scale: f32,
    traditional: bool,
    /// `wavelength / (2 * pi)` of each pair; `None` if the wavelengths are plain powers of theta.
    freqs: Option<Array>,
    /// A length in positions, and the wavelengths for sequences that exceed it.
    beyond: Option<(i32, Array)>,
    /// Parameters of dynamic NTK scaling.
    dynamic: Option<DynamicBase>,
    /// Factor on the rotated elements, in the compute type.
    amplitude: Option<Array>,
    /// `amplitude` as a float on the host.
    factor: f32,
    /// Radians per position of each pair, computed from `theta`, `scale` and `freqs`.
    radians: Arc<[f32]>,
}

/// A base that grows with the length of the sequence (dynamic NTK).
#[derive(Debug, Clone, Copy, PartialEq)]
struct DynamicBase {
    factor: f32,
    /// The length up to which the base does not change.
    context: i32,
}

impl DynamicBase {
    /// Returns the base for a sequence of `total` positions.
    fn theta(self, theta: f32, dims: i32, total: i32) -> f32 {
        let [theta, factor, dims] = [theta, self.factor, dims as f32].map(f64::from);
        let ratio = f64::from(total.max(self.context)) / f64::from(self.context);
        (theta * (factor * ratio - (factor - 1.0)).powf(dims / (dims - 2.0))) as f32
    }
}

impl Rope {
    /// Creates the rotation for heads of `head_dim` elements. `traditional` pairs adjacent
    /// elements; otherwise element `i` of the first half pairs with element `i` of the second half.
    pub fn new(
        head_dim: i32,
        config: &RopeConfig,
        traditional: bool,
        dtype: mlx_rs_core::Dtype,
    ) -> Result<Self> {
        let is_proportional = matches!(config.scaling, RopeScaling::Proportional { .. });
        // The rotation works on pairs, so it needs an even number of elements.
        let part = (head_dim as f32 * config.partial) as i32 / 2 * 2;
        let dims = if is_proportional {
            head_dim
        } else {
            part.max(2)
        };
        let mut rope = Self {
            dims,
            theta: config.theta,
            scale: 1.0,
            traditional,
            freqs: None,
            beyond: None,
            dynamic: None,
            amplitude: None,
            factor: 1.0,
            radians: Arc::default(),
        };
        // `wavelength / (2 * pi)`, if the scaling method changes the powers of theta.
        let mut stretched_freqs: Option<Vec<f32>> = None;
        let amplitude = |factor: f32| -> Result<Option<Array>> {
            (factor != 1.0)
                .then(|| Array::scalar(factor)?.astype(dtype))
                .transpose()
        };
        match &config.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => rope.scale = 1.0 / factor,
            RopeScaling::Dynamic {
                factor,
                original_context,
            } => {
                if dims <= 2 {
                    let message = "dynamic scaling needs more than 2 rotating elements";
                    return Err(Error::new(ErrorKind::Value, "rope", message));
                }
                rope.dynamic = Some(DynamicBase {
                    factor: *factor,
                    context: i32::try_from(*original_context).unwrap_or(i32::MAX),
                });
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let freqs: Vec<f32> = powers(dims, config.theta)
                    .map(|f| {
                        llama3_factor(
                            f,
                            *factor,
                            *low_freq_factor,
                            *high_freq_factor,
                            *original_context,
                        )
                    })
                    .collect();
                rope.freqs = Some(Array::vector(&freqs)?);
                stretched_freqs = Some(freqs);
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor,
            } => {
                let ends = yarn_ends(
                    dims,
                    config.theta,
                    *original_context,
                    [*beta_fast, *beta_slow],
                    *truncate,
                );
                let freqs: Vec<f32> = powers(dims, config.theta)
                    .enumerate()
                    .map(|(i, f)| yarn_wavelength(f, *factor, i as f32, ends))
                    .collect();
                rope.freqs = Some(Array::vector(&freqs)?);
                stretched_freqs = Some(freqs);
                rope.factor = *attention_factor;
                rope.amplitude = amplitude(*attention_factor)?;
            }
            RopeScaling::LongRope {
                short,
                long,
                original_context,
                attention_factor,
            } => {
                let stretched = |by: &[f32]| {
                    let freqs: Vec<f32> = powers(dims, config.theta)
                        .zip(by)
                        .map(|(f, by)| f * by)
                        .collect();
                    Array::vector(&freqs)
                };
                rope.freqs = Some(stretched(short)?);
                let limit = i32::try_from(*original_context).unwrap_or(i32::MAX);
                rope.beyond = Some((limit, stretched(long)?));
                rope.amplitude = amplitude(*attention_factor)?;
            }
            RopeScaling::Proportional { factor } => {
                // Pairs that do not rotate have an infinite wavelength.
                let freqs: Vec<f32> = powers(dims, config.theta)
                    .enumerate()
                    .map(|(i, f)| {
                        if (i as i32) < part / 2 {
                            f * factor
                        } else {
                            f32::INFINITY
                        }
                    })
                    .collect();
                rope.freqs = Some(Array::vector(&freqs)?);
                stretched_freqs = Some(freqs);
            }
        }
        rope.radians = match stretched_freqs {
            Some(freqs) => freqs.iter().map(|f| rope.scale / f).collect(),
            None => powers(dims, config.theta).map(|f| rope.scale / f).collect(),
        };
        Ok(rope)
    }

    /// Multiplies each pair's wavelength by `factors` `[dims / 2]`, which GGUF files store.
    pub fn with_factors(mut self, factors: &[f32]) -> Result<Self> {
        let freqs: Vec<f32> = powers(self.dims, self.theta)
            .zip(factors)
            .map(|(f, &by)| f * by)
            .collect();
        self.freqs = Some(Array::vector(&freqs)?);
        self.radians = freqs.iter().map(|f| self.scale / f).collect();
        Ok(self)
    }

    /// Returns the rotation in the form that `exec` reads.
    pub fn spec(&self) -> RotarySpec<'_> {
        match self.beyond {
            Some(_) => RotarySpec::Changing,
            None => RotarySpec::Fixed {
                radians: &self.radians,
                traditional: self.traditional,
                amplitude: self.factor,
            },
        }
    }

    /// Reverses the direction of the rotation.
    pub fn reversed(mut self) -> Result<Self> {
        let freqs: Vec<f32> = self.radians.iter().map(|r| -self.scale / r).collect();
        self.freqs = Some(Array::vector(&freqs)?);
        self.radians = self.radians.iter().map(|r| -r).collect();
        Ok(self)
    }

    /// Returns how the wavelengths depend on the length of the sequence; `None` if they do not.
    pub fn switch(&self) -> Option<Switch> {
        match (&self.beyond, self.dynamic) {
            (Some((limit, _)), _) => Some(Switch::Once(*limit)),
            (None, Some(base)) => Some(Switch::Gradual(base.context)),
            (None, None) => None,
        }
    }

    /// Returns the number of elements of each head that rotate.
    pub fn dims(&self) -> i32 {
        self.dims
    }

    /// Rotates `x` `[B, H, L, D]` at positions `offset..offset + L` of a sequence of `total`
    /// positions. `total` selects the wavelengths ([`Rope::switch`]).
    ///
    /// # Errors
    /// If the shape of `x` does not match the rotation.
    pub fn forward(&self, x: &Array, offset: i32, total: i32) -> Result<Array> {
        let freqs = match &self.beyond {
            Some((limit, beyond)) if total > *limit => Some(beyond),
            _ => self.freqs.as_ref(),
        };
        let base = match (freqs, self.dynamic) {
            (Some(freqs), _) => fast::RopeBase::Freqs(freqs),
            (None, Some(base)) => fast::RopeBase::Theta(base.theta(self.theta, self.dims, total)),
            (None, None) => fast::RopeBase::Theta(self.theta),
        };
        match &self.amplitude {
            Some(factor) => {
                let x = self.amplify(x, factor)?;
                fast::rope(&x, self.dims, self.traditional, base, self.scale, offset)
            }
            None => fast::rope(x, self.dims, self.traditional, base, self.scale, offset),
        }
    }

    /// Multiplies the rotated elements by `factor`.
    fn amplify(&self, x: &Array, factor: &Array) -> Result<Array> {
        let width = x.dim(-1)?;
        if self.dims == width {
            return x.multiply(factor);
        }
        let rotated = x.slice_axis(-1, 0, self.dims)?.multiply(factor)?;
        concatenate(&[&rotated, &x.slice_axis(-1, self.dims, width)?], -1)
    }
}

/// Returns `theta^(2i / dims)` for each pair `i`.
fn powers(dims: i32, theta: f32) -> impl Iterator<Item = f32> {
    (0..dims / 2).map(move |i| theta.powf(2.0 * i as f32 / dims as f32))
}

fn llama3_factor(freq: f32, factor: f32, low: f32, high: f32, context: f32) -> f32 {
    let [freq, factor, low, high, context] = [freq, factor, low, high, context].map(f64::from);
    let stretch = llama3_stretch(freq * f64::from(TAU), factor, [low, high], context);
    (freq * stretch) as f32
}

/// Returns the first and the last pair of YaRN's ramp: the pairs that rotate `betas` times within
/// the context.
fn yarn_ends(dims: i32, theta: f32, context: f32, betas: [f32; 2], truncate: bool) -> [f32; 2] {
    let pair =
        |turns: f32| dims as f32 * (context / (turns * TAU)).ln() / (2.0 * theta.ln().max(1e-6));
    let (mut low, mut high) = (pair(betas[0]), pair(betas[1]));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    let (low, mut high) = (low.max(0.0), high.min(dims as f32 - 1.0));
    if low == high {
        high += 0.001;
    }
    [low, high]
}

/// Returns YaRN's wavelength of pair `i`: unchanged before the ramp, multiplied by `factor` after
/// the ramp, and interpolated by frequency on the ramp.
fn yarn_wavelength(freq: f32, factor: f32, i: f32, [low, high]: [f32; 2]) -> f32 {
    let stretched = ((i - low) / (high - low)).clamp(0.0, 1.0);
    1.0 / ((1.0 - stretched) / freq + stretched / (factor * freq))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_and_stretches_long_wavelengths() {
        let at = |f| llama3_factor(f, 8.0, 1.0, 4.0, 8192.0);
        assert_eq!(at(1.0), 1.0);
        assert_eq!(at(1.0e6), 8.0e6);
        // For wavelengths between 8192/4 and 8192/1, the factor is strictly between 1 and 8.
        let middle = 4096.0 / TAU;
        assert!(at(middle) > middle && at(middle) < 8.0 * middle);
    }

    #[test]
    fn yarn_keeps_the_first_pairs_and_stretches_the_last() {
        let ends = yarn_ends(64, 150_000.0, 4096.0, [32.0, 1.0], false);
        assert!(
            ends[0] > 0.0 && ends[0] < ends[1] && ends[1] < 32.0,
            "{ends:?}"
        );
        assert_eq!(yarn_wavelength(3.0, 32.0, 0.0, ends), 3.0);
        assert!((yarn_wavelength(3.0, 32.0, 31.0, ends) - 96.0).abs() < 1e-3);
        let middle = yarn_wavelength(3.0, 32.0, (ends[0] + ends[1]) / 2.0, ends);
        assert!(middle > 3.0 && middle < 96.0);
        let rounded = yarn_ends(64, 150_000.0, 4096.0, [32.0, 1.0], true);
        assert_eq!(rounded, [ends[0].floor(), ends[1].ceil()]);
    }

    #[test]
    fn a_dynamic_base_grows_beyond_the_trained_context() {
        let base = DynamicBase {
            factor: 2.0,
            context: 32,
        };
        assert_eq!(base.theta(1e4, 8, 1), 1e4);
        assert_eq!(base.theta(1e4, 8, 32), 1e4);
        // At twice the context, the base grows by 3^(8/6).
        let expected = 1e4 * 3f64.powf(8.0 / 6.0);
        assert!((f64::from(base.theta(1e4, 8, 64)) - expected).abs() < 1e-2);
    }

    #[test]
    fn a_reversed_rotation_undoes_the_usual_one() {
        let config = RopeConfig::plain(10_000.0);
        let rope = Rope::new(4, &config, false, mlx_rs_core::Dtype::Float32).unwrap();
        let x = Array::from_slice(&[1.0f32, -2.0, 3.0, 0.5], &[1, 1, 1, 4]).unwrap();
        let turned = rope.forward(&x, 5, 6).unwrap();
        assert!(!turned.all_close(&x, 1e-2, 1e-2).unwrap());
        let back = rope.reversed().unwrap().forward(&turned, 5, 6).unwrap();
        assert!(back.all_close(&x, 1e-5, 1e-5).unwrap());
    }

    #[test]
    fn a_part_of_a_head_rotates_and_the_rest_stays() {
        let mut config = RopeConfig::plain(10_000.0);
        config.partial = 0.5;
        let rope = Rope::new(8, &config, false, mlx_rs_core::Dtype::Float32).unwrap();
        let x = Array::from_slice(&[1.0f32; 8], &[1, 1, 1, 8]).unwrap();
        let y = rope.forward(&x, 3, 4).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(rope.dims(), 4);
        assert!(y[..4].iter().all(|v| (v - 1.0).abs() > 1e-3), "{y:?}");
        assert_eq!(y[4..], [1.0; 4]);
    }

    #[test]
    fn stretches_change_beyond_the_trained_context() {
        let mut config = RopeConfig::plain(10_000.0);
        config.scaling = RopeScaling::LongRope {
            short: vec![1.0, 1.0],
            long: vec![4.0, 4.0],
            original_context: 8,
            attention_factor: 2.0,
        };
        let rope = Rope::new(4, &config, false, mlx_rs_core::Dtype::Float32).unwrap();
        let plain = Rope::new(
            4,
            &RopeConfig::plain(1e4),
            false,
            mlx_rs_core::Dtype::Float32,
        );
        let plain = plain.unwrap();
        let x = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 1, 4]).unwrap();
        let at = |rope: &Rope, offset, total| {
            rope.forward(&x, offset, total)
                .unwrap()
                .to_vec::<f32>()
                .unwrap()
        };
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - 2.0 * b).abs() < 1e-5);
        assert!(near(&at(&rope, 4, 8), &at(&plain, 4, 8)));
        // At position 4, a wavelength four times as long gives the angle of position 1.
        assert!(near(&at(&rope, 4, 9), &at(&plain, 1, 9)));
    }
}
