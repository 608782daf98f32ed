//! The primitives of indexing: gathers and scatters with several index arrays, updates along one
//! axis, and slices whose start is an array. `indexing/` implements Python's `a[...]`. This file
//! only ensures that no index is out of bounds.
//!
//! MLX reads and writes wherever an index points. Here the graph moves every index into range, and
//! nothing is evaluated. Negative indices count from the end. Other indices out of range become the
//! nearest valid index. [`Array::take`] is the checked form, which returns an error instead.

use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::device::DeviceKind;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::mapped;
use crate::stream::Stream;

/// How a scatter combines an update with the existing value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ScatterMode {
    /// The update replaces the value. If several updates have the same position, any of them may be
    /// the last.
    #[default]
    Replace,
    /// The sum of value and update.
    Add,
    /// The product of value and update.
    Prod,
    /// The maximum of value and update.
    Max,
    /// The minimum of value and update.
    Min,
}

/// Checks that there is one index array for each of `axes`, and that the axes exist and are
/// distinct. Returns the axes counted from the front.
fn index_axes(op: &'static str, a: &Array, indices: &[&Array], axes: &[i32]) -> Result<Vec<i32>> {
    if indices.len() != axes.len() {
        return Err(Error::new(
            ErrorKind::Shape,
            op,
            format!(
                "give one index array for each axis, not {} for {}",
                indices.len(),
                axes.len()
            ),
        ));
    }
    a.distinct_axes(op, axes)
}

/// Blocks that are longer than one along indexed axes, converted to single elements with an index
/// each. In gradients, MLX treats the updates of such blocks as single elements.
struct Elements {
    /// The indices, followed by one axis for each indexed axis of a block.
    indices: Vec<Array>,
    /// The sizes of blocks that have one element along indexed axes.
    sizes: Vec<i32>,
    /// The axes of the blocks, after those of the indices: first the indexed axes, then all others.
    order: Vec<i32>,
    /// The number of axes of the original indices.
    lead: i32,
}

impl Elements {
    /// `None` for blocks that are single elements along `axes`, or empty.
    fn from_indices(indices: &[Array], axes: &[i32], block: &[i32]) -> Result<Option<Self>> {
        let long = axes.iter().any(|&axis| block[axis as usize] > 1);
        if !long || block.contains(&0) {
            return Ok(None);
        }
        let shared = super::broadcast_arrays(&indices.iter().collect::<Vec<_>>())?;
        let lead = shared[0].ndim();
        let mut sizes = block.to_vec();
        let mut each = Vec::with_capacity(axes.len());
        for (i, (index, &axis)) in shared.iter().zip(axes).enumerate() {
            let length = std::mem::replace(&mut sizes[axis as usize], 1);
            let mut along = vec![1; axes.len()];
            along[i] = length;
            let steps = super::arange(0.0, f64::from(length), 1.0, index.dtype())?;
            let at = [index.shape(), &vec![1; axes.len()]].concat();
            each.push(index.reshape(&at)?.add(&steps.reshape(&along)?)?);
        }
        let others = (0..block.len() as i32).filter(|axis| !axes.contains(axis));
        Ok(Some(Self {
            indices: super::broadcast_arrays(&each.iter().collect::<Vec<_>>())?,
            sizes,
            order: axes.iter().copied().chain(others).collect(),
            lead: lead as i32, // at most the number of axes of an array
        }))
    }

    /// Reorders `[indices .., indexed axes .., block of length one along these axes]` to `[indices
    /// .., block]`.
    fn to_blocks(&self, elements: &Array, block: &[i32]) -> Result<Array> {
        let shape = elements.shape()[..self.lead as usize].to_vec();
        let parts = self.order.iter().map(|&axis| block[axis as usize]);
        let split = elements.reshape(&shape.iter().copied().chain(parts).collect::<Vec<_>>())?;
        let back = (0..self.order.len() as i32).map(|axis| {
            self.order
                .iter()
                .position(|&a| a == axis)
                .unwrap_or_default() as i32
        });
        let all = (0..self.lead).chain(back.map(|at| self.lead + at));
        split.transpose_axes(&all.collect::<Vec<_>>())
    }

