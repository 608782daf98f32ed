//! The default unbounded KV cache. Its storage is chunks of MLX arrays (`chunked.rs`). When a block
//! runs as one operation (`nn/fused.rs`), the storage is memory that our kernels write in place.
//! The contents are converted on demand. A conversion is rare, because a request is one prompt
//! followed by single tokens.

use mlx_rs_core::{Array, Result};

use super::chunked::{CHUNK, ChunkedCache, capacity};
use super::{KvCache, KvView, LayerState, Portable, Snapshot};
use crate::exec::{Heads, KvBuffer, KvType};

/// Keys and values of all positions so far.
#[derive(Debug, Default)]
pub struct InPlaceCache {
    /// Counts the positions. Also stores their keys and values if there is no `memory`.
    chunks: ChunkedCache,
    memory: Option<KvBuffer>,
    /// The expected final number of positions.
    expected: i32,
}

/// Allocates memory for all layers of a row at once.
#[derive(Debug)]
pub struct KvAllocator {
    /// The number of layers that have not yet requested memory.
    layers: usize,
    made: Vec<KvBuffer>,
}

impl KvAllocator {
    /// An allocator for this number of layers.
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
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// The cache with elements in float16 if `half`.
    pub fn with_half(mut self, half: bool) -> Self {
        self.chunks = self.chunks.with_half(half);
        self
    }

    /// All keys and values as arrays.
    fn as_chunks(&self) -> Result<ChunkedCache> {
        let mut chunks = self.chunks.clone();
        if let (Some(memory), true) = (&self.memory, chunks.offset > 0) {
            chunks.buffers = Some(memory.copy(chunks.offset)?);
        }
        Ok(chunks)
    }

    /// Two capacities for `end` positions: that of new memory, and that of memory that has to grow.
    /// Both have room for one more token. Otherwise the first generated token would cause a copy of
    /// the whole prompt. New memory also covers the expected positions, up to the chunk size.
    /// Unwritten positions use address space and no physical memory.
    fn capacities(&self, end: i32) -> (i32, i32) {
        let least = end.saturating_add(1);
        let chunk = (end / CHUNK * CHUNK).checked_add(CHUNK).unwrap_or(least);
        (capacity(self.expected.clamp(least, chunk)), chunk)
    }

    /// Separate copies of the first `n` positions, or fewer, of all layers of a row.
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

    /// The inputs for a copy of at most `n` positions: memory to fork, number of positions, new
    /// capacity. `None` if the cache stores arrays instead of memory.
    fn forked(&self, n: i32) -> Option<(&KvBuffer, i32, i32)> {
        let filled = self.chunks.offset.min(n);
        let memory = self.memory.as_ref().filter(|_| filled > 0)?;
        Some((memory, filled, self.capacities(filled).0))
    }

