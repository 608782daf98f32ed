//! The C calls of indexing. The callers' arguments come from a `Plan`, which has checked them: axes
//! exist, bounds are inside their axis, and indices are in range.

use crate::array::Array;
use crate::call::{self, ArrayVec};
use crate::error::Result;
use crate::mapped;

/// How scattered values are combined with existing values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scatter {
    Set,
    Add,
    Multiply,
    Maximum,
    Minimum,
}

pub(super) fn slice(a: &Array, start: &[i32], stop: &[i32], stride: &[i32]) -> Result<Array> {
    debug_assert!([start.len(), stop.len(), stride.len()] == [a.ndim(); 3]);
    call::array("slice", |out, s| {
        // SAFETY: the three lists have one entry per axis and lie within it; handles are live.
        unsafe {
            mlx_sys::mlx_slice(
                out,
                a.raw(),
                start.as_ptr(),
                start.len(),
                stop.as_ptr(),
                stop.len(),
                stride.as_ptr(),
                stride.len(),
                s,
            )
        }
    })
}

pub(super) fn slice_update(
    a: &Array,
    update: &Array,
    start: &[i32],
    stop: &[i32],
    stride: &[i32],
) -> Result<Array> {
    debug_assert!([start.len(), stop.len(), stride.len()] == [a.ndim(); 3]);
    call::array("slice_update", |out, s| {
        // SAFETY: the three lists have one entry per axis and lie within it; handles are live.
        unsafe {
            mlx_sys::mlx_slice_update(
                out,
                a.raw(),
                update.raw(),
                start.as_ptr(),
                start.len(),
                stop.as_ptr(),
                stop.len(),
                stride.as_ptr(),
                stride.len(),
                s,
            )
        }
    })
}

/// Removes these axes, which must have length one.
pub(super) fn squeeze(a: &Array, axes: &[i32]) -> Result<Array> {
    if axes.is_empty() {
        return Ok(a.clone());
    }
    call::array("squeeze", |out, s| {
        // SAFETY: pointer and length describe the list; the handle is live; MLX checks the axes.
        unsafe { mlx_sys::mlx_squeeze_axes(out, a.raw(), axes.as_ptr(), axes.len(), s) }
    })
}

/// Inserts axes of length one at these positions of the result.
pub(super) fn expand(a: &Array, axes: &[i32]) -> Result<Array> {
    if axes.is_empty() {
        return Ok(a.clone());
    }
    a.expand_dims_axes(axes)
}

/// For each index, gathers one element of each indexed axis and all elements of the other axes. The
/// result has the shape of the indices, followed by the shape of the array, in which indexed axes
/// have length one.
pub(super) fn gather(a: &Array, gathered: &[(i32, Array)]) -> Result<Array> {
    let axes: Vec<i32> = gathered.iter().map(|g| g.0).collect();
    let mut sizes = a.shape().to_vec();
    for &axis in &axes {
        sizes[axis as usize] = 1;
    }
    let indices = gathered.iter().map(|g| g.1.without_slope());
    let indices = indices.collect::<Result<Vec<_>>>()?;
    let indices = ArrayVec::new("gather", indices.iter().map(|i| &**i))?;
    let a = a.for_blocks(|axis| sizes[axis])?;
    call::array("gather", |out, s| {
        // SAFETY: there is one axis per index array, all axes are distinct, and sizes are inside
        // the array. Every index is in range for its axis. All handles are live.
        unsafe {
            mlx_sys::mlx_gather(
                out,
                a.raw(),
                indices.raw(),
                axes.as_ptr(),
                axes.len(),
                sizes.as_ptr(),
                sizes.len(),
                s,
            )
        }
    })
}

/// The inverse of [`gather`]. `updates` has the shape of the result of `gather`.
pub(super) fn scatter(
    a: &Array,
    gathered: &[(i32, Array)],
    updates: &Array,
    how: Scatter,
) -> Result<Array> {
    let axes: Vec<i32> = gathered.iter().map(|g| g.0).collect();
    let (a, updates) = if mapped::inside() {
        (
            &crate::ops::mapped::batch_first(a)?,
            &crate::ops::mapped::batch_first(updates)?,
        )
    } else {
        (a, updates)
    };
    let indices = gathered.iter().map(|g| match mapped::inside() {
        true => crate::ops::mapped::batch_first(&g.1),
        false => Ok(g.1.clone()),
    });
    let indices = ArrayVec::new("scatter", &indices.collect::<Result<Vec<_>>>()?)?;
    let f = match how {
        Scatter::Set => mlx_sys::mlx_scatter,
        Scatter::Add => mlx_sys::mlx_scatter_add,
        Scatter::Multiply => mlx_sys::mlx_scatter_prod,
        Scatter::Maximum => mlx_sys::mlx_scatter_max,
        Scatter::Minimum => mlx_sys::mlx_scatter_min,
    };
    let mut block = a.shape().to_vec();
    for &axis in &axes {
        block[axis as usize] = 1;
    }
    call::array("scatter", |out, s| {
        // SAFETY: there is one axis per index array, all axes are distinct, and every index is in
        // range for its axis. `updates` has the shape of a gather, which MLX checks again. All
        // handles are live.
        unsafe {
            f(
                out,
                a.raw(),
                indices.raw(),
                updates.raw(),
                axes.as_ptr(),
                axes.len(),
                s,
            )
        }
    })
    .and_then(|scattered| scattered.with_laid_out_cotangent(&block))
}
