//! Chooses the bits of each layer by its sensitivity: the most sensitive layers get the high bits.
//! As in mlx-lm, the sensitivity of a layer is the first-order change of the divergence from the
//! original model if its weights get high instead of low bits, per million weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Interrupt, Result};
use mlx_rs_core::{Array, Dtype};
use serde_json::Value;

use super::affine::Affine;
use super::distance::{Pair, batches, parameter};
use super::job::{Job, Target};
use crate::adapter::{Params, same_layer};
use crate::checkpoint::files::{MAX_TEXT_FILE, read_text};
use crate::convert::{FloatType, check_affine};
use crate::error::engine;
use crate::workdir::replace;

/// Options of the method. The conversion's options determine the low bits.
#[derive(Debug, Clone, PartialEq)]
pub struct Dynamic {
    /// The bits of sensitive layers (5).
    pub high_bits: i32,
    /// The group size of sensitive layers (64).
    pub high_group_size: i32,
    /// The maximum mean number of bits per weight in quantized matrices, including scales and
    /// biases; `None` means halfway between low and high bits.
    pub target_bpw: Option<f64>,
    /// A JSON file of sensitivities, `[[layer, number], ...]` as mlx-lm writes it. If the file
    /// exists, it is read and no calibration data is needed. Otherwise it is written.
    pub sensitivities: Option<PathBuf>,
    /// Whether to recompute blocks in the backward pass: less memory, more time.
    pub grad_checkpoint: bool,
}

impl Default for Dynamic {
    fn default() -> Self {
        Self {
            high_bits: 5,
            high_group_size: 64,
            target_bpw: None,
            sensitivities: None,
            grad_checkpoint: false,
        }
    }
}

impl Dynamic {
    /// Returns an error for values that are out of range.
    pub(super) fn check(&self) -> Result<()> {
        check_affine(self.high_bits, self.high_group_size)?;
        match self.target_bpw {
            Some(bits) if !(bits.is_finite() && bits > 0.0) => Err(Error::new(
                ErrorKind::InvalidOption,
                format!("target_bpw is {bits}; it must be a number above 0"),
            )),
            _ => Ok(()),
        }
    }

    /// Whether the file of sensitivities exists, so that no calibration data is needed.
    pub(super) fn has_sensitivities(&self) -> bool {
        self.sensitivities.as_deref().is_some_and(Path::exists)
    }

