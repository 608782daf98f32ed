//! Commands that train a model, evaluate it, or fuse an adapter.

#[cfg(feature = "mlx-backend")]
mod common;
#[cfg(feature = "mlx-backend")]
pub mod evaluate;
#[cfg(feature = "mlx-backend")]
pub mod fuse;
#[cfg(feature = "mlx-backend")]
pub mod tasks;
#[cfg(feature = "mlx-backend")]
pub mod train;
