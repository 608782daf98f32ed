//! The unbounded KV cache. It grows in chunks of 256 positions, so that most steps write in place
//! and copy nothing. Below 256 positions, the capacity grows in powers of two, because for many
//! short prompts, allocating complete chunks would cost more than copying.

use mlx_rs_core::{Array, Dtype, Result, concatenate, zeros};

use super::{KvCache, KvView, LayerState, Order, Portable, Snapshot, Stored, cast};
use crate::exec::{Heads, KvPacking, KvType, TokenRange};

/// The number of positions by which the capacity grows.
pub(super) const CHUNK: i32 = 256;

/// Keys and values of all positions so far.
#[derive(Debug, Default, Clone)]
pub struct ChunkedCache {
    /// `[B, Hkv, capacity, D]` each; positions from `offset` on are undefined.
    pub(super) buffers: Option<(Array, Array)>,
    pub(super) offset: i32,
    /// Whether elements are stored as float16, regardless of the type of new keys and values.
    half: bool,
    /// How keys and values are packed. If `Some`, the buffers contain packed words as kernels store
    /// them, `[B, Hkv, capacity, words]`, and only kernels append to them.
    pub(super) packing: Option<KvPacking>,
}

impl ChunkedCache {
    /// Creates an empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a cache with packed words of `offset` positions.
    pub(super) fn packed(buffers: (Array, Array), offset: i32, packing: KvPacking) -> Self {
        Self {
            buffers: Some(buffers),
            offset,
            half: false,
            packing: Some(packing),
        }
    }

    /// Makes the cache store float16 if `half`.
    pub fn with_half(mut self, half: bool) -> Self {
        self.half = half;
        self
    }

    /// Returns the type in which our kernels store elements.
    pub(super) fn kv_type(&self) -> KvType {
        match (self.packing, self.half) {
            (Some(packing), _) => KvType::Packed(packing),
            (None, true) => KvType::Float16,
            (None, false) => KvType::Float32,
        }
    }

    /// Converts keys and values to the type in which they are stored.
    pub(super) fn rounded(&self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        match self.half {
            true => Ok((cast(keys, Dtype::Float16)?, cast(values, Dtype::Float16)?)),
            false => Ok((keys.clone(), values.clone())),
        }
    }

    /// Buffers from a snapshot of this kind, in the type in which they are stored here.
    pub(super) fn typed(
        &self,
        buffers: Option<(Array, Array)>,
        kind: &str,
    ) -> std::result::Result<Option<(Array, Array)>, String> {
        let typed = buffers.map(|(keys, values)| {
            // A stored type differs from the compute type only in caches of float32 sequences, so a
            // snapshot with float16 belongs to a float32 sequence.
            if !self.half && kind.contains(HALF) {
                let wide = |a: &Array| a.astype(Dtype::Float32);
                return Ok((wide(&keys)?, wide(&values)?));
            }
            self.rounded(&keys, &values)
        });
        typed
            .transpose()
            .map_err(|e: mlx_rs_core::Error| e.to_string())
    }

    /// Returns `kind` with this cache's element type appended, for [`LayerState::kind`].
    pub(super) fn kind_of(&self, kind: String) -> String {
        match self.half {
            true => format!("{kind}{HALF}"),
            false => kind,
        }
    }

    /// Returns the valid part of the buffers: `[B, Hkv, offset, D]` each.
    pub fn valid(&self) -> Result<Option<(Array, Array)>> {
        self.buffers
            .as_ref()
            .map(|(k, v)| {
                Ok((
                    k.slice_axis(2, 0, self.offset)?,
                    v.slice_axis(2, 0, self.offset)?,
                ))
            })
            .transpose()
    }

    /// Moves the buffers out, and grows them to a capacity for `end` positions. The last argument
    /// has the shapes and the type of new keys and values.
    fn buffers_for(
        &mut self,
        end: i32,
        limit: i32,
        (keys, values, dtype): (&[i32], &[i32], Dtype),
    ) -> Result<(Array, Array)> {
        match self.buffers.take() {
            Some((k, v)) if k.dim(2)? >= end => Ok((k, v)),
            old => {
                let (k, v) = (old.as_ref().map(|b| &b.0), old.as_ref().map(|b| &b.1));
                Ok((
                    grow(k, (keys, dtype), self.offset, end, limit)?,
                    grow(v, (values, dtype), self.offset, end, limit)?,
                ))
            }
        }
    }

