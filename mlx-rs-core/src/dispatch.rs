//! Runs a matrix multiplication on the device that is faster for its size. The CPU finishes small
//! multiplications before a GPU has started; large ones are worth the start. The threshold is
//! measured ([`HybridBackend::calibrate`]).
//!
//! Models do not use this module, because they run a whole graph on one device ([`Stream`]). It is
//! for programs that multiply single matrices and read each result.
//!
//! ```
//! use mlx_rs_core::Array;
//! use mlx_rs_core::dispatch::{MatMulOp, default_backend};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let backend = default_backend()?;
//! let a = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! assert_eq!(backend.matmul(&a, &a)?.to_vec::<f32>()?, [7.0, 10.0, 15.0, 22.0]);
//! assert_eq!(backend.matmul_transb(&a, &a)?.to_vec::<f32>()?, [5.0, 11.0, 11.0, 25.0]);
//! let both = backend.matmul_batch(&[MatMulOp::new(&a, &a), MatMulOp::transposed(&a, &a)])?;
//! assert_eq!(both[1].to_vec::<f32>()?, [5.0, 11.0, 11.0, 25.0]);
//! # Ok(()) }
//! ```

mod calibration;

use std::sync::{Arc, OnceLock};

pub use calibration::{Calibration, CalibrationPoint, SHAPES, calibrate_by};

use crate::{Array, Device, Error, ErrorKind, Result, Stream, eval};

/// The environment variable that sets the minimum number of FLOPs for the GPU.
pub const THRESHOLD_VARIABLE: &str = "MLX_FLOP_THRESHOLD";

/// The minimum number of FLOPs for the GPU before calibration.
pub const DEFAULT_THRESHOLD: u64 = 500_000_000;

/// The minimum threshold that a calibration sets.
pub const LEAST_THRESHOLD: u64 = 100_000;

/// Multiplies matrices on a device. Results are evaluated.
pub trait MatMulBackend: Send + Sync {
    /// A short name, such as `cpu`.
    fn name(&self) -> &str;

    /// Multiplies `a` `[.., m, k]` with `b` `[.., k, n]`: `[.., m, n]`. Leading axes are broadcast.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the shapes do not match; MLX's message when memory runs out.
    fn matmul(&self, a: &Array, b: &Array) -> Result<Array>;

    /// Multiplies `a` `[.., m, k]` with the transpose of `b` `[.., n, k]`: `[.., m, n]`. Rows of
    /// `b` are outputs, as in a linear layer's weights.
    ///
    /// # Errors
    /// As [`Self::matmul`].
    fn matmul_transb(&self, a: &Array, b: &Array) -> Result<Array>;

    /// Computes several products and evaluates them together.
    ///
    /// # Errors
    /// As [`Self::matmul`], for each product.
    fn matmul_batch(&self, ops: &[MatMulOp]) -> Result<Vec<Array>>;
}

/// One matrix multiplication of a batch.
#[derive(Debug, Clone)]
pub struct MatMulOp {
    /// The left matrix, `[.., m, k]`.
    pub a: Array,
    /// The right matrix, `[.., k, n]`, or `[.., n, k]` if transposed.
    pub b: Array,
    /// Whether `b` is transposed.
    pub transpose_b: bool,
}

impl MatMulOp {
    /// `a` times `b`.
    ///
    /// ```
    /// use mlx_rs_core::{Array, dispatch::MatMulOp};
    /// let a = Array::from_slice(&[1.0f32; 6], &[2, 3])?;
    /// let b = Array::from_slice(&[1.0f32; 12], &[3, 4])?;
    /// assert_eq!(MatMulOp::new(&a, &b).flops(), 2 * 2 * 3 * 4);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn new(a: &Array, b: &Array) -> Self {
        Self {
            a: a.clone(),
            b: b.clone(),
            transpose_b: false,
        }
    }

    /// `a` times the transpose of `b`.
    ///
    /// ```
    /// use mlx_rs_core::{Array, dispatch::MatMulOp};
    /// let a = Array::from_slice(&[1.0f32; 6], &[2, 3])?;
    /// let b = Array::from_slice(&[1.0f32; 12], &[4, 3])?;
    /// assert_eq!(MatMulOp::transposed(&a, &b).flops(), 2 * 2 * 3 * 4);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn transposed(a: &Array, b: &Array) -> Self {
        Self {
            transpose_b: true,
            ..Self::new(a, b)
        }
    }

    /// The number of FLOPs: `2 m n k` per pair of matrices; 0 if the shapes do not match.
    ///
    /// ```
    /// use mlx_rs_core::{Array, dispatch::MatMulOp};
    /// let row = Array::from_slice(&[1.0f32; 3], &[3])?;
    /// assert_eq!(MatMulOp::new(&row, &row).flops(), 0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn flops(&self) -> u64 {
        let (a, b) = (self.a.shape(), self.b.shape());
        let size = |n: i32| u64::from(n.unsigned_abs());
        let ([.., m, k], [.., b_rows, b_cols]) = (a, b) else {
            return 0;
        };
        let n = if self.transpose_b { b_rows } else { b_cols };
        let outer = |shape: &[i32]| {
            shape[..shape.len() - 2]
                .iter()
                .fold(1u64, |p, d| p.saturating_mul(size(*d)))
        };
        // Axes of length one are broadcast.
        let pairs = outer(a).max(outer(b));
        [2, size(*m), size(*n), size(*k)]
            .into_iter()
            .fold(pairs, u64::saturating_mul)
    }

    /// The product as a node of the graph, on the current stream.
    fn build(&self) -> Result<Array> {
        match self.transpose_b {
            true if self.b.ndim() < 2 => Err(Error::new(
                ErrorKind::Shape,
                "matmul_transb",
                "the second matrix has fewer than two axes",
            )),
            true => self.a.matmul(&self.b.swap_axes(-1, -2)?),
            false => self.a.matmul(&self.b),
        }
    }
}

