//! The quantized KV cache. Keys and values are quantized in groups of a head's elements, and stored
//! in chunks. A short sequence may stay unquantized; beyond a set length, all positions are
//! quantized. MLX's operations write and read this cache. For our kernels, [`InPlaceCache`] stores
//! the same codes in another layout.
//!
//! [`InPlaceCache`]: super::InPlaceCache

use std::collections::BTreeMap;

use mlx_rs_core::{Array, Error, ErrorKind, QuantMode, Quantized, Result};

use super::chunked::{ChunkedCache, grow};
use super::portable::packed_range;
use super::{KvCache, KvView, LayerState, Order, Packing, Portable, Snapshot, Stored, map};
use crate::exec::{KvPacking, join_kv, unpack_kv};

/// Quantized keys and values of all positions.
#[derive(Debug, Clone)]
pub struct QuantizedCache {
    packing: Packing,
    store: Store,
}

#[derive(Debug, Clone)]
enum Store {
    Plain(ChunkedCache),
    Packed {
        keys: Quantized,
        values: Quantized,
        offset: i32,
    },
}

impl QuantizedCache {
    /// Creates an empty cache.
    pub fn new(packing: Packing) -> Self {
        Self {
            packing,
            store: Store::Plain(ChunkedCache::new()),
        }
    }

    /// Converts the contents of a cache of our kernels.
    pub(super) fn from_rows(packing: Packing, rows: &ChunkedCache) -> Result<Self> {
        let store = match (rows.packing, rows.valid()?) {
            (Some(kv), Some((keys, values))) if rows.offset > 0 => Store::Packed {
                keys: unpack_kv(&keys, kv)?,
                values: unpack_kv(&values, kv)?,
                offset: rows.offset,
            },
            (Some(_), _) => Store::Plain(ChunkedCache::new()),
            (None, _) => Store::Plain(rows.clone()),
        };
        Ok(Self { packing, store })
    }

    /// Returns the contents in our kernels' layout, which `kv` describes. Unquantized positions
    /// remain unquantized.
    pub(super) fn to_rows(&self, kv: KvPacking) -> Result<ChunkedCache> {
        match &self.store {
            Store::Plain(plain) => Ok(plain.clone()),
            Store::Packed {
                keys,
                values,
                offset,
            } => {
                let rows = |q: &Quantized| join_kv(&packed_range(q, *offset)?);
                Ok(ChunkedCache::packed(
                    (rows(keys)?, rows(values)?),
                    *offset,
                    kv,
                ))
            }
        }
    }

    fn pack(&self, a: &Array) -> Result<Quantized> {
        let width = a.dim(-1)?;
        let group = self.packing.group_size;
        if group < 1 || width % group != 0 {
            return Err(Error::new(
                ErrorKind::Value,
                "cache",
                format!("a head of {width} elements cannot be packed in groups of {group}"),
            ));
        }
        Quantized::quantize(a, group, self.packing.bits, QuantMode::Affine)
    }

    /// Appends `new` at position `offset`. The buffers grow if necessary.
    fn append(old: &Quantized, new: &Quantized, offset: i32, end: i32) -> Result<Quantized> {
        let join = |old: &Array, new: &Array| -> Result<Array> {
            let buffer = if old.dim(2)? >= end {
                old.clone()
            } else {
                grow(Some(old), (new.shape(), new.dtype()), offset, end, i32::MAX)?
            };
            buffer.update_axis(new, 2, offset)
        };
        let biases = match (&old.biases, &new.biases) {
            (Some(old), Some(new)) => Some(join(old, new)?),
            _ => None,
        };
        Ok(Quantized {
            weight: join(&old.weight, &new.weight)?,
            scales: join(&old.scales, &new.scales)?,
            biases,
            ..*old
        })
    }
}

