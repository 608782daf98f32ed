//! The flags of caches: the format of keys and values, and the directory of computed prompts.

use std::path::PathBuf;

use inference::LoadOptions;

use crate::cli::terminal::failure::Failure;

/// Default number of values of a quantized cache that share a scale.
const KV_GROUP_SIZE: u32 = 64;

/// Default number of positions above which the KV cache is quantized, as on mlx-lm's command line.
/// Up to it, the cache is small and stays exact.
const QUANTIZED_KV_START: usize = 5000;

/// The format of keys and values in the cache.
#[derive(Debug, Clone, clap::Args)]
pub struct KvArgs {
    /// Bits per value of the key/value cache: 32, 16 (float16), or quantized 8, 6, 5, 4, 3 or 2
    #[arg(id = "kv_bits", long = "kv-bits", value_name = "BITS")]
    pub bits: Option<u32>,
    /// Values of the quantized cache that share a scale: 32, 64 or 128
    #[arg(id = "kv_group_size", long = "kv-group-size", value_name = "N", default_value_t = KV_GROUP_SIZE, requires = "kv_bits")]
    group_size: u32,
    /// Quantize the cache once it has more than this many positions; 0 quantizes from the start
    #[arg(long, value_name = "N", default_value_t = QUANTIZED_KV_START, requires = "kv_bits")]
    quantized_kv_start: usize,
}

impl Default for KvArgs {
    fn default() -> Self {
        Self {
            bits: None,
            group_size: KV_GROUP_SIZE,
            quantized_kv_start: QUANTIZED_KV_START,
        }
    }
}

impl KvArgs {
    /// Whether the flags select a quantized cache.
    pub fn is_quantized(&self) -> bool {
        self.bits.is_some_and(|bits| bits < 16)
    }

    /// Refuses flags of quantized caches for caches that are not quantized.
    pub fn check(&self) -> Result<(), Failure> {
        let is_usual =
            self.group_size == KV_GROUP_SIZE && self.quantized_kv_start == QUANTIZED_KV_START;
        if self.bits.is_some() && !self.is_quantized() && !is_usual {
            return Err(Failure::usage(
                "--kv-group-size and --quantized-kv-start need --kv-bits below 16, which quantizes \
                 the cache",
            ));
        }
        Ok(())
    }

    /// Sets these flags in `options`. Without `--kv-bits` they have no effect.
    pub fn set(&self, options: &mut LoadOptions) {
        options.kv_bits = self.bits;
        if self.bits.is_some() {
            options.kv_group_size = self.group_size;
            options.quantized_kv_start = self.quantized_kv_start;
        }
    }
}

/// The directory in which computed prompts are kept for later processes.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CacheDirArgs {
    /// Keep computed prompts in this directory, which is created if it is missing. After a restart,
    /// a conversation continues without computing them again
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Maximum total size of the files in that directory; the least recently used prompts are
    /// removed first [default: 4GiB]
    #[arg(long, value_name = "SIZE", requires = "cache_dir", value_parser = size)]
    cache_dir_size: Option<u64>,
}

impl CacheDirArgs {
    /// Sets these flags in `options`.
    pub fn set(&self, options: &mut LoadOptions) {
        options.cache_dir.clone_from(&self.cache_dir);
        if let Some(bytes) = self.cache_dir_size {
            options.cache_dir_bytes = bytes;
        }
    }
}

/// Parses a number of bytes with a unit.
pub fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "kb" => 1_000,
        "m" | "mib" => 1 << 20,
        "mb" => 1_000_000,
        "g" | "gib" => 1 << 30,
        "gb" => 1_000_000_000,
        other => {
            return Err(format!(
                "{other:?} is no unit; use B, KB, MB, GB, KiB, MiB or GiB"
            ));
        }
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "must be a whole number with a unit".to_owned())?;
    match number.checked_mul(unit) {
        Some(0) | None => Err("must be from 1 byte to 16 EiB".to_owned()),
        Some(bytes) => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("5GiB"), Ok(5 << 30));
        assert_eq!(size("500 MB"), Ok(500_000_000));
        assert_eq!(size("100"), Ok(100));
        for bad in ["", "0", "GB", "-1", "1.5GB", "5 parsecs", "99999999999GiB"] {
            assert!(size(bad).is_err(), "{bad:?}");
        }
    }
}
