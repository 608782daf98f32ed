//! The size of recurrent states.

use crate::cache::StateLayout;
use crate::checkpoint::ModelConfig;

/// Returns the number of bytes of states with this layout, over all recurrent layers.
pub(super) fn of_recurrent_layers(config: &ModelConfig, layout: &StateLayout) -> u64 {
    let layers = 0..config.num_hidden_layers;
    let count = layers.filter(|&layer| config.is_recurrent(layer)).count();
    (layout.nbytes() as u64).saturating_mul(count as u64)
}
