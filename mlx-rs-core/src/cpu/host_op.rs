//! Adds a Rust function to MLX's graph as an operation.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use mlx_cpu_kernels::{Input, Once, Work, drop_payload};
use mlx_sys as sys;

use crate::array::Array;
use crate::call;
use crate::closure;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::failure;
use crate::ops::align_of_items;
use crate::stream;

/// The kind of an operation, which determines its gradient and `vmap`.
#[derive(Debug, Clone, Copy)]
pub(super) enum OpKind {
    /// Any other operation, without gradient and `vmap`.
    Opaque,
    /// The product `x w^T` of inputs `x [.., k]` and `w [n, k]`.
    DenseProduct,
    /// The product `x w^T` of an input `x [.., k]` with a matrix `[rows, k]`. The other inputs are
    /// the parts of the matrix, quantized in affine mode and interleaved (`quantized.rs`).
    QuantizedProduct {
        rows: i32,
        group_size: i32,
        bits: i32,
    },
}

impl OpKind {
    fn raw(self) -> sys::rust_mlx_meaning {
        match self {
            OpKind::Opaque => sys::rust_mlx_meaning {
                kind: sys::RUST_MLX_OPAQUE,
                rows: 0,
                group_size: 0,
                bits: 0,
            },
            OpKind::DenseProduct => sys::rust_mlx_meaning {
                kind: sys::RUST_MLX_DENSE_PRODUCT,
                rows: 0,
                group_size: 0,
                bits: 0,
            },
            OpKind::QuantizedProduct {
                rows,
                group_size,
                bits,
            } => sys::rust_mlx_meaning {
                kind: sys::RUST_MLX_QUANTIZED_PRODUCT,
                rows,
                group_size,
                bits,
            },
        }
    }
}

/// The element type of an output.
pub(super) trait OutputElement: Copy + 'static {
    const DTYPE: Dtype;
    /// The value that fills an output after a failure.
    const NAN: Self;
}

impl OutputElement for f32 {
    const DTYPE: Dtype = Dtype::Float32;
    const NAN: Self = f32::NAN;
}

/// The bits of float16.
impl OutputElement for u16 {
    const DTYPE: Dtype = Dtype::Float16;
    const NAN: Self = 0x7e00;
}

/// The words of packed KV caches. In an output filled with `NAN`, the scales are NaN.
impl OutputElement for u32 {
    const DTYPE: Dtype = Dtype::Uint32;
    const NAN: Self = f32::NAN.to_bits();
}

/// A view of all elements of an evaluated, row-contiguous array.
///
/// # Errors
/// When the array cannot be evaluated, or is not row-contiguous.
///
/// # Safety
/// The array must live as long as the input is used.
pub(super) unsafe fn input_of(array: &Array) -> Result<Input> {
    let (owner, data, size) = array.row_major("cpu::Matrix")?;
    if owner.is_some() {
        let message = "the array is not row-major";
        return Err(Error::new(ErrorKind::Mlx, "cpu::Matrix", message));
    }
    if !data.addr().is_multiple_of(align_of_items(array.dtype())) {
        let message = "the memory of the array is not aligned for its type";
        return Err(Error::new(ErrorKind::Mlx, "cpu::Matrix", message));
    }
    // SAFETY: the array has this number of elements at the address, which is aligned for their
    // type, as checked above. The caller keeps the array alive.
    Ok(unsafe { Input::from_raw(data.cast(), size) })
}

/// Like [`add`], for work that reads strides. Inputs from index `first` on may have any layout
/// whose last axis is contiguous.
///
/// # Errors
/// As [`add`].
pub(super) fn add_strided<W: Work>(
    op: &'static str,
    work: W,
    inputs: &[&Array],
    first: usize,
    shape: &[i32],
) -> Result<Array> {
    add_with::<f32, W>(op, OpKind::Opaque, work, inputs, shape, (first, false))
}

