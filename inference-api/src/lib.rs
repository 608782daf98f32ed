//! The contract between programs and language-model backends.
//!
//! A program chooses a backend **by name** (or lets the registry choose) and talks to the model
//! through [`TextModel`]; a backend crate registers itself by being linked. This crate knows no
//! backend and needs none to compile.
//!
//! # Using a model
//!
//! ```no_run
//! use inference::{GenerateOptions, LoadOptions};
//!
//! fn main() -> inference::Result<()> {
//!     // Link a backend crate somewhere in the program: `use metal_backend as _;`
//!     let model = inference::load_model("path/to/model", &LoadOptions::new())?;
//!     let options = GenerateOptions::new().with_max_tokens(64);
//!     for token in model.generate(&"The capital of France is".into(), &options)? {
//!         print!("{}", token?.text);
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # Writing a backend
//!
//! Implement [`Backend`] and [`TextModel`] and register it:
//!
//! ```
//! # use std::path::Path;
//! # use inference::{Backend, Capabilities, LoadOptions, Result, TextModel};
//! struct Mine;
//!
//! impl Backend for Mine {
//!     fn name(&self) -> &str {
//!         "mine"
//!     }
//!     fn available(&self) -> bool {
//!         true
//!     }
//!     fn device(&self) -> String {
//!         String::from("thin air")
//!     }
//!     fn capabilities(&self) -> Capabilities {
//!         Capabilities::new().with_streaming()
//!     }
//!     fn load_model(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
//!         # let _ = (path, options);
//!         # Err(inference::Error::new(inference::ErrorKind::Unsupported, "only an example"))
//!     }
//! }
//!
//! inference::register_backend!("mine", || Box::new(Mine));
//!
//! # fn main() {
//! assert_eq!(inference::backend("mine").unwrap().name(), "mine");
//! # }
//! ```
//!
//! A crate that nothing refers to may be left out by the linker; `use my_backend as _;` in the
//! program keeps it.

#![forbid(unsafe_code)]

mod backend;
mod cancel;
mod discover;
mod error;
mod info;
mod inspect;
mod message;
mod metrics;
mod options;
mod registry;
mod token;
mod token_model;
mod train;

pub use backend::{Backend, Capabilities, TextModel};
pub use cancel::CancelToken;
pub use discover::{Discover, DiscoveredModel, ModelFormat, Quantization, discover};
pub use error::{Error, ErrorKind, Result};
pub use info::ModelInfo;
pub use inspect::{AttentionInspector, AttentionSnapshot};
pub use message::{Message, Prompt};
pub use metrics::GenerateMetrics;
pub use options::{ComputeType, GenerateOptions, LoadOptions};
pub use registry::{
    BackendRegistration, PREFERENCE, availability, backend, backends, default_backend, duplicates,
    load_model, register,
};
pub use token::{
    BatchResult, ClassifyResult, FinishReason, Output, Token, TokenSource, TokenStream,
};
pub use token_model::{LogitsOutput, TokenModel};
pub use train::{Adapter, LoraConfig, TrainableModel};

/// For [`register_backend!`]: a plugin needs no dependency of its own on it.
pub use inventory;
