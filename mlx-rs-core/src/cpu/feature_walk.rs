//! A feed-forward block that computes selected features only. Its matrices are outside MLX's
//! arrays, such as in a mapped file.

use std::sync::Arc;

use mlx_cpu_kernels::{
    FeatureWalk as Walk, Gate, HeldFloats, HeldProduct, Input, Isa, Size, StoredRows, Work,
};

use super::dense::size_of;
use super::host_op::{self, OpKind};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{Floats, Halves};

/// The values of a matrix, in memory of their owner.
#[derive(Debug, Clone)]
pub enum FeatureNumbers {
    /// float32.
    Float32(Floats),
    /// float16.
    Float16(Halves),
}

impl FeatureNumbers {
    /// The number of values.
    fn count(&self) -> usize {
        match self {
            Self::Float32(all) => all.as_ref().len(),
            Self::Float16(all) => all.as_ref().len(),
        }
    }

    /// Checks that the values' file, if they are mapped, still has all its bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the file was truncated.
    /// ```
    /// use mlx_rs_core::{cpu::FeatureNumbers, io::Floats};
    /// assert!(FeatureNumbers::from(Floats::from(vec![1.0])).check().is_ok());
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Float32(all) => all.check(),
            Self::Float16(all) => all.check(),
        }
    }

    fn stored_rows(&self) -> StoredRows {
        match self {
            Self::Float32(all) => StoredRows::F32(Arc::new(all.clone())),
            Self::Float16(all) => StoredRows::F16(Arc::new(all.clone())),
        }
    }

    /// A copy as an array of this shape, in the same type.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the shape has another number of elements; [`ErrorKind::Io`] for a
    /// file that was truncated.
    /// ```
    /// use mlx_rs_core::{cpu::FeatureNumbers, io::Floats};
    /// let numbers = FeatureNumbers::from(Floats::from(vec![1.0, 2.0]));
    /// assert_eq!(numbers.to_array(&[2, 1])?.shape(), [2, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn to_array(&self, shape: &[i32]) -> Result<Array> {
        let copy = match self {
            Self::Float32(all) => Array::from_slice(all.as_ref(), shape),
            Self::Float16(all) => {
                let all: Vec<_> = all
                    .as_ref()
                    .iter()
                    .map(|&v| half::f16::from_bits(v))
                    .collect();
                Array::from_slice(&all, shape)
            }
        };
        self.check()?;
        copy
    }
}

impl From<Floats> for FeatureNumbers {
    fn from(all: Floats) -> Self {
        Self::Float32(all)
    }
}

impl From<Halves> for FeatureNumbers {
    fn from(all: Halves) -> Self {
        Self::Float16(all)
    }
}

/// A row-major matrix of float32 or float16, one row per feature: `[features, hidden]`.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu::FeatureMatrix, io::Floats};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let matrix = FeatureMatrix::new(Floats::from(vec![1.0, 2.0, 3.0, 4.0]), [2, 2])?;
///     let y = matrix.product(&Array::from_slice(&[1.0f32, 10.0], &[1, 2])?, None)?;
///     assert_eq!(y.to_vec::<f32>()?, [21.0, 43.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct FeatureMatrix {
    numbers: FeatureNumbers,
    size: Size,
}

impl FeatureMatrix {
    /// A matrix with the shape `[features, hidden]`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the shape does not match the number of elements, or is empty.
    pub fn new(numbers: impl Into<FeatureNumbers>, shape: [i32; 2]) -> Result<Self> {
        let numbers = numbers.into();
        let count = numbers.count();
        match size_of(&shape).filter(|size| size.n.checked_mul(size.k) == Some(count)) {
            Some(size) => Ok(Self { numbers, size }),
            None => {
                let message = format!("{count} numbers are no matrix of shape {shape:?}");
                Err(Error::new(ErrorKind::Shape, "cpu::FeatureMatrix", message))
            }
        }
    }