    /// Chooses the bits of every matrix.
    pub(super) fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let by_path = match (&self.sensitivities, self.has_sensitivities()) {
            (Some(file), true) => read(file, job)?,
            (file, _) => {
                let all = self.measure(job)?;
                if let Some(file) = file {
                    write(file, job, &all)?;
                }
                all
            }
        };
        let sizes: Vec<Size> = job
            .targets
            .iter()
            .map(|target| Size {
                weights: target.planned.shape.iter().product::<usize>() as f64,
                low: bits_per_weight(target.affine()),
                high: self.high(target).map(bits_per_weight),
                sensitivity: by_path.get(&target.planned.path).copied().unwrap_or(0.0),
            })
            .collect();
        let (chosen, bpw) = choose(&sizes, self.target_bpw)?;
        let mut count = 0;
        for (target, _) in job.targets.iter().zip(&chosen).filter(|(_, high)| **high) {
            count += 1;
            job.given.formats.insert(
                target.planned.path.clone(),
                (self.high_bits, self.high_group_size),
            );
        }
        job.notes.push(format!(
            "{count} of {} matrices have {} bits; the matrices have {bpw:.3} bits a weight",
            chosen.len(),
            self.high_bits
        ));
        Ok(())
    }

    /// Returns the format with high bits; `None` if the group size does not divide the row length.
    fn high(&self, target: &Target) -> Option<Affine> {
        let columns = target.planned.shape.last().copied().unwrap_or(0);
        let group = self.high_group_size.unsigned_abs() as usize;
        columns.is_multiple_of(group).then_some(Affine {
            bits: self.high_bits,
            group_size: self.high_group_size,
            factors: target.planned.factors,
        })
    }

    /// Returns the sensitivities by path, averaged over the batches.
    ///
    /// With the weights `low + t * (low - high)`, the derivative with respect to the scalar `t` at
    /// 0 is the dot product of the gradient and `low - high`. So no full gradient of a matrix stays
    /// in memory after its block is computed.
    fn measure(&self, job: &mut Job<'_>) -> Result<BTreeMap<String, f64>> {
        let batches = batches(job)?;
        let loaded = std::sync::Arc::clone(&job.engine);
        let pair = Pair::new(&loaded, &job.targets, 1.0, self.grad_checkpoint)?;
        let zero = loaded
            .scope(|| Array::scalar(0.0f32))
            .map_err(engine("sensitivities"))?;
        let params: Params = job
            .targets
            .iter()
            .filter(|target| self.high(target).is_some())
            .map(|target| (parameter(target), zero.clone()))
            .collect();
        let targets = &job.targets;
        let weights = |params: &Params| -> mlx_rs_core::Result<Params> {
            let mut all = Params::new();
            for target in targets {
                let name = parameter(target);
                let weight = target.slot.stored_weight(Dtype::Float32)?;
                let low = target.affine().rounded(&weight)?.dense()?;
                let weight = match (params.get(&name), self.high(target)) {
                    (Some(t), Some(high)) => {
                        let high = high.rounded(&weight)?.dense()?;
                        low.add(&low.subtract(&high)?.multiply(t)?)?
                    }
                    _ => low,
                };
                all.insert(name, weight);
            }
            Ok(all)
        };
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        let interrupt = Interrupt::new().with_cancel(job.cancel.clone());
        for (at, batch) in batches.iter().enumerate() {
            interrupt.check()?;
            (job.progress)("measuring sensitivities", at as u64, batches.len() as u64);
            let (_, grads) = pair.gradients(batch, &params, &weights)?;
            for (name, grad) in &grads {
                let grad = grad.item::<f32>().map_err(engine("sensitivities"))?;
                *sums.entry(name.clone()).or_default() += f64::from(grad);
            }
        }
        let per_batch = batches.len().max(1) as f64;
        Ok(targets
            .iter()
            .filter_map(|target| {
                let millions = target.planned.shape.iter().product::<usize>() as f64 / 1e6;
                let sum = sums.get(&parameter(target))?;
                let sensitivity = sum / per_batch / millions.max(f64::MIN_POSITIVE);
                Some((target.planned.path.clone(), sensitivity))
            })
            .collect())
    }
}

/// Returns the bits per weight, including its share of scale and bias.
fn bits_per_weight(affine: Affine) -> f64 {
    let factor = match affine.factors {
        FloatType::F32 => 32.0,
        FloatType::F16 | FloatType::BF16 => 16.0,
    };
    f64::from(affine.bits) + 2.0 * factor / f64::from(affine.group_size)
}

/// The sizes and the sensitivity of a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Size {
    weights: f64,
    /// Bits per weight with low bits.
    low: f64,
    /// Bits per weight with high bits; `None` if the matrix cannot have high bits.
    high: Option<f64>,
    sensitivity: f64,
}

/// Returns for each matrix whether it gets the high bits, and the mean bits per weight. Adds
/// matrices by descending sensitivity while the mean is at most `target`.
fn choose(sizes: &[Size], target: Option<f64>) -> Result<(Vec<bool>, f64)> {
    let weights: f64 = sizes.iter().map(|s| s.weights).sum();
    let low: f64 = sizes.iter().map(|s| s.weights * s.low).sum();
    let high: f64 = (sizes.iter())
        .map(|s| s.weights * s.high.unwrap_or(s.low))
        .sum();
    let target = target.unwrap_or((low + high) / 2.0 / weights.max(1.0));
    if target * weights < low * (1.0 - 1e-9) {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "target_bpw is {target}, but with the low bits the matrices have {:.3} bits a weight; \
                 lower the low bits, or raise the target",
                low / weights.max(1.0)
            ),
        ));
    }
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by(|a, b| sizes[*b].sensitivity.total_cmp(&sizes[*a].sensitivity));
    let mut chosen = vec![false; sizes.len()];
    let mut bits = low;
    for at in order {
        let size = sizes[at];
        let Some(high) = size.high else { continue };
        let more = size.weights * (high - size.low);
        if bits + more <= target * weights * (1.0 + 1e-9) {
            bits += more;
            chosen[at] = true;
        }
    }
    Ok((chosen, bits / weights.max(1.0)))
}

