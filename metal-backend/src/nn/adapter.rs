//! Layer support for adapters and training: slots, the computation of adapted layers, and the scope
//! of a differentiated forward pass. `adapter/` creates and stores adapters, and `train/` trains
//! them.
//!
//! A layer with a name has a [`ParamSlot`]. An adapter in a slot applies to all threads, and can be
//! exchanged or removed at any time. The values of a [`Scope`] replace a layer's values only on one
//! thread, so a model can train and serve requests at the same time. In a forward pass with a
//! [`Pass`], its adapters replace the adapters in the slots.

mod low_rank;
mod pass;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use inference_formats::split::Window;
use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, concatenate, random};
use parking_lot::RwLock;

use crate::exec::{self, Weight};

pub use low_rank::{LowRank, PreparedPair, ends};
pub use pass::{Deltas, Pass};

/// The kind of weight in a slot.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SlotKind {
    /// The matrix of a linear layer, or a stack of expert matrices.
    Matrix,
    /// The table of an embedding.
    Table,
    /// The weight of a norm. The norm may add a constant to the stored weight (1 in Gemma).
    Norm {
        /// The constant that the norm adds. The slot's own weight already includes this constant.
        plus: f32,
    },
    /// The bias of a layer or norm.
    Bias,
}

/// A parameter of a layer that an adapter can change. Low-rank adapters change matrices and stacks
/// of expert matrices. Full adapters replace matrices and vectors.
#[derive(Debug)]
pub struct ParamSlot {
    name: String,
    kind: SlotKind,
    weight: Weight,
    /// The slice of the stored weight that this process has; `None` for the complete weight.
    window: Option<Window>,
    active: AtomicBool,
    delta: RwLock<Option<Arc<Delta>>>,
}

/// The change at one slot.
#[derive(Debug, Clone)]
pub enum Delta {
    /// A low-rank term added to the weight.
    LowRank(LowRank),
    /// A replacement of the weight, as stored in a checkpoint.
    Whole(Array),
}

impl ParamSlot {
    /// Creates the slot of a weight: `[out, in]`, `[experts, out, in]` or a vector. A checkpoint
    /// stores this weight as `name.weight`, or as `name.bias` for a bias. The slot and the layer
    /// share the weight's memory.
    #[must_use]
    pub fn new(name: &str, kind: SlotKind, weight: Weight) -> Arc<Self> {
        Self::of_part(name, kind, weight, None)
    }

