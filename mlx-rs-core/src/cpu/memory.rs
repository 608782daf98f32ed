//! Keys and values that a decoder block writes where they are. MLX's own arrays never change, so that a cache
//! made of them is a new array with each token, whose memory can be used again only once nobody looks at the old
//! one; what is in flight looks. Here the arrays stay with their owner, and whoever wrote last comes first.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use super::heads::count;
use super::host_op::{self, Input, Meaning, Work};
use super::share::{Output, share};
use crate::array::Array;
use crate::closure;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// Keys and values of one row in one layer, with room for more. [`super::Block::step`] writes them in place.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu::KvMemory};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     // Two positions of one head with two elements.
///     let keys = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 2, 2])?;
///     let memory = KvMemory::holding(&keys, &keys, 2, 256)?;
///     assert_eq!(memory.room(), 256);
///     assert_eq!(memory.copy(1)?.1.to_vec::<f32>()?, [1.0, 2.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub struct KvMemory {
    kept: Arc<Kept>,
    room: i32,
    /// So many positions were written, from the first on: nothing is known of the others, which nobody may see.
    known: i32,
    /// What the last operation that writes here makes, the same for all that it writes. Every reader and writer after it
    /// has it among its inputs, and so comes after it.
    written: Option<Arc<Array>>,
    /// What was copied from here since, for the next writer to come after.
    copies: RefCell<Vec<Arc<Array>>>,
}

impl std::fmt::Debug for KvMemory {
    // Not the elements, which may be about to change.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvMemory")
            .field("shape", &self.shape())
            .finish_non_exhaustive()
    }
}

fn fault(message: String) -> Error {
    Error::new(ErrorKind::Shape, "cpu::memory", message)
}

