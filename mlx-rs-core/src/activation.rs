//! GELU, the activation `x * Phi(x)` of Hendrycks and Gimpel (2016), in its exact form and by a
//! tanh approximation. Each form is six or eight MLX operations. On GPUs they are fused into one
//! kernel.

use std::sync::LazyLock;

use crate::array::Array;
use crate::device::DeviceKind;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::stream::Stream;
use crate::transforms::{Compiled, compile_shapeless};

static EXACT: LazyLock<Compiled<Error>> = LazyLock::new(|| one_kernel(exact));
static TANH: LazyLock<Compiled<Error>> = LazyLock::new(|| one_kernel(by_tanh));

impl Array {
    /// `x * Phi(x)` with the exact normal distribution, element by element.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let y = array!([-0.5, 0.0, 3.0])?.gelu()?;
    /// assert!(y.all_close(&array!([-0.154_269, 0.0, 2.995_95])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the data type does not fit.
    pub fn gelu(&self) -> Result<Array> {
        on_its_device(self, &EXACT, exact)
    }

    /// GELU by its tanh approximation: `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let y = array!([-0.5, 0.0, 3.0])?.gelu_tanh()?;
    /// assert!(y.all_close(&array!([-0.154_286, 0.0, 2.996_363])?, 1e-5, 1e-6)?);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// MLX's message when the data type does not fit.
    pub fn gelu_tanh(&self) -> Result<Array> {
        on_its_device(self, &TANH, by_tanh)
    }
}

/// Returns `formula(x)`. GPUs compute it with one fused kernel, CPUs with separate operations. On a
/// CPU, MLX needs a C++ compiler to fuse operations, and a compiled graph without fusion is not
/// faster.
fn on_its_device(
    x: &Array,
    fused: &Compiled<Error>,
    formula: fn(&Array) -> Result<Array>,
) -> Result<Array> {
    let x = match x.dtype() {
        dtype if dtype.is_integer() || dtype == Dtype::Bool => &x.astype(Dtype::Float32)?,
        _ => x,
    };
    match Stream::current()?.device().kind() {
        DeviceKind::Cpu => formula(x),
        DeviceKind::Gpu => replayed(fused, x),
    }
}

fn replayed(fused: &Compiled<Error>, x: &Array) -> Result<Array> {
    let mut outputs = fused.call(std::slice::from_ref(x))?;
    let lost = || {
        Error::new(
            ErrorKind::Mlx,
            "gelu",
            "the compiled function has no output",
        )
    };
    outputs.pop().ok_or_else(lost)
}

fn one_kernel(formula: fn(&Array) -> Result<Array>) -> Compiled<Error> {
    // SAFETY: element-wise functions of one argument are valid for every shape. The constants in
    // the trace are scalars, which broadcast.
    unsafe { compile_shapeless(move |x: &[Array]| Ok(vec![formula(&x[0])?])) }
}

fn scalar(value: f32, like: &Array) -> Result<Array> {
    Array::scalar(value)?.astype(like.dtype())
}

fn exact(x: &Array) -> Result<Array> {
    let phi = x
        .multiply(&scalar(std::f32::consts::FRAC_1_SQRT_2, x)?)?
        .erf()?
        .add(&scalar(1.0, x)?)?;
    x.multiply(&phi)?.multiply(&scalar(0.5, x)?)
}

fn by_tanh(x: &Array) -> Result<Array> {
    let cubic = x
        .square()?
        .multiply(&scalar(0.044_715, x)?)?
        .add(&scalar(1.0, x)?)?;
    let inner = x
        .multiply(&cubic)?
        // The constant is sqrt(2 / pi).
        .multiply(&scalar(0.797_884_6, x)?)?
        .tanh()?
        .add(&scalar(1.0, x)?)?;
    x.multiply(&inner)?.multiply(&scalar(0.5, x)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the compiled graph of the GPU with the formula. On the CPU, the graph runs without
    /// fused kernels.
    #[test]
    fn the_compiled_graph_computes_the_formula_at_every_shape_and_type() {
        for (fused, formula) in [(&EXACT, exact as fn(&Array) -> _), (&TANH, by_tanh)] {
            for shape in [&[3i32][..], &[2, 5], &[1, 4, 6], &[0, 4], &[]] {
                for dtype in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16] {
                    let n: i32 = shape.iter().product();
                    let values: Vec<f32> = (0..n).map(|i| i as f32 * 0.5 - 3.0).collect();
                    let x = Array::from_slice(&values, shape).unwrap();
                    let x = x.astype(dtype).unwrap();
                    let (got, expected) = (replayed(fused, &x).unwrap(), formula(&x).unwrap());
                    assert_eq!((got.shape(), got.dtype()), (shape, dtype));
                    assert_eq!(got.to_f32_vec().unwrap(), expected.to_f32_vec().unwrap());
                }
            }
        }
        let integer = Array::vector(&[3i32]).unwrap().gelu().unwrap();
        assert_eq!(integer.dtype(), Dtype::Float32);
    }
}
