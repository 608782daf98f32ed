//! Maps tensor names in safetensors files to the usual names, which architectures request. In
//! multimodal checkpoints, the text part has a name prefix, and there are other parts.

use std::collections::BTreeMap;

use crate::family::Family;

/// Prefixes of the text part in files (longest first), each with the usual prefix.
const PREFIXES: [(&str, &str); 4] = [
    ("model.language_model.model.", "model."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
];

/// The parts of a multimodal checkpoint other than the text part.
const OTHER_PARTS: [&str; 8] = [
    "vision_tower",
    "vision_model",
    "visual",
    "multi_modal_projector",
    "audio_tower",
    "embed_audio",
    "embed_vision",
    "vision_embedder",
];

/// The tensors of the text part of a model, by their usual names.
pub struct TensorNames(BTreeMap<String, String>);

impl TensorNames {
    /// The names of a checkpoint with the tensors `stored`.
    pub fn new<'a>(stored: impl Iterator<Item = &'a str>, model_type: &str) -> Self {
        let family = Family::of(model_type);
        let multimodal = family.is_some_and(|family| family.is_multimodal(model_type));
        let is_spare = |name: &str| family.is_some_and(|family| family.is_spare(name));
        let stored: Vec<&str> = stored.collect();
        // Embedding models are saved as a network without an output head.
        let bare = stored.contains(&"embed_tokens.weight");
        let usual = |name: &str| match bare {
            true => format!("model.{name}"),
            false => usual(name),
        };
        let family_names = family.map_or(&[][..], |family| family.names);
        let usual = |name: &str| {
            let renamed = |name: String, (from, to): &(&str, &str)| name.replacen(from, to, 1);
            family_names.iter().fold(usual(name), renamed)
        };
        Self(
            stored
                .into_iter()
                .filter(|name| !(is_spare(name) || multimodal && is_other_part(name)))
                .map(|name| (usual(name), name.to_owned()))
                .collect(),
        )
    }

    /// The usual names, sorted.
    pub fn all(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The name in the files; `None` when the files lack the tensor.
    pub fn stored(&self, usual: &str) -> Option<&str> {
        self.0.get(usual).map(String::as_str)
    }
}

fn usual(name: &str) -> String {
    // Old BERT checkpoints use TensorFlow's names for the weights of a norm.
    for (old, new) in [(".LayerNorm.gamma", "weight"), (".LayerNorm.beta", "bias")] {
        if let Some(stem) = name.strip_suffix(old) {
            return format!("{stem}.LayerNorm.{new}");
        }
    }
    PREFIXES
        .iter()
        .find_map(|(from, to)| Some(format!("{to}{}", name.strip_prefix(from)?)))
        .unwrap_or_else(|| name.to_owned())
}

fn is_other_part(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    OTHER_PARTS.iter().any(|part| {
        name.strip_prefix(part)
            .is_some_and(|rest| rest.starts_with('.'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_part_is_found_wherever_it_stands() {
        let stored = [
            "language_model.model.norm.weight",
            "model.language_model.layers.0.mlp.up_proj.weight",
            "language_model.lm_head.weight",
            "model.embed_tokens.weight",
            "vision_tower.x.weight",
            "model.multi_modal_projector.y",
        ];
        let names = TensorNames::new(stored.into_iter(), "gemma3");
        let all: Vec<_> = names.all().collect();
        assert_eq!(
            all,
            [
                "lm_head.weight",
                "model.embed_tokens.weight",
                "model.layers.0.mlp.up_proj.weight",
                "model.norm.weight"
            ]
        );
        assert_eq!(names.stored("model.norm.weight"), Some(stored[0]));
        // A network without an output head.
        let bare = ["embed_tokens.weight", "layers.0.mlp.up_proj.weight"];
        let names = TensorNames::new(bare.into_iter(), "qwen3");
        assert_eq!(names.stored("model.embed_tokens.weight"), Some(bare[0]));
        assert_eq!(
            names.stored("model.layers.0.mlp.up_proj.weight"),
            Some(bare[1])
        );
        let old = [
            "bert.embeddings.LayerNorm.gamma",
            "bert.embeddings.LayerNorm.beta",
        ];
        let names = TensorNames::new(old.into_iter(), "bert");
        assert_eq!(
            names.stored("bert.embeddings.LayerNorm.weight"),
            Some(old[0])
        );
        assert_eq!(names.stored("bert.embeddings.LayerNorm.bias"), Some(old[1]));
        // Only multimodal families have other parts.
        let names = TensorNames::new(stored.into_iter(), "llama");
        assert!(names.stored("vision_tower.x.weight").is_some());
        let stored = ["mtp.fc.weight", "model.visual.x", "model.norm.weight"];
        let names = TensorNames::new(stored.into_iter(), "qwen3_5");
        assert!(names.all().eq(["model.norm.weight"]));
        let names = TensorNames::new(stored.into_iter(), "qwen3_next");
        assert!(names.all().eq(["model.norm.weight", "model.visual.x"]));
    }
}
