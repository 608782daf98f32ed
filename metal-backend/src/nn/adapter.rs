//! The parts of layers that training and adapters need: the slots of a network for adapters, their
//! computation, and the scope in which a forward pass is differentiated. How adapters are made,
//! stored and trained is in `train/`.
//!
//! A layer that was loaded by name knows its [`ParamSlot`]. Every thread sees an adapter set at a
//! slot, and it can be exchanged or removed at any time. Values of a [`Scope`] replace a layer's
//! own on one thread only. So a model can be trained while it answers.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, random};

use crate::exec::Weight;

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SlotKind {
    /// The matrix of a linear layer, or a stack of those of experts.
    Matrix,
    /// The table of an embedding.
    Table,
    /// The weight of a norm, which computes with it plus a number (1 for Gemma's).
    Norm {
        /// That number; the model's own weight has it in it.
        plus: f32,
    },
    /// A bias, of a layer or of a norm.
    Bias,
}

/// A matrix, or a stack of matrices of experts, that can be adapted, or a vector that can be
/// trained.
#[derive(Debug)]
pub struct ParamSlot {
    name: String,
    kind: SlotKind,
    weight: Weight,
    active: AtomicBool,
    delta: RwLock<Option<Arc<Delta>>>,
}

/// What stands at one slot.
#[derive(Debug, Clone)]
pub enum Delta {
    /// Something is added to the weight.
    LowRank(LowRank),
    /// Other numbers in place of the weight's, as a checkpoint would have them.
    Whole(Array),
}

/// A product of two narrow matrices that is added to a matrix: `x W^T + scale * (x A^T) B^T` (Hu et
/// al. 2021). For experts A and B have one more axis in front.
#[derive(Debug, Clone)]
pub struct LowRank {
    /// A, `[rank, in]`.
    pub a: Array,
    /// B, `[out, rank]`.
    pub b: Array,
    /// Lengths `[out]` that the rows of the sum are brought to (DoRA, Liu et al. 2024); `None` for
    /// LoRA.
    pub m: Option<Array>,
    /// Factor on what A and B compute.
    pub scale: f32,
    /// Fraction of the inputs of A that is dropped in training.
    pub dropout: f32,
}

impl LowRank {
    /// Its trainable numbers with the ends of their names at a slot of `kind`. Those of a table are
    /// transposed, as in mlx-lm: there `lora_a` has a row for each token.
    pub fn parts(&self, kind: SlotKind) -> impl Iterator<Item = (&'static str, &Array)> {
        let (a, b) = ends(kind);
        [
            (a, Some(&self.a)),
            (b, Some(&self.b)),
            ("m", self.m.as_ref()),
        ]
        .into_iter()
        .filter_map(|(end, part)| Some((end, part?)))
    }
}

/// What A and B are called at a slot.
pub fn ends(kind: SlotKind) -> (&'static str, &'static str) {
    match kind {
        SlotKind::Table => ("lora_b", "lora_a"),
        _ => ("lora_a", "lora_b"),
    }
}

