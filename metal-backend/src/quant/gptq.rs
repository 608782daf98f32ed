//! GPTQ (Frantar et al. 2022, arXiv:2210.17323): quantizes a matrix column by column. It
//! compensates the error of each column in the later columns, so that the layer's outputs change
//! least.

use std::sync::Arc;

use inference::{CancelToken, Error, ErrorKind, Interrupt, Result};
use mlx_rs_core::{All, Array, concatenate, eval, eye, linalg};

use super::affine::{Affine, Rounded};
use super::inputs::Moments;
use super::job::{Changes, Job, Target};
use crate::error::engine;
use crate::exec::product_of;

/// Options of the method.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gptq {
    /// The multiple of the mean of the Hessian's diagonal that is added to the diagonal (0.01).
    pub damping: f32,
}

impl Default for Gptq {
    fn default() -> Self {
        Self { damping: 0.01 }
    }
}

impl Gptq {
    /// Returns an error for values that are out of range.
    pub(super) fn check(self) -> Result<()> {
        if self.damping.is_finite() && self.damping > 0.0 {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidOption,
            format!("damping is {}; it must be a number above 0", self.damping),
        ))
    }

    /// Quantizes the linear layers and the experts of all blocks, block by block.
    pub(super) fn run(self, job: &mut Job<'_>) -> Result<()> {
        let cancel = job.cancel;
        job.block_by_block(true, |block| {
            let mut changes = Changes::default();
            // Layers with the same input share the factor of the inverse Hessian.
            let mut factors: Vec<(&Arc<Moments>, Array)> = Vec::new();
            for target in &block.targets {
                Interrupt::new().with_cancel(cancel.clone()).check()?;
                let Some(moments) = block.inputs.get(target.slot.name()) else {
                    continue;
                };
                let known = factors.iter().find(|(of, _)| Arc::ptr_eq(of, moments));
                let factor = match known {
                    Some((_, factor)) => factor.clone(),
                    None => {
                        let factor = inverse_factor(&moments.products, self.damping)?;
                        factors.push((moments, factor.clone()));
                        factor
                    }
                };
                let rounded = by_columns(&target.weight()?, &factor, target.affine())
                    .map_err(engine("gptq"))?;
                changes.rounded.push((target.clone(), rounded));
            }
            drop(factors);
            let mut rest: &[Target] = &block.stacks;
            while let Some(first) = rest.first() {
                let Some(inputs) = block.expert_inputs.get(first.slot.name()) else {
                    break;
                };
                let shares = |stack: &Target| {
                    let other = block.expert_inputs.get(stack.slot.name());
                    other.is_some_and(|other| Arc::ptr_eq(other, inputs))
                };
                // Adjacent stacks with the same inputs share their factors.
                let count = rest.iter().take_while(|stack| shares(stack)).count();
                let (group, others) = rest.split_at(count);
                rest = others;
                self.experts(group, inputs, cancel, &mut changes)?;
            }
            Ok(changes)
        })
    }

    /// Quantizes stacks of experts with the same inputs, expert by expert.
    fn experts(
        self,
        stacks: &[Target],
        inputs: &[Option<Moments>],
        cancel: &CancelToken,
        changes: &mut Changes,
    ) -> Result<()> {
        let fault = engine("gptq");
        let weights = stacks.iter().map(Target::weight);
        let weights = weights.collect::<Result<Vec<Array>>>()?;
        let Some(first) = weights.first() else {
            return Ok(());
        };
        let count = first.dim(0).map_err(&fault)?;
        let width = first.dim(-1).map_err(&fault)?;
        let (mut rounded, mut few) = (vec![Vec::new(); stacks.len()], 0);
        for expert in 0..count {
            Interrupt::new().with_cancel(cancel.clone()).check()?;
            let moments = inputs.get(expert.unsigned_abs() as usize);
            let moments = moments.and_then(Option::as_ref);
            let enough = moments.filter(|m| m.count >= fewest_tokens(width));
            few += usize::from(enough.is_none());
            let factor = enough
                .map(|m| inverse_factor(&m.products, self.damping))
                .transpose()?;
            for ((stack, weight), into) in stacks.iter().zip(&weights).zip(&mut rounded) {
                let one = || -> mlx_rs_core::Result<Rounded> {
                    let weight = weight.slice_axis(0, expert, expert + 1)?.squeeze_axis(0)?;
                    match &factor {
                        Some(factor) => by_columns(&weight, factor, stack.affine()),
                        None => stack.affine().rounded(&weight),
                    }
                };
                into.push(one().map_err(&fault)?);
            }
        }
        for (stack, parts) in stacks.iter().zip(rounded) {
            let whole = Rounded::stacked(&parts, stack.affine()).map_err(&fault)?;
            changes.rounded.push((stack.clone(), whole));
            changes.few_tokens.push((stack.clone(), parts.len(), few));
        }
        Ok(())
    }
}

