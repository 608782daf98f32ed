//! Caches of finished requests. A later prompt with a common prefix, such as the next turn of a
//! conversation, reuses them.

use parking_lot::{Mutex, MutexGuard};

use crate::cache::checkpoint::{Cut, can_trim_anywhere};
use crate::cache::{self, Caches, Checkpoints};

/// The default memory limit in bytes.
const BYTES: usize = 2 << 30;

/// Checkpoints of running requests may use `1 / CHECKPOINTS` of this memory.
const CHECKPOINTS: usize = 4;

/// A copy costs one operation per layer, and array caches copy their complete capacity. So caches
/// are copied only if at least 1/64 of their tokens is shared.
const MOST_BESIDE: usize = 64;

/// Whether it is worthwhile to copy `n` tokens from caches that have `cached` tokens.
pub fn worth_copying(n: usize, cached: usize) -> bool {
    n.saturating_mul(MOST_BESIDE) >= cached
}

/// Caches of finished requests.
///
/// Keys and values are valid only for the adapter that computed them. An epoch counts the changes
/// of the adapter. A request reads the epoch before it computes anything, and passes this epoch to
/// each call that takes or stores caches. These calls compare epochs under the lock that
/// [`Prefixes::renew`] also holds. So a request never receives caches of another adapter.
#[derive(Debug)]
pub struct Prefixes {
    store: Mutex<Store>,
    slots: usize,
    bytes: usize,
    /// Whether a single entry may exceed the memory limit.
    exceeds: bool,
}

#[derive(Debug, Default)]
struct Store {
    epoch: u64,
    closed: bool,
    /// All entries belong to `epoch`. The most recently used entry is last.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    /// Only requests with an equal salt may use the caches.
    salt: Option<String>,
    tokens: Vec<u32>,
    caches: Caches,
    /// Checkpoints, for caches that cannot be trimmed to every length.
    checkpoints: Checkpoints,
    /// Bytes of caches and checkpoints.
    bytes: usize,
}

impl Entry {
    /// Returns the cut to the longest prefix of a prompt to which the caches can be truncated, if
    /// their kinds match `like`.
    fn cut(&self, salt: Option<&str>, prompt: &[u32], like: &Caches) -> Option<Cut<'_>> {
        if self.salt.as_deref() != salt || !cache::alike(&self.caches, like) {
            return None;
        }
        // The last token is never taken from a cache, because its pass computes the first logits.
        let n = common(&self.tokens, prompt).min(prompt.len().saturating_sub(1));
        self.checkpoints.cut(&self.caches, n)
    }
}

/// Caches for a prompt.
#[derive(Debug)]
pub struct Found {
    /// The states after the first `tokens` tokens of the prompt.
    pub caches: Caches,
    /// The number of tokens.
    pub tokens: usize,
    /// Checkpoints of these tokens.
    pub checkpoints: Checkpoints,
}