impl KvMemory {
    /// Room for `room` positions of so many heads with so many elements each, none of which is
    /// there before it is written, nor takes any of the machine's memory.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when a number is not positive; MLX's message when memory runs out or the current
    /// stream is not on the CPU.
    /// ```
    /// use mlx_rs_core::{Device, Stream, cpu::KvMemory};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let memory = KvMemory::empty((2, 64), 256)?;
    ///     assert_eq!(memory.shape(), [1, 2, 256, 64]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn empty((heads, width): (i32, i32), room: i32) -> Result<Self> {
        let shape = [1, heads, room, width];
        Ok(Self::of(
            [moved(None, &[], 0, &shape)?, moved(None, &[], 0, &shape)?],
            shape,
            0,
        ))
    }

    /// A copy of the first `filled` positions of keys and values, float32 `[1, Hkv, n, D]`, with room for `room`.
    ///
    /// # Errors
    /// As [`Self::empty`], also when there are not so many positions, or no room for them.
    pub fn holding(keys: &Array, values: &Array, filled: i32, room: i32) -> Result<Self> {
        if keys.shape() != values.shape() {
            return Err(fault("keys and values must be of one shape".into()));
        }
        let shape = with_room(keys, room)?;
        let part = |a: &Array| moved(Some(a), &[], filled, &shape);
        Ok(Self::of([part(keys)?, part(values)?], shape, filled))
    }

    fn of(arrays: [Array; 2], shape: [i32; 4], known: i32) -> Self {
        Self {
            kept: Arc::new(Kept::new(arrays, shape)),
            room: shape[2],
            known,
            written: None,
            copies: RefCell::default(),
        }
    }

    /// Gets room for `room` positions, and keeps the first `filled`.
    ///
    /// # Errors
    /// As [`Self::holding`], also when fewer were written; nothing has changed then.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::KvMemory};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// let mut memory = KvMemory::empty((2, 64), 256)?;
    /// memory.grow(0, 512)?;
    /// assert_eq!(memory.room(), 512);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn grow(&mut self, filled: i32, room: i32) -> Result<()> {
        self.check(filled)?;
        let after: Vec<&Array> = self.written().into_iter().collect();
        let [keys, values] = self.arrays();
        let shape = with_room(keys, room)?;
        let part = |a: &Array| moved(Some(a), &after, filled, &shape);
        *self = Self::of([part(keys)?, part(values)?], shape, filled);
        Ok(())
    }

    /// Copies of the first `n` positions as arrays, `[1, Hkv, n, D]`.
    ///
    /// # Errors
    /// As [`Self::holding`], also when fewer were written.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::KvMemory};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// assert!(KvMemory::empty((1, 8), 4)?.copy(1).is_err());
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn copy(&self, n: i32) -> Result<(Array, Array)> {
        self.check(n)?;
        let after: Vec<&Array> = self.written().into_iter().collect();
        let part = |a: &Array| moved(Some(a), &after, n, &with_room(a, n)?);
        let [keys, values] = self.arrays();
        let (keys, values) = (part(keys)?, part(values)?);
        let mut copies = self.copies.borrow_mut();
        copies.extend([&keys, &values].map(|copy| Arc::new(copy.clone())));
        Ok((keys, values))
    }

    /// A memory of its own that begins with the first `n` positions of this one, and has room for `room`. What is written here
    /// later comes after the copy.
    ///
    /// # Errors
    /// As [`Self::holding`], also when fewer were written.
    /// ```
    /// # use mlx_rs_core::{Array, Device, Stream, cpu::KvMemory};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// let keys = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 2, 2])?;
    /// let memory = KvMemory::holding(&keys, &keys, 2, 4)?;
    /// let other = memory.fork(1, 8)?;
    /// assert_eq!(other.room(), 8);
    /// assert_eq!(other.copy(1)?.0.to_vec::<f32>()?, [1.0, 2.0]);
    /// assert!(other.copy(2).is_err());
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn fork(&self, n: i32, room: i32) -> Result<Self> {
        self.check(n)?;
        let after: Vec<&Array> = self.written().into_iter().collect();
        let [keys, values] = self.arrays();
        let shape = with_room(keys, room)?;
        let part = |a: &Array| moved(Some(a), &after, n, &shape);
        let fork = Self::of([part(keys)?, part(values)?], shape, n);
        let made = host_op::add("cpu::memory", Meaning::Opaque, Made, &fork.arrays(), &[1])?;
        let made = Arc::new(made);
        self.copies.borrow_mut().push(Arc::clone(&made));
        Ok(Self {
            written: Some(made),
            ..fork
        })
    }

    /// Whether the first `n` positions were written.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when not.
    pub(super) fn check(&self, n: i32) -> Result<()> {
        if n <= self.known {
            return Ok(());
        }
        let known = self.known;
        Err(fault(format!(
            "only {known} positions were written, not {n}"
        )))
    }

    /// Positions that it has room for.
    pub fn room(&self) -> i32 {
        self.room
    }

    /// `[1, Hkv, room, D]`.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::KvMemory};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// assert_eq!(KvMemory::empty((1, 8), 4)?.shape(), [1, 1, 4, 8]);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn shape(&self) -> &[i32] {
        &self.kept.shape
    }

    /// What to evaluate so that all is written; `None` when nothing was. It is one array, in one place, for all that one
    /// operation wrote.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::KvMemory};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// assert!(KvMemory::empty((1, 8), 4)?.written().is_none());
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn written(&self) -> Option<&Array> {
        self.written.as_deref()
    }

    /// Keys and values for an operation that writes them, and must have [`Self::before`] among its inputs.
    pub(super) fn arrays(&self) -> [&Array; 2] {
        self.kept.arrays()
    }

    /// The same, to be held by the operation instead of being among its inputs; `None` as long as they are not there.
    ///
    /// # Errors
    /// MLX's message when they cannot be looked at.
    pub(super) fn held(&self) -> Result<Option<Arc<Kept>>> {
        Ok(self.kept.inputs()?.map(|_| Arc::clone(&self.kept)))
    }

    /// What comes before an operation that writes here, besides what others wrote in `known`, to which it is added.
    pub(super) fn before(&self, known: &mut Vec<Arc<Array>>) {
        if let Some(written) = &self.written
            && !known.iter().any(|k| Arc::ptr_eq(k, written))
        {
            known.push(Arc::clone(written));
        }
        known.extend(self.copies.borrow().iter().cloned());
    }

    /// What `y` comes from writes here, after [`Self::before`], as far as position `end`.
    pub(super) fn is_written_with(&mut self, y: &Arc<Array>, end: i32) {
        self.known = self.known.max(end);
        self.written = Some(Arc::clone(y));
        self.copies.get_mut().clear();
    }
}

/// Keys and values, and where they are.
pub(super) struct Kept {
    // These must not leave: what else has one of them would see it change, or another thread change it.
    arrays: Vec<Array>,
    shape: [i32; 4],
    strides: [i64; 4],
    /// Where their elements are, once they are there.
    inputs: OnceLock<[Input; 2]>,
}

// SAFETY: the addresses are those of the arrays' elements and of this value's layout. It is made in its place on the heap and
// stays there while it is kept; who may write elements is told by `KvMemory`.
unsafe impl Send for Kept {}
// SAFETY: as for Send.
unsafe impl Sync for Kept {}

