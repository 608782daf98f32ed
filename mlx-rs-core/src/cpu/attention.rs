//! The heads of an attention layer, and the operations that compute attention and that store keys
//! and values. This module checks and plans the operations; the kernels compute them.

use mlx_cpu_kernels::{
    Around, Attention, AttentionMask, Isa, KvPacking, KvType, KvWrite, ProjectKeys, Query,
    Rotation, TokenPositions, TokenRange, dim,
};

use super::host_op::{self, OpKind};
use crate::array::Array;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};

/// An RMS norm that is applied to each head.
#[derive(Debug, Clone)]
pub struct HeadNorm {
    /// The weight, float32 `[head_dim]`.
    pub weight: Array,
    /// Epsilon, which is added under the root.
    pub eps: f32,
}

/// The heads of an attention layer.
/// ```
/// use mlx_rs_core::{Array, Device, Dtype, Stream, cpu::{Heads, KvView, TokenRange}, zeros};
/// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
///     let heads = Heads {
///         n_heads: 1,
///         n_kv_heads: 1,
///         head_dim: 2,
///         scale: 1.0,
///         softcap: None,
///         q_norm: None,
///         k_norm: None,
///         rotation: None,
///         sinks: None,
///     };
///     // One token: its query, its key and its value, side by side.
///     let packed = Array::from_slice(&[1.0f32, 0.0, 1.0, 0.0, 5.0, 6.0], &[1, 1, 6])?;
///     assert_eq!(heads.keys(&packed, &[(1, 0)])?.to_vec::<f32>()?, [1.0, 0.0]);
///     // A cache for four.
///     let tokens = TokenRange { first: 0, length: 1, offset: 0 };
///     let empty = zeros(&[1, 1, 4, 2], Dtype::Float32)?;
///     let sequence = KvView {
///         length: 1,
///         offset: 0,
///         keys: heads.store_keys((&empty, None), &packed, tokens)?,
///         values: heads.store_values((&empty, None), &packed, tokens)?,
///         packing: None,
///         filled: 1,
///         order: Some((0, 0)),
///         window: None,
///     };
///     let found = heads.attend(&packed, &[sequence], false)?;
///     assert_eq!(found.to_vec::<f32>()?, [5.0, 6.0]);
///     Ok(())
/// })?;
/// # Ok::<(), mlx_rs_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Heads {
    /// The number of query heads.
    pub n_heads: i32,
    /// The number of key and value heads. It divides `n_heads`.
    pub n_kv_heads: i32,
    /// The number of elements per head.
    pub head_dim: i32,
    /// The factor by which scores are multiplied.
    pub scale: f32,
    /// The limit `cap` of scores, which become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// The norm of queries, before rotation.
    pub q_norm: Option<HeadNorm>,
    /// The norm of keys, before rotation.
    pub k_norm: Option<HeadNorm>,
    /// The rotary embedding; `None` for a layer without positions.
    pub rotation: Option<Rotation>,
    /// The sinks, float32 `[n_heads]`: for each head a score that enters the softmax but has no
    /// value.
    pub sinks: Option<Array>,
}

/// The keys and values of one row of a packed batch.
#[derive(Debug, Clone)]
pub struct KvView {
    /// The number of the row's tokens in this pass.
    pub length: i32,
    /// The number of the row's tokens before this pass.
    pub offset: i32,
    /// The keys, float32 or float16, `[1, Hkv, n, D]`; if packed, in the form that
    /// [`super::pack_kv`] returns.
    pub keys: Array,
    /// The values, in the form and of the type of the keys.
    pub values: Array,
    /// How keys and values are packed; `None` if they are floats.
    pub packing: Option<KvPacking>,
    /// The number of valid positions, from the first on. Of the `n` positions, the rest is ignored.
    pub filled: i32,
    /// `(kept, start)`: the first `kept` keys have the positions `0..kept`. The next key has the
    /// position `start`, and further keys follow in order. `None` means that the query is the last
    /// of its sequence and attends to all keys. With `None` and a `window`, the last `window` keys
    /// are a ring buffer: position `p` is in its slot `(p - kept) % window`.
    pub order: Option<(i32, i32)>,
    /// The size of the sliding window. A query attends to the kept keys, and to the last `window`
    /// of the other keys.
    pub window: Option<i32>,
}

