//! Prefetches the first keys that threads look at, while they still wait for each other in the operation before.

use crate::attention::attend::{Attend, Rows};
use crate::pool;
use crate::simd::prefetch::lines;
use crate::work::Input;

/// Rows up to which an attention's time is that of reading keys and values.
const FEW: usize = 16;

/// Bytes of keys; the processor itself asks for what follows.
const BYTES: usize = 4096;

impl Attend {
    /// A function that prefetches the first keys of a thread of the pool, where each looks at whole heads.
    ///
    /// # Safety
    /// The caches, keys and values of each lane, must be of float32.
    pub unsafe fn prefetch<'a>(&'a self, caches: &'a [Input]) -> impl Fn(usize) + Sync + 'a {
        let keys: Vec<Rows<'a>> = if (2..=FEW).contains(&self.queries.len()) {
            let keys = caches.iter().step_by(2);
            // SAFETY: the caller's promise; nothing is read.
            keys.map(|keys| unsafe { Rows::of(keys) }).collect()
        } else {
            Vec::new()
        };
        move |me| self.fetch(me, &keys)
    }

    /// Fetches the first keys that thread `me` of the pool looks at, where each looks at whole heads.
    fn fetch(&self, me: usize, keys: &[Rows<'_>]) {
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