/// Adds an operation, and returns its output: float32 of `shape`. The work receives row-contiguous
/// inputs; other inputs are copied before it runs.
///
/// # Errors
/// MLX's message when the current stream is not on the CPU.
pub(super) fn add<W: Work>(
    op: &'static str,
    meaning: OpKind,
    work: W,
    inputs: &[&Array],
    shape: &[i32],
) -> Result<Array> {
    add_with::<f32, W>(op, meaning, work, inputs, shape, (usize::MAX, false))
}

/// Like [`add_strided`], for work that writes to memory other than its output. Transforms may run
/// an operation of a graph repeatedly, such as `compile` with each call. Such work runs only the
/// first time. In later runs, the output is NaN.
///
/// An operation stays on its stream, which runs one operation at a time. A later run does nothing,
/// but it comes after the first run. So an operation that depends on any run comes after the work.
///
/// # Errors
/// As [`add`].
pub(super) fn add_once<W: Work>(
    op: &'static str,
    work: W,
    inputs: &[&Array],
    first: usize,
    shape: &[i32],
) -> Result<Array> {
    add_once_as::<f32, W>(op, work, inputs, first, shape)
}

/// Like [`add_once`], for an output with elements of type `T`.
///
/// # Errors
/// As [`add`].
pub(super) fn add_once_as<T: OutputElement, W: Work<T>>(
    op: &'static str,
    work: W,
    inputs: &[&Array],
    first: usize,
    shape: &[i32],
) -> Result<Array> {
    let work = RunOnce {
        once: Once::default(),
        work,
    };
    add_with::<T, _>(op, OpKind::Opaque, work, inputs, shape, (first, false))
}

struct RunOnce<W> {
    once: Once,
    work: W,
}

impl<T: OutputElement, W: Work<T>> Work<T> for RunOnce<W> {
    fn outputs(&self) -> usize {
        self.work.outputs()
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [T]) {
        if self.once.first() {
            // SAFETY: the caller guarantees the inputs.
            unsafe { self.work.run(inputs, output) };
        } else {
            output.fill(T::NAN);
        }
    }
}

/// Like [`add`], with an output that starts as a copy of the first input. If nothing else needs
/// that input's memory, the output reuses it. The work writes only elements that change, and must
/// not read its first input.
///
/// # Errors
/// As [`add`].
pub(super) fn add_in_place<T: OutputElement, W: Work<T>>(
    op: &'static str,
    work: W,
    inputs: &[&Array],
    shape: &[i32],
) -> Result<Array> {
    add_with::<T, W>(op, OpKind::Opaque, work, inputs, shape, (usize::MAX, true))
}

fn add_with<T: OutputElement, W: Work<T>>(
    op: &'static str,
    meaning: OpKind,
    work: W,
    inputs: &[&Array],
    shape: &[i32],
    (first_strided, in_place): (usize, bool),
) -> Result<Array> {
    // The work writes the number of elements that it declares, whatever the size of the memory. So
    // both must match.
    let size = shape.iter().try_fold(1usize, |size, &n| {
        usize::try_from(n).ok().and_then(|n| size.checked_mul(n))
    });
    if size.is_none_or(|size| size != work.outputs()) {
        let message = format!("an output of shape {shape:?} does not fit the result");
        return Err(Error::new(ErrorKind::Shape, op, message).with_inputs(inputs));
    }
    let raw: Vec<_> = inputs.iter().map(|a| a.raw()).collect();
    call::array(op, |out, s| {
        let stream = match stream::index_of(s) {
            Ok(stream) => stream,
            Err(_) => return 1,
        };
        let payload = Box::into_raw(Box::new(Payload { work, op, stream }));
        // SAFETY: handles, shape and functions are valid for the call. The payload is a box of
        // `Payload<W>` that is released here. `free::<W>` reclaims it exactly once in every case.
        unsafe {
            sys::rust_mlx_host_op(
                out,
                raw.as_ptr(),
                raw.len(),
                shape.as_ptr(),
                shape.len(),
                T::DTYPE.raw(),
                meaning.raw(),
                run::<T, W>,
                payload.cast(),
                free::<W>,
                first_strided,
                in_place,
                s,
            )
        }
    })
    .map_err(|e| e.with_inputs(inputs))
}

