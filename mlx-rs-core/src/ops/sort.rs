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

use crate::array::Array;
use crate::call;
use crate::error::{Error, ErrorKind, Result};

impl Array {
    /// Values in ascending order along `axis`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis.
    pub fn sort(&self, axis: i32) -> Result<Array> {
        self.axis("sort", axis)?;
        call::array("sort", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_sort_axis(out, self.raw(), axis, s) }
        })
    }

    /// The indices (`uint32`) that sort `axis` in ascending order.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there is no such axis.
    pub fn argsort(&self, axis: i32) -> Result<Array> {
        self.axis("argsort", axis)?;
        call::array("argsort", |out, s| {
            // SAFETY: all handles are live; the axis exists.
            unsafe { mlx_sys::mlx_argsort_axis(out, self.raw(), axis, s) }
        })
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

    /// Values so arranged that the one at `rank` stands where sorting would put it, lesser ones
    /// before it, greater ones behind.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the axis or the rank does not exist.
    pub fn partition(&self, rank: i32, axis: i32) -> Result<Array> {
        self.check_rank("partition", rank, axis)?;
        call::array("partition", |out, s| {
            // SAFETY: all handles are live; axis and rank exist.
            unsafe { mlx_sys::mlx_partition_axis(out, self.raw(), rank, axis, s) }
        })
    }

    /// The indices (`uint32`) that [`Array::partition`] arranges by.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the axis or the rank does not exist.
    pub fn argpartition(&self, rank: i32, axis: i32) -> Result<Array> {
        self.check_rank("argpartition", rank, axis)?;
        call::array("argpartition", |out, s| {
            // SAFETY: all handles are live; axis and rank exist.
            unsafe { mlx_sys::mlx_argpartition_axis(out, self.raw(), rank, axis, s) }
        })
    }

    /// The `k` greatest values along `axis`, in no particular order.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the axis does not exist or has fewer values.
    pub fn topk(&self, k: i32, axis: i32) -> Result<Array> {
        self.check_rank("topk", k.saturating_sub(1), axis)?;
        call::array("topk", |out, s| {
            // SAFETY: all handles are live; the axis exists and is long enough.
            unsafe { mlx_sys::mlx_topk_axis(out, self.raw(), k, axis, s) }
        })
    }

    /// [`Array::sort`] of the flattened array.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for more elements than one axis can count.
    pub fn sort_flat(&self) -> Result<Array> {
        self.count("sort")?;
        call::array("sort", |out, s| {
            // SAFETY: all handles are live; the elements can be counted.
            unsafe { mlx_sys::mlx_sort(out, self.raw(), s) }
        })
    }

    /// [`Array::argsort`] of the flattened array.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] for more elements than one axis can count.
    pub fn argsort_flat(&self) -> Result<Array> {
        self.count("argsort")?;
        call::array("argsort", |out, s| {
            // SAFETY: all handles are live; the elements can be counted.
            unsafe { mlx_sys::mlx_argsort(out, self.raw(), s) }
        })
    }

    fn check_flat_rank(&self, op: &'static str, rank: i32) -> Result<()> {
        let length = self.count(op)?;
        if (0..length).contains(&rank) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Index,
            op,
            format!("rank {rank} is not inside {length} elements"),
        ))
    }

    /// [`Array::partition`] of the flattened array.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the rank does not exist.
    pub fn partition_flat(&self, rank: i32) -> Result<Array> {
        self.check_flat_rank("partition", rank)?;
        call::array("partition", |out, s| {
            // SAFETY: all handles are live; the rank exists.
            unsafe { mlx_sys::mlx_partition(out, self.raw(), rank, s) }
        })
    }

    /// [`Array::argpartition`] of the flattened array.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the rank does not exist.
    pub fn argpartition_flat(&self, rank: i32) -> Result<Array> {
        self.check_flat_rank("argpartition", rank)?;
        call::array("argpartition", |out, s| {
            // SAFETY: all handles are live; the rank exists.
            unsafe { mlx_sys::mlx_argpartition(out, self.raw(), rank, s) }
        })
    }

    /// [`Array::topk`] of the flattened array.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when there are fewer elements, or `k` is not positive.
    pub fn topk_flat(&self, k: i32) -> Result<Array> {
        self.check_flat_rank("topk", k.saturating_sub(1))?;
        call::array("topk", |out, s| {
            // SAFETY: all handles are live; there are enough elements.
            unsafe { mlx_sys::mlx_topk(out, self.raw(), k, s) }
        })
    }
}
