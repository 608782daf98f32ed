//! Converts index entries to a plan: slices, axes to drop and to add, axes to gather, and the
//! position of the gathered axes. All indices of a finished plan are in range.

use super::{End, Entry, Index, Span};
use crate::array::Array;
use crate::dtype::{Dtype, Element};
use crate::error::{Error, ErrorKind, Result};

/// The steps that lead from an array to its indexed part: merge the axes of each mask, slice every
/// axis, drop the axes of integers, insert new axes, gather.
pub(super) struct Plan {
    /// The shape after merging.
    pub merged: Vec<i32>,
    pub start: Vec<i32>,
    pub stop: Vec<i32>,
    pub stride: Vec<i32>,
    /// Whether slicing changes anything.
    pub sliced: bool,
    /// The axes (numbered after slicing) that integers drop.
    pub dropped: Vec<i32>,
    /// The new axes (numbered after inserting).
    pub inserted: Vec<i32>,
    /// The shape after inserting.
    pub view: Vec<i32>,
    /// The gathered axes of the view, with their indices. Indices are in range, and `int32` or
    /// `uint32`.
    pub gathered: Vec<(i32, Array)>,
    /// The common shape to which the indices broadcast.
    pub broadcast: Vec<i32>,
    /// The position of the broadcast shape among the other axes of the result.
    pub place: usize,
    /// The shape of the part.
    pub result: Vec<i32>,
}

/// The effect of one index entry on its axis. Columns are in the order of the index.
enum Column {
    Keep(i32),
    Drop,
    New,
    Gather(Array),
    /// An ellipsis. It covers any number of axes, and separates its neighbors even if it covers
    /// none.
    Gap,
}

pub(super) fn error(op: &'static str, kind: ErrorKind, message: String, array: &Array) -> Error {
    Error::new(kind, op, message).with_inputs(&[array])
}

impl Entry<'_> {
    /// The shape of a mask; `None` for other entries.
    pub(super) fn mask_shape(&self) -> Option<Vec<i32>> {
        match self {
            Entry::Array(a) if a.dtype() == Dtype::Bool => Some(a.shape().to_vec()),
            // A list longer than `i32::MAX` cannot match an axis. The length -1 makes the later
            // check fail.
            Entry::Bools(list) => Some(vec![i32::try_from(list.len()).unwrap_or(-1)]),
            Entry::Bool(_) => Some(Vec::new()),
            _ => None,
        }
    }

    fn axes(&self) -> usize {
        match self {
            Entry::Ellipsis | Entry::NewAxis => 0,
            _ => self.mask_shape().map_or(1, |shape| shape.len()),
        }
    }
}

impl Span {
    /// The start, the number of elements and the step on an axis of `length`, like Python's
    /// `slice.indices`.
    fn on(self, op: &'static str, length: i32) -> Result<(i32, i32, i32)> {
        if self.step == 0 {
            return Err(Error::new(ErrorKind::Value, op, "a step cannot be zero"));
        }
        let (n, step) = (i128::from(length), i128::from(self.step));
        let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
        let cut = |x: i64| {
            let x = i128::from(x);
            (if x < 0 { x + n } else { x }).clamp(low, high)
        };
        let start = self.start.map_or(if step > 0 { low } else { high }, cut);
        let open = if step > 0 { high } else { low };
        let stop = match self.end {
            End::Open => open,
            End::Before(x) => cut(x),
            // The inclusive end plus one in the direction of the step. Here -1 does not wrap
            // around.
            End::With(x) => {
                let x = i128::from(x);
                let x = if x < 0 { x + n } else { x };
                (x + step.signum()).clamp(low, high)
            }
        };
        let distance = if step > 0 { stop - start } else { start - stop };
        let count = if distance > 0 {
            (distance + step.abs() - 1) / step.abs()
        } else {
            0
        };
        // All values are within the axis, whose length is an i32. A step matters only for two or
        // more elements, and is then shorter than the axis.
        Ok(match count {
            0 => (0, 0, 1),
            1 => (start as i32, 1, 1),
            _ => (start as i32, count as i32, step as i32),
        })
    }
}