/// How the distance between two positions limits bidirectional attention.
#[derive(Debug, Clone, Copy, Default)]
pub struct Locality<'a> {
    /// The maximum distance to an attended position; `None` if unlimited.
    pub reach: Option<i32>,
    /// For each query head the factor of the distance, which is subtracted from the score (`ALiBi`;
    /// Press et al. 2021, arXiv:2108.12409); `None` if the distance does not matter.
    pub slopes: Option<&'a [f32]>,
}

/// A [`KvView`] without its arrays.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvViewShape {
    pub length: i32,
    pub offset: i32,
    /// The capacity of the arrays, in positions.
    pub capacity: i32,
    pub kv_type: KvType,
    pub filled: i32,
    pub order: Option<(i32, i32)>,
    pub window: Option<i32>,
}

/// The type of a cache that has this packing; `None` if the kernels do not support it.
pub(super) fn kv_type(cache: &Array, packing: Option<KvPacking>) -> Option<KvType> {
    match (cache.dtype(), packing) {
        (Dtype::Float32, None) => Some(KvType::Float32),
        (Dtype::Float16, None) => Some(KvType::Float16),
        (Dtype::Uint32, Some(packing)) => Some(KvType::Packed(packing)),
        _ => None,
    }
}

fn fault(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Shape, "cpu::attention", message)
}

/// The total length of rows with these lengths and offsets. All positions must fit into `i32`.
pub(super) fn total(rows: impl Iterator<Item = (i32, i32)>) -> Result<i32> {
    let mut total = 0i32;
    for (length, offset) in rows {
        let possible = length >= 0 && offset.checked_add(length).is_some();
        total = (total.checked_add(length).filter(|_| possible)).ok_or_else(|| {
            fault("a sequence has a length, offset or order that does not fit its cache")
        })?;
    }
    Ok(total)
}

impl Heads {
    /// The number of elements of a row in a packed projection of queries, keys and values. `None`
    /// for invalid heads.
    fn width(&self) -> Option<i32> {
        let sane = self.n_heads.min(self.n_kv_heads).min(self.head_dim) > 0
            && self.n_heads % self.n_kv_heads == 0;
        let heads = self.n_kv_heads.checked_mul(2)?.checked_add(self.n_heads)?;
        heads.checked_mul(self.head_dim).filter(|_| sane)
    }

    /// Checks the packed projection. Returns [`Self::width`].
    fn check(&self, packed: &Array, total: i32) -> Result<usize> {
        Self::check_width(packed, total, self.check_parts()?)
    }

    /// Checks that there are `total` rows of `width` float32. Returns `width`.
    fn check_width(packed: &Array, total: i32, width: usize) -> Result<usize> {
        let fits = |shape: &[i32]| matches!(*shape, [1, tokens, last] if tokens == total && dim(last) == width);
        if packed.dtype() != Dtype::Float32 || !fits(packed.shape()) {
            let wanted = format!("needs float32 [1, {total}, {width}]");
            return Err(fault(wanted).with_inputs(&[packed]));
        }
        Ok(width)
    }

    /// Checks everything that does not depend on the tokens. Returns [`Self::width`].
    pub(super) fn check_parts(&self) -> Result<usize> {
        let Some(width) = self.width() else {
            return Err(fault(format!(
                "{} query heads and {} key heads of {} elements are not possible",
                self.n_heads, self.n_kv_heads, self.head_dim
            )));
        };
        if let Some(rotation) = &self.rotation
            && rotation.radians.len() * 2 > dim(self.head_dim)
        {
            return Err(fault("the rotation has more elements than a head"));
        }
        for (norm, n) in [
            (self.q_norm.as_ref().map(|n| &n.weight), self.head_dim),
            (self.k_norm.as_ref().map(|n| &n.weight), self.head_dim),
            (self.sinks.as_ref(), self.n_heads),
        ] {
            if let Some(a) = norm
                && (a.dtype() != Dtype::Float32 || a.shape() != [n])
            {
                return Err(fault(format!("needs float32 [{n}]")).with_inputs(&[a]));
            }
        }
        Ok(dim(width))
    }

