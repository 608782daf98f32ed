//! The state of a layer after earlier positions ([`LayerState`]): keys and values of attention, or
//! the state of a recurrent layer. The caller passes the state to a forward pass; layers do not own
//! it.
//!
//! Kinds of states:
//!
//! - [`InPlaceCache`] keeps keys and values of all positions. Our kernels write it in place, and
//!   may pack it. MLX's operations use it as a [`ChunkedCache`].
//! - [`QuantizedCache`] keeps packed keys and values of all positions.
//! - [`RotatingCache`] keeps the last positions and a few of the first.
//! - [`WindowedCache`] keeps the same positions, and can be truncated.
//! - [`PassingCache`] keeps nothing, for training.
//! - [`RecurrentState`] has arrays of fixed shape.
//! - [`PairState`] has keys and values, and a recurrent state.
//!
//! [`CacheOptions`] selects the kind for a layer. `checkpoint.rs` copies states that cannot be
//! trimmed. `file.rs` stores caches on disk, `mlx_lm.rs` in the format of Python's mlx-lm. `tier/`
//! manages a directory of such files.

pub(crate) mod checkpoint;
mod chunked;
pub mod file;
mod file_tensors;
mod in_place;
mod mlx_lm;
mod pair;
pub mod passing;
mod portable;
pub(crate) mod prefix;
mod quantized;
mod recurrent;
#[cfg(test)]
mod reset_tests;
mod rotating;
mod state;
#[cfg(test)]
mod test_support;
pub(crate) mod tier;
mod windowed;

pub(crate) use checkpoint::Checkpoints;
pub use in_place::{InPlaceCache, KvAllocator};
pub use pair::PairState;
pub use portable::Portable;
pub(crate) use prefix::Prefixes;
pub use quantized::QuantizedCache;
pub use recurrent::{RecurrentState, StateLayout, StatePart};
pub use rotating::RotatingCache;
pub use state::{KvCache, LayerState, Snapshot};
pub use windowed::WindowedCache;

use mlx_rs_core::{Array, Dtype, Quantized, Result, eval};

use crate::exec;

/// Keys or values in the form that attention reads, `[B, Hkv, n, D]`.
#[derive(Debug, Clone)]
pub enum Stored {
    /// Unquantized elements.
    Plain(Array),
    /// Quantized elements.
    Quantized(Quantized),
}

impl Stored {
    /// The number of positions.
    ///
    /// # Errors
    /// If an array has fewer than three axes.
    pub fn positions(&self) -> Result<i32> {
        match self {
            Stored::Plain(a) => a.dim(2),
            Stored::Quantized(q) => q.weight.dim(2),
        }
    }

    /// Returns the arrays that store the elements: one if plain, several if quantized.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let (one, more) = match self {
            Stored::Plain(a) => (a, None),
            Stored::Quantized(q) => (&q.weight, Some([Some(&q.scales), q.biases.as_ref()])),
        };
        std::iter::once(one).chain(more.into_iter().flatten().flatten())
    }

    /// Returns positions `from..to`, limited to existing positions.
    ///
    /// # Errors
    /// If an array has fewer than three axes.
    pub fn range(&self, from: i32, to: i32) -> Result<Self> {
        Ok(match self {
            Stored::Plain(a) => Stored::Plain(a.slice_axis(2, from, to)?),
            Stored::Quantized(q) => Stored::Quantized(map(q, |a| a.slice_axis(2, from, to))?),
        })
    }

    /// Returns unquantized elements. Dequantized elements get the type of `like`.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn plain(&self, like: &Array) -> Result<Array> {
        match self {
            Stored::Plain(a) => Ok(a.clone()),
            Stored::Quantized(q) => q.dequantize(like.dtype()),
        }
    }
}

/// Applies `f` to each part of a quantized array.
pub(crate) fn map(q: &Quantized, f: impl Fn(&Array) -> Result<Array>) -> Result<Quantized> {
    Ok(Quantized {
        weight: f(&q.weight)?,
        scales: f(&q.scales)?,
        biases: q.biases.as_ref().map(f).transpose()?,
        ..*q
    })
}

/// The order of the keys that a cache returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The first `keep` keys are positions `0..keep`. The following keys are consecutive positions
    /// from `start` on.
    Run {
        /// The number of keys from the beginning of the sequence.
        keep: i32,
        /// Position of the first key after the first `keep` keys.
        start: i32,
    },
    /// A full ring buffer after the first `keep` keys, as in [`rotating`]. Valid only for a single
    /// query, because it attends to every slot.
    Any,
}