    /// Creates a slot as [`Self::new`], for a process that has only the slice `window` of the
    /// weight.
    #[must_use]
    pub fn of_part(
        name: &str,
        kind: SlotKind,
        weight: Weight,
        window: Option<Window>,
    ) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            kind,
            weight,
            window,
            active: AtomicBool::new(false),
            delta: RwLock::new(None),
        })
    }

    /// The name of the layer, such as `model.layers.0.self_attn.q_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kind of the slot's weight.
    pub fn kind(&self) -> SlotKind {
        self.kind
    }

    /// Whether the slot supports a low-rank adapter.
    pub fn is_matrix(&self) -> bool {
        matches!(self.kind, SlotKind::Matrix | SlotKind::Table)
    }

    /// The frozen weight.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// The suffix of the weight's name in a checkpoint.
    pub fn end(&self) -> &'static str {
        match self.kind {
            SlotKind::Bias => "bias",
            _ => "weight",
        }
    }

    /// Returns the weight as stored in a checkpoint, dequantized to `dtype`.
    pub fn stored_weight(&self, dtype: Dtype) -> Result<Array> {
        let dense = self.dense(dtype)?;
        match self.kind {
            SlotKind::Norm { plus } if plus != 0.0 => dense.subtract(&like(&dense, plus)?),
            _ => Ok(dense),
        }
    }

    /// Returns the current trainable parameters, each with the suffix of its name.
    pub fn parts(&self) -> Vec<(&'static str, Array)> {
        match self.stored().as_deref() {
            None => Vec::new(),
            Some(Delta::Whole(w)) => vec![(self.end(), w.clone())],
            Some(Delta::LowRank(low)) => low
                .parts(self.kind)
                .map(|(end, part)| (end, part.clone()))
                .collect(),
        }
    }

    /// Returns the current delta with parameters replaced by values from `other`; `None` without a
    /// delta. `other` receives a parameter's suffix and returns its new value, or `None` to keep
    /// it.
    pub fn replaced(&self, other: impl Fn(&str) -> Option<Array>) -> Option<Delta> {
        Some(self.with_parts(&*self.stored()?, other))
    }

    /// Returns `delta` with parameters replaced by values from `other`.
    fn with_parts(&self, delta: &Delta, other: impl Fn(&str) -> Option<Array>) -> Delta {
        match delta {
            Delta::Whole(w) => Delta::Whole(other(self.end()).unwrap_or_else(|| w.clone())),
            Delta::LowRank(low) => {
                let mut low = low.clone();
                let (a, b) = ends(self.kind);
                let (new_a, new_b) = (other(a), other(b));
                if new_a.is_some() || new_b.is_some() {
                    low.prepared = PreparedPair::default();
                }
                low.a = new_a.unwrap_or(low.a);
                low.b = new_b.unwrap_or(low.b);
                low.m = low.m.map(|m| other("m").unwrap_or(m));
                Delta::LowRank(low)
            }
        }
    }

    /// The shape of the weight: `[out, in]`, or `[experts, out, in]`.
    pub fn shape(&self) -> Vec<i32> {
        self.weight.shape()
    }

    /// Returns the slice of the stored weight that this process has; `None` for the complete
    /// weight.
    pub fn window(&self) -> Option<&Window> {
        self.window.as_ref()
    }

    /// Returns the shape of the stored weight. [`Self::shape`] may be the shape of a slice.
    pub fn stored_shape(&self) -> Vec<i32> {
        let mut shape = self.shape();
        if let Some(window) = &self.window
            && let Some(length) = shape.get_mut(window.axis)
        {
            *length = i32::try_from(window.length).unwrap_or(i32::MAX);
        }
        shape
    }

    /// The index of the decoder block that contains the slot, parsed from its name.
    pub fn block(&self) -> Option<usize> {
        block_of(&self.name)
    }

    /// Sets, exchanges or removes the delta, and returns the previous delta. To change several
    /// slots at once, use [`Passes::change`].
    fn set(&self, delta: Option<Delta>) -> Option<Arc<Delta>> {
        let mut current = self.delta.write();
        self.active.store(delta.is_some(), Ordering::Release);
        std::mem::replace(&mut current, delta.map(Arc::new))
    }

    /// The current delta.
    pub fn stored(&self) -> Option<Arc<Delta>> {
        if !self.active.load(Ordering::Acquire) {
            return None;
        }
        let current = self.delta.read();
        current.clone()
    }

    /// Returns the weight, dequantized to `dtype`.
    pub fn dense(&self, dtype: Dtype) -> Result<Array> {
        self.weight.dense(dtype)
    }

    /// Returns the current delta. In a [`Pass`], this is the pass's delta. In a scope, the scope's
    /// values replace parameters of the delta.
    ///
    /// # Errors
    /// If the rows of the pass have different deltas.
    fn current(&self) -> Result<Option<Delta>> {
        if let Some(pass) = pass::current() {
            let delta = pass.change(self)?;
            return Ok(delta.map(|delta| without_dropout(Delta::clone(&delta))));
        }
        let Some(stored) = self.stored() else {
            return Ok(None);
        };
        let scope = scope();
        if scope.as_ref().is_some_and(|s| s.without_adapters) {
            return Ok(None);
        }
        let param = |end: &str| scope.as_ref()?.param(&self.name, end).cloned();
        let delta = self.with_parts(&stored, param);
        Ok(Some(match scope.and_then(|s| s.dropout.clone()) {
            Some(_) => delta,
            None => without_dropout(delta),
        }))
    }

    /// Returns the vector that replaces the layer's own vector, cast to `dtype`; `None` without a
    /// delta.
    pub fn vector(&self, dtype: Dtype) -> Result<Option<Array>> {
        if !self.is_adapted() {
            return Ok(None);
        }
        match (self.current()?, self.kind) {
            (Some(Delta::Whole(w)), SlotKind::Norm { plus }) if plus != 0.0 => {
                w.add(&like(&w, plus)?)?.astype(dtype).map(Some)
            }
            (Some(Delta::Whole(w)), _) => w.astype(dtype).map(Some),
            _ => Ok(None),
        }
    }

    /// Whether an adapter changes the slot in this thread's pass.
    pub fn is_adapted(&self) -> bool {
        match pass::current() {
            Some(pass) => pass.changes(self),
            None => self.active.load(Ordering::Acquire),
        }
    }

    /// Applies dropout to `x`: sets some elements to zero, and scales the others so that the mean
    /// does not change.
    fn dropped(&self, x: &Array, fraction: f32) -> Result<Array> {
        if fraction == 0.0 {
            return Ok(x.clone());
        }
        let key = match scope().and_then(|s| s.dropout.clone()) {
            None => return Ok(x.clone()),
            Some(Dropout::Seed(seed)) => dropout_key(&self.name, seed)?,
            Some(Dropout::Keys(keys)) => match keys.get(&self.name) {
                Some(key) => key.clone(),
                None => {
                    let message = format!("there is no dropout key of `{}`", self.name);
                    return Err(Error::new(ErrorKind::Value, "dropout", message));
                }
            },
        };
        let keep = random::bernoulli(&Array::scalar(1.0 - fraction)?, x.shape(), &key)?;
        let mask = keep.astype(x.dtype())?;
        x.multiply(&mask)?
            .multiply(&like(x, 1.0 / (1.0 - fraction))?)
    }
}

