//! Converts the rows of one tensor to output rows. Converts only some megabytes at a time, so
//! memory does not depend on the model's size.

use inference::Result;
use mlx_rs_core::{Array, Dtype as MlxDtype, Quantized, eval};
use safetensors::Dtype;

use super::faults::wrong;
use super::float_type::FloatType;
use super::given::Given;
use super::plan::{Item, Work};
use super::rules::Format;
use super::source::{Floats, Source};
use super::tensor::Tensor;
use crate::error::engine;

/// The approximate number of weights per chunk.
const CHUNK: usize = 8 << 20;

/// A callback for output bytes. Its arguments: index of the output, position in the output, bytes.
pub(super) type Emit<'a> = dyn FnMut(usize, u64, &[u8]) -> Result<()> + 'a;

/// Converts an item, and emits the bytes of its outputs chunk by chunk.
pub(super) fn run(
    (source, given): (&Source, &Given),
    item: &Item,
    emit: &mut Emit<'_>,
) -> Result<()> {
    if let Some(outputs) = replaced(source, given, item)? {
        for (out, bytes) in outputs.iter().enumerate() {
            emit(out, 0, bytes)?;
        }
        return Ok(());
    }
    if let Work::Dequantize(format, to) = item.work {
        return dequantize(source, item, format, to, emit);
    }
    let mut written = vec![0u64; item.outs.len()];
    for part in &item.parts {
        let tensor = &source.tensors[*part];
        let (rows, cols) = tensor.rows_and_cols();
        let at_once = match item.transposed {
            true => rows,
            false => tensor.rows_at_once(CHUNK / cols.max(1)),
        };
        for first in (0..rows).step_by(at_once.max(1)) {
            let count = at_once.min(rows - first);
            let outputs = rows_of(source, item, tensor, first, count)?;
            for ((out, bytes), written) in outputs.iter().enumerate().zip(&mut written) {
                emit(out, *written, bytes)?;
                *written += bytes.len() as u64;
            }
        }
    }
    Ok(())
}

/// Returns the outputs of an item whose values are in `given`; `None` for other items.
fn replaced(source: &Source, given: &Given, item: &Item) -> Result<Option<Vec<Vec<u8>>>> {
    let (Some(out), Some(part)) = (item.outs.first(), item.parts.first()) else {
        return Ok(None);
    };
    let tensor = &source.tensors[*part];
    let floats = |values: &[f32], to| -> Result<Vec<u8>> {
        let floats = cast(source, tensor, Floats::F32(values.to_vec()), to)?;
        Ok(floats.bytes())
    };
    let path = out.name.strip_suffix(".weight").unwrap_or(&out.name);
    match item.work {
        Work::Quantize(_, to) => match given.packed.get(path) {
            Some(packed) => Ok(Some(vec![
                bytemuck::cast_slice(&packed.weight).to_vec(),
                floats(&packed.scales, to)?,
                floats(&packed.biases, to)?,
            ])),
            None => Ok(None),
        },
        Work::Cast(to) => match given.dense.get(&out.name) {
            Some(values) => Ok(Some(vec![floats(values, to)?])),
            None => Ok(None),
        },
        _ => Ok(None),
    }
}

fn rows_of(
    source: &Source,
    item: &Item,
    tensor: &Tensor,
    first: usize,
    count: usize,
) -> Result<Vec<Vec<u8>>> {
    let floats = || -> Result<Floats> {
        let floats = source.floats(tensor, first, count)?;
        if item.transposed {
            let (rows, cols) = tensor.rows_and_cols();
            return Ok(floats.transposed(rows, cols));
        }
        Ok(floats)
    };
    match item.work {
        Work::Copy => Ok(vec![source.raw(tensor, first, count)?]),
        Work::Cast(to) => Ok(vec![cast(source, tensor, floats()?, to)?.bytes()]),
        Work::Repack(to) => {
            let packed = source.packed(tensor, first, count)?;
            let scales = cast(source, tensor, Floats::F32(packed.scales), to)?;
            let biases = cast(source, tensor, Floats::F32(packed.biases), to)?;
            Ok(vec![
                bytemuck::cast_slice(&packed.packed).to_vec(),
                scales.bytes(),
                biases.bytes(),
            ])
        }
        Work::Quantize(format, to) => {
            let floats = cast(source, tensor, floats()?, to)?;
            let (stored_rows, stored_cols) = tensor.rows_and_cols();
            let (rows, cols) = if item.transposed {
                (stored_cols, stored_rows)
            } else {
                (count, stored_cols)
            };
            quantize(&floats, rows, cols, format)
        }
        Work::Dequantize(..) => Ok(Vec::new()), // another function dequantizes
    }
}

