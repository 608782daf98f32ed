//! Feed-forward backends that a program can select or write, one for each layer.
//!
//! A [`FfnBackend`] replaces the feed-forward block of the layers to which an [`FfnRouter`] assigns
//! it. Its inputs and outputs are arrays of [`mlx_rs_core`], so it runs on the model's device
//! within the graph; slices would need copies from and to the GPU in every layer. The trait is in
//! this crate because the crate `inference` has no array type.
//!
//! | backend | computes |
//! |---|---|
//! | [`DenseFfn`] | the trained feed-forward block |
//! | [`SparseFfn`] | only the features with the greatest gates |
//! | [`WalkFfn`] | only the features with the greatest gates, read from the mapped files of a vindex |
//! | [`CachedFfn`] | recorded outputs for equal inputs, and the trained part for other inputs |
//! | [`HighwayFfn`] | nothing: the layer adds only the output of its attention or recurrence |
//!
//! ```no_run
//! use std::sync::Arc;
//! use inference::LoadOptions;
//! use metal_backend::ffn::{self, FfnBackend, FfnPart, FfnRouter};
//! use mlx_rs_core::{Array, Result};
//!
//! /// The trained output, halved.
//! #[derive(Debug)]
//! struct Half;
//!
//! impl FfnBackend for Half {
//!     fn name(&self) -> &str {
//!         "half"
//!     }
//!
//!     fn forward(&self, part: &FfnPart<'_>, x: &Array) -> Result<Array> {
//!         part.forward(x)?.multiply(&Array::scalar(0.5f32)?.astype(x.dtype())?)
//!     }
//! }
//!
//! # fn main() -> inference::Result<()> {
//! let router = FfnRouter::new().with_layers(12, None, Arc::new(Half))?;
//! let model = ffn::load_model("model.gguf", &LoadOptions::new(), &router)?;
//! # let _ = model;
//! # Ok(()) }
//! ```

mod cached;
mod walk;

use std::path::Path;

use inference::{LoadOptions, Result, TextModel};

pub use crate::nn::feed_forward::{DenseFfn, FfnBackend, FfnPart, FfnPlace, HighwayFfn};
pub use crate::nn::router::FfnRouter;
pub use crate::nn::sparse::SparseFfn;
pub use cached::CachedFfn;
pub use walk::WalkFfn;

/// Loads a model in which `router` selects the feed-forward backends; `options` apply to layers
/// without one. The model implements the public traits like any other model, and
/// [`TextModel::as_routed`] also runs it densely. Its prompt cache files are valid only for this
/// model in this process.
///
/// # Errors
/// The errors of [`inference::load_model`]; [`inference::ErrorKind::Unsupported`] for a layer that
/// a backend cannot compute; [`inference::ErrorKind::InvalidOption`] for an unknown layer, or for a
/// layer in both `router` and `options`.
pub fn load_model(
    path: impl AsRef<Path>,
    options: &LoadOptions,
    router: &FfnRouter,
) -> Result<Box<dyn TextModel>> {
    let model = crate::backend::open_routed(path.as_ref(), options, router)?;
    Ok(Box::new(model))
}