    /// The inverse of [`Self::to_blocks`].
    fn of_blocks(&self, updates: &Array) -> Result<Array> {
        let all = (0..self.lead).chain(self.order.iter().map(|&axis| self.lead + axis));
        let moved = updates.transpose_axes(&all.collect::<Vec<_>>())?;
        let named = self.lead as usize + self.indices.len();
        moved.reshape(&[&moved.shape()[..named], &self.sizes].concat())
    }
}

impl Array {
    /// Makes the result of a scatter of blocks row-major, by a reshape back and forth. Its
    /// derivatives gather blocks, and MLX would gather them wrongly from a column-major array; see
    /// [`Array::for_blocks`].
    pub(crate) fn with_laid_out_cotangent(self, block: &[i32]) -> Result<Array> {
        if !self.gathers_wrongly(|axis| block[axis]) {
            return Ok(self);
        }
        let shape = self.shape().to_vec();
        self.reshape(&[self.count("scatter")?])?.reshape(&shape)
    }
}

/// The elements of a vector, each as a separate array.
fn starts(start: &Array) -> Result<Vec<Array>> {
    let each = 0..start.size() as i32; // at most the number of axes of an array
    each.map(|i| start.slice_axis(0, i, i + 1)?.reshape(&[]))
        .collect()
}

