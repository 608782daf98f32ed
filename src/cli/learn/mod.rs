//! Commands that change a model or grade it on tasks: training, evaluation, fused adapters.

#[cfg(feature = "mlx-backend")]
pub mod evaluate;
#[cfg(feature = "mlx-backend")]
pub mod fuse;
#[cfg(feature = "mlx-backend")]
pub mod tasks;
#[cfg(feature = "mlx-backend")]
pub mod train;