/// Returns the delta without dropout, as used outside training.
fn without_dropout(mut delta: Delta) -> Delta {
    if let Delta::LowRank(low) = &mut delta {
        low.dropout = 0.0;
    }
    delta
}

/// Returns the random key of a slot's dropout in one batch. The key depends on name and seed, not
/// on the order of calls, so a recomputed block drops the same elements as in the forward pass.
pub fn dropout_key(slot: &str, seed: u64) -> Result<random::Key> {
    // FNV-1a is fixed by definition. The standard library's hash may change between releases.
    let hash = slot
        .bytes()
        .fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    random::Key::new(hash)
}

/// Separates forward passes from adapter changes: a pass runs completely before or completely after
/// a change.
#[derive(Debug, Default)]
pub struct Passes(RwLock<()>);

impl Passes {
    /// Runs a forward pass. A differentiated pass does not take the lock, because it already holds
    /// MLX's lock, for which running passes may wait, so waiting here could deadlock. Its
    /// parameters come from its scope, so it needs no lock.
    pub fn pass<R>(&self, f: impl FnOnce() -> R) -> R {
        let lock = || self.0.read();
        let _pass = (!differentiated()).then(lock);
        f()
    }

    /// Sets, exchanges or removes the deltas of slots, in the given order. Running requests use the
    /// new deltas from their next step on.
    pub fn change(&self, slots: impl IntoIterator<Item = (Arc<ParamSlot>, Option<Delta>)>) {
        // Collecting and freeing may wait for MLX's lock, so both run without holding this lock.
        let slots: Vec<_> = slots.into_iter().collect();
        let mut old = Vec::with_capacity(slots.len());
        let change = self.0.write();
        old.extend(slots.into_iter().map(|(slot, delta)| slot.set(delta)));
        drop(change);
    }
}

/// Returns a scalar array with the type of `x`.
fn like(x: &Array, value: f32) -> Result<Array> {
    Array::scalar(value)?.astype(x.dtype())
}