/// The minimum number of tokens for learning an expert with `width` inputs. GPTQ moves errors into
/// directions that the calibration tokens do not use. With few tokens, there are many such
/// directions, and other tokens use them.
fn fewest_tokens(width: i32) -> usize {
    width.unsigned_abs() as usize / 4
}

/// Quantizes `weight` float32 `[out, in]` for inputs with the second moments `products` `[in, in]`.
#[cfg(test)]
pub(super) fn quantize(
    weight: &Array,
    products: &Array,
    affine: Affine,
    damping: f32,
) -> Result<Rounded> {
    let factor = inverse_factor(products, damping)?;
    by_columns(weight, &factor, affine).map_err(engine("gptq"))
}

/// Returns the upper Cholesky factor `U` of the inverse of the damped Hessian, `H^-1 = U^T U`. The
/// Hessian is `2 X^T X`; the factor 2 is omitted because it changes no result.
fn inverse_factor(products: &Array, damping: f32) -> Result<Array> {
    let attempt = |damping: f32| -> mlx_rs_core::Result<(Array, bool)> {
        let n = products.dim(0)?;
        let mean = products.diagonal(0, 0, 1)?.mean(All, false)?;
        // A layer that received no input has a zero Hessian. This minimum makes all its columns
        // count equally.
        let added = mean
            .multiply(&mean.scalar_like(damping)?)?
            .maximum(&mean.scalar_like(1e-12)?)?;
        let identity = eye(n, n, 0, products.dtype())?;
        let damped = products.add(&identity.multiply(&added)?)?;
        let lower = linalg::cholesky(&damped, false)?;
        let upper = linalg::cholesky(&linalg::cholesky_inv(&lower, false)?, true)?;
        upper.eval()?;
        let sound = upper.is_finite()?.all(All, false)?.item::<bool>()?;
        Ok((upper, sound))
    };
    // Rounding can make a Hessian of few positions indefinite. More damping makes it definite.
    for factor in [1.0, 10.0, 100.0] {
        let (upper, sound) = attempt(damping * factor).map_err(engine("gptq"))?;
        if sound {
            return Ok(upper);
        }
    }
    Err(Error::new(
        ErrorKind::Engine,
        "gptq: the Hessian has no Cholesky factor; the inputs of a layer are not finite, or too few \
         positions were calibrated (--num-samples)",
    ))
}

