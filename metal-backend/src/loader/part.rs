//! Reads the slices of tensors that one process of a group needs: their ranges in the files, and
//! partial reads.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use inference::Result;
use inference_formats::split::{Share, TensorSplit, Window};
use mlx_rs_core::distributed::Group;
use mlx_rs_core::{Array, QuantMode, zeros};

use super::streaming::{rows_and_cols, sized_bytes};
use super::{Turned, Weights, dimension, mlx_shape};
use crate::checkpoint::files::wrong_tensor;
use crate::checkpoint::safetensors::{SafetensorsCheckpoint, TensorInfo};
use crate::error::engine;
use crate::nn::ExpertLinear;
use crate::nn::Weight;
use crate::nn::adapter::SlotKind;

/// Minimum width in bytes of a column range that is read separately. Narrower ranges are cut from
/// complete rows, because the system reads complete pages anyway.
const PAGE: usize = 4096;

/// The smallest group size of MLX's affine format.
const LEAST_GROUP: usize = 32;

/// The role of this process in a tensor-parallel group.
#[derive(Debug, Clone)]
pub struct Member {
    /// How the model is divided.
    pub split: Arc<TensorSplit>,
    /// The rank of this process, from 0.
    pub rank: usize,
    /// The group of all processes.
    pub group: Group,
}

/// A tensor of a file, or this process's slice of it. Sizes are in stored elements.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// The shape of the slice.
    pub shape: Vec<usize>,
    window: Option<Window>,
}

impl Part {
    /// Returns the shape of the complete tensor.
    pub(super) fn stored_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(window) = &self.window
            && let Some(length) = shape.get_mut(window.axis)
        {
            *length = window.length;
        }
        shape
    }

    /// Converts `self` to units of blocks of `weights` elements of the last axis. Returns `None` if
    /// the slice cuts a block.
    pub(super) fn in_blocks(&self, weights: usize) -> Option<Self> {
        let mut part = self.clone();
        let last = part.shape.len().saturating_sub(1);
        let blocks = |n: usize| n.is_multiple_of(weights).then(|| n / weights);
        if let Some(length) = part.shape.last_mut() {
            *length = blocks(*length)?;
        }
        if let Some(window) = part.window.as_mut().filter(|window| window.axis == last) {
            window.length = blocks(window.length)?;
            for range in &mut window.ranges {
                *range = blocks(range.start)?..blocks(range.end)?;
            }
        }
        Some(part)
    }

    /// Whether this is a slice of a tensor.
    pub(super) fn is_cut(&self) -> bool {
        self.window.is_some()
    }

    /// Returns `self` for a tensor whose last axis is divided as `columns`.
    pub(super) fn with_columns(&self, columns: &Columns) -> Self {
        let mut part = self.clone();
        let last = part.shape.len().saturating_sub(1);
        if let Some(length) = part.shape.last_mut() {
            *length = columns.length;
        }
        if let Some(window) = part.window.as_mut().filter(|w| w.axis == last) {
            window.length = columns.stored;
            window.ranges = vec![columns.range.clone()];
        }
        part
    }

    /// Returns the bytes of the slice in the file.
    pub(super) fn nbytes(&self, info: &TensorInfo) -> usize {
        let stored: usize = info.shape.iter().product();
        let elements: usize = self.shape.iter().product();
        info.nbytes / stored.max(1) * elements
    }

    /// Reads the elements of the slice's rows `first..first + count`. All axes but the last count
    /// as rows.
    pub(super) fn read<T: Pod>(
        &self,
        checkpoint: &SafetensorsCheckpoint,
        info: &TensorInfo,
        first: usize,
        count: usize,
    ) -> Result<Vec<T>> {
        let (_, cols) = rows_and_cols(&self.shape);
        if self.window.is_none() {
            let size = size_of::<T>();
            return Ok(checkpoint.read_part(info, first * cols * size, count * cols * size)?);
        }
        let mut values = vec![T::zeroed(); count * cols];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        let rows = (size_of::<T>(), first..first + count);
        let read = |at: usize, out: &mut [u8]| Ok(checkpoint.read_into(info, at, out)?);
        self.read_into(read, rows, bytes, &mut Vec::new())?;
        Ok(values)
    }

    /// Reads as [`Self::read`], for elements of `size` bytes. Fills `out`, which must have the size
    /// of the rows in bytes. `read` fills memory with the tensor's stored bytes from a position on.
    pub(super) fn read_into(
        &self,
        read: impl Fn(usize, &mut [u8]) -> Result<()>,
        (size, rows_kept): (usize, Range<usize>),
        out: &mut [u8],
        scratch: &mut Vec<u32>,
    ) -> Result<()> {
        let (_, cols) = rows_and_cols(&self.shape);
        let Some(window) = &self.window else {
            return read(rows_kept.start * cols * size, out);
        };
        if window.axis + 1 == self.shape.len() {
            let stored = window.length * size;
            let rows = out.chunks_exact_mut((cols * size).max(1));
            let ranges = || window.ranges.iter().map(|r| r.start * size..r.end * size);
            if ranges().all(|range| range.len() >= PAGE) {
                for (row, mut out) in rows_kept.zip(rows) {
                    for range in ranges() {
                        let (part, rest) = out.split_at_mut(range.len().min(out.len()));
                        read(row * stored + range.start, part)?;
                        out = rest;
                    }
                }
                return Ok(());
            }
            let all = sized_bytes(scratch, rows_kept.len() * stored);
            read(rows_kept.start * stored, all)?;
            for (row, mut out) in all.chunks_exact(stored.max(1)).zip(rows) {
                for range in ranges() {
                    let (part, rest) = out.split_at_mut(range.len().min(out.len()));
                    part.copy_from_slice(&row[range.start..range.start + part.len()]);
                    out = rest;
                }
            }
            return Ok(());
        }
        let mut out = out;
        for rows in self.stored_rows(window, rows_kept) {
            let (part, rest) = out.split_at_mut((rows.len() * cols * size).min(out.len()));
            read(rows.start * cols * size, part)?;
            out = rest;
        }
        Ok(())
    }

    /// Returns the ranges of the slice's rows in the file. Adjacent ranges are merged.
    fn stored_rows(&self, window: &Window, rows: Range<usize>) -> Vec<Range<usize>> {
        // The number of rows per element of the divided axis.
        let behind = window.axis + 1..self.shape.len().saturating_sub(1);
        let inner: usize = self.shape[behind].iter().product();
        let period = window.length * inner;
        let mine: usize = window.ranges.iter().map(|r| r.len() * inner).sum();
        let mut runs = Vec::new();
        let mut row = rows.start;
        while row < rows.end {
            let (outer, mut at) = (row / mine.max(1), row % mine.max(1));
            for range in &window.ranges {
                let length = range.len() * inner;
                if at >= length {
                    at -= length;
                    continue;
                }
                let count = (length - at).min(rows.end - row);
                let start = outer * period + range.start * inner + at;
                runs.push(start..start + count);
                row += count;
                at = 0;
                if row == rows.end {
                    break;
                }
            }
        }
        runs
    }
}

