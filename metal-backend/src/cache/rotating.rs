//! The bounded KV cache: the last positions, and a few of the first positions. Until the cache is
//! full, it grows like the unbounded cache. Then each new position overwrites the oldest one (ring
//! buffer).
//!
//! A query at position `p` attends to positions `k < keep` and `k > p - (size - keep)`. This does
//! not depend on the prefill step size.

use mlx_rs_core::{Array, Result, concatenate};

use super::chunked::{ChunkedCache, plain_parts};
use super::{KvCache, KvView, LayerState, Order, Portable, Snapshot, Stored};

/// Keys and values of at most `size` positions.
#[derive(Debug, Clone)]
pub struct RotatingCache {
    /// In order until the cache is full. In a full cache, position `p >= keep` is in slot `keep +
    /// (p - keep) % (size - keep)`, and `inner.offset` is unused.
    inner: ChunkedCache,
    size: i32,
    keep: i32,
    offset: i32,
}

impl RotatingCache {
    /// Creates an empty cache of `size` positions. The first `keep` positions are never dropped.
    /// The ring has at least one slot.
    pub fn new(size: i32, keep: i32) -> Self {
        let size = size.max(1);
        Self {
            inner: ChunkedCache::new(),
            size,
            keep: keep.clamp(0, size - 1),
            offset: 0,
        }
    }

    /// Makes the cache store float16 if `half`.
    pub fn with_half(mut self, half: bool) -> Self {
        self.inner = self.inner.with_half(half);
        self
    }

    /// The number of positions in the ring.
    fn ring(&self) -> i32 {
        self.size - self.keep
    }

    /// Returns the slot of position `p` in a full cache.
    fn slot(&self, p: i32) -> i32 {
        self.keep + (p - self.keep).rem_euclid(self.ring())
    }

    /// Returns all stored positions in order: the first `keep` positions, and the later ones.
    fn ordered(&self, buffer: &Array) -> Result<(Array, Array)> {
        let prefix = buffer.slice_axis(2, 0, self.keep.min(self.offset))?;
        if self.offset <= self.size {
            let rest = buffer.slice_axis(2, self.keep.min(self.offset), self.offset)?;
            return Ok((prefix, rest));
        }
        let oldest = self.slot(self.offset);
        if oldest == self.keep {
            return Ok((prefix, buffer.slice_axis(2, oldest, self.size)?));
        }
        let (older, newer) = (
            buffer.slice_axis(2, oldest, self.size)?,
            buffer.slice_axis(2, self.keep, oldest)?,
        );
        Ok((prefix, concatenate(&[&older, &newer], 2)?))
    }

    /// Appends several positions to a buffer. Returns the buffer that their queries read, and the
    /// buffer to store.
    fn extend(&self, old: Option<&Array>, new: &Array, end: i32) -> Result<(Array, Array)> {
        let ring = self.ring();
        let all = match old {
            None => {
                let prefix = new.slice_axis(2, 0, self.keep)?;
                (prefix, new.slice_axis(2, self.keep, end)?)
            }
            Some(old) => {
                let (prefix, rest) = self.ordered(old)?;
                // The first query attends to its own position and to at most `ring - 1` earlier
                // positions.
                let n = rest.dim(2)?;
                let rest = rest.slice_axis(2, (n - (ring - 1)).max(0), n)?;
                let missing = (self.keep - self.offset).max(0).min(new.dim(2)?);
                if missing > 0 {
                    let more = new.slice_axis(2, 0, missing)?;
                    let others = new.slice_axis(2, missing, new.dim(2)?)?;
                    (concatenate(&[&prefix, &more], 2)?, others)
                } else {
                    (prefix, concatenate(&[&rest, new], 2)?)
                }
            }
        };
        let (prefix, rest) = all;
        let all = concatenate(&[&prefix, &rest], 2)?;
        let n = rest.dim(2)?;
        let tail = rest.slice_axis(2, n - ring, n)?;
        Ok((all, self.stored(&prefix, &tail, end)?))
    }

    /// Returns the buffer of a full cache after `end` positions, built from the first `keep`
    /// positions `prefix` and the ring's last positions `tail`.
    fn stored(&self, prefix: &Array, tail: &Array, end: i32) -> Result<Array> {
        let ring = self.ring();
        // The oldest position of `tail` is `end - ring`.
        let first = self.slot(end - ring) - self.keep;
        concatenate(
            &[
                prefix,
                &tail.slice_axis(2, ring - first, ring)?,
                &tail.slice_axis(2, 0, ring - first)?,
            ],
            2,
        )
    }

    /// Returns the buffer that stores `all`, the keys or values in order.
    fn buffer(&self, all: &Array, end: i32) -> Result<Array> {
        let length = all.dim(2)?;
        if end <= self.size {
            return Ok(all.clone());
        }
        let prefix = all.slice_axis(2, 0, self.keep)?;
        self.stored(
            &prefix,
            &all.slice_axis(2, length - self.ring(), length)?,
            end,
        )
    }

