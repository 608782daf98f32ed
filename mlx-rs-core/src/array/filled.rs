//! Arrays whose values several threads write directly into the array's memory. So a weight that is
//! read from a file needs no second copy.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use mlx_sys as sys;
use parking_lot::Mutex;

use super::Array;
use crate::call;
use crate::device::cuda_is_available;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

/// The description of an array for [`fill_arrays`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkedArray {
    /// The shape of the array.
    pub shape: Vec<i32>,
    /// The type of the elements: integers of up to 32 bits, or floats of 16 or 32 bits.
    pub dtype: Dtype,
    /// The number of bytes per chunk, a multiple of the element size. The last chunk may be
    /// shorter.
    pub chunk_bytes: usize,
}

/// Makes evaluated arrays. At most `threads` threads process the chunks. For each chunk, a thread
/// calls `fill` with its own state (made by `start`), the chunk's index, and the chunk's bytes in
/// each array. The bytes are initially zero, in native byte order, and row-major. After an error no
/// further chunk begins.
///
/// ```
/// use mlx_rs_core::{ChunkedArray, Dtype, fill_arrays};
/// let parts = [ChunkedArray { shape: vec![2, 3], dtype: Dtype::Uint8, chunk_bytes: 3 }];
/// let filled = fill_arrays(&parts, 2, || (), |(), row, chunks| {
///     chunks[0].fill(row as u8 + 1);
///     Ok::<_, String>(())
/// })?;
/// assert_eq!(filled.unwrap()[0].to_vec::<u8>()?, [1, 1, 1, 2, 2, 2]);
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Shape`] when the arrays differ in their number of chunks; [`ErrorKind::Dtype`] for
/// unsupported types; [`ErrorKind::OutOfMemory`] beyond the budget. The inner error is that of
/// `fill` for the first chunk that failed.
///
/// # Panics
/// When `fill` or `start` panics.
pub fn fill_arrays<S, E: Send>(
    parts: &[ChunkedArray],
    threads: usize,
    start: impl Fn() -> S + Sync,
    fill: impl Fn(&mut S, usize, &mut [&mut [u8]]) -> Result<(), E> + Sync,
) -> Result<Result<Vec<Array>, E>> {
    let mut buffers = buffers_of(parts)?;
    let regions: Vec<Region> = buffers.iter_mut().map(Buffer::region).collect();
    // SAFETY: the regions are those of `buffers`, which outlive the call.
    if let Err(e) = unsafe { fill_regions(&regions, threads, start, fill) } {
        return Ok(Err(e));
    }
    let arrays = buffers.into_iter().map(Buffer::into_array);
    arrays.collect::<Result<Vec<_>>>().map(Ok)
}

/// Arrays whose values are written later, and their memory for [`fill_regions`]. No value may be
/// read before. `None` on a device whose memory the host cannot write.
///
/// # Errors
/// As [`fill_arrays`].
pub(crate) fn unfilled_arrays(parts: &[ChunkedArray]) -> Result<Option<(Vec<Array>, Vec<Region>)>> {
    let mut buffers = buffers_of(parts)?;
    let in_place = |buffer: &Buffer<'_>| matches!(buffer.memory, Memory::Array(_));
    if !buffers.iter().all(in_place) {
        return Ok(None);
    }
    let regions = buffers.iter_mut().map(Buffer::region).collect();
    let arrays: Result<Vec<Array>> = buffers.into_iter().map(Buffer::into_array).collect();
    Ok(Some((arrays?, regions)))
}

/// The buffers of arrays that have the same number of chunks.
fn buffers_of(parts: &[ChunkedArray]) -> Result<Vec<Buffer<'_>>> {
    let buffers = parts.iter().map(Buffer::new).collect::<Result<Vec<_>>>()?;
    let chunks = buffers.first().map_or(0, Buffer::chunks);
    if buffers.iter().any(|buffer| buffer.chunks() != chunks) {
        let message = "the arrays have different numbers of chunks";
        return Err(Error::new(ErrorKind::Shape, OP, message));
    }
    Ok(buffers)
}

/// Writes the chunks of all regions, as [`fill_arrays`] describes.
///
/// # Safety
/// The memory of the regions must be live, and no other code may use it during the call.
pub(crate) unsafe fn fill_regions<S, E: Send>(
    regions: &[Region],
    threads: usize,
    start: impl Fn() -> S + Sync,
    fill: impl Fn(&mut S, usize, &mut [&mut [u8]]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let chunks = regions.first().map_or(0, Region::chunks);
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let error: Mutex<Option<(usize, E)>> = Mutex::new(None);
    let work = || {
        let mut state = None;
        while !failed.load(Ordering::Relaxed) {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                break;
            }
            let mut slices: Vec<&mut [u8]> = regions
                .iter()
                // SAFETY: the counter returns each index only once. The caller guarantees the rest.
                .map(|region| unsafe { region.chunk(chunk) })
                .collect();
            let state = state.get_or_insert_with(&start);
            if let Err(e) = fill(state, chunk, &mut slices) {
                failed.store(true, Ordering::Relaxed);
                let mut first = error.lock();
                if first.as_ref().is_none_or(|(earlier, _)| chunk < *earlier) {
                    *first = Some((chunk, e));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(chunks) {
            // If a thread cannot be started, the other threads and the caller process its chunks.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    error.into_inner().map_or(Ok(()), |(_, e)| Err(e))
}

const OP: &str = "fill_arrays";

/// The memory of an unfinished array.
enum Memory {
    /// The array's own memory. There is exactly one handle, which is not exposed before the values
    /// are complete.
    Array(Array),
    /// Host memory, for a device whose memory the host cannot write. It consists of words, so that
    /// it is aligned.
    Host(Vec<u64>),
}

struct Buffer<'a> {
    part: &'a ChunkedArray,
    memory: Memory,
    nbytes: usize,
}

impl<'a> Buffer<'a> {
    fn new(part: &'a ChunkedArray) -> Result<Self> {
        let ChunkedArray {
            shape,
            dtype,
            chunk_bytes,
        } = part;
        let known = matches!(
            dtype,
            Dtype::Uint8
                | Dtype::Uint16
                | Dtype::Uint32
                | Dtype::Int8
                | Dtype::Int16
                | Dtype::Int32
                | Dtype::Float16
                | Dtype::Bfloat16
                | Dtype::Float32
        );
        if !known {
            let message = format!("{dtype} is not supported here");
            return Err(Error::new(ErrorKind::Dtype, OP, message));
        }
        if *chunk_bytes == 0 || !chunk_bytes.is_multiple_of(dtype.size()) {
            let message = format!("chunks of {chunk_bytes} bytes are no whole elements of {dtype}");
            return Err(Error::new(ErrorKind::Shape, OP, message));
        }
        let nbytes = memory::checked_bytes(shape, dtype.size())
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(|| Error::new(ErrorKind::Shape, OP, format!("{shape:?} is no shape")))?;
        if nbytes as u64 > memory::budget() {
            let message = format!(
                "an array of shape {shape:?} ({dtype}) needs {nbytes} bytes, more than the budget \
                 of {} bytes",
                memory::budget()
            );
            return Err(Error::new(ErrorKind::OutOfMemory, OP, message));
        }
        let memory = if nbytes == 0 || cuda_is_available() {
            Memory::Host(vec![0; nbytes.div_ceil(size_of::<u64>())])
        } else {
            Memory::Array(call::adopt(OP, |out| {
                // SAFETY: `out` is writable. Pointer and length describe the shape.
                unsafe {
                    sys::rust_mlx_uninitialized(out, shape.as_ptr(), shape.len(), dtype.raw())
                }
            })?)
        };
        Ok(Self {
            part,
            memory,
            nbytes,
        })
    }

    fn chunks(&self) -> usize {
        self.nbytes.div_ceil(self.part.chunk_bytes)
    }

    fn region(&mut self) -> Region {
        let first = match &mut self.memory {
            // SAFETY: the handle is live, and its array has data. The accessor only returns the
            // address, whatever the type.
            Memory::Array(array) => unsafe { sys::mlx_array_data_uint8(array.raw()) }.cast_mut(),
            Memory::Host(words) => words.as_mut_ptr().cast(),
        };
        advise_huge_pages(first, self.nbytes);
        Region {
            first,
            nbytes: self.nbytes,
            chunk_bytes: self.part.chunk_bytes,
        }
    }

    fn into_array(self) -> Result<Array> {
        let words = match self.memory {
            Memory::Array(array) => return Ok(array),
            Memory::Host(words) => words,
        };
        let ChunkedArray { shape, dtype, .. } = self.part;
        let ndim = i32::try_from(shape.len())
            .map_err(|_| Error::new(ErrorKind::Shape, OP, "more axes than MLX can count"))?;
        call::adopt(OP, |out| {
            // SAFETY: the words contain the `nbytes` bytes of the shape, which MLX copies. Every
            // bit pattern is a valid value of the type.
            let raw = unsafe {
                sys::mlx_array_new_data(words.as_ptr().cast(), shape.as_ptr(), ndim, dtype.raw())
            };
            // SAFETY: `out` is writable. Ownership of the new handle moves into it.
            unsafe { *out = raw };
            i32::from(raw.ctx.is_null())
        })
    }
}

/// The memory of a buffer, while threads fill it.
#[derive(Debug)]
pub(crate) struct Region {
    first: *mut u8,
    nbytes: usize,
    chunk_bytes: usize,
}

// SAFETY: the caller of `Region::chunk` guarantees that only one thread uses each byte.
unsafe impl Send for Region {}
// SAFETY: see the note for `Send`.
unsafe impl Sync for Region {}

impl Region {
    fn chunks(&self) -> usize {
        self.nbytes.div_ceil(self.chunk_bytes)
    }

    /// The bytes of chunk `i`, all zero.
    ///
    /// # Safety
    /// The buffer must outlive the slice, and each chunk may be requested only once.
    #[allow(
        clippy::mut_from_ref,
        reason = "each chunk has bytes of its own, asked for once"
    )]
    unsafe fn chunk(&self, i: usize) -> &mut [u8] {
        let from = (i * self.chunk_bytes).min(self.nbytes);
        let length = self.chunk_bytes.min(self.nbytes - from);
        // SAFETY: the buffer has `nbytes` bytes, and `from + length` does not exceed that. No other
        // reference to this chunk exists. Zeros are written before the slice is made, because fresh
        // memory is uninitialized. The zeros stay in the processor's cache until `fill` overwrites
        // them.
        unsafe {
            let first = self.first.add(from);
            first.write_bytes(0, length);
            std::slice::from_raw_parts_mut(first, length)
        }
    }
}

/// Requests large pages from the system. The first access then maps 2 MiB instead of 4 KiB, and
/// multiplications with the matrix have fewer TLB misses. All of the memory is written, so no large
/// page is wasted.
fn advise_huge_pages(first: *mut u8, nbytes: usize) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        const LEAST: usize = 4 << 20;
        if nbytes < LEAST {
            return;
        }
        let skipped = first.align_offset(PAGE);
        let length = nbytes.saturating_sub(skipped) / PAGE * PAGE;
        // SAFETY: the range consists of whole pages inside the buffer. The advice changes no value,
        // and failure has no effect.
        unsafe {
            libc::madvise(
                first.wrapping_add(skipped).cast(),
                length,
                libc::MADV_HUGEPAGE,
            );
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (first, nbytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(shape: &[i32], dtype: Dtype, chunk_bytes: usize) -> ChunkedArray {
        ChunkedArray {
            shape: shape.to_vec(),
            dtype,
            chunk_bytes,
        }
    }

    #[test]
    fn each_chunk_is_filled_once_whatever_the_threads() {
        for threads in [0, 1, 2, 7] {
            let parts = [
                part(&[1001, 4], Dtype::Uint32, 64),
                part(&[1001], Dtype::Int8, 4),
            ];
            let filled = fill_arrays(
                &parts,
                threads,
                || 0u32,
                |calls, chunk, slices| {
                    *calls += 1;
                    let [words, bytes] = slices else {
                        return Err("two parts");
                    };
                    if words.iter().chain(bytes.iter()).any(|&b| b != 0) {
                        return Err("not zero");
                    }
                    words.fill(chunk as u8);
                    bytes.fill(chunk as u8 & 0x7f);
                    Ok(())
                },
            );
            let filled = filled.unwrap().unwrap();
            let words = filled[0].to_vec::<u32>().unwrap();
            for (i, &word) in words.iter().enumerate() {
                assert_eq!(word.to_ne_bytes(), [(i / 16) as u8; 4], "{i}");
            }
            let bytes = filled[1].to_vec::<i8>().unwrap();
            assert!((0..1001).all(|i| bytes[i] == ((i / 4) as u8 & 0x7f) as i8));
        }
    }

    #[test]
    fn the_error_of_the_first_chunk_that_failed_comes_back() {
        let parts = [part(&[100], Dtype::Uint8, 1)];
        let filled = fill_arrays(
            &parts,
            1,
            || (),
            |(), i, _| if i < 40 { Ok(()) } else { Err(i) },
        );
        assert_eq!(filled.unwrap().unwrap_err(), 40);
    }

    #[test]
    fn wrong_parts_are_errors() {
        let try_fill = |parts: &[ChunkedArray]| {
            let filled = fill_arrays(parts, 1, || (), |(), _, _| Ok::<(), ()>(()));
            filled.map(|filled| filled.unwrap().len())
        };
        let kind = |parts: &[ChunkedArray]| try_fill(parts).unwrap_err().kind();
        assert_eq!(kind(&[part(&[4], Dtype::Bool, 1)]), ErrorKind::Dtype);
        assert_eq!(kind(&[part(&[4], Dtype::Float32, 6)]), ErrorKind::Shape);
        assert_eq!(kind(&[part(&[4], Dtype::Float32, 0)]), ErrorKind::Shape);
        assert_eq!(kind(&[part(&[-4], Dtype::Float32, 4)]), ErrorKind::Shape);
        let uneven = [part(&[4], Dtype::Uint8, 1), part(&[4], Dtype::Uint8, 2)];
        assert_eq!(kind(&uneven), ErrorKind::Shape);
        let giant = [part(&[i32::MAX; 2], Dtype::Float32, 1 << 20)];
        assert_eq!(kind(&giant), ErrorKind::OutOfMemory);
        assert_eq!(try_fill(&[]).unwrap(), 0);
        assert_eq!(try_fill(&[part(&[0, 5], Dtype::Float16, 2)]).unwrap(), 1);
    }
}
