//! Router of a mixture of experts: selects a few experts per token and computes their weights. One
//! implementation covers all model families.

use mlx_rs_core::{Array, Dtype, Result, concatenate, where_};

use super::adapter;
use super::linear::Linear;
use crate::exec::activation::softplus;

/// How the weights of selected experts are computed from the scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weighing {
    /// Softmax over all experts; weights are not renormalized.
    Share,
    /// Softmax over all experts; weights are renormalized to a sum of one.
    NormalizedShare,
    /// Softmax over the selected experts only.
    SoftmaxOfChosen,
    /// Softmax over all experts, with the options of [`Self::Sigmoid`] (Ling, ERNIE).
    Softmax {
        /// Renormalize the weights to a sum of one.
        normalized: bool,
        /// Factor on the weights.
        scale: f32,
        /// The number added to the sum of weights before the division.
        eps: f32,
    },
    /// Selects experts one after another. Each weight is a softmax over the remaining experts whose
    /// scores are near the best remaining score (Phi-3.5-MoE).
    NearBest {
        /// Half of the maximum relative distance from the best score.
        noise: f32,
    },
    /// Sigmoid of each score (LFM2, Nemotron-H).
    Sigmoid {
        /// Renormalize the weights to a sum of one.
        normalized: bool,
        /// Factor on the weights.
        scale: f32,
        /// The number added to the sum of weights before the division.
        eps: f32,
    },
    /// The root of the softplus of each score, with the options of [`Self::Sigmoid`] (Laguna).
    RootSoftplus {
        /// Renormalize the weights to a sum of one.
        normalized: bool,
        /// Factor on the weights.
        scale: f32,
        /// The number added to the sum of weights before the division.
        eps: f32,
    },
}

/// Selects experts for each token.
#[derive(Debug, Clone)]
pub struct Router {
    /// `[hidden] -> [experts]`.
    pub linear: Linear,
    /// The number of experts per token.
    pub per_token: i32,
    /// How the weights of selected experts are computed.
    pub weighing: Weighing,
    /// Bias on the scores `[experts]`. It affects only the selection, not the weights.
    pub choice_bias: Option<Array>,
    /// Groups of experts. The router first selects groups, then experts in these groups.
    pub groups: Option<Groups>,
    /// Cap on scores: `cap * tanh(score / cap)`.
    pub logit_cap: Option<f32>,
}

/// Groups of adjacent experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// The number of groups; divides the number of experts.
    pub count: i32,
    /// The number of groups that each token may select from.
    pub selected: i32,
    /// The number of best expert scores whose sum is the group's score.
    pub best: i32,
}

impl Groups {
    /// Returns `ranked` `[.., experts]` with the minimum value for experts in groups that are not
    /// selected.
    fn keep(self, ranked: &Array) -> Result<Array> {
        let shape = ranked.shape().to_vec();
        let experts = ranked.dim(-1)?;
        let size = experts / self.count;
        let mut grouped = shape.clone();
        grouped.pop();
        grouped.extend([self.count, size]);
        let ranked = ranked.reshape(&grouped)?;
        let from = size - self.best.min(size);
        let best = ranked.sort(-1)?.slice_axis(-1, from, size)?;
        let scores = best.sum(-1, false)?; // [.., groups]
        // The rank of each group, 0 for the lowest score.
        let places = scores.argsort(-1)?.argsort(-1)?.expand_dims(-1)?;
        let least = Array::scalar((self.count - self.selected).unsigned_abs())?;
        let allowed = places.greater_equal(&least)?;
        let none = Array::scalar(f32::MIN)?.astype(ranked.dtype())?;
        where_(&allowed, &ranked, &none)?.reshape(&shape)
    }
}

impl Router {
    /// Selects experts for `x` `[B, L, hidden]`; returns ids and weights, `[B, L, k]` each.
    pub fn forward(&self, x: &Array) -> Result<(Array, Array)> {
        let mut scores = self.linear.forward(x)?;
        if let Some(cap) = self.logit_cap {
            let cap = Array::scalar(cap)?;
            let wide = scores.astype(Dtype::Float32)?;
            scores = wide.divide(&cap)?.tanh()?.multiply(&cap)?;
        }
        let scores = match self.weighing {
            Weighing::SoftmaxOfChosen => scores,
            Weighing::NearBest { noise } => return self.near_best(&scores, noise),
            Weighing::Softmax { .. } => scores.astype(Dtype::Float32)?.softmax(-1, true)?,
            Weighing::Sigmoid { .. } => scores.astype(Dtype::Float32)?.sigmoid()?,
            Weighing::RootSoftplus { .. } => {
                softplus(&scores.astype(Dtype::Float32)?, adapter::differentiated())?.sqrt()?
            }
            Weighing::Share | Weighing::NormalizedShare => scores.softmax(-1, true)?,
        };
        let ranked = match &self.choice_bias {
            Some(bias) => scores.add(bias)?,
            None => scores.clone(),
        };
        let ranked = match self.groups {
            Some(groups) => groups.keep(&ranked)?,
            None => ranked,
        };
        let experts = scores.dim(-1)?;
        // `argpartition` puts the greatest scores last.
        let first = experts - self.per_token;
        let ids = ranked
            .argpartition(first, -1)?
            .slice_axis(-1, first, experts)?;
        // A selection has no gradient. Without this stop, MLX would try to differentiate it.
        let ids = if adapter::differentiated() {
            ids.stop_gradient()?
        } else {
            ids
        };
        let chosen = scores.take_along_axis(&ids, -1)?;
        let weights = match self.weighing {
            Weighing::Share => chosen,
            Weighing::NormalizedShare => chosen.divide(&chosen.sum(-1, true)?)?,
            Weighing::SoftmaxOfChosen | Weighing::NearBest { .. } => chosen.softmax(-1, true)?,
            Weighing::Sigmoid {
                normalized,
                scale,
                eps,
            }
            | Weighing::Softmax {
                normalized,
                scale,
                eps,
            }
            | Weighing::RootSoftplus {
                normalized,
                scale,
                eps,
            } => {
                let scale = Array::scalar(scale)?;
                let shares = if normalized {
                    let sum = chosen.sum(-1, true)?.add(&Array::scalar(eps)?)?;
                    chosen.divide(&sum)?
                } else {
                    chosen
                };
                shares.multiply(&scale)?
            }
        };
        Ok((ids, weights))
    }