    fn view(&self, keys: Array, values: Array, order: Order) -> KvView {
        KvView {
            keys: Stored::Plain(keys),
            values: Stored::Plain(values),
            offset: self.offset,
            order,
            window: Some(self.ring()),
            reach: 0,
        }
    }
}

impl KvCache for RotatingCache {
    fn update(&mut self, keys: &Array, values: &Array) -> Result<KvView> {
        let (keys, values) = &self.inner.rounded(keys, values)?;
        let length = keys.dim(2)?;
        let end = self.offset + length;
        if end <= self.size {
            self.inner.offset = self.offset;
            self.inner.append(keys, values, self.size)?;
            let (k, v) = self
                .inner
                .valid()?
                .unwrap_or((keys.clone(), values.clone()));
            let keep = self.keep.min(end);
            let view = self.view(k, v, Order::Run { keep, start: keep });
            self.offset = end;
            return Ok(view);
        }
        if length == 1
            && let Some((k, v)) = self.inner.buffers.take()
        {
            // The cache is full, so the buffers have exactly `size` positions.
            let slot = self.slot(self.offset);
            let k = k.update_axis(keys, 2, slot)?;
            let v = v.update_axis(values, 2, slot)?;
            let view = self.view(k.clone(), v.clone(), Order::Any);
            self.inner.buffers = Some((k, v));
            self.offset = end;
            return Ok(view);
        }
        let old = self.inner.buffers.take();
        let (k, stored_k) = self.extend(old.as_ref().map(|b| &b.0), keys, end)?;
        let (v, stored_v) = self.extend(old.as_ref().map(|b| &b.1), values, end)?;
        self.inner.buffers = Some((stored_k, stored_v));
        let rest = k.dim(2)? - self.keep;
        let order = Order::Run {
            keep: self.keep,
            start: end - rest,
        };
        let view = self.view(k, v, order);
        self.offset = end;
        Ok(view)
    }

    fn portable(&self) -> Result<Option<Portable>> {
        let Some((k, v)) = self.inner.buffers.as_ref().filter(|_| self.offset > 0) else {
            return Ok(None);
        };
        let ordered = |buffer: &Array| -> Result<Array> {
            let (prefix, rest) = self.ordered(buffer)?;
            concatenate(&[&prefix, &rest], 2)
        };
        Ok(Some(Portable::Recent {
            keys: ordered(k)?,
            values: ordered(v)?,
            offset: self.offset,
            size: self.size,
            keep: self.keep,
        }))
    }

    fn adopt(&mut self, portable: Portable) -> std::result::Result<(), String> {
        let words = |e: mlx_rs_core::Error| e.to_string();
        let offset = portable.offset().map_err(words)?;
        let (keys, values) = match &portable {
            // Without kept first positions, only the last positions are needed, and `All` contains
            // them.
            Portable::All { keys, values } if self.keep == 0 => (keys, values),
            Portable::Recent {
                keys,
                values,
                size,
                keep,
                ..
            } if (*size, *keep) == (self.size, self.keep) => (keys, values),
            _ => return Err(portable.refused(&format!("the last {} positions", self.size))),
        };
        let (keys, values) = self.inner.rounded(keys, values).map_err(words)?;
        let buffer = |all: &Array| self.buffer(all, offset).map_err(words);
        self.inner.buffers = Some((buffer(&keys)?, buffer(&values)?));
        self.offset = offset;
        Ok(())
    }
}

impl LayerState for RotatingCache {
    fn offset(&self) -> i32 {
        self.offset
    }

    fn len(&self) -> usize {
        self.offset().clamp(0, self.size) as usize
    }

    fn arrays(&self) -> Vec<&Array> {
        self.inner.arrays()
    }

    fn can_trim(&self, n: i32) -> bool {
        n <= 0 || self.offset <= self.size
    }

    fn keeps_all(&self, positions: i32) -> bool {
        positions <= self.size
    }

    fn reset(&mut self) {
        self.inner.reset();
        self.offset = 0;
    }

    fn trim(&mut self, n: i32) -> bool {
        let possible = self.can_trim(n);
        if possible {
            self.offset = (self.offset - n.max(0)).max(0);
        }
        possible
    }

    fn copy(&self) -> Result<Box<dyn LayerState>> {
        Ok(Box::new(self.clone()))
    }

    fn kind(&self) -> String {
        (self.inner).kind_of(format!("rotating:{}:{}", self.size, self.keep))
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let mut arrays = std::collections::BTreeMap::new();
        if let (Some((k, v)), true) = (&self.inner.buffers, self.offset > 0) {
            let valid = self.offset.min(self.size);
            arrays.insert("keys".into(), k.slice_axis(2, 0, valid)?);
            arrays.insert("values".into(), v.slice_axis(2, 0, valid)?);
        }
        Ok(Snapshot {
            kind: self.kind(),
            offset: self.offset,
            arrays,
        })
    }