impl ParamSlot {
    /// The place of a weight, `[out, in]`, `[experts, out, in]` or a vector, that the checkpoint
    /// calls `name.weight`, or `name.bias` for a bias. Memory is shared with the layer.
    #[must_use]
    pub fn new(name: &str, kind: SlotKind, weight: Weight) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            kind,
            weight,
            active: AtomicBool::new(false),
            delta: RwLock::new(None),
        })
    }

    /// The name of the layer, such as `model.layers.0.self_attn.q_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its kind.
    pub fn kind(&self) -> SlotKind {
        self.kind
    }

    /// Whether something of low rank can be added to it.
    pub fn is_matrix(&self) -> bool {
        matches!(self.kind, SlotKind::Matrix | SlotKind::Table)
    }

    /// The frozen weight.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// What the checkpoint calls its weight: the end of the name.
    pub fn end(&self) -> &'static str {
        match self.kind {
            SlotKind::Bias => "bias",
            _ => "weight",
        }
    }

    /// The weight as a checkpoint has it, in plain numbers of `dtype`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn stored_weight(&self, dtype: Dtype) -> Result<Array> {
        let dense = self.dense(dtype)?;
        match self.kind {
            SlotKind::Norm { plus } if plus != 0.0 => dense.subtract(&like(&dense, plus)?),
            _ => Ok(dense),
        }
    }

    /// Its trainable numbers as they stand, with the ends of their names.
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

    /// The delta here, with the trainable values replaced that `other` has, by the ends of their
    /// names. `None` without a delta.
    pub fn replaced(&self, other: impl Fn(&str) -> Option<Array>) -> Option<Delta> {
        Some(self.with_parts(&*self.stored()?, other))
    }

    /// A delta with those of its numbers replaced that `other` has.
    fn with_parts(&self, delta: &Delta, other: impl Fn(&str) -> Option<Array>) -> Delta {
        match delta {
            Delta::Whole(w) => Delta::Whole(other(self.end()).unwrap_or_else(|| w.clone())),
            Delta::LowRank(low) => {
                let mut low = low.clone();
                let (a, b) = ends(self.kind);
                low.a = other(a).unwrap_or(low.a);
                low.b = other(b).unwrap_or(low.b);
                low.m = low.m.map(|m| other("m").unwrap_or(m));
                Delta::LowRank(low)
            }
        }
    }

    /// `[out, in]`, or `[experts, out, in]`.
    pub fn shape(&self) -> Vec<i32> {
        self.weight.shape()
    }

    /// Which block it is in, by its name.
    pub fn block(&self) -> Option<usize> {
        block_of(&self.name)
    }

    /// Sets, exchanges or removes what stands here, and returns what did before. For whole adapters
    /// there is [`Passes::change`].
    fn set(&self, delta: Option<Delta>) -> Option<Arc<Delta>> {
        let mut held = self.delta.write().unwrap_or_else(PoisonError::into_inner);
        self.active.store(delta.is_some(), Ordering::Release);
        std::mem::replace(&mut held, delta.map(Arc::new))
    }

    /// The adapter, as it stands.
    pub fn stored(&self) -> Option<Arc<Delta>> {
        if !self.active.load(Ordering::Acquire) {
            return None;
        }
        let held = self.delta.read().unwrap_or_else(PoisonError::into_inner);
        held.clone()
    }

    /// The weight as plain numbers of `dtype`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn dense(&self, dtype: Dtype) -> Result<Array> {
        self.weight.dense(dtype)
    }

    /// The adapter with the numbers of the scope that is entered, if any.
    fn current(&self) -> Option<Delta> {
        let stored = self.stored()?;
        let scope = scope();
        if scope.as_ref().is_some_and(|s| s.without_adapters) {
            return None;
        }
        let param = |end: &str| scope.as_ref()?.param(&self.name, end).cloned();
        let mut delta = self.with_parts(&stored, param);
        if let Delta::LowRank(low) = &mut delta
            && scope.as_ref().is_none_or(|s| s.dropout.is_none())
        {
            low.dropout = 0.0;
        }
        Some(delta)
    }

    /// What a layer computes with instead of the vector that it has, in its type; `None` where
    /// nothing stands here.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn vector(&self, dtype: Dtype) -> Result<Option<Array>> {
        if !self.is_adapted() {
            return Ok(None);
        }
        match (self.current(), self.kind) {
            (Some(Delta::Whole(w)), SlotKind::Norm { plus }) if plus != 0.0 => {
                w.add(&like(&w, plus)?)?.astype(dtype).map(Some)
            }
            (Some(Delta::Whole(w)), _) => w.astype(dtype).map(Some),
            _ => Ok(None),
        }
    }

    /// Whether there is an adapter.
    pub fn is_adapted(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// `x` with some of its numbers dropped, the others scaled up to the same mean.
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
        let kept = keep.astype(x.dtype())?;
        x.multiply(&kept)?
            .multiply(&like(x, 1.0 / (1.0 - fraction))?)
    }
}

