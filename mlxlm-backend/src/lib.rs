//! Python's mlx-lm as a subprocess, behind the `inference` contract: backend `mlx_lm`.
//!
//! For models that the native engine does not know yet, and as a second opinion on those it does.
//! It needs a Python 3 that can import `mlx_lm`; the variable `MLXLM_PYTHON` names it, else it is
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
//! - A loaded model is one Python process and one thread. Requests are done in turn; each of
//!   several callers gets its own stream. Dropping a stream, a raised [`inference::CancelToken`]
//!   and a deadline end the request within a step.
//! - The process ends with the model, with [`inference::TextModel::close`], and with this program
//!   however that ends. When it dies by itself, the running request ends with an error that holds
//!   its last output. The next request starts it again.
//! - [`inference::TextModel::classify`] and [`inference::TextModel::batch_generate`] are errors
//!   that point to the native backends. The metrics hold measured values: times here, memory by MLX
//!   in the subprocess (0 for a request that was cut short).
//!
//! [`MlxLmBackend::new`] makes one with other [`Settings`] than the registered one's.

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
mod stop;
mod worker;

pub use backend::MlxLmBackend;
pub use settings::{PYTHON_VARIABLE, Settings};