    fn restore(&mut self, snapshot: Snapshot) -> Result<(), String> {
        let valid = snapshot.offset.min(self.size);
        let buffers = plain_parts(&snapshot, &self.kind(), valid)?;
        self.inner.buffers = self.inner.typed(buffers, &snapshot.kind)?;
        self.offset = snapshot.offset;
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
    use super::super::test_support::{part, positions};
    use super::*;
    use mlx_rs_core::Dtype;

    /// Returns the positions that the query at `p` attends to, by definition.
    fn expected(p: i32, size: i32, keep: i32) -> Vec<i32> {
        (0..=p)
            .filter(|&k| k < keep || k > p - (size - keep))
            .collect()
    }

    #[test]
    fn any_way_of_cutting_sees_the_same_positions() {
        for (size, keep) in [(8, 0), (8, 3), (5, 4), (1, 0), (300, 4)] {
            for steps in [
                vec![1; 40],
                vec![3, 1, 1, 7, 1, 1, 1, 20, 1, 1, 2, 1],
                vec![37, 1, 1, 1, 9, 1],
                vec![2, 6, 1, 8, 8, 1, 1],
                vec![299, 1, 1, 1, 320, 1, 1],
            ] {
                let mut cache = RotatingCache::new(size, keep);
                let mut at = 0;
                for n in steps {
                    let view = cache.update(&part(at, n), &part(at, n)).unwrap();
                    assert_eq!(view.offset, at);
                    at += n;
                    let mut got = positions(&view);
                    match view.order {
                        Order::Any => assert_eq!(n, 1),
                        Order::Run { keep, start } => {
                            let stand = (0..keep).chain(start..).take(got.len());
                            assert_eq!(got, stand.collect::<Vec<_>>(), "{size} {keep} {at}");
                        }
                    }
                    // In this view, the last query must attend to exactly the expected positions.
                    let window = view.window.unwrap();
                    if let Order::Run { keep, .. } = view.order {
                        let mut place = 0;
                        got.retain(|&k| {
                            place += 1;
                            place <= keep || k > at - 1 - window
                        });
                    }
                    got.sort_unstable();
                    assert_eq!(got, expected(at - 1, size, keep), "{size} {keep} {at}");
                    // The view must contain all positions that the first query attends to.
                    let first = expected(at - n, size, keep);
                    let all = positions(&view);
                    assert!(first.iter().all(|k| all.contains(k)), "{size} {keep} {at}");
                    let length = cache.arrays()[0].dim(2).unwrap();
                    assert!(length <= size, "{length} > {size}");
                }
            }
        }
    }

    #[test]
    fn trims_only_what_it_can_and_survives_a_file() {
        let mut cache = RotatingCache::new(8, 2);
        cache.update(&part(0, 8), &part(0, 8)).unwrap();
        assert!(cache.can_trim(3));
        cache.trim(3);
        cache.update(&part(5, 6), &part(5, 6)).unwrap();
        assert!(!cache.can_trim(1) && cache.can_trim(0));
        assert!(!cache.trim(1) && cache.trim(0));
        let snapshot = cache.snapshot().unwrap();
        let mut other = RotatingCache::new(8, 2);
        other.restore(snapshot.clone()).unwrap();
        let (a, b) = (
            cache.update(&part(11, 1), &part(11, 1)).unwrap(),
            other.update(&part(11, 1), &part(11, 1)).unwrap(),
        );
        assert_eq!(positions(&a), positions(&b));
        assert!(RotatingCache::new(9, 2).restore(snapshot).is_err());
    }

    #[test]
    fn float16_rings_keep_their_type_in_files_of_either_type() {
        let float32 = |view: &KvView| {
            let Stored::Plain(keys) = &view.keys else {
                panic!("not plain");
            };
            assert_eq!(keys.dtype(), Dtype::Float16);
            keys.astype(Dtype::Float32)
                .unwrap()
                .to_vec::<f32>()
                .unwrap()
        };
        let mut cache = RotatingCache::new(8, 2).with_half(true);
        for (from, n) in [(0, 3), (3, 9), (12, 1)] {
            float32(&cache.update(&part(from, n), &part(from, n)).unwrap());
        }
        let mut wide = RotatingCache::new(8, 2);
        wide.restore(cache.snapshot().unwrap()).unwrap();
        let wide = wide.snapshot().unwrap();
        assert_eq!(wide.arrays["keys"].dtype(), Dtype::Float32);
        let next = part(13, 1);
        let wanted = float32(
            &cache
                .copy()
                .unwrap()
                .as_kv_mut()
                .unwrap()
                .update(&next, &next)
                .unwrap(),
        );
        for snapshot in [cache.snapshot().unwrap(), wide] {
            let mut other = RotatingCache::new(8, 2).with_half(true);
            other.restore(snapshot).unwrap();
            assert_eq!(float32(&other.update(&next, &next).unwrap()), wanted);
        }
        let mut other = RotatingCache::new(8, 2).with_half(true);
        other.adopt(cache.portable().unwrap().unwrap()).unwrap();
        let got = float32(&other.update(&next, &next).unwrap());
        let sorted = |mut all: Vec<f32>| {
            all.sort_by(f32::total_cmp);
            all
        };
        assert_eq!(sorted(got), sorted(wanted));
    }
}
