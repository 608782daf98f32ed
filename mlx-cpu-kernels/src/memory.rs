//! Working memory of kernels. When the system refuses memory, the kernel panics with
//! [`OutOfMemory`] instead of ending the process, so that only its operation fails.

/// The payload of a kernel's panic if the system refuses memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The size of the refused allocation.
    pub bytes: usize,
}

impl OutOfMemory {
    /// Panics with this payload, without a call of the panic hook.
    pub(crate) fn raise(self) -> ! {
        std::panic::resume_unwind(Box::new(self))
    }
}

/// Sets the length of a buffer. New elements are copies of `value`.
///
/// # Panics
/// With [`OutOfMemory`] as the payload, and without a call of the panic hook, when the system
/// refuses memory.
pub fn resize<T: Clone>(buffer: &mut Vec<T>, len: usize, value: T) {
    let more = len.saturating_sub(buffer.len());
    if buffer.try_reserve(more).is_err() {
        let bytes = len.saturating_mul(size_of::<T>());
        OutOfMemory { bytes }.raise();
    }
    buffer.resize(len, value);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An allocation of this size fails on every machine.
    const TOO_LARGE: usize = isize::MAX as usize / 4;

    #[test]
    fn refused_memory_is_a_panic_with_its_size() {
        let refused = OutOfMemory {
            bytes: TOO_LARGE * 4,
        };
        let mut buffer = vec![1.0f32; 3];
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            resize(&mut buffer, TOO_LARGE, 0.0);
        }));
        assert_eq!(caught.unwrap_err().downcast_ref(), Some(&refused));
        assert_eq!(buffer, [1.0; 3]);
        resize(&mut buffer, 5, 2.0);
        assert_eq!(buffer, [1.0, 1.0, 1.0, 2.0, 2.0]);
        resize(&mut buffer, 1, 0.0);
        assert_eq!(buffer, [1.0]);
    }
}