    /// Returns the keys of a packed projection `[1, T, (H + 2 Hkv) * D]` after norm and rotation,
    /// `[1, Hkv, T, D]`. `rows` has the length and the offset of each row.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if shapes or types do not match; MLX's message if the current stream is
    /// not on the CPU.
    pub fn keys(&self, packed: &Array, rows: &[(i32, i32)]) -> Result<Array> {
        let total = total(rows.iter().copied())?;
        let width = self.check(packed, total)?;
        let mut inputs = vec![packed];
        inputs.extend(self.k_norm.iter().map(|norm| &norm.weight));
        let work = ProjectKeys(KvWrite {
            heads: dim(self.n_kv_heads),
            capacity: dim(total),
            head_dim: dim(self.head_dim),
            width,
            first_column: dim(self.n_heads) * dim(self.head_dim),
            first_row: 0,
            slot: 0,
            positions: TokenPositions::Any(positions(rows)),
            eps: self.k_norm.as_ref().map(|norm| norm.eps),
            rotation: self.rotation.clone(),
            kv_type: KvType::Float32,
            isa: Isa::detect(),
        });
        let shape = [1, self.n_kv_heads, total, self.head_dim];
        host_op::add("cpu::keys", OpKind::Opaque, work, &inputs, &shape)
    }

    /// Writes the keys of some tokens of a packed projection into `cache`, `[1, Hkv, n, D]`, at the
    /// tokens' positions, after norm and rotation. Returns the updated cache. The memory of `cache`
    /// is reused if nothing else refers to it. For a float16 cache, values are rounded to the
    /// nearest float16 and clamped to its finite range. A cache with a packing has the form that
    /// [`super::pack_kv`] returns.
    ///
    /// # Errors
    /// Those of [`Self::keys`]; also if tokens or positions do not exist.
    pub fn store_keys(
        &self,
        (cache, packing): (&Array, Option<KvPacking>),
        packed: &Array,
        tokens: TokenRange,
    ) -> Result<Array> {
        let mut inputs = vec![cache, packed];
        inputs.extend(self.k_norm.iter().map(|norm| &norm.weight));
        let total = packed.dim(1)?;
        self.check(packed, total)?;
        let kv_type = required_type(cache, packing)?;
        let work = self.plan_keys((cache.shape(), kv_type), total, tokens)?;
        write("cpu::store_keys", work, &inputs, cache)
    }

    /// The work that stores the keys of `tokens` in a cache with the shape `cache`. The packed
    /// projection has `total` rows.
    pub(super) fn plan_keys(
        &self,
        cache: (&[i32], KvType),
        total: i32,
        tokens: TokenRange,
    ) -> Result<KvWrite> {
        Ok(KvWrite {
            eps: self.k_norm.as_ref().map(|norm| norm.eps),
            rotation: self.rotation.clone(),
            ..self.plan_store(cache, total, tokens, dim(self.n_heads))?
        })
    }

    /// The work that stores the values of `tokens` in a cache with the shape `cache`. The packed
    /// projection has `total` rows.
    pub(super) fn plan_values(
        &self,
        cache: (&[i32], KvType),
        total: i32,
        tokens: TokenRange,
    ) -> Result<KvWrite> {
        let before = dim(self.n_heads) + dim(self.n_kv_heads);
        self.plan_store(cache, total, tokens, before)
    }

    /// [`Self::store_keys`] for values, which have no norm and no rotation.
    ///
    /// # Errors
    /// Those of [`Self::store_keys`].
    pub fn store_values(
        &self,
        (cache, packing): (&Array, Option<KvPacking>),
        packed: &Array,
        tokens: TokenRange,
    ) -> Result<Array> {
        let total = packed.dim(1)?;
        self.check(packed, total)?;
        let kv_type = required_type(cache, packing)?;
        let work = self.plan_values((cache.shape(), kv_type), total, tokens)?;
        write("cpu::store_values", work, &[cache, packed], cache)
    }

