//! The bounded KV cache that can be trimmed. It stores the last positions and a few of the first,
//! as `rotating.rs` does. It also stores some older positions, so that wrong draft tokens can be
//! removed (`generate/speculative.rs`).
//!
//! The view's `window` makes a query attend to the same positions as in the ring buffer; older
//! stored positions are masked. Positions are stored in order. One spare chunk makes most steps
//! write in place.

use mlx_rs_core::{Array, Error, ErrorKind, Result, concatenate};

use super::chunked::{CHUNK, ChunkedCache, plain_parts};
use super::{KvCache, KvView, LayerState, Order, Portable, Snapshot, Stored};

/// Keys and values of the positions that a query may attend to, and of `spare` older positions.
#[derive(Debug, Clone)]
pub struct WindowedCache {
    /// The first `keep` positions, then the positions from `keep + dropped` on.
    inner: ChunkedCache,
    /// The number of dropped positions after the first `keep` positions.
    dropped: i32,
    size: i32,
    keep: i32,
    spare: i32,
}

impl WindowedCache {
    /// Creates an empty cache that attends like a ring of `size` positions. The first `keep`
    /// positions are never dropped. The last `spare` positions can be trimmed at any time.
    pub fn new(size: i32, keep: i32, spare: i32) -> Self {
        let size = size.max(1);
        Self {
            inner: ChunkedCache::new(),
            dropped: 0,
            size,
            keep: keep.clamp(0, size - 1),
            spare: spare.max(0),
        }
    }

    /// Makes the cache store float16 if `half`.
    pub fn with_half(mut self, half: bool) -> Self {
        self.inner = self.inner.with_half(half);
        self
    }

    /// Returns the number of positions that a query attends to, including its own, without the
    /// first `keep` positions.
    fn ring(&self) -> i32 {
        self.size - self.keep
    }

    /// Drops the positions to which no query can attend, even after a trim of `spare` positions.
    fn compact(&mut self) -> Result<()> {
        let Some((k, v)) = self.inner.valid()? else {
            return Ok(());
        };
        let stored = self.inner.offset;
        let needed = (self.ring() - 1).saturating_add(self.spare);
        let surplus = (stored - self.keep).saturating_sub(needed);
        if surplus <= 0 {
            return Ok(());
        }
        let rest = |a: &Array| {
            let prefix = a.slice_axis(2, 0, self.keep)?;
            concatenate(
                &[&prefix, &a.slice_axis(2, self.keep + surplus, stored)?],
                2,
            )
        };
        self.inner.buffers = Some((rest(&k)?, rest(&v)?));
        self.inner.offset = stored - surplus;
        self.dropped += surplus;
        Ok(())
    }
}

impl KvCache for WindowedCache {
    fn update(&mut self, keys: &Array, values: &Array) -> Result<KvView> {
        let offset = self.offset();
        let most = self.size.saturating_add(self.spare).saturating_add(CHUNK);
        if self.inner.offset.saturating_add(keys.dim(2)?) > most {
            self.compact()?;
        }
        self.inner.append(keys, values, i32::MAX)?;
        let Some((k, v)) = self.inner.valid()? else {
            return Err(Error::new(ErrorKind::Mlx, "cache", "nothing was stored"));
        };
        let keep = self.keep.min(self.inner.offset);
        Ok(KvView {
            keys: Stored::Plain(k),
            values: Stored::Plain(v),
            offset,
            order: Order::Run {
                keep,
                start: keep + self.dropped,
            },
            window: Some(self.ring()),
            reach: 0,
        })
    }

    fn portable(&self) -> Result<Option<Portable>> {
        let Some((k, v)) = self.inner.valid()?.filter(|_| !self.is_empty()) else {
            return Ok(None);
        };
        let (stored, keep) = (self.inner.offset, self.keep);
        let recent = |a: &Array| -> Result<Array> {
            if self.dropped == 0 && stored <= self.size {
                return Ok(a.clone());
            }
            // Includes one position more than the next query attends to. If this position was
            // dropped, any value can replace it.
            let from = stored - self.ring();
            let prefix = a.slice_axis(2, 0, keep)?;
            match from >= self.keep {
                true => concatenate(&[&prefix, &a.slice_axis(2, from, stored)?], 2),
                false => {
                    let first = a.slice_axis(2, self.keep, self.keep + 1)?;
                    concatenate(&[&prefix, &first, &a.slice_axis(2, from + 1, stored)?], 2)
                }
            }
        };
        Ok(Some(Portable::Recent {
            keys: recent(&k)?,
            values: recent(&v)?,
            offset: self.offset(),
            size: self.size,
            keep,
        }))
    }

    fn adopt(&mut self, portable: Portable) -> std::result::Result<(), String> {
        let offset = portable.offset().map_err(|e| e.to_string())?;
        let (keys, values) = match portable {
            Portable::All { keys, values } if self.keep == 0 => (keys, values),
            Portable::Recent {
                keys,
                values,
                size,
                keep,
                ..
            } if (size, keep) == (self.size, self.keep) => (keys, values),
            other => return Err(other.refused(&format!("the last {} positions", self.size))),
        };
        let (keys, values) = (self.inner.rounded(&keys, &values)).map_err(|e| e.to_string())?;
        self.inner.offset = keys.dim(2).map_err(|e| e.to_string())?;
        self.dropped = offset - self.inner.offset;
        self.inner.buffers = Some((keys, values));
        Ok(())
    }
}

