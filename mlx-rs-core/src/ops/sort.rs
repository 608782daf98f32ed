//! Sorting and selecting by rank.

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
}