    /// The shape, `[features, hidden]`.
    /// ```
    /// use mlx_rs_core::{cpu::FeatureMatrix, io::Floats};
    /// assert_eq!(FeatureMatrix::new(Floats::from(vec![0.0; 6]), [3, 2])?.shape(), [3, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn shape(&self) -> [i32; 2] {
        // Both sizes come from the matrix's shape, so they fit `i32`.
        [self.size.n as i32, self.size.k as i32]
    }

    /// The elements, row after row.
    /// ```
    /// use mlx_rs_core::{cpu::{FeatureMatrix, FeatureNumbers}, io::Floats};
    /// let matrix = FeatureMatrix::new(Floats::from(vec![5.0]), [1, 1])?;
    /// assert!(matches!(matrix.numbers(), FeatureNumbers::Float32(all) if all.as_ref() == [5.0]));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn numbers(&self) -> &FeatureNumbers {
        &self.numbers
    }

    fn stored_rows(&self) -> StoredRows {
        self.numbers.stored_rows()
    }

    /// Products of `x` with the transposed matrix, plus a bias `[features]`, on the CPU: float32
    /// `[.., hidden] -> [.., features]`.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when shapes or types do not fit; [`ErrorKind::Io`] for a mapped file
    /// that was truncated; MLX's message when the current stream is not on the CPU. If the file is
    /// truncated before the product is evaluated, the result is NaN.
    pub fn product(&self, x: &Array, bias: Option<&Floats>) -> Result<Array> {
        let op = "cpu::FeatureMatrix::product";
        let rows = rows_of(op, x, self.size.k)?;
        let work = HeldProduct {
            rows,
            k: self.size.k,
            matrix: self.stored_rows(),
            bias: held_vector(op, bias, self.size.n)?,
            isa: Isa::detect(),
        };
        let work = Checked::new(work, [Some(self), None])?;
        let shape = with_last(x, self.shape()[0]);
        host_op::add(op, OpKind::Opaque, work, &[x], &shape)
    }
}

/// A feed-forward block that computes only the features with the greatest gate magnitudes. It reads
/// `top_k` rows of each matrix per position.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu::{FeatureMatrix, FeatureWalk, Gate}, io::Floats};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     // Three features on states of one element.
///     let down = FeatureMatrix::new(Floats::from(vec![1.0, 10.0, 100.0]), [3, 1])?;
///     let walk = FeatureWalk {
///         up: None,
///         up_bias: None,
///         down: &down,
///         down_bias: None,
///         activation: Some(Gate::Relu),
///         top_k: 2,
///     };
///     let x = Array::from_slice(&[0.0f32], &[1, 1])?;
///     let gates = Array::from_slice(&[3.0f32, -4.0, 2.0], &[1, 3])?;
///     assert_eq!(walk.of(&x, &gates, None)?.to_vec::<f32>()?, [3.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct FeatureWalk<'a> {
    /// The rows of the up matrix; `None` for a block without one.
    pub up: Option<&'a FeatureMatrix>,
    /// The bias of the up matrix, `[features]`.
    pub up_bias: Option<&'a Floats>,
    /// The columns of the down matrix, stored as rows.
    pub down: &'a FeatureMatrix,
    /// The bias of the down matrix, `[hidden]`.
    pub down_bias: Option<&'a Floats>,
    /// The gate's activation; `None` if the kernels do not support it.
    pub activation: Option<Gate>,
    /// The maximum number of features per position.
    pub top_k: usize,
}