    /// Returns ids and weights by [`Weighing::NearBest`], from scores `[.., experts]`.
    fn near_best(&self, scores: &Array, noise: f32) -> Result<(Array, Array)> {
        let scores = scores.astype(Dtype::Float32)?;
        let limit = Array::scalar(2.0 * noise)?;
        let none = Array::scalar(f32::NEG_INFINITY)?;
        let experts = scores.dim(-1)?;
        let numbers: Vec<u32> = (0..experts.unsigned_abs()).collect();
        let numbers = Array::vector(&numbers)?;
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        let mut left = scores.clone();
        for _ in 0..self.per_token {
            let best = left.max(-1, true)?;
            let id = left.argmax(-1, true)?;
            let id = match adapter::differentiated() {
                true => id.stop_gradient()?,
                false => id,
            };
            let distance = best
                .subtract(&scores)?
                .divide(&scores.abs()?.maximum(&best)?)?;
            let near = where_(&distance.greater(&limit)?, &none, &left)?;
            weights.push(near.softmax(-1, true)?.take_along_axis(&id, -1)?);
            left = where_(&numbers.equal(&id)?, &none, &left)?;
            ids.push(id);
        }
        let joined = |all: &[Array]| concatenate(&all.iter().collect::<Vec<_>>(), -1);
        Ok((joined(&ids)?, joined(&weights)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Weight;

    /// A router whose scores equal its inputs.
    fn identity(experts: i32, weighing: Weighing, groups: Option<Groups>) -> Router {
        let one = |i: i32| {
            if i / experts == i % experts {
                1.0f32
            } else {
                0.0
            }
        };
        let values: Vec<f32> = (0..experts * experts).map(one).collect();
        let weight = Array::from_slice(&values, &[experts, experts]).unwrap();
        Router {
            linear: Linear::new(Weight::Dense(weight), None, false).unwrap(),
            per_token: 2,
            weighing,
            choice_bias: None,
            groups,
            logit_cap: None,
        }
    }

    /// Runs `router` on `scores`; returns the selected experts, sorted by id, with their weights.
    fn chosen(router: &Router, scores: &[f32]) -> Vec<(u32, f32)> {
        let x = Array::from_slice(scores, &[1, 1, scores.len() as i32]).unwrap();
        let (ids, weights) = router.forward(&x).unwrap();
        let ids = ids.to_vec::<u32>().unwrap();
        let mut all: Vec<_> = ids.into_iter().zip(weights.to_f32_vec().unwrap()).collect();
        all.sort_by_key(|(id, _)| *id);
        all
    }

    #[test]
    fn only_the_best_groups_are_chosen_from() {
        let weighing = Weighing::Sigmoid {
            normalized: false,
            scale: 1.0,
            eps: 0.0,
        };
        // The best expert (4.0) is in a group whose two best experts have a lower sum than the next
        // group.
        let scores = [4.0, -9.0, 1.0, 0.9, -2.0, -2.0];
        let of = |best, selected| {
            let groups = Groups {
                count: 3,
                selected,
                best,
            };
            let all = chosen(&identity(6, weighing, Some(groups)), &scores);
            all.into_iter().map(|(id, _)| id).collect::<Vec<_>>()
        };
        assert_eq!(of(2, 1), [2, 3]);
        assert_eq!(of(1, 1), [0, 1]);
        assert_eq!(of(2, 2), [0, 2]);
        assert_eq!(of(2, 3), [0, 2]);
    }

    #[test]
    fn shares_of_the_chosen_are_scaled() {
        let weighing = Weighing::Softmax {
            normalized: true,
            scale: 2.5,
            eps: 0.0,
        };
        let all = chosen(&identity(3, weighing, None), &[2.0, 1.0, -1.0]);
        let first = 2.5 / (1.0 + (-1.0f32).exp());
        assert_eq!((all[0].0, all[1].0), (0, 1));
        assert!((all[0].1 - first).abs() < 1e-5 && (all[1].1 - (2.5 - first)).abs() < 1e-5);
    }

    #[test]
    fn experts_near_the_best_share_with_it() {
        let router = identity(4, Weighing::NearBest { noise: 0.1 }, None);
        // Expert 1 scores 1.7, which is within a fifth of the best score 2.0. Without expert 0,
        // expert 1 is the best, and no other score is near it.
        let all = chosen(&router, &[2.0, 1.7, 1.0, 0.1]);
        let share = 1.0 / (1.0 + (-0.3f32).exp());
        assert_eq!((all[0].0, all[1].0), (0, 1));
        assert!((all[0].1 - share).abs() < 1e-5, "{all:?}");
        assert!((all[1].1 - 1.0).abs() < 1e-5, "{all:?}");
    }
}
