//! Options of a conversion.

use inference::{Error, ErrorKind, Result};

use super::float_type::FloatType;
use super::quantization::Quantization;
use super::rules::base_format;

/// The default size of a shard, in bytes: 5 GiB, as in `mlx-lm`.
pub const MAX_SHARD_BYTES: u64 = 5 << 30;

/// Options of a conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConvertOptions {
    /// Quantize matrices.
    pub quantize: Option<Quantization>,
    /// Dequantize quantized matrices.
    pub dequantize: bool,
    /// The type of all floats. `None` keeps each type; for GGUF, it means the smallest lossless
    /// type.
    pub dtype: Option<FloatType>,
    /// The maximum size of a shard, in bytes of tensors. A larger tensor gets its own shard.
    pub max_shard_bytes: u64,
    /// Whether to replace an output directory that is not empty.
    pub force: bool,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            quantize: None,
            dequantize: false,
            dtype: None,
            max_shard_bytes: MAX_SHARD_BYTES,
            force: false,
        }
    }
}

impl ConvertOptions {
    /// Returns options for an unchanged copy.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`Self::quantize`].
    #[must_use]
    pub fn with_quantize(mut self, quantize: Quantization) -> Self {
        self.quantize = Some(quantize);
        self
    }

    /// Sets [`Self::dequantize`].
    #[must_use]
    pub fn with_dequantize(mut self, yes: bool) -> Self {
        self.dequantize = yes;
        self
    }

    /// Sets [`Self::dtype`].
    #[must_use]
    pub fn with_dtype(mut self, dtype: FloatType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Sets [`Self::max_shard_bytes`].
    #[must_use]
    pub fn with_max_shard_bytes(mut self, bytes: u64) -> Self {
        self.max_shard_bytes = bytes;
        self
    }

    /// Sets [`Self::force`].
    #[must_use]
    pub fn with_force(mut self, yes: bool) -> Self {
        self.force = yes;
        self
    }

    /// Checks all options that can be checked without a model.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`], with the conflicting options.
    pub fn validate(&self) -> Result<()> {
        let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
        if self.quantize.is_some() && self.dequantize {
            return bad("choose either to quantize or to dequantize".to_owned());
        }
        if self.max_shard_bytes == 0 {
            return bad("the shard size is 0; it must be at least one byte".to_owned());
        }
        if let Some(quantize) = &self.quantize {
            base_format(quantize)?;
        }
        Ok(())
    }
}
