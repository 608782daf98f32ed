//! Keys and values out of packed projections: keys with norm and rotation, into a cache in place or alone.

use super::host_op::{Input, Work};
use super::kernel::{self, Isa};
use super::rotation::{Rotation, rotate, turns};
use super::share::{Output, share};

/// Neighboring tokens of one row in a packed projection.
#[derive(Debug, Clone, Copy)]
pub struct Tokens {
    /// The first one's place in the projection.
    pub first: i32,
    /// How many.
    pub length: i32,
    /// The first one's position, and place in the cache.
    pub offset: i32,
}

/// Divides a head by the root of its mean square, in place.
pub(super) fn normalize(isa: Isa, weight: &[f32], eps: f32, head: &mut [f32]) {
    let square = kernel::inner(isa, head, head);
    let factor = 1.0 / (square / head.len() as f32 + eps).sqrt();
    for (v, w) in head.iter_mut().zip(weight) {
        *v *= factor * w;
    }
}

/// Heads out of packed rows, to `[n, room, d]` from `slot` on.
pub(super) struct Store {
    pub n: usize,
    pub room: usize,
    pub d: usize,
    pub width: usize,
    /// Of the first head in a packed row.
    pub first: usize,
    /// The first packed row.
    pub from: usize,
    pub slot: usize,
    pub positions: Vec<i32>,
    pub eps: Option<f32>,
    pub rotation: Option<Rotation>,
    pub isa: Isa,
}

impl Store {
    pub(super) fn write(&self, packed: &[f32], norm: Option<&[f32]>, output: &mut [f32]) {
        let out = Output::new(output);
        let total = self.positions.len();
        let turns = self
            .rotation
            .as_ref()
            .map(|r| (r, turns(r, &self.positions)));
        // Not the counted pointer, which stays on this thread.
        let rotation = turns.as_ref().map(|(r, turns)| (*r, &**turns));
        share(total, total * self.n * self.d * 32, &|from, to| {
            for t in from..to {
                for h in 0..self.n {
                    let start = (self.from + t) * self.width + self.first + h * self.d;
                    let place = (h * self.room + self.slot + t) * self.d;
                    // SAFETY: each token and head has a place of its own.
                    let head = unsafe { out.part(place, self.d) };
                    head.copy_from_slice(&packed[start..start + self.d]);
                    if let (Some(weight), Some(eps)) = (norm, self.eps) {
                        normalize(self.isa, weight, eps, head);
                    }
                    if let Some((rotation, turns)) = rotation {
                        let pairs = rotation.radians.len();
                        rotate(rotation, &turns[t * pairs..(t + 1) * pairs], head);
                    }
                }
            }
        });
    }
}

impl Work for Store {
    fn outputs(&self) -> usize {
        self.n * self.room * self.d
    }

    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // The first one is what the output begins as.
        // SAFETY: `Heads::store` checked that these are of float32.
        let slice = |i: usize| inputs.get(i).map(|i| unsafe { i.as_slice::<f32>() });
        self.write(slice(1).unwrap_or_default(), slice(2), output);
    }
}

/// Keys alone, without a cache.
pub(super) struct Keys(pub Store);

impl Work for Keys {
    fn outputs(&self) -> usize {
        self.0.outputs()
    }

    fn run(&self, inputs: &[Input], output: &mut [f32]) {
        // SAFETY: `Heads::keys` gave arrays of float32.
        let slice = |i: usize| inputs.get(i).map(|i| unsafe { i.as_slice::<f32>() });
        self.0.write(slice(0).unwrap_or_default(), slice(1), output);
    }
}
