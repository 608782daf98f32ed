//! Python's mlx-lm in a subprocess, as the backend `mlx_lm` of the `inference` contract.
//!
//! The backend runs models that the native engine does not support yet, and serves to check the
//! native engine's results. It needs a Python 3 that can import `mlx_lm`. The variable
//! `MLXLM_PYTHON` names the interpreter; the default is `python3`. No part of MLX is linked.
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
//!   caller gets a separate stream. Dropping a stream, setting its [`inference::CancelToken`], or a
//!   deadline ends the request within a step.
//! - The process ends with the model, with [`inference::TextModel::close`], and with this program,
//!   however the program ends. If the process dies, the running request ends with an error that
//!   contains the last output of the process. The next request starts a new process.
//! - [`inference::TextModel::classify`] and [`inference::TextModel::batch_generate`] return errors
//!   that name the native backends. Metrics are measured: times in this process, and memory by MLX
//!   in the subprocess (0 for a request that ended early).
//!
//! [`MlxLmBackend::new`] creates a backend with [`Settings`] other than those of the registered
//! one.

#![forbid(unsafe_code)]

mod backend;
mod libraries;
mod model;
mod options;
mod pipes;
mod process;
mod protocol;
mod replies;
mod reply;
mod request;
mod script;
mod session;
mod settings;
mod worker;

pub use backend::MlxLmBackend;
pub use settings::{PYTHON_VARIABLE, Settings};
