//! Arrays that take ownership of a Rust vector. MLX uses the vector's memory if the device can, and
//! reports when it no longer needs the memory. The vector is freed exactly once, on any thread.

use std::sync::OnceLock;

use super::Array;
use crate::call;
use crate::device::metal_is_available;
use crate::dtype::Element;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;
use crate::quirks::Facts;

impl Array {
    /// Makes an array of `shape` that takes ownership of `values` (row-major). On Metal, vectors
    /// that start at a page boundary, as large ones do, are not copied, because the GPU uses host
    /// memory. Other devices copy once. macOS with MLX up to 0.30.6 also copies once, because that
    /// version uses the memory of such vectors after they are freed.
    ///
    /// ```
    /// # fn main() -> mlx_rs_core::Result<()> {
    /// let a = mlx_rs_core::Array::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// assert_eq!(a.shape(), [2, 2]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when a dimension is negative, or the shape does not have exactly
    /// `values.len()` elements. The vector is then dropped.
    #[doc(alias = "mlx_array_new_data_managed_payload")]
    pub fn from_vec<T: Element>(values: Vec<T>, shape: &[i32]) -> Result<Self> {
        if memory::checked_bytes(shape, 1) != Some(values.len() as u64) {
            return Err(Error::new(
                ErrorKind::Shape,
                "from_vec",
                format!(
                    "shape {shape:?} does not hold exactly the {} values given",
                    values.len()
                ),
            ));
        }
        if values.is_empty() || !device_can_take_over() {
            return Self::from_slice(&values, shape);
        }
        take_over(values, shape)
    }
}

/// Whether MLX can use the vector's memory. It is determined once. MLX's allocators for the CPU and
/// for CUDA copy the buffer and then release it. There, passing ownership would cost more than a
/// copy.
fn device_can_take_over() -> bool {
    static METAL: OnceLock<bool> = OnceLock::new();
    // The lock is always taken before `METAL`, because the lock's holder may also wait for `METAL`.
    let _guard = call::lock();
    *METAL.get_or_init(|| metal_is_available() && Facts::of_machine().may_take_over())
}

/// mlx-c 0.4 has no constructor that takes ownership of memory, so this copies.
#[cfg(not(mlx_c_0_5))]
fn take_over<T: Element>(values: Vec<T>, shape: &[i32]) -> Result<Array> {
    Array::from_slice(&values, shape)
}

#[cfg(mlx_c_0_5)]
use owned::take_over;

#[cfg(mlx_c_0_5)]
mod owned {
    use std::ffi::c_void;
    use std::mem::ManuallyDrop;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use mlx_sys as sys;

    use crate::array::Array;
    use crate::call;
    use crate::dtype::Element;
    use crate::error::{Error, ErrorKind, Result};

    /// A vector split into its parts. MLX may write to its elements, so no reference to them may
    /// exist.
    struct Payload<T: Element> {
        start: *mut T,
        length: usize,
        capacity: usize,
    }

    // SAFETY: the payload owns plain values, which any thread may free, and only frees them.
    unsafe impl<T: Element> Send for Payload<T> {}
    // SAFETY: a shared payload gives no access to the elements.
    unsafe impl<T: Element> Sync for Payload<T> {}

    impl<T: Element> Payload<T> {
        fn new(values: Vec<T>) -> Self {
            let mut values = ManuallyDrop::new(values);
            Self {
                start: values.as_mut_ptr(),
                length: values.len(),
                capacity: values.capacity(),
            }
        }
    }

    impl<T: Element> Drop for Payload<T> {
        fn drop(&mut self) {
            // SAFETY: pointer, length and capacity come from the vector that `new` took apart. Only
            // this call frees the vector.
            drop(unsafe { Vec::from_raw_parts(self.start, self.length, self.capacity) });
            #[cfg(test)]
            tests::FREED.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    }

    /// MLX calls this once, on any thread, when it no longer uses the memory.
    extern "C" fn release<T: Element>(payload: *mut c_void) {
        // Freeing plain values does not panic. If it did, the panic must not cross into C.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: `payload` comes from `Arc::into_raw` in `take_over`. MLX calls this function
            // once, so its reference is released once.
            drop(unsafe { Arc::from_raw(payload.cast::<Payload<T>>()) });
        }));
    }

    pub(super) fn take_over<T: Element>(values: Vec<T>, shape: &[i32]) -> Result<Array> {
        let op = "from_vec";
        let ndim = i32::try_from(shape.len())
            .map_err(|_| Error::new(ErrorKind::Shape, op, "more axes than MLX can count"))?;
        // There are two references, one here and one for MLX. After a failure, the count shows
        // whether MLX released its reference.
        let ours = Arc::new(Payload::new(values));
        let theirs = Arc::into_raw(Arc::clone(&ours));
        call::adopt(op, |out| {
            // SAFETY: the shape has `ndim` entries whose product is the vector's length, so MLX
            // stays inside the elements. `T` is the Rust type of the dtype. The elements live until
            // `release` drops MLX's reference and no reference remains here.
            let raw = unsafe {
                sys::mlx_array_new_data_managed_payload(
                    ours.start.cast(),
                    shape.as_ptr(),
                    ndim,
                    T::DTYPE.raw(),
                    theirs.cast_mut().cast(),
                    Some(release::<T>),
                )
            };
            // SAFETY: `out` is writable; ownership of the new handle moves into it.
            unsafe { *out = raw };
            if raw.ctx.is_null() && Arc::strong_count(&ours) == 2 {
                // SAFETY: MLX failed before it took ownership of the memory, so it never calls
                // `release`.
                drop(unsafe { Arc::from_raw(theirs) });
            }
            i32::from(raw.ctx.is_null())
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use std::sync::atomic::{AtomicUsize, Ordering};

        /// The number of freed vectors, for a test.
        pub(super) static FREED: AtomicUsize = AtomicUsize::new(0);

        #[test]
        fn a_vector_is_freed_exactly_once() {
            // Under the lock, no concurrent test drops an array.
            let _guard = call::lock();
            let before = FREED.load(Ordering::SeqCst);
            let array = take_over(vec![1.5f32; 1000], &[10, 100]).unwrap();
            let twin = array.clone();
            let sum = array.sum(crate::All, false).unwrap();
            drop(array);
            assert_eq!(sum.item::<f32>().unwrap(), 1500.0);
            assert_eq!(twin.data::<f32>().unwrap()[999], 1.5);
            drop((twin, sum));
            crate::synchronize().unwrap();
            assert_eq!(FREED.load(Ordering::SeqCst), before + 1);
        }
    }
}
