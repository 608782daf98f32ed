//! What is remembered from one request to the next: the caches of the last ones, so that a prompt that
//! begins like one of them (the next turn of a conversation) is not computed from the start.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cache::{self, Caches};

/// Caches of finished requests, the newest last.
#[derive(Debug)]
pub struct Prefixes {
    /// `None` once closed.
    entries: Mutex<Option<Vec<Entry>>>,
    slots: usize,
}

#[derive(Debug)]
struct Entry {
    tokens: Vec<u32>,
    caches: Caches,
}

/// How many tokens two sequences begin with alike.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

impl Prefixes {
    /// Room for so many.
    pub fn new(slots: usize) -> Self {
        Self {
            entries: Mutex::new(Some(Vec::new())),
            slots,
        }
    }

    fn entries(&self) -> MutexGuard<'_, Option<Vec<Entry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets everything, because the model changed.
    pub fn clear(&self) {
        if let Some(entries) = self.entries().as_mut() {
            entries.clear();
        }
    }

    /// The caches of the kinds of `like` that hold most of `prompt`'s beginning, cut to it, and how much
    /// they hold. They are taken out: who takes them gives them back, longer, or loses them with a request that fails.
    /// At least one token is left to compute, from which the first logits come.
    pub fn take(&self, prompt: &[u32], like: &Caches) -> Option<(Caches, usize)> {
        let mut guard = self.entries();
        let entries = guard.as_mut()?;
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
        let (best, n) = entries
            .iter()
            .enumerate()
            .map(|(i, entry)| (i, usable(entry)))
            .max_by_key(|(_, n)| *n)
            .filter(|(_, n)| *n > 0)?;
        let mut entry = entries.remove(best);
        let surplus = i32::try_from(entry.tokens.len() - n).unwrap_or(i32::MAX);
        cache::trim(&mut entry.caches, surplus).then_some((entry.caches, n))
    }

    /// Remembers the caches of `tokens`, and forgets the oldest where there is no room. What is a
    /// beginning of the new one is forgotten too.
    pub fn put(&self, tokens: Vec<u32>, caches: Caches) {
        let held = cache::offset(&caches).unsigned_abs() as usize;
        if tokens.is_empty() || held != tokens.len() {
            return;
        }
        let mut guard = self.entries();
        let Some(entries) = guard.as_mut() else {
            return;
        };
        entries.retain(|entry| !tokens.starts_with(&entry.tokens));
        entries.push(Entry { tokens, caches });
        while entries.len() > self.slots {
            entries.remove(0);
        }
    }

    /// Forgets everything, and remembers nothing from here on.
    pub fn close(&self) {
        *self.entries() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{CacheOptions, KvCache as _, RotatingCache};
    use mlx_rs_core::zeros;

    fn filled(n: i32) -> Caches {
        let mut cache = CacheOptions::default().cache(None);
        if n == 0 {
            return vec![cache];
        }
        let part = zeros(&[1, 1, n, 2], mlx_rs_core::Dtype::Float32).unwrap();
        cache.update(&part, &part).unwrap();
        vec![cache]
    }

    #[test]
    fn the_longest_beginning_is_taken_once_and_one_token_is_left() {
        let prefixes = Prefixes::new(2);
        prefixes.put(vec![1, 2, 3], filled(3));
        prefixes.put(vec![1, 9], filled(2));
        assert!(prefixes.take(&[7, 1], &filled(0)).is_none());
        let (caches, n) = prefixes.take(&[1, 2, 3], &filled(0)).unwrap();
        assert_eq!((n, cache::offset(&caches)), (2, 2));
        let (_, n) = prefixes.take(&[1, 2, 3], &filled(0)).unwrap();
        assert_eq!(n, 1, "the other one");
        assert!(prefixes.take(&[1, 2, 3], &filled(0)).is_none());
    }

    #[test]
    fn the_oldest_makes_room_and_beginnings_are_replaced() {
        let prefixes = Prefixes::new(2);
        prefixes.put(vec![1], filled(1));
        prefixes.put(vec![1, 2], filled(2));
        prefixes.put(vec![3], filled(1));
        assert_eq!(
            prefixes.take(&[1, 2, 5], &filled(0)).unwrap().1,
            2,
            "still there"
        );
        prefixes.put(vec![4], filled(1));
        prefixes.put(vec![5], filled(1));
        assert!(prefixes.take(&[3, 3], &filled(0)).is_none(), "gone");
        // Caches that do not hold what is said of them are not kept.
        prefixes.put(vec![6, 7], filled(1));
        assert!(prefixes.take(&[6, 7, 8], &filled(0)).is_none());
        prefixes.close();
        prefixes.put(vec![1], filled(1));
        assert!(prefixes.take(&[1, 1], &filled(0)).is_none());
    }

    #[test]
    fn what_a_circle_has_lost_is_not_reused() {
        let prefixes = Prefixes::new(1);
        let mut cache = RotatingCache::new(4, 0);
        let part = zeros(&[1, 1, 6, 2], mlx_rs_core::Dtype::Float32).unwrap();
        cache.update(&part, &part).unwrap();
        let tokens = vec![1, 2, 3, 4, 5, 6];
        prefixes.put(tokens.clone(), vec![Box::new(cache)]);
        let like: Caches = vec![Box::new(RotatingCache::new(4, 0))];
        assert!(prefixes.take(&[1, 2, 3, 9], &like).is_none());
        let longer = [tokens, vec![7]].concat();
        // Caches of another kind do not stand for each other.
        assert!(prefixes.take(&longer, &filled(0)).is_none());
        assert_eq!(prefixes.take(&longer, &like).unwrap().1, 6);
    }
}