    /// The work that stores `n_kv_heads` heads of each packed row. `heads` is the number of heads
    /// before them in the row.
    fn plan_store(
        &self,
        (cache, kv_type): (&[i32], KvType),
        total: i32,
        tokens: TokenRange,
        heads: usize,
    ) -> Result<KvWrite> {
        let width = self.check_parts()?;
        let (n, d) = (self.n_kv_heads, self.head_dim);
        let stored = self.stored(kv_type)?;
        let capacity = match *cache {
            [1, heads, capacity, width] if (heads, width) == (n, stored) => capacity,
            _ => {
                let message =
                    format!("a cache needs the shape [1, {n}, n, {stored}], not {cache:?}");
                return Err(fault(message));
            }
        };
        let TokenRange {
            first: from,
            length,
            offset,
        } = tokens;
        let within = |from: i32, most: i32| from >= 0 && from <= most - length;
        if length < 1 || length > capacity || !within(from, total) || !within(offset, capacity) {
            return Err(fault("the range is outside the tokens or the cache"));
        }
        Ok(KvWrite {
            heads: dim(n),
            capacity: dim(capacity),
            head_dim: dim(d),
            width,
            first_column: heads * dim(d),
            first_row: dim(from),
            slot: dim(offset),
            positions: TokenPositions::From(offset, dim(length)),
            eps: None,
            rotation: None,
            kv_type,
            isa: Isa::detect(),
        })
    }

    /// The length of the last axis of a cache.
    fn stored(&self, kv_type: KvType) -> Result<i32> {
        if let KvType::Packed(packing) = kv_type {
            check_packing(self.head_dim, packing)?;
        }
        let stored = i32::try_from(kv_type.row(dim(self.head_dim)));
        stored.map_err(|_| fault("the heads are too large"))
    }

    /// Returns the attention output of the queries of a packed projection, `[1, T, H * D]`. With
    /// `last`, returns only the output of each row's last query, `[1, rows, H * D]`. The rows in
    /// `sequences` must already include the keys and values of this pass. So `packed` may consist
    /// of the queries alone, `[1, T, H * D]`.
    ///
    /// # Errors
    /// Those of [`Self::keys`].
    pub fn attend(&self, packed: &Array, sequences: &[KvView], last: bool) -> Result<Array> {
        let total = total(
            sequences
                .iter()
                .map(|sequence| (sequence.length, sequence.offset)),
        )?;
        let whole = self.check_parts()?;
        let queries = dim(self.n_heads * self.head_dim);
        let width = match packed.shape().last() {
            Some(&last) if dim(last) == queries => queries,
            _ => whole,
        };
        Self::check_width(packed, total, width)?;
        let mut inputs = vec![packed];
        inputs.extend(self.q_norm.iter().map(|norm| &norm.weight));
        inputs.extend(&self.sinks);
        let first = inputs.len();
        let mut views = Vec::with_capacity(sequences.len());
        for sequence in sequences {
            inputs.extend([&sequence.keys, &sequence.values]);
            views.push(self.view(sequence)?);
        }
        let work = Attention {
            width,
            ..self.plan_attention(&views, last)?
        };
        let n = i32::try_from(work.queries.len()).unwrap_or(i32::MAX);
        let shape = [1, n, self.n_heads * self.head_dim];
        host_op::add_strided("cpu::attention", work, &inputs, first, &shape)
    }

    fn view(&self, sequence: &KvView) -> Result<KvViewShape> {
        let capacity = sequence.keys.dim(2)?;
        let (keys, values) = (&sequence.keys, &sequence.values);
        let kv_type = required_type(keys, sequence.packing)?;
        let shape = [1, self.n_kv_heads, capacity, self.stored(kv_type)?];
        let fits = |a: &Array| a.shape() == shape && a.dtype() == keys.dtype();
        if !(fits(keys) && fits(values)) {
            let message = format!("a row needs {shape:?}, keys and values of one type");
            return Err(fault(message).with_inputs(&[keys, values]));
        }
        Ok(KvViewShape {
            length: sequence.length,
            offset: sequence.offset,
            capacity,
            kv_type,
            filled: sequence.filled,
            order: sequence.order,
            window: sequence.window,
        })
    }

