//! Checks of edits, without a model and against a model.

use super::{Edit, EditOperation, EditPositions, Hook, Numbers, Steering, invalid};
use crate::error::Result;

/// The hooks of one layer that can be edited.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerHooks {
    /// Whether attention, or the mixer in its place, has a separate output.
    pub attn_out: bool,
    /// Whether the residual stream exists between attention and feed-forward part.
    pub resid_mid: bool,
    /// Whether the feed-forward part has a separate output.
    pub mlp_out: bool,
    /// Number of heads and their width; `None` if heads cannot be edited.
    pub heads: Option<(usize, usize)>,
    /// Number of neurons in the feed-forward part; `None` if neurons cannot be edited.
    pub neurons: Option<usize>,
}

/// The hooks of a model that can be edited.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SteeringShape {
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The layers, in order.
    pub layers: Vec<LayerHooks>,
}

impl SteeringShape {
    /// A shape with this hidden size and these layers.
    #[must_use]
    pub fn new(hidden_size: usize, layers: Vec<LayerHooks>) -> Self {
        Self {
            hidden_size,
            layers,
        }
    }

    /// The width of the states at a hook of a layer.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`](crate::ErrorKind::InvalidOption) for an unknown layer or a hook
    /// that the layer lacks.
    pub fn width(&self, layer: usize, hook: Hook) -> Result<usize> {
        let Some(hooks) = self.layers.get(layer) else {
            return invalid(format!(
                "layer {layer} is not in the model, which has layers 0 to {}",
                self.layers.len().saturating_sub(1)
            ));
        };
        match hooks.units(hook, self.hidden_size) {
            Some((width, count)) => Ok(width * count),
            None => invalid(format!(
                "layer {layer} does not have {hook}; it has {}",
                hooks.names(self.hidden_size)
            )),
        }
    }
}

impl LayerHooks {
    /// The available hooks of the layer, for error messages.
    fn names(&self, hidden: usize) -> String {
        let there = Hook::ALL
            .into_iter()
            .filter(|hook| self.units(*hook, hidden).is_some());
        there.map(Hook::name).collect::<Vec<_>>().join(", ")
    }

    /// Width of a unit and number of units; `None` if the layer lacks `hook`.
    fn units(&self, hook: Hook, hidden: usize) -> Option<(usize, usize)> {
        match hook {
            Hook::ResidPre | Hook::ResidPost => Some((1, hidden)),
            Hook::AttnOut => self.attn_out.then_some((1, hidden)),
            Hook::ResidMid => self.resid_mid.then_some((1, hidden)),
            Hook::MlpOut => self.mlp_out.then_some((1, hidden)),
            Hook::Heads => self.heads.map(|(count, width)| (width, count)),
            Hook::Neurons => self.neurons.map(|count| (1, count)),
        }
    }
}

fn numbers(at: usize, field: &str, numbers: &Numbers) -> Result<()> {
    match numbers {
        Numbers::List(list) if list.is_empty() => {
            invalid(format!("edits[{at}].{field} is empty; name at least one"))
        }
        Numbers::Range(first, Some(last)) if last < first => invalid(format!(
            "edits[{at}].{field} is {first}-{last}, which ends before it begins"
        )),
        _ => Ok(()),
    }
}

fn finite(at: usize, field: &str, values: &[f32]) -> Result<()> {
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => invalid(format!(
            "edits[{at}].{field}[{i}] is {}; it must be finite",
            values[i]
        )),
    }
}