/// A work, with the operation and the stream that an error names.
struct Payload<W> {
    work: W,
    op: &'static str,
    /// The index of the operation's stream.
    stream: i32,
}

/// Called by MLX's stream thread.
unsafe extern "C" fn run<T: OutputElement, W: Work<T>>(
    payload: *const c_void,
    inputs: *const sys::rust_mlx_view,
    num_inputs: usize,
    output: *mut c_void,
) {
    // SAFETY: the payload is the box that `add` released. It lives as long as the operation.
    let Payload { work, op, stream } = unsafe { &*payload.cast::<Payload<W>>() };
    let views = if num_inputs == 0 {
        // The address may be null for an empty list.
        &[]
    } else {
        // SAFETY: the shim passes this number of views, which live during this call.
        unsafe { std::slice::from_raw_parts(inputs, num_inputs) }
    };
    let views: Vec<Input> = (views.iter())
        .map(|v| {
            // SAFETY: elements and layout live during this call.
            unsafe { Input::with_layout(v.data, v.size, (v.ndim, v.shape, v.strides)) }
        })
        .collect();
    // SAFETY: the output is memory that the shim allocated in the shape given to `add`. For
    // in-place work it is the memory of the first input, which the work does not read. Nothing else
    // uses this memory. The work writes elements before anything reads them, and every bit pattern
    // is a valid element.
    let output = unsafe { std::slice::from_raw_parts_mut(output.cast::<T>(), work.outputs()) };
    // A panic must not cross into C++. Instead the output is filled with NaN, which cannot be
    // mistaken for a result. The evaluation that waits for the stream returns an error.
    // SAFETY: the caller of `add` guarantees that the inputs match the work.
    let run = AssertUnwindSafe(|| unsafe { work.run(&views, output) });
    if let Err(panic) = catch_unwind(run) {
        output.fill(T::NAN);
        failure::record(*stream, op, &*panic);
        drop_payload(panic);
    }
}