/// The keys and values that the queries of one row attend to.
#[derive(Debug, Clone)]
pub struct KvView {
    /// `[B, Hkv, n, D]`.
    pub keys: Stored,
    /// `[B, Hkv, n, D]`.
    pub values: Stored,
    /// Position of the first query.
    pub offset: i32,
    /// The order of the keys.
    pub order: Order,
    /// The number of last positions that a query attends to, without the first `keep` positions;
    /// `None` if it attends to all.
    pub window: Option<i32>,
    /// The value of [`Caches::reach`].
    pub reach: i32,
}

/// How a rotation depends on the length of the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// The rotation changes once, beyond this length (LongRoPE).
    Once(i32),
    /// The rotation changes with each position beyond this length (dynamic NTK).
    Gradual(i32),
}

/// The states of all layers for one sequence.
///
/// A rotation may change with the length of the sequence (LongRoPE). A query and all keys that it
/// attends to must have the same rotation. So the caches record the length of the complete
/// sequence, not only of the current step, and keys do not depend on how a prompt is split into
/// steps. The caches never mix keys of two rotations. If [`Caches::until_switch`] is 0, the caller
/// must compute the sequence again from its start.
///
/// Rotations that change gradually are an exception. As in transformers, the keys of generated
/// tokens keep the rotation for the length at which they were added. Such a sequence shares no keys
/// with other sequences.
#[derive(Debug, Default)]
pub struct Caches {
    layers: Vec<Box<dyn LayerState>>,
    /// Sequence lengths beyond which the rotation changes, ascending.
    switches: Vec<i32>,
    /// The length beyond which each further position changes the rotation.
    gradual: Option<i32>,
    reach: i32,
    /// Whether other stages of a pipeline have recurrent layers.
    recurrent_elsewhere: bool,
}

impl Caches {
    /// Sets how the layers' rotations depend on the length of the sequence.
    pub fn with_switches(mut self, switches: impl IntoIterator<Item = Switch>) -> Self {
        for switch in switches {
            match switch {
                Switch::Once(length) => self.switches.push(length),
                Switch::Gradual(length) => {
                    self.gradual = Some(self.gradual.map_or(length, |other| other.min(length)));
                }
            }
        }
        self.switches.sort_unstable();
        self.switches.dedup();
        self
    }

    /// Records whether other stages of a pipeline have recurrent layers.
    pub fn with_recurrent_elsewhere(mut self, recurrent: bool) -> Self {
        self.recurrent_elsewhere = recurrent;
        self
    }

    /// Sets the known minimum length of the sequence, in positions.
    #[must_use]
    pub fn for_sequence(mut self, positions: usize) -> Self {
        self.reach = i32::try_from(positions).unwrap_or(i32::MAX);
        self
    }

    /// Returns the known length of the sequence. The caches may contain fewer or more positions.
    pub fn reach(&self) -> i32 {
        self.reach
    }

    /// Returns an id of the keys' rotation: the number of switches that the sequence has passed. If
    /// each position changes the rotation, the id is the sequence's length.
    pub fn stretch(&self) -> usize {
        match self.changes_gradually() {
            true => self.length().unsigned_abs() as usize,
            false => self.passed(),
        }
    }

    /// Returns the known length of the sequence: its expected length, or the number of computed
    /// positions if this is greater.
    fn length(&self) -> i32 {
        self.reach.max(offset(self))
    }

    /// Returns the number of switches that the sequence has passed.
    fn passed(&self) -> usize {
        let length = self.length();
        self.switches.partition_point(|&switch| switch < length)
    }

    /// Whether the sequence is longer than the length beyond which each position changes the
    /// rotation.
    fn changes_gradually(&self) -> bool {
        self.gradual.is_some_and(|length| length < self.length())
    }

    /// Whether the caches can always remove their last positions. False if any layer is recurrent,
    /// also in other stages of a pipeline, because all stages must remove the same positions.
    pub fn rewinds(&self) -> bool {
        let own = || self.layers.iter();
        !self.recurrent_elsewhere && own().all(|layer| layer.as_recurrent().is_none())
    }

    /// Whether the rotation depends on the length of the sequence.
    pub fn may_switch(&self) -> bool {
        !self.switches.is_empty() || self.gradual.is_some()
    }

    /// The number of positions that can be added before the rotation changes.
    pub fn until_switch(&self) -> i32 {
        let next = self.switches.get(self.passed());
        next.map_or(i32::MAX, |switch| switch - offset(self))
    }
}

