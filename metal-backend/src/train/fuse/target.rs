//! The tensors of a checkpoint that an adapter changes.

use std::collections::BTreeMap;
use std::path::Path;

use inference::Result;
use mlx_rs_core::Array;

use crate::adapter::same_layer;
use crate::checkpoint::safetensors::{SafetensorsCheckpoint, TensorNames};
use crate::checkpoint::{Family, ModelConfig};
use crate::convert::JoinedMatrix;

/// The names of a checkpoint's tensors.
pub(super) struct Names {
    /// The usual name of each tensor, by its name in the files.
    usual: BTreeMap<String, String>,
    /// The experts that share a tensor with others.
    joined: Vec<JoinedMatrix>,
    /// The model's family, which lists the matrices that are stored as `[in, out]`.
    family: Option<&'static Family>,
}

/// A matrix of a checkpoint, or a stack of the matrices of all experts.
pub(super) struct Target {
    /// The name of the tensor in the files.
    pub tensor: String,
    /// The usual name of the matrix, without `.weight`.
    pub stem: String,
    /// The index of the expert, if experts are stored one by one.
    pub expert: Option<i32>,
    /// The part of the tensor, if the tensor has other experts or matrices, too.
    part: Option<JoinedMatrix>,
    /// Whether the tensor is a matrix `[in, out]`.
    transposed: bool,
}

impl Names {
    /// Returns the names of the checkpoint in `dir`.
    ///
    /// # Errors
    /// If the configuration or the checkpoint is not valid.
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let config = ModelConfig::from_file(&dir.join("config.json"))?;
        let checkpoint = SafetensorsCheckpoint::open(dir)?;
        let model_type = config.model_type.as_deref().unwrap_or_default();
        let names = TensorNames::new(checkpoint.names(), model_type);
        let usual = names.all().filter_map(|usual| {
            let stored = names.stored(usual)?;
            Some((stored.to_owned(), usual.to_owned()))
        });
        let family = config.family();
        let joined = |family| JoinedMatrix::all_of((&checkpoint, &names), family, &config, dir);
        Ok(Self {
            usual: usual.collect(),
            joined: family.map(joined).transpose()?.unwrap_or_default(),
            family,
        })
    }

    /// Returns the tensors among `arrays` that store the weight `end` of a layer: one tensor, or
    /// one for each of `experts` experts. An adapter names a stack of experts as one layer, even if
    /// the checkpoint stores experts one by one.
    pub(super) fn targets(
        &self,
        arrays: &BTreeMap<String, Array>,
        (layer, end): (&str, &str),
        experts: Option<i32>,
    ) -> Vec<Target> {
        if let Some(target) = self.target(arrays, &[layer], end, None) {
            return vec![target];
        }
        let (Some(experts), Some((parent, part))) = (experts, layer.rsplit_once('.')) else {
            return Vec::new();
        };
        let parent = parent
            .trim_end_matches(".switch_mlp")
            .trim_end_matches(".switch_glu")
            .trim_end_matches(".experts");
        // Mixtral and DBRX have other names for these matrices.
        let parts: &[&str] = match part {
            "gate_proj" => &["gate_proj", "w1"],
            "up_proj" => &["up_proj", "w3", "v1"],
            "down_proj" => &["down_proj", "w2"],
            _ => &[part],
        };
        let single = |expert| {
            let layers = parts
                .iter()
                .map(|part| format!("{parent}.experts.{expert}.{part}"));
            let layers: Vec<String> = layers.collect();
            let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
            self.target(arrays, &layers, end, Some(expert))
        };
        (0..experts).filter_map(single).collect()
    }

    /// Returns the tensor among `arrays` that stores the weight `end` of a layer with one of these
    /// names.
    fn target(
        &self,
        arrays: &BTreeMap<String, Array>,
        layers: &[&str],
        end: &str,
        expert: Option<i32>,
    ) -> Option<Target> {
        // The layer's name in the checkpoint, if `usual` is the name of the weight.
        let stem_of = |usual: &str| -> Option<String> {
            let stem = usual.strip_suffix(end)?.strip_suffix('.')?;
            let is_layer = layers.iter().any(|layer| same_layer(stem, layer));
            is_layer.then(|| stem.to_owned())
        };
        for tensor in arrays.keys() {
            // `usual` lacks the tensors of other parts of a multimodal model, such as vision.
            if let Some(stem) = self.usual.get(tensor).and_then(|usual| stem_of(usual)) {
                return Some(Target {
                    transposed: (self.family).is_some_and(|f| f.is_transposed(tensor)),
                    tensor: tensor.clone(),
                    stem,
                    expert,
                    part: None,
                });
            }
        }
        self.joined.iter().find_map(|part| {
            let stem = stem_of(&part.name)?;
            let is_tensor = |name: &&String| self.usual.get(*name) == Some(&part.tensor);
            Some(Target {
                tensor: arrays.keys().find(is_tensor)?.clone(),
                stem,
                expert,
                part: Some(part.clone()),
                transposed: false,
            })
        })
    }
}

impl Target {
    /// Returns the matrix `[out, in]`, or the stack `[experts, out, in]`. `None` if the file lacks
    /// it.
    ///
    /// # Errors
    /// If the tensor's shape is not that of the checkpoint's header.
    pub(super) fn read(
        &self,
        arrays: &BTreeMap<String, Array>,
    ) -> mlx_rs_core::Result<Option<Array>> {
        let Some(stored) = arrays.get(&self.tensor) else {
            return Ok(None);
        };
        let matrix = match &self.part {
            Some(part) => part.read(stored)?,
            None if self.transposed => stored.swap_axes(0, 1)?,
            None => stored.clone(),
        };
        Ok(Some(matrix))
    }

    /// Stores `matrix` where [`Self::read`] reads it, in the tensor's type.
    ///
    /// # Errors
    /// If the shapes differ.
    pub(super) fn write(
        &self,
        arrays: &mut BTreeMap<String, Array>,
        matrix: &Array,
    ) -> mlx_rs_core::Result<()> {
        let Some(stored) = arrays.get(&self.tensor) else {
            return Ok(());
        };
        let matrix = matrix.astype(stored.dtype())?;
        let new = match &self.part {
            Some(part) => part.write(stored, &matrix)?,
            None if self.transposed => matrix.swap_axes(0, 1)?,
            None => matrix,
        };
        arrays.insert(self.tensor.clone(), new);
        Ok(())
    }
}
