//! Attention and a Mamba-2 layer in parallel (Falcon-H1, Zuo et al. 2025, arXiv:2507.22448). Both
//! layers read the same input, and the block sums their outputs.

use mlx_rs_core::{Array, Result};

use super::attention::{Attention, Positions};
use super::hooks::Watch;
use super::mamba2::Mamba2;
use super::mixer::Mixer;
use super::norm::{Norm, through};
use crate::cache::{CacheOptions, LayerState, PairState, RecurrentState, Row, Switch, lengths};

/// Factors on the input and the output of a mixer. `None` means 1.
#[derive(Debug, Default)]
pub struct Factors {
    /// The factor on the input.
    pub input: Option<Array>,
    /// The factor on the output.
    pub output: Option<Array>,
}

/// Both mixers of a block.
#[derive(Debug)]
pub struct ParallelMixers {
    /// The attention.
    pub attention: Attention,
    /// The attention's factors.
    pub attention_factors: Factors,
    /// The recurrent layer.
    pub recurrent: Mamba2,
    /// The recurrent layer's factors.
    pub recurrent_factors: Factors,
}

fn times(x: &Array, factor: Option<&Array>) -> Result<Array> {
    factor.map_or_else(|| Ok(x.clone()), |factor| x.multiply(factor))
}

impl Mixer for ParallelMixers {
    fn forward(
        &self,
        (x, norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        watch: &mut Watch<'_>,
    ) -> Result<Array> {
        let lengths = lengths(rows);
        let input = through(norm, x)?;
        let factors = &self.attention_factors;
        let scaled = times(&input, factors.input.as_ref())?;
        let attended = Attention::forward(
            &self.attention,
            (&scaled, None, false),
            rows,
            layer,
            positions,
            watch,
        )?;
        let attended = times(&attended, factors.output.as_ref())?;
        let factors = &self.recurrent_factors;
        let scaled = times(&input, factors.input.as_ref())?;
        let recurred =
            (self.recurrent).forward((&scaled, None, false), rows, layer, positions, watch)?;
        let y = attended.add(&times(&recurred, factors.output.as_ref())?)?;
        match add {
            true => positions.of(x, &lengths)?.add(&y),
            false => Ok(y),
        }
    }

    fn new_state(&self, options: &CacheOptions) -> Box<dyn LayerState> {
        let state = RecurrentState::new(&self.recurrent.layout);
        Box::new(PairState::new(options.cache(self.attention.window), state))
    }

    fn switch(&self) -> Option<Switch> {
        Attention::switch(&self.attention)
    }
}
