//! A feed-forward backend that reads the rows of features from a vindex.

use std::path::Path;
use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::Array;

use crate::loader::Features;
use crate::nn::feed_forward::{FfnBackend, FfnPart};
use crate::nn::walk::{WalkRows, has_gate};

/// Computes only the `top_k` features with the greatest gates per position. The gate matrix is the
/// model's. The rows of the other matrices come from mapped files, written by `mlx vindex build`,
/// and only the rows of selected features are read.
#[derive(Debug)]
pub struct WalkFfn {
    features: Features,
    top_k: usize,
}

impl WalkFfn {
    /// Opens the features at `dir` for the model at `model`. `top_k` is at least 1. If `top_k` is
    /// at least the number of features, the result equals the dense block up to rounding.
    ///
    /// Loading a model checks each layer's bytes against their hashes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] for missing or damaged files; [`ErrorKind::InvalidOption`] if
    /// the files belong to another model, or if `top_k` is zero.
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

    /// Prepares the layer's rows in every call. Normally this is not called, because
    /// [`FfnBackend::bind`] returns a backend that prepared them once.
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
    /// Returns the vindex rows of `part`'s layer.
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
