//! Differences between layers: which layers have a sliding window or a recurrent state. Also parses
//! how each family's files describe these layers.

use crate::error::Result;
use crate::family::{Defaults, Family, Recurrence, Windows};

use super::faults::{fault, unsupported};
use super::fields::{Fields, shown};
use super::limits;
use serde_json::Value;

/// Which positions a layer attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// All positions up to the query's own position.
    Full,
    /// Only the last positions, which are within the window.
    Sliding,
    /// No positions: the layer has a recurrent state of fixed size instead of keys and values.
    Recurrent,
    /// No positions: the layer has only a feed-forward part, and caches nothing.
    FeedForward,
}

/// The values of `layer_types` for layers with a recurrent state.
const RECURRENT: [&str; 3] = ["conv", "linear_attention", "mamba"];

/// The values of `layer_types` for layers that have only a feed-forward part.
const FEED_FORWARD: [&str; 2] = ["mlp", "moe"];

/// The window of the model and the kind of each layer.
pub(super) fn parse(
    fields: &Fields<'_>,
    family: &Family,
    layers: usize,
) -> Result<(Option<usize>, Vec<LayerKind>)> {
    if family.recurrence == Recurrence::Every {
        return Ok((None, vec![LayerKind::Recurrent; layers]));
    }
    let Defaults { windows, .. } = family.defaults;
    let listed = listed(fields, layers, family.recurrence)?;
    let used = fields.bool("use_sliding_window").map_err(fault)?;
    // Some files write 0 for a disabled window.
    let least = usize::from(used != Some(false));
    let window = fields
        .uint("sliding_window", least..=limits::POSITIONS)
        .map_err(fault)?;
    let window = match (windows, used) {
        // These checkpoints contain a window even if it is disabled. It applies only if the flag is
        // set.
        (_, Some(false)) | (Windows::FromLayer, None) => None,
        (Windows::Never, _) if listed.is_none() => None,
        _ => window,
    };
    // Layer kinds matter even without a window, because a layer's rotation depends on its kind.
    let kinds = match (listed, windows) {
        (Some(kinds), _) => kinds,
        (None, Windows::All) => vec![LayerKind::Sliding; layers],
        (None, Windows::Never) => vec![LayerKind::Full; layers],
        (None, Windows::FromLayer) => {
            let full = fields
                .uint("max_window_layers", 0..=usize::MAX)
                .map_err(fault)?
                .unwrap_or(layers);
            (0..layers).map(|i| kind(i >= full)).collect()
        }
        (
            None,
            Windows::AllBut {
                every,
                last_is_full,
            },
        ) => {
            let every = ["sliding_window_pattern", "_sliding_window_pattern"]
                .iter()
                .find_map(|name| fields.uint(name, 1..=limits::LAYERS).transpose())
                .transpose()
                .map_err(fault)?
                .unwrap_or(every);
            (0..layers)
                .map(|i| {
                    kind(!((i + 1).is_multiple_of(every) || (last_is_full && i + 1 == layers)))
                })
                .collect()
        }
    };
    Ok((window, kinds))
}

fn kind(sliding: bool) -> LayerKind {
    if sliding {
        LayerKind::Sliding
    } else {
        LayerKind::Full
    }
}

/// The layer kinds in the file's list, one per layer.
fn listed(
    fields: &Fields<'_>,
    layers: usize,
    recurrence: Recurrence,
) -> Result<Option<Vec<LayerKind>>> {
    let names = fields.strings("layer_types").map_err(fault)?;
    if names.is_empty() {
        return lettered(fields, layers);
    }
    if names.len() < layers {
        return Err(fault(format!(
            "layer_types lists {} layers; num_hidden_layers is {layers}",
            names.len()
        )));
    }
    names
        .iter()
        .take(layers)
        .map(|name| match name.as_str() {
            "full_attention" | "indexed_attention" => Ok(LayerKind::Full),
            "sliding_attention" => Ok(LayerKind::Sliding),
            "attention" if recurrence == Recurrence::Listed => Ok(LayerKind::Full),
            name if recurrence == Recurrence::Listed && RECURRENT.contains(&name) => {
                Ok(LayerKind::Recurrent)
            }
            name if recurrence == Recurrence::Listed && FEED_FORWARD.contains(&name) => {
                Ok(LayerKind::FeedForward)
            }
            other => {
                let shown: String = other.chars().take(60).collect();
                let recurrent = match recurrence {
                    Recurrence::Listed => {
                        [&RECURRENT[..], &FEED_FORWARD].concat().join(", ") + ", "
                    }
                    _ => String::new(),
                };
                Err(unsupported(format!(
                    "layer_types has {shown:?}; supported are {recurrent}full_attention and \
                     sliding_attention"
                )))
            }
        })
        .collect::<Result<Vec<_>>>()
        .map(Some)
}

/// The layer kinds of a repeated pattern of letters. `L` (local) is a sliding layer, and `G`
/// (global) is a full layer. EXAONE 4 uses such patterns; in other families this field is a number.
fn lettered(fields: &Fields<'_>, layers: usize) -> Result<Option<Vec<LayerKind>>> {
    const FIELD: &str = "sliding_window_pattern";
    let Some(Value::String(letters)) = fields.get(FIELD) else {
        return Ok(None);
    };
    let kinds: Option<Vec<_>> = letters
        .chars()
        .map(|letter| match letter {
            'L' => Some(LayerKind::Sliding),
            'G' => Some(LayerKind::Full),
            _ => None,
        })
        .collect();
    match kinds.filter(|kinds| !kinds.is_empty()) {
        Some(kinds) => Ok(Some(kinds.into_iter().cycle().take(layers).collect())),
        None => Err(fault(format!(
            "{FIELD} is {}; it must be a number, or letters L (sliding) and G (full)",
            shown(&Value::String(letters.clone()))
        ))),
    }
}
