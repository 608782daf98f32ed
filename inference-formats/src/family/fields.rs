//! Changes of a `config.json` that several families need.

use serde_json::{Map, Value};

use crate::limits;

/// Pairs of names: first the name to look for, then its other name.
pub type Names = &'static [(&'static str, &'static str)];

/// Sets each field that is missing or `null`.
pub(crate) fn fill(map: &mut Map<String, Value>, defaults: Value) {
    let Value::Object(defaults) = defaults else {
        return;
    };
    for (name, value) in defaults {
        if !is_set(map, &name) {
            map.insert(name, value);
        }
    }
}

/// Sets `layer_types`, the list of the layers' kinds, if the file does not contain it.
pub(crate) fn list_layers(map: &mut Map<String, Value>, kind: impl Fn(usize) -> &'static str) {
    let layers = map.get("num_hidden_layers").and_then(Value::as_u64);
    // A number out of range is rejected later.
    if let Some(layers) = layers.filter(|n| *n <= limits::LAYERS as u64)
        && !is_set(map, "layer_types")
    {
        let kinds: Vec<_> = (0..layers as usize).map(kind).collect();
        map.insert("layer_types".into(), kinds.into());
    }
}

/// Lists which layers have experts (`mlp_layer_types`) if the file does not.
pub(crate) fn list_mixtures(map: &mut Map<String, Value>, is_sparse: impl Fn(usize) -> bool) {
    let layers = map.get("num_hidden_layers").and_then(Value::as_u64);
    // A number out of range is rejected later.
    if let Some(layers) = layers.filter(|n| *n <= limits::LAYERS as u64)
        && !is_set(map, "mlp_layer_types")
    {
        let kind = |layer| match is_sparse(layer) {
            true => "sparse",
            false => "dense",
        };
        let kinds: Vec<_> = (0..layers as usize).map(kind).collect();
        map.insert("mlp_layer_types".into(), kinds.into());
    }
}

/// The fraction of a head that rotates, for files that give the number of elements (`rotary_dim`).
pub(crate) fn rotated_elements(map: &mut Map<String, Value>) {
    let number = |name: &str| map.get(name).and_then(Value::as_f64);
    let head_width = || Some(number("hidden_size")? / number("num_attention_heads")?);
    if let (Some(part), Some(dim)) = (number("rotary_dim"), number("head_dim").or_else(head_width))
        && dim > 0.0
        && !is_set(map, "partial_rotary_factor")
    {
        map.insert("partial_rotary_factor".into(), (part / dim).into());
    }
}

/// Copies fields from the names of one family to the usual names. Does not overwrite a field that
/// is set.
pub(crate) fn rename(map: &mut Map<String, Value>, names: Names) {
    for (from, to) in names {
        if !is_set(map, to)
            && let Some(value) = map.get(*from).filter(|v| !v.is_null()).cloned()
        {
            map.insert((*to).to_owned(), value);
        }
    }
}

/// Whether a field is present and not `null`.
pub(crate) fn is_set(map: &Map<String, Value>, name: &str) -> bool {
    map.get(name).is_some_and(|v| !v.is_null())
}