/// The random key of a slot's dropout in a batch. It depends on name and seed, not on order, so
/// that a recomputed block drops the same elements.
///
/// # Errors
/// When memory runs out.
pub fn dropout_key(slot: &str, seed: u64) -> Result<random::Key> {
    // Fowler, Noll and Vo's hash: the standard library's may change.
    let hash = slot
        .bytes()
        .fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    random::Key::new(hash)
}

/// Keeps forward passes and changes of the adapter apart: a pass sees all of a change, or none of
/// it.
#[derive(Debug, Default)]
pub struct Passes(RwLock<()>);

impl Passes {
    /// Runs a forward pass. A differentiated pass does not wait for a change. It holds MLX's lock,
    /// for which running passes may wait, and it has values of its own.
    pub fn pass<R>(&self, f: impl FnOnce() -> R) -> R {
        let lock = || self.0.read().unwrap_or_else(PoisonError::into_inner);
        let _pass = (!differentiated()).then(lock);
        f()
    }

    /// Sets, exchanges or removes what stands at slots, in this order; requests that run take it
    /// with their next step.
    pub fn change(&self, slots: impl IntoIterator<Item = (Arc<ParamSlot>, Option<Delta>)>) {
        // Collected before and freed after the lock is held: both may wait for MLX's own lock.
        let slots: Vec<_> = slots.into_iter().collect();
        let mut old = Vec::with_capacity(slots.len());
        let change = self.0.write().unwrap_or_else(PoisonError::into_inner);
        old.extend(slots.into_iter().map(|(slot, delta)| slot.set(delta)));
        drop(change);
    }
}

/// A number in the type of `x`.
fn like(x: &Array, value: f32) -> Result<Array> {
    Array::scalar(value)?.astype(x.dtype())
}

/// A layer's view of a slot: the slot, and the layer's rows where several layers share one matrix.
#[derive(Debug, Clone)]
pub struct SlotView {
    slot: Arc<ParamSlot>,
    rows: Option<(i32, i32)>,
}

impl SlotView {
    /// All of a slot, or some rows.
    #[must_use]
    pub fn new(slot: Arc<ParamSlot>, rows: Option<(i32, i32)>) -> Self {
        Self { slot, rows }
    }

    /// Whether there is an adapter.
    pub fn is_adapted(&self) -> bool {
        self.slot.is_adapted()
    }

