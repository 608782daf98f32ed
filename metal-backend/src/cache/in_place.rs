//! The default unbounded KV cache. It has two kinds of storage. MLX's operations use chunks of MLX
//! arrays (`chunked.rs`). If a block is computed as one operation (`nn/fused.rs`), our kernels
//! write memory in place. The contents are converted on demand. Conversions are rare, because a
//! request is one prompt followed by single tokens.
//!
//! The kernels can also pack keys and values. MLX's operations then use a [`QuantizedCache`] with
//! the same contents.

use mlx_rs_core::{Array, Result};

use super::chunked::{CHUNK, ChunkedCache, capacity};
use super::{KvCache, KvView, LayerState, Packing, Portable, QuantizedCache, Snapshot};
use crate::exec::{Heads, KvBuffer, KvPacking, KvType, pack_kv};

/// Keys and values of all positions so far.
#[derive(Debug, Default)]
pub struct InPlaceCache {
    /// Counts the positions. Also stores their keys and values, if `memory` is `None`.
    chunks: ChunkedCache,
    memory: Option<KvBuffer>,
    /// The expected final number of positions.
    expected: i32,
    packed: Option<Packed>,
}

/// How the positions of a cache are packed.
#[derive(Debug, Clone)]
struct Packed {
    packing: Packing,
    /// The same packing for the kernels.
    kv: KvPacking,
    /// All keys and values, if MLX's operations were the last to use them. `chunks` and `memory`
    /// are then empty.
    arrays: Option<QuantizedCache>,
}

/// Allocates the memory for all layers of a row together.
#[derive(Debug)]
pub struct KvAllocator {
    /// The number of layers that have not requested memory yet.
    layers: usize,
    made: Vec<KvBuffer>,
}

impl KvAllocator {
    /// Creates an allocator for `layers` layers.
    pub fn new(layers: usize) -> Self {
        Self {
            layers,
            made: Vec::new(),
        }
    }

    /// Returns the memory for the next layer.
    fn take(
        &mut self,
        kv_type: KvType,
        (heads, width): (i32, i32),
        capacity: i32,
    ) -> Result<KvBuffer> {
        let others = self.layers.saturating_sub(1);
        self.layers = others;
        let fits = |memory: &mut KvBuffer| {
            memory.shape() == [1, heads, capacity, width] && memory.kv_type() == kv_type
        };
        if let Some(memory) = self.made.pop_if(fits) {
            return Ok(memory);
        }
        let mut made = KvBuffer::several_of(kv_type, 1 + others, (heads, width), capacity)?;
        self.made = made.split_off(1);
        Ok(made.remove(0))
    }
}

impl InPlaceCache {
    /// Creates an empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the cache store float16 if `half`.
    pub fn with_half(mut self, half: bool) -> Self {
        self.chunks = self.chunks.with_half(half);
        self
    }

    /// Creates an empty cache whose positions are packed; `None` if the kernels do not support this
    /// packing.
    pub fn with_packing(packing: Packing) -> Option<Self> {
        let (bits, group) = (packing.bits, packing.group_size);
        let kv = KvPacking::new(u32::try_from(bits).ok()?, u32::try_from(group).ok()?)?;
        let mut cache = Self {
            packed: Some(Packed {
                packing,
                kv,
                arrays: None,
            }),
            ..Self::default()
        };
        cache.reset();
        Some(cache)
    }

    /// Returns how the stored positions are packed at present; `None` if they are not packed.
    pub fn packing(&self) -> Option<KvPacking> {
        self.chunks.packing
    }

