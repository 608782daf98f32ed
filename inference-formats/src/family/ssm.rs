//! Common properties of GGUF files with Mamba-2: sizes, and names of its tensors.

use super::GgufHeader;
use crate::error::Result;
use crate::limits;

/// The keys of the number of heads and of the width in files without attention.
pub(super) const SIZES: (&str, &str) = ("ssm.time_step_rank", "ssm.inner_size");

/// The sizes of Mamba-2.
pub(super) struct Sizes {
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
    pub state: usize,
    pub groups: usize,
    /// Positions that enter the convolution.
    pub conv: usize,
    /// Elements of all heads.
    pub inner: usize,
}

impl Sizes {
    /// The sizes in the metadata.
    ///
    /// # Errors
    /// When a key is missing or out of range, or heads do not divide the inner size.
    pub fn read(header: &GgufHeader<'_>) -> Result<Self> {
        let keys = &header.keys;
        let inner = keys.required("ssm.inner_size", limits::INTERMEDIATE)?;
        let heads = keys.required("ssm.time_step_rank", limits::HEADS)?;
        if !inner.is_multiple_of(heads) {
            let message = format!("is {inner}, which is not a multiple of {heads} heads");
            return Err(keys.wrong("ssm.inner_size", message));
        }
        Ok(Self {
            heads,
            dim: inner / heads,
            state: keys.required("ssm.state_size", limits::HEAD_DIM)?,
            groups: keys.required("ssm.group_count", limits::HEADS)?,
            conv: keys.required("ssm.conv_kernel", limits::HIDDEN)?,
            inner,
        })
    }
}

/// Pairs of names for matrices, convolutions and norms: the name in a block of a GGUF file, and the
/// name in a checkpoint with the prefix `$at`. `$more` adds further pairs.
macro_rules! names {
    ($at:literal $(, $more:expr)* $(,)?) => {
        &[
            ("ssm_in", concat!($at, ".in_proj")),
            ("ssm_conv1d", concat!($at, ".conv1d")),
            ("ssm_norm", concat!($at, ".norm")),
            ("ssm_out", concat!($at, ".out_proj")),
            $($more),*
        ]
    };
}

/// Vectors with one number per head. GGUF files store decay rates, while checkpoints store the
/// logarithms of the negated rates; `rates` is a name that only GGUF files use.
macro_rules! vectors {
    ($at:literal $(, $more:expr)* $(,)?) => {
        &[
            ("ssm_a", concat!($at, ".rates")),
            ("ssm_d", concat!($at, ".D")),
            ("ssm_dt.bias", concat!($at, ".dt_bias")),
            $($more),*
        ]
    };
}

pub(super) use {names, vectors};