    /// What the layer computes with instead of the vector that it has, in its type; `None` where
    /// nothing stands here.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn vector(&self, dtype: Dtype) -> Result<Option<Array>> {
        let whole = self.slot.vector(dtype)?;
        whole.map(|w| self.cut(&w)).transpose()
    }

    /// The rows of the layer.
    fn cut(&self, a: &Array) -> Result<Array> {
        match self.rows {
            Some((from, to)) => a.slice_axis(0, from, to),
            None => Ok(a.clone()),
        }
    }

    /// What the layer computes of `x` `[.., in]`, where an adapter changes it; `plain` computes
    /// `x W^T` without bias.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn forward(
        &self,
        x: &Array,
        plain: impl FnOnce() -> Result<Array>,
    ) -> Result<Option<Array>> {
        let low = match self.slot.current() {
            None => return Ok(None),
            Some(Delta::Whole(w)) => {
                let w = self.cut(&w)?.astype(x.dtype())?;
                return x.matmul(&w.swap_axes(0, 1)?).map(Some);
            }
            Some(Delta::LowRank(low)) => low,
        };
        let b = self.cut(&low.b)?;
        let dropped = self.slot.dropped(x, low.dropout)?;
        let z = dropped
            .matmul(&low.a.swap_axes(-1, -2)?)?
            .matmul(&b.swap_axes(-1, -2)?)?;
        let z = z.multiply(&like(&z, low.scale)?)?.astype(x.dtype())?;
        let sum = plain()?.add(&z)?;
        let Some(m) = &low.m else {
            return Ok(Some(sum));
        };
        let weight = self.cut(&self.slot.dense(Dtype::Float32)?)?;
        let lengths = adapted(&weight, &low.a, &b, low.scale).and_then(|w| lengths(&w))?;
        // As the paper has it, the lengths count as constant (section 4.3).
        let factor = self.cut(m)?.divide(&lengths.stop_gradient()?)?;
        sum.multiply(&factor.astype(x.dtype())?).map(Some)
    }

    /// The same for a table: rows `ids` `[..]`, `[.., hidden]`, where `plain` are those of the
    /// table itself.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn rows(
        &self,
        ids: &Array,
        plain: impl FnOnce() -> Result<Array>,
        dtype: Dtype,
    ) -> Result<Option<Array>> {
        let low = match self.slot.current() {
            None => return Ok(None),
            Some(Delta::Whole(w)) => return w.take_clamped(ids, 0)?.astype(dtype).map(Some),
            Some(Delta::LowRank(low)) => low,
        };
        let plain = plain()?;
        let z = low.b.take_clamped(ids, 0)?.matmul(&low.a)?;
        let z = z.multiply(&like(&z, low.scale)?)?.astype(dtype)?;
        let sum = plain.add(&self.slot.dropped(&z, low.dropout)?)?;
        let Some(m) = &low.m else {
            return Ok(Some(sum));
        };
        let long = lengths(&plain.add(&z)?.astype(Dtype::Float32)?)?.stop_gradient()?;
        let factor = m.take_clamped(ids, 0)?.divide(&long)?;
        sum.multiply(&factor.expand_dims(-1)?.astype(dtype)?)
            .map(Some)
    }

    /// The same for experts: `x` `[.., 1, in]` by the experts `ids`.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn forward_experts(
        &self,
        x: &Array,
        ids: &Array,
        sorted: bool,
        plain: impl FnOnce() -> Result<Array>,
    ) -> Result<Option<Array>> {
        let low = match self.slot.current() {
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

/// `W + scale * B A`, in the type of `weight`.
///
/// # Errors
/// When shapes do not fit.
pub fn adapted(weight: &Array, a: &Array, b: &Array, scale: f32) -> Result<Array> {
    let product = b.matmul(a)?;
    let product = product.multiply(&like(&product, scale)?)?;
    weight.add(&product.astype(weight.dtype())?)
}

/// The Euclidean length of each row.
///
/// # Errors
/// When there are no rows.
pub fn lengths(weight: &Array) -> Result<Array> {
    weight.square()?.sum(-1, false)?.sqrt()
}

/// What stands in for a model's own numbers while a forward pass is differentiated.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// Trainable numbers by name.
    pub params: BTreeMap<String, Array>,
    /// The key of dropout; `None` for none.
    pub dropout: Option<Dropout>,
    /// Each block is computed again in the backward pass instead of being kept.
    pub checkpoint: bool,
    /// The base alone is computed, as a reference.
    pub without_adapters: bool,
}

/// The key of dropout.
#[derive(Debug, Clone)]
pub enum Dropout {
    /// A seed for all slots; see [`dropout_key`].
    Seed(u64),
    /// The key of each slot by its name, which may be a placeholder of a graph that is traced.
    Keys(Arc<BTreeMap<String, random::Key>>),
}

impl Scope {
    fn param(&self, slot: &str, end: &str) -> Option<&Array> {
        self.params.get(&format!("{slot}.{end}"))
    }

    /// Its numbers that belong to one block.
    #[must_use]
    pub fn of_block(&self, block: usize) -> BTreeMap<String, Array> {
        let mut own = self.params.clone();
        own.retain(|name, _| block_of(name) == Some(block));
        own
    }
}

/// The block that a name is in: its first number.
fn block_of(name: &str) -> Option<usize> {
    name.split('.').find_map(|part| part.parse().ok())
}

thread_local! {
    static SCOPE: RefCell<Option<Arc<Scope>>> = const { RefCell::new(None) };
}

/// The scope this thread is in.
#[must_use]
pub fn scope() -> Option<Arc<Scope>> {
    SCOPE.with_borrow(Clone::clone)
}

/// Whether results must have derivatives, which our fused kernels do not.
#[must_use]
pub fn differentiated() -> bool {
    SCOPE.with_borrow(Option::is_some)
}

/// Runs `f` in a scope, and returns to the one before, also when `f` panics.
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
