//! The memory of a token's keys and values.

use crate::cache::CacheOptions;

/// The bytes of a token's keys and values, over all layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheCost {
    /// Bytes of an unquantized token.
    plain: u64,
    /// Bytes of a quantized token, and the number of tokens from which on the cache is quantized.
    packed: Option<(u64, u64)>,
    /// The maximum number of tokens that the cache keeps.
    bound: Option<u64>,
}

impl CacheCost {
    /// The cost of caches with `numbers` elements per token, for a compute type of `size` bytes.
    pub(crate) fn new(caches: CacheOptions, numbers: u64, size: usize) -> Self {
        let CacheOptions { bound, packing, .. } = caches;
        let size = size as u64;
        let packed = packing.map(|packing| {
            // Each group has a scale and a bias.
            let groups = numbers / u64::from(packing.group_size.unsigned_abs()).max(1);
            let bits = numbers.saturating_mul(u64::from(packing.bits.unsigned_abs()));
            let bytes = (bits / 8).saturating_add(groups.saturating_mul(2 * size));
            (bytes, u64::from(packing.start.unsigned_abs()))
        });
        Self {
            plain: numbers.saturating_mul(if caches.half { 2 } else { size }),
            packed,
            bound: bound.map(|n| u64::from(n.unsigned_abs())),
        }
    }

    /// Bytes of a token in a long sequence.
    pub(crate) fn per_token(self) -> u64 {
        self.packed.map_or(self.plain, |(bytes, _)| bytes)
    }

    /// The number of tokens that fit into `bytes`; [`u64::MAX`] if any number of tokens fits.
    pub(crate) fn max_tokens(self, bytes: u64) -> u64 {
        let fit = |each: u64| bytes.checked_div(each).unwrap_or(u64::MAX);
        let plain = fit(self.plain);
        let tokens = match self.packed {
            Some((each, start)) if plain >= start => fit(each),
            _ => plain,
        };
        match self.bound {
            // The cache drops the oldest tokens, so any number of tokens fits.
            Some(bound) if tokens >= bound => u64::MAX,
            _ => tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use inference::LoadOptions;

    use super::super::options::cache_options;
    use super::*;

    #[test]
    fn packed_and_bounded_caches_have_more_room() {
        let cost = |options: &LoadOptions| {
            CacheCost::new(cache_options(options, 64, 4, false).unwrap(), 1024, 4)
        };
        let plain = cost(&LoadOptions::new());
        assert_eq!((plain.per_token(), plain.max_tokens(40_960)), (4096, 10));
        let mut options = LoadOptions::new();
        options.kv_bits = Some(4);
        options.kv_group_size = 32;
        options.quantized_kv_start = 0;
        // 4 bits per element, and two float32 per group of 32 elements.
        let packed = cost(&options);
        assert_eq!((packed.per_token(), packed.max_tokens(40_960)), (768, 53));
        // 20 unquantized tokens must fit before any token is quantized.
        options.quantized_kv_start = 20;
        assert_eq!(cost(&options).max_tokens(40_960), 10);
        options.quantized_kv_start = 10;
        assert_eq!(cost(&options).max_tokens(40_960), 53);
        let half = cost(&LoadOptions::new().with_kv_bits(16));
        assert_eq!((half.per_token(), half.max_tokens(40_960)), (2048, 20));
        assert_eq!(cost(&LoadOptions::new().with_kv_bits(32)).per_token(), 4096);
        let by_default = cache_options(&LoadOptions::new(), 64, 4, true).unwrap();
        assert_eq!(CacheCost::new(by_default, 1024, 4).per_token(), 2048);
        let wide = LoadOptions::new().with_kv_bits(32);
        let wide = cache_options(&wide, 64, 4, true).unwrap();
        assert_eq!(CacheCost::new(wide, 1024, 4).per_token(), 4096);
        // A compute type of 16 bits is also the type of caches.
        let of_16 = |bits| cache_options(&LoadOptions::new().with_kv_bits(bits), 64, 2, false);
        assert_eq!(
            CacheCost::new(of_16(16).unwrap(), 1024, 2).per_token(),
            2048
        );
        let refused = of_16(32).unwrap_err();
        assert!(refused.to_string().contains("kv_bits is 32"), "{refused}");
        let mut options = LoadOptions::new();
        options.context_len = Some(8);
        assert_eq!(cost(&options).max_tokens(40_960), u64::MAX);
        assert_eq!(cost(&options).max_tokens(7 * 4096), 7);
        options.context_len = None;
        options.kv_bits = Some(4);
        options.kv_group_size = 128;
        let refused = cache_options(&options, 64, 4, false).unwrap_err();
        assert!(refused.to_string().contains("does not divide"), "{refused}");
    }
}