/// Computes and evaluates products on one stream.
fn on_stream(stream: &Stream, ops: &[MatMulOp]) -> Result<Vec<Array>> {
    stream.scope(|| {
        let built: Vec<Array> = ops.iter().map(MatMulOp::build).collect::<Result<_>>()?;
        eval(&built)?;
        Ok(built)
    })
}

/// The only result of a batch with one product.
fn only(results: Vec<Array>) -> Result<Array> {
    let missing = || Error::new(ErrorKind::Value, "matmul", "there is no result");
    results.into_iter().next().ok_or_else(missing)
}

/// Defines a backend for one device.
macro_rules! device_backend {
    ($(#[$doc:meta])* $backend:ident, $name:literal) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $backend {
            stream: Stream,
        }

        impl MatMulBackend for $backend {
            fn name(&self) -> &str {
                $name
            }

            fn matmul(&self, a: &Array, b: &Array) -> Result<Array> {
                only(on_stream(&self.stream, &[MatMulOp::new(a, b)])?)
            }

            fn matmul_transb(&self, a: &Array, b: &Array) -> Result<Array> {
                only(on_stream(&self.stream, &[MatMulOp::transposed(a, b)])?)
            }

            fn matmul_batch(&self, ops: &[MatMulOp]) -> Result<Vec<Array>> {
                on_stream(&self.stream, ops)
            }
        }
    };
}

device_backend! {
    /// Products on the CPU.
    CpuBackend, "cpu"
}

device_backend! {
    /// Products on the GPU.
    GpuBackend, "gpu"
}

impl CpuBackend {
    /// The CPU's default stream.
    ///
    /// ```
    /// use mlx_rs_core::{Array, dispatch::{CpuBackend, MatMulBackend}};
    /// let a = Array::from_slice(&[2.0f32], &[1, 1])?;
    /// let product = CpuBackend::new()?.matmul(&a, &a)?;
    /// assert_eq!(product.to_vec::<f32>()?, [4.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// When MLX cannot make a stream.
    pub fn new() -> Result<Self> {
        let stream = Stream::default_of(Device::cpu())?;
        Ok(Self { stream })
    }
}

impl GpuBackend {
    /// The GPU's default stream.
    ///
    /// ```
    /// use mlx_rs_core::{Device, dispatch::GpuBackend};
    /// assert_eq!(GpuBackend::new().is_ok(), Device::gpu().is_available());
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where there is no GPU that MLX can use.
    pub fn new() -> Result<Self> {
        let gpu = Device::gpu();
        if !gpu.is_available() {
            let message = "there is no GPU that this build of MLX can use";
            return Err(Error::new(ErrorKind::Unsupported, "dispatch", message));
        }
        let stream = Stream::default_of(gpu)?;
        Ok(Self { stream })
    }
}

/// The device of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// The CPU.
    Cpu,
    /// The GPU.
    Gpu,
}

/// Two devices. Each product runs on the one that is faster for its size.
#[derive(Debug)]
pub struct HybridBackend<C = CpuBackend, G = GpuBackend> {
    cpu: C,
    gpu: G,
    /// The threshold that the environment variable sets.
    fixed: Option<u64>,
    measured: OnceLock<u64>,
}

impl<C: MatMulBackend, G: MatMulBackend> HybridBackend<C, G> {
    /// A backend that sends products of at least [`DEFAULT_THRESHOLD`] FLOPs to `gpu` until it is
    /// calibrated; the variable [`THRESHOLD_VARIABLE`] overrides the threshold.
    ///
    /// ```
    /// use mlx_rs_core::dispatch::{CpuBackend, HybridBackend, Route};
    /// // Both on the CPU, to see where products go.
    /// let hybrid = HybridBackend::new(CpuBackend::new()?, CpuBackend::new()?)?;
    /// assert_eq!(hybrid.route(18_432), Route::Cpu);
    /// assert_eq!(hybrid.route(u64::MAX), Route::Gpu);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Value`] when the variable is not an integer.
    pub fn new(cpu: C, gpu: G) -> Result<Self> {
        let fixed = match std::env::var_os(THRESHOLD_VARIABLE) {
            Some(text) => Some(threshold_of(&text.to_string_lossy())?),
            None => None,
        };
        Ok(Self {
            cpu,
            gpu,
            fixed,
            measured: OnceLock::new(),
        })
    }

