//! Whole decoder blocks as one operation: projections, writes to the KV cache, attention, and the
//! feed-forward part. The operation is one block or a chain of blocks. There are no graph nodes
//! between the parts. With one node per part, building and evaluating nodes took a fifth of a
//! decode step; with one per block, it takes a tenth.

use std::cell::RefCell;
use std::sync::Arc;

use mlx_cpu_kernels::{
    Attention, Gate, Input, KvWrite, NewKv, Product, TokenRange, Work, dim, with_barrier_hook,
};

use super::attention::{Heads, KvViewShape, total};
use super::host_op;
use super::kv_arena::{KvLayer, PoisonOnPanic, poisoned};
use super::kv_buffer::KvBuffer;
use super::matrix::Matrix;
use super::projection::{Epilogue, Operands, Projection};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// A matrix with an optional float32 bias `[n]`.
pub type Biased<'a> = (&'a Matrix, Option<&'a Array>);

/// An RMS norm: a float32 weight `[k]`, and the epsilon that is added under the root.
pub type RowNorm<'a> = Option<(&'a Array, f32)>;

/// A decoder block: attention after a norm, then a gated feed-forward part after a norm. The output
/// of each of these two is added to its input.
/// ```
/// use mlx_rs_core::{Array, Device, Stream};
/// use mlx_rs_core::cpu::{Block, DenseMatrix, Gate, Heads, KvBuffer, Matrix, KvSlot};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let heads = Heads {
///         n_heads: 1,
///         n_kv_heads: 1,
///         head_dim: 2,
///         scale: 1.0,
///         softcap: None,
///         q_norm: None,
///         k_norm: None,
///         rotation: None,
///         sinks: None,
///     };
///     let matrix = |values: [f32; 4]| -> mlx_rs_core::Result<Option<Matrix>> {
///         let weight = Array::from_slice(&values, &[2, 2])?;
///         Ok(DenseMatrix::new(&weight)?.map(Matrix::Dense))
///     };
///     // `None` where `MLX_CPU_KERNELS` is `off`.
///     if let (Some(one), Some(none)) = (matrix([1.0, 0.0, 0.0, 1.0])?, matrix([0.0; 4])?) {
///         let block = Block {
///             heads: &heads,
///             attention_norm: None,
///             projections: [(&one, None); 3],
///             output: (&one, None),
///             feed_norm: None,
///             gate: Gate::Silu,
///             gate_up: [(&none, None); 2],
///             down: (&none, None),
///         };
///         let mut memory = KvBuffer::empty((1, 2), 4)?;
///         let x = Array::from_slice(&[3.0f32, 4.0], &[1, 1, 2])?;
///         // A token that sees itself only finds itself.
///         let slot = KvSlot { length: 1, offset: 0, memory: &mut memory, window: None };
///         assert_eq!(block.step(&x, &mut [slot])?.to_vec::<f32>()?, [6.0, 8.0]);
///         assert_eq!(memory.copy(1)?.0.to_vec::<f32>()?, [3.0, 4.0]);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// The heads of the attention.
    pub heads: &'a Heads,
    /// The norm before attention.
    pub attention_norm: RowNorm<'a>,
    /// The projections to queries, keys and values.
    pub projections: [Biased<'a>; 3],
    /// The projection of the attention's output.
    pub output: Biased<'a>,
    /// The norm before the feed-forward part.
    pub feed_norm: RowNorm<'a>,
    /// The gate of the feed-forward part.
    pub gate: Gate,
    /// The gate and up projections.
    pub gate_up: [Biased<'a>; 2],
    /// The down projection.
    pub down: Biased<'a>,
}

/// A row's tokens, and its KV buffer with capacity for them.
#[derive(Debug)]
pub struct KvSlot<'a> {
    /// The number of tokens in this step.
    pub length: i32,
    /// The number of earlier tokens.
    pub offset: i32,
    /// The row's keys and values. The block also writes the new ones here.
    pub memory: &'a mut KvBuffer,
    /// The number of last positions that a query attends to, including its own.
    pub window: Option<i32>,
}

/// A product, and the number of operation inputs that it reads.
struct Part {
    work: Product,
    inputs: usize,
}