impl std::ops::Deref for Caches {
    type Target = [Box<dyn LayerState>];

    fn deref(&self) -> &Self::Target {
        &self.layers
    }
}

impl std::ops::DerefMut for Caches {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.layers
    }
}

impl FromIterator<Box<dyn LayerState>> for Caches {
    fn from_iter<I: IntoIterator<Item = Box<dyn LayerState>>>(layers: I) -> Self {
        Self {
            layers: layers.into_iter().collect(),
            ..Self::default()
        }
    }
}

impl FromIterator<Box<dyn KvCache>> for Caches {
    fn from_iter<I: IntoIterator<Item = Box<dyn KvCache>>>(layers: I) -> Self {
        (layers.into_iter())
            .map(|layer| layer as Box<dyn LayerState>)
            .collect()
    }
}

impl From<Box<dyn LayerState>> for Caches {
    fn from(layer: Box<dyn LayerState>) -> Self {
        Self::from_iter([layer])
    }
}

impl From<Box<dyn KvCache>> for Caches {
    fn from(layer: Box<dyn KvCache>) -> Self {
        Self::from_iter([layer])
    }
}

/// One of several sequences that are computed in one pass. The tokens of all rows are concatenated
/// without padding: `[1, T]`, where `T` is the sum of the lengths. Attention keeps the rows
/// separate.
#[derive(Debug)]
pub struct Row<'a> {
    /// The number of the row's tokens in this step.
    pub length: i32,
    /// The caches of the row.
    pub caches: &'a mut Caches,
}

/// The lengths of the rows.
pub fn lengths(rows: &[Row<'_>]) -> Vec<i32> {
    rows.iter().map(|row| row.length).collect()
}

/// The options for a model's caches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheOptions {
    /// The maximum number of positions that each layer stores.
    pub bound: Option<i32>,
    /// The quantization of keys and values in layers without a window.
    pub packing: Option<Packing>,
    /// Whether unquantized keys and values are stored as float16, regardless of the compute type.
    pub half: bool,
    /// The number of last positions that every layer must be able to remove at any time. Layers
    /// with a window store this number of additional positions. With [`CacheOptions::ALL`], they
    /// store all positions.
    pub trimmable: Option<i32>,
}

/// The quantization of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Bits per element.
    pub bits: i32,
    /// Elements that share a scale (quantization group); this number divides the head size.
    pub group_size: i32,
    /// The first packed position; earlier positions stay plain.
    pub start: i32,
}

/// The number of first positions that a bounded cache never drops. Attention puts much weight on
/// these positions, and models fail without them (Xiao et al. 2023). A cache with a very small
/// bound drops them, too.
const KEPT: i32 = 4;

impl CacheOptions {
    /// The value of [`CacheOptions::trimmable`] with which no position is ever dropped.
    pub const ALL: i32 = i32::MAX;

    /// Creates an empty cache for a layer with a window of `window` positions.
    pub fn cache(&self, window: Option<i32>) -> Box<dyn KvCache> {
        let (size, keep) = match (window, self.bound) {
            (Some(window), bound) => (bound.map_or(window, |bound| bound.min(window)), 0),
            (None, Some(bound)) if bound >= 4 * KEPT => (bound, KEPT),
            (None, Some(bound)) => (bound, 0),
            (None, None) => {
                return match self.packing {
                    Some(packing) => packed_cache(packing),
                    None => Box::new(InPlaceCache::new().with_half(self.half)),
                };
            }
        };
        match self.trimmable {
            None => Box::new(RotatingCache::new(size, keep).with_half(self.half)),
            Some(Self::ALL) => Box::new(InPlaceCache::new().with_half(self.half)),
            Some(spare) => Box::new(WindowedCache::new(size, keep, spare).with_half(self.half)),
        }
    }

    /// Creates an empty cache for a layer whose queries attend only to their chunk of `chunk`
    /// positions.
    pub fn chunk_cache(&self, chunk: i32) -> Box<dyn KvCache> {
        if self.trimmable == Some(Self::ALL) {
            return Box::new(InPlaceCache::new().with_half(self.half));
        }
        // The mask needs keys in order to find a chunk's keys. A ring buffer has no order, so it
        // cannot be used.
        let size = self.bound.map_or(chunk, |bound| bound.min(chunk));
        let spare = self.trimmable.unwrap_or(0);
        Box::new(WindowedCache::new(size, 0, spare).with_half(self.half))
    }
}

