//! The state of a block with two parallel mixers: a KV cache for attention, and a recurrent state.
//! Each mixer receives its own state.

use mlx_rs_core::{Array, Result};

use super::chunked::untyped;
use super::{KvCache, LayerState, RecurrentState, Snapshot};

/// The prefixes of the array names in files: for the KV cache and for the recurrent state.
const NAMES: [&str; 2] = ["keys.", "state."];

/// Both states of one block, for one row.
#[derive(Debug)]
pub struct PairState {
    keys: Box<dyn LayerState>,
    state: RecurrentState,
}

impl PairState {
    /// Creates the pair from two empty states.
    pub fn new(keys: Box<dyn LayerState>, state: RecurrentState) -> Self {
        Self { keys, state }
    }
}

/// Splits a checkpoint into the parts for both states. It contains no keys if they can be trimmed.
fn parts(part: Option<&dyn LayerState>) -> (Option<&dyn LayerState>, Option<&dyn LayerState>) {
    let keys = part.and_then(|part| part.as_kv());
    let state = part.and_then(|part| part.as_recurrent());
    (
        keys.map(|keys| keys as &dyn LayerState),
        state.map(|state| state as &dyn LayerState),
    )
}

impl LayerState for PairState {
    fn offset(&self) -> i32 {
        self.state.offset()
    }

    fn reset(&mut self) {
        self.keys.reset();
        self.state.reset();
    }

    fn expect(&mut self, positions: i32) {
        self.keys.expect(positions);
    }

    fn arrays(&self) -> Vec<&Array> {
        let mut arrays = self.keys.arrays();
        arrays.extend(self.state.arrays());
        arrays
    }

    fn nbytes(&self) -> usize {
        self.keys.nbytes() + self.state.nbytes()
    }

    fn can_trim(&self, n: i32) -> bool {
        self.keys.can_trim(n) && self.state.can_trim(n)
    }

    fn trim(&mut self, n: i32) -> bool {
        self.can_trim(n) && self.keys.trim(n) && self.state.trim(n)
    }

    fn keeps_all(&self, positions: i32) -> bool {
        self.keys.keeps_all(positions) && self.state.keeps_all(positions)
    }

    fn copy(&self) -> Result<Box<dyn LayerState>> {
        Ok(Box::new(Self {
            keys: self.keys.copy()?,
            state: self.state.clone(),
        }))
    }

    fn checkpoint(&self, positions: i32) -> Result<Option<Box<dyn LayerState>>> {
        // If the keys can be trimmed, a copy of them would only waste memory.
        match self.keys.keeps_all(positions) {
            true => self.state.checkpoint(positions),
            false => self.copy().map(Some),
        }
    }

    fn can_copy_to(&self, n: i32, part: Option<&dyn LayerState>) -> bool {
        let (keys, state) = parts(part);
        self.keys.can_copy_to(n, keys) && self.state.can_copy_to(n, state)
    }

    fn copy_to(
        &self,
        n: i32,
        part: Option<&dyn LayerState>,
    ) -> Result<Option<Box<dyn LayerState>>> {
        let (keys, state) = parts(part);
        if !self.state.can_copy_to(n, state) {
            return Ok(None);
        }
        let source = match (
            self.state.offset() == n,
            part.and_then(|p| p.as_recurrent()),
        ) {
            (false, Some(state)) => state,
            _ => &self.state,
        };
        let Some(keys) = self.keys.copy_to(n, keys)? else {
            return Ok(None);
        };
        let mut state = source.clone();
        state.trim(state.offset().saturating_sub(n));
        Ok(Some(Box::new(Self { keys, state })))
    }

    fn kind(&self) -> String {
        format!("{}+{}", self.keys.kind(), self.state.kind())
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let parts = [self.keys.snapshot()?, self.state.snapshot()?];
        let named = NAMES.iter().zip(parts).flat_map(|(start, part)| {
            let arrays = part.arrays.into_iter();
            arrays.map(move |(name, array)| (format!("{start}{name}"), array))
        });
        Ok(Snapshot {
            kind: self.kind(),
            offset: self.offset(),
            arrays: named.collect(),
        })
    }

