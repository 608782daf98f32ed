//! Caches kept from one request to the next. A prompt with a common prefix (the next turn of a
//! conversation) is then not computed from the start.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cache::{self, Caches};

/// Caches of finished requests.
///
/// Keys and values belong to the adapter they were computed under. An epoch counts the adapter's
/// changes. A request reads it before it computes anything, and names it when it takes and when it
/// puts caches. Both compare it under the lock that [`Prefixes::renew`] holds. So caches of one
/// adapter never reach a request of another.
#[derive(Debug)]
pub struct Prefixes {
    store: Mutex<Store>,
    slots: usize,
}

#[derive(Debug, Default)]
struct Store {
    epoch: u64,
    closed: bool,
    /// All of `epoch`, the newest last.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    tokens: Vec<u32>,
    caches: Caches,
}

/// The length of the common prefix of two sequences.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Prefixes {
    /// Holds at most `slots` finished requests.
    pub fn new(slots: usize) -> Self {
        Self {
            store: Mutex::default(),
            slots,
        }
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the changes of the adapter. A request must read it before it computes anything.
    pub fn epoch(&self) -> u64 {
        self.store().epoch
    }

    /// Begins an epoch and drops the caches of the one before. Call it after the adapter changed: a
    /// request that starts in between is of the old epoch and stores nothing.
    pub fn renew(&self) {
        let mut store = self.store();
        store.epoch += 1;
        store.entries.clear();
    }

    /// The caches with the longest common prefix with `prompt`, cut to it, and their length. They
    /// have the kinds and the sequence of `like`. In another epoch than `epoch` there are none.
    /// They are taken out: the request gives them back, longer, or loses them when it fails. At
    /// least one token is left to compute, from which the first logits come.
    pub fn take(&self, epoch: u64, prompt: &[u32], like: &Caches) -> Option<(Caches, usize)> {
        let mut store = self.store();
        if store.epoch != epoch {
            return None;
        }
        let usable = |entry: &Entry| -> usize {
            let n = common(&entry.tokens, prompt).min(prompt.len().saturating_sub(1));
            let surplus = i32::try_from(entry.tokens.len() - n).unwrap_or(i32::MAX);
            let possible = || entry.caches.iter().all(|c| c.can_trim(surplus));
            if n > 0 && cache::alike(&entry.caches, like) && possible() {
                n
            } else {
                0
            }
        };
        let (best, n) = store
            .entries
            .iter()
            .enumerate()
            .map(|(i, entry)| (i, usable(entry)))
            .max_by_key(|(_, n)| *n)
            .filter(|(_, n)| *n > 0)?;
        let reach = usize::try_from(like.reach()).unwrap_or(0);
        // A recurrent state cannot be cut back to this prefix later, so it stays for other prompts.
        // A copy costs no memory until it advances.
        if !store.entries[best].caches.rewinds() {
            let copy = cache::copy(&store.entries[best].caches).ok()?;
            return Some((copy.for_sequence(reach), n));
        }
        let mut entry = store.entries.remove(best);
        let surplus = i32::try_from(entry.tokens.len() - n).unwrap_or(i32::MAX);
        cache::trim(&mut entry.caches, surplus).then(|| (entry.caches.for_sequence(reach), n))
    }

    /// Keeps the caches of `tokens`, which a request that began in `epoch` computed. When full, it
    /// drops the oldest. It also drops entries that are a prefix of these, unless these cannot be
    /// cut back to them. Nothing is remembered in another epoch.
    pub fn put(&self, epoch: u64, tokens: Vec<u32>, caches: Caches) {
        let held = cache::offset(&caches).unsigned_abs() as usize;
        if tokens.is_empty() || held != tokens.len() {
            return;
        }
        let mut store = self.store();
        if store.closed || store.epoch != epoch {
            return;
        }
        let entries = &mut store.entries;
        let replaces = |entry: &Entry| match caches.rewinds() {
            true => tokens.starts_with(&entry.tokens),
            false => tokens == entry.tokens,
        };
        entries.retain(|entry| !replaces(entry));
        entries.push(Entry { tokens, caches });
        while entries.len() > self.slots {
            entries.remove(0);
        }
    }

    /// Forgets everything, and remembers nothing from here on.
    pub fn close(&self) {
        let mut store = self.store();
        store.closed = true;
        store.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheOptions, KvCache, RecurrentState, RotatingCache};
    use crate::cache::{LayerState, StateLayout, StatePart};
    use mlx_rs_core::{Array, zeros};

    fn filled(n: i32) -> Caches {
        let mut cache = CacheOptions::default().cache(None);
        if n > 0 {
            let part = zeros(&[1, 1, n, 2], mlx_rs_core::Dtype::Float32).unwrap();
            cache.update(&part, &part).unwrap();
        }
        Caches::from(cache).with_switches([4])
    }

    #[test]
    fn the_longest_beginning_is_taken_once_and_one_token_is_left() {
        let prefixes = Prefixes::new(2);
        prefixes.put(0, vec![1, 2, 3], filled(3));
        prefixes.put(0, vec![1, 9], filled(2));
        assert!(prefixes.take(0, &[7, 1], &filled(0)).is_none());
        let (caches, n) = prefixes.take(0, &[1, 2, 3], &filled(0)).unwrap();
        assert_eq!((n, cache::offset(&caches)), (2, 2));
        let (_, n) = prefixes.take(0, &[1, 2, 3], &filled(0)).unwrap();
        assert_eq!(n, 1, "the other one");
        assert!(prefixes.take(0, &[1, 2, 3], &filled(0)).is_none());
    }

    #[test]
    fn the_oldest_makes_room_and_beginnings_are_replaced() {
        let prefixes = Prefixes::new(2);
        prefixes.put(0, vec![1], filled(1));
        prefixes.put(0, vec![1, 2], filled(2));
        prefixes.put(0, vec![3], filled(1));
        assert_eq!(
            prefixes.take(0, &[1, 2, 5], &filled(0)).unwrap().1,
            2,
            "still there"
        );
        prefixes.put(0, vec![4], filled(1));
        prefixes.put(0, vec![5], filled(1));
        assert!(prefixes.take(0, &[3, 3], &filled(0)).is_none(), "gone");
        // Caches that do not hold these tokens are not kept.
        prefixes.put(0, vec![6, 7], filled(1));
        assert!(prefixes.take(0, &[6, 7, 8], &filled(0)).is_none());
        prefixes.close();
        prefixes.put(0, vec![1], filled(1));
        assert!(prefixes.take(0, &[1, 1], &filled(0)).is_none());
    }

    #[test]
    fn an_epoch_takes_nothing_from_another() {
        let prefixes = Prefixes::new(2);
        prefixes.put(0, vec![1, 2, 3], filled(3));
        prefixes.renew();
        assert_eq!(prefixes.epoch(), 1);
        assert!(prefixes.take(1, &[1, 2, 3], &filled(0)).is_none(), "gone");
        // A request that began before, and ends only now.
        prefixes.put(0, vec![1, 2, 3], filled(3));
        assert!(prefixes.take(1, &[1, 2, 3], &filled(0)).is_none());
        prefixes.put(1, vec![1, 2, 3], filled(3));
        assert!(prefixes.take(0, &[1, 2, 3], &filled(0)).is_none());
        assert_eq!(prefixes.take(1, &[1, 2, 3], &filled(0)).unwrap().1, 2);
    }

    #[test]
    fn keys_of_another_stretch_are_not_reused() {
        let prefixes = Prefixes::new(2);
        let like = |n| filled(0).for_sequence(n);
        prefixes.put(0, vec![1, 2, 3, 4], filled(4).for_sequence(4));
        assert!(prefixes.take(0, &[1, 2, 3, 4, 5], &like(5)).is_none());
        let (caches, n) = prefixes.take(0, &[1, 2, 3, 9], &like(4)).unwrap();
        assert_eq!((n, caches.until_switch()), (3, 1));
        prefixes.put(0, vec![1, 2, 3, 4, 5], filled(5).for_sequence(5));
        assert!(prefixes.take(0, &[1, 2, 3, 4], &like(4)).is_none());
        let (caches, n) = prefixes.take(0, &[1, 2, 9, 9, 9], &like(5)).unwrap();
        // Cut below the switch, they are still those of a long sequence.
        assert_eq!(
            (n, caches.stretch(), caches.until_switch()),
            (2, 1, i32::MAX)
        );
    }

    /// A recurrent state that has seen `n` positions.
    fn recurrent(n: i32) -> Caches {
        let layout = StateLayout::new("toy", vec![StatePart::new("sum", &[2])]);
        let mut state = RecurrentState::new(&layout);
        if n > 0 {
            let sum = Array::from_slice(&[n as f32; 2], &[1, 2]).unwrap();
            state.advance(vec![sum], n).unwrap();
        }
        Caches::from(Box::new(state) as Box<dyn LayerState>)
    }

    #[test]
    fn a_recurrent_state_is_reused_as_a_whole_and_stays() {
        let prefixes = Prefixes::new(3);
        let like = recurrent(0);
        prefixes.put(0, vec![1, 2, 3], recurrent(3));
        // Neither a part of it, nor all of it where no token is left to compute.
        assert!(prefixes.take(0, &[1, 2, 9], &like).is_none());
        assert!(prefixes.take(0, &[1, 2, 3], &like).is_none());
        for last in [4, 5] {
            let (caches, n) = prefixes.take(0, &[1, 2, 3, last], &like).unwrap();
            assert_eq!((n, cache::offset(&caches)), (3, 3));
            prefixes.put(0, vec![1, 2, 3, last], recurrent(4));
        }
        let (_, n) = prefixes.take(0, &[1, 2, 3, 4, 6], &like).unwrap();
        assert_eq!(n, 4, "the longest");
        // The same tokens replace; one more makes the oldest go.
        prefixes.put(0, vec![1, 2, 3, 5], recurrent(4));
        prefixes.put(0, vec![7], recurrent(1));
        assert!(prefixes.take(0, &[1, 2, 3, 9], &like).is_none());
        assert!(prefixes.take(0, &[7, 1], &like).is_some());
    }

    #[test]
    fn what_a_circle_has_lost_is_not_reused() {
        let prefixes = Prefixes::new(1);
        let ring = || Caches::from(Box::new(RotatingCache::new(4, 0)) as Box<dyn KvCache>);
        let mut caches = ring();
        let part = zeros(&[1, 1, 6, 2], mlx_rs_core::Dtype::Float32).unwrap();
        let kv = caches[0].as_kv_mut().unwrap();
        kv.update(&part, &part).unwrap();
        let tokens = vec![1, 2, 3, 4, 5, 6];
        prefixes.put(0, tokens.clone(), caches);
        let like = ring();
        assert!(prefixes.take(0, &[1, 2, 3, 9], &like).is_none());
        let longer = [tokens, vec![7]].concat();
        // Caches of another kind do not stand for each other.
        assert!(prefixes.take(0, &longer, &filled(0)).is_none());
        assert_eq!(prefixes.take(0, &longer, &like).unwrap().1, 6);
    }
}