    /// Prepares the cache for kernels that append up to position `end`. If `end` exceeds the number
    /// of positions that may stay unpacked, packs all positions.
    fn prepare(&mut self, end: i32) -> Result<()> {
        let Some(packed) = &mut self.packed else {
            return Ok(());
        };
        if let Some(arrays) = &packed.arrays {
            self.chunks = arrays.to_rows(packed.kv)?;
            packed.arrays = None;
        }
        if self.chunks.packing.is_some() || end <= packed.packing.start {
            return Ok(());
        }
        let kv = packed.kv;
        let plain = self.as_chunks()?;
        self.chunks = match plain.valid()?.filter(|_| plain.offset > 0) {
            Some((keys, values)) => {
                let rows = (pack_kv(&keys, kv)?, pack_kv(&values, kv)?);
                ChunkedCache::packed(rows, plain.offset, kv)
            }
            None => plain,
        };
        self.chunks.packing = Some(kv);
        self.memory = None;
        Ok(())
    }

    /// Returns the contents as MLX's operations use them; `None` if positions are not to be packed.
    fn as_quantized(&self) -> Result<Option<QuantizedCache>> {
        match &self.packed {
            None => Ok(None),
            Some(Packed {
                arrays: Some(arrays),
                ..
            }) => Ok(Some(arrays.clone())),
            Some(packed) => QuantizedCache::from_rows(packed.packing, &self.as_chunks()?).map(Some),
        }
    }

    /// Converts the contents to a cache for MLX's operations and returns it; `None` if positions
    /// are not to be packed.
    fn quantized(&mut self) -> Result<Option<&mut QuantizedCache>> {
        if self.arrays_of_mlx().is_none()
            && let Some(arrays) = self.as_quantized()?
        {
            self.set_arrays(arrays);
        }
        Ok(self
            .packed
            .as_mut()
            .and_then(|packed| packed.arrays.as_mut()))
    }

    /// Replaces the contents of a cache whose positions are to be packed.
    fn set_arrays(&mut self, arrays: QuantizedCache) {
        if let Some(packed) = &mut self.packed {
            packed.arrays = Some(arrays);
            self.chunks = ChunkedCache::new();
            self.memory = None;
        }
    }

    /// Returns the cache of MLX's operations, if it stores the contents at present.
    fn arrays_of_mlx(&self) -> Option<&QuantizedCache> {
        self.packed.as_ref()?.arrays.as_ref()
    }

    /// Returns all keys and values as arrays.
    fn as_chunks(&self) -> Result<ChunkedCache> {
        let mut chunks = self.chunks.clone();
        if let (Some(memory), true) = (&self.memory, chunks.offset > 0) {
            chunks.buffers = Some(memory.copy(chunks.offset)?);
        }
        Ok(chunks)
    }

    /// Returns two capacities for `end` positions: for new memory, and for memory that must grow.
    /// Both include one more token, because otherwise the first generated token would cause a copy
    /// of the complete prompt. New memory also includes the expected positions, up to the next
    /// multiple of the chunk size. Unwritten positions use address space, but no physical memory.
    fn capacities(&self, end: i32) -> (i32, i32) {
        let least = end.saturating_add(1);
        let chunk = (end / CHUNK * CHUNK).checked_add(CHUNK).unwrap_or(least);
        (capacity(self.expected.clamp(least, chunk)), chunk)
    }

    /// Returns separate copies of the first positions of all layers of a row, at most `n`.
    pub fn copy_all(layers: &[&Self], n: i32) -> Result<Vec<Self>> {
        let forked: Vec<_> = layers.iter().filter_map(|layer| layer.forked(n)).collect();
        let mut forks = Vec::with_capacity(forked.len());
        for alike in forked.chunk_by(|a, b| (a.1, a.2) == (b.1, b.2)) {
            let memories: Vec<&KvBuffer> = alike.iter().map(|(memory, ..)| *memory).collect();
            forks.extend(KvBuffer::fork_all(&memories, alike[0].1, alike[0].2)?);
        }
        let mut forks = forks.into_iter();
        (layers.iter())
            .map(|layer| layer.copy_with(layer.forked(n).and_then(|_| forks.next()), n))
            .collect()
    }