impl Kept {
    fn new(arrays: [Array; 2], shape: [i32; 4]) -> Self {
        let [_, _, room, width] = shape.map(i64::from);
        Self {
            arrays: arrays.into(),
            shape,
            strides: [0, room * width, width, 1],
            inputs: OnceLock::new(),
        }
    }

    fn arrays(&self) -> [&Array; 2] {
        [&self.arrays[0], &self.arrays[1]]
    }

    /// Where keys and values are, if [`Self::inputs`] has said so.
    pub(super) fn seen(&self) -> Option<[Input; 2]> {
        self.inputs.get().copied()
    }

    /// Where keys and values are; `None` as long as they are not there.
    ///
    /// # Errors
    /// MLX's message when they cannot be looked at.
    fn inputs(self: &Arc<Self>) -> Result<Option<[Input; 2]>> {
        if let Some(inputs) = self.seen() {
            return Ok(Some(inputs));
        }
        let [keys, values] = self.arrays();
        if !keys.is_available()? || !values.is_available()? {
            return Ok(None);
        }
        let input = |a| Input::of_array_with(a, &self.shape, &self.strides);
        let inputs = [input(keys)?, input(values)?];
        Ok(Some(*self.inputs.get_or_init(|| inputs)))
    }
}

impl Drop for Kept {
    /// An operation that held them may be freed by a thread of MLX's.
    fn drop(&mut self) {
        closure::part_with(std::mem::take(&mut self.arrays));
    }
}

/// The shape of a cache with room for so many positions.
fn with_room(cache: &Array, room: i32) -> Result<[i32; 4]> {
    match *cache.shape() {
        [1, heads, _, width] => Ok([1, heads, room, width]),
        _ => Err(
            fault("a cache needs the shape [1, heads, positions, width]".into())
                .with_inputs(&[cache]),
        ),
    }
}

/// A new array of `shape` with the first `filled` positions of a cache, after others were made. Nothing is known of
/// the others.
fn moved(cache: Option<&Array>, after: &[&Array], filled: i32, shape: &[i32; 4]) -> Result<Array> {
    let there = cache.map_or(0, |cache| cache.shape().get(2).copied().unwrap_or(0));
    let positive = shape.iter().all(|&n| n > 0);
    if !positive || filled < 0 || filled > there || filled > shape[2] {
        return Err(fault(format!(
            "{filled} of {there} positions do not go into {shape:?}"
        )));
    }
    if let Some(cache) = cache
        && cache.dtype() != Dtype::Float32
    {
        return Err(fault("needs float32".into()).with_inputs(&[cache]));
    }
    let work = Move {
        heads: count(shape[1]),
        filled: count(filled),
        room: count(shape[2]),
        width: count(shape[3]),
    };
    let inputs: Vec<&Array> = cache.into_iter().chain(after.iter().copied()).collect();
    host_op::add_strided("cpu::memory", work, &inputs, 0, shape)
}

/// Comes after keys and values are made, and says so: they themselves must not leave.
struct Made;

impl Work for Made {
    fn outputs(&self) -> usize {
        1
    }

    fn run(&self, _: &[Input], output: &mut [f32]) {
        output.fill(0.0);
    }
}

/// Copies the first positions of a cache, if there is one.
struct Move {
    heads: usize,
    filled: usize,
    room: usize,
    width: usize,
}

impl Work for Move {
    fn outputs(&self) -> usize {
        self.heads * self.room * self.width
    }

    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let from = inputs.first().map(|i| {
            // SAFETY: `moved` has seen that it is float32; whoever writes into it comes before or after.
            (unsafe { &*i.reach::<f32>() }, i.strides())
        });
        let Some((data, strides)) = &from else {
            return;
        };
        let (out, filled) = (Output::new(output), self.filled);
        let work = self.heads * filled * self.width;
        // Neighboring positions at once, where they are neighbors.
        let run = if strides[2] == self.width {
            filled.max(1)
        } else {
            1
        };
        let runs = filled / run;
        // What is new to the process is slow to write at first, which two threads share.
        share(self.heads * runs, work, &|from, to| {
            for unit in from..to {
                let (h, i) = (unit / runs, unit % runs * run);
                let (start, n) = (h * strides[1] + i * strides[2], run * self.width);
                // SAFETY: each position of each head is one unit's alone.
                let to = unsafe { out.part((h * self.room + i) * self.width, n) };
                to.copy_from_slice(&data[start..start + n]);
            }
        });
    }
}