/// The stop of a slice in MLX's form. `-length - 1` is before the first element.
fn stop(start: i32, count: i32, step: i32, length: i32) -> i32 {
    if count == 0 {
        return start;
    }
    let stop = i64::from(start) + i64::from(count - 1) * i64::from(step) + i64::from(step.signum());
    if stop < 0 {
        // This cannot overflow: -i32::MAX - 1 is i32::MIN.
        -length - 1
    } else {
        // `stop` is at most `length`.
        stop as i32
    }
}

/// Whether the span is a whole axis, unchanged.
fn is_whole(span: Span, length: i32) -> bool {
    span.on("index", length)
        .is_ok_and(|(start, count, step)| start == 0 && count == length && step == 1)
}

impl Plan {
    pub(super) fn new(op: &'static str, array: &Array, index: &[Index<'_>]) -> Result<Self> {
        let shape = array.shape();
        let used: usize = index.iter().map(|i| i.0.axes()).sum();
        let gaps = index
            .iter()
            .filter(|i| matches!(i.0, Entry::Ellipsis))
            .count();
        if gaps > 1 {
            return Err(error(
                op,
                ErrorKind::Index,
                String::from("an index can have one Ellipsis"),
                array,
            ));
        }
        let Some(left) = shape.len().checked_sub(used) else {
            return Err(error(
                op,
                ErrorKind::Index,
                format!(
                    "the index stands for {used} axes, but the array has {}",
                    shape.len()
                ),
                array,
            ));
        };

        let mut build = Builder {
            op,
            array,
            axis: 0,
            plan: Plan {
                merged: Vec::new(),
                start: Vec::new(),
                stop: Vec::new(),
                stride: Vec::new(),
                sliced: false,
                dropped: Vec::new(),
                inserted: Vec::new(),
                view: Vec::new(),
                gathered: Vec::new(),
                broadcast: Vec::new(),
                place: 0,
                result: Vec::new(),
            },
            columns: Vec::new(),
        };
        for entry in index {
            if matches!(entry.0, Entry::Ellipsis) {
                build.columns.push(Column::Gap);
                build.whole_axes(left)?;
            } else {
                build.entry(&entry.0)?;
            }
        }
        if gaps == 0 {
            build.whole_axes(left)?;
        }
        build.finish()
    }

    /// The number of axes of the result that are not gathered.
    pub(super) fn kept(&self) -> usize {
        self.result.len() - self.broadcast.len()
    }
}

struct Builder<'a> {
    op: &'static str,
    array: &'a Array,
    /// The next axis of the array to be indexed.
    axis: usize,
    plan: Plan,
    columns: Vec<Column>,
}