    /// Appends keys and values. The capacity is at most `limit` positions.
    pub(super) fn append(&mut self, keys: &Array, values: &Array, limit: i32) -> Result<()> {
        let (keys, values) = &self.rounded(keys, values)?;
        let end = self.offset + keys.dim(2)?;
        let (k, v) = self.buffers_for(end, limit, (keys.shape(), values.shape(), keys.dtype()))?;
        let k = k.update_axis(keys, 2, self.offset)?;
        let v = v.update_axis(values, 2, self.offset)?;
        self.buffers = Some((k, v));
        self.offset = end;
        Ok(())
    }

    /// Whether our kernels can append to the cache: its buffers must have the type of
    /// [`Self::kv_type`].
    pub(super) fn stores(&self) -> bool {
        let plain = |a: &Array| a.dtype() == self.dtype();
        self.buffers
            .as_ref()
            .is_none_or(|(k, v)| plain(k) && plain(v))
    }

    /// Returns the number of items that are stored for a head of `width` elements.
    fn stored(&self, width: i32) -> i32 {
        let row = self.kv_type().row(usize::try_from(width).unwrap_or(0));
        i32::try_from(row).unwrap_or(i32::MAX)
    }

    /// Returns [`Self::kv_type`] as an array type.
    fn dtype(&self) -> Dtype {
        match self.kv_type() {
            KvType::Float32 => Dtype::Float32,
            KvType::Float16 => Dtype::Float16,
            KvType::Packed(_) => Dtype::Uint32,
        }
    }

    /// Makes our kernels append keys and values of `length` tokens of a packed projection, from
    /// token `first` on. Returns the buffers `[1, Hkv, n, D]`, which may have unused capacity at
    /// the end.
    pub(super) fn store(
        &mut self,
        heads: &Heads,
        packed: &Array,
        (first, length): (i32, i32),
    ) -> Result<(Array, Array)> {
        let end = self.offset.saturating_add(length);
        let shape = [1, heads.n_kv_heads, length, self.stored(heads.head_dim)];
        let (k, v) = self.buffers_for(end, i32::MAX, (&shape, &shape, self.dtype()))?;
        let tokens = TokenRange {
            first,
            length,
            offset: self.offset,
        };
        let k = heads.store_keys((&k, self.packing), packed, tokens)?;
        let v = heads.store_values((&v, self.packing), packed, tokens)?;
        self.buffers = Some((k.clone(), v.clone()));
        self.offset = end;
        Ok((k, v))
    }
}

/// The suffix of [`LayerState::kind`] for a cache of float16.
const HALF: &str = ":float16";

/// Returns a kind without its element type, because a cache can be restored from a snapshot of any
/// type.
pub(super) fn untyped(kind: &str) -> String {
    kind.replace(HALF, "")
}

/// Returns the capacity to allocate for `needed` positions.
pub(super) fn capacity(needed: i32) -> i32 {
    if needed <= CHUNK {
        u32::try_from(needed).map_or(0, |n| n.next_power_of_two() as i32)
    } else {
        needed
            .checked_add(CHUNK - 1)
            .map_or(needed, |n| n / CHUNK * CHUNK)
    }
}

/// Allocates a buffer of [`capacity`] for `needed` positions, at most `limit`, and copies the first
/// `offset` positions of `old`. `shape` and `dtype` are those of the new elements.
pub(super) fn grow(
    old: Option<&Array>,
    (shape, dtype): (&[i32], Dtype),
    offset: i32,
    needed: i32,
    limit: i32,
) -> Result<Array> {
    let mut shape = shape.to_vec();
    let capacity = capacity(needed).min(limit).max(needed);
    if let Some(length) = shape.get_mut(2) {
        *length = capacity - offset;
    }
    let room = zeros(&shape, dtype)?;
    match old {
        Some(old) if offset > 0 => concatenate(&[&old.slice_axis(2, 0, offset)?, &room], 2),
        _ => Ok(room),
    }
}

impl KvCache for ChunkedCache {
    fn update(&mut self, keys: &Array, values: &Array) -> Result<KvView> {
        let offset = self.offset;
        self.append(keys, values, i32::MAX)?;
        let Some((keys, values)) = self.valid()? else {
            return Err(mlx_rs_core::Error::new(
                mlx_rs_core::ErrorKind::Mlx,
                "cache",
                "nothing was stored",
            ));
        };
        Ok(KvView {
            keys: Stored::Plain(keys),
            values: Stored::Plain(values),
            offset,
            order: Order::Run { keep: 0, start: 0 },
            window: None,
            reach: 0,
        })
    }

    fn portable(&self) -> Result<Option<Portable>> {
        let valid = self.valid()?.filter(|_| self.offset > 0);
        Ok(valid.map(|(keys, values)| Portable::All { keys, values }))
    }