impl KvCache for QuantizedCache {
    fn update(&mut self, keys: &Array, values: &Array) -> Result<KvView> {
        let offset = self.offset();
        let end = offset + keys.dim(2)?;
        if let Store::Plain(cache) = &mut self.store {
            if end <= self.packing.start {
                return cache.update(keys, values);
            }
            let plain = if cache.offset() > 0 {
                cache.valid()?
            } else {
                None
            };
            self.store = match plain {
                Some((k, v)) => {
                    let (k, v) = (self.pack(&k)?, self.pack(&v)?);
                    let (new_k, new_v) = (self.pack(keys)?, self.pack(values)?);
                    Store::Packed {
                        keys: Self::append(&k, &new_k, offset, end)?,
                        values: Self::append(&v, &new_v, offset, end)?,
                        offset: end,
                    }
                }
                None => Store::Packed {
                    keys: self.pack(keys)?,
                    values: self.pack(values)?,
                    offset: end,
                },
            };
        } else {
            let (new_k, new_v) = (self.pack(keys)?, self.pack(values)?);
            if let Store::Packed {
                keys,
                values,
                offset: at,
            } = &mut self.store
            {
                *keys = Self::append(keys, &new_k, offset, end)?;
                *values = Self::append(values, &new_v, offset, end)?;
                *at = end;
            }
        }
        let Store::Packed { keys, values, .. } = &self.store else {
            return Err(Error::new(ErrorKind::Mlx, "cache", "nothing was stored"));
        };
        let valid = |q: &Quantized| map(q, |a| a.slice_axis(2, 0, end)).map(Stored::Quantized);
        Ok(KvView {
            keys: valid(keys)?,
            values: valid(values)?,
            offset,
            order: Order::Run { keep: 0, start: 0 },
            window: None,
            reach: 0,
        })
    }

    fn portable(&self) -> Result<Option<Portable>> {
        match &self.store {
            Store::Plain(cache) => cache.portable(),
            Store::Packed { offset: 0, .. } => Ok(None),
            Store::Packed {
                keys,
                values,
                offset,
            } => Ok(Some(Portable::Packed {
                keys: packed_range(keys, *offset)?,
                values: packed_range(values, *offset)?,
            })),
        }
    }

    /// Unquantized positions stay unquantized until an update exceeds the start of quantization.
    fn adopt(&mut self, portable: Portable) -> std::result::Result<(), String> {
        let Packing {
            bits, group_size, ..
        } = self.packing;
        let offset = portable.offset().map_err(|e| e.to_string())?;
        match portable {
            Portable::All { .. } => {
                let mut plain = ChunkedCache::new();
                plain.adopt(portable)?;
                self.store = Store::Plain(plain);
            }
            Portable::Packed { keys, values }
                if [&keys, &values]
                    .iter()
                    .all(|q| (q.bits, q.group_size) == (bits, group_size)) =>
            {
                self.store = Store::Packed {
                    keys,
                    values,
                    offset,
                };
            }
            other => {
                let needed = format!("positions of {bits} bits in groups of {group_size}");
                return Err(other.refused(&needed));
            }
        }
        Ok(())
    }
}

impl LayerState for QuantizedCache {
    fn offset(&self) -> i32 {
        match &self.store {
            Store::Plain(cache) => cache.offset(),
            Store::Packed { offset, .. } => *offset,
        }
    }

    fn arrays(&self) -> Vec<&Array> {
        match &self.store {
            Store::Plain(cache) => cache.arrays(),
            Store::Packed { keys, values, .. } => [keys, values]
                .into_iter()
                .flat_map(|q| [Some(&q.weight), Some(&q.scales), q.biases.as_ref()])
                .flatten()
                .collect(),
        }
    }

    fn can_trim(&self, _: i32) -> bool {
        true
    }

    fn keeps_all(&self, _: i32) -> bool {
        true
    }

    fn reset(&mut self) {
        self.store = Store::Plain(ChunkedCache::new());
    }

    fn trim(&mut self, n: i32) -> bool {
        match &mut self.store {
            Store::Plain(cache) => {
                cache.trim(n);
            }
            Store::Packed { offset, .. } => *offset = (*offset - n.max(0)).max(0),
        }
        if self.is_empty() {
            self.reset();
        }
        true
    }

    fn copy(&self) -> Result<Box<dyn LayerState>> {
        Ok(Box::new(self.clone()))
    }

    fn kind(&self) -> String {
        let Packing {
            bits,
            group_size,
            start,
        } = self.packing;
        format!("quantized:{bits}:{group_size}:{start}")
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let mut snapshot = match &self.store {
            Store::Plain(cache) => cache.snapshot()?,
            Store::Packed {
                keys,
                values,
                offset,
            } => {
                let mut arrays = BTreeMap::new();
                for (name, q) in [("keys", keys), ("values", values)] {
                    let valid = map(q, |a| a.slice_axis(2, 0, *offset))?;
                    arrays.insert(format!("{name}.weight"), valid.weight);
                    arrays.insert(format!("{name}.scales"), valid.scales);
                    if let Some(biases) = valid.biases {
                        arrays.insert(format!("{name}.biases"), biases);
                    }
                }
                Snapshot {
                    kind: String::new(),
                    offset: *offset,
                    arrays,
                }
            }
        };
        snapshot.kind = self.kind();
        Ok(snapshot)
    }