/// Creates an empty cache for packed positions, written by our kernels if they are enabled.
fn packed_cache(packing: Packing) -> Box<dyn KvCache> {
    let kernels = exec::on_kernels().unwrap_or(false);
    match InPlaceCache::with_packing(packing).filter(|_| kernels) {
        Some(cache) => Box::new(cache),
        None => Box::new(QuantizedCache::new(packing)),
    }
}

/// Returns the layer's cache if our kernels can write to it.
pub fn in_place(layer: &mut Box<dyn LayerState>) -> Option<&mut InPlaceCache> {
    layer.as_kv_mut()?.in_place_mut()
}

/// Evaluates the arrays of the caches.
///
/// # Errors
/// If the computation fails.
pub fn eval_caches(caches: &Caches) -> Result<()> {
    eval(caches.iter().flat_map(|c| c.arrays()))
}

/// Returns the position of the next token.
pub fn offset(caches: &Caches) -> i32 {
    caches.first().map_or(0, |c| c.offset())
}

/// Removes the last `n` positions in all layers and returns true, or changes nothing and returns
/// false.
pub fn trim(caches: &mut Caches, n: i32) -> bool {
    if caches.iter().all(|c| c.can_trim(n)) {
        caches.iter_mut().all(|c| c.trim(n))
    } else {
        false
    }
}

/// Whether `caches` can replace `others`: all layers have equal kinds, and the rotations are equal.
pub fn alike(caches: &Caches, others: &Caches) -> bool {
    caches.len() == others.len()
        && caches.stretch() == others.stretch()
        && !caches.changes_gradually()
        && caches
            .iter()
            .zip(others.iter())
            .all(|(a, b)| a.kind() == b.kind())
}

/// Returns a separate copy of the first `n` positions. `None` if a layer cannot be truncated to
/// `n`.
pub fn copy_prefix(caches: &Caches, n: i32) -> Result<Option<Caches>> {
    copy_with(caches, n, &[])
}

/// Returns the layer's state in a checkpoint; `None` if the checkpoint has none for it.
fn part_of(parts: &[Option<Box<dyn LayerState>>], layer: usize) -> Option<&dyn LayerState> {
    parts.get(layer)?.as_deref()
}

/// Whether [`copy_with`] is possible.
fn can_copy_with(caches: &Caches, n: i32, parts: &[Option<Box<dyn LayerState>>]) -> bool {
    let mut layers = caches.iter().enumerate();
    layers.all(|(i, layer)| layer.can_copy_to(n, part_of(parts, i)))
}

/// Copies as [`copy_prefix`], with the checkpoint `parts` for layers that cannot be truncated.
fn copy_with(
    caches: &Caches,
    n: i32,
    parts: &[Option<Box<dyn LayerState>>],
) -> Result<Option<Caches>> {
    if !can_copy_with(caches, n, parts) {
        return Ok(None);
    }
    let in_place = |layer: &dyn LayerState| -> bool {
        layer.as_recurrent().is_none() && layer.as_kv().and_then(KvCache::in_place).is_some()
    };
    // `copy_all` copies several in-place layers into one allocation.
    let grown: Vec<_> = (caches.iter())
        .filter(|layer| in_place(layer.as_ref()))
        .filter_map(|layer| layer.as_kv().and_then(KvCache::in_place))
        .collect();
    let mut grown = InPlaceCache::copy_all(&grown, n)?.into_iter();
    let mut layers = Vec::with_capacity(caches.len());
    for (i, layer) in caches.iter().enumerate() {
        let copy = match in_place(layer.as_ref()) {
            true => grown
                .next()
                .map(|copy| Box::new(copy) as Box<dyn LayerState>),
            false => layer.copy_to(n, part_of(parts, i))?,
        };
        let Some(copy) = copy else { return Ok(None) };
        layers.push(copy);
    }
    Ok(Some(Caches {
        layers,
        switches: caches.switches.clone(),
        gradual: caches.gradual,
        recurrent_elsewhere: caches.recurrent_elsewhere,
        reach: caches.reach,
    }))
}

/// Converts an array to another type. Values beyond the range of float16 become its greatest value.
fn cast(a: &Array, dtype: Dtype) -> Result<Array> {
    if dtype != Dtype::Float16 || a.dtype() == dtype {
        return a.astype(dtype);
    }
    let most = f32::from(half::f16::MAX);
    // bfloat16 cannot represent the greatest float16 value, so the limit is applied in float32.
    let wide = a.astype(Dtype::Float32)?;
    wide.clip(Some(&Array::scalar(-most)?), Some(&Array::scalar(most)?))?
        .astype(dtype)
}