impl Array {
    /// For every position of the `indices` (integers, which broadcast with each other), the block
    /// of `slice_sizes` that starts there. Index array `i` belongs to axis `axes[i]`; other axes
    /// start at 0. The result has the shape of the broadcast indices, followed by `slice_sizes`.
    /// Negative indices count from the end. An index out of range becomes the nearest index at
    /// which the whole block fits.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([[1, 2], [3, 4], [5, 6]])?;
    /// let rows = a.gather(&[&array!([2, 0])?], &[0], &[1, 2])?;
    /// assert_eq!(rows.shape(), [2, 1, 2]);
    /// assert_eq!(rows.to_vec::<i32>()?, [5, 6, 1, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the number of index arrays differs from the number of `axes`, the
    /// number of sizes from the number of the array's axes, or a size is not within its axis;
    /// [`ErrorKind::Index`] for axes that do not exist, are named twice, or are empty;
    /// [`ErrorKind::Dtype`] for indices that are not integers.
    #[doc(alias = "mlx_gather")]
    pub fn gather(&self, indices: &[&Array], axes: &[i32], slice_sizes: &[i32]) -> Result<Array> {
        let op = "gather";
        let axes = index_axes(op, self, indices, axes)?;
        let fits = slice_sizes.len() == self.ndim()
            && slice_sizes
                .iter()
                .zip(self.shape())
                .all(|(&size, &length)| (0..=length).contains(&size));
        if !fits {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("slice sizes {slice_sizes:?} must lie within the axes of the array"),
            )
            .with_inputs(&[self]));
        }
        // In second derivatives, MLX assumes that blocks are as long as the array along all other
        // axes.
        let mut region = self.shape().to_vec();
        for (axis, length) in region.iter_mut().enumerate() {
            if !axes.contains(&(axis as i32)) {
                *length = slice_sizes[axis];
            }
        }
        if region != self.shape() {
            let part = self.slice(&vec![0; region.len()], &region, &vec![1; region.len()])?;
            return part.gather(indices, &axes, slice_sizes);
        }
        let safe = self.bring_into_range(op, indices, &axes, slice_sizes)?;
        if let Some(each) = Elements::from_indices(&safe, &axes, slice_sizes)? {
            let indices: Vec<&Array> = each.indices.iter().collect();
            let elements = self.gather(&indices, &axes, &each.sizes)?;
            return each.to_blocks(&elements, slice_sizes);
        }
        let safe = (safe.iter().map(Array::without_slope)).collect::<Result<Vec<_>>>()?;
        let vec = ArrayVec::new(op, safe.iter().map(|i| &**i))?;
        let laid_out = self.for_blocks(|axis| slice_sizes[axis])?;
        call::array(op, |out, s| {
            // SAFETY: pointers and lengths describe live slices with one entry per index or axis.
            // The indices are clamped, so every block is inside the array.
            unsafe {
                mlx_sys::mlx_gather(
                    out,
                    laid_out.raw(),
                    vec.raw(),
                    axes.as_ptr(),
                    axes.len(),
                    slice_sizes.as_ptr(),
                    slice_sizes.len(),
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[self]))
    }

    /// [`Array::gather`] with one index array on one axis.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([10, 20, 30])?;
    /// assert_eq!(a.gather_axis(&array!([-1, 1])?, 0, &[1])?.to_vec::<i32>()?, [30, 20]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::gather`].
    pub fn gather_axis(&self, indices: &Array, axis: i32, slice_sizes: &[i32]) -> Result<Array> {
        self.gather(&[indices], &[axis], slice_sizes)
    }

    /// Returns a copy in which blocks at the `indices` are combined with `updates`. `updates` has
    /// the shape of the broadcast indices, followed by one block size per axis of this array, and
    /// is converted to the array's type. Negative indices count from the end. An index out of range
    /// becomes the nearest index at which the whole block fits.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, ScatterMode, array, zeros};
    /// let (a, at) = (zeros(&[4], Dtype::Int32)?, array!([1, 3])?);
    /// let updates = array!([[5], [6]])?; // [indices, one block each]
    /// assert_eq!(a.scatter(&[&at], &updates, &[0], ScatterMode::Replace)?.to_vec::<i32>()?, [0, 5, 0, 6]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when the numbers of indices and axes differ, or the updates do not
    /// match; [`ErrorKind::Index`] for axes that do not exist, are named twice, or are empty;
    /// [`ErrorKind::Dtype`] for indices that are not integers; MLX's message for types that the
    /// device cannot scatter (64-bit ones on a GPU).
    #[doc(alias(
        "mlx_scatter",
        "mlx_scatter_add",
        "mlx_scatter_max",
        "mlx_scatter_min",
        "mlx_scatter_prod"
    ))]
    pub fn scatter(
        &self,
        indices: &[&Array],
        updates: &Array,
        axes: &[i32],
        mode: ScatterMode,
    ) -> Result<Array> {
        let op = "scatter";
        let axes = index_axes(op, self, indices, axes)?;
        let n = self.ndim();
        let block = updates
            .ndim()
            .checked_sub(n)
            .map(|lead| updates.shape()[lead..].to_vec());
        let block = match block {
            Some(b) if b.iter().zip(self.shape()).all(|(b, d)| b <= d) => b,
            _ => {
                return Err(Error::new(
                    ErrorKind::Shape,
                    op,
                    "updates need the shape of the indices followed by block sizes within the axes",
                )
                .with_inputs(&[self, updates]));
            }
        };
        if updates.size() == 0 {
            return Ok(self.clone());
        }
        if axes.is_empty() {
            return self.combine(op, updates, mode);
        }
        // In gradients, MLX assumes that blocks are as long as the array along all other axes.
        let mut region = self.shape().to_vec();
        for (axis, length) in region.iter_mut().enumerate() {
            if !axes.contains(&(axis as i32)) {
                *length = block[axis];
            }
        }
        if region != self.shape() {
            let (start, steps) = (vec![0; n], vec![1; n]);
            let part = self.slice(&start, &region, &steps)?;
            let part = part.scatter(indices, updates, &axes, mode)?;
            return self.slice_update(&part, &start, &region, &steps);
        }
        let safe = self.bring_into_range(op, indices, &axes, &block)?;
        if let Some(each) = Elements::from_indices(&safe, &axes, &block)? {
            let indices: Vec<&Array> = each.indices.iter().collect();
            return self.scatter(&indices, &each.of_blocks(updates)?, &axes, mode);
        }
        let (target, updates, safe) = if mapped::inside() {
            let safe = safe.iter().map(super::mapped::batch_first);
            let safe = safe.collect::<Result<Vec<_>>>()?;
            (
                &super::mapped::batch_first(self)?,
                &super::mapped::batch_first(updates)?,
                safe,
            )
        } else {
            (self, updates, safe)
        };
        let vec = ArrayVec::new(op, &safe)?;
        call::array(op, |out, s| {
            let (a, i, u) = (target.raw(), vec.raw(), updates.raw());
            let (at, n) = (axes.as_ptr(), axes.len());
            // SAFETY: pointer and length describe the axes, which exist. The indices are clamped,
            // so every block of the updates is inside the array.
            unsafe {
                match mode {
                    ScatterMode::Replace => mlx_sys::mlx_scatter(out, a, i, u, at, n, s),
                    ScatterMode::Add => mlx_sys::mlx_scatter_add(out, a, i, u, at, n, s),
                    ScatterMode::Prod => mlx_sys::mlx_scatter_prod(out, a, i, u, at, n, s),
                    ScatterMode::Max => mlx_sys::mlx_scatter_max(out, a, i, u, at, n, s),
                    ScatterMode::Min => mlx_sys::mlx_scatter_min(out, a, i, u, at, n, s),
                }
            }
        })
        .and_then(|scattered| scattered.with_laid_out_cotangent(&block))
        .map_err(|e| e.with_inputs(&[self, updates]))
    }

    /// Combines a single block at the first position of every axis. Under `vmap`, MLX would number
    /// the examples in the type of the updates. If that type is not an integer, MLX would abort the
    /// process.
    fn combine(&self, op: &'static str, updates: &Array, mode: ScatterMode) -> Result<Array> {
        if updates.ndim() != self.ndim() {
            let why = "without indices there is one update, with the axes of the array";
            return Err(Error::new(ErrorKind::Shape, op, why).with_inputs(&[self, updates]));
        }
        let (start, stop) = (vec![0; self.ndim()], updates.shape());
        let steps = vec![1; self.ndim()];
        let updates = updates.astype(self.dtype())?;
        let part = self.slice(&start, stop, &steps)?;
        let part = match mode {
            ScatterMode::Replace => updates.clone(),
            ScatterMode::Add => part.add(&updates)?,
            ScatterMode::Prod => part.multiply(&updates)?,
            ScatterMode::Max => part.maximum(&updates)?,
            ScatterMode::Min => part.minimum(&updates)?,
        };
        self.slice_update(&part, &start, stop, &steps)
    }

    /// [`Array::scatter`] with one index array on one axis.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, ScatterMode, array, ones};
    /// let (a, at) = (ones(&[3], Dtype::Int32)?, array!([1, 1])?);
    /// let sum = a.scatter_axis(&at, &array!([[5], [6]])?, 0, ScatterMode::Add)?;
    /// assert_eq!(sum.to_vec::<i32>()?, [1, 12, 1]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::scatter`].
    pub fn scatter_axis(
        &self,
        indices: &Array,
        updates: &Array,
        axis: i32,
        mode: ScatterMode,
    ) -> Result<Array> {
        self.scatter(&[indices], updates, &[axis], mode)
    }

    /// Like [`Array::put_along_axis`], but the values are added to the elements. If a position
    /// occurs several times, all its values are added.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array, zeros};
    /// let a = zeros(&[3], Dtype::Int32)?;
    /// assert_eq!(a.scatter_add_axis(&array!([1, 1])?, &array!([5, 6])?, 0)?.to_vec::<i32>()?, [0, 11, 0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for an empty or missing axis; MLX's message when the shapes differ.
    #[doc(alias = "mlx_scatter_add_axis")]
    pub fn scatter_add_axis(&self, indices: &Array, values: &Array, axis: i32) -> Result<Array> {
        let op = "scatter_add_axis";
        let length = self.shape()[self.axis(op, axis)?];
        let indices = Self::clamp_indices(op, indices, length)?;
        call::array(op, |out, s| {
            // SAFETY: all handles are live, and the axis exists. Indices are clamped to the axis,
            // and the shapes are equal except for that axis.
            unsafe {
                mlx_sys::mlx_scatter_add_axis(out, self.raw(), indices.raw(), values.raw(), axis, s)
            }
        })
        .map_err(|e| e.with_inputs(&[self, &indices, values]))
    }

    /// The block of `sizes` (one per axis) that starts at `start`, an integer array with one value
    /// for each of `axes`. Other axes start at 0. The start is moved so that the block fits.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let a = array!([10, 20, 30, 40])?;
    /// assert_eq!(a.slice_at(&array!([1])?, &[0], &[2])?.to_vec::<i32>()?, [20, 30]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when sizes or starts do not match; [`ErrorKind::Index`] for axes that
    /// do not exist or are named twice; [`ErrorKind::Dtype`] for a start that is not an integer
    /// array.
    #[doc(alias = "mlx_slice_dynamic")]
    pub fn slice_at(&self, start: &Array, axes: &[i32], sizes: &[i32]) -> Result<Array> {
        let op = "slice_at";
        let axes = self.distinct_axes(op, axes)?;
        let fits = sizes.len() == self.ndim()
            && sizes
                .iter()
                .zip(self.shape())
                .all(|(size, length)| (0..=*length).contains(size));
        if !fits {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("sizes {sizes:?} must lie within the axes of the array"),
            )
            .with_inputs(&[self]));
        }
        let start = self.clamp_start(op, start, &axes, sizes)?;
        if self.needs_indices()? {
            let at = starts(&start)?;
            return self.gather(&at.iter().collect::<Vec<_>>(), &axes, sizes);
        }
        call::array(op, |out, s| {
            // SAFETY: pointers and lengths describe the slices. The start is clamped, so the block
            // is inside the array.
            unsafe {
                mlx_sys::mlx_slice_dynamic(
                    out,
                    self.raw(),
                    start.raw(),
                    axes.as_ptr(),
                    axes.len(),
                    sizes.as_ptr(),
                    sizes.len(),
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[self, &start]))
    }

    /// Returns a copy in which `update` replaces the block at `start`, as in [`Array::slice_at`].
    /// `update` has as many axes as this array. The start is moved so that the update fits.
    ///
    /// ```
    /// use mlx_rs_core::{Dtype, array, zeros};
    /// let a = zeros(&[4], Dtype::Int32)?;
    /// assert_eq!(a.slice_update_at(&array!([5, 6])?, &array!([2])?, &[0])?.to_vec::<i32>()?, [0, 0, 5, 6]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Array::slice_at`].
    #[doc(alias = "mlx_slice_update_dynamic")]
    pub fn slice_update_at(&self, update: &Array, start: &Array, axes: &[i32]) -> Result<Array> {
        let op = "slice_update_at";
        let axes = self.distinct_axes(op, axes)?;
        let fits = update.ndim() == self.ndim()
            && update.shape().iter().zip(self.shape()).all(|(u, d)| u <= d);
        if !fits {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                "the update must have as many axes as the array and lie within each",
            )
            .with_inputs(&[self, update]));
        }
        if update.size() == 0 {
            return Ok(self.clone());
        }
        let start = self.clamp_start(op, start, &axes, update.shape())?;
        if self.needs_indices()? {
            // The derivative of this update would be a slice with the same fault.
            let at = starts(&start)?;
            let at: Vec<&Array> = at.iter().collect();
            return self.scatter(&at, update, &axes, ScatterMode::Replace);
        }
        call::array(op, |out, s| {
            // SAFETY: pointer and length describe the axes. The start is clamped, so the update is
            // inside the array.
            unsafe {
                mlx_sys::mlx_slice_update_dynamic(
                    out,
                    self.raw(),
                    update.raw(),
                    start.raw(),
                    axes.as_ptr(),
                    axes.len(),
                    s,
                )
            }
        })
        .map_err(|e| e.with_inputs(&[self, update, &start]))
    }

    /// Returns a copy in which the rows of `values` replace the elements where `mask` is true, one
    /// after another in row-major order. `mask` has the shape of the leading axes of this array.
    /// `values` has the shape `[n, trailing axes ..]`. If `mask` has more than `n` true elements,
    /// the last row is repeated. Alternatively `values` broadcasts to the trailing axes, and
    /// replaces every selected element.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let (a, mask) = (array!([1, 2, 3])?, array!([true, false, true])?);
    /// assert_eq!(a.masked_scatter(&mask, &array!([7, 8])?)?.to_vec::<i32>()?, [7, 2, 8]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Dtype`] for a mask that is not boolean; [`ErrorKind::Shape`] when the mask's
    /// shape is not the beginning of this array's shape, or the values do not match.
    pub fn masked_scatter(&self, mask: &Array, values: &Array) -> Result<Array> {
        let op = "masked_scatter";
        if mask.dtype() != Dtype::Bool {
            return Err(Error::new(
                ErrorKind::Dtype,
                op,
                format!("the mask must be boolean, not {}", mask.dtype()),
            ));
        }
        let lead = mask.ndim();
        if lead > self.ndim() || mask.shape() != &self.shape()[..lead] {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                "the mask must have the shape of the leading axes of the array",
            )
            .with_inputs(&[self, mask]));
        }
        let trailing = &self.shape()[lead..];
        if self.size() == 0 {
            return Ok(self.clone());
        }
        let values = values.astype(self.dtype())?;
        let mut mask_shape = mask.shape().to_vec();
        mask_shape.resize(self.ndim(), 1);
        let wide_mask = mask.reshape(&mask_shape)?;
        let chosen = if values.ndim() <= trailing.len() {
            values
        } else {
            let mut row_shape = vec![values.shape()[0]];
            row_shape.extend_from_slice(trailing);
            let rows = values.broadcast_to(&row_shape)?;
            // MLX's own kernel reads beyond the values if the mask has more true elements than the
            // values have rows. This computes the same function from safe operations: the index of
            // the row is the running count of true elements minus one, clamped.
            let count = mask.count("masked_scatter")?;
            let number = mask
                .reshape(&[count])?
                .astype(Dtype::Int32)?
                .cumsum(0, false, true)?
                .subtract(&Array::scalar(1i32)?)?;
            rows.take_clamped(&number, 0)?.reshape(self.shape())?
        };
        super::where_(&wide_mask, &chosen, self)?.broadcast_to(self.shape())
    }

    /// Whether a block at a computed position must be gathered by indices. MLX's CPU kernel for
    /// slices copies as many blocks as the array has space for, and so writes beyond the result.
    /// Under `vmap`, updates of all examples with the same block change only the first example.
    fn needs_indices(&self) -> Result<bool> {
        let on_cpu = || Ok(Stream::current()?.device().kind() == DeviceKind::Cpu);
        Ok(mapped::inside() || (self.ndim() > 2 && on_cpu()?))
    }

    /// Moves `indices` into `0..=length - block` of their axes. Negative indices count from the
    /// end.
    fn bring_into_range(
        &self,
        op: &'static str,
        indices: &[&Array],
        axes: &[i32],
        block: &[i32],
    ) -> Result<Vec<Array>> {
        indices
            .iter()
            .zip(axes)
            .map(|(index, &axis)| {
                let length = self.shape()[axis as usize]; // resolved by `distinct_axes`
                Self::clamp_from_end(op, index, length, length - block[axis as usize])
            })
            .collect()
    }

    /// Clamps each value of `start` to `0..=length - size` of its axis.
    fn clamp_start(
        &self,
        op: &'static str,
        start: &Array,
        axes: &[i32],
        sizes: &[i32],
    ) -> Result<Array> {
        if start.ndim() > 1 || start.size() != axes.len() {
            return Err(Error::new(
                ErrorKind::Shape,
                op,
                format!("give one start for each of the {} axes", axes.len()),
            )
            .with_inputs(&[self, start]));
        }
        Self::index_dtype(op, start)?;
        let lasts: Vec<i64> = axes
            .iter()
            .map(|&axis| i64::from(self.shape()[axis as usize] - sizes[axis as usize]))
            .collect();
        let n = [axes.len() as i32]; // at most the number of axes of an array
        start
            .reshape(&n)?
            .astype(Dtype::Int64)?
            .maximum(&Array::scalar(0i64)?)?
            .minimum(&Array::from_slice(&lasts, &n)?)?
            .astype(Dtype::Int32)
    }
}
