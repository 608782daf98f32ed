//! Where keys and values are that blocks write in place (`memory.rs`): arrays of MLX's with those of some layers, and what makes
//! and copies them.

use std::sync::{Arc, OnceLock};

use super::heads::count;
use super::host_op::{self, Input, Work};
use super::share::{Output, share};
use crate::array::Array;
use crate::closure;
use crate::error::Result;

/// Elements that layers may have together: as long as one of them is in use all of them are.
const TOGETHER: usize = 1 << 20;

/// How many layers of this shape are made together.
pub(super) fn together(shape: &[i32; 4]) -> usize {
    let elements = shape
        .iter()
        .try_fold(2usize, |n, &d| n.checked_mul(count(d)));
    (TOGETHER / elements.unwrap_or(usize::MAX).max(1)).max(1)
}

/// The memory of some layers, `[layers, 2, Hkv, room, D]`.
struct Slab {
    // One. It must not leave: what else has it would see it change, or another thread change it.
    array: Vec<Arc<Array>>,
    place: Arc<Place>,
}

impl Drop for Slab {
    /// An operation that held it may be freed by a thread of MLX's.
    fn drop(&mut self) {
        closure::part_with(std::mem::take(&mut self.array));
    }
}

/// Where a slab's elements are, once they are there.
#[derive(Default)]
struct Place(OnceLock<Address>);

struct Address(*const f32);

// SAFETY: it is an address; who may read or write there, and when, is told by `KvMemory` (`memory.rs`).
unsafe impl Send for Address {}
// SAFETY: as for Send.
unsafe impl Sync for Address {}

/// Keys and values of a layer.
pub(super) struct Kept {
    slab: Arc<Slab>,
    layer: usize,
    shape: [i32; 4],
    strides: [i64; 4],
}

impl Kept {
    /// Keys and values of so many layers, `[1, Hkv, room, D]` each, in one array, with the first `filled` positions of others; after
    /// `inputs` are made.
    ///
    /// # Errors
    /// MLX's message when memory runs out or the current stream is not on the CPU.
    pub(super) fn make(
        layers: usize,
        shape: [i32; 4],
        filled: i32,
        from: From,
        inputs: &[&Array],
    ) -> Result<Vec<Arc<Self>>> {
        let place = Arc::new(Place::default());
        let work = Fill {
            place: Arc::clone(&place),
            from,
            plane: Plane::of(&shape, filled),
            layers,
        };
        let [_, heads, room, width] = shape;
        let all = i32::try_from(layers).unwrap_or(i32::MAX);
        let all = [all, 2, heads, room, width];
        let array = host_op::add_strided(OP, work, inputs, 0, &all)?;
        let slab = Arc::new(Slab {
            array: vec![Arc::new(array)],
            place,
        });
        let [_, _, room, width] = shape.map(i64::from);
        let of = |layer: usize| {
            Arc::new(Self {
                slab: Arc::clone(&slab),
                layer,
                shape,
                strides: [0, room * width, width, 1],
            })
        };
        Ok((0..layers).map(of).collect())
    }

    /// `[1, Hkv, room, D]`.
    pub(super) fn shape(&self) -> &[i32; 4] {
        &self.shape
    }

    /// What makes them.
    pub(super) fn array(&self) -> &Arc<Array> {
        &self.slab.array[0]
    }

    /// The same as long as they are not there.
    pub(super) fn missing(&self) -> Option<&Arc<Array>> {
        let there = self.slab.place.0.get().is_some();
        (!there).then(|| self.array())
    }

    /// Where keys and values are, as long as this is kept.
    ///
    /// # Panics
    /// If they are not there yet: who asks comes after [`Self::missing`].
    pub(super) fn there(&self) -> [Input; 2] {
        let Some(Address(first)) = self.slab.place.0.get() else {
            unreachable!("what makes them comes before");
        };
        let n = self.shape.iter().map(|&d| count(d)).product();
        [0, 1].map(|which| {
            let at = first.wrapping_add((2 * self.layer + which) * n);
            // SAFETY: `Fill` had as many elements for each layer, in an array that is kept by this, as is the layout, which stays
            // within them.
            unsafe { Input::at(at, n, &self.shape, &self.strides) }
        })
    }

