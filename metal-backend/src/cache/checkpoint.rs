//! Checkpoints: copies of layer states at earlier positions of a sequence. Recurrent states and
//! full windows cannot be trimmed, so a later prompt can continue only from a checkpoint. Caches
//! that keep all positions can be trimmed, so they need no checkpoints.

use mlx_rs_core::Result;

use super::{Caches, LayerState, offset};

/// The maximum number of checkpoints of one sequence.
const MOST: usize = 16;

/// The states of the layers that cannot be trimmed, after the first `tokens` positions.
#[derive(Debug)]
struct Checkpoint {
    tokens: usize,
    /// The state of each layer; `None` if the layer can be trimmed to `tokens`.
    parts: Vec<Option<Box<dyn LayerState>>>,
    bytes: usize,
}

impl Checkpoint {
    /// Copies the states of `caches`, for a sequence that is expected to reach `positions`
    /// positions.
    fn of(caches: &Caches, positions: i32) -> Result<Self> {
        let parts: Vec<_> = (caches.iter())
            .map(|layer| layer.checkpoint(positions))
            .collect::<Result<_>>()?;
        Ok(Self {
            tokens: offset(caches).unsigned_abs() as usize,
            bytes: parts.iter().flatten().map(|part| part.nbytes()).sum(),
            parts,
        })
    }

    fn copy(&self) -> Result<Self> {
        let copy = |part: &Option<Box<dyn LayerState>>| part.as_ref().map(|p| p.copy()).transpose();
        Ok(Self {
            tokens: self.tokens,
            parts: self.parts.iter().map(copy).collect::<Result<_>>()?,
            bytes: self.bytes,
        })
    }
}

/// The checkpoints of one sequence, with limited memory.
#[derive(Debug, Default)]
pub struct Checkpoints {
    /// The checkpoints, ascending by `tokens`.
    kept: Vec<Checkpoint>,
}

/// A length to which caches can be truncated.
#[derive(Debug, Clone, Copy)]
pub struct Cut<'a> {
    /// The number of positions.
    pub tokens: usize,
    /// The checkpoint that replaces the states which cannot be trimmed; `None` if all can be
    /// trimmed.
    checkpoint: Option<&'a Checkpoint>,
}

impl Cut<'_> {
    /// Whether trimming suffices.
    pub fn is_plain(&self) -> bool {
        self.checkpoint.is_none()
    }

    /// Returns a separate copy of the first positions of `caches`. `None` if this is not possible.
    pub fn copy(&self, caches: &Caches) -> Result<Option<Caches>> {
        let Ok(n) = i32::try_from(self.tokens) else {
            return Ok(None);
        };
        let parts = self.checkpoint.map(|checkpoint| &checkpoint.parts[..]);
        super::copy_with(caches, n, parts.unwrap_or_default())
    }
}

impl Checkpoints {
    /// Adds a checkpoint of `caches`, whose sequence is expected to reach `positions` positions.
    /// Does nothing if such a sequence can be trimmed to any length. Beyond 16 checkpoints or
    /// `bytes`, drops the checkpoints with the smallest distance between their neighbors. The
    /// newest checkpoint is never dropped.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn add(&mut self, caches: &Caches, positions: i32, bytes: usize) -> Result<()> {
        if can_trim_anywhere(caches, positions) {
            return Ok(());
        }
        let new = Checkpoint::of(caches, positions)?;
        self.kept.retain(|old| old.tokens < new.tokens);
        self.kept.push(new);
        while self.kept.len() > 1 && (self.kept.len() > MOST || self.nbytes() > bytes) {
            let Some(closest) = self.closest() else { break };
            self.kept.remove(closest);
        }
        Ok(())
    }

    /// Returns the index of the checkpoint with the smallest distance between its two neighbors;
    /// the last checkpoint is excluded. The start of the sequence is a neighbor of the first
    /// checkpoint.
    fn closest(&self) -> Option<usize> {
        let before = std::iter::once(0).chain(self.kept.iter().map(|c| c.tokens));
        let after = self.kept.iter().skip(1).map(|c| c.tokens);
        let distances = before.zip(after).map(|(before, after)| after - before);
        let closest = distances.enumerate().min_by_key(|(_, distance)| *distance);
        closest.map(|(i, _)| i)
    }

    /// Returns the number of positions of the last checkpoint, or 0 without checkpoints.
    pub fn latest(&self) -> usize {
        self.kept.last().map_or(0, |last| last.tokens)
    }

    /// Bytes of the copied states.
    pub fn nbytes(&self) -> usize {
        self.kept.iter().map(|checkpoint| checkpoint.bytes).sum()
    }

    /// Drops all checkpoints.
    pub fn clear(&mut self) {
        self.kept.clear();
    }

    /// Drops the checkpoints beyond `n` positions.
    pub fn truncate(&mut self, n: usize) {
        self.kept.retain(|checkpoint| checkpoint.tokens <= n);
    }

    /// Returns copies of the checkpoints with at most `n` positions.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn up_to(&self, n: usize) -> Result<Self> {
        let kept = self
            .kept
            .iter()
            .take_while(|checkpoint| checkpoint.tokens <= n);
        Ok(Self {
            kept: kept.map(Checkpoint::copy).collect::<Result<_>>()?,
        })
    }

    /// Returns the cut to the greatest length, at most `n`, to which `caches` can be truncated.
    /// `None` if they can only be truncated to 0.
    pub fn cut(&self, caches: &Caches, n: usize) -> Option<Cut<'_>> {
        let can_cut = |tokens: usize, parts: &[Option<Box<dyn LayerState>>]| {
            let tokens = i32::try_from(tokens).unwrap_or(i32::MAX);
            tokens > 0 && super::can_copy_with(caches, tokens, parts)
        };
        if can_cut(n, &[]) {
            return Some(Cut {
                tokens: n,
                checkpoint: None,
            });
        }
        let mut usable = self.kept.iter().rev().filter(|c| c.tokens <= n);
        let found = usable.find(|c| can_cut(c.tokens, &c.parts))?;
        Some(Cut {
            tokens: found.tokens,
            checkpoint: Some(found),
        })
    }
}