    fn adopt(&mut self, portable: Portable) -> std::result::Result<(), String> {
        let offset = portable.offset().map_err(|e| e.to_string())?;
        let Portable::All { keys, values } = portable else {
            return Err(portable.refused("all positions"));
        };
        self.buffers = Some(self.rounded(&keys, &values).map_err(|e| e.to_string())?);
        self.offset = offset;
        Ok(())
    }
}

impl LayerState for ChunkedCache {
    fn offset(&self) -> i32 {
        self.offset
    }

    fn arrays(&self) -> Vec<&Array> {
        self.buffers.iter().flat_map(|(k, v)| [k, v]).collect()
    }

    fn can_trim(&self, _: i32) -> bool {
        true
    }

    fn keeps_all(&self, _: i32) -> bool {
        true
    }

    fn reset(&mut self) {
        *self = Self::new().with_half(self.half);
    }

    fn trim(&mut self, n: i32) -> bool {
        self.offset = (self.offset - n.max(0)).max(0);
        true
    }

    fn copy(&self) -> Result<Box<dyn LayerState>> {
        Ok(Box::new(self.clone()))
    }

    fn kind(&self) -> String {
        self.kind_of("chunked".into())
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let arrays = match self.valid()? {
            Some((k, v)) if self.offset > 0 => [("keys".into(), k), ("values".into(), v)].into(),
            _ => Default::default(),
        };
        Ok(Snapshot {
            kind: self.kind(),
            offset: self.offset,
            arrays,
        })
    }

    fn restore(&mut self, snapshot: Snapshot) -> Result<(), String> {
        let buffers = plain_parts(&snapshot, "chunked", snapshot.offset)?;
        self.buffers = self.typed(buffers, &snapshot.kind)?;
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

/// Returns the keys and values in a snapshot of `kind` with `positions` positions.
pub(super) fn plain_parts(
    snapshot: &Snapshot,
    kind: &str,
    positions: i32,
) -> Result<Option<(Array, Array)>, String> {
    if untyped(&snapshot.kind) != untyped(kind) {
        return Err(format!(
            "it holds a cache of kind `{}`, where `{kind}` is needed",
            snapshot.kind
        ));
    }
    if snapshot.offset == 0 {
        return Ok(None);
    }
    let part = |name: &str| {
        let array = snapshot
            .arrays
            .get(name)
            .ok_or_else(|| format!("it has no {name}"))?;
        match array.shape() {
            [1, _, n, _] if *n == positions => Ok(array.clone()),
            shape => Err(format!(
                "its {name} have shape {shape:?} for {positions} positions"
            )),
        }
    };
    Ok(Some((part("keys")?, part("values")?)))
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

    fn plain(stored: &Stored) -> Vec<f32> {
        match stored {
            Stored::Plain(a) => a.to_vec().unwrap(),
            Stored::Quantized(_) => panic!("not plain"),
        }
    }

    #[test]
    fn grows_across_chunks_and_keeps_every_position() {
        let mut cache = ChunkedCache::new();
        let mut at = 0;
        for n in [3, 1, 1, 250, 1, 1, 300, 1] {
            let view = cache.update(&part(at, n), &part(at + 1000, n)).unwrap();
            assert_eq!(view.offset, at);
            at += n;
            assert_eq!(view.keys.positions().unwrap(), at);
            assert_eq!(plain(&view.keys), part(0, at).to_vec::<f32>().unwrap());
            assert_eq!(plain(&view.values), part(1000, at).to_vec::<f32>().unwrap());
        }
        assert_eq!(cache.offset(), at);
        assert_eq!(cache.arrays()[0].dim(2).unwrap() % CHUNK, 0);
    }

    #[test]
    fn trimmed_positions_are_written_again_and_copies_go_their_own_way() {
        let mut cache = ChunkedCache::new();
        cache.update(&part(0, 10), &part(0, 10)).unwrap();
        cache.trim(4);
        assert_eq!(cache.offset(), 6);
        let mut other = cache.copy().unwrap();
        let kv = other.as_kv_mut().unwrap();
        kv.update(&part(50, 3), &part(50, 3)).unwrap();
        let view = cache.update(&part(6, 2), &part(6, 2)).unwrap();
        assert_eq!(plain(&view.keys), part(0, 8).to_vec::<f32>().unwrap());
        assert_eq!((cache.offset(), other.offset()), (8, 9));
        cache.trim(100);
        assert_eq!(cache.offset(), 0);
        assert!(cache.nbytes() > 0, "the room is kept");
        cache.reset();
        assert!(cache.is_empty() && cache.nbytes() == 0);
    }
}
