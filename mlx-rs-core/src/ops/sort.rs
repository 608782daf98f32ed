//! Sorting and selecting by rank.
//!
//! ```
//! use mlx_rs_core::Array;
//! # fn main() -> mlx_rs_core::Result<()> {
//! let a = Array::vector(&[3.0f32, 1.0, 2.0])?;
//! assert_eq!(a.sort(-1)?.to_vec::<f32>()?, [1.0, 2.0, 3.0]);
//! assert_eq!(a.argsort(-1)?.to_vec::<u32>()?, [1, 2, 0]);
//! assert_eq!(a.topk(1, -1)?.to_vec::<f32>()?, [3.0]);
//! # Ok(()) }
//! ```

use std::borrow::Cow;

use crate::array::Array;
use crate::call;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::mapped;

impl Array {
    /// Sorts the values in ascending order along `axis`.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([3, 1, 2])?.sort(-1)?.to_vec::<i32>()?, [1, 2, 3]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis.
    #[doc(alias = "mlx_sort_axis")]
    pub fn sort(&self, axis: i32) -> Result<Array> {
        let axis = self.axis("sort", axis)? as i32; // below i32::MAX
        if self.dim(axis)? == 0 {
            // MLX would divide by the length, which is zero.
            return Ok(self.clone());
        }
        if self.dtype().is_float() {
            // MLX's gradient confuses the sort order with its inverse, so the values are gathered
            // instead.
            return self.take_along_raw(&self.argsort(axis)?, axis);
        }
        call::array("sort", |out, s| {
            // SAFETY: all handles are live. The axis exists and is not empty.
            unsafe { mlx_sys::mlx_sort_axis(out, self.raw(), axis, s) }
        })
    }

    /// The indices (`uint32`) that sort `axis` in ascending order.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([3, 1, 2])?.argsort(-1)?.to_vec::<u32>()?, [1, 2, 0]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis.
    #[doc(alias = "mlx_argsort_axis")]
    pub fn argsort(&self, axis: i32) -> Result<Array> {
        // For a negative axis, MLX would store the negative number, which is wrong under `vmap`.
        let axis = self.axis("argsort", axis)? as i32; // an axis number is at most i32::MAX
        if self.dim(axis)? == 0 {
            // MLX would divide by the length, which is zero.
            return super::zeros(self.shape(), Dtype::Uint32);
        }
        let ordered = self.ordered()?;
        call::array("argsort", |out, s| {
            // SAFETY: all handles are live. The axis exists and is not empty.
            unsafe { mlx_sys::mlx_argsort_axis(out, ordered.raw(), axis, s) }
        })
    }

    /// The values in a type that MLX orders correctly. In half precision with NaNs, MLX's indices
    /// are not sorted.
    fn ordered(&self) -> Result<Cow<'_, Array>> {
        match self.dtype() {
            Dtype::Float16 | Dtype::Bfloat16 => self.astype(Dtype::Float32).map(Cow::Owned),
            _ => Ok(Cow::Borrowed(self)),
        }
    }

    fn check_rank(&self, op: &'static str, rank: i32, axis: i32) -> Result<()> {
        let length = self.shape()[self.axis(op, axis)?];
        if (0..length).contains(&rank) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Index,
            op,
            format!("rank {rank} is not inside an axis of length {length}"),
        ))
    }

    /// Rearranges values so that the one at `rank` is at its sorted position. Lesser values come
    /// before it, and greater values after it.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([5, 1, 3, 4])?.partition(2, 0)?.at::<i32>(&[2])?, 4);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the axis or the rank does not exist.
    pub fn partition(&self, rank: i32, axis: i32) -> Result<Array> {
        self.check_rank("partition", rank, axis)?;
        // MLX's own gradient assumes another order of the values, so the values are gathered
        // instead.
        self.take_along_raw(&self.argpartition(rank, axis)?, axis)
    }

    /// The indices (`uint32`) of the values in the order of [`Array::partition`].
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([5, 1, 3, 4])?.argpartition(2, 0)?.at::<u32>(&[2])?, 3);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the axis or the rank does not exist.
    #[doc(alias = "mlx_argpartition_axis")]
    pub fn argpartition(&self, rank: i32, axis: i32) -> Result<Array> {
        self.check_rank("argpartition", rank, axis)?;
        let axis = self.axis("argpartition", axis)? as i32; // an axis number is at most i32::MAX
        if mapped::inside() {
            // Under `vmap`, MLX passes the axis as the rank, and no axis.
            return self.argsort(axis);
        }
        let ordered = self.ordered()?;
        call::array("argpartition", |out, s| {
            // SAFETY: all handles are live. The axis and the rank exist.
            unsafe { mlx_sys::mlx_argpartition_axis(out, ordered.raw(), rank, axis, s) }
        })
    }

    /// The `k` greatest values along `axis`, in no particular order.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// let two = array!([5, 1, 3, 4])?.topk(2, 0)?.sort(0)?;
    /// assert_eq!(two.to_vec::<i32>()?, [4, 5]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the axis does not exist, or when `k` is not between 1 and the
    /// axis's length.
    pub fn topk(&self, k: i32, axis: i32) -> Result<Array> {
        self.check_rank("topk", k.saturating_sub(1), axis)?;
        let length = self.dim(axis)?;
        let order = self.argpartition(length - k, axis)?;
        self.take_along_raw(&order.slice_axis(axis, length - k, length)?, axis)
    }

    /// [`Array::sort`] of the flattened array.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[3, 1], [4, 2]])?.sort_flat()?.to_vec::<i32>()?, [1, 2, 3, 4]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for more elements than `i32::MAX`.
    pub fn sort_flat(&self) -> Result<Array> {
        self.flat("sort")?.sort(0)
    }

    /// [`Array::argsort`] of the flattened array.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[3, 1], [4, 2]])?.argsort_flat()?.to_vec::<u32>()?, [1, 3, 0, 2]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for more elements than `i32::MAX`.
    pub fn argsort_flat(&self) -> Result<Array> {
        self.flat("argsort")?.argsort(0)
    }

    fn flat(&self, op: &'static str) -> Result<Array> {
        self.reshape(&[self.count(op)?])
    }

    /// [`Array::partition`] of the flattened array.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[5, 1], [3, 4]])?.partition_flat(0)?.at::<i32>(&[0])?, 1);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the rank does not exist.
    pub fn partition_flat(&self, rank: i32) -> Result<Array> {
        self.flat("partition")?.partition(rank, 0)
    }

    /// [`Array::argpartition`] of the flattened array.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[5, 1], [3, 4]])?.argpartition_flat(0)?.at::<u32>(&[0])?, 1);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the rank does not exist.
    pub fn argpartition_flat(&self, rank: i32) -> Result<Array> {
        self.flat("argpartition")?.argpartition(rank, 0)
    }

    /// [`Array::topk`] of the flattened array.
    ///
    /// ```
    /// use mlx_rs_core::array;
    /// assert_eq!(array!([[5, 1], [3, 4]])?.topk_flat(1)?.to_vec::<i32>()?, [5]);
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Index`] unless `k` is from 1 to the number of elements; [`ErrorKind::Shape`]
    /// for more elements than `i32::MAX`.
    pub fn topk_flat(&self, k: i32) -> Result<Array> {
        self.flat("topk")?.topk(k, 0)
    }
}