/// Returns the length of the common prefix of two sequences.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Prefixes {
    /// Limits the store to `slots` finished requests and `bytes` bytes; with 0 bytes, it stores
    /// nothing. Without `bytes`, the limit is 2 GiB, and a single entry may exceed it.
    pub fn new(slots: usize, bytes: Option<u64>) -> Self {
        let limit = bytes.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        Self {
            store: Mutex::default(),
            slots: if limit == Some(0) { 0 } else { slots },
            bytes: limit.unwrap_or(BYTES),
            exceeds: limit.is_none(),
        }
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock()
    }

    /// Returns the number of adapter changes. A request must read it before it computes anything.
    pub fn epoch(&self) -> u64 {
        self.store().epoch
    }

    /// Returns the memory limit for the checkpoints of all running requests together, in bytes;
    /// `None` if no caches are stored, because checkpoints are then useless.
    pub fn checkpoint_bytes(&self) -> Option<usize> {
        (self.slots > 0).then_some(self.bytes / CHECKPOINTS)
    }

    /// Begins an epoch, and drops the caches of the previous epoch. Call it after the adapter
    /// changed. A request that starts between the change and this call belongs to the old epoch, so
    /// it stores nothing.
    pub fn renew(&self) {
        let mut store = self.store();
        store.epoch += 1;
        store.entries.clear();
    }

    /// Returns the number of tokens that [`Self::take_salted`] would return.
    pub fn reach_salted(
        &self,
        (epoch, salt): (u64, Option<&str>),
        prompt: &[u32],
        like: &Caches,
    ) -> usize {
        let store = self.store();
        if store.epoch != epoch {
            return 0;
        }
        let entries = store.entries.iter();
        let usable = entries.map(|entry| self.usable(entry, salt, prompt, like));
        usable.max().unwrap_or(0)
    }

    /// Returns the number of tokens of an entry that a prompt can use.
    fn usable(&self, entry: &Entry, salt: Option<&str>, prompt: &[u32], like: &Caches) -> usize {
        let n = entry.cut(salt, prompt, like).map_or(0, |cut| cut.tokens);
        match self.slots <= 1 || worth_copying(n, entry.tokens.len()) {
            true => n,
            false => 0,
        }
    }

    /// Returns the caches with the longest common prefix with `prompt`, truncated to that prefix,
    /// and its length. Caches that cannot be trimmed are truncated to a checkpoint. Caches match
    /// only if their kinds and their rotation equal those of `like`. Returns `None` for an outdated
    /// `epoch`.
    ///
    /// If the prompt continues all tokens of an entry, the entry is removed. The request later
    /// stores the longer caches, or loses them if it fails. Otherwise the request receives a copy,
    /// so that several conversations with the same system prompt each keep their caches. With a
    /// single slot, the entry is removed in any case, because the request's own caches will replace
    /// it. Entries with a recurrent state are never removed.
    ///
    /// Only caches stored with the same salt match.
    pub fn take_salted(
        &self,
        (epoch, salt): (u64, Option<&str>),
        prompt: &[u32],
        like: &Caches,
    ) -> Option<Found> {
        let mut store = self.store();
        if store.epoch != epoch {
            return None;
        }
        let (best, n) = store
            .entries
            .iter()
            .enumerate()
            .map(|(i, entry)| (i, self.usable(entry, salt, prompt, like)))
            .max_by_key(|(_, n)| *n)
            .filter(|(_, n)| *n > 0)?;
        let reach = usize::try_from(like.reach()).unwrap_or(0);
        let mut entry = store.entries.remove(best);
        let surplus = i32::try_from(entry.tokens.len() - n).unwrap_or(i32::MAX);
        let cut = entry.cut(salt, prompt, like)?;
        let rewinds = entry.caches.rewinds();
        // A recurrent state cannot be truncated to this prefix later, so the entry remains for
        // other prompts. A copy of the state uses no memory until the copy advances.
        if !cut.is_plain() || !rewinds || (surplus > 0 && self.slots > 1) {
            let copy = cut.copy(&entry.caches);
            let checkpoints = entry.checkpoints.up_to(n);
            if !rewinds || self.slots > 1 {
                store.entries.push(entry);
            }
            return Some(Found {
                caches: copy.ok()??.for_sequence(reach),
                tokens: n,
                checkpoints: checkpoints.ok()?,
            });
        }
        entry.checkpoints.truncate(n);
        cache::trim(&mut entry.caches, surplus).then(|| Found {
            caches: entry.caches.for_sequence(reach),
            tokens: n,
            checkpoints: entry.checkpoints,
        })
    }

    /// Stores the caches of `tokens` with their checkpoints, computed by a request that began in
    /// `epoch`. Beyond the limits, drops the least recently used entries. Also drops entries whose
    /// tokens are a prefix of `tokens`, if the new caches can be truncated to that prefix. Stores
    /// nothing for an outdated `epoch`.
    pub fn put_with(
        &self,
        (epoch, salt): (u64, Option<&str>),
        tokens: Vec<u32>,
        caches: Caches,
        mut checkpoints: Checkpoints,
    ) {
        let length = cache::offset(&caches);
        if tokens.is_empty() || usize::try_from(length) != Ok(tokens.len()) {
            return;
        }
        let mut store = self.store();
        if store.closed || store.epoch != epoch {
            return;
        }
        if can_trim_anywhere(&caches, length) {
            checkpoints.clear();
        }
        let entries = &mut store.entries;
        let replaces = |entry: &Entry| {
            let n = entry.tokens.len();
            let cut = || checkpoints.cut(&caches, n).map(|cut| cut.tokens);
            tokens.starts_with(&entry.tokens) && cut() == Some(n)
        };
        entries.retain(|entry| entry.salt.as_deref() != salt || !replaces(entry));
        let bytes = caches.iter().map(|c| c.nbytes()).sum::<usize>() + checkpoints.nbytes();
        if bytes > self.bytes && !self.exceeds {
            return;
        }
        entries.push(Entry {
            salt: salt.map(str::to_owned),
            tokens,
            caches,
            checkpoints,
            bytes,
        });
        let total_bytes = |entries: &[Entry]| entries.iter().map(|e| e.bytes).sum::<usize>();
        while entries.len() > self.slots || (entries.len() > 1 && total_bytes(entries) > self.bytes)
        {
            entries.remove(0);
        }
    }

    /// Stores as [`Prefixes::put_with`], without checkpoints.
    pub fn put_salted(&self, of: (u64, Option<&str>), tokens: Vec<u32>, caches: Caches) {
        self.put_with(of, tokens, caches, Checkpoints::default());
    }

    /// Stores as [`Prefixes::put_salted`], without a salt.
    pub fn put(&self, epoch: u64, tokens: Vec<u32>, caches: Caches) {
        self.put_salted((epoch, None), tokens, caches);
    }

    /// Drops all entries. Returns whether there were any.
    pub fn drop_all(&self) -> bool {
        let entries = std::mem::take(&mut self.store().entries);
        !entries.is_empty()
    }

    /// Drops all entries, and makes later calls store nothing.
    pub fn close(&self) {
        let mut store = self.store();
        store.closed = true;
        store.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Switch;
    use crate::cache::test_support::recurrent;

    impl Prefixes {
        fn take(&self, epoch: u64, prompt: &[u32], like: &Caches) -> Option<(Caches, usize)> {
            let found = self.take_salted((epoch, None), prompt, like)?;
            Some((found.caches, found.tokens))
        }
    }

    #[test]
    fn a_salt_finds_its_own_caches_alone() {
        let prefixes = Prefixes::new(4, None);
        let of = |salt| (0, salt);
        prefixes.put_salted(of(Some("a")), vec![1, 2, 3], filled(3));
        for salt in [None, Some("b"), Some("")] {
            let hit = prefixes.take_salted(of(salt), &[1, 2, 3, 4], &filled(0));
            assert!(hit.is_none(), "{salt:?}");
        }
        // Equal or longer prompts with another salt must not replace the entry.
        prefixes.put_salted(of(Some("b")), vec![1, 2, 3, 5], filled(4));
        prefixes.put(0, vec![1, 2, 3], filled(3));
        for salt in [Some("a"), Some("b"), None] {
            let hit = prefixes.take_salted(of(salt), &[1, 2, 3, 4], &filled(0));
            assert_eq!(hit.unwrap().tokens, 3, "{salt:?}");
        }
    }
    use crate::cache::{CacheOptions, KvCache, RotatingCache};
    use mlx_rs_core::zeros;

    fn filled(n: i32) -> Caches {
        let mut cache = CacheOptions::default().cache(None);
        if n > 0 {
            let part = zeros(&[1, 1, n, 2], mlx_rs_core::Dtype::Float32).unwrap();
            cache.update(&part, &part).unwrap();
        }
        Caches::from(cache).with_switches([Switch::Once(4)])
    }

    #[test]
    fn the_longest_beginning_is_used_and_one_token_is_left() {
        let prefixes = Prefixes::new(2, None);
        prefixes.put(0, vec![1, 2, 3], filled(3));
        prefixes.put(0, vec![1, 9], filled(2));
        assert!(prefixes.take(0, &[7, 1], &filled(0)).is_none());
        // A prompt that shares only a part must receive a copy, for any number of prompts.
        for last in [3, 4, 5] {
            let (caches, n) = prefixes.take(0, &[1, 2, last], &filled(0)).unwrap();
            assert_eq!((n, cache::offset(&caches)), (2, 2));
        }
        // A prompt that continues the entry must remove it, so that only one request receives it.
        let (caches, n) = prefixes.take(0, &[1, 2, 3, 4], &filled(0)).unwrap();
        assert_eq!((n, cache::offset(&caches)), (3, 3));
        let (_, n) = prefixes.take(0, &[1, 2, 3, 4], &filled(0)).unwrap();
        assert_eq!(n, 1, "the other one");
    }

    #[test]
    fn a_copy_goes_on_by_itself() {
        let prefixes = Prefixes::new(2, None);
        prefixes.put(0, vec![1, 2, 3], filled(3));
        let (mut caches, _) = prefixes.take(0, &[1, 9], &filled(0)).unwrap();
        let part = zeros(&[1, 1, 4, 2], mlx_rs_core::Dtype::Float32).unwrap();
        caches[0].as_kv_mut().unwrap().update(&part, &part).unwrap();
        assert_eq!(cache::offset(&caches), 5);
        let (copy, n) = prefixes.take(0, &[1, 2, 3, 4], &filled(0)).unwrap();
        assert_eq!((n, cache::offset(&copy)), (3, 3));
    }

    #[test]
    fn with_one_slot_all_is_taken_out_and_small_parts_are_not_copied() {
        let prefixes = Prefixes::new(1, None);
        prefixes.put(0, vec![1, 2, 3], filled(3));
        assert!(prefixes.take(0, &[1, 9], &filled(0)).is_some());
        assert!(prefixes.take(0, &[1, 9], &filled(0)).is_none());
        let prefixes = Prefixes::new(2, None);
        let long: Vec<u32> = (1..=200).collect();
        prefixes.put(0, long, filled(200));
        let like = filled(0).for_sequence(5);
        assert!(prefixes.take(0, &[1, 2, 3, 9], &like).is_none());
        assert!(prefixes.take(0, &[1, 2, 3, 4, 9], &like).is_some());
    }

    #[test]
    fn bytes_are_bounded_and_the_least_recently_used_goes() {
        let mut prefixes = Prefixes::new(8, None);
        let each = filled(4)[0].nbytes();
        assert!(each > 0);
        prefixes.bytes = 2 * each;
        prefixes.put(0, vec![1; 4], filled(4));
        prefixes.put(0, vec![2; 4], filled(4));
        assert!(prefixes.take(0, &[1, 1, 9], &filled(0)).is_some());
        prefixes.put(0, vec![3; 4], filled(4));
        assert!(prefixes.take(0, &[2, 2, 9], &filled(0)).is_none(), "gone");
        assert!(prefixes.take(0, &[1, 1, 9], &filled(0)).is_some());
        assert!(prefixes.take(0, &[3, 3, 9], &filled(0)).is_some());
        // A single entry above the limit must be kept, because it is the running conversation.
        prefixes.put(0, vec![4; 300], filled(300));
        assert!(prefixes.take(0, &[1, 1, 9], &filled(0)).is_none());
        let (next, like) = (
            [vec![4; 300], vec![5]].concat(),
            filled(0).for_sequence(301),
        );
        assert!(prefixes.take(0, &next, &like).is_some());
    }

    #[test]
    fn no_entry_exceeds_a_given_limit() {
        let bytes = |n: i32| filled(n).iter().map(|c| c.nbytes()).sum::<usize>() as u64;
        let prefixes = Prefixes::new(8, Some(2 * bytes(300)));
        for first in 1..4 {
            prefixes.put(0, vec![first; 300], filled(300));
        }
        let like = filled(0).for_sequence(301);
        let has = |first: u32| {
            let next = [vec![first; 300], vec![9]].concat();
            prefixes.take(0, &next, &like).is_some()
        };
        assert!(!has(1), "the oldest entry must be dropped");
        assert!(has(2) && has(3));
        let least = Prefixes::new(8, Some(bytes(300) - 1));
        least.put(0, vec![1; 300], filled(300));
        let next = [vec![1; 300], vec![9]].concat();
        assert!(least.take(0, &next, &like).is_none());
        let none = Prefixes::new(8, Some(0));
        assert_eq!(none.checkpoint_bytes(), None);
        none.put(0, vec![1; 300], filled(300));
        assert!(none.take(0, &next, &like).is_none());
    }

    #[test]
    fn the_oldest_makes_room_and_beginnings_are_replaced() {
        let prefixes = Prefixes::new(2, None);
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
        // Caches whose length differs from the number of tokens must not be stored.
        prefixes.put(0, vec![6, 7], filled(1));
        assert!(prefixes.take(0, &[6, 7, 8], &filled(0)).is_none());
        prefixes.close();
        prefixes.put(0, vec![1], filled(1));
        assert!(prefixes.take(0, &[1, 1], &filled(0)).is_none());
    }

    #[test]
    fn an_epoch_takes_nothing_from_another() {
        let prefixes = Prefixes::new(2, None);
        prefixes.put(0, vec![1, 2, 3], filled(3));
        prefixes.renew();
        assert_eq!(prefixes.epoch(), 1);
        assert!(prefixes.take(1, &[1, 2, 3], &filled(0)).is_none(), "gone");
        // The request began before the adapter changed, and ends after the change.
        prefixes.put(0, vec![1, 2, 3], filled(3));
        assert!(prefixes.take(1, &[1, 2, 3], &filled(0)).is_none());
        prefixes.put(1, vec![1, 2, 3], filled(3));
        assert!(prefixes.take(0, &[1, 2, 3], &filled(0)).is_none());
        assert_eq!(prefixes.take(1, &[1, 2, 3], &filled(0)).unwrap().1, 2);
    }

    #[test]
    fn keys_of_another_stretch_are_not_reused() {
        let prefixes = Prefixes::new(2, None);
        let like = |n| filled(0).for_sequence(n);
        prefixes.put(0, vec![1, 2, 3, 4], filled(4).for_sequence(4));
        assert!(prefixes.take(0, &[1, 2, 3, 4, 5], &like(5)).is_none());
        let (caches, n) = prefixes.take(0, &[1, 2, 3, 9], &like(4)).unwrap();
        assert_eq!((n, caches.until_switch()), (3, 1));
        prefixes.put(0, vec![1, 2, 3, 4, 5], filled(5).for_sequence(5));
        assert!(prefixes.take(0, &[1, 2, 3, 4], &like(4)).is_none());
        let (caches, n) = prefixes.take(0, &[1, 2, 9, 9, 9], &like(5)).unwrap();
        // Caches that are truncated below the switch must still have the rotation of the long
        // sequence.
        assert_eq!(
            (n, caches.stretch(), caches.until_switch()),
            (2, 1, i32::MAX)
        );
    }

    #[test]
    fn keys_of_a_gradual_rotation_are_reused_within_the_context_only() {
        let gradual = |n: i32, reach| {
            let mut caches = filled(n).for_sequence(reach);
            caches.switches.clear();
            caches.with_switches([Switch::Gradual(4)])
        };
        let prefixes = Prefixes::new(2, None);
        prefixes.put(0, vec![1, 2, 3], gradual(3, 3));
        assert!(prefixes.take(0, &[1, 2, 3, 4, 5], &gradual(0, 5)).is_none());
        let (caches, n) = prefixes.take(0, &[1, 2, 3, 4], &gradual(0, 4)).unwrap();
        assert_eq!(
            (n, caches.stretch(), caches.until_switch()),
            (3, 0, i32::MAX)
        );
        // Beyond the context, sequences of equal length may have keys with other rotations.
        prefixes.put(0, vec![1, 2, 3, 4, 5], gradual(5, 5));
        assert_eq!(gradual(5, 5).stretch(), 5);
        assert!(prefixes.take(0, &[1, 2, 3, 4, 6], &gradual(0, 5)).is_none());
    }

    #[test]
    fn a_recurrent_state_is_reused_as_a_whole_and_stays() {
        let prefixes = Prefixes::new(3, None);
        let like = recurrent(0);
        prefixes.put(0, vec![1, 2, 3], recurrent(3));
        // An entry must not match if only a part is shared, or if no token would remain to be
        // computed.
        assert!(prefixes.take(0, &[1, 2, 9], &like).is_none());
        assert!(prefixes.take(0, &[1, 2, 3], &like).is_none());
        for last in [4, 5] {
            let (caches, n) = prefixes.take(0, &[1, 2, 3, last], &like).unwrap();
            assert_eq!((n, cache::offset(&caches)), (3, 3));
            prefixes.put(0, vec![1, 2, 3, last], recurrent(4));
        }
        let (_, n) = prefixes.take(0, &[1, 2, 3, 4, 6], &like).unwrap();
        assert_eq!(n, 4, "the longest");
        // Equal tokens must replace the entry, and a further entry must drop the oldest.
        prefixes.put(0, vec![1, 2, 3, 5], recurrent(4));
        prefixes.put(0, vec![7], recurrent(1));
        assert!(prefixes.take(0, &[1, 2, 3, 9], &like).is_none());
        assert!(prefixes.take(0, &[7, 1], &like).is_some());
    }

    #[test]
    fn what_a_circle_has_lost_is_not_reused() {
        let prefixes = Prefixes::new(1, None);
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
        // Caches of another kind must not match.
        assert!(prefixes.take(0, &longer, &filled(0)).is_none());
        assert_eq!(prefixes.take(0, &longer, &like).unwrap().1, 6);
    }
}