    /// A copy of at most `n` positions, stored in the forked `memory` if given.
    fn copy_with(&self, memory: Option<KvBuffer>, n: i32) -> Result<Self> {
        let mut chunks = match memory {
            Some(_) => self.chunks.clone(),
            None => self.as_chunks()?,
        };
        chunks.offset = chunks.offset.min(n);
        Ok(Self {
            chunks,
            memory,
            expected: self.expected,
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

    /// Our kernels append keys and values of `length` tokens of a packed projection, from token
    /// `first` on. Returns keys and values `[1, Hkv, n, D]`, whose capacity may exceed the valid
    /// positions.
    pub fn store(
        &mut self,
        heads: &Heads,
        packed: &Array,
        tokens: (i32, i32),
    ) -> Result<(Array, Array)> {
        self.chunks()?.store(heads, packed, tokens)
    }

    /// Memory that kernels write in place, with capacity for keys and values of `length` more
    /// tokens. After writing, call [`Self::advance`] to count these tokens. New memory comes from
    /// the allocator.
    ///
    /// # Errors
    /// As [`Self::store`].
    pub fn memory(
        &mut self,
        heads: &Heads,
        length: i32,
        allocator: &mut KvAllocator,
    ) -> Result<&mut KvBuffer> {
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
            (None, Some((keys, values))) => KvBuffer::holding(keys, values, filled, capacity)?,
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
        self.chunks()?.update(keys, values)
    }

    fn portable(&self) -> Result<Option<Portable>> {
        self.as_chunks()?.portable()
    }

    fn adopt(&mut self, portable: Portable) -> std::result::Result<(), String> {
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
        self.chunks.offset
    }

    fn arrays(&self) -> Vec<&Array> {
        match &self.memory {
            Some(memory) => memory.written().into_iter().collect(),
            None => self.chunks.arrays(),
        }
    }

    fn nbytes(&self) -> usize {
        let Some(memory) = &self.memory else {
            return self.chunks.nbytes();
        };
        // The memory has keys and values.
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
    }

    fn trim(&mut self, n: i32) -> bool {
        self.chunks.trim(n)
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
        self.chunks.kind()
    }

    fn snapshot(&self) -> Result<Snapshot> {
        self.as_chunks()?.snapshot()
    }

    fn restore(&mut self, snapshot: Snapshot) -> Result<(), String> {
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
mod tests {
    use super::*;
    use mlx_rs_core::cpu::{Block, DenseMatrix, Gate, KvSlot, Matrix};
    use mlx_rs_core::{Device, Dtype, Stream, zeros};

    /// A matrix of zeros, if the kernels are enabled.
    fn none() -> Option<Matrix> {
        let zeros = zeros(&[2, 2], Dtype::Float32).unwrap();
        DenseMatrix::new(&zeros).unwrap().map(Matrix::Dense)
    }

    fn heads() -> Heads {
        Heads {
            n_heads: 1,
            n_kv_heads: 1,
            head_dim: 2,
            scale: 1.0,
            softcap: None,
            q_norm: None,
            k_norm: None,
            rotation: None,
            sinks: None,
        }
    }

    fn block<'a>(heads: &'a Heads, none: &'a Matrix) -> Block<'a> {
        Block {
            heads,
            attention_norm: None,
            projections: [(none, None); 3],
            output: (none, None),
            feed_norm: None,
            gate: Gate::Silu,
            gate_up: [(none, None); 2],
            down: (none, None),
        }
    }

    /// The capacity after `prompt` tokens if `expected` positions are announced. The second value
    /// is the capacity after the token that exceeds the first capacity.
    fn capacities(expected: Option<i32>, prompt: i32) -> (i32, i32) {
        let heads = heads();
        let mut capacities = (0, 0);
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let none = none().unwrap();
            let mut cache = InPlaceCache::new();
            if let Some(expected) = expected {
                cache.expect(expected);
            }
            let memory = cache
                .memory(&heads, prompt, &mut KvAllocator::new(1))
                .unwrap();
            capacities.0 = memory.capacity();
            let slot = KvSlot {
                length: capacities.0,
                offset: 0,
                memory,
                window: None,
            };
            let x = zeros(&[1, capacities.0, 2], Dtype::Float32).unwrap();
            block(&heads, &none).step(&x, &mut [slot]).unwrap();
            cache.advance(capacities.0);
            capacities.1 = cache
                .memory(&heads, 1, &mut KvAllocator::new(1))
                .unwrap()
                .capacity();
        });
        capacities
    }

    /// Appends tokens whose keys and values are zeros.
    fn write(cache: &mut InPlaceCache, tokens: i32) {
        let (heads, none, offset) = (heads(), none().unwrap(), cache.offset());
        let slot = KvSlot {
            length: tokens,
            offset,
            memory: cache
                .memory(&heads, tokens, &mut KvAllocator::new(1))
                .unwrap(),
            window: None,
        };
        let x = zeros(&[1, tokens, 2], Dtype::Float32).unwrap();
        block(&heads, &none).step(&x, &mut [slot]).unwrap();
        cache.advance(tokens);
    }

    /// A copy must have its own memory, with capacity for the expected positions. Both caches must
    /// continue without changing each other.
    #[test]
    fn a_copy_stays_in_place_and_goes_on_by_itself() {
        if none().is_none() {
            return; // the kernels are disabled
        }
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let mut cache = InPlaceCache::new();
            cache.expect(20);
            write(&mut cache, 5);
            let mut copy = cache.copy().unwrap();
            assert_eq!(copy.arrays().len(), 1, "one array says that all is there");
            copy.trim(2);
            write(&mut cache, 1);
            let kernels = copy.as_kv_mut().unwrap().in_place_mut().unwrap();
            let memory = kernels
                .memory(&heads(), 1, &mut KvAllocator::new(1))
                .unwrap();
            assert_eq!(memory.capacity(), 32);
            assert!(memory.copy(5).is_ok() && memory.copy(6).is_err());
            assert_eq!((cache.offset(), copy.offset()), (6, 3));
            // Keys and values of 32 positions, each with two float32 elements.
            assert_eq!(copy.nbytes(), 32 * 2 * 2 * 4);
            copy.reset();
            assert!(copy.is_empty() && copy.nbytes() == 0 && cache.len() == 6);
            // An empty cache has nothing to copy.
            assert_eq!(InPlaceCache::new().copy().unwrap().offset(), 0);
        });
    }

    /// A copy of few positions must allocate memory only for these positions, with equal contents.
    #[test]
    fn a_part_is_copied_without_the_memory_of_the_rest() {
        if none().is_none() {
            return; // the kernels are disabled
        }
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let mut cache = InPlaceCache::new();
            write(&mut cache, 700);
            let mut part = InPlaceCache::copy_all(&[&cache], 5).unwrap().remove(0);
            assert_eq!((cache.offset(), part.offset()), (700, 5));
            assert!(part.nbytes() * 2 < cache.nbytes());
            write(&mut part, 3);
            assert_eq!((cache.offset(), part.offset()), (700, 8));
            // Arrays must be truncated, too.
            cache.chunks().unwrap();
            let part = InPlaceCache::copy_all(&[&cache], 5).unwrap().remove(0);
            let (keys, _) = part.as_chunks().unwrap().valid().unwrap().unwrap();
            assert_eq!(keys.shape(), [1, 1, 5, 2]);
        });
    }

    /// Copying several layers together must equal separate copies. The layers differ: with memory,
    /// with arrays, with other capacities, and empty.
    #[test]
    fn layers_are_copied_together() {
        if none().is_none() {
            return; // the kernels are disabled
        }
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let mut allocator = KvAllocator::new(2);
            let mut layers: Vec<InPlaceCache> = (0..5).map(|_| InPlaceCache::new()).collect();
            for layer in &mut layers[..4] {
                let capacity = layer
                    .memory(&heads(), 5, &mut allocator)
                    .unwrap()
                    .capacity();
                assert_eq!(capacity, 8);
                write(layer, 5);
            }
            layers[1].chunks().unwrap();
            for expected in [8, 40] {
                layers[3].expect(expected);
                let all: Vec<&InPlaceCache> = layers.iter().collect();
                let mut copies = InPlaceCache::copy_all(&all, i32::MAX).unwrap();
                let kinds: Vec<bool> = copies.iter().map(|copy| copy.memory.is_some()).collect();
                assert_eq!(kinds, [true, false, true, true, false]);
                let offsets: Vec<i32> = copies.iter().map(LayerState::offset).collect();
                assert_eq!(offsets, [5, 5, 5, 5, 0]);
                let capacity = |copy: &mut InPlaceCache| {
                    let memory = copy.memory(&heads(), 1, &mut KvAllocator::new(1)).unwrap();
                    assert!(memory.copy(5).is_ok());
                    memory.capacity()
                };
                assert_eq!(capacity(&mut copies[0]), 8);
                assert_eq!(capacity(&mut copies[3]), if expected == 8 { 8 } else { 64 });
            }
        });
    }

    #[test]
    fn capacity_is_made_for_what_is_expected_and_then_by_chunks() {
        if none().is_none() {
            return; // the kernels are disabled
        }
        assert_eq!(capacities(None, 5), (8, 256));
        // The capacity includes the first token after the prompt.
        assert_eq!(capacities(None, 8), (16, 256));
        assert_eq!(capacities(Some(80), 16), (128, 256));
        assert_eq!(capacities(Some(3), 16), (32, 256));
        assert_eq!(capacities(Some(100_000), 16), (256, 512));
        assert_eq!(capacities(Some(600), 300), (512, 768));
        assert_eq!(capacities(None, 300), (512, 768));
    }

    /// A float16 cache in memory, in arrays, in a file and in a copy.
    #[test]
    fn float16_caches_keep_their_type() {
        if none().is_none() {
            return; // the kernels are disabled
        }
        Stream::default_of(Device::cpu()).unwrap().scope(|| {
            let empty = || InPlaceCache::new().with_half(true);
            let mut cache = empty();
            write(&mut cache, 5);
            assert_eq!(cache.nbytes(), 8 * 2 * 2 * 2);
            let mut copy = InPlaceCache::copy_all(&[&cache], 3).unwrap().remove(0);
            write(&mut copy, 10);
            assert_eq!((cache.offset(), copy.offset()), (5, 13));
            // MLX's operations append float32.
            let part = Array::from_slice(&[0.1f32, 7e4, -1e9, 2.0], &[1, 1, 2, 2]).unwrap();
            let view = copy.update(&part, &part).unwrap();
            let crate::cache::Stored::Plain(keys) = view.keys else {
                panic!("not plain");
            };
            assert_eq!(keys.dtype(), Dtype::Float16);
            let keys = keys.astype(Dtype::Float32).unwrap();
            let last = keys.slice_axis(2, 13, 15).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(last, [0.099_975_586, 65_504.0, -65_504.0, 2.0]);
            // The kernels go on from there, and a reset keeps the type.
            write(&mut copy, 1);
            let snapshot = copy.snapshot().unwrap();
            assert_eq!(snapshot.arrays["keys"].dtype(), Dtype::Float16);
            copy.reset();
            write(&mut copy, 1);
            assert_eq!(copy.nbytes(), 2 * 2 * 2 * 2);
            // A file of either type is read into either cache.
            let wide = {
                let mut wide = InPlaceCache::new();
                wide.restore(snapshot.clone()).unwrap();
                wide.snapshot().unwrap()
            };
            assert_eq!(wide.arrays["keys"].dtype(), Dtype::Float32);
            for snapshot in [snapshot.clone(), wide] {
                let mut other = empty();
                other.restore(snapshot).unwrap();
                let again = other.snapshot().unwrap();
                assert_eq!(other.offset(), 16);
                let keys = again.arrays["keys"].astype(Dtype::Float32).unwrap();
                let keys = keys.slice_axis(2, 13, 15).unwrap();
                assert_eq!(keys.to_vec::<f32>().unwrap(), last);
                assert_eq!(again.kind, "chunked:float16");
                write(&mut other, 1);
            }
        });
    }
}
