//! Features from a vindex as a backend of the program.

use std::path::Path;
use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::Array;

use crate::loader::Features;
use crate::nn::feed_forward::{FfnBackend, FfnPart};
use crate::nn::walk::{WalkRows, has_gate};

/// Of each position the `top_k` features with the greatest gate, from a directory that `mlx vindex
/// build` has written. The gate is the layer's own. Of the other matrices only the rows of the
/// chosen features are read, from mapped files.
#[derive(Debug)]
pub struct WalkFfn {
    features: Features,
    top_k: usize,
}

impl WalkFfn {
    /// The features at `dir`, of the model at `model`. `top_k` is at least 1; as many as there are,
    /// or more, is the dense part up to rounding.
    ///
    /// A layer's bytes are compared with their hashes when a model is loaded.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] for files that are missing or damaged;
    /// [`ErrorKind::InvalidOption`] when they are of another model, and for no feature at all.
    pub fn open(dir: impl AsRef<Path>, model: impl AsRef<Path>, top_k: usize) -> Result<Self> {
        if top_k == 0 {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "a walk takes at least one feature; HighwayFfn takes none",
            ));
        }
        let features = Features::at(dir.as_ref(), model.as_ref())?;
        Ok(Self { features, top_k })
    }
}

impl FfnBackend for WalkFfn {
    fn name(&self) -> &str {
        "walk"
    }

    /// It is asked through what [`FfnBackend::bind`] returns, and computes a layer's rows anew here.
    fn forward(&self, part: &FfnPart<'_>, x: &Array) -> mlx_rs_core::Result<Array> {
        self.rows(part)?.forward(part, x)
    }

    fn forward_with_activation(
        &self,
        part: &FfnPart<'_>,
        x: &Array,
    ) -> mlx_rs_core::Result<(Array, Array)> {
        self.rows(part)?.forward_with_activation(part, x)
    }

    fn bind(&self, part: &FfnPart<'_>) -> mlx_rs_core::Result<Option<Arc<dyn FfnBackend>>> {
        Ok(Some(Arc::new(self.rows(part)?)))
    }
}

impl WalkFfn {
    /// The layer of `part`.
    fn rows(&self, part: &FfnPart<'_>) -> mlx_rs_core::Result<WalkRows> {
        let refused = |message: String| {
            mlx_rs_core::Error::new(mlx_rs_core::ErrorKind::Unsupported, "walk", message)
        };
        if let Some(why) = part.without_features() {
            return Err(refused(why.to_owned()));
        }
        let rows = self.features.layer(part.place(), !has_gate(part));
        let rows = rows.map_err(|e| refused(format!("{e:#}")))?;
        WalkRows::new(rows, self.top_k, part)
    }
}
