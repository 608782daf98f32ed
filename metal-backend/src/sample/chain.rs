//! Samples one token per row from the logits of a batch. Rows with the same filters pass through
//! the stages together, each with its own parameters and random key.
//!
//! The order of stages is top-n-sigma, typical-p, top-p, min-p, XTC, top-k, temperature, draw. At
//! temperature 0, the greatest logit is selected. With [`SamplerOrder::TemperatureFirst`], the
//! order is temperature, top-n-sigma, top-k, top-p, min-p, typical-p, XTC, draw.
//!
//! If a row has a top-k, the stages after typical-p run only on its `k` greatest candidates. The
//! result is the same, because top-p and min-p keep a prefix of the descending order, and
//! probabilities are still divided by the sum over the whole vocabulary. The draw adds Gumbel
//! noise: the argmax of logits plus noise has the distribution of the softmax.
//!
//! On the CPU, one fused kernel computes all stages (`exec::sampling`). It draws by a cumulative
//! sum, which has the same distribution as Gumbel noise but returns other tokens for a given seed.

use inference::{SamplerOrder, SamplingOptions};
use mlx_rs_core::random::gumbel;
use mlx_rs_core::{Array, Dtype, Result, concatenate, where_};

use super::filters::{
    column, greatest, inverse, min_p, minus_infinity, shift, temperature, top_k, top_n_sigma,
    top_p, typical_p, xtc,
};
use super::random::Seed;
use crate::exec::sampling::{DrawParams, Pick};

/// For a greater top-k, the filters run on the whole vocabulary, because a separate sort is not
/// faster.
const MOST_CANDIDATES: usize = 1024;

/// How a row selects its token in a step.
#[derive(Debug, Clone)]
pub(super) enum Choice {
    /// Selects this token, whatever the logits.
    Forced(u32),
    /// Selects the greatest logit.
    Greedy,
    /// Draws a token at random.
    Draw(Draw),
}

/// The parameters of one row's draw.
#[derive(Debug, Clone)]
pub(super) struct Draw {
    pub options: SamplingOptions,
    /// The threshold of XTC; `None` if XTC does not apply in this step.
    pub xtc: Option<f32>,
    /// Tokens that XTC never removes.
    pub spared: std::sync::Arc<[u32]>,
    pub seed: Seed,
    pub step: u64,
}

impl Draw {
    fn temperature_first(&self) -> bool {
        self.options.sampler_order == SamplerOrder::TemperatureFirst
    }
}

impl Choice {
    /// Converts the choice for the CPU kernel.
    pub(super) fn pick(self) -> Pick {
        match self {
            Choice::Forced(id) => Pick::Forced(id),
            Choice::Greedy => Pick::Greedy,
            Choice::Draw(d) => Pick::Draw(DrawParams {
                temperature_first: d.temperature_first(),
                top_n_sigma: d.options.top_n_sigma,
                typical_p: d.options.typical_p,
                top_p: d.options.top_p,
                min_p: d.options.min_p,
                xtc: d.xtc.map(|threshold| (threshold, d.spared)),
                top_k: d.options.top_k,
                scale: inverse(d.options.temperature),
                uniform: d.seed.uniform(d.step),
            }),
        }
    }
}

/// The parameters that must be equal in rows that pass through the stages together.
#[derive(Debug, Clone, PartialEq)]
enum Shape {
    Forced,
    Greedy,
    Draw {
        top_k: usize,
        top_n_sigma: bool,
        typical_p: bool,
        top_p: bool,
        min_p: bool,
        /// The tokens that XTC never removes, if XTC applies.
        xtc: Option<std::sync::Arc<[u32]>>,
        temperature_first: bool,
    },
}

impl Choice {
    fn shape(&self) -> Shape {
        match self {
            Choice::Forced(_) => Shape::Forced,
            Choice::Greedy => Shape::Greedy,
            Choice::Draw(d) => Shape::Draw {
                top_k: d.options.top_k,
                top_n_sigma: d.options.top_n_sigma > 0.0,
                typical_p: d.options.typical_p < 1.0,
                top_p: d.options.top_p < 1.0,
                min_p: d.options.min_p > 0.0,
                xtc: d.xtc.map(|_| d.spared.clone()),
                temperature_first: d.temperature_first(),
            },
        }
    }
}

/// Samples a token for each row of float32 `logits` `[B, V]`: `uint32 [B]`.
pub(super) fn choose(logits: &Array, choices: &[Choice]) -> Result<Array> {
    let mut groups: Vec<(Shape, Vec<u32>)> = Vec::new();
    for (row, choice) in choices.iter().enumerate() {
        let shape = choice.shape();
        match groups.iter_mut().find(|(s, _)| *s == shape) {
            Some((_, rows)) => rows.push(row as u32),
            None => groups.push((shape, vec![row as u32])),
        }
    }
    if let [(shape, _)] = groups.as_slice() {
        let all: Vec<&Choice> = choices.iter().collect();
        return choose_alike(logits, shape, &all);
    }
    let mut tokens = Vec::with_capacity(groups.len());
    let mut place = vec![0u32; choices.len()];
    let mut next = 0;
    for (shape, rows) in &groups {
        let alike: Vec<&Choice> = rows.iter().map(|&r| &choices[r as usize]).collect();
        let part = logits.take_ids(rows, 0)?;
        tokens.push(choose_alike(&part, shape, &alike)?);
        for &row in rows {
            place[row as usize] = next;
            next += 1;
        }
    }
    concatenate(&tokens.iter().collect::<Vec<_>>(), 0)?.take_ids(&place, 0)
}

