//! The absent mixer of a block that has only a feed-forward part, as in Nemotron-H.

use std::sync::Arc;

use mlx_rs_core::{Array, Result};

use super::attention::Positions;
use super::hooks::Watch;
use super::mixer::Mixer;
use super::norm::Norm;
use crate::cache::{CacheOptions, LayerState, RecurrentState, Row, StateLayout, lengths};

/// A mixer in which no position reads another position. Its state is only the number of positions,
/// because this number must be equal in all layers of a sequence.
#[derive(Debug)]
pub struct NoMixer {
    layout: Arc<StateLayout>,
}

impl Default for NoMixer {
    fn default() -> Self {
        Self {
            layout: StateLayout::new("none", Vec::new()),
        }
    }
}

impl Mixer for NoMixer {
    fn forward(
        &self,
        (x, _norm, add): (&Array, Option<&Norm>, bool),
        rows: &mut [Row<'_>],
        layer: usize,
        positions: Positions,
        _watch: &mut Watch<'_>,
    ) -> Result<Array> {
        for row in rows.iter_mut() {
            let state = row.caches.get_mut(layer);
            if let Some(state) = state.and_then(|state| state.as_recurrent_mut()) {
                state.advance(Vec::new(), row.length)?;
            }
        }
        let x = positions.of(x, &lengths(rows))?;
        if add { Ok(x) } else { x.zeros_like() }
    }

    fn new_state(&self, _options: &CacheOptions) -> Box<dyn LayerState> {
        Box::new(RecurrentState::new(&self.layout))
    }
}