/// A layer's view of a slot. If several layers share one matrix, the view covers the layer's rows.
#[derive(Debug, Clone)]
pub struct SlotView {
    slot: Arc<ParamSlot>,
    rows: Option<(i32, i32)>,
}

impl SlotView {
    /// Creates a view of the complete slot, or of the rows `rows`.
    #[must_use]
    pub fn new(slot: Arc<ParamSlot>, rows: Option<(i32, i32)>) -> Self {
        Self { slot, rows }
    }

    /// Whether the slot has an adapter.
    pub fn is_adapted(&self) -> bool {
        self.slot.is_adapted()
    }

    /// Returns the vector that replaces the layer's own vector, cast to `dtype`; `None` without a
    /// delta.
    pub fn vector(&self, dtype: Dtype) -> Result<Option<Array>> {
        let weight = self.slot.vector(dtype)?;
        weight.map(|w| self.cut(&w)).transpose()
    }

    /// Passes the layer's input `[.., in]` to the scope's observer, if there is one. For experts,
    /// `x` is `[.., 1, in]`, and broadcasts to `experts` `[..]`, the ids of the experts that read
    /// it.
    pub fn observe(&self, x: &Array, experts: Option<&Array>) -> Result<()> {
        let observer = SCOPE.with_borrow(|scope| scope.as_ref()?.observer.clone());
        match observer {
            Some(Observer(f)) if self.rows.is_none_or(|(from, _)| from == 0) => {
                f(&self.slot.name, x, experts)
            }
            _ => Ok(()),
        }
    }

    /// Returns the layer's rows of `a`.
    fn cut(&self, a: &Array) -> Result<Array> {
        match self.rows {
            Some((from, to)) => a.slice_axis(0, from, to),
            None => Ok(a.clone()),
        }
    }

    /// Returns the layer's output for `x` `[.., in]` with the adapter; `None` without an adapter.
    /// `plain` computes `x W^T` without bias. If `kernels`, the CPU kernels multiply by the layer's
    /// weight, and they must also multiply by the adapter's weights. If rows have different
    /// adapters, `x` must be `[1, T, in]`.
    pub fn forward(
        &self,
        x: &Array,
        kernels: bool,
        plain: impl FnOnce() -> Result<Array>,
    ) -> Result<Option<Array>> {
        if let Some(pass) = pass::current().filter(|pass| pass.is_divided()) {
            return self.by_parts(&pass, x, plain, |delta, x, y| {
                self.changed(delta, x, kernels, || Ok(y))
            });
        }
        match self.slot.current()? {
            Some(delta) => self.changed(&delta, x, kernels, plain).map(Some),
            None => Ok(None),
        }
    }

    /// Returns the outputs `[1, n, ..]` for inputs `x` `[1, n, ..]` of rows with different
    /// adapters. `plain` computes all outputs without adapters. `changed` computes the outputs of
    /// the rows of one adapter, from their inputs and their outputs without adapters.
    fn by_parts(
        &self,
        pass: &Pass,
        x: &Array,
        plain: impl FnOnce() -> Result<Array>,
        changed: impl Fn(&Delta, &Array, Array) -> Result<Array>,
    ) -> Result<Option<Array>> {
        if !pass.changes(&self.slot) {
            return Ok(None);
        }
        let y = plain()?;
        let mut parts = Vec::new();
        for (deltas, range) in pass.portions(x.dim(1)?)? {
            let cut = |all: &Array| all.slice_axis(1, range.start, range.end);
            let y = cut(&y)?;
            parts.push(match deltas.at(&self.slot) {
                Some(delta) => changed(delta, &cut(x)?, y)?,
                None => y,
            });
        }
        concatenate(&parts.iter().collect::<Vec<_>>(), 1).map(Some)
    }