impl Builder<'_> {
    fn whole_axes(&mut self, n: usize) -> Result<()> {
        (0..n).try_for_each(|_| self.entry(&Entry::Slice(Span::from(..))))
    }

    /// Adds an axis of the merged array, with its slice.
    fn slice(&mut self, length: i32, (start, count, step): (i32, i32, i32)) {
        // The step of a single element is set to 1. MLX would drop the step but keep the stop,
        // which is then wrong without the step. Gradients and mapped functions would read several
        // elements, or none.
        let step = if count == 1 { 1 } else { step };
        let plan = &mut self.plan;
        plan.merged.push(length);
        plan.start.push(start);
        plan.stop.push(stop(start, count, step, length));
        plan.stride.push(step);
        plan.sliced |= (start, count, step) != (0, length, 1);
    }

    fn entry(&mut self, entry: &Entry<'_>) -> Result<()> {
        if let Some(mask) = entry.mask_shape() {
            return self.mask(entry, &mask);
        }
        if matches!(entry, Entry::NewAxis) {
            self.columns.push(Column::New);
            return Ok(());
        }
        let length = self.array.shape()[self.axis];
        let column = match entry {
            Entry::At(at) => {
                let n = i64::from(length);
                if !(-n..n).contains(at) {
                    return Err(self.outside(*at, length));
                }
                // The check above ensures that the value fits an i32.
                let at = (if *at < 0 { at + n } else { *at }) as i32;
                self.slice(length, (at, 1, 1));
                Column::Drop
            }
            Entry::Slice(span) => {
                let part = span.on(self.op, length)?;
                self.slice(length, part);
                Column::Keep(part.1)
            }
            Entry::Array(indices) => {
                let indices = self.checked(indices, length)?;
                self.slice(length, (0, length, 1));
                Column::Gather(indices)
            }
            Entry::Clamped(indices) => {
                let indices = self.limited(indices, length)?;
                self.slice(length, (0, length, 1));
                Column::Gather(indices)
            }
            Entry::List(list) => {
                let n = i64::from(length);
                let list = list
                    .iter()
                    .map(|&at| match at {
                        _ if !(-n..n).contains(&at) => Err(self.outside(at, length)),
                        _ if at < 0 => Ok((at + n) as i32),
                        _ => Ok(at as i32),
                    })
                    .collect::<Result<Vec<i32>>>()?;
                self.slice(length, (0, length, 1));
                Column::Gather(Array::vector(&list)?)
            }
            // These entries were handled earlier: masks above, and the others by the caller.
            Entry::Bools(_) | Entry::Bool(_) | Entry::NewAxis | Entry::Ellipsis => Column::Gap,
        };
        self.columns.push(column);
        self.axis += 1;
        Ok(())
    }

    /// Handles a mask: merges its axes into one, and gathers the true positions.
    fn mask(&mut self, entry: &Entry<'_>, mask: &[i32]) -> Result<()> {
        let axes = &self.array.shape()[self.axis..self.axis + mask.len()];
        if axes != mask {
            return Err(error(
                self.op,
                ErrorKind::Index,
                format!(
                    "a mask of shape {mask:?} cannot stand for axes of shape {axes:?}, which must be equal"
                ),
                self.array,
            ));
        }
        let length = axes.iter().try_fold(1i32, |n, &d| n.checked_mul(d));
        let Some(length) = length else {
            return Err(error(
                self.op,
                ErrorKind::Shape,
                format!("a mask of shape {mask:?} has more elements than one axis can count"),
                self.array,
            ));
        };
        let positions = |values: &[bool]| -> Vec<i32> {
            // There are `length` values, and `length` is an i32.
            (0..length)
                .zip(values)
                .filter_map(|(i, &v)| v.then_some(i))
                .collect()
        };
        let positions = match entry {
            Entry::Array(mask) => positions(&mask.data::<bool>()?),
            Entry::Bools(list) => positions(list),
            Entry::Bool(value) => positions(&[*value]),
            _ => Vec::new(),
        };
        self.slice(length, (0, length, 1));
        self.columns
            .push(Column::Gather(Array::vector(&positions)?));
        self.axis += mask.len();
        Ok(())
    }

    fn outside(&self, at: impl std::fmt::Display, length: i32) -> Error {
        error(
            self.op,
            ErrorKind::Index,
            format!(
                "index {at} is out of range for axis {} of length {length}",
                self.axis
            ),
            self.array,
        )
    }

    fn integers(&self, indices: &Array) -> Result<()> {
        if indices.dtype().is_integer() {
            return Ok(());
        }
        Err(error(
            self.op,
            ErrorKind::Dtype,
            format!(
                "an index array holds integers or booleans, not {}",
                indices.dtype()
            ),
            self.array,
        ))
    }

    /// Evaluates indices, and checks each one against the axis.
    fn checked(&self, indices: &Array, length: i32) -> Result<Array> {
        fn extremes<T: Element + Ord + Into<i128>>(indices: &Array) -> Result<Option<[i128; 2]>> {
            let data = indices.data::<T>()?;
            Ok(data
                .iter()
                .min()
                .zip(data.iter().max())
                .map(|(&low, &high)| [low.into(), high.into()]))
        }
        self.integers(indices)?;
        let extremes = match indices.dtype() {
            Dtype::Uint8 => extremes::<u8>(indices),
            Dtype::Uint16 => extremes::<u16>(indices),
            Dtype::Uint32 => extremes::<u32>(indices),
            Dtype::Uint64 => extremes::<u64>(indices),
            Dtype::Int8 => extremes::<i8>(indices),
            Dtype::Int16 => extremes::<i16>(indices),
            Dtype::Int32 => extremes::<i32>(indices),
            _ => extremes::<i64>(indices),
        }?;
        let n = i128::from(length);
        for at in extremes.into_iter().flatten() {
            if !(-n..n).contains(&at) {
                return Err(self.outside(at, length));
            }
        }
        // Every value fits. MLX itself counts negative values from the end.
        as_index(indices)
    }

    /// Limits indices to the axis inside the graph.
    fn limited(&self, indices: &Array, length: i32) -> Result<Array> {
        self.integers(indices)?;
        if length == 0 {
            return Err(error(
                self.op,
                ErrorKind::Index,
                format!("axis {} is empty: there is nothing to take", self.axis),
                self.array,
            ));
        }
        // If the limit does not fit the type, no value of the type can exceed it.
        let high = match indices.scalar_like(length - 1) {
            Ok(limit) => indices.minimum(&limit)?,
            Err(_) => indices.clone(),
        };
        as_index(&high.maximum(&high.scalar_like(0)?)?)
    }

    fn finish(self) -> Result<Plan> {
        let Builder {
            op,
            array,
            mut plan,
            columns,
            ..
        } = self;
        // The position of the first index array or integer, and whether all of them are adjacent.
        // NumPy puts the gathered axes at this position, or first if other entries separate them.
        let advanced = |c: &Column| matches!(c, Column::Drop | Column::Gather(_));
        let first = columns.iter().position(advanced);
        let last = columns.iter().rposition(advanced);
        let together = match (first, last) {
            (Some(first), Some(last)) => columns[first..=last].iter().all(advanced),
            _ => false,
        };
        let mut entries = Vec::new();
        // The number of axes is far below i32::MAX.
        let mut sliced_axis = 0i32;
        for (i, column) in columns.into_iter().enumerate() {
            if together && Some(i) == first {
                plan.place = entries.len();
            }
            let axis = plan.view.len() as i32;
            match column {
                Column::Gap => continue,
                Column::New => {
                    plan.inserted.push(axis);
                    plan.view.push(1);
                    entries.push(1);
                    continue;
                }
                Column::Drop => plan.dropped.push(sliced_axis),
                Column::Keep(count) => {
                    plan.view.push(count);
                    entries.push(count);
                }
                Column::Gather(indices) => {
                    plan.view.push(plan.merged[sliced_axis as usize]);
                    plan.broadcast =
                        broadcast(&plan.broadcast, indices.shape()).ok_or_else(|| {
                            error(
                                op,
                                ErrorKind::Shape,
                                format!(
                                    "index arrays of shapes {:?} and {:?} do not broadcast together",
                                    plan.broadcast,
                                    indices.shape()
                                ),
                                array,
                            )
                        })?;
                    plan.gathered.push((axis, indices));
                }
            }
            sliced_axis += 1;
        }
        if plan.gathered.is_empty() {
            plan.place = 0;
        }
        plan.result = entries[..plan.place].to_vec();
        plan.result.extend(&plan.broadcast);
        plan.result.extend(&entries[plan.place..]);
        Ok(plan)
    }
}