/// Writes sensitivities with the layer names of the loaded model.
fn write(file: &Path, job: &Job<'_>, all: &BTreeMap<String, f64>) -> Result<()> {
    let pairs: Vec<Value> = job
        .targets
        .iter()
        .filter_map(|t| {
            Some(serde_json::json!([
                t.planned.path,
                all.get(&t.planned.path)?
            ]))
        })
        .collect();
    let mut text = serde_json::to_vec_pretty(&Value::Array(pairs)).map_err(|e| {
        Error::new(ErrorKind::Engine, "the sensitivities cannot be written").with_source(e)
    })?;
    text.push(b'\n');
    replace(file, &text)
}

/// Reads sensitivities. Every matrix of the job must have one.
fn read(file: &Path, job: &Job<'_>) -> Result<BTreeMap<String, f64>> {
    let bad =
        |message: String| Error::new(ErrorKind::InvalidOption, message).with_path(file.to_owned());
    let text = read_text(file, MAX_TEXT_FILE)?;
    let pairs: Vec<(String, f64)> = serde_json::from_str(&text).map_err(|e| {
        bad(String::from(
            "the sensitivities are not [[layer, number], ...] in JSON",
        ))
        .with_source(e)
    })?;
    if let Some((name, _)) = pairs.iter().find(|(_, n)| !n.is_finite()) {
        return Err(bad(format!("the sensitivity of `{name}` is not a number")));
    }
    let mut all = BTreeMap::new();
    for target in &job.targets {
        let path = &target.planned.path;
        let exact = pairs.iter().find(|(name, _)| name == path);
        let found = exact.or_else(|| pairs.iter().find(|(name, _)| same_layer(name, path)));
        let Some((_, sensitivity)) = found else {
            return Err(bad(format!(
                "there is no sensitivity of `{path}`; the file belongs to another model"
            )));
        };
        all.insert(path.clone(), *sensitivity);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(weights: f64, sensitivity: f64) -> Size {
        Size {
            weights,
            low: 3.0,
            high: Some(5.0),
            sensitivity,
        }
    }

    #[test]
    fn the_most_sensitive_matrices_get_the_high_bits() {
        let mut sizes = vec![size(100.0, 0.1), size(100.0, 0.9), size(200.0, 0.5)];
        let chosen = |sizes: &[Size], target| choose(sizes, target).unwrap();
        assert_eq!(chosen(&sizes, Some(3.0)), (vec![false; 3], 3.0));
        assert_eq!(chosen(&sizes, Some(3.6)), (vec![false, true, false], 3.5));
        // The second most sensitive matrix does not fit into the remaining bits, but the third
        // does.
        assert_eq!(chosen(&sizes, Some(4.0)), (vec![true, true, false], 4.0));
        assert_eq!(chosen(&sizes, Some(4.5)), (vec![false, true, true], 4.5));
        assert_eq!(chosen(&sizes, Some(9.0)), (vec![true; 3], 5.0));
        assert_eq!(chosen(&sizes, None), (vec![true, true, false], 4.0));
        sizes[1].high = None;
        assert_eq!(chosen(&sizes, Some(4.0)), (vec![false, false, true], 4.0));
        let error = choose(&sizes, Some(2.5)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption);
        assert!(error.to_string().contains("3.000 bits"), "{error}");
    }
}
