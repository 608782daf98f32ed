//! Copies keys and values from one cache to another, without arithmetic. `kv_write.rs` writes new
//! keys and values, with norm and rotation.

use crate::partition::{SharedOutput, parallel_ranges};
use crate::work::{Input, dim};

/// Keys or values of a layer, `[heads, capacity, width]`, and the number of positions to copy.
#[derive(Debug, Clone, Copy)]
pub struct KvPlane {
    heads: usize,
    capacity: usize,
    width: usize,
    filled: usize,
}

impl KvPlane {
    /// A plane of an array with the shape `[1, heads, capacity, width]`.
    pub fn new(&[_, heads, capacity, width]: &[i32; 4], filled: i32) -> Self {
        Self {
            heads: dim(heads),
            capacity: dim(capacity),
            width: dim(width),
            filled: dim(filled),
        }
    }

    /// The number of elements of a plane.
    pub fn elements(self) -> usize {
        self.heads * self.capacity * self.width
    }

    /// Copies the first positions of each array to consecutive planes.
    ///
    /// # Safety
    /// The arrays `from` must have elements of type `T`, `[1, heads, .., width]`, with at least as
    /// many positions. Nothing may write them during the call. `output` must have one plane per
    /// array.
    pub unsafe fn copy<T: Copy + Send + Sync>(self, from: &[Input], output: &mut [T]) {
        let Self {
            heads,
            capacity,
            width,
            filled,
        } = self;
        if filled == 0 || from.is_empty() {
            return;
        }
        // SAFETY: the caller guarantees type, shape and the absence of writes.
        let from: Vec<(&[T], Vec<usize>)> = (from.iter())
            .map(|input| (unsafe { &*input.span::<T>() }, input.strides()))
            .collect();
        // Contiguous positions are copied in a single call per head.
        let contiguous = from.iter().all(|(_, strides)| strides[2] == width);
        let run = if contiguous { filled } else { 1 };
        let runs = filled / run;
        let out = SharedOutput::new(output);
        // The first write to fresh memory is slow (page faults), so threads share the work.
        let units = from.len() * heads * runs;
        parallel_ranges(units, units * run * width, &|first, end| {
            for unit in first..end {
                let (plane, i) = (unit / runs / heads, unit % runs * run);
                let h = unit / runs % heads;
                let (data, strides) = &from[plane];
                let (start, n) = (h * strides[1] + i * strides[2], run * width);
                // SAFETY: each position of each head of a plane belongs to only one unit.
                let to = unsafe { out.slice_mut(((plane * heads + h) * capacity + i) * width, n) };
                to.copy_from_slice(&data[start..start + n]);
            }
        });
    }
}