impl FeatureWalk<'_> {
    /// Computes the block on the CPU. `x` is float32 `[.., hidden]`, `gates` are the gates before
    /// the activation, `[.., features]`, and the output is `[.., hidden]`. Without
    /// [`Self::activation`] it also needs the gates after the activation.
    ///
    /// # Errors
    /// As [`FeatureMatrix::product`].
    pub fn of(&self, x: &Array, gates: &Array, activated: Option<&Array>) -> Result<Array> {
        let op = "cpu::FeatureWalk";
        let Size { n: features, k } = self.down.size;
        let rows = rows_of(op, x, k)?;
        let like_gates = |a: &Array| rows_of(op, a, features).is_ok_and(|actual| actual == rows);
        let fits = like_gates(gates)
            && activated.is_none_or(like_gates)
            && (self.activation.is_some() || activated.is_some())
            && (self.up).is_none_or(|up| up.size.n == features && up.size.k == k);
        if !fits {
            let message = format!("needs gates of {features} features for each of {rows} rows");
            return Err(Error::new(ErrorKind::Shape, op, message).with_inputs(&[x, gates]));
        }
        let work = Walk {
            rows,
            hidden: k,
            features,
            top_k: self.top_k,
            activation: self.activation,
            up: self.up.map(FeatureMatrix::stored_rows),
            up_bias: held_vector(op, self.up_bias, features)?,
            down: self.down.stored_rows(),
            down_bias: held_vector(op, self.down_bias, k)?,
            isa: Isa::detect(),
        };
        let work = Checked::new(work, [self.up, Some(self.down)])?;
        let mut inputs = vec![x, gates];
        if self.activation.is_none() {
            inputs.extend(activated);
        }
        host_op::add(op, OpKind::Opaque, work, &inputs, x.shape())
    }
}

/// An operation with matrices in files. The output is NaN if a file is truncated before the
/// operation ends. The bytes that were read may then not be those of the file.
struct Checked<W> {
    work: W,
    matrices: [Option<FeatureNumbers>; 2],
}

impl<W> Checked<W> {
    fn new(work: W, matrices: [Option<&FeatureMatrix>; 2]) -> Result<Self> {
        let matrices = matrices.map(|matrix| matrix.map(|matrix| matrix.numbers.clone()));
        for matrix in matrices.iter().flatten() {
            matrix.check()?;
        }
        Ok(Self { work, matrices })
    }
}

impl<W: Work> Work for Checked<W> {
    fn outputs(&self) -> usize {
        self.work.outputs()
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: the caller guarantees the inputs.
        unsafe { self.work.run(inputs, output) };
        let mut matrices = self.matrices.iter().flatten();
        if matrices.any(|matrix| matrix.check().is_err()) {
            output.fill(f32::NAN);
        }
    }
}

/// The number of rows of `k` float32 in an array.
fn rows_of(op: &'static str, x: &Array, k: usize) -> Result<usize> {
    let last = x.shape().last().and_then(|n| usize::try_from(*n).ok());
    if x.dtype() != Dtype::Float32 || last != Some(k) {
        let message = format!("needs float32 [.., {k}]");
        return Err(Error::new(ErrorKind::Shape, op, message).with_inputs(&[x]));
    }
    Ok(x.size().checked_div(k).unwrap_or(0))
}

fn held_vector(op: &'static str, bias: Option<&Floats>, n: usize) -> Result<Option<HeldFloats>> {
    let Some(bias) = bias else { return Ok(None) };
    let length = bias.as_ref().len();
    if length != n {
        let message = format!("a bias of {length} numbers does not fit {n} outputs");
        return Err(Error::new(ErrorKind::Shape, op, message));
    }
    Ok(Some(Arc::new(bias.clone())))
}