    /// Returns the inputs for a copy of at most `n` positions: memory to fork, number of positions,
    /// and new capacity. `None` if the cache stores arrays instead of memory.
    fn forked(&self, n: i32) -> Option<(&KvBuffer, i32, i32)> {
        let filled = self.chunks.offset.min(n);
        let memory = self.memory.as_ref().filter(|_| filled > 0)?;
        Some((memory, filled, self.capacities(filled).0))
    }

    /// Returns a copy of at most `n` positions, stored in the forked `memory` if given.
    fn copy_with(&self, memory: Option<KvBuffer>, n: i32) -> Result<Self> {
        let mut chunks = match memory {
            Some(_) => self.chunks.clone(),
            None => self.as_chunks()?,
        };
        chunks.offset = chunks.offset.min(n);
        let mut packed = self.packed.clone();
        if let Some(arrays) = packed.as_mut().and_then(|packed| packed.arrays.as_mut()) {
            arrays.trim(arrays.offset() - n);
        }
        Ok(Self {
            chunks,
            memory,
            expected: self.expected,
            packed,
        })
    }

    /// Converts the contents to arrays, if necessary, and returns them.
    fn chunks(&mut self) -> Result<&mut ChunkedCache> {
        if self.memory.is_some() {
            self.chunks = self.as_chunks()?;
            self.memory = None;
        }
        Ok(&mut self.chunks)
    }

    /// Makes our kernels append keys and values of `length` tokens of a packed projection, from
    /// token `first` on. Returns keys and values `[1, Hkv, n, D]`, whose capacity may exceed the
    /// valid positions.
    pub fn store(
        &mut self,
        heads: &Heads,
        packed: &Array,
        tokens: (i32, i32),
    ) -> Result<(Array, Array)> {
        self.prepare(self.offset().saturating_add(tokens.1))?;
        self.chunks()?.store(heads, packed, tokens)
    }

    /// Returns memory that kernels write in place, with capacity for keys and values of `length`
    /// more tokens. After writing, call [`Self::advance`] to count these tokens. New memory comes
    /// from the allocator.
    ///
    /// # Errors
    /// The errors of [`Self::store`].
    pub fn memory(
        &mut self,
        heads: &Heads,
        length: i32,
        allocator: &mut KvAllocator,
    ) -> Result<&mut KvBuffer> {
        self.prepare(self.offset().saturating_add(length))?;
        let filled = self.chunks.offset;
        let end = filled.saturating_add(length);
        let (expected, chunk) = self.capacities(end);
        let capacity = match self.memory {
            None => expected,
            Some(_) => chunk,
        };
        let memory = match (self.memory.take(), &self.chunks.buffers) {
            (Some(mut memory), _) => {
                let grown = if memory.capacity() < end {
                    memory.grow(filled, capacity)
                } else {
                    Ok(())
                };
                if let Err(e) = grown {
                    self.memory = Some(memory);
                    return Err(e);
                }
                memory
            }
            (None, Some((keys, values))) => {
                let size = (filled, capacity);
                KvBuffer::holding_packed(keys, values, self.chunks.packing, size)?
            }
            (None, None) => {
                let size = (heads.n_kv_heads, heads.head_dim);
                allocator.take(self.chunks.kv_type(), size, capacity)?
            }
        };
        self.chunks.buffers = None;
        Ok(self.memory.insert(memory))
    }

    /// Counts tokens that were written to [`Self::memory`].
    pub fn advance(&mut self, length: i32) {
        self.chunks.offset = self.chunks.offset.saturating_add(length);
    }
}

impl KvCache for InPlaceCache {
    fn update(&mut self, keys: &Array, values: &Array) -> Result<KvView> {
        if let Some(arrays) = self.quantized()? {
            return arrays.update(keys, values);
        }
        self.chunks()?.update(keys, values)
    }

    fn portable(&self) -> Result<Option<Portable>> {
        match self.as_quantized()? {
            Some(arrays) => arrays.portable(),
            None => self.as_chunks()?.portable(),
        }
    }

