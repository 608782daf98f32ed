//! The values of an array as the bytes of a file: exact reads in bounded steps, byte order, and
//! numpy's column-major layout. The modules of the formats handle headers.

use std::io::Read;

use bytemuck::Pod;
use half::{bf16, f16};
use num_complex::Complex32;

use super::{format_error, io_error};
use crate::array::Array;
use crate::dtype::{Dtype, Element};
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

/// The number of elements per read if the claimed size may be wrong.
const STEP: usize = 1 << 16;

/// The layout of values in a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub dtype: Dtype,
    /// The most significant byte first.
    pub big_endian: bool,
    /// The first axis varies fastest.
    pub column_major: bool,
}

impl Layout {
    pub(super) fn little_endian(dtype: Dtype) -> Self {
        Self {
            dtype,
            big_endian: false,
            column_major: false,
        }
    }
}

/// A shape as `i32`, the type that MLX uses.
pub(super) fn shape(op: &'static str, dims: &[usize]) -> Result<Vec<i32>> {
    dims.iter()
        .map(|&d| i32::try_from(d))
        .collect::<Result<_, _>>()
        .map_err(|_| {
            Error::new(
                ErrorKind::Shape,
                op,
                format!("shape {dims:?} has an axis longer than MLX can count"),
            )
        })
}

/// The size of an array in bytes; an error beyond the budget.
pub(super) fn size(op: &'static str, shape: &[i32], dtype: Dtype) -> Result<u64> {
    let budget = memory::budget();
    match memory::checked_bytes(shape, dtype.size()) {
        Some(bytes) if bytes <= budget => Ok(bytes),
        _ => Err(Error::new(
            ErrorKind::OutOfMemory,
            op,
            format!(
                "an array of shape {shape:?} ({dtype}) does not fit the memory budget of {budget} \
                 bytes"
            ),
        )),
    }
}

/// Reads an array of `shape`. `certain` means that the source is known to have this number of
/// bytes.
pub(super) fn read(
    op: &'static str,
    layout: Layout,
    shape: &[i32],
    source: &mut impl Read,
    certain: bool,
) -> Result<Array> {
    size(op, shape, layout.dtype)?;
    match layout.dtype {
        Dtype::Bool => {
            let bytes = numbers::<u8>(op, shape, source, certain, false)?;
            array(bytes.iter().map(|&b| b != 0).collect(), shape, layout)
        }
        Dtype::Uint8 => pod::<u8>(op, layout, shape, source, certain),
        Dtype::Uint16 => pod::<u16>(op, layout, shape, source, certain),
        Dtype::Uint32 => pod::<u32>(op, layout, shape, source, certain),
        Dtype::Uint64 => pod::<u64>(op, layout, shape, source, certain),
        Dtype::Int8 => pod::<i8>(op, layout, shape, source, certain),
        Dtype::Int16 => pod::<i16>(op, layout, shape, source, certain),
        Dtype::Int32 => pod::<i32>(op, layout, shape, source, certain),
        Dtype::Int64 => pod::<i64>(op, layout, shape, source, certain),
        Dtype::Float16 => pod::<f16>(op, layout, shape, source, certain),
        Dtype::Float32 => pod::<f32>(op, layout, shape, source, certain),
        Dtype::Float64 => pod::<f64>(op, layout, shape, source, certain),
        Dtype::Bfloat16 => pod::<bf16>(op, layout, shape, source, certain),
        Dtype::Complex64 => pod::<Complex32>(op, layout, shape, source, certain),
    }
}

fn pod<T: Element + Pod>(
    op: &'static str,
    layout: Layout,
    shape: &[i32],
    source: &mut impl Read,
    certain: bool,
) -> Result<Array> {
    let swap = layout.big_endian != cfg!(target_endian = "big");
    array(
        numbers::<T>(op, shape, source, certain, swap)?,
        shape,
        layout,
    )
}

/// Reads the elements of `shape`. Unless `certain`, it allocates memory only as elements arrive.
fn numbers<T: Element + Pod>(
    op: &'static str,
    shape: &[i32],
    source: &mut impl Read,
    certain: bool,
    swap: bool,
) -> Result<Vec<T>> {
    // The bytes fit the budget, and therefore a usize.
    let n = shape.iter().map(|&d| d as usize).product::<usize>();
    let step = if certain { n } else { STEP };
    let mut values: Vec<T> = Vec::new();
    while values.len() < n {
        let at = values.len();
        let more = step.min(n - at);
        values.try_reserve(more).map_err(|_| {
            Error::new(
                ErrorKind::OutOfMemory,
                op,
                format!("no memory for {} more bytes", more * size_of::<T>()),
            )
        })?;
        values.resize(at + more, T::default());
        source
            .read_exact(bytemuck::cast_slice_mut(&mut values[at..]))
            .map_err(|e| io_error(op, &e))?;
    }
    if swap {
        // The real and the imaginary part are swapped separately.
        let width = match T::DTYPE {
            Dtype::Complex64 => size_of::<f32>(),
            _ => size_of::<T>(),
        };
        for number in bytemuck::cast_slice_mut::<T, u8>(&mut values).chunks_exact_mut(width) {
            number.reverse();
        }
    }
    Ok(values)
}

fn array<T: Element>(values: Vec<T>, shape: &[i32], layout: Layout) -> Result<Array> {
    if !layout.column_major || shape.len() < 2 {
        return Array::from_vec(values, shape);
    }
    let reversed: Vec<i32> = shape.iter().rev().copied().collect();
    Array::from_vec(values, &reversed)?.transpose()
}

/// Returns an error if bytes follow the values.
pub(super) fn expect_end(op: &'static str, source: &mut impl Read) -> Result<()> {
    match source.read(&mut [0]) {
        Ok(0) => Ok(()),
        Ok(_) => Err(format_error(
            op,
            "there is more data than the header describes",
        )),
        Err(e) => Err(io_error(op, &e)),
    }
}

/// The values of an array as little-endian bytes, row-major.
pub(super) fn write(op: &'static str, array: &Array, out: &mut impl std::io::Write) -> Result<()> {
    let bytes = array.bytes()?;
    let fault = |e: std::io::Error| Error::new(ErrorKind::Io, op, e.to_string());
    if cfg!(target_endian = "little") {
        return out.write_all(&bytes).map_err(fault);
    }
    let width = match array.dtype() {
        Dtype::Complex64 => size_of::<f32>(),
        dtype => dtype.size(),
    };
    let mut swapped = bytes.to_vec();
    for number in swapped.chunks_exact_mut(width) {
        number.reverse();
    }
    out.write_all(&swapped).map_err(fault)
}