/// Checks everything that needs no model.
pub fn alone(edits: &[Edit]) -> Result<()> {
    if edits.is_empty() {
        return invalid(String::from("edits is empty; give at least one edit"));
    }
    if edits.len() > Steering::MOST_EDITS {
        return invalid(format!(
            "edits has {} entries; at most {} are allowed",
            edits.len(),
            Steering::MOST_EDITS
        ));
    }
    let mut total = 0usize;
    for (at, edit) in edits.iter().enumerate() {
        numbers(at, "layers", &edit.layers)?;
        if let EditPositions::At(positions) = &edit.positions {
            numbers(at, "positions", positions)?;
        }
        if edit.units.as_ref().is_some_and(Vec::is_empty) {
            return invalid(format!(
                "edits[{at}] lists no heads or neurons; name at least one, or leave the list out"
            ));
        }
        if edit.units.is_some() && !matches!(edit.hook, Hook::Heads | Hook::Neurons) {
            return invalid(format!(
                "edits[{at}] names heads or neurons of hook {}, which has none",
                edit.hook
            ));
        }
        match &edit.operation {
            EditOperation::Add {
                vector,
                coefficient,
            } => {
                finite(at, "vector", vector)?;
                if !coefficient.is_finite() {
                    return invalid(format!(
                        "edits[{at}].coefficient is {coefficient}; it must be finite"
                    ));
                }
                total = total.saturating_add(vector.len());
            }
            EditOperation::Replace(vector) => {
                finite(at, "vector", vector)?;
                total = total.saturating_add(vector.len());
            }
            EditOperation::Scale(factor) if !factor.is_finite() => {
                return invalid(format!("edits[{at}].factor is {factor}; it must be finite"));
            }
            EditOperation::Scale(_) => {}
            EditOperation::Patch { from, .. } => {
                let Some(from) = from else { continue };
                let edited = match &edit.positions {
                    EditPositions::At(Numbers::List(list)) => list.len(),
                    EditPositions::Last => 1,
                    _ => 0,
                };
                if edited != from.len() {
                    return invalid(format!(
                        "edits[{at}].from has {} positions; it must have one for each of the \
                         edited positions, which must be a list or `last`",
                        from.len()
                    ));
                }
            }
        }
    }
    if total > Steering::MOST_NUMBERS {
        return invalid(format!(
            "the vectors of the edits have {total} numbers; at most {} are allowed",
            Steering::MOST_NUMBERS
        ));
    }
    Ok(())
}

impl Steering {
    /// Checks the edits against a model.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`](crate::ErrorKind::InvalidOption) naming the edit, the layer,
    /// the field and the allowed values.
    pub fn check(&self, shape: &SteeringShape) -> Result<()> {
        let count = shape.layers.len();
        for (at, edit) in self.edits().iter().enumerate() {
            let outside = match &edit.layers {
                Numbers::All => None,
                Numbers::List(list) => list.iter().copied().find(|&n| n >= count),
                Numbers::Range(first, last) => last.filter(|&n| n >= count).or(Some(*first)),
            };
            if let Some(layer) = outside.filter(|&n| n >= count) {
                return invalid(format!(
                    "edits[{at}].layers names layer {layer}; the model has layers 0 to {}",
                    count.saturating_sub(1)
                ));
            }
            for (layer, hooks) in shape.layers.iter().enumerate() {
                if edit.layers.has(layer) {
                    check_layer(at, edit, layer, hooks, shape.hidden_size)?;
                }
            }
        }
        Ok(())
    }
}

fn check_layer(
    at: usize,
    edit: &Edit,
    layer: usize,
    hooks: &LayerHooks,
    hidden: usize,
) -> Result<()> {
    let Some((width, count)) = hooks.units(edit.hook, hidden) else {
        return invalid(format!(
            "edits[{at}].hook is {}, which layer {layer} does not have; it has {}",
            edit.hook,
            hooks.names(hidden)
        ));
    };
    let units = edit.units.as_deref();
    if let Some(unit) = units.and_then(|units| units.iter().find(|&&n| n >= count)) {
        let field = match edit.hook {
            Hook::Heads => "heads",
            _ => "neurons",
        };
        return invalid(format!(
            "edits[{at}].{field} names {unit}; layer {layer} has {field} 0 to {}",
            count - 1
        ));
    }
    if let Some(units) = units {
        let mut sorted = units.to_vec();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return invalid(format!(
                "edits[{at}] names head or neuron {} twice",
                twice[0]
            ));
        }
    }
    let wanted = width * units.map_or(count, <[usize]>::len);
    let vector = match &edit.operation {
        EditOperation::Add { vector, .. } | EditOperation::Replace(vector) => vector,
        EditOperation::Scale(_) | EditOperation::Patch { .. } => return Ok(()),
    };
    if vector.len() != wanted {
        return invalid(format!(
            "edits[{at}].vector has {} numbers; {} of layer {layer} needs {wanted}",
            vector.len(),
            edit.hook
        ));
    }
    Ok(())
}
