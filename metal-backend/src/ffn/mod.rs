//! Feed-forward parts that a program computes its own way, layer by layer.
//!
//! A [`FfnBackend`] takes the place of the feed-forward part of the layers that an [`FfnRouter`]
//! gives it. Its arrays are those of [`mlx_rs_core`], so that it runs on the model's device, and a
//! graph stays a graph: rows of plain numbers would be copied from a GPU and back in every layer.
//! For that reason it is given to this engine, not to the contract, which knows no arrays.
//!
//! | backend | the layer |
//! |---|---|
//! | [`DenseFfn`] | is as it was trained |
//! | [`SparseFfn`] | computes the features with the greatest gates only |
//! | [`WalkFfn`] | the same, from the mapped files of a vindex |
//! | [`CachedFfn`] | gives what was recorded for inputs that were seen before |
//! | [`HighwayFfn`] | adds what its attention adds, and no more |
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

/// Loads a model whose layers compute their feed-forward parts as `router` says, and the others as
/// `options` say. It answers as any other model; [`TextModel::as_routed`] also runs it as it was
/// trained. Prompt caches on disk are for this model in this process alone.
///
/// # Errors
/// As [`inference::load_model`]; [`inference::ErrorKind::Unsupported`] for a layer that a backend
/// cannot compute; [`inference::ErrorKind::InvalidOption`] for one that is not there, or that both
/// name.
pub fn load_model(
    path: impl AsRef<Path>,
    options: &LoadOptions,
    router: &FfnRouter,
) -> Result<Box<dyn TextModel>> {
    let model = crate::backend::open_routed(path.as_ref(), options, router)?;
    Ok(Box::new(model))
}