    /// Computes [`Self::forward`] with `delta`.
    fn changed(
        &self,
        delta: &Delta,
        x: &Array,
        kernels: bool,
        plain: impl FnOnce() -> Result<Array>,
    ) -> Result<Array> {
        let low = match delta {
            Delta::Whole(w) => {
                let w = self.cut(w)?;
                if scope().is_some_and(|scope| scope.constant) {
                    return exec::product_of(x, &w);
                }
                let w = w.astype(x.dtype())?;
                return x.matmul(&w.swap_axes(0, 1)?);
            }
            Delta::LowRank(low) => low,
        };
        let b = self.cut(&low.b)?;
        let z = if kernels && !differentiated() {
            low.prepared.product(x, &low.a, &b, self.rows)?
        } else {
            self.slot
                .dropped(x, low.dropout)?
                .matmul(&low.a.swap_axes(-1, -2)?)?
                .matmul(&b.swap_axes(-1, -2)?)?
        };
        let z = z.multiply(&like(&z, low.scale)?)?.astype(x.dtype())?;
        let sum = plain()?.add(&z)?;
        let Some(m) = &low.m else {
            return Ok(sum);
        };
        let weight = self.cut(&self.slot.dense(Dtype::Float32)?)?;
        let lengths = adapted(&weight, &low.a, &b, low.scale).and_then(|w| lengths(&w))?;
        // As in the paper (section 4.3), no gradient flows through the row lengths.
        let factor = self.cut(m)?.divide(&lengths.stop_gradient()?)?;
        sum.multiply(&factor.astype(x.dtype())?)
    }

    /// Returns the adapted embedding rows of `ids` `[1, T]`: `[1, T, hidden]`. `plain` returns the
    /// table's own rows.
    pub fn rows(
        &self,
        ids: &Array,
        plain: impl FnOnce() -> Result<Array>,
        dtype: Dtype,
    ) -> Result<Option<Array>> {
        if let Some(pass) = pass::current().filter(|pass| pass.is_divided()) {
            return self.by_parts(&pass, ids, plain, |delta, ids, rows| {
                self.changed_rows(delta, ids, || Ok(rows), dtype)
            });
        }
        match self.slot.current()? {
            Some(delta) => self.changed_rows(&delta, ids, plain, dtype).map(Some),
            None => Ok(None),
        }
    }

    /// Computes [`Self::rows`] with `delta`.
    fn changed_rows(
        &self,
        delta: &Delta,
        ids: &Array,
        plain: impl FnOnce() -> Result<Array>,
        dtype: Dtype,
    ) -> Result<Array> {
        let low = match delta {
            Delta::Whole(w) => return w.take_clamped(ids, 0)?.astype(dtype),
            Delta::LowRank(low) => low,
        };
        let plain = plain()?;
        let z = low.b.take_clamped(ids, 0)?.matmul(&low.a)?;
        let z = z.multiply(&like(&z, low.scale)?)?.astype(dtype)?;
        let sum = plain.add(&self.slot.dropped(&z, low.dropout)?)?;
        let Some(m) = &low.m else {
            return Ok(sum);
        };
        let long = lengths(&plain.add(&z)?.astype(Dtype::Float32)?)?.stop_gradient()?;
        let factor = m.take_clamped(ids, 0)?.divide(&long)?;
        sum.multiply(&factor.expand_dims(-1)?.astype(dtype)?)
    }

    /// Returns the adapted matrix product of experts: `x` `[.., 1, in]` times the matrices of the
    /// experts `ids`.
    pub fn forward_experts(
        &self,
        x: &Array,
        ids: &Array,
        sorted: bool,
        plain: impl FnOnce() -> Result<Array>,
    ) -> Result<Option<Array>> {
        let low = match self.slot.current()? {
            None => return Ok(None),
            Some(Delta::Whole(w)) => {
                let w = w.astype(x.dtype())?.swap_axes(-1, -2)?;
                return x.gather_mm(&w, None, ids, sorted).map(Some);
            }
            Some(Delta::LowRank(low)) => low,
        };
        let z = self
            .slot
            .dropped(x, low.dropout)?
            .gather_mm(&low.a.swap_axes(-1, -2)?, None, ids, sorted)?
            .gather_mm(&low.b.swap_axes(-1, -2)?, None, ids, sorted)?;
        let z = z.multiply(&like(&z, low.scale)?)?.astype(x.dtype())?;
        plain()?.add(&z).map(Some)
    }
}

