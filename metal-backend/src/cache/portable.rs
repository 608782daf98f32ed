//! The content of a cache, independent of the cache's implementation: positions in order. Files of
//! other programs store caches in this form.

use std::fmt;

use mlx_rs_core::{Array, Dtype, Error, ErrorKind, Quantized, Result};

use super::{cast, map};

/// Keys and values of one layer, `[1, Hkv, n, D]`, in ascending order of positions.
#[derive(Debug, Clone)]
pub enum Portable {
    /// All positions.
    All {
        /// Keys.
        keys: Array,
        /// Values.
        values: Array,
    },
    /// The first `keep` positions and the last positions, at most `size` positions together.
    Recent {
        /// Keys.
        keys: Array,
        /// Values.
        values: Array,
        /// The number of positions that the cache has received.
        offset: i32,
        /// The maximum number of positions that a query attends to.
        size: i32,
        /// The number of first positions that are never dropped.
        keep: i32,
    },
    /// All positions, in the affine format.
    Packed {
        /// Keys.
        keys: Quantized,
        /// Values.
        values: Quantized,
    },
}

/// The properties that are equal in all caches of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The number of heads.
    heads: i32,
    /// The widths of a key and of a value.
    widths: [i32; 2],
    /// The compute type.
    pub dtype: Dtype,
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [keys, values] = self.widths;
        write!(f, "{} heads of {keys} and {values} numbers", self.heads)
    }
}

impl Layout {
    /// Whether caches of both layouts have equal shapes. Their types may differ.
    pub fn fits(&self, other: &Self) -> bool {
        (self.heads, self.widths) == (other.heads, other.widths)
    }
}

/// Returns heads, positions and width of an array with one row.
fn sizes(array: &Array) -> Result<[i32; 3]> {
    match array.shape() {
        [1, heads, positions, width] => Ok([*heads, *positions, *width]),
        shape => Err(Error::new(
            ErrorKind::Shape,
            "cache",
            format!("keys or values have shape {shape:?}; [1, heads, positions, width] is needed"),
        )),
    }
}

impl Portable {
    /// The number of positions that the cache has received.
    ///
    /// # Errors
    /// If keys or values have another shape than `[1, Hkv, n, D]`, or their shapes do not match.
    pub fn offset(&self) -> Result<i32> {
        let (keys, values) = match self {
            Self::All { keys, values } | Self::Recent { keys, values, .. } => (keys, values),
            Self::Packed { keys, values } => (&keys.weight, &values.weight),
        };
        let ([_, n_keys, _], [_, same, _]) = (sizes(keys)?, sizes(values)?);
        let (offset, expected) = match *self {
            Self::Recent { offset, size, .. } => (offset, offset.min(size)),
            _ => (n_keys, n_keys),
        };
        if n_keys != same || n_keys != expected || offset < 1 {
            return Err(Error::new(
                ErrorKind::Shape,
                "cache",
                format!("{n_keys} keys and {same} values, where {expected} are needed"),
            ));
        }
        Ok(offset)
    }

    /// Returns the layout of the layer's caches.
    ///
    /// # Errors
    /// The errors of [`Self::offset`].
    pub fn layout(&self) -> Result<Layout> {
        let (keys, values, dtype) = match self {
            Self::All { keys, values } | Self::Recent { keys, values, .. } => {
                (sizes(keys)?, sizes(values)?, keys.dtype())
            }
            Self::Packed { keys, values } => {
                let unpacked = |q: &Quantized| -> Result<[i32; 3]> {
                    q.validate("cache")?;
                    let [heads, positions, words] = sizes(&q.weight)?;
                    Ok([heads, positions, words.saturating_mul(32) / q.bits.max(1)])
                };
                (unpacked(keys)?, unpacked(values)?, keys.scales.dtype())
            }
        };
        if keys[0] != values[0] {
            return Err(Error::new(
                ErrorKind::Shape,
                "cache",
                format!("keys of {} heads, values of {}", keys[0], values[0]),
            ));
        }
        Ok(Layout {
            heads: keys[0],
            widths: [keys[2], values[2]],
            dtype,
        })
    }

    /// Converts the arrays to another type; quantized codes do not change. Values beyond the range
    /// of float16 become its greatest value.
    pub fn cast(self, dtype: Dtype) -> Result<Self> {
        let packed = |q: Quantized| -> Result<Quantized> {
            Ok(Quantized {
                scales: q.scales.astype(dtype)?,
                biases: q.biases.as_ref().map(|b| b.astype(dtype)).transpose()?,
                ..q
            })
        };
        Ok(match self {
            Self::All { keys, values } => Self::All {
                keys: cast(&keys, dtype)?,
                values: cast(&values, dtype)?,
            },
            Self::Recent {
                keys,
                values,
                offset,
                size,
                keep,
            } => Self::Recent {
                keys: cast(&keys, dtype)?,
                values: cast(&values, dtype)?,
                offset,
                size,
                keep,
            },
            Self::Packed { keys, values } => Self::Packed {
                keys: packed(keys)?,
                values: packed(values)?,
            },
        })
    }

    /// Returns an error message about a mismatch; `needed` describes the expected cache.
    pub fn refused(&self, needed: &str) -> String {
        let actual = match self {
            Self::All { .. } => {
                String::from("all positions, which --ctx-size and --kv-bits change")
            }
            Self::Recent { size, .. } => {
                format!("the last {size} positions, as --ctx-size {size} (--max-kv-size) makes it")
            }
            Self::Packed { keys, .. } => format!(
                "packed positions, as --kv-bits {} --kv-group-size {} makes it",
                keys.bits, keys.group_size
            ),
        };
        format!("it has {actual}, but {needed} are needed; use the flags that it was made with")
    }
}

/// Returns the first `to` positions of quantized keys or values.
pub(super) fn packed_range(q: &Quantized, to: i32) -> Result<Quantized> {
    map(q, |a| a.slice_axis(2, 0, to))
}