/// A range of the last axis of a quantized matrix, in words or in groups.
#[derive(Debug, Clone)]
pub(super) struct Columns {
    /// The length of the axis in the file.
    pub stored: usize,
    /// The length of the slice.
    pub length: usize,
    /// The range of the slice within the stored axis.
    pub range: Range<usize>,
}

/// How the input axis of a quantized matrix is divided.
#[derive(Debug, Clone)]
pub(super) struct Groups {
    /// The range of packed words.
    pub words: Columns,
    /// The range of scales and biases to read.
    pub scales: Columns,
    /// The group size in memory. It divides the group size in the file.
    pub size: usize,
    /// The index of the first group in memory, counted from the first group read, and the number of
    /// groups.
    pub in_memory: (usize, usize),
}

impl Groups {
    /// Converts the scales or biases `[.., groups]` that were read to scales or biases of the
    /// groups in memory.
    pub(super) fn divided(&self, read: Array, stored_size: usize) -> Result<Array> {
        let times = stored_size / self.size.max(1);
        let (first, count) = self.in_memory;
        if times == 1 {
            return Ok(read);
        }
        let divided = || {
            let mut shape = read.shape().to_vec();
            let [times, first, end] =
                <[i32; 3]>::try_from(mlx_shape(&[times, first, first + count])).unwrap_or([-1; 3]);
            shape.push(times);
            let all = read.expand_dims(-1)?.broadcast_to(&shape)?;
            shape.truncate(shape.len() - 2);
            shape.push(-1);
            let cut = all.reshape(&shape)?.slice_axis(-1, first, end)?;
            let cut = cut.contiguous()?;
            cut.eval().map(|()| cut)
        };
        divided().map_err(engine("weights"))
    }
}

impl Weights {
    /// Makes later reads return only this process's slices of a tensor-parallel model.
    pub fn use_member(&mut self, member: Member) {
        self.member = Some(member);
    }

    /// The tensor-parallel division; `None` if the model is not divided.
    pub fn split(&self) -> Option<&TensorSplit> {
        self.member.as_ref().map(|member| member.split.as_ref())
    }

    /// The processes of a tensor-parallel model; `None` if the model is not divided.
    pub fn group(&self) -> Option<Group> {
        self.member.as_ref().map(|member| member.group)
    }

    /// Returns the slice of a weight that this process has; `None` for the complete weight.
    pub(super) fn window(&self, prefix: &str, kind: SlotKind, weight: &Weight) -> Option<Window> {
        let member = self.member.as_ref()?;
        let end = match kind {
            SlotKind::Bias => "bias",
            _ => "weight",
        };
        let shape: Vec<usize> = (weight.shape().iter()).map(|&n| dimension(n)).collect();
        let window = (member.split).window(member.rank, &format!("{prefix}.{end}"), &shape);
        // The weight was already read, so its shape is that of the slice.
        window.ok().flatten()
    }

    /// Returns this process's share of a tensor.
    fn share(&self, name: &str) -> Share {
        self.split().map_or(Share::Whole, |split| split.share(name))
    }

