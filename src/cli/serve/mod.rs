//! Commands for running models: the server, requests to a running server, and groups of processes.

#[cfg(feature = "serve")]
pub mod command;
#[cfg(feature = "serve")]
pub mod defaults;
#[cfg(all(unix, feature = "mlx-backend"))]
pub mod launch;
#[cfg(feature = "serve")]
pub mod models;
pub mod remote;
#[cfg(feature = "otel")]
mod traces;