/// Quantizes `weight` float32 `[out, in]` with the factor `[in, in]` of the inverse Hessian. Each
/// group gets MLX's scale and bias for its weights after compensation.
fn by_columns(weight: &Array, factor: &Array, affine: Affine) -> mlx_rs_core::Result<Rounded> {
    let (columns, size) = (weight.dim(1)?, affine.group_size);
    let (mut codes, mut scales, mut biases) = (Vec::new(), Vec::new(), Vec::new());
    // The columns that are not quantized yet, compensated for the errors of earlier columns.
    let mut rest = weight.clone();
    for from in (0..columns).step_by(size.unsigned_abs() as usize) {
        let to = from + size;
        let mut group = rest.slice_axis(1, 0, size)?;
        let (scale, bias) = affine.factors(&group.contiguous()?)?;
        let mut errors = Vec::new();
        for column in from..to {
            let now = group.slice_axis(1, 0, 1)?;
            let code = affine.codes(&now, &scale, &bias)?;
            let error = now
                .subtract(&code.multiply(&scale)?.add(&bias)?)?
                .divide(&factor.slice(&[column, column], &[column + 1, column + 1], &[1, 1])?)?;
            if column + 1 < to {
                let row = factor.slice(&[column, column + 1], &[column + 1, to], &[1, 1])?;
                let later = group.slice_axis(1, 1, to - column)?;
                group = later.subtract(&error.multiply(&row)?)?;
            }
            codes.push(code);
            errors.push(error);
        }
        let errors = concatenate(&errors.iter().collect::<Vec<_>>(), 1)?;
        if to < columns {
            let right = factor.slice(&[from, to], &[to, columns], &[1, 1])?;
            let later = rest.slice_axis(1, size, columns - from)?;
            rest = later.subtract(&product_of(&errors, &right.swap_axes(0, 1)?)?)?;
        }
        // Without this evaluation, the graph would grow with every column.
        eval([&rest, &scale, &bias].into_iter().chain(&codes))?;
        scales.push(scale);
        biases.push(bias);
    }
    let joined = |parts: &[Array]| concatenate(&parts.iter().collect::<Vec<_>>(), 1);
    let rounded = Rounded {
        codes: joined(&codes)?,
        scales: joined(&scales)?,
        biases: joined(&biases)?,
        affine,
    };
    eval([&rounded.codes, &rounded.scales, &rounded.biases])?;
    Ok(rounded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::{FloatType, Planned};
    use crate::quant::inputs::expert_moments;
    use crate::quant::walk::Walk;

    fn noise(shape: &[i32], seed: i32) -> Array {
        let n: i32 = shape.iter().product();
        let value = |i: i32| ((i + seed) * 7919 % 10007) as f32 * 2e-4 - 1.0;
        Array::from_slice(&(0..n).map(value).collect::<Vec<_>>(), shape).unwrap()
    }

    /// Returns the sum of squared errors of the layer's outputs.
    fn loss(weight: &Array, rounded: &Rounded, products: &Array) -> f32 {
        let error = weight.subtract(&rounded.dense().unwrap()).unwrap();
        let by_row = error.matmul(products).unwrap().multiply(&error).unwrap();
        by_row.sum(All, false).unwrap().item::<f32>().unwrap()
    }

    #[test]
    fn outputs_change_less_than_by_plain_rounding() {
        let weight = noise(&[24, 128], 1);
        // Inputs with correlated channels, as in real layers.
        let mixing = noise(&[128, 128], 5);
        let x = noise(&[300, 128], 3);
        let x = x.add(&x.matmul(&mixing).unwrap()).unwrap();
        let products = x.swap_axes(0, 1).unwrap().matmul(&x).unwrap();
        for (bits, factors) in [
            (2, FloatType::F32),
            (3, FloatType::F16),
            (4, FloatType::BF16),
        ] {
            let affine = Affine {
                bits,
                group_size: 32,
                factors,
            };
            let ours = quantize(&weight, &products, affine, 0.01).unwrap();
            let plain = affine.rounded(&weight).unwrap();
            let (ours, plain) = (
                loss(&weight, &ours, &products),
                loss(&weight, &plain, &products),
            );
            assert!(ours < 0.7 * plain, "{bits} bits: {ours} {plain}");
        }
    }

    #[test]
    fn layers_without_inputs_are_rounded_plainly() {
        let weight = noise(&[8, 64], 2);
        let affine = Affine {
            bits: 3,
            group_size: 64,
            factors: FloatType::F32,
        };
        let nothing = mlx_rs_core::zeros(&[64, 64], mlx_rs_core::Dtype::Float32).unwrap();
        let ours = quantize(&weight, &nothing, affine, 0.01).unwrap();
        let plain = affine.rounded(&weight).unwrap();
        assert_eq!(ours.packed().unwrap(), plain.packed().unwrap());
        let infinite = nothing.add(&nothing.scalar_like(f32::INFINITY).unwrap());
        let error = quantize(&weight, &infinite.unwrap(), affine, 0.01).unwrap_err();
        assert!(error.to_string().contains("Hessian"), "{error}");
    }

    /// For the tokens that reach its experts, each stack's outputs must change less than by plain
    /// rounding.
    #[test]
    fn outputs_of_experts_change_less_than_by_plain_rounding() {
        let model = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/fixtures/tiny/qwen3-moe"
        );
        let options = inference::LoadOptions::new().with_backend("cpu");
        let (loaded, _model) = crate::backend::open(model.as_ref(), &options).unwrap();
        let sequence = |seed: u32| (0..32).map(|i| 3 + (i * i * 7 + seed * 31) % 200).collect();
        let sequences: Vec<Vec<u32>> = (0..16).map(sequence).collect();
        let cancel = CancelToken::new();
        let walk = Walk::new(&loaded, &sequences, 4, &cancel).unwrap();
        let affine = Affine {
            bits: 2,
            group_size: 32,
            factors: FloatType::F32,
        };
        let stacks: Vec<Target> = loaded
            .param_slots()
            .into_iter()
            .filter(|slot| matches!(slot.shape()[..], [_, _, width] if width % 32 == 0))
            .filter(|slot| slot.block() == Some(0))
            .map(|slot| Target {
                planned: Planned {
                    path: slot.name().to_owned(),
                    shape: Vec::new(),
                    bits: affine.bits,
                    group_size: affine.group_size,
                    factors: affine.factors,
                },
                slot,
            })
            .collect();
        assert!(stacks.len() >= 2, "{} stacks", stacks.len());
        let names = stacks.iter().map(|t| t.slot.name().to_owned()).collect();
        let inputs = expert_moments(&walk, &names).unwrap();
        let mut learned = 0;
        for stack in &stacks {
            let inputs = &inputs[stack.slot.name()];
            let mut changes = Changes::default();
            loaded.scope(|| {
                let stacks = std::slice::from_ref(stack);
                let gptq = Gptq::default();
                gptq.experts(stacks, inputs, &cancel, &mut changes).unwrap();
            });
            let [(_, rounded)] = changes.rounded.as_slice() else {
                panic!("one stack");
            };
            let [(_, count, few)] = changes.few_tokens[..] else {
                panic!("one stack");
            };
            learned += count - few;
            let weight = stack.weight().unwrap();
            assert_eq!(rounded.codes.shape(), weight.shape());
            let plain = affine.rounded(&weight).unwrap();
            let error = |rounded: &Rounded| -> f32 {
                let dense = rounded.dense().unwrap();
                let one = |a: &Array, i: usize| {
                    let i = i32::try_from(i).unwrap();
                    a.slice_axis(0, i, i + 1).unwrap().squeeze_axis(0).unwrap()
                };
                let of_expert = |(i, moments): (usize, &Option<Moments>)| {
                    let moments = moments.as_ref()?;
                    let error = one(&weight, i).subtract(&one(&dense, i)).unwrap();
                    let by_row = error.matmul(&moments.products).unwrap();
                    let sum = by_row.multiply(&error).unwrap().sum(All, false).unwrap();
                    Some(sum.item::<f32>().unwrap())
                };
                inputs.iter().enumerate().filter_map(of_expert).sum()
            };
            let (ours, plain) = (error(rounded), error(&plain));
            let name = stack.slot.name();
            assert!(ours < 0.9 * plain, "{name}: {ours} {plain}");
        }
        assert!(learned >= 6, "{learned} experts");
    }
}