/// Whether a sequence of `positions` positions can be trimmed to any length.
pub fn can_trim_anywhere(caches: &Caches, positions: i32) -> bool {
    caches.iter().all(|layer| layer.keeps_all(positions))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::test_support::{part, recurrent};
    use crate::cache::{CacheOptions, RotatingCache};

    /// Returns caches of two layers after `n` positions. One stores all positions; the other is a
    /// ring of four positions.
    fn ring(n: i32) -> Caches {
        let mut layers: Vec<Box<dyn crate::cache::KvCache>> = vec![
            CacheOptions::default().cache(None),
            Box::new(RotatingCache::new(4, 0)),
        ];
        for layer in &mut layers {
            for at in 0..n {
                layer.update(&part(at, 1), &part(at, 1)).unwrap();
            }
        }
        layers.into_iter().collect()
    }

    fn tokens(checkpoints: &Checkpoints) -> Vec<usize> {
        checkpoints.kept.iter().map(|c| c.tokens).collect()
    }

    #[test]
    fn a_state_continues_at_a_checkpoint() {
        let mut checkpoints = Checkpoints::default();
        for n in [3, 8] {
            checkpoints.add(&recurrent(n), 12, usize::MAX).unwrap();
        }
        let end = recurrent(10);
        let cut = |n| checkpoints.cut(&end, n).map(|cut| cut.tokens);
        assert_eq!(
            [2, 3, 7, 8, 9, 10].map(cut),
            [None, Some(3), Some(3), Some(8), Some(8), Some(10)]
        );
        let copy = checkpoints
            .cut(&end, 9)
            .unwrap()
            .copy(&end)
            .unwrap()
            .unwrap();
        let sum = copy[0].as_recurrent().unwrap().parts().unwrap();
        assert_eq!(
            (offset(&copy), sum[0].to_vec::<f32>().unwrap()),
            (8, vec![8.0; 2])
        );
    }

    #[test]
    fn a_ring_is_copied_and_other_keys_are_trimmed() {
        let mut checkpoints = Checkpoints::default();
        let at = ring(7);
        checkpoints.add(&at, 12, usize::MAX).unwrap();
        let end = ring(12);
        let cut = checkpoints.cut(&end, 9).unwrap();
        assert_eq!((cut.tokens, cut.is_plain()), (7, false));
        let mut copy = cut.copy(&end).unwrap().unwrap();
        assert_eq!(copy.iter().map(|c| c.offset()).collect::<Vec<_>>(), [7, 7]);
        for layer in copy.iter_mut() {
            let kv = layer.as_kv_mut().unwrap();
            let view = kv.update(&part(7, 1), &part(7, 1)).unwrap();
            let mut seen = crate::cache::test_support::positions(&view);
            seen.sort_unstable();
            assert!(seen == (4..8).collect::<Vec<_>>() || seen == (0..8).collect::<Vec<_>>());
        }
        // A second copy must not contain what the first copy has written.
        let again = cut.copy(&end).unwrap().unwrap();
        assert_eq!(offset(&again), 7);
        // A sequence that never fills the ring needs no copies.
        let mut none = Checkpoints::default();
        none.add(&ring(3), 4, usize::MAX).unwrap();
        assert_eq!(tokens(&none), [0; 0]);
        assert_eq!(none.cut(&ring(4), 2).unwrap().tokens, 2);
    }

    #[test]
    fn their_number_and_bytes_are_bounded() {
        let mut checkpoints = Checkpoints::default();
        for n in 1..=100 {
            checkpoints.add(&recurrent(n), 200, usize::MAX).unwrap();
        }
        let kept = tokens(&checkpoints);
        assert_eq!((kept.len(), kept.last()), (MOST, Some(&100)));
        // The checkpoints must cover the complete sequence.
        let distances = kept.windows(2).map(|pair| pair[1] - pair[0]);
        assert!(distances.max().unwrap() <= 20 && kept[0] <= 20, "{kept:?}");
        // With states of 8 bytes, three fit into the limit.
        checkpoints.add(&recurrent(101), 200, 31).unwrap();
        assert_eq!((checkpoints.nbytes(), checkpoints.latest()), (24, 101));
        checkpoints.add(&recurrent(102), 200, 0).unwrap();
        assert_eq!(tokens(&checkpoints), [102]);
    }

    #[test]
    fn copies_end_where_the_sequences_part() {
        let mut checkpoints = Checkpoints::default();
        for n in [3, 8, 9] {
            checkpoints.add(&recurrent(n), 12, usize::MAX).unwrap();
        }
        assert_eq!(tokens(&checkpoints.up_to(8).unwrap()), [3, 8]);
        // A new checkpoint replaces the checkpoints at or after its position.
        checkpoints.add(&recurrent(5), 12, usize::MAX).unwrap();
        assert_eq!(tokens(&checkpoints), [3, 5]);
        checkpoints.truncate(4);
        assert_eq!(tokens(&checkpoints), [3]);
    }
}
