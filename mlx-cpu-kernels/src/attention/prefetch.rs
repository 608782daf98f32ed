//! Prefetches the first keys of each thread at the barrier before an attention operation.

use crate::attention::attend::{Attention, KvRows};
use crate::pool;
use crate::simd::prefetch::lines;
use crate::work::Input;

/// The maximum number of rows for which reading keys and values limits the speed of attention.
const FEW: usize = 16;

/// The number of bytes of keys to prefetch. From there on, the hardware prefetcher reads ahead.
const BYTES: usize = 4096;

impl Attention {
    /// A function that prefetches the first keys of a thread. It does nothing if threads do not
    /// compute whole heads.
    ///
    /// # Safety
    /// The caches, which are the keys and values of each sequence, must have the types of `plans`.
    pub unsafe fn prefetch<'a>(&'a self, caches: &'a [Input]) -> impl Fn(usize) + Sync + 'a {
        let keys: Vec<KvRows<'a>> = if (2..=FEW).contains(&self.queries.len()) {
            let keys = caches.iter().step_by(2).zip(&self.plans);
            // SAFETY: the caller guarantees the type. The elements are not read.
            keys.map(|(keys, plan)| unsafe { KvRows::from_input(keys, plan.kv_type) })
                .collect()
        } else {
            Vec::new()
        };
        move |me| self.fetch(me, &keys)
    }

    /// Prefetches the first keys of thread `me`, if threads compute whole heads.
    fn fetch(&self, me: usize, keys: &[KvRows<'_>]) {
        let groups = self.heads / self.queries_per_kv;
        let unit = pool::pool().first_part(self.queries.len() * groups, me);
        let (q, group) = (unit / groups, unit % groups);
        let Some(keys) = self.queries.get(q).and_then(|q| keys.get(q.sequence)) else {
            return;
        };
        let bytes = self.visible_count(q) * keys.position_bytes();
        let first = keys.ptr(group, self.first_visible(q));
        lines(first, bytes.min(BYTES));
    }
}