impl LayerState for WindowedCache {
    fn offset(&self) -> i32 {
        self.inner.offset + self.dropped
    }

    fn len(&self) -> usize {
        self.offset().clamp(0, self.size) as usize
    }

    fn arrays(&self) -> Vec<&Array> {
        self.inner.arrays()
    }

    fn can_trim(&self, n: i32) -> bool {
        // The next query attends to `ring - 1` positions before its own. The first of these
        // positions must be stored.
        let left = self.offset() - n.max(0);
        self.dropped == 0 || self.keep + self.dropped <= left - (self.ring() - 1)
    }

    fn keeps_all(&self, positions: i32) -> bool {
        positions <= self.size.saturating_add(self.spare)
    }

    fn reset(&mut self) {
        self.inner.reset();
        self.dropped = 0;
    }

    fn trim(&mut self, n: i32) -> bool {
        self.can_trim(n) && self.inner.trim(n)
    }

    fn copy(&self) -> Result<Box<dyn LayerState>> {
        Ok(Box::new(self.clone()))
    }

    fn kind(&self) -> String {
        let kind = format!("windowed:{}:{}:{}", self.size, self.keep, self.spare);
        self.inner.kind_of(kind)
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let mut snapshot = self.inner.snapshot()?;
        snapshot.kind = self.kind();
        snapshot.offset = self.offset();
        Ok(snapshot)
    }

    fn restore(&mut self, snapshot: Snapshot) -> Result<(), String> {
        let stored = match snapshot.arrays.get("keys").map(Array::shape) {
            Some([_, _, n, _]) => (*n).min(snapshot.offset),
            _ => snapshot.offset,
        };
        let dropped = snapshot.offset - stored;
        let least = self.keep.saturating_add(self.ring() - 1);
        if dropped > 0 && stored < least {
            return Err(format!(
                "it holds {stored} positions; at least {least} are needed"
            ));
        }
        let buffers = plain_parts(&snapshot, &self.kind(), stored)?;
        self.inner.buffers = self.inner.typed(buffers, &snapshot.kind)?;
        self.inner.offset = stored;
        self.dropped = dropped;
        Ok(())
    }

    fn as_kv(&self) -> Option<&dyn KvCache> {
        Some(self)
    }

    fn as_kv_mut(&mut self) -> Option<&mut dyn KvCache> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::RotatingCache;
    use super::super::test_support::{part, positions, visible};
    use super::*;

    #[test]
    fn every_query_sees_what_it_sees_in_a_circle_however_often_it_is_cut_back() {
        for (size, keep) in [(8, 0), (8, 3), (5, 4), (1, 0), (300, 4)] {
            let spare = 6;
            let mut cache = WindowedCache::new(size, keep, spare);
            let mut at = 0;
            for round in 0..220 {
                let n = 1 + round * 5 % 7;
                let view = cache.update(&part(at, n), &part(at, n)).unwrap();
                assert_eq!(view.offset, at);
                at += n;
                for query in at - n..at {
                    assert_eq!(
                        visible(&view, query),
                        (0..=query)
                            .filter(|&k| k < keep || k > query - (size - keep))
                            .collect::<Vec<_>>(),
                        "{size} {keep} {query}"
                    );
                }
                let wrong = (round * 3 % (n + 1)).min(spare);
                assert!(cache.can_trim(wrong), "{size} {keep} {at} {wrong}");
                cache.trim(wrong);
                at -= wrong;
                assert_eq!(cache.offset(), at);
                let length = cache.arrays()[0].dim(2).unwrap();
                assert!(length <= size + spare + 2 * CHUNK, "{length}");
            }
            assert!(
                size > 100 || !cache.can_trim(at - size / 2),
                "{size} {keep}"
            );
        }
    }

    #[test]
    fn a_long_part_drops_what_nobody_sees_and_a_file_holds_the_rest() {
        let mut cache = WindowedCache::new(10, 2, 4);
        let view = cache.update(&part(0, 700), &part(0, 700)).unwrap();
        assert_eq!(positions(&view).len(), 700);
        cache.update(&part(700, 1), &part(700, 1)).unwrap();
        assert_eq!(cache.inner.offset, 2 + 7 + 4 + 1);
        assert!(cache.can_trim(4) && !cache.can_trim(100));
        let snapshot = cache.snapshot().unwrap();
        let mut other = WindowedCache::new(10, 2, 4);
        other.restore(snapshot.clone()).unwrap();
        let mut circle = RotatingCache::new(10, 2);
        circle.update(&part(0, 701), &part(0, 701)).unwrap();
        let next = part(701, 1);
        let views = [
            cache.update(&next, &next).unwrap(),
            other.update(&next, &next).unwrap(),
            circle.update(&next, &next).unwrap(),
        ];
        let mut expected = positions(&views[2]);
        expected.sort_unstable();
        for view in &views[..2] {
            assert_eq!(visible(view, 701), expected);
        }
        assert!(WindowedCache::new(10, 2, 5).restore(snapshot).is_err());
    }
}
