//! The assignment of rows to experts. It is sorted by expert, so that each expert's matrices are
//! read once. This file has only indices; `experts.rs` has the products.

use std::ops::Range;

use crate::work::Input;

/// The sizes of a routing, which assigns `per_row` experts to each input row.
#[derive(Debug, Clone, Copy)]
pub struct Routing {
    /// The number of rows of the input.
    pub rows: usize,
    /// The number of experts of each row.
    pub per_row: usize,
    /// Whether the expert indices are signed.
    pub signed: bool,
}

/// Pairs of a row and an expert, sorted by expert. Pair `i` belongs to row `i / per_row`.
pub(crate) struct Routes {
    /// The pairs in the order of their experts. Pairs of an expert stay in order.
    pub pairs: Vec<usize>,
    /// The position of each pair in the sorted order.
    pub places: Vec<usize>,
    /// The experts that have pairs, each with the range of its pairs in the sorted order.
    pub groups: Vec<(usize, Range<usize>)>,
}

impl Routing {
    /// The number of pairs of a row and an expert.
    pub fn pairs(&self) -> usize {
        self.rows * self.per_row
    }

    /// The routes to a stack of `experts` experts. An index out of range selects the nearest
    /// expert.
    ///
    /// # Safety
    /// The input must consist of 32-bit integers.
    pub(crate) unsafe fn routes(&self, ids: &Input, experts: usize) -> Routes {
        // SAFETY: the caller guarantees 32-bit integers.
        let ids = unsafe { ids.as_slice::<u32>() };
        assert_eq!(ids.len(), self.pairs());
        let expert = |id: u32| {
            let id = match id.cast_signed() {
                id if self.signed => id.max(0).cast_unsigned(),
                _ => id,
            };
            usize::try_from(id).unwrap_or(usize::MAX).min(experts - 1)
        };
        let mut counts = vec![0; experts];
        ids.iter().for_each(|id| counts[expert(*id)] += 1);
        let mut groups = Vec::new();
        let mut next = Vec::with_capacity(experts);
        let mut start = 0;
        for (e, count) in counts.into_iter().enumerate() {
            next.push(start);
            if count > 0 {
                groups.push((e, start..start + count));
            }
            start += count;
        }
        let mut pairs = vec![0; ids.len()];
        let mut places = vec![0; ids.len()];
        for (pair, id) in ids.iter().enumerate() {
            let place = &mut next[expert(*id)];
            pairs[*place] = pair;
            places[pair] = *place;
            *place += 1;
        }
        Routes {
            pairs,
            places,
            groups,
        }
    }
}

impl Routes {
    /// Batches of consecutive experts. A batch has at most `most` pairs, or only one expert.
    pub(crate) fn batches(&self, most: usize) -> Vec<&[(usize, Range<usize>)]> {
        let mut batches = Vec::new();
        let mut first = 0;
        for (i, (_, range)) in self.groups.iter().enumerate() {
            if i > first && range.end - self.groups[first].1.start > most {
                batches.push(&self.groups[first..i]);
                first = i;
            }
        }
        if first < self.groups.len() {
            batches.push(&self.groups[first..]);
        }
        batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(ids: &[u32], per_row: usize, signed: bool, experts: usize) -> Routes {
        // SAFETY: the elements exist during the call.
        let input = unsafe { Input::from_raw(ids.as_ptr().cast(), ids.len()) };
        let routing = Routing {
            rows: ids.len() / per_row,
            per_row,
            signed,
        };
        // SAFETY: the indices have 32 bits.
        unsafe { routing.routes(&input, experts) }
    }

    #[test]
    fn pairs_are_sorted_by_expert_and_numbers_are_bounded() {
        let routes_by_expert = routes(&[2, 0, 7, 2, 0, 1], 2, true, 4);
        assert_eq!(routes_by_expert.pairs, [1, 4, 5, 0, 3, 2]);
        assert_eq!(routes_by_expert.places, [3, 0, 5, 4, 1, 2]);
        assert_eq!(
            routes_by_expert.groups,
            [(0, 0..2), (1, 2..3), (2, 3..5), (3, 5..6)]
        );
        // The bits of -1 select the first expert if signed, and the last expert if unsigned.
        assert_eq!(routes(&[u32::MAX], 1, true, 4).groups, [(0, 0..1)]);
        assert_eq!(routes(&[u32::MAX], 1, false, 4).groups, [(3, 0..1)]);
        assert!(routes(&[], 1, false, 4).groups.is_empty());
    }

    #[test]
    fn batches_have_all_experts_in_order() {
        let routes_by_expert = routes(&[0, 0, 0, 0, 1, 1, 2, 3, 3, 3], 1, false, 4);
        for most in 1..12 {
            let batches = routes_by_expert.batches(most);
            assert_eq!(batches.concat(), routes_by_expert.groups);
            for batch in batches {
                let pairs = batch[batch.len() - 1].1.end - batch[0].1.start;
                assert!(pairs <= most || batch.len() == 1);
            }
        }
    }
}