impl Part {
    fn plan<'p>(
        projection: Projection<'p>,
        rows: usize,
        adds: bool,
        inputs: &mut Vec<&'p Array>,
    ) -> Result<Self> {
        let before = inputs.len();
        let work = projection.plan(rows, (adds, Operands::Stored), inputs)?;
        Ok(Self {
            work,
            inputs: inputs.len() - before,
        })
    }

    /// Prefetches the first matrix words that thread `me` of the pool reads.
    fn fetch(&self, me: usize) {
        // SAFETY: `Projection::plan` made the product. A stored matrix is a `QuantizedMatrix` with
        // the format and sizes of its part, and never changes.
        unsafe { self.work.fetch(me) };
    }

    /// Multiplies `x` with the next inputs of the operation, and adds `add` if given.
    ///
    /// # Safety
    /// `rest` must start with the inputs that `plan` appended; `x` and `add` must be rows of the
    /// planned shape.
    unsafe fn run(&self, x: Input, rest: &mut &[Input], add: Option<Input>, output: &mut [f32]) {
        let mut inputs = vec![x];
        inputs.extend(next(rest, self.inputs));
        inputs.extend(add);
        // SAFETY: the caller guarantees the inputs.
        unsafe { self.work.run(&inputs, output) };
    }
}

/// Returns the next `n` inputs, and removes them from `rest`.
fn next<'i>(rest: &mut &'i [Input], n: usize) -> &'i [Input] {
    let (first, others) = rest.split_at(n.min(rest.len()));
    *rest = others;
    first
}

impl Block<'_> {
    /// The block's output for `x`, float32 `[1, T, hidden]`, the concatenated tokens of the rows.
    /// Once the output is evaluated, the tokens' keys and values are in the rows' buffers.
    ///
    /// The operation runs only once. If a transform runs its graph again (`compile` with each call,
    /// `checkpoint`), later results are NaN and nothing is written.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] when shapes or types do not fit; MLX's message when the current stream
    /// is not on the CPU.
    pub fn step(&self, x: &Array, slots: &mut [KvSlot<'_>]) -> Result<Array> {
        Self::steps(x, &mut [(self, slots)])
    }

    /// The output of consecutive blocks as one operation. All blocks have the same rows, with
    /// separate KV buffers.
    ///
    /// # Errors
    /// As [`Self::step`]; also if `blocks` is empty.
    /// ```
    /// # use mlx_rs_core::{Array, Device, Stream, cpu::Block};
    /// # Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    /// assert!(Block::steps(&Array::from_slice(&[1.0f32], &[1, 1, 1])?, &mut []).is_err());
    /// # Ok(())
    /// # })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn steps(x: &Array, blocks: &mut [(&Block<'_>, &mut [KvSlot<'_>])]) -> Result<Array> {
        let mut before = Vec::new();
        for (_, slots) in &*blocks {
            for slot in &**slots {
                slot.memory.before(&mut before);
            }
        }
        let mut inputs = vec![x];
        let mut steps = Vec::with_capacity(blocks.len());
        for (block, slots) in &*blocks {
            steps.push(block.plan(x, slots, &mut inputs)?);
        }
        // These inputs only order the operations. Their elements are not read.
        inputs.extend(before.iter().map(|array| &**array));
        let row_major = inputs.len();
        let y = host_op::add_once(OP, BlockChain(steps), &inputs, row_major, x.shape())?;
        let y = Arc::new(y);
        for (_, slots) in blocks {
            for slot in &mut **slots {
                slot.memory.is_written_with(&y, slot.offset + slot.length);
            }
        }
        Ok((*y).clone())
    }

    /// The work of this block on tokens with the shape of `x`. The work reads the arrays that this
    /// function appends to `inputs`.
    fn plan<'p>(
        &'p self,
        x: &Array,
        slots: &'p [KvSlot<'_>],
        inputs: &mut Vec<&'p Array>,
    ) -> Result<BlockPlan> {
        let fault = |message: String| Error::new(ErrorKind::Shape, OP, message).with_inputs(&[x]);
        let first_input = inputs.len();
        let total = total(slots.iter().map(|slot| (slot.length, slot.offset)))?;
        let hidden = self.projections[0].0.size().k;
        if x.dtype() != Dtype::Float32
            || x.shape() != [1, total, i32::try_from(hidden).unwrap_or(-1)]
        {
            return Err(fault(format!("needs float32 [1, {total}, {hidden}]")));
        }
        let packed = self.heads.check_parts()?;
        let rows = dim(total);
        let projection = |parts, norm, then| Projection { parts, norm, then };
        let nothing = Epilogue::None;
        let all = projection(&self.projections[..], self.attention_norm, nothing);
        let project = Part::plan(all, rows, false, inputs)?;
        inputs.extend(self.heads.k_norm.iter().map(|norm| &norm.weight));
        inputs.extend(self.heads.q_norm.iter().map(|norm| &norm.weight));
        inputs.extend(&self.heads.sinks);
        let one = projection(std::slice::from_ref(&self.output), None, nothing);
        let output = Part::plan(one, rows, true, inputs)?;
        let two = projection(&self.gate_up[..], self.feed_norm, Epilogue::Gate(self.gate));
        let feed = Part::plan(two, rows, false, inputs)?;
        let one = projection(std::slice::from_ref(&self.down), None, nothing);
        let down = Part::plan(one, rows, true, inputs)?;
        let width = dim(self.heads.n_heads) * dim(self.heads.head_dim);
        let chain = [
            (project.work.n, packed),
            (output.work.k, width),
            (output.work.n, hidden),
            (feed.work.k, hidden),
            (down.work.k, feed.work.n),
            (down.work.n, hidden),
        ];
        if let Some((is, needed)) = chain.iter().find(|(is, needed)| is != needed) {
            return Err(fault(format!(
                "a matrix has {is} where the block needs {needed}"
            )));
        }
        let mut stores = Vec::with_capacity(slots.len());
        let mut lanes = Vec::with_capacity(slots.len());
        let mut layers = Vec::with_capacity(slots.len());
        let mut first = 0;
        for slot in slots {
            let tokens = TokenRange {
                first,
                length: slot.length,
                offset: slot.offset,
            };
            first += slot.length;
            slot.memory.check(slot.offset)?;
            let shape = (slot.memory.shape(), slot.memory.kv_type());
            stores.push((
                self.heads.plan_keys(shape, total, tokens)?,
                self.heads.plan_values(shape, total, tokens)?,
            ));
            layers.push(slot.memory.layer());
            lanes.push(KvViewShape {
                length: slot.length,
                offset: slot.offset,
                capacity: slot.memory.capacity(),
                kv_type: slot.memory.kv_type(),
                filled: slot.offset + slot.length,
                order: Some((0, 0)),
                window: slot.window,
            });
        }
        Ok(BlockPlan {
            inputs: inputs.len() - first_input,
            project,
            k_norm: self.heads.k_norm.is_some(),
            attention_inputs: usize::from(self.heads.q_norm.is_some())
                + usize::from(self.heads.sinks.is_some()),
            attend: self.heads.plan_attention(&lanes, false)?,
            stores,
            held: layers,
            output,
            feed,
            down,
        })
    }
}