/// Casts to another type. A value outside its range is an error, because it would become infinite.
fn cast(source: &Source, tensor: &Tensor, floats: Floats, to: FloatType) -> Result<Floats> {
    if to != FloatType::F16 || matches!(floats, Floats::F16(_)) {
        return Ok(floats.cast(to));
    }
    let before = count_infinite(&floats);
    let after = floats.cast(to);
    if count_infinite(&after) > before {
        return Err(wrong(
            &source.path,
            &tensor.name,
            "has values that float16 cannot represent; choose bfloat16 or float32 (--dtype)",
        ));
    }
    Ok(after)
}

fn count_infinite(floats: &Floats) -> usize {
    match floats {
        Floats::F32(v) => v.iter().filter(|x| x.is_infinite()).count(),
        Floats::F16(v) => v.iter().filter(|x| x.is_infinite()).count(),
        Floats::BF16(v) => v.iter().filter(|x| x.is_infinite()).count(),
    }
}

fn array(floats: &Floats, shape: &[i32]) -> mlx_rs_core::Result<Array> {
    match floats {
        Floats::F32(v) => Array::from_slice(v, shape),
        Floats::F16(v) => Array::from_slice(v, shape),
        Floats::BF16(v) => Array::from_slice(v, shape),
    }
}

/// Converts a size to `i32`. A size that does not fit becomes -1, for which MLX returns an error.
fn dimension(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(-1)
}

fn quantize(floats: &Floats, rows: usize, cols: usize, format: Format) -> Result<Vec<Vec<u8>>> {
    let run = || -> mlx_rs_core::Result<Vec<Vec<u8>>> {
        let weight = array(floats, &[dimension(rows), dimension(cols)])?;
        let q = Quantized::quantize(&weight, format.group_size, format.bits, format.mode)?;
        let mut parts = vec![&q.weight, &q.scales];
        parts.extend(&q.biases);
        eval(parts.iter().copied())?;
        parts.into_iter().map(bytes_of).collect()
    };
    run().map_err(engine("quantize"))
}

/// The bytes of an array's elements, little-endian.
fn bytes_of(array: &Array) -> mlx_rs_core::Result<Vec<u8>> {
    Ok(match array.dtype() {
        MlxDtype::Float16 => bytemuck::cast_slice(&array.to_vec::<half::f16>()?).to_vec(),
        MlxDtype::Bfloat16 => bytemuck::cast_slice(&array.to_vec::<half::bf16>()?).to_vec(),
        MlxDtype::Uint8 => array.to_vec::<u8>()?,
        MlxDtype::Uint32 => bytemuck::cast_slice(&array.to_vec::<u32>()?).to_vec(),
        // Float32. The plan yields no other type; reading another type as `f32` returns an error.
        _ => bytemuck::cast_slice(&array.to_vec::<f32>()?).to_vec(),
    })
}

fn dequantize(
    source: &Source,
    item: &Item,
    format: Format,
    to: FloatType,
    emit: &mut Emit<'_>,
) -> Result<()> {
    let tensors: Vec<&Tensor> = item.parts.iter().map(|p| &source.tensors[*p]).collect();
    let (Some(weight), Some(scales)) = (tensors.first(), tensors.get(1)) else {
        return Ok(());
    };
    let (rows, words) = weight.rows_and_cols();
    let (_, groups) = scales.rows_and_cols();
    let at_once = (CHUNK / 4 / words.max(1)).clamp(1, rows.max(1));
    let mut written = 0;
    for first in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - first);
        let packed = source.raw(weight, first, count)?;
        let packed: Vec<u32> = packed
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| u32::from_le_bytes(*b))
            .collect();
        let of = |tensor: &Tensor| -> Result<Array> {
            let shape = [dimension(count), dimension(groups)];
            let built = if tensor.dtype == Dtype::U8 {
                Array::from_slice(&source.raw(tensor, first, count)?, &shape)
            } else {
                array(&source.floats(tensor, first, count)?, &shape)
            };
            built.map_err(engine("dequantize"))
        };
        let quantized = Quantized {
            weight: Array::from_slice(&packed, &[dimension(count), dimension(words)])
                .map_err(engine("dequantize"))?,
            scales: of(scales)?,
            biases: tensors.get(2).map(|t| of(t)).transpose()?,
            group_size: format.group_size,
            bits: format.bits,
            mode: format.mode,
        };
        let dtype = match to {
            FloatType::F32 => MlxDtype::Float32,
            FloatType::F16 => MlxDtype::Float16,
            FloatType::BF16 => MlxDtype::Bfloat16,
        };
        let bytes = quantized
            .dequantize(dtype)
            .and_then(|a| bytes_of(&a))
            .map_err(engine("dequantize"))
            .map_err(|e| e.context(weight.name.clone()))?;
        emit(0, written, &bytes)?;
        written += bytes.len() as u64;
    }
    Ok(())
}
