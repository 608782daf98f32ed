//! The unbounded cache. It grows in chunks of 256 positions, so that most steps write in place
//! instead of copying everything.

use mlx_rs_core::{Array, Result, concatenate, zeros};

use super::KvCache;

/// Positions added at a time.
const CHUNK: i32 = 256;

/// Keys and values of all positions so far.
#[derive(Debug, Default)]
pub struct ChunkedCache {
    /// `[B, Hkv, capacity, D]` each; positions from `offset` on are not valid.
    buffers: Option<(Array, Array)>,
    offset: i32,
}

impl ChunkedCache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// A buffer with room for `needed` positions that keeps the first `offset` of `old`.
    fn grow(old: Option<&Array>, new: &Array, offset: i32, needed: i32) -> Result<Array> {
        let shape = new.shape();
        let capacity = (needed + CHUNK - 1) / CHUNK * CHUNK;
        let room = [shape[0], shape[1], capacity - offset, shape[3]];
        let room = zeros(&room, new.dtype())?;
        match old {
            Some(old) if offset > 0 => concatenate(&[&old.slice_axis(2, 0, offset)?, &room], 2),
            _ => Ok(room),
        }
    }
}

impl KvCache for ChunkedCache {
    fn update(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let end = self.offset + keys.dim(2)?;
        let (k, v) = match self.buffers.take() {
            Some((k, v)) if k.dim(2)? >= end => (k, v),
            old => {
                let (k, v) = (old.as_ref().map(|b| &b.0), old.as_ref().map(|b| &b.1));
                (
                    Self::grow(k, keys, self.offset, end)?,
                    Self::grow(v, values, self.offset, end)?,
                )
            }
        };
        let k = k.update_axis(keys, 2, self.offset)?;
        let v = v.update_axis(values, 2, self.offset)?;
        let valid = (k.slice_axis(2, 0, end)?, v.slice_axis(2, 0, end)?);
        self.buffers = Some((k, v));
        self.offset = end;
        Ok(valid)
    }

    fn offset(&self) -> i32 {
        self.offset
    }

    fn state(&self) -> Vec<&Array> {
        self.buffers.iter().flat_map(|(k, v)| [k, v]).collect()
    }

    fn trim(&mut self, n: i32) {
        self.offset = (self.offset - n.max(0)).max(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(from: i32, n: i32) -> Array {
        let values: Vec<f32> = (from..from + n)
            .flat_map(|i| [i as f32, -i as f32])
            .collect();
        Array::from_slice(&values, &[1, 1, n, 2]).unwrap()
    }

    #[test]
    fn grows_across_chunks_and_keeps_every_position() {
        let mut cache = ChunkedCache::new();
        let mut at = 0;
        for n in [3, 1, 1, 250, 1, 1, 300, 1] {
            let (k, v) = cache.update(&part(at, n), &part(at + 1000, n)).unwrap();
            at += n;
            assert_eq!(k.shape(), [1, 1, at, 2]);
            assert_eq!(
                k.to_vec::<f32>().unwrap(),
                part(0, at).to_vec::<f32>().unwrap()
            );
            assert_eq!(
                v.to_vec::<f32>().unwrap(),
                part(1000, at).to_vec::<f32>().unwrap()
            );
        }
        assert_eq!(cache.offset(), at);
        assert_eq!(cache.state()[0].dim(2).unwrap() % CHUNK, 0);
    }

    #[test]
    fn trimmed_positions_are_written_again() {
        let mut cache = ChunkedCache::new();
        cache.update(&part(0, 10), &part(0, 10)).unwrap();
        cache.trim(4);
        assert_eq!(cache.offset(), 6);
        let (k, _) = cache.update(&part(6, 2), &part(6, 2)).unwrap();
        assert_eq!(
            k.to_vec::<f32>().unwrap(),
            part(0, 8).to_vec::<f32>().unwrap()
        );
        cache.trim(100);
        assert_eq!(cache.offset(), 0);
    }
}