const OP: &str = "cpu::block";

/// The maximum number of tokens for which intermediate buffers are kept for the next blocks.
/// Concurrent requests have about this number of tokens per pass.
const MAX_KEPT_TOKENS: usize = 256;

/// The computation of a block.
struct BlockPlan {
    /// The number of operation inputs that the block reads.
    inputs: usize,
    project: Part,
    k_norm: bool,
    /// The inputs of attention, besides packed rows, keys and values.
    attention_inputs: usize,
    /// The writes of keys and values, per row.
    stores: Vec<(KvWrite, KvWrite)>,
    /// The KV layers that the keys and values are written to.
    held: Vec<Arc<KvLayer>>,
    attend: Attention,
    output: Part,
    feed: Part,
    down: Part,
}

/// Buffers between blocks, and between their parts.
#[derive(Default)]
struct Intermediates {
    blocks: [Vec<f32>; 2],
    parts: Parts,
}

#[derive(Default)]
struct Parts {
    packed: Vec<f32>,
    found: Vec<f32>,
    attended: Vec<f32>,
    gated: Vec<f32>,
}

thread_local! {
    static INTERMEDIATES: RefCell<Intermediates> = RefCell::default();
}

/// The first `n` elements, with arbitrary values.
fn resized(buffer: &mut Vec<f32>, n: usize) -> &mut [f32] {
    if buffer.len() < n {
        mlx_cpu_kernels::resize(buffer, n, 0.0);
    }
    &mut buffer[..n]
}

/// Consecutive blocks.
struct BlockChain(Vec<BlockPlan>);

