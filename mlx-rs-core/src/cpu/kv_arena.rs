//! The memory of `KvBuffer` (`kv_buffer.rs`): one array for several layers, and the operations that
//! fill it and copy from it.
//!
//! The array exists before any operation that uses it, and each such operation keeps the array
//! alive. So no address dangles, even if a transform runs an operation again (`host_op::add_once`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mlx_cpu_kernels::{Input, KvPlane, KvType, Work, dim};
use mlx_sys as sys;

use super::host_op::{self, OutputElement};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::{call, closure};

/// The maximum number of bytes of a shared array. A shared array is freed with the last of its
/// layers.
const SHARED: usize = 1 << 22;

/// The number of layers with this shape and type that share an array.
pub(super) fn layers_per_arena(shape: &[i32; 4], kv_type: KvType) -> usize {
    let each = 2 * kv_type.size();
    let bytes = shape.iter().try_fold(each, |n, &d| n.checked_mul(dim(d)));
    (SHARED / bytes.unwrap_or(usize::MAX).max(1)).max(1)
}

/// The type of a cache as an array's type.
pub(super) fn dtype(kv_type: KvType) -> Dtype {
    match kv_type {
        KvType::Float32 => Dtype::Float32,
        KvType::Float16 => Dtype::Float16,
        KvType::Packed(_) => Dtype::Uint32,
    }
}

/// The memory of several layers, `[layers, 2, Hkv, capacity, D]`.
struct KvArena {
    // Exactly one array. Never expose it: a clone would observe in-place writes.
    array: Vec<Array>,
    first: *mut u8,
    elements: usize,
    kv_type: KvType,
    /// Set when an operation panics while it writes to this memory, because elements may then be
    /// undefined.
    poisoned: AtomicBool,
}

// SAFETY: `first` points into memory that `array` owns. The dependencies between operations order
// all accesses to this memory (`kv_buffer.rs`).
unsafe impl Send for KvArena {}
// SAFETY: see the note for `Send`.
unsafe impl Sync for KvArena {}

impl KvArena {
    /// All elements, valid while `self` lives.
    fn all(&self) -> Input {
        // SAFETY: `array` has this number of elements of its type. The layout is empty, so it
        // cannot dangle.
        unsafe { Input::strided(self.first, self.elements, &[], &[]) }
    }
}

impl Drop for KvArena {
    /// Drops the array through `part_with`, because a thread of MLX may free the last operation
    /// that keeps the arena.
    fn drop(&mut self) {
        closure::part_with(std::mem::take(&mut self.array));
    }
}

/// Keys and values of a layer.
pub(super) struct KvLayer {
    arena: Arc<KvArena>,
    layer: usize,
    shape: [i32; 4],
    strides: [i64; 4],
}

impl KvLayer {
    /// Allocates the keys and the values of several layers, `[1, Hkv, capacity, D]` each, in one
    /// shared array. No element is initialized.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::ErrorKind::OutOfMemory) beyond the budget; MLX's message
    /// when memory runs out.
    pub(super) fn allocate(
        layers: usize,
        shape: [i32; 4],
        kv_type: KvType,
    ) -> Result<Vec<Arc<Self>>> {
        let [_, heads, capacity, width] = shape;
        let all = i32::try_from(layers).unwrap_or(i32::MAX);
        let all = [all, 2, heads, capacity, width];
        let array = call::adopt(OP, |out| {
            // SAFETY: `out` is writable; pointer and length describe the shape.
            unsafe {
                sys::rust_mlx_uninitialized(out, all.as_ptr(), all.len(), dtype(kv_type).raw())
            }
        })?;
        let (_, data, elements) = array.row_major(OP)?;
        let arena = Arc::new(KvArena {
            array: vec![array],
            first: data.cast::<u8>().cast_mut(),
            elements,
            kv_type,
            poisoned: AtomicBool::new(false),
        });
        let [_, _, capacity, width] = shape.map(i64::from);
        let of = |layer: usize| {
            Arc::new(Self {
                arena: Arc::clone(&arena),
                layer,
                shape,
                strides: [0, capacity * width, width, 1],
            })
        };
        Ok((0..layers).map(of).collect())
    }

    /// The shape of the keys, and of the values: `[1, Hkv, capacity, D]`, or with the words of a
    /// packed head in place of `D`.
    pub(super) fn shape(&self) -> &[i32; 4] {
        &self.shape
    }

    /// The type of the elements.
    pub(super) fn kv_type(&self) -> KvType {
        self.arena.kv_type
    }

    /// Views of the keys and of the values, valid while `self` lives.
    pub(super) fn parts(&self) -> [Input; 2] {
        let n = self.shape.iter().map(|&d| dim(d)).product();
        [0, 1].map(|which| {
            let at = (2 * self.layer + which) * n * self.kv_type().size();
            let at = self.arena.first.wrapping_add(at);
            // SAFETY: the array has `2 * n` elements for each layer. `self` keeps the array, the
            // shape and the strides alive. The strides of `self` stay within `n` elements.
            unsafe { Input::strided(at, n, &self.shape, &self.strides) }
        })
    }