    /// Plans the attention over these rows. The inputs of the work are the packed rows, the norm's
    /// weight and the sinks (each if there are any), and each row's keys and values.
    pub(super) fn plan_attention(
        &self,
        sequences: &[KvViewShape],
        last: bool,
    ) -> Result<Attention> {
        let width = self.check_parts()?;
        let mut queries = Vec::new();
        let mut at = 0;
        let mut plans = Vec::with_capacity(sequences.len());
        for (i, sequence) in sequences.iter().enumerate() {
            let fixed = sequence.order.map_or(0, |(fixed, _)| fixed);
            let filled = sequence.filled;
            if sequence.length < 1
                || sequence.offset < 0
                || fixed < 0
                || fixed > filled
                || filled > sequence.capacity
            {
                return Err(fault(
                    "a sequence has a length, offset or order that does not fit its cache",
                ));
            }
            let skipped = if last { sequence.length - 1 } else { 0 };
            for j in skipped..sequence.length {
                queries.push(Query {
                    sequence: i,
                    row: dim(at + j),
                    position: sequence.offset + j,
                });
            }
            at += sequence.length;
            plans.push(AttentionMask {
                len: dim(filled),
                kv_type: sequence.kv_type,
                order: sequence.order.map(|(fixed, start)| (dim(fixed), start)),
                window: sequence.window,
                around: None,
            });
        }
        Ok(self.attention(width, queries, plans))
    }

    fn attention(&self, width: usize, queries: Vec<Query>, plans: Vec<AttentionMask>) -> Attention {
        Attention {
            heads: dim(self.n_heads),
            queries_per_kv: dim(self.n_heads / self.n_kv_heads),
            head_dim: dim(self.head_dim),
            width,
            scale: self.scale,
            softcap: self.softcap,
            eps: self.q_norm.as_ref().map(|n| n.eps),
            sinks: self.sinks.is_some(),
            slopes: Vec::new(),
            rotation: self.rotation.clone(),
            queries,
            plans,
            isa: Isa::detect(),
        }
    }

