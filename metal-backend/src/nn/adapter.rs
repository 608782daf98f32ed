//! What training and adapters need of layers: the places of a network that an adapter can stand at, what
//! one computes there, and the scope in which a forward pass is differentiated. How adapters are made,
//! stored and trained is in `train/`.
//!
//! A layer that was loaded by name knows its [`Site`]. An adapter set at a site is seen by every thread, and
//! can be exchanged or removed at any time; numbers of a [`Scope`] stand in for its own on one thread only,
//! so that a model can be trained while it answers.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Result, random};

use super::Weight;

/// A matrix, or a stack of matrices of experts, that can be adapted.
#[derive(Debug)]
pub struct Site {
    name: String,
    weight: Weight,
    active: AtomicBool,
    delta: RwLock<Option<Arc<Delta>>>,
}

/// How an adapter changes a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaKind {
    /// `x W^T + scale * (x A^T) B^T` (Hu et al. 2021).
    Lora,
    /// The same, with each row of the sum brought to a learned length (Liu et al. 2024).
    Dora,
}

/// An adapter at one site. For experts A and B have one more axis in front.
#[derive(Debug, Clone)]
pub struct Delta {
    /// What it computes.
    pub kind: DeltaKind,
    /// A, `[rank, in]`.
    pub a: Array,
    /// B, `[out, rank]`.
    pub b: Array,
    /// Lengths of rows `[out]`, for DoRA.
    pub m: Option<Array>,
    /// Factor on what A and B compute.
    pub scale: f32,
    /// Fraction of the inputs of A that is dropped in training.
    pub dropout: f32,
}

impl Delta {
    /// Its trainable numbers with the ends of their names.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, &Array)> {
        [
            ("lora_a", Some(&self.a)),
            ("lora_b", Some(&self.b)),
            ("m", self.m.as_ref()),
        ]
        .into_iter()
        .filter_map(|(end, part)| Some((end, part?)))
    }
}

impl Site {
    /// The place of a weight `[out, in]`, or `[experts, out, in]`, that the checkpoint calls
    /// `name.weight`. Memory is shared with the layer.
    #[must_use]
    pub fn new(name: &str, weight: Weight) -> Arc<Self> {
        Arc::new(Self {
            name: name.to_owned(),
            weight,
            active: AtomicBool::new(false),
            delta: RwLock::new(None),
        })
    }

    /// The name of the layer, such as `model.layers.0.self_attn.q_proj`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The frozen weight.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// `[out, in]`, or `[experts, out, in]`.
    pub fn shape(&self) -> Vec<i32> {
        match &self.weight {
            Weight::Dense(w) => w.shape().to_vec(),
            Weight::Quantized(q) => {
                let mut shape = q.scales.shape().to_vec();
                if let Some(last) = shape.last_mut() {
                    *last = last.saturating_mul(q.group_size);
                }
                shape
            }
        }
    }

    /// Which block it is in, by its name.
    pub fn block(&self) -> Option<usize> {
        block_of(&self.name)
    }

    /// Sets, exchanges or removes the adapter; requests that run take the new one with their next step.
    pub fn set(&self, delta: Option<Delta>) {
        let mut held = self.delta.write().unwrap_or_else(PoisonError::into_inner);
        self.active.store(delta.is_some(), Ordering::Release);
        *held = delta.map(Arc::new);
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
        match &self.weight {
            Weight::Dense(w) => w.astype(dtype),
            Weight::Quantized(q) => q.dequantize(dtype),
        }
    }

    /// The adapter with the numbers of the scope that is entered, if any.
    fn current(&self) -> Result<Option<Delta>> {
        let Some(stored) = self.stored() else {
            return Ok(None);
        };
        let mut delta = (*stored).clone();
        let Some(scope) = scope() else {
            delta.dropout = 0.0;
            return Ok(Some(delta));
        };
        if scope.without_adapters {
            return Ok(None);
        }
        if let Some(a) = scope.param(&self.name, "lora_a") {
            delta.a = a.clone();
        }
        if let Some(b) = scope.param(&self.name, "lora_b") {
            delta.b = b.clone();
        }
        if let Some(m) = scope.param(&self.name, "m") {
            delta.m = Some(m.clone());
        }
        if scope.dropout_seed.is_none() {
            delta.dropout = 0.0;
        }
        Ok(Some(delta))
    }

