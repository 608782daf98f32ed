//! A KV cache that a decoder block writes in place. MLX's own arrays are immutable, so a cache of
//! arrays makes a new array for each token. The append copies the whole cache if an unfinished
//! operation still refers to the old array. A [`KvBuffer`] keeps the same memory instead. An
//! operation that reads or writes the memory runs after all earlier operations whose reads or
//! writes conflict with it. Each operation runs at most once.

use std::cell::RefCell;
use std::sync::Arc;

use mlx_cpu_kernels::{KvPacking, KvType, dim};

use super::attention::{check_packing, kv_type};
use super::kv_arena::{self, From, KvLayer, layers_per_arena};
use crate::array::Array;
use crate::error::{Error, ErrorKind, Result};
use crate::memory;

/// Keys and values of one row in one layer, with capacity for more. [`super::Block::step`] writes
/// them in place.
///
/// Each write happens once. A transform that runs a graph again (`compile`, `checkpoint`,
/// gradients) does not write again: the result of the repeated step is NaN, and the memory keeps
/// the values of the first run.
/// ```
/// use mlx_rs_core::{Array, Device, Stream, cpu::KvBuffer};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     // Two positions of one head with two elements.
///     let keys = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 2, 2])?;
///     let memory = KvBuffer::holding(&keys, &keys, 2, 256)?;
///     assert_eq!(memory.capacity(), 256);
///     assert_eq!(memory.copy(1)?.1.to_vec::<f32>()?, [1.0, 2.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
pub struct KvBuffer {
    layer: Arc<KvLayer>,
    /// The number of written positions, from the first on. Other positions are uninitialized and
    /// must not be read.
    known: i32,
    /// The output of the last operation that writes to this buffer. All buffers that the operation
    /// writes share it. Every later reader and writer has it as an input, and so runs after the
    /// write.
    written: Option<Arc<Array>>,
    /// Copies made since the last write. The next writer runs after them.
    copies: RefCell<Vec<Arc<Array>>>,
}

impl std::fmt::Debug for KvBuffer {
    // The elements are not printed, because a pending operation may be about to change them.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvBuffer")
            .field("shape", &self.shape())
            .finish_non_exhaustive()
    }
}

/// Refuses dimensions that are not positive, and positions beyond the capacity.
fn check_shape(shape: [i32; 4], filled: i32) -> Result<()> {
    if shape.iter().all(|&n| n > 0) && (0..=shape[2]).contains(&filled) {
        return Ok(());
    }
    Err(fault(format!(
        "{filled} positions do not fit into {shape:?}"
    )))
}

/// The length of the last axis of a buffer for heads with `width` elements.
fn stored_width(kv_type: KvType, width: i32) -> Result<i32> {
    if let KvType::Packed(packing) = kv_type {
        check_packing(width, packing)?;
    }
    i32::try_from(kv_type.row(dim(width))).map_err(|_| fault("the heads are too large".into()))
}

/// Refuses layers that exceed the budget together, before the first one is allocated.
fn check_budget(layers: usize, shape: [i32; 4], kv_type: KvType) -> Result<()> {
    let each = memory::checked_bytes(&shape, 2 * kv_type.size());
    let all = each.and_then(|each| each.checked_mul(layers as u64));
    let budget = memory::budget();
    if all.is_some_and(|all| all <= budget) {
        return Ok(());
    }
    let message = format!(
        "{layers} layers of keys and values {shape:?} need more than the budget of {budget} bytes"
    );
    Err(Error::new(ErrorKind::OutOfMemory, "cpu::memory", message))
}

fn fault(message: String) -> Error {
    Error::new(ErrorKind::Shape, "cpu::memory", message)
}