    /// The group over which outputs of the matrix at `prefix` are summed; `None` if no sum is
    /// needed.
    pub fn summed_over(&self, prefix: &str) -> Option<Group> {
        let member = self.member.as_ref()?;
        (self.share(&format!("{prefix}.weight")) == Share::Inputs).then_some(member.group)
    }

    /// Returns the slice of a tensor. `shape` is the shape of the slice.
    pub(super) fn part(&self, name: &str, shape: &[usize]) -> Result<Part> {
        self.part_of(name, shape, Turned(false))
    }

    /// Returns the slice as [`Self::part`], for a matrix in either orientation.
    pub(super) fn part_of(
        &self,
        name: &str,
        shape: &[usize],
        Turned(turned): Turned,
    ) -> Result<Part> {
        let window = match &self.member {
            Some(member) if turned => member.split.turned_window(member.rank, name, shape)?,
            Some(member) => member.split.window(member.rank, name, shape)?,
            None => None,
        };
        Ok(Part {
            shape: shape.to_vec(),
            window,
        })
    }

    /// Returns how a slice of a quantized matrix is divided into words and groups. The matrix has
    /// `bits` per element and groups of `group` elements.
    pub(super) fn groups(
        &self,
        name: &str,
        part: &Part,
        mode: QuantMode,
        (bits, group): (usize, usize),
    ) -> Result<Groups> {
        let fault = |message: String| Err(wrong_tensor(&self.path, name, message));
        let size_kept = part.shape.last().copied().unwrap_or(0);
        let stored = part.stored_shape().last().copied().unwrap_or(0);
        if stored % group != 0 {
            return fault(format!(
                "{stored} inputs do not divide into groups of {group}"
            ));
        }
        let last = part.shape.len().saturating_sub(1);
        let cut = part.window.as_ref().filter(|window| window.axis == last);
        let range = match cut.map(|window| window.ranges.as_slice()) {
            None => 0..size_kept,
            Some([range]) => range.clone(),
            Some(_) => return fault(String::from("its inputs are cut in several places")),
        };
        let fits = |size: usize| range.start.is_multiple_of(size) && size_kept.is_multiple_of(size);
        // Smaller groups are possible: each copies the scale of its original group.
        let smaller = [64, LEAST_GROUP]
            .into_iter()
            .find(|size| mode == QuantMode::Affine && group.is_multiple_of(*size) && fits(*size));
        let size = if fits(group) { Some(group) } else { smaller };
        let Some(size) = size else {
            return fault(format!(
                "a process's part of its {stored} inputs is {size_kept}, which does not divide into groups of {group}"
            ));
        };
        let in_words = |n: usize| n / 8 * bits / 4;
        let read = range.start / group..range.end.div_ceil(group);
        Ok(Groups {
            words: Columns {
                stored: in_words(stored),
                length: in_words(size_kept),
                range: in_words(range.start)..in_words(range.end),
            },
            size,
            in_memory: ((range.start - read.start * group) / size, size_kept / size),
            scales: Columns {
                stored: stored / group,
                length: read.len(),
                range: read,
            },
        })
    }

    /// Builds the down projection of experts from a fetched weight and bias. In a tensor-parallel
    /// model, outputs are summed over the processes, so only one process adds the biases.
    pub fn expert_output(&self, weight: Weight, bias: Option<Array>) -> Result<ExpertLinear> {
        let Some(member) = &self.member else {
            return self.expert_layer(weight, bias);
        };
        let bias = match bias {
            Some(bias) if member.rank > 0 => {
                Some(zeros(bias.shape(), bias.dtype()).map_err(engine("weights"))?)
            }
            other => other,
        };
        Ok(self.expert_layer(weight, bias)?.summed_over(member.group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(shape: &[usize], axis: usize, length: usize, ranges: &[Range<usize>]) -> Part {
        Part {
            shape: shape.to_vec(),
            window: Some(Window {
                axis,
                length,
                ranges: ranges.to_vec(),
            }),
        }
    }

    #[test]
    fn rows_of_parts_are_found() {
        // [3 experts, 10 rows, 2 columns]; the slice has rows 2..4 and 7..8.
        let window_rows = part(&[3, 3, 2], 1, 10, &[2..4, 7..8]);
        assert_eq!(window_rows.stored_shape(), [3, 10, 2]);
        let window = window_rows.window.clone().unwrap();
        let rows = |range| window_rows.stored_rows(&window, range);
        assert_eq!(rows(0..3), [2..4, 7..8]);
        assert_eq!(rows(1..5), [3..4, 7..8, 12..14]);
        assert_eq!(rows(8..9), vec![27..28; 1]);
        // [2, 6 groups, 4]: other axes follow the divided axis.
        let groups = part(&[2, 3, 5, 4], 1, 6, std::slice::from_ref(&(3..6)));
        let window = groups.window.clone().unwrap();
        assert_eq!(groups.stored_rows(&window, 0..30), [15..30, 45..60]);
        assert_eq!(groups.stored_rows(&window, 13..17), [28..30, 45..47]);
    }
}
