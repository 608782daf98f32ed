//! Python's mlx-lm as a subprocess, behind the `inference` contract: backend `mlx_lm`.
//!
//! It runs models that the native engine does not support yet, and checks results of that engine.
//! It needs a Python 3 that can import `mlx_lm`: the variable `MLXLM_PYTHON` names it, else it is
//! `python3`. Nothing of MLX is linked.
//!
//! ```no_run
//! use inference::{GenerateOptions, LoadOptions};
//! use mlxlm_backend as _; // keeps the linker from dropping the registration
//!
//! # fn main() -> inference::Result<()> {
//! let model = inference::load_model("path/to/model", &LoadOptions::new().with_backend("mlx_lm"))?;
//! let text = model.generate(&"Once upon a time".into(), &GenerateOptions::new())?.text()?;
//! # let _ = text;
//! # Ok(()) }
//! ```
//!
//! - A loaded model is one Python process and one thread. Requests run one after another, and each
//!   caller gets its own stream. Dropping a stream, a raised [`inference::CancelToken`] and a
//!   deadline end the request within a step.
//! - The process ends with the model, with [`inference::TextModel::close`], and with this program,
//!   however it ends. If the process dies, the running request ends with an error that contains its
//!   last output. The next request starts it again.
//! - [`inference::TextModel::classify`] and [`inference::TextModel::batch_generate`] return errors
//!   that name the native backends. The metrics are measured: times here, memory by MLX in the
//!   subprocess (0 for a request that was cut short).
//!
//! [`MlxLmBackend::new`] makes a backend with other [`Settings`] than those of the registered one.

#![forbid(unsafe_code)]

mod backend;
mod libraries;
mod model;
mod options;
mod pipes;
mod process;
mod protocol;
mod reply;
mod request;
mod script;
mod session;
mod settings;
mod worker;

pub use backend::MlxLmBackend;
pub use settings::{PYTHON_VARIABLE, Settings};