    fn restore(&mut self, mut snapshot: Snapshot) -> Result<(), String> {
        if snapshot.kind != self.kind() {
            return Err(format!(
                "it holds a cache of kind `{}`, where `{}` is needed",
                snapshot.kind,
                self.kind()
            ));
        }
        if !snapshot.arrays.contains_key("keys.weight") {
            snapshot.kind = "chunked".into();
            let mut plain = ChunkedCache::new();
            plain.restore(snapshot)?;
            self.store = Store::Plain(plain);
            return Ok(());
        }
        let part = |name: &str| -> Result<Quantized, String> {
            let get = |part: &str| {
                let array = snapshot
                    .arrays
                    .get(&format!("{name}.{part}"))
                    .ok_or_else(|| format!("it has no {name}.{part}"))?;
                match array.shape() {
                    [1, _, n, _] if *n == snapshot.offset => Ok(array.clone()),
                    shape => Err(format!(
                        "its {name}.{part} have shape {shape:?} for {} positions",
                        snapshot.offset
                    )),
                }
            };
            let q = Quantized {
                weight: get("weight")?,
                scales: get("scales")?,
                biases: Some(get("biases")?),
                group_size: self.packing.group_size,
                bits: self.packing.bits,
                mode: QuantMode::Affine,
            };
            q.validate("cache").map_err(|e| e.to_string())?;
            Ok(q)
        };
        self.store = Store::Packed {
            keys: part("keys")?,
            values: part("values")?,
            offset: snapshot.offset,
        };
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
    use super::*;

    fn part(from: i32, n: i32) -> Array {
        let values: Vec<f32> = (from * 32..(from + n) * 32)
            .map(|i| ((i * 37) % 101) as f32 * 0.01)
            .collect();
        Array::from_slice(&values, &[1, 1, n, 32]).unwrap()
    }

    #[test]
    fn packed_positions_are_near_what_went_in_across_growth_and_trims() {
        for start in [0, 5, 400] {
            let packing = Packing {
                bits: 8,
                group_size: 32,
                start,
            };
            let mut cache = QuantizedCache::new(packing);
            let mut at = 0;
            for n in [3, 1, 1, 250, 1, 1, 30, 1, 200] {
                let view = cache.update(&part(at, n), &part(at, n)).unwrap();
                at += n;
                let exact = part(0, at);
                assert_eq!(view.keys.positions().unwrap(), at);
                assert_eq!(matches!(view.keys, Stored::Plain(_)), at <= start);
                let got = view.keys.plain(&exact).unwrap();
                assert!(got.all_close(&exact, 0.0, 5e-3).unwrap(), "{start} {at}");
            }
            cache.trim(100);
            let view = cache
                .update(&part(at - 100, 2), &part(at - 100, 2))
                .unwrap();
            let exact = part(0, at - 98);
            let got = view.values.plain(&exact).unwrap();
            assert!(got.all_close(&exact, 0.0, 5e-3).unwrap());

            let mut other = QuantizedCache::new(packing);
            other.restore(cache.snapshot().unwrap()).unwrap();
            assert_eq!(other.offset(), cache.offset());
            let next = part(at, 1);
            let (a, b) = (
                cache.update(&next, &next).unwrap(),
                other.update(&next, &next).unwrap(),
            );
            let (a, b) = (a.keys.plain(&next).unwrap(), b.keys.plain(&next).unwrap());
            assert_eq!(a.to_vec::<f32>().unwrap(), b.to_vec::<f32>().unwrap());
        }
    }

    #[test]
    fn heads_that_do_not_divide_are_refused() {
        let mut cache = QuantizedCache::new(Packing {
            bits: 8,
            group_size: 64,
            start: 0,
        });
        let error = cache.update(&part(0, 1), &part(0, 1)).unwrap_err();
        assert!(error.to_string().contains("groups of 64"), "{error}");
    }
}
