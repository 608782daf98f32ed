//! Commands about models and backends: list, describe, fetch, convert, upload and remove.

#[cfg(feature = "mlx-backend")]
pub mod arch;
pub mod backends;
#[cfg(feature = "mlx-backend")]
pub mod convert;
pub mod create;
pub mod directory;
pub mod inspect;
#[cfg(feature = "mlx-backend")]
pub mod learned;
pub mod list;
pub mod pull;
pub mod push;
pub mod remove;
#[cfg(feature = "mlx-backend")]
pub mod show;
#[cfg(feature = "mlx-backend")]
pub mod standalone;