    fn restore(&mut self, snapshot: Snapshot) -> std::result::Result<(), String> {
        if untyped(&snapshot.kind) != untyped(&self.kind()) {
            return Err(format!(
                "it holds a state of kind `{}`, where `{}` is needed",
                snapshot.kind,
                self.kind()
            ));
        }
        let part = |start: &str, kind: String| Snapshot {
            kind,
            offset: snapshot.offset,
            arrays: (snapshot.arrays.iter())
                .filter_map(|(name, array)| {
                    Some((name.strip_prefix(start)?.to_owned(), array.clone()))
                })
                .collect(),
        };
        // The kind in the file, not this state's kind, gives the element type of the keys.
        let state = self.state.kind();
        let keys = snapshot.kind.strip_suffix(&format!("+{state}"));
        let keys = keys.map_or_else(|| self.keys.kind(), str::to_owned);
        let restored = (self.keys.restore(part(NAMES[0], keys)))
            .and_then(|()| self.state.restore(part(NAMES[1], state)));
        if restored.is_err() {
            self.reset();
        }
        restored
    }

    fn as_kv(&self) -> Option<&dyn KvCache> {
        self.keys.as_kv()
    }

    fn as_kv_mut(&mut self) -> Option<&mut dyn KvCache> {
        self.keys.as_kv_mut()
    }

    fn as_recurrent(&self) -> Option<&RecurrentState> {
        Some(&self.state)
    }

    fn as_recurrent_mut(&mut self) -> Option<&mut RecurrentState> {
        Some(&mut self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheOptions, Caches, StateLayout, StatePart, copy_prefix};

    fn empty() -> PairState {
        let layout = StateLayout::new("toy", vec![StatePart::new("sum", &[3])]);
        let keys = CacheOptions::default().cache(None);
        PairState::new(keys, RecurrentState::new(&layout))
    }

    fn filled() -> PairState {
        let mut pair = empty();
        let keys = Array::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 1, 2, 2]).unwrap();
        pair.as_kv_mut().unwrap().update(&keys, &keys).unwrap();
        let sum = Array::from_slice(&[7.0f32; 3], &[1, 3]).unwrap();
        let state = pair.as_recurrent_mut().unwrap();
        state.advance(vec![sum], 2).unwrap();
        pair
    }

    fn sum(state: &dyn LayerState) -> Vec<f32> {
        let parts = state.as_recurrent().unwrap().parts().unwrap();
        parts[0].to_vec().unwrap()
    }

    #[test]
    fn both_states_survive_a_file_a_copy_and_a_prefix() {
        let pair = filled();
        assert_eq!(pair.len(), 2);
        let mut other = empty();
        other.restore(pair.snapshot().unwrap()).unwrap();
        assert_eq!((other.len(), sum(&other)), (2, vec![7.0; 3]));
        assert_eq!(other.as_kv().unwrap().len(), 2);
        let copy = pair.copy().unwrap();
        assert_eq!((copy.len(), sum(copy.as_ref())), (2, vec![7.0; 3]));
        let mut broken = pair.snapshot().unwrap();
        broken.arrays.remove("state.sum");
        let mut fresh = empty();
        assert!(fresh.restore(broken).is_err() && fresh.is_empty());
        assert!(fresh.as_kv().unwrap().is_empty(), "nothing of it is kept");
        // A prefix includes the recurrent state, so it can only be used completely.
        let caches = Caches::from(Box::new(pair) as Box<dyn LayerState>);
        let prefix = copy_prefix(&caches, 2).unwrap().unwrap();
        assert_eq!(sum(prefix[0].as_ref()), [7.0; 3]);
        assert!(copy_prefix(&caches, 1).unwrap().is_none());
        assert!(!caches.rewinds());
    }

    #[test]
    fn it_is_cut_back_as_a_whole_or_not_at_all() {
        let mut pair = filled();
        assert!(!pair.trim(1) && pair.len() == 2);
        assert!(pair.trim(2) && pair.is_empty());
        assert!(pair.as_kv().unwrap().is_empty());
    }
}