    /// The minimum FLOPs of a product on the GPU.
    ///
    /// ```
    /// use mlx_rs_core::dispatch::{CpuBackend, HybridBackend, Route};
    /// let hybrid = HybridBackend::new(CpuBackend::new()?, CpuBackend::new()?)?;
    /// assert_eq!(hybrid.route(hybrid.flop_threshold()), Route::Gpu);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn flop_threshold(&self) -> u64 {
        let measured = || self.measured.get().copied();
        self.fixed.or_else(measured).unwrap_or(DEFAULT_THRESHOLD)
    }

    /// The device of a product with this number of FLOPs.
    ///
    /// ```
    /// use mlx_rs_core::dispatch::{CpuBackend, HybridBackend, Route};
    /// let hybrid = HybridBackend::new(CpuBackend::new()?, CpuBackend::new()?)?;
    /// assert_eq!(hybrid.route(0), Route::Cpu);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn route(&self, flops: u64) -> Route {
        match flops >= self.flop_threshold() {
            true => Route::Gpu,
            false => Route::Cpu,
        }
    }

    /// Measures products of [`SHAPES`] on both devices, and sets the threshold to the least size
    /// from which the GPU is faster. A second call measures again and changes nothing. If the
    /// environment sets the threshold, even the first call does not change it.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// ```
    /// use mlx_rs_core::dispatch::{CpuBackend, HybridBackend, Route};
    /// let hybrid = HybridBackend::new(CpuBackend::new()?, CpuBackend::new()?)?;
    /// let measured = hybrid.calibrate()?;
    /// assert_eq!(hybrid.route(u64::MAX), Route::Gpu);
    /// println!("{measured:?}");
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn calibrate(&self) -> Result<Calibration> {
        let mut products = calibration::Products::default();
        let measured = calibrate_by(&mut |route, shape| {
            let backend: &dyn MatMulBackend = match route {
                Route::Cpu => &self.cpu,
                Route::Gpu => &self.gpu,
            };
            products.time(backend, shape)
        })?;
        let _ = self.measured.set(measured.threshold);
        Ok(measured)
    }

    fn backend(&self, flops: u64) -> &dyn MatMulBackend {
        match self.route(flops) {
            Route::Cpu => &self.cpu,
            Route::Gpu => &self.gpu,
        }
    }
}

impl<C: MatMulBackend, G: MatMulBackend> MatMulBackend for HybridBackend<C, G> {
    fn name(&self) -> &str {
        "hybrid"
    }

    fn matmul(&self, a: &Array, b: &Array) -> Result<Array> {
        let flops = MatMulOp::new(a, b).flops();
        self.backend(flops).matmul(a, b)
    }

    fn matmul_transb(&self, a: &Array, b: &Array) -> Result<Array> {
        let flops = MatMulOp::transposed(a, b).flops();
        self.backend(flops).matmul_transb(a, b)
    }

    /// Each product runs on the device that it would use alone. The products of a device are
    /// evaluated together.
    fn matmul_batch(&self, ops: &[MatMulOp]) -> Result<Vec<Array>> {
        let routes: Vec<Route> = ops.iter().map(|op| self.route(op.flops())).collect();
        let of = |route: Route| -> Vec<MatMulOp> {
            let routed = ops
                .iter()
                .zip(&routes)
                .filter(|(_, routed)| **routed == route);
            routed.map(|(op, _)| op.clone()).collect()
        };
        let mut large = self.gpu.matmul_batch(&of(Route::Gpu))?.into_iter();
        let mut small = self.cpu.matmul_batch(&of(Route::Cpu))?.into_iter();
        let next = |route: &Route| match route {
            Route::Cpu => small.next(),
            Route::Gpu => large.next(),
        };
        let all: Option<Vec<Array>> = routes.iter().map(next).collect();
        all.ok_or_else(|| Error::new(ErrorKind::Value, "matmul_batch", "a result is missing"))
    }
}

/// Parses a threshold.
fn threshold_of(text: &str) -> Result<u64> {
    text.trim().parse().map_err(|_| {
        let shown: String = text.chars().take(40).collect();
        let message =
            format!("{THRESHOLD_VARIABLE} is {shown:?}; it must be a whole number of FLOPs");
        Error::new(ErrorKind::Value, "dispatch", message)
    })
}

/// The CPU, and the GPU if there is one.
///
/// # Errors
/// When MLX cannot make a stream, or the variable [`THRESHOLD_VARIABLE`] does not hold a number.
///
/// ```
/// use mlx_rs_core::{Array, dispatch::default_backend};
/// let a = Array::from_slice(&[1.0f32; 4], &[2, 2])?;
/// assert_eq!(default_backend()?.matmul(&a, &a)?.to_vec::<f32>()?, [2.0; 4]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub fn default_backend() -> Result<Arc<dyn MatMulBackend>> {
    let cpu = CpuBackend::new()?;
    Ok(match Device::gpu().is_available() {
        true => Arc::new(HybridBackend::new(cpu, GpuBackend::new()?)?),
        false => Arc::new(cpu),
    })
}

#[cfg(test)]
mod tests;