fn choose_alike(logits: &Array, shape: &Shape, choices: &[&Choice]) -> Result<Array> {
    match shape {
        Shape::Forced => {
            let ids: Vec<u32> = choices
                .iter()
                .map(|c| match c {
                    Choice::Forced(id) => *id,
                    _ => 0,
                })
                .collect();
            Array::vector(&ids)
        }
        Shape::Greedy => logits.argmax(-1, false),
        Shape::Draw {
            top_k,
            top_n_sigma,
            typical_p,
            top_p,
            min_p,
            xtc,
            temperature_first,
        } => {
            let draws: Vec<&Draw> = choices
                .iter()
                .filter_map(|c| match c {
                    Choice::Draw(d) => Some(d),
                    _ => None,
                })
                .collect();
            let stages = Stages {
                top_n_sigma: *top_n_sigma,
                typical_p: *typical_p,
                top_p: *top_p,
                min_p: *min_p,
                temperature_first: *temperature_first,
                draws: &draws,
            };
            let vocabulary = logits.dim(-1)?;
            let candidates = i32::try_from(*top_k)
                .ok()
                .filter(|&k| k > 0 && k < vocabulary && *top_k <= MOST_CANDIDATES);
            match (candidates, xtc) {
                (Some(k), None) => stages.among_candidates(logits, k),
                (_, spared) => stages.among_all(logits, *top_k, spared.as_deref()),
            }
        }
    }
}

/// The stages for rows with the same filters.
struct Stages<'a> {
    top_n_sigma: bool,
    typical_p: bool,
    top_p: bool,
    min_p: bool,
    temperature_first: bool,
    draws: &'a [&'a Draw],
}

impl Stages<'_> {
    fn all(&self, parameter: impl Fn(&Draw) -> f32) -> Vec<f32> {
        self.draws.iter().map(|d| parameter(d)).collect()
    }

    /// Returns the logits after the first filters, with the maximum of each row at 0. With
    /// `temperature_first`, they are already divided by the temperature.
    fn shifted(&self, logits: &Array) -> Result<Array> {
        let mut x = shift(logits)?;
        if self.temperature_first {
            x = temperature(&x, &self.all(|d| d.options.temperature))?;
        }
        if self.top_n_sigma {
            x = top_n_sigma(&x, &self.all(|d| d.options.top_n_sigma))?;
        }
        if !self.temperature_first {
            x = self.typical(x)?;
        }
        Ok(x)
    }

    fn typical(&self, x: Array) -> Result<Array> {
        match self.typical_p {
            true => typical_p(&x, &self.all(|d| d.options.typical_p)),
            false => Ok(x),
        }
    }

    fn among_all(&self, logits: &Array, k: usize, spared: Option<&[u32]>) -> Result<Array> {
        let mut x = self.shifted(logits)?;
        if self.temperature_first && k > 0 {
            x = top_k(&x, k)?;
        }
        if self.top_p {
            x = top_p(&x, &self.all(|d| d.options.top_p))?;
        }
        if self.min_p {
            x = min_p(&x, &self.all(|d| d.options.min_p))?;
        }
        if self.temperature_first {
            x = self.typical(x)?;
        }
        if let Some(spared) = spared {
            x = xtc(&x, &self.all(|d| d.xtc.unwrap_or(1.0)), spared)?;
        }
        if k > 0 && !self.temperature_first {
            x = top_k(&x, k)?;
        }
        self.draw(&x)
    }

    fn among_candidates(&self, logits: &Array, k: i32) -> Result<Array> {
        // `x` and `ids` are [g, k] each, ascending; the maximum of `x` is 0. `log_total` [g, 1] is
        // over the vocabulary, or over the candidates if the temperature comes first.
        let shifted = self.shifted(logits)?;
        let (mut x, ids) = greatest(&shifted, k)?;
        let log_total = match self.temperature_first {
            true => x.logsumexp(-1, true)?,
            false => shifted.logsumexp(-1, true)?,
        };
        if self.top_p {
            let probabilities = x.subtract(&log_total)?.exp()?;
            let before = probabilities.cumsum(-1, true, false)?; // sum of the more probable
            let keep = before.less(&column(&self.all(|d| d.options.top_p))?)?;
            x = where_(&keep, &x, &minus_infinity()?)?;
        }
        if self.min_p {
            x = min_p(&x, &self.all(|d| d.options.min_p))?;
        }
        if self.temperature_first {
            x = self.typical(x)?;
        }
        let place = self.draw(&x)?.expand_dims(-1)?;
        ids.take_along_axis(&place, -1)?.squeeze_axis(-1)
    }

    /// Draws an index for each row of `[g, n]`: `uint32 [g]`.
    fn draw(&self, logits: &Array) -> Result<Array> {
        let n = logits.dim(-1)?;
        let noise = self
            .draws
            .iter()
            .map(|d| gumbel(&[1, n], Dtype::Float32, &d.seed.key(d.step)?))
            .collect::<Result<Vec<_>>>()?;
        let noise = match noise.as_slice() {
            [one] => one.clone(),
            more => concatenate(&more.iter().collect::<Vec<_>>(), 0)?,
        };
        let logits = match self.temperature_first {
            true => logits.clone(),
            false => temperature(logits, &self.all(|d| d.options.temperature))?,
        };
        logits.add(&noise)?.argmax(-1, false)
    }
}
