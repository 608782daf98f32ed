//! Matrix multiplication beyond the plain one: gathered, masked and segmented products, tensor
//! contractions, and Einstein sums.
//!
//! ```
//! use mlx_rs_core::{Array, einsum};
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
//! let trace = einsum("ii->", &[&a])?;
//! assert_eq!(trace.item::<f32>()?, 5.0);
//! let product = einsum("ij,jk->ik", &[&a, &a])?;
//! assert_eq!(product.to_vec::<f32>()?, a.matmul(&a)?.to_vec::<f32>()?);
//! # Ok(()) }
//! ```

use mlx_sys as sys;

use super::einsum_path;
use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::device::DeviceKind;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::stream::Stream;

/// Selects the matrices of a batch for a product: by an index array, or the whole batch in order.
///
/// `From<Option<&Array>>` makes it. Indices out of range are clamped inside the graph, which costs
/// a small operation each time. If several products use the same indices, clamp them once with
/// [`MatrixIndices::new`] and pass `&MatrixIndices`.
#[derive(Debug, Clone, Copy)]
pub enum IndexArg<'a> {
    /// The matrices of the batch in order.
    InOrder,
    /// Indices that are clamped to the batch.
    Clamp(&'a Array),
    /// Indices that are already clamped.
    Ready(&'a MatrixIndices),
}

impl<'a> From<Option<&'a Array>> for IndexArg<'a> {
    fn from(indices: Option<&'a Array>) -> Self {
        indices.map_or(IndexArg::InOrder, IndexArg::Clamp)
    }
}
impl<'a> From<&'a Array> for IndexArg<'a> {
    fn from(indices: &'a Array) -> Self {
        IndexArg::Clamp(indices)
    }
}
impl<'a> From<&'a MatrixIndices> for IndexArg<'a> {
    fn from(indices: &'a MatrixIndices) -> Self {
        IndexArg::Ready(indices)
    }
}

/// Indices into a batch of matrices. All are known to be within the batch.
#[derive(Debug, Clone)]
pub struct MatrixIndices {
    array: Array,
    count: i32,
}

impl MatrixIndices {
    /// Clamps `indices` (integers) to `0..count`, lazily.
    ///
    /// ```
    /// use mlx_rs_core::{MatrixIndices, array};
    /// let experts = MatrixIndices::new(&array!([1, 7, -2])?, 4)?;
    /// assert_eq!(experts.array().to_vec::<u32>()?, [1, 3, 0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the batch is empty; [`ErrorKind::Dtype`] for indices that are not
    /// integers.
    pub fn new(indices: &Array, count: i32) -> Result<Self> {
        if count <= 0 {
            return Err(Error::new(
                ErrorKind::Index,
                "matrix_indices",
                "there are no matrices to choose from",
            ));
        }
        Ok(Self {
            array: Array::clamp_indices("matrix_indices", indices, count)?.astype(Dtype::Uint32)?,
            count,
        })
    }

    /// The indices.
    ///
    /// ```
    /// use mlx_rs_core::{MatrixIndices, array};
    /// assert_eq!(MatrixIndices::new(&array!([0, 1])?, 2)?.array().shape(), [2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    #[must_use]
    pub fn array(&self) -> &Array {
        &self.array
    }
}

impl IndexArg<'_> {
    /// The indices, clamped to the batch of `matrices`. The last two axes of `matrices` are one
    /// matrix.
    pub(crate) fn resolve(self, op: &'static str, matrices: &Array) -> Result<Option<Array>> {
        let shape = matrices.shape();
        let batch = &shape[..shape.len().saturating_sub(2)];
        let count = batch
            .iter()
            .try_fold(1i32, |n, &d| n.checked_mul(d))
            .filter(|&n| n > 0)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Shape,
                    op,
                    "the batch is empty or has more matrices than can be counted",
                )
                .with_inputs(&[matrices])
            })?;
        match self {
            IndexArg::InOrder => Ok(None),
            IndexArg::Clamp(indices) => Ok(Some(
                Array::clamp_indices(op, indices, count)?.astype(Dtype::Uint32)?,
            )),
            IndexArg::Ready(ready) if ready.count <= count => Ok(Some(ready.array.clone())),
            IndexArg::Ready(ready) => Err(Error::new(
                ErrorKind::Index,
                op,
                format!(
                    "indices made for {} matrices cannot be used on {count}",
                    ready.count
                ),
            )
            .with_inputs(&[matrices])),
        }
    }
}