    /// A copy of the first `n` positions of the keys, or the values, `[1, Hkv, n, D]`; after `inputs` are made.
    ///
    /// # Errors
    /// As [`Self::make`].
    pub(super) fn copy(self: &Arc<Self>, which: usize, n: i32, inputs: &[&Array]) -> Result<Array> {
        let [one, heads, _, width] = self.shape;
        let shape = [one, heads, n, width];
        let work = Take {
            from: Arc::clone(self),
            which,
            plane: Plane::of(&shape, n),
        };
        host_op::add_strided(OP, work, inputs, 0, &shape)
    }
}

const OP: &str = "cpu::memory";

/// Keys or values of a layer, `[heads, room, width]`, of which so many positions are copied.
#[derive(Clone, Copy)]
struct Plane {
    heads: usize,
    room: usize,
    width: usize,
    filled: usize,
}

impl Plane {
    fn of(&[_, heads, room, width]: &[i32; 4], filled: i32) -> Self {
        Self {
            heads: count(heads),
            room: count(room),
            width: count(width),
            filled: count(filled),
        }
    }

    fn elements(self) -> usize {
        self.heads * self.room * self.width
    }

    /// Copies the first positions of each to one plane after another.
    fn copy(self, from: &[Input], output: &mut [f32]) {
        let Self {
            heads,
            room,
            width,
            filled,
        } = self;
        if filled == 0 || from.is_empty() {
            return;
        }
        // SAFETY: they are float32, as `KvMemory` has seen; whoever writes into them comes before or after.
        let from: Vec<(&[f32], Vec<usize>)> = (from.iter())
            .map(|input| (unsafe { &*input.reach::<f32>() }, input.strides()))
            .collect();
        // Neighboring positions at once, where they are neighbors.
        let whole = from.iter().all(|(_, strides)| strides[2] == width);
        let run = if whole { filled } else { 1 };
        let runs = filled / run;
        let out = Output::new(output);
        // What is new to the process is slow to write at first, which two threads share.
        let units = from.len() * heads * runs;
        share(units, units * run * width, &|first, end| {
            for unit in first..end {
                let (plane, i) = (unit / runs / heads, unit % runs * run);
                let h = unit / runs % heads;
                let (data, strides) = &from[plane];
                let (start, n) = (h * strides[1] + i * strides[2], run * width);
                // SAFETY: each position of each head of a plane is one unit's alone.
                let to = unsafe { out.part(((plane * heads + h) * room + i) * width, n) };
                to.copy_from_slice(&data[start..start + n]);
            }
        });
    }
}

/// Where what memory begins with comes from.
pub(super) enum From {
    /// Nothing is known of it.
    Nothing,
    /// Keys and values, which are the operation's inputs.
    Arrays,
    /// Other memory, of as many layers, which comes before the operation.
    Kept(Vec<Arc<Kept>>),
}

/// Makes a slab, and says where it is.
struct Fill {
    place: Arc<Place>,
    from: From,
    plane: Plane,
    layers: usize,
}

impl Work for Fill {
    fn outputs(&self) -> usize {
        2 * self.layers * self.plane.elements()
    }

    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        match &self.from {
            From::Nothing => {}
            From::Arrays => self.plane.copy(&inputs[..2], output),
            From::Kept(layers) => {
                let from: Vec<Input> = layers.iter().flat_map(|kept| kept.there()).collect();
                self.plane.copy(&from, output);
            }
        }
        // Not before it is whole: who sees it need not wait for this.
        _ = self.place.0.set(Address(output.as_mut_ptr()));
    }
}

/// Copies keys, or values.
struct Take {
    from: Arc<Kept>,
    which: usize,
    plane: Plane,
}

impl Work for Take {
    fn outputs(&self) -> usize {
        self.plane.elements()
    }

    fn run(&self, _: &[Input], output: &mut [f32]) {
        let own = self.from.there()[self.which];
        self.plane.copy(&[own], output);
    }
}