impl Work for BlockChain {
    fn outputs(&self) -> usize {
        self.0.last().map_or(0, |step| step.down.work.outputs())
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let mut rest = inputs;
        let Some(&first) = next(&mut rest, 1).first() else {
            return;
        };
        if poisoned(self.0.iter().flat_map(|step| &step.held)) {
            output.fill(f32::NAN);
            return;
        }
        INTERMEDIATES.with_borrow_mut(|Intermediates { blocks, parts }| {
            let [from, to] = blocks;
            let mut x = first;
            for (i, step) in self.0.iter().enumerate() {
                let step_inputs = next(&mut rest, step.inputs);
                let Some(after) = self.0.get(i + 1) else {
                    // SAFETY: `steps` planned these inputs for this block. The blocks' inputs
                    // follow one another.
                    unsafe { step.run(x, step_inputs, parts, None, output) };
                    break;
                };
                let y = resized(to, step.down.work.outputs());
                // SAFETY: the note above applies to this block as well.
                unsafe { step.run(x, step_inputs, parts, Some(after), y) };
                x = Input::from_slice(y);
                std::mem::swap(from, to);
            }
        });
        let intact = |step: &BlockPlan| step.parts().into_iter().all(|part| part.work.is_intact());
        if !self.0.iter().all(intact) {
            output.fill(f32::NAN);
        }
        // A prefill with this many tokens is rare, and its buffers are large, so they are freed.
        if self
            .0
            .iter()
            .any(|step| step.project.work.rows > MAX_KEPT_TOKENS)
        {
            INTERMEDIATES.take();
        }
    }
}

impl BlockPlan {
    fn parts(&self) -> [&Part; 4] {
        [&self.project, &self.output, &self.feed, &self.down]
    }

    /// Runs the block. Threads that wait at a barrier prefetch the first elements of the next part.
    /// After the last part, these belong to the block `after` this one.
    ///
    /// # Safety
    /// `inputs` must be those that `Block::plan` appended for this block, and `x` must have its
    /// rows.
    unsafe fn run(
        &self,
        x: Input,
        inputs: &[Input],
        between: &mut Parts,
        after: Option<&BlockPlan>,
        output: &mut [f32],
    ) {
        let (projection_inputs, mut rest) = inputs.split_at(inputs.len().min(self.project.inputs));
        let norm = next(&mut rest, usize::from(self.k_norm)).first();
        let seen_with = next(&mut rest, self.attention_inputs);
        let _writing = PoisonOnPanic(&self.held);
        let caches: Vec<Input> = self.held.iter().flat_map(|layer| layer.parts()).collect();
        let packed = resized(&mut between.packed, self.project.work.outputs());
        // SAFETY: the caches have the type that `plan` read from their `KvBuffer`.
        let prefetch = unsafe { self.attend.prefetch(&caches) };
        with_barrier_hook(&prefetch, || {
            // SAFETY: the caller guarantees the inputs.
            unsafe { self.project.run(x, &mut &*projection_inputs, None, packed) };
        });
        let heads_output = resized(&mut between.found, self.attend.outputs());
        let mut seen = vec![Input::from_slice(packed)];
        seen.extend(seen_with);
        seen.extend(&caches);
        let fresh = NewKv {
            writes: &self.stores,
            // SAFETY: `Heads::check_parts` checked that the weight is float32.
            norm: norm.map(|norm| unsafe { norm.as_slice::<f32>() }),
            caches: &caches,
        };
        with_barrier_hook(&|me| self.output.fetch(me), || {
            // SAFETY: the caches have the planned type. They belong to a `KvBuffer`, which passes
            // its arrays only to this operation and to operations that copy them. Each of these
            // operations runs after the earlier ones (`KvBuffer::before`), so none run
            // concurrently. This function has no reference to the caches yet.
            unsafe { self.attend.run_with_new_kv(&seen, &fresh, heads_output) };
        });
        let attended = resized(&mut between.attended, self.output.work.outputs());
        let heads_output = Input::from_slice(heads_output);
        with_barrier_hook(&|me| self.feed.fetch(me), || {
            // SAFETY: the caller guarantees the inputs, and `attended` has the planned rows.
            unsafe { self.output.run(heads_output, &mut rest, Some(x), attended) };
        });
        let attended = Input::from_slice(attended);
        let gated = resized(&mut between.gated, self.feed.work.outputs());
        with_barrier_hook(&|me| self.down.fetch(me), || {
            // SAFETY: the caller guarantees the inputs, and `gated` has the planned rows.
            unsafe { self.feed.run(attended, &mut rest, None, gated) };
        });
        let gated = Input::from_slice(gated);
        let fetch = |me| {
            if let Some(after) = after {
                after.project.fetch(me);
            }
        };
        with_barrier_hook(&fetch, || {
            // SAFETY: the caller guarantees the inputs, and `output` has the planned rows.
            unsafe { self.down.run(gated, &mut rest, Some(attended), output) };
        });
    }
}