    /// Returns the attention output `[1, T, H * D]` of a packed projection `[1, T, (H + 2 Hkv) *
    /// D]`, which concatenates sequences of the given lengths. The positions of each sequence begin
    /// at 0. There is no causal mask: a query attends to positions of its sequence before and after
    /// it, within the limits of `locality`.
    ///
    /// # Errors
    /// Those of [`Self::keys`]; also if the number of slopes in `locality` is not the number of
    /// heads.
    /// ```
    /// use mlx_rs_core::{Array, Device, Stream, cpu::{Heads, Locality}};
    /// Stream::default_of(Device::cpu())?.scope(|| -> mlx_rs_core::Result<()> {
    ///     let heads = Heads {
    ///         n_heads: 1,
    ///         n_kv_heads: 1,
    ///         head_dim: 1,
    ///         scale: 1.0,
    ///         softcap: None,
    ///         q_norm: None,
    ///         k_norm: None,
    ///         rotation: None,
    ///         sinks: None,
    ///     };
    ///     // Three tokens with equal keys: two of one sequence, and one of another.
    ///     let packed = [0.0f32, 0.0, 2.0, 0.0, 0.0, 4.0, 0.0, 0.0, 9.0];
    ///     let packed = Array::from_slice(&packed, &[1, 3, 3])?;
    ///     let found = heads.attend_around(&packed, &[2, 1], Locality::default())?;
    ///     assert_eq!(found.to_vec::<f32>()?, [3.0, 3.0, 9.0]);
    ///     let own = Locality { reach: Some(0), slopes: None };
    ///     let own = heads.attend_around(&packed, &[2, 1], own)?;
    ///     assert_eq!(own.to_vec::<f32>()?, [2.0, 4.0, 9.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    pub fn attend_around(
        &self,
        packed: &Array,
        lengths: &[i32],
        locality: Locality<'_>,
    ) -> Result<Array> {
        let Locality { reach, slopes } = locality;
        if let Some(slopes) = slopes
            && slopes.len() != dim(self.n_heads)
        {
            let message = format!("{} slopes for {} heads", slopes.len(), self.n_heads);
            return Err(fault(message));
        }
        let rows = || lengths.iter().map(|&length| (length, 0));
        let total = total(rows())?;
        let width = self.check(packed, total)?;
        if lengths.iter().any(|&n| n < 1) || reach.is_some_and(|n| n < 0) {
            return Err(fault("a sequence without tokens, or a negative reach"));
        }
        let (n, d) = (self.n_kv_heads, self.head_dim);
        let part = |from: i32| -> Result<Array> {
            packed
                .slice_axis(2, from * d, (from + n) * d)?
                .reshape(&[1, total, n, d])?
                .transpose_axes(&[0, 2, 1, 3]) // [1, T, Hkv, D] -> [1, Hkv, T, D]
        };
        let keys = match (&self.k_norm, &self.rotation) {
            (None, None) => part(self.n_heads)?,
            _ => self.keys(packed, &rows().collect::<Vec<_>>())?,
        };
        let values = part(self.n_heads + n)?;
        let mut inputs = vec![packed];
        inputs.extend(self.q_norm.iter().map(|norm| &norm.weight));
        inputs.extend(&self.sinks);
        let first = inputs.len();
        inputs.extend([&keys, &values]);
        let mut queries = Vec::with_capacity(dim(total));
        let mut plans = Vec::with_capacity(lengths.len());
        for (sequence, &length) in lengths.iter().enumerate() {
            let first = queries.len();
            queries.extend((0..length).map(|position| Query {
                sequence,
                row: first + dim(position),
                position,
            }));
            plans.push(AttentionMask {
                len: dim(length),
                kv_type: KvType::Float32,
                order: None,
                window: None,
                around: Some(Around { first, reach }),
            });
        }
        let work = Attention {
            slopes: slopes.map(<[f32]>::to_vec).unwrap_or_default(),
            ..self.attention(width, queries, plans)
        };
        let shape = [1, total, self.n_heads * d];
        host_op::add_strided("cpu::attention", work, &inputs, first, &shape)
    }
}

/// Adds an operation that writes into `cache`, the first of `inputs`.
fn write(op: &'static str, work: KvWrite, inputs: &[&Array], cache: &Array) -> Result<Array> {
    match work.kv_type {
        KvType::Float32 => host_op::add_in_place::<f32, _>(op, work, inputs, cache.shape()),
        KvType::Float16 => host_op::add_in_place::<u16, _>(op, work, inputs, cache.shape()),
        KvType::Packed(_) => host_op::add_in_place::<u32, _>(op, work, inputs, cache.shape()),
    }
}

/// The type of a cache that has this packing, or an error if the kernels do not support it.
fn required_type(cache: &Array, packing: Option<KvPacking>) -> Result<KvType> {
    kv_type(cache, packing).ok_or_else(|| {
        let wanted = match packing {
            None => "float32 or float16",
            Some(_) => "words (uint32)",
        };
        fault(format!("a cache needs {wanted}")).with_inputs(&[cache])
    })
}

/// Refuses heads that a packing does not divide into groups.
pub(super) fn check_packing(head_dim: i32, packing: KvPacking) -> Result<()> {
    if head_dim > 0 && dim(head_dim).is_multiple_of(packing.group()) {
        return Ok(());
    }
    Err(fault(format!(
        "a head of {head_dim} elements cannot be packed in groups of {}",
        packing.group()
    )))
}

/// The position of each token.
fn positions(rows: &[(i32, i32)]) -> Vec<i32> {
    rows.iter()
        .flat_map(|&(length, offset)| offset..offset + length)
        .collect()
}