/// The shape of `x` with `n` as the length of the last axis.
fn with_last(x: &Array, n: i32) -> Vec<i32> {
    let mut shape = x.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = n;
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Stream};

    fn floats(n: usize) -> Floats {
        Floats::from((0..n).map(|i| (i % 7) as f32 - 3.0).collect::<Vec<_>>())
    }

    /// If a file is truncated before an operation is made, there must be an error. If it is
    /// truncated later, the result must be NaN.
    #[cfg(unix)]
    #[test]
    fn truncated_files_give_no_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let (features, hidden) = (64, 1024);
        let bytes = 4 * features * hidden;
        let open = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, vec![0u8; bytes]).unwrap();
            let file = crate::io::MappedFile::open(&path).unwrap();
            let shape = [features as i32, hidden as i32];
            let matrix = FeatureMatrix::new(file.floats(0..bytes).unwrap(), shape).unwrap();
            (
                matrix,
                std::fs::File::options().write(true).open(&path).unwrap(),
            )
        };
        let ((up, _), (down, down_file)) = (open("up"), open("down"));
        let walk = FeatureWalk {
            up: Some(&up),
            up_bias: None,
            down: &down,
            down_bias: None,
            activation: Some(Gate::Silu),
            top_k: 5,
        };
        let ones = |n: usize| Array::from_slice(&vec![1.0f32; n], &[1, n as i32]).unwrap();
        let (x, gates) = (ones(hidden), ones(features));
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let finite = walk.of(&x, &gates, None).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(finite, vec![0.0; hidden]);
            let made = walk.of(&x, &gates, None).unwrap();
            let product = down.product(&x, None).unwrap();
            down_file.set_len(0).unwrap();
            for late in [made, product] {
                assert!(late.to_vec::<f32>().unwrap().iter().all(|y| y.is_nan()));
            }
            let errors = [
                walk.of(&x, &gates, None).unwrap_err(),
                down.product(&x, None).unwrap_err(),
                down.numbers().to_array(&[64, 1024]).unwrap_err(),
            ];
            for error in errors {
                assert_eq!(error.kind(), ErrorKind::Io, "{error}");
                assert!(error.to_string().contains("down was truncated"), "{error}");
            }
            assert!(up.product(&x, None).is_ok());
        });
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        for shape in [[2, 3], [0, 4], [-2, -2], [4, i32::MAX]] {
            assert!(FeatureMatrix::new(floats(4), shape).is_err(), "{shape:?}");
        }
        let down = FeatureMatrix::new(floats(12), [4, 3]).unwrap();
        let short = FeatureMatrix::new(floats(9), [3, 3]).unwrap();
        let (three, four) = (floats(3), floats(4));
        let array = |shape: &[i32]| {
            let n: i32 = shape.iter().product();
            Array::from_slice(&vec![1.0f32; n as usize], shape).unwrap()
        };
        let (x, gates) = (array(&[2, 3]), array(&[2, 4]));
        let walk = FeatureWalk {
            up: Some(&down),
            up_bias: Some(&four),
            down: &down,
            down_bias: Some(&three),
            activation: Some(Gate::Silu),
            top_k: 2,
        };
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            assert_eq!(walk.of(&x, &gates, None).unwrap().shape(), [2, 3]);
            for (x, gates) in [
                (array(&[2, 4]), array(&[2, 4])),
                (array(&[2, 3]), array(&[1, 4])),
                (array(&[2, 3]), array(&[2, 3])),
                (x.astype(Dtype::Int32).unwrap(), gates.clone()),
                (x.clone(), gates.astype(Dtype::Float16).unwrap()),
            ] {
                let error = walk.of(&x, &gates, None).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Shape);
            }
            let mut wrong = walk;
            wrong.up = Some(&short);
            assert!(wrong.of(&x, &gates, None).is_err());
            let mut wrong = walk;
            wrong.down_bias = Some(&four);
            assert!(wrong.of(&x, &gates, None).is_err());
            let mut given = walk;
            given.activation = None;
            assert!(given.of(&x, &gates, None).is_err());
            assert!(given.of(&x, &gates, Some(&x)).is_err());
            assert!(given.of(&x, &gates, Some(&gates)).is_ok());
            assert!(down.product(&gates, None).is_err());
            assert!(down.product(&x, Some(&three)).is_err());
            // An input with zero rows is valid.
            let (none, no_gates) = (array(&[0, 3]), array(&[0, 4]));
            assert_eq!(walk.of(&none, &no_gates, None).unwrap().shape(), [0, 3]);
        });
    }
}