impl Array {
    fn matrices(&self, op: &'static str) -> Result<()> {
        if self.ndim() >= 2 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Shape, op, "needs at least two axes").with_inputs(&[self]))
    }

    /// Products of selected matrices: `self` `[.., m, k]` at the indices `lhs`, times `other` `[..,
    /// k, n]` at the indices `rhs`. Indices refer to the matrices of the flattened batch, and
    /// broadcast with each other: `[index shape .., m, n]`. `sorted` declares that the indices
    /// ascend, which is faster on a GPU. If they do not ascend, the result is unspecified.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (a, b) = (array!([[[1.0]], [[10.0]]])?, array!([[[2.0]], [[3.0]]])?); // [2, 1, 1]
    /// let product = a.gather_mm(&b, &array!([1, 0])?, &array!([0, 0])?, false)?;
    /// assert_eq!(product.to_vec::<f32>()?, [20.0, 2.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for fewer than two axes or an empty batch; [`ErrorKind::Dtype`] for
    /// indices that are not integers; MLX's message when the shapes or types do not fit.
    #[doc(alias = "mlx_gather_mm")]
    pub fn gather_mm<'a>(
        &self,
        other: &Array,
        lhs: impl Into<IndexArg<'a>>,
        rhs: impl Into<IndexArg<'a>>,
        sorted: bool,
    ) -> Result<Array> {
        let op = "gather_mm";
        self.matrices(op)?;
        other.matrices(op)?;
        let lhs = lhs.into().resolve(op, self)?;
        let rhs = rhs.into().resolve(op, other)?;
        call::array(op, |out, s| {
            // SAFETY: all handles are live. Every index is within its batch. Null means the batch
            // in order.
            unsafe {
                sys::mlx_gather_mm(
                    out,
                    self.raw(),
                    other.raw(),
                    Array::raw_or_null(lhs.as_ref()),
                    Array::raw_or_null(rhs.as_ref()),
                    sorted,
                    s,
                )
            }
        })
        .and_then(|product| product.unless_of_nothing(&[self, other]))
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// Matrix multiplication `[.., m, k] x [.., k, n]` that skips tiles of `block_size` (32 or 64).
    /// The masks have one entry per tile of the output, of `self`, and of `other`. An entry is a
    /// boolean or a factor.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array, ones};
    /// let (a, b) = (ones(&[32, 64], Dtype::Float32)?, ones(&[64, 32], Dtype::Float32)?);
    /// let half = array!([[true, false]])?; // the second tile of `a` is left out
    /// let product = a.block_masked_mm(&b, 32, None, Some(&half), None)?;
    /// assert_eq!(product.at::<f32>(&[0, 0])?, 32.0);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for fewer than two axes; [`ErrorKind::Value`] for another block size;
    /// MLX's message when shapes, masks or types do not fit.
    #[doc(alias = "mlx_block_masked_mm")]
    pub fn block_masked_mm(
        &self,
        other: &Array,
        block_size: i32,
        mask_out: Option<&Array>,
        mask_lhs: Option<&Array>,
        mask_rhs: Option<&Array>,
    ) -> Result<Array> {
        let op = "block_masked_mm";
        self.matrices(op)?;
        other.matrices(op)?;
        if block_size != 32 && block_size != 64 {
            return Err(Error::new(
                ErrorKind::Value,
                op,
                format!("blocks are of 32 or 64, not {block_size}"),
            ));
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live. Null means no mask.
            unsafe {
                sys::mlx_block_masked_mm(
                    out,
                    self.raw(),
                    other.raw(),
                    block_size,
                    Array::raw_or_null(mask_out),
                    Array::raw_or_null(mask_lhs),
                    Array::raw_or_null(mask_rhs),
                    s,
                )
            }
        })
        .and_then(|product| product.unless_of_nothing(&[self, other]))
        .and_then(|product| {
            let masks = [mask_out, mask_lhs, mask_rhs];
            let on_cpu = Stream::current()?.device().kind() == DeviceKind::Cpu;
            if product.ndim() < 3 || !on_cpu || masks.iter().all(Option::is_none) {
                return Ok(product);
            }
            // MLX's CPU kernel masks copies of the operands that keep the layout of the batches. It
            // masks a broadcast matrix for all batches at once. For reversed batches it writes
            // before the start of the copy. So the operands are masked here.
            let lhs = self.masked_blocks(block_size, mask_lhs)?;
            let rhs = other.masked_blocks(block_size, mask_rhs)?;
            lhs.matmul(&rhs)?.masked_blocks(block_size, mask_out)
        })
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// Sets the tiles that `mask` excludes to zero, or multiplies each tile with its factor.
    fn masked_blocks(&self, block_size: i32, mask: Option<&Array>) -> Result<Array> {
        let Some(mask) = mask else {
            return Ok(self.clone());
        };
        let (m, n) = (self.dim(-2)?, self.dim(-1)?);
        let wide = mask
            .repeat(block_size, -2)?
            .slice_axis(-2, 0, m)?
            .repeat(block_size, -1)?
            .slice_axis(-1, 0, n)?;
        if mask.dtype() == Dtype::Bool {
            return super::where_(&wide, self, &Array::scalar(0.0f32)?.astype(self.dtype())?);
        }
        self.multiply(&wide.astype(self.dtype())?)
    }

    /// One product for each segment `[start, end)` of the inner axis: `[m, k] x [k, n]` with
    /// `segments` `[.., 2]` results in `[.., m, n]`. Bounds are clamped to the axis, inside the
    /// graph.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array, ones};
    /// let (a, b) = (array!([[1.0, 2.0, 3.0, 4.0]])?, ones(&[4, 1], Dtype::Float32)?);
    /// let sums = a.segmented_mm(&b, &array!([[0, 2], [2, 4]])?)?;
    /// assert_eq!(sums.to_vec::<f32>()?, [3.0, 7.0]); // [2, 1, 1]
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the matrices do not have two axes with matching lengths, or the
    /// segments are not pairs; [`ErrorKind::Dtype`] for segments that are not integers.
    #[doc(alias = "mlx_segmented_mm")]
    pub fn segmented_mm(&self, other: &Array, segments: &Array) -> Result<Array> {
        let op = "segmented_mm";
        let (a, b, s) = (self.shape(), other.shape(), segments.shape());
        if a.len() != 2 || b.len() != 2 || a[1] != b[0] || s.last() != Some(&2) {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                "needs [m, k] x [k, n] and segments [.., 2]",
            )
            .with_inputs(&[self, other, segments]));
        }
        Self::index_dtype(op, segments)?;
        let k = a[1];
        let limit = Self::clamp_from_end(op, segments, 0, k)?.astype(Dtype::Int32)?;
        let start = limit.slice_axis(-1, 0, 1)?;
        let end = limit.slice_axis(-1, 1, 2)?.maximum(&start)?;
        let safe = super::concatenate(&[&start, &end], -1)?;
        let half = |a: &Array| matches!(a.dtype(), Dtype::Float16 | Dtype::Bfloat16);
        if half(self) || half(other) {
            // In half precision, MLX's CPU kernel uses the whole matrix instead of the segment.
            let dtype = self.slice_axis(0, 0, 0)?.matmul(other)?.dtype();
            let wide = |a: &Array| a.astype(Dtype::Float32);
            if half(&Array::scalar(false)?.astype(dtype)?) {
                return wide(self)?
                    .segmented_mm(&wide(other)?, segments)?
                    .astype(dtype);
            }
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live. For every segment, 0 <= start <= end <= k.
            unsafe { sys::mlx_segmented_mm(out, self.raw(), other.raw(), safe.raw(), s) }
        })
        .and_then(|products| products.unless_of_nothing(&[self, other]))
        .map_err(|e| e.with_inputs(&[self, other, segments]))
    }

    /// Sums of products over the last `axes` axes of `self` and the first `axes` axes of `other`.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, ones};
    /// let (a, b) = (ones(&[2, 3, 4], Dtype::Float32)?, ones(&[3, 4, 5], Dtype::Float32)?);
    /// let c = a.tensordot(&b, 2)?;
    /// assert_eq!((c.shape(), c.at::<f32>(&[0, 0])?), (&[2, 5][..], 12.0));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when an array has fewer axes; MLX's message when the lengths differ.
    pub fn tensordot(&self, other: &Array, axes: i32) -> Result<Array> {
        let op = "tensordot";
        let most = self.ndim().min(other.ndim());
        let n = usize::try_from(axes)
            .ok()
            .filter(|&n| n <= most)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Index,
                    op,
                    format!("cannot sum over {axes} axes; give 0 to {most}"),
                )
                .with_inputs(&[self, other])
            })?;
        let last_axes: Vec<i32> = (self.ndim() - n..self.ndim()).map(|i| i as i32).collect();
        let others: Vec<i32> = (0..n).map(|i| i as i32).collect();
        self.tensordot_axes(other, &last_axes, &others)
    }

    /// Sums of products over `axes` of `self`, paired with `other_axes` of `other`. The result has
    /// the other axes of `self`, then those of `other`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (a, b) = (array!([[1.0, 2.0]])?, array!([[3.0, 4.0]])?);
    /// assert_eq!(a.tensordot_axes(&b, &[1], &[1])?.to_vec::<f32>()?, [11.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for axes that do not exist or are named twice; [`ErrorKind::Shape`]
    /// when the axes cannot be paired.
    #[doc(alias = "mlx_tensordot")]
    pub fn tensordot_axes(&self, other: &Array, axes: &[i32], other_axes: &[i32]) -> Result<Array> {
        let op = "tensordot";
        let own_axes = self.distinct_axes(op, axes)?;
        let others = other.distinct_axes(op, other_axes)?;
        self.count(op)?;
        other.count(op)?;
        let paired = own_axes.len() == others.len()
            && own_axes
                .iter()
                .zip(&others)
                .all(|(&i, &j)| self.shape()[i as usize] == other.shape()[j as usize]);
        if !paired {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("axes {axes:?} and {other_axes:?} do not pair up in length"),
            )
            .with_inputs(&[self, other]));
        }
        call::array(op, |out, s| {
            // SAFETY: pointers and lengths describe the slices; the axes exist.
            unsafe {
                sys::mlx_tensordot(
                    out,
                    self.raw(),
                    other.raw(),
                    own_axes.as_ptr(),
                    own_axes.len(),
                    others.as_ptr(),
                    others.len(),
                    s,
                )
            }
        })
        .and_then(|product| product.unless_of_nothing(&[self, other]))
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// The Kronecker product: every value of `self` times all of `other`, as blocks.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1, 10]])?.kron(&array!([[1], [2]])?)?;
    /// assert_eq!((a.shape(), a.to_vec::<i32>()?), (&[2, 2][..], vec![1, 10, 2, 20]));
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for empty arrays, or when an axis of the result exceeds `i32::MAX`.
    #[doc(alias = "mlx_kron")]
    pub fn kron(&self, other: &Array) -> Result<Array> {
        let op = "kron";
        let (a, b) = (self.shape(), other.shape());
        let axes = a.len().max(b.len());
        let at =
            |shape: &[i32], i: usize| (i + shape.len()).checked_sub(axes).map_or(1, |i| shape[i]);
        let countable = (0..axes).all(|i| at(a, i).checked_mul(at(b, i)).is_some_and(|d| d > 0));
        if !countable {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                "an axis of the result would be empty or too long",
            )
            .with_inputs(&[self, other]));
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live. The axes of the result fit an `i32`.
            unsafe { sys::mlx_kron(out, self.raw(), other.raw(), s) }
        })
        .map_err(|e| e.with_inputs(&[self, other]))
    }

    /// Multiplies the last axis with the Hadamard matrix of its length, and with `scale`. The
    /// default scale, `1 / sqrt(n)`, preserves norms. The length must be `m * 2^k` with `m` 1, 12,
    /// 20 or 28.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([1.0, 3.0])?.hadamard_transform(Some(1.0))?.to_vec::<f32>()?, [4.0, -2.0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for an empty array or another length.
    #[doc(alias = "mlx_hadamard_transform")]
    pub fn hadamard_transform(&self, scale: Option<f32>) -> Result<Array> {
        let op = "hadamard_transform";
        let n = self.shape().last().copied().unwrap_or(1);
        let odd = if n > 0 { n >> n.trailing_zeros() } else { 0 };
        let twos = if n > 0 { n.trailing_zeros() } else { 0 };
        let possible = self.size() > 0 && (odd == 1 || (matches!(odd, 3 | 5 | 7) && twos >= 2));
        if !possible {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("no Hadamard matrix of {n}: lengths are m * 2^k with m 1, 12, 20 or 28"),
            )
            .with_inputs(&[self]));
        }
        call::array(op, |out, s| {
            // SAFETY: all handles are live. MLX supports this length.
            unsafe {
                sys::mlx_hadamard_transform(
                    out,
                    self.raw(),
                    sys::mlx_optional_float {
                        value: scale.unwrap_or(0.0),
                        has_value: scale.is_some(),
                    },
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }
}

/// The Einstein sum of `operands` by `subscripts`, such as `"bij,bjk->bik"`. A letter names an
/// axis, and `...` the unnamed axes. Letters that the result lacks are summed over. Without `->`,
/// the result has the letters that occur only once, in alphabetical order.
///
/// ```
/// use mlx_rs_core::{array, einsum};
/// let (a, b) = (array!([[1.0, 2.0]])?, array!([[3.0], [4.0]])?);
/// assert_eq!(einsum("ij,jk->ik", &[&a, &b])?.to_vec::<f32>()?, [11.0]);
/// assert_eq!(einsum("ij->ji", &[&a])?.shape(), [2, 1]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Value`] for subscripts that cannot be parsed; [`ErrorKind::Shape`] when the
/// subscripts do not match the operands, or axes with the same letter differ in length (1
/// broadcasts).
#[doc(alias = "mlx_einsum")]
pub fn einsum(subscripts: &str, operands: &[&Array]) -> Result<Array> {
    let op = "einsum";
    let shapes: Vec<&[i32]> = operands.iter().map(|a| a.shape()).collect();
    let plain = einsum_path::explicit(subscripts, &shapes).map_err(|e| e.with_inputs(operands))?;
    let vec = ArrayVec::new(op, operands.iter().copied())?;
    call::array(op, |out, s| {
        // SAFETY: the string is NUL-terminated, consists of letters, commas and one arrow, and
        // matches the operands. The vector is live.
        unsafe { sys::mlx_einsum(out, plain.as_ptr(), vec.raw(), s) }
    })
    .and_then(|sum| sum.unless_of_nothing(operands))
    .map_err(|e| e.with_inputs(operands))
}
