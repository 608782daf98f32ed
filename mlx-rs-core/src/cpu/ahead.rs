//! What a product or an attention reads first, fetched while threads still wait for each other in what comes before it: nothing
//! else asks for the first elements of a matrix before they are multiplied, as it begins where no other one ends, and nothing
//! for the first keys.

use std::ops::Range;

use super::attention::{Attend, Rows};
use super::bands::Bands;
use super::host_op::Input;
use super::pool;
use super::project::{Kind, Part, Product};

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// Rows up to which a product's time is that of reading its matrices, and an attention's that of reading keys and values.
const FEW: usize = 16;

/// Bands that are read at the same time: two tiles' outputs.
const BANDS: usize = 4;

/// Bytes of a band's words, or of keys; the processor itself asks for what follows.
const BYTES: usize = 4096;

/// Bytes of a line of the cache.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

impl Product {
    /// Fetches what thread `me` of the pool multiplies first, of matrices that are held.
    pub(super) fn fetch(&self, me: usize) {
        if self.rows > FEW {
            return;
        }
        let Some((matrices, own)) = self.first_bands(|places| pool::pool().first(places, me))
        else {
            return;
        };
        for part in &self.parts[matrices] {
            if let (Kind::Quantized { bits, group, half }, Some(held)) = (part.kind, &part.held) {
                // SAFETY: `Projection::plan` has them from a matrix of this form.
                let bands = unsafe { Bands::of(&held.inputs, (bits, self.k / group, half)) };
                bands.part(own.clone()).fetch();
            }
        }
    }

    /// The matrices and the bands of each that who begins at place `first` of all reads at first; of a gate both matrices.
    fn first_bands(&self, first: impl Fn(usize) -> usize) -> Option<(Range<usize>, Range<usize>)> {
        let (parts, each) = match self.gate {
            Some(_) => (&self.parts[..1], BANDS / 2),
            None => (&self.parts[..], BANDS),
        };
        let places = |part: &Part| part.bands().div_ceil(each);
        let mut place = first(parts.iter().map(places).sum());
        for (i, part) in parts.iter().enumerate() {
            if place < places(part) {
                let matrices = if self.gate.is_some() { 0..2 } else { i..i + 1 };
                let begin = place * each;
                return Some((matrices, begin..part.bands().min(begin + each)));
            }
            place -= places(part);
        }
        None
    }
}

impl Attend {
    /// The keys of each lane that [`Self::fetch`] wants, of caches of keys and values: none where it fetches nothing.
    ///
    /// # Safety
    /// They must be of float32.
    pub(super) unsafe fn first_keys<'a>(&self, caches: &'a [Input]) -> Vec<Rows<'a>> {
        if !(2..=FEW).contains(&self.queries.len()) {
            return Vec::new();
        }
        let keys = caches.iter().step_by(2);
        // SAFETY: the caller's promise; nothing is read.
        keys.map(|keys| unsafe { Rows::of(keys) }).collect()
    }

    /// Fetches the first keys that thread `me` of the pool looks at, where each looks at whole heads.
    pub(super) fn fetch(&self, me: usize, keys: &[Rows<'_>]) {
        let groups = self.heads / self.repeats;
        let unit = pool::pool().first(self.queries.len() * groups, me);
        let (q, group) = (unit / groups, unit % groups);
        let Some(keys) = self.queries.get(q).and_then(|q| keys.get(q.lane)) else {
            return;
        };
        let bytes = self.keys_of(q) * keys.position * size_of::<f32>();
        let first = keys.place(group, self.first_seen(q));
        lines(first.cast(), bytes.min(BYTES));
    }
}

impl Bands<'_> {
    /// Asks for the first elements of each of these bands.
    fn fetch(self) {
        for band in 0..self.count() {
            let own = self.part(band..band + 1);
            let words = own.words.as_ptr_range();
            lines(words.start.cast(), (own.words.len() * 4).min(BYTES));
            for factors in [own.scales, own.biases] {
                let (at, bytes) = factors.bytes();
                lines(at, bytes);
            }
        }
    }
}

/// Asks for elements that are read soon.
pub(super) fn read(elements: &[f32]) {
    lines(elements.as_ptr().cast(), size_of_val(elements));
}

/// Asks for so many bytes, which need not be there.
#[cfg(target_arch = "x86_64")]
fn lines(at: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(LINE) {
        // SAFETY: every x86-64 has it, and it reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(offset).cast()) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn lines(_: *const u8, _: usize) {}

#[cfg(test)]
mod tests {
    use super::super::kernel::tests::noise;
    use super::super::project::{Gate, Projection, Then};
    use super::super::tests::{array, on_cpu};
    use super::super::{Matrix, QuantizedMatrix};
    use super::*;
    use crate::ops::{QuantMode, Quantized};

    fn matrix(n: i32) -> Matrix {
        let w = array(&noise(n as usize * 64, 1), &[n, 64]);
        let q = Quantized::quantize(&w, 32, 4, QuantMode::Affine).unwrap();
        Matrix::Quantized(QuantizedMatrix::new(&q).unwrap().expect("their format"))
    }

    /// Outputs go to threads 32 at a time, or 16 of each of a gate's matrices.
    #[test]
    fn bands_are_where_a_thread_begins() {
        on_cpu(|| {
            let all = [64, 40, 9].map(matrix);
            let parts = all.each_ref().map(|matrix| (matrix, None));
            let plan = |parts, then| {
                let norm = None;
                let projection = Projection { parts, norm, then };
                projection.plan(3, (false, true), &mut Vec::new()).unwrap()
            };
            let work = plan(&parts, Then::Nothing);
            for (place, wanted) in [
                (0, Some((0..1, 0..4))),
                (1, Some((0..1, 4..8))),
                (2, Some((1..2, 0..4))),
                // The matrix ends.
                (3, Some((1..2, 4..5))),
                (4, Some((2..3, 0..2))),
                (5, None),
            ] {
                let first = |places: usize| {
                    assert_eq!(places, 5);
                    place
                };
                assert_eq!(work.first_bands(first), wanted, "{place}");
            }
            let two = [matrix(40), matrix(40)];
            let gate = plan(
                &two.each_ref().map(|matrix| (matrix, None)),
                Then::Gate(Gate::Silu),
            );
            assert_eq!(gate.first_bands(|_| 1), Some((0..2, 2..4)));
            assert_eq!(gate.first_bands(|_| 2), Some((0..2, 4..5)));
            // As long as they are, whoever asks.
            for work in [&work, &gate] {
                (0..=pool::pool().width()).for_each(|me| work.fetch(me));
            }
        });
    }
}
