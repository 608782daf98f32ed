//! The inputs of operations as views, and the trait of an operation.

use std::ffi::c_void;

/// Work on float32.
pub trait Work: Send + Sync + 'static {
    /// Fills `output` from the inputs.
    ///
    /// # Safety
    /// The inputs must have the types, sizes and order of the type's documentation, in sizes that
    /// fit each other. They must exist during the call. The instruction set must be one of this
    /// processor.
    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]);

    /// Elements of the output.
    fn outputs(&self) -> usize;
}

/// A dimension, which is not negative.
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
    /// Elements outside of MLX's arrays, without strides: one part of an operation passes them to
    /// the next.
    pub fn from_slice(data: &[f32]) -> Self {
        Self {
            data: data.as_ptr().cast(),
            size: data.len(),
            ndim: 0,
            shape: [].as_ptr(),
            strides: [].as_ptr(),
        }
    }

    /// Row-contiguous elements of an array from an address on.
    ///
    /// # Safety
    /// `size` elements of the array's type must be there as long as this is used.
    pub unsafe fn from_raw(data: *const c_void, size: usize) -> Self {
        Self {
            data,
            size,
            ndim: 0,
            shape: [].as_ptr(),
            strides: [].as_ptr(),
        }
    }

    /// Elements with a layout of `ndim` axes, as C passes them.
    ///
    /// # Safety
    /// As of [`Self::strided`], where shape and strides have `ndim` elements each.
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

    /// So many elements from an address on, with a layout.
    ///
    /// # Safety
    /// As long as this is used, all of them and the layout must exist. No stride is negative, and
    /// no index leads beyond the elements.
    pub unsafe fn strided(data: *const f32, size: usize, shape: &[i32], strides: &[i64]) -> Self {
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

    /// The elements `from..from + n`, to be written.
    ///
    /// # Panics
    /// When they are not all inside, or the address is not one of a `T`.
    ///
    /// # Safety
    /// The elements must be of type `T` and belong to the caller alone while the operation runs.
    /// None of them may be in use.
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
        // SAFETY: among as many elements as MLX says, alive while the work runs, at an aligned
        // address, checked above. The rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast_mut().cast::<T>().add(from), n) }
    }

    /// The elements in their type.
    ///
    /// # Panics
    /// When the address is not one of a `T`.
    ///
    /// # Safety
    /// The elements must be of type `T`.
    pub unsafe fn as_slice<T>(&self) -> &[T] {
        if self.size == 0 {
            return &[];
        }
        self.assert_aligned::<T>();
        // SAFETY: MLX says that there are this many elements, and keeps them while the work runs.
        // The address is aligned, checked above. The type is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.data.cast(), self.size) }
    }

    /// Elements between neighbors along each axis; 0 where it would be negative, which MLX's slices
    /// of caches never are.
    pub fn strides(&self) -> Vec<usize> {
        // SAFETY: the shim passes as many as there are axes, alive for the call.
        let strides = unsafe { std::slice::from_raw_parts(self.strides, self.ndim) };
        strides
            .iter()
            .map(|&s| usize::try_from(s).unwrap_or(0))
            .collect()
    }

    /// All elements from the first to the last that an index reaches, as an address. Others of them
    /// may be written while some are read.
    ///
    /// # Panics
    /// When the address is not one of a `T`.
    ///
    /// # Safety
    /// The elements must be of type `T`.
    pub unsafe fn span<T>(&self) -> *const [T] {
        if self.size == 0 {
            return &[];
        }
        self.assert_aligned::<T>();
        // SAFETY: as many as there are axes, alive for the call.
        let shape = unsafe { std::slice::from_raw_parts(self.shape, self.ndim) };
        let last: usize = shape
            .iter()
            .zip(self.strides())
            .map(|(&d, s)| usize::try_from(d - 1).unwrap_or(0) * s)
            .sum();
        // The index of the last element is within the array's memory. So are those before it, as no
        // stride is negative.
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
            // SAFETY: one word begins there, inside the three.
            let input = unsafe { Input::from_raw(words.as_ptr().byte_add(bytes).cast(), 1) };
            let read = std::panic::catch_unwind(|| {
                // SAFETY: the elements are of this type; the address is checked.
                unsafe { input.as_slice::<u32>() }.len()
            });
            assert_eq!(read.is_ok(), fits, "{bytes}");
            let span = std::panic::catch_unwind(|| {
                // SAFETY: as above.
                unsafe { input.span::<u32>() }.len()
            });
            assert_eq!(span.is_ok(), fits, "{bytes}");
        }
    }
}