/// Returns `W + scale * B A`, in the type of `weight`.
pub fn adapted(weight: &Array, a: &Array, b: &Array, scale: f32) -> Result<Array> {
    let product = b.matmul(a)?;
    let product = product.multiply(&like(&product, scale)?)?;
    weight.add(&product.astype(weight.dtype())?)
}

/// Returns the Euclidean length of each row.
///
/// # Errors
/// If `weight` has no rows.
pub fn lengths(weight: &Array) -> Result<Array> {
    weight.square()?.sum(-1, false)?.sqrt()
}

/// Values that replace a model's own values during a differentiated forward pass.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// Trainable parameters by full name.
    pub params: BTreeMap<String, Array>,
    /// The source of dropout keys; `None` disables dropout.
    pub dropout: Option<Dropout>,
    /// Whether to recompute each block in the backward pass (gradient checkpointing).
    pub checkpoint: bool,
    /// Whether to compute the model without adapters, as a reference.
    pub without_adapters: bool,
    /// Receives the inputs of linear layers and experts.
    pub observer: Option<Observer>,
    /// Whether no gradients are needed, so that kernels may multiply by replaced weights.
    pub constant: bool,
}

/// A callback with a slot's name, and the arguments of [`SlotView::observe`].
type OnInput = dyn Fn(&str, &Array, Option<&Array>) -> Result<()> + Send + Sync;

/// Receives the inputs of linear layers and experts during a pass.
#[derive(Clone)]
pub struct Observer(Arc<OnInput>);

impl Observer {
    /// Creates an observer. `f` receives the name of each layer's slot and the arguments of
    /// [`SlotView::observe`]. If several layers share one matrix and one input, `f` receives the
    /// input once.
    #[must_use]
    pub fn new<F>(f: F) -> Self
    where
        F: Fn(&str, &Array, Option<&Array>) -> Result<()> + Send + Sync + 'static,
    {
        Self(Arc::new(f))
    }
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Observer")
    }
}

/// The source of dropout keys.
#[derive(Debug, Clone)]
pub enum Dropout {
    /// A seed for all slots; see [`dropout_key`].
    Seed(u64),
    /// The dropout key of each slot, by slot name. A key may be a placeholder in a traced graph.
    Keys(Arc<BTreeMap<String, random::Key>>),
}

impl Scope {
    fn param(&self, slot: &str, end: &str) -> Option<&Array> {
        self.params.get(&format!("{slot}.{end}"))
    }

    /// Returns the parameters that belong to one block.
    #[must_use]
    pub fn of_block(&self, block: usize) -> BTreeMap<String, Array> {
        let mut params = self.params.clone();
        params.retain(|name, _| block_of(name) == Some(block));
        params
    }
}

/// Returns the block index in a parameter's name: the first number in the name.
pub fn block_of(name: &str) -> Option<usize> {
    name.split('.').find_map(|part| part.parse().ok())
}

thread_local! {
    static SCOPE: RefCell<Option<Arc<Scope>>> = const { RefCell::new(None) };
}

/// The scope that this thread has entered.
#[must_use]
pub fn scope() -> Option<Arc<Scope>> {
    SCOPE.with_borrow(Clone::clone)
}

/// Whether the pass needs gradients. If so, our fused kernels must not run, because they have no
/// gradients.
#[must_use]
pub fn differentiated() -> bool {
    SCOPE.with_borrow(Option::is_some)
}

/// Runs `f` in a scope. Restores the previous scope afterwards, even if `f` panics.
pub fn within<R>(scope: Arc<Scope>, f: impl FnOnce() -> R) -> R {
    struct Back(Option<Arc<Scope>>);
    impl Drop for Back {
        fn drop(&mut self) {
            SCOPE.set(self.0.take());
        }
    }
    let _back = Back(SCOPE.replace(Some(scope)));
    f()
}