/// Converts index values to a type that `gather` and `scatter` accept in any combination.
fn as_index(indices: &Array) -> Result<Array> {
    match indices.dtype() {
        Dtype::Int32 | Dtype::Uint32 => Ok(indices.clone()),
        _ => indices.astype(Dtype::Int32),
    }
}

/// The shape to which both shapes broadcast; `None` if they do not.
pub(super) fn broadcast(a: &[i32], b: &[i32]) -> Option<Vec<i32>> {
    let n = a.len().max(b.len());
    let at = |shape: &[i32], i: usize| (i + shape.len()).checked_sub(n).map_or(1, |at| shape[at]);
    (0..n)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Some(x),
            (1, y) => Some(y),
            (x, 1) => Some(x),
            _ => None,
        })
        .collect()
}

/// The single mask of an index whose other entries are whole axes, with the number of axes before
/// the mask.
pub(super) fn lone_mask<'i, 'a>(
    array: &Array,
    index: &'i [Index<'a>],
) -> Option<(&'i Entry<'a>, usize)> {
    let used: usize = index.iter().map(|i| i.0.axes()).sum();
    let left = array.ndim().checked_sub(used)?;
    let (mut axis, mut mask_axis) = (0, None);
    for Index(entry) in index {
        match entry {
            Entry::Ellipsis => axis += left,
            Entry::Slice(span) if is_whole(*span, *array.shape().get(axis)?) => axis += 1,
            _ => {
                let mask = entry.mask_shape()?;
                if mask_axis.replace((entry, axis)).is_some() {
                    return None;
                }
                axis += mask.len();
            }
        }
    }
    mask_axis
}