    fn adopt(&mut self, portable: Portable) -> std::result::Result<(), String> {
        if let Some(packed) = &self.packed {
            let mut arrays = QuantizedCache::new(packed.packing);
            arrays.adopt(portable)?;
            self.set_arrays(arrays);
            return Ok(());
        }
        self.memory = None;
        self.chunks.adopt(portable)
    }

    fn in_place(&self) -> Option<&InPlaceCache> {
        Some(self)
    }

    fn in_place_mut(&mut self) -> Option<&mut InPlaceCache> {
        self.chunks.stores().then_some(self)
    }
}

impl LayerState for InPlaceCache {
    fn expect(&mut self, positions: i32) {
        self.expected = positions;
    }

    fn offset(&self) -> i32 {
        (self.arrays_of_mlx()).map_or(self.chunks.offset, LayerState::offset)
    }

    fn arrays(&self) -> Vec<&Array> {
        if let Some(arrays) = self.arrays_of_mlx() {
            return arrays.arrays();
        }
        match &self.memory {
            Some(memory) => memory.written().into_iter().collect(),
            None => self.chunks.arrays(),
        }
    }

    fn nbytes(&self) -> usize {
        if let Some(arrays) = self.arrays_of_mlx() {
            return arrays.nbytes();
        }
        let Some(memory) = &self.memory else {
            return self.chunks.nbytes();
        };
        // The factor 2 is for keys and values.
        let elements = memory.shape().iter().map(|d| d.unsigned_abs() as usize);
        elements.product::<usize>() * 2 * memory.kv_type().size()
    }

    fn can_trim(&self, n: i32) -> bool {
        self.chunks.can_trim(n)
    }

    fn keeps_all(&self, positions: i32) -> bool {
        self.chunks.keeps_all(positions)
    }

    fn reset(&mut self) {
        self.memory = None;
        self.chunks.reset();
        if let Some(packed) = &mut self.packed {
            packed.arrays = None;
            // The first `start` positions may stay unpacked.
            self.chunks.packing = (packed.packing.start <= 0).then_some(packed.kv);
        }
    }

    fn trim(&mut self, n: i32) -> bool {
        let arrays = self
            .packed
            .as_mut()
            .and_then(|packed| packed.arrays.as_mut());
        match arrays {
            Some(arrays) => arrays.trim(n),
            None => self.chunks.trim(n),
        };
        if self.packed.is_some() && self.is_empty() {
            self.reset();
        }
        true
    }

    fn copy(&self) -> Result<Box<dyn LayerState>> {
        Ok(Box::new(Self::copy_all(&[self], i32::MAX)?.remove(0)))
    }

    fn copy_to(&self, n: i32, _: Option<&dyn LayerState>) -> Result<Option<Box<dyn LayerState>>> {
        if n > self.offset() {
            return Ok(None);
        }
        Ok(Some(Box::new(Self::copy_all(&[self], n)?.remove(0))))
    }

    fn kind(&self) -> String {
        match &self.packed {
            Some(packed) => QuantizedCache::new(packed.packing).kind(),
            None => self.chunks.kind(),
        }
    }

    fn snapshot(&self) -> Result<Snapshot> {
        match self.as_quantized()? {
            Some(arrays) => arrays.snapshot(),
            None => self.as_chunks()?.snapshot(),
        }
    }

    fn restore(&mut self, snapshot: Snapshot) -> Result<(), String> {
        if let Some(packed) = &self.packed {
            let mut arrays = QuantizedCache::new(packed.packing);
            arrays.restore(snapshot)?;
            self.set_arrays(arrays);
            return Ok(());
        }
        self.memory = None;
        self.chunks.restore(snapshot)
    }

    fn as_kv(&self) -> Option<&dyn KvCache> {
        Some(self)
    }

    fn as_kv_mut(&mut self) -> Option<&mut dyn KvCache> {
        Some(self)
    }
}

#[cfg(test)]
#[path = "in_place_tests.rs"]
mod tests;
