//! The inputs of operations as views, and the trait of operations.

use std::ffi::c_void;

/// An operation whose output has elements of type `T`, by default float32.
pub trait Work<T = f32>: Send + Sync + 'static {
    /// Fills `output` from the inputs.
    ///
    /// # Safety
    /// The inputs must have the types, order and sizes that the operation's type documents, and the
    /// sizes must match. The inputs must exist during the call. This processor must support the
    /// operation's instruction set.
    unsafe fn run(&self, inputs: &[Input], output: &mut [T]);

    /// The number of output elements.
    fn outputs(&self) -> usize;
}

/// A dimension, which must not be negative.
pub fn dim(n: i32) -> usize {
    usize::try_from(n).unwrap_or(0)
}

/// The elements of one input.
#[derive(Debug, Clone, Copy)]
pub struct Input {
    data: *const c_void,
    size: usize,
    ndim: usize,
    shape: *const i32,
    strides: *const i64,
}

impl Input {
    /// A view of a slice, without strides. The stages of a fused operation pass such views to each
    /// other.
    pub fn from_slice(data: &[f32]) -> Self {
        Self {
            data: data.as_ptr().cast(),
            size: data.len(),
            ndim: 0,
            shape: [].as_ptr(),
            strides: [].as_ptr(),
        }
    }

    /// A view of `size` row-contiguous elements of an array, which begin at an address.
    ///
    /// # Safety
    /// `size` elements of the array's type must exist while the view is used.
    pub unsafe fn from_raw(data: *const c_void, size: usize) -> Self {
        Self {
            data,
            size,
            ndim: 0,
            shape: [].as_ptr(),
            strides: [].as_ptr(),
        }
    }

    /// A view of elements with a layout of `ndim` axes, as C passes it.
    ///
    /// # Safety
    /// The obligations of [`Self::strided`]. Shape and strides must also have `ndim` elements each.
    pub unsafe fn with_layout(
        data: *const c_void,
        size: usize,
        (ndim, shape, strides): (usize, *const i32, *const i64),
    ) -> Self {
        Self {
            data,
            size,
            ndim,
            shape,
            strides,
        }
    }

    /// A view of `size` elements, which begin at an address, with a layout.
    ///
    /// # Safety
    /// The elements and the layout must exist while the view is used. No stride may be negative,
    /// and no index of the shape may lead beyond the elements.
    pub unsafe fn strided<T>(data: *const T, size: usize, shape: &[i32], strides: &[i64]) -> Self {
        Self {
            data: data.cast(),
            size,
            ndim: shape.len().min(strides.len()),
            shape: shape.as_ptr(),
            strides: strides.as_ptr(),
        }
    }

    fn assert_aligned<T>(&self) {
        assert!(
            self.data.cast::<T>().is_aligned(),
            "an input at an odd address"
        );
    }

    /// The elements `from..from + n`, mutably.
    ///
    /// # Panics
    /// If they are out of range, or the address is not aligned for `T`.
    ///
    /// # Safety
    /// The elements must have type `T`. While the returned slice exists, nothing else may read or
    /// write them.
    #[allow(
        clippy::mut_from_ref,
        reason = "an input is an address, and whose memory it is the caller's promise"
    )]
    pub unsafe fn slice_mut<T>(&self, from: usize, n: usize) -> &mut [T] {
        assert!(from <= self.size && n <= self.size - from);
        if n == 0 {
            return &mut [];
        }
        self.assert_aligned::<T>();
        // SAFETY: the range is within the number of elements that MLX passes. The elements live
        // while the operation runs, and the address is aligned, as checked above. The caller
        // guarantees the type and the exclusive use.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast_mut().cast::<T>().add(from), n) }
    }

    /// The elements in their type.
    ///
    /// # Panics
    /// If the address is not aligned for `T`.
    ///
    /// # Safety
    /// The elements must be of type `T`.
    pub unsafe fn as_slice<T>(&self) -> &[T] {
        if self.size == 0 {
            return &[];
        }
        self.assert_aligned::<T>();
        // SAFETY: MLX passes this number of elements and keeps them while the operation runs. The
        // alignment of the address is checked above. The caller guarantees the type.
        unsafe { std::slice::from_raw_parts(self.data.cast(), self.size) }
    }

    /// The stride along each axis, in elements. A negative stride is returned as 0; slices of KV
    /// caches never have one.
    pub fn strides(&self) -> Vec<usize> {
        // SAFETY: the shim passes one stride per axis, and they live during the call.
        let strides = unsafe { std::slice::from_raw_parts(self.strides, self.ndim) };
        strides
            .iter()
            .map(|&s| usize::try_from(s).unwrap_or(0))
            .collect()
    }

    /// The address range from the first to the last element that an index of the shape reaches. It
    /// is a raw slice, because other threads may write some elements while this thread reads
    /// others.
    ///
    /// # Panics
    /// If the address is not aligned for `T`.
    ///
    /// # Safety
    /// The elements must be of type `T`.
    pub unsafe fn span<T>(&self) -> *const [T] {
        if self.size == 0 {
            return &[];
        }
        self.assert_aligned::<T>();
        // SAFETY: the shim passes one length per axis, and they live during the call.
        let shape = unsafe { std::slice::from_raw_parts(self.shape, self.ndim) };
        let last: usize = shape
            .iter()
            .zip(self.strides())
            .map(|(&d, s)| usize::try_from(d - 1).unwrap_or(0) * s)
            .sum();
        // The last element that an index reaches is within the array's memory. Earlier elements are
        // as well, because no stride is negative.
        std::ptr::slice_from_raw_parts(self.data.cast(), last + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_at_odd_addresses_are_refused() {
        let words = [0u32; 3];
        for (bytes, fits) in [(0, true), (1, false), (2, false), (4, true)] {
            // SAFETY: one word begins at this address, within the three words.
            let input = unsafe { Input::from_raw(words.as_ptr().byte_add(bytes).cast(), 1) };
            let read = std::panic::catch_unwind(|| {
                // SAFETY: every bit pattern is a valid `u32`. `as_slice` checks the address.
                unsafe { input.as_slice::<u32>() }.len()
            });
            assert_eq!(read.is_ok(), fits, "{bytes}");
            let span = std::panic::catch_unwind(|| {
                // SAFETY: the note above also applies to `span`.
                unsafe { input.span::<u32>() }.len()
            });
            assert_eq!(span.is_ok(), fits, "{bytes}");
        }
    }
}