unsafe extern "C" fn free<W>(payload: *mut c_void) {
    // SAFETY: this is the box that `add` released, and the shim calls this function once.
    closure::free(unsafe { Box::from_raw(payload.cast::<Payload<W>>()) });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Device, Stream};

    /// Doubles its input, but panics if the first element is 0.
    struct Touchy {
        _alive: Arc<()>,
    }

    impl Work for Touchy {
        unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
            // SAFETY: the tests pass float32.
            let x = unsafe { inputs[0].as_slice::<f32>() };
            for (x, y) in x.iter().zip(output.iter_mut()) {
                *y = 2.0 * x;
            }
            assert!(x[0] != 0.0, "a touchy kernel");
        }

        fn outputs(&self) -> usize {
            3
        }
    }

    /// A panic payload whose destructor panics.
    struct Relentless;

    impl Drop for Relentless {
        fn drop(&mut self) {
            std::panic::panic_any("again");
        }
    }

    struct Panics;

    impl Work for Panics {
        unsafe fn run(&self, _: &[Input], _: &mut [f32]) {
            std::panic::panic_any(Relentless);
        }

        fn outputs(&self) -> usize {
            3
        }
    }

    /// Needs more working memory than any machine has.
    struct Refused;

    impl Refused {
        fn added(self) -> Array {
            let x = Array::from_slice(&[1.0f32], &[1]).unwrap();
            add("refused", OpKind::Opaque, self, &[&x], &[1]).unwrap()
        }
    }

    impl Work for Refused {
        unsafe fn run(&self, _: &[Input], _: &mut [f32]) {
            mlx_cpu_kernels::resize(&mut Vec::new(), isize::MAX as usize / 8, 0.0f32);
        }

        fn outputs(&self) -> usize {
            1
        }
    }

    #[test]
    fn payloads_that_panic_do_not_cross_into_c() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let x = Array::from_slice(&[1.0f32], &[1]).unwrap();
            let y = add("touchy", OpKind::Opaque, Panics, &[&x], &[3]).unwrap();
            let error = y.to_vec::<f32>().unwrap_err().to_string();
            assert_eq!(error, "touchy: a kernel panicked: without a message");
            assert!(y.to_vec::<f32>().unwrap().iter().all(|y| y.is_nan()));
        });
    }

    /// No operation of this crate makes an unaligned array, but one of MLX's operations might.
    #[test]
    fn inputs_at_odd_addresses_are_copied() {
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let values = [1.0f32, 2.0, 3.0];
            let mut bytes = vec![0u8];
            bytes.extend(values.iter().flat_map(|v| v.to_ne_bytes()));
            let all = Array::from_slice(&bytes, &[13]).unwrap();
            let odd = || {
                let part = all.slice_axis(0, 1, 13).unwrap();
                part.viewed(Dtype::Float32).unwrap()
            };
            // SAFETY: the array lives during the call, which must fail.
            assert!(unsafe { input_of(&odd()) }.is_err());
            assert_eq!(odd().to_vec::<f32>().unwrap(), values);
            let work = || Touchy {
                _alive: Arc::default(),
            };
            let plain = add("touchy", OpKind::Opaque, work(), &[&odd()], &[3]).unwrap();
            assert_eq!(plain.to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
            let strided = add_strided("touchy", work(), &[&odd()], 0, &[3]).unwrap();
            assert_eq!(strided.to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
            // The result would reuse the memory of `x`, because nothing else uses that memory.
            let x = odd().add(&Array::scalar(0.0f32).unwrap()).unwrap();
            let in_place = add_in_place::<f32, _>("touchy", Untouched, &[&x], &[3]).unwrap();
            assert_eq!(in_place.to_vec::<f32>().unwrap(), values);
            let in_place = add_in_place::<f32, _>("touchy", Untouched, &[&odd()], &[3]).unwrap();
            assert_eq!(in_place.to_vec::<f32>().unwrap(), values);
        });
    }

    /// Leaves its output unchanged.
    struct Untouched;

    impl Work for Untouched {
        unsafe fn run(&self, _: &[Input], output: &mut [f32]) {
            assert!(output.as_ptr().is_aligned());
        }

        fn outputs(&self) -> usize {
            3
        }
    }

    #[test]
    fn outputs_have_room_for_what_is_written() {
        let x = Array::from_slice(&[1.0f32], &[1]).unwrap();
        for shape in [&[2][..], &[4], &[0, 3], &[-1, -3], &[i32::MAX; 3], &[]] {
            let work = Touchy {
                _alive: Arc::default(),
            };
            let e = add("touchy", OpKind::Opaque, work, &[&x], shape).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Shape, "{shape:?}");
        }
    }

    #[test]
    fn work_that_panics_leaves_no_numbers_and_the_rest_goes_on() {
        let alive = Arc::new(());
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let run = |x: [f32; 3]| {
                let x = Array::from_slice(&x, &[3]).unwrap();
                let work = Touchy {
                    _alive: Arc::clone(&alive),
                };
                add("touchy", OpKind::Opaque, work, &[&x], &[3]).unwrap()
            };
            let values = |y: &Array| y.to_vec::<f32>();
            assert_eq!(values(&run([1.0, 2.0, 3.0])).unwrap(), [2.0, 4.0, 6.0]);
            let y = run([0.0, 2.0, 3.0]);
            let error = values(&y).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mlx);
            assert_eq!(
                error.to_string(),
                "touchy: a kernel panicked: a touchy kernel"
            );
            assert!(values(&y).unwrap().iter().all(|y| y.is_nan()));
            assert_eq!(values(&run([4.0, 5.0, 6.0])).unwrap(), [8.0, 10.0, 12.0]);
            // The evaluation that waits for the result fails, even if another one started the work.
            let y = run([0.0, 2.0, 3.0]);
            let started = crate::async_eval([&y]);
            assert!(started.and_then(|()| y.eval()).is_err());
            let large = Refused.added();
            assert_eq!(large.eval().unwrap_err().kind(), ErrorKind::OutOfMemory);
        });
        // MLX's threads may keep a node slightly longer than its result.
        for _ in 0..1000 {
            if Arc::strong_count(&alive) == 1 {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(Arc::strong_count(&alive), 1, "payloads are freed");
    }
}