    /// `x` with some of its numbers dropped, the others scaled up to the same mean.
    fn dropped(&self, x: &Array, fraction: f32) -> Result<Array> {
        let seed = scope().and_then(|s| s.dropout_seed);
        let (Some(seed), true) = (seed, fraction > 0.0) else {
            return Ok(x.clone());
        };
        // By name and step, not by order: a block that is computed again drops the same numbers.
        // Fowler, Noll and Vo's hash: the standard library's may change.
        let hash = self
            .name
            .bytes()
            .fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
        let key = random::Key::new(hash)?;
        let keep = random::bernoulli(&Array::scalar(1.0 - fraction)?, x.shape(), &key)?;
        let kept = keep.astype(x.dtype())?;
        x.multiply(&kept)?
            .multiply(&like(x, 1.0 / (1.0 - fraction))?)
    }
}

/// A number in the type of `x`.
fn like(x: &Array, value: f32) -> Result<Array> {
    Array::scalar(value)?.astype(x.dtype())
}

/// A layer's place: a site, and which of its rows are the layer's, where several share one matrix.
#[derive(Debug, Clone)]
pub struct Place {
    site: Arc<Site>,
    rows: Option<(i32, i32)>,
}

impl Place {
    /// All of a site, or some rows.
    #[must_use]
    pub fn new(site: Arc<Site>, rows: Option<(i32, i32)>) -> Self {
        Self { site, rows }
    }

    /// Whether there is an adapter.
    pub fn is_adapted(&self) -> bool {
        self.site.active.load(Ordering::Acquire)
    }

    /// What the layer computes of `x` `[.., in]`, where an adapter changes it; `plain` computes `x W^T`
    /// without bias.
    ///
    /// # Errors
    /// When shapes do not fit.
    pub fn forward(
        &self,
        x: &Array,
        plain: impl FnOnce() -> Result<Array>,
    ) -> Result<Option<Array>> {
        let Some(delta) = self.site.current()? else {
            return Ok(None);
        };
        let cut = |a: &Array| match self.rows {
            Some((from, to)) => a.slice_axis(0, from, to),
            None => Ok(a.clone()),
        };
        let b = cut(&delta.b)?;
        let dropped = self.site.dropped(x, delta.dropout)?;
        let z = dropped
            .matmul(&delta.a.swap_axes(-1, -2)?)?
            .matmul(&b.swap_axes(-1, -2)?)?;
        let z = z.multiply(&like(&z, delta.scale)?)?.astype(x.dtype())?;
        let sum = plain()?.add(&z)?;
        if delta.kind == DeltaKind::Lora {
            return Ok(Some(sum));
        }
        let m = delta.m.as_ref().ok_or_else(|| {
            Error::new(
                ErrorKind::Value,
                "dora",
                "the adapter has no row lengths `m`",
            )
        })?;
        let weight = cut(&self.site.dense(Dtype::Float32)?)?;
        let lengths = adapted(&weight, &delta.a, &b, delta.scale).and_then(|w| lengths(&w))?;
        // As the paper has it, the lengths count as constant (section 4.3).
        let factor = cut(m)?.divide(&lengths.stop_gradient()?)?;
        sum.multiply(&factor.astype(x.dtype())?).map(Some)
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
        let Some(delta) = self.site.current()? else {
            return Ok(None);
        };
        let z = self
            .site
            .dropped(x, delta.dropout)?
            .gather_mm(&delta.a.swap_axes(-1, -2)?, None, ids, sorted)?
            .gather_mm(&delta.b.swap_axes(-1, -2)?, None, ids, sorted)?;
        let z = z.multiply(&like(&z, delta.scale)?)?.astype(x.dtype())?;
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
    /// What dropout is drawn from; `None` for none.
    pub dropout_seed: Option<u64>,
    /// Each block is computed again in the backward pass instead of being kept.
    pub checkpoint: bool,
    /// The base alone is computed, as a reference.
    pub without_adapters: bool,
}

impl Scope {
    fn param(&self, site: &str, end: &str) -> Option<&Array> {
        self.params.get(&format!("{site}.{end}"))
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