impl KvBuffer {
    /// Memory for `capacity` positions of `heads` heads with `width` elements each. It is not
    /// initialized, and pages are allocated only when written.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when a number is not positive; [`ErrorKind::OutOfMemory`] beyond the
    /// [budget](crate::memory::budget); MLX's message when memory runs out.
    /// ```
    /// use mlx_rs_core::{Device, Stream, cpu::KvBuffer};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let memory = KvBuffer::empty((2, 64), 256)?;
    ///     assert_eq!(memory.shape(), [1, 2, 256, 64]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn empty(heads: (i32, i32), capacity: i32) -> Result<Self> {
        Ok(Self::several(1, heads, capacity)?.remove(0))
    }

    /// Allocates the buffers of one row, one for each layer. Small layers share allocations. An
    /// allocation is freed once all its layers are dropped or have grown.
    ///
    /// # Errors
    /// As [`Self::empty`]; the budget applies to all layers together.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::KvBuffer};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// let layers = KvBuffer::several(30, (2, 64), 256)?;
    /// assert_eq!(layers.len(), 30);
    /// assert_eq!(layers[29].shape(), [1, 2, 256, 64]);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn several(layers: usize, heads: (i32, i32), capacity: i32) -> Result<Vec<Self>> {
        Self::several_of(KvType::Float32, layers, heads, capacity)
    }

    /// Like [`Self::several`], with elements of another type.
    ///
    /// # Errors
    /// As [`Self::several`].
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::{KvBuffer, KvType}};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// let layers = KvBuffer::several_of(KvType::Float16, 30, (2, 64), 256)?;
    /// assert_eq!(layers[0].kv_type(), KvType::Float16);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn several_of(
        kv_type: KvType,
        layers: usize,
        (heads, width): (i32, i32),
        capacity: i32,
    ) -> Result<Vec<Self>> {
        check_shape([1, heads, capacity, width], 0)?;
        let shape = [1, heads, capacity, stored_width(kv_type, width)?];
        check_budget(layers, shape, kv_type)?;
        let mut all = Vec::with_capacity(layers);
        while all.len() < layers {
            let some = layers_per_arena(&shape, kv_type).min(layers - all.len());
            all.extend(Self::make(some, (shape, kv_type), None, &[])?);
        }
        Ok(all)
    }

    /// A buffer with a copy of the first `filled` positions of keys and values, float32 or float16,
    /// `[1, Hkv, n, D]`, and with capacity `capacity`. The buffer has their type.
    ///
    /// # Errors
    /// As [`Self::empty`]; also when `filled` exceeds `n` or the capacity.
    pub fn holding(keys: &Array, values: &Array, filled: i32, capacity: i32) -> Result<Self> {
        Self::holding_packed(keys, values, None, (filled, capacity))
    }

    /// Like [`Self::holding`], with keys and values that [`super::pack_kv`] packed; float32 or
    /// float16 without a packing.
    ///
    /// # Errors
    /// As [`Self::holding`].
    /// ```
    /// # use mlx_rs_core::{Array, Device, Stream, cpu::{KvBuffer, KvPacking, KvType, pack_kv}};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// let packing = KvPacking::new(8, 32).ok_or("no such packing").unwrap();
    /// let keys = pack_kv(&Array::from_slice(&[0.5f32; 64], &[1, 1, 2, 32])?, packing)?;
    /// let memory = KvBuffer::holding_packed(&keys, &keys, Some(packing), (2, 4))?;
    /// assert_eq!(memory.kv_type(), KvType::Packed(packing));
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn holding_packed(
        keys: &Array,
        values: &Array,
        packing: Option<KvPacking>,
        (filled, capacity): (i32, i32),
    ) -> Result<Self> {
        if keys.shape() != values.shape() {
            return Err(fault("keys and values must be of one shape".into()));
        }
        let shape = with_capacity(keys, capacity)?;
        let there = keys.shape()[2];
        if filled > there {
            return Err(fault(format!(
                "the keys have {there} positions, fewer than the {filled} filled ones"
            )));
        }
        let kv_type = kv_type(keys, packing).filter(|_| keys.dtype() == values.dtype());
        let Some(kv_type) = kv_type else {
            let message = "keys and values need one type: float32, float16, or packed words";
            return Err(fault(message.into()).with_inputs(&[keys, values]));
        };
        let shape = (shape, kv_type);
        Ok(Self::make(1, shape, Some((From::Arrays, filled)), &[keys, values])?.remove(0))
    }

    /// Buffers of several layers in one array. The first positions are copies of `from`. The copy
    /// runs after `inputs`.
    fn make(
        layers: usize,
        (shape, kv_type): ([i32; 4], KvType),
        from: Option<(From, i32)>,
        inputs: &[&Array],
    ) -> Result<Vec<Self>> {
        let filled = from.as_ref().map_or(0, |(_, filled)| *filled);
        check_shape(shape, filled)?;
        let made = KvLayer::allocate(layers, shape, kv_type)?;
        let written = match (from, made.first()) {
            (Some((from, 1..)), Some(first)) => Some(kv_arena::fill(first, from, filled, inputs)?),
            _ => None,
        };
        let written = written.map(Arc::new);
        let of = |layer| Self {
            layer,
            known: filled,
            written: written.clone(),
            copies: RefCell::default(),
        };
        Ok(made.into_iter().map(of).collect())
    }

    /// Changes the capacity to `capacity` positions, and keeps the first `filled`.
    ///
    /// # Errors
    /// As [`Self::holding`]; also when fewer positions were written. The buffer is then unchanged.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::KvBuffer};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// let mut memory = KvBuffer::empty((2, 64), 256)?;
    /// memory.grow(0, 512)?;
    /// assert_eq!(memory.capacity(), 512);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn grow(&mut self, filled: i32, capacity: i32) -> Result<()> {
        self.check(filled)?;
        let from = From::KvLayer(vec![Arc::clone(&self.layer)]);
        let after = after([&*self]);
        let from = Some((from, filled));
        let shape = (self.with(capacity), self.kv_type());
        *self = Self::make(1, shape, from, &arrays(&after))?.remove(0);
        Ok(())
    }

    /// The shape of the buffer with another capacity.
    fn with(&self, capacity: i32) -> [i32; 4] {
        let [one, heads, _, width] = *self.layer.shape();
        [one, heads, capacity, width]
    }

    /// Copies of the first `n` positions as arrays, `[1, Hkv, n, D]`; of a packed buffer as
    /// [`super::pack_kv`] returns them.
    ///
    /// # Errors
    /// As [`Self::holding`]; also when fewer positions were written.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::KvBuffer};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// assert!(KvBuffer::empty((1, 8), 4)?.copy(1).is_err());
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn copy(&self, n: i32) -> Result<(Array, Array)> {
        self.check(n)?;
        if n <= 0 {
            return Err(fault(format!("cannot copy {n} positions; copy at least 1")));
        }
        let after = after([self]);
        let part = |which: usize| self.layer.copy(which, n, &arrays(&after));
        let (keys, values) = (part(0)?, part(1)?);
        let mut copies = self.copies.borrow_mut();
        copies.extend([&keys, &values].map(|copy| Arc::new(copy.clone())));
        Ok((keys, values))
    }

    /// A separate buffer with a copy of the first `n` positions and capacity `capacity`. Later
    /// writes to `self` run after the copy.
    ///
    /// # Errors
    /// As [`Self::holding`]; also when fewer positions were written.
    /// ```
    /// # use mlx_rs_core::{Array, Device, Stream, cpu::KvBuffer};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// let keys = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 2, 2])?;
    /// let memory = KvBuffer::holding(&keys, &keys, 2, 4)?;
    /// let other = memory.fork(1, 8)?;
    /// assert_eq!(other.capacity(), 8);
    /// assert_eq!(other.copy(1)?.0.to_vec::<f32>()?, [1.0, 2.0]);
    /// assert!(other.copy(2).is_err());
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn fork(&self, n: i32, capacity: i32) -> Result<Self> {
        Ok(Self::fork_all(&[self], n, capacity)?.remove(0))
    }

    /// Forks a row's buffers in several layers. Small layers share operations.
    ///
    /// # Errors
    /// As [`Self::fork`].
    /// ```
    /// # use mlx_rs_core::{Array, Device, Stream, cpu::KvBuffer};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// let keys = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 2, 2])?;
    /// let one = KvBuffer::holding(&keys, &keys, 2, 4)?;
    /// let other = KvBuffer::holding(&keys.negative()?, &keys, 2, 4)?;
    /// let forks = KvBuffer::fork_all(&[&one, &other], 1, 8)?;
    /// assert_eq!(forks[1].copy(1)?.0.to_vec::<f32>()?, [-1.0, -2.0]);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn fork_all(layers: &[&Self], n: i32, capacity: i32) -> Result<Vec<Self>> {
        for layer in layers {
            layer.check(n)?;
        }
        let mut forks = Vec::with_capacity(layers.len());
        let of = |layer: &Self| (layer.with(capacity), layer.kv_type());
        let alike = layers.chunk_by(|a, b| of(a) == of(b));
        let most = |(shape, kv_type): ([i32; 4], KvType)| layers_per_arena(&shape, kv_type);
        for some in alike.flat_map(|alike| alike.chunks(most(of(alike[0])))) {
            let from = From::KvLayer(
                some.iter()
                    .map(|buffer| Arc::clone(&buffer.layer))
                    .collect(),
            );
            let after = after(some.iter().copied());
            let shape = of(some[0]);
            forks.extend(Self::make(
                some.len(),
                shape,
                Some((from, n)),
                &arrays(&after),
            )?);
        }
        for (fork, layer) in forks.iter().zip(layers) {
            layer.copies.borrow_mut().extend(fork.written.clone());
        }
        Ok(forks)
    }

    /// Checks that the first `n` positions were written.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if fewer were written.
    pub(super) fn check(&self, n: i32) -> Result<()> {
        if n <= self.known {
            return Ok(());
        }
        let known = self.known;
        Err(fault(format!(
            "only {known} positions were written, not {n}"
        )))
    }

    /// The capacity in positions.
    pub fn capacity(&self) -> i32 {
        self.layer.shape()[2]
    }

    /// The type of the elements.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::{KvBuffer, KvType}};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// assert_eq!(KvBuffer::empty((1, 8), 4)?.kv_type(), KvType::Float32);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn kv_type(&self) -> KvType {
        self.layer.kv_type()
    }

    /// The shape of the keys, and of the values: `[1, Hkv, capacity, D]`, or with the words of a
    /// packed head in place of `D`.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::KvBuffer};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// assert_eq!(KvBuffer::empty((1, 8), 4)?.shape(), [1, 1, 4, 8]);
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn shape(&self) -> &[i32] {
        self.layer.shape()
    }

    /// The array to evaluate so that all writes are done; `None` if nothing was written. An
    /// operation that writes several buffers has one such array for all of them.
    /// ```
    /// # use mlx_rs_core::{Device, Stream, cpu::KvBuffer};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// assert!(KvBuffer::empty((1, 8), 4)?.written().is_none());
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn written(&self) -> Option<&Array> {
        self.written.as_deref()
    }

    /// Keys and values for an operation that writes them. The operation must have [`Self::before`]
    /// among its inputs.
    pub(super) fn layer(&self) -> Arc<KvLayer> {
        Arc::clone(&self.layer)
    }

    /// Appends to `known` the outputs of operations that must run before a writer of this buffer,
    /// unless they are already in `known`.
    pub(super) fn before(&self, known: &mut Vec<Arc<Array>>) {
        self.made(known);
        for copy in &*self.copies.borrow() {
            add(known, copy);
        }
    }

    /// Appends to `known` the outputs of operations that must run before a reader of this buffer,
    /// unless they are already in `known`.
    fn made(&self, known: &mut Vec<Arc<Array>>) {
        if let Some(array) = &self.written {
            add(known, array);
        }
    }

    /// Records that the operation with output `y` writes to this buffer up to position `end`. The
    /// operation must run after [`Self::before`].
    pub(super) fn is_written_with(&mut self, y: &Arc<Array>, end: i32) {
        self.known = self.known.max(end);
        self.written = Some(Arc::clone(y));
        self.copies.get_mut().clear();
    }
}

/// Appends an array unless it is already in the list.
fn add(known: &mut Vec<Arc<Array>>, array: &Arc<Array>) {
    if !known.iter().any(|k| Arc::ptr_eq(k, array)) {
        known.push(Arc::clone(array));
    }
}

/// The outputs of operations that must run before a reader of all these buffers.
fn after<'m>(all: impl IntoIterator<Item = &'m KvBuffer>) -> Vec<Arc<Array>> {
    let mut known = Vec::new();
    for memory in all {
        memory.made(&mut known);
    }
    known
}

fn arrays(all: &[Arc<Array>]) -> Vec<&Array> {
    all.iter().map(|array| &**array).collect()
}

/// The shape of a cache, with capacity `capacity` instead of its own.
fn with_capacity(cache: &Array, capacity: i32) -> Result<[i32; 4]> {
    match *cache.shape() {
        [1, heads, _, width] => Ok([1, heads, capacity, width]),
        _ => Err(
            fault("a cache needs the shape [1, heads, positions, width]".into())
                .with_inputs(&[cache]),
        ),
    }
}