    /// A copy of the first `n` positions of the keys or the values, `[1, Hkv, n, D]`. The copy runs
    /// after `inputs`.
    ///
    /// # Errors
    /// MLX's message when the current stream is not on the CPU.
    pub(super) fn copy(self: &Arc<Self>, which: usize, n: i32, inputs: &[&Array]) -> Result<Array> {
        let [one, heads, _, width] = self.shape;
        let shape = [one, heads, n, width];
        let work = Take {
            from: Arc::clone(self),
            which,
            plane: KvPlane::new(&shape, n),
        };
        match self.kv_type() {
            KvType::Float32 => host_op::add_once_as::<f32, _>(OP, work, inputs, 0, &shape),
            KvType::Float16 => host_op::add_once_as::<u16, _>(OP, work, inputs, 0, &shape),
            KvType::Packed(_) => host_op::add_once_as::<u32, _>(OP, work, inputs, 0, &shape),
        }
    }
}

const OP: &str = "cpu::memory";

/// Whether an earlier operation left one of these layers partly written.
pub(super) fn poisoned<'k>(layer: impl IntoIterator<Item = &'k Arc<KvLayer>>) -> bool {
    (layer.into_iter()).any(|layer| layer.arena.poisoned.load(Ordering::Relaxed))
}

/// Marks layers as poisoned if their writer panics.
pub(super) struct PoisonOnPanic<'k>(pub &'k [Arc<KvLayer>]);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for layer in self.0 {
                layer.arena.poisoned.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// The source of a new arena's first positions.
pub(super) enum From {
    /// Keys and values as the operation's first two inputs.
    Arrays,
    /// Other layers, as many as the new arena has.
    KvLayer(Vec<Arc<KvLayer>>),
}

/// Copies the first `filled` positions of `from` to all layers that [`KvLayer::allocate`] made
/// together with `to`. The output is a single zero. Operations that must run after this one have it
/// as an input.
///
/// # Errors
/// MLX's message when the current stream is not on the CPU.
pub(super) fn fill(to: &Arc<KvLayer>, from: From, filled: i32, inputs: &[&Array]) -> Result<Array> {
    let work = Fill {
        plane: KvPlane::new(to.shape(), filled),
        to: Arc::clone(to),
        from,
    };
    host_op::add_once(OP, work, inputs, 0, &[1])
}

struct Fill {
    plane: KvPlane,
    to: Arc<KvLayer>,
    from: From,
}

impl Fill {
    /// Copies the sources to the whole memory.
    ///
    /// # Safety
    /// Memory and sources must have elements of type `T`. Nothing else may use the memory, and
    /// nothing may write the sources.
    unsafe fn fill<T: Copy + Send + Sync>(&self, from: &[Input]) {
        let arena = &self.to.arena;
        let memory = arena.all();
        // SAFETY: the caller guarantees the type and the exclusive use.
        let all = unsafe { memory.slice_mut::<T>(0, arena.elements) };
        // SAFETY: the caller guarantees the sources.
        unsafe { self.plane.copy(from, all) };
    }
}

impl Work for Fill {
    fn outputs(&self) -> usize {
        1
    }

    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let from: Vec<Input> = match &self.from {
            From::Arrays => inputs[..2].to_vec(),
            From::KvLayer(layers) => layers.iter().flat_map(|layer| layer.parts()).collect(),
        };
        if matches!(&self.from, From::KvLayer(layers) if poisoned(layers)) {
            self.to.arena.poisoned.store(true, Ordering::Relaxed);
            output.fill(f32::NAN);
            return;
        }
        let _writing = PoisonOnPanic(std::slice::from_ref(&self.to));
        // SAFETY: `KvBuffer` checked types and shapes. Only this operation uses the memory until it
        // has run. Every other operation on the memory depends on the output, and `add_once` runs
        // this operation once. Writers of the sources run before or after this operation.
        unsafe {
            match self.to.kv_type() {
                KvType::Float32 => self.fill::<f32>(&from),
                KvType::Float16 => self.fill::<u16>(&from),
                KvType::Packed(_) => self.fill::<u32>(&from),
            }
        }
        output.fill(0.0);
    }
}

/// Copies keys or values to an array.
struct Take {
    from: Arc<KvLayer>,
    which: usize,
    plane: KvPlane,
}

impl<T: OutputElement + Send + Sync> Work<T> for Take {
    fn outputs(&self) -> usize {
        self.plane.elements()
    }

    unsafe fn run(&self, _: &[Input], output: &mut [T]) {
        if poisoned([&self.from]) {
            output.fill(T::NAN);
            return;
        }
        let source = self.from.parts()[self.which];
        // SAFETY: `KvLayer::copy` chose the type of the memory. Its writers run before or after
        // this operation.
        unsafe { self.plane.copy(&[source], output) };
    }
}
