//! Families that mlx-lm supports and this engine does not, each with the most similar supported
//! family for error messages.

/// Each entry: an unsupported `model_type`, the most similar supported one, and the missing
/// feature.
const NEAREST: [(&str, &str, &str); 21] = [
    ("Klear", "qwen3_moe", "router and shared experts"),
    ("afm7", "llama", "shared keys and adapters"),
    ("baichuan_m1", "llama", "convolutions of keys and values"),
    ("bailing_hybrid", "bailing_moe", "linear attention"),
    ("bailing_moe_linear", "bailing_moe", "linear attention"),
    ("bailing_moe_v3", "bailing_moe", "linear attention"),
    ("bitnet", "llama", "ternary matrices"),
    ("deepseek_v4", "deepseek_v3", "compressed attention"),
    ("deepseek_v41", "deepseek_v3", "compressed attention"),
    ("iquestloopcoder", "llama", "repeated blocks"),
    ("kimi_k25", "deepseek_v3", "packed experts"),
    ("lfm2-vl", "lfm2", "the vision part"),
    ("longcat_flash", "deepseek_v3", "double blocks"),
    ("nemotron-nas", "llama", "blocks of differing parts"),
    ("openelm", "llama", "layers of differing widths"),
    ("phi3small", "phi3", "block-sparse attention"),
    ("phixtral", "phi", "mixtures of experts"),
    ("plamo", "llama", "parallel blocks"),
    ("plamo2", "granitemoehybrid", "Mamba-1"),
    ("recurrent_gemma", "gemma2", "recurrent layers"),
    ("zamba2", "granitemoehybrid", "shared blocks"),
];

/// For an unsupported family, the most similar supported family and the missing feature.
pub fn nearest(model_type: &str) -> Option<(&'static str, &'static str)> {
    let entry = NEAREST.iter().find(|(name, ..)| *name == model_type)?;
    Some((entry.1, entry.2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Family;

    #[test]
    fn the_nearest_is_supported_and_the_other_is_not() {
        assert!(NEAREST.is_sorted_by(|a, b| a.0 < b.0));
        for (name, near, _) in NEAREST {
            assert!(Family::of(name).is_none(), "{name} is supported");
            let family = Family::of(near).unwrap_or_else(|| panic!("{near} is not"));
            assert!(!family.encoder, "{near}");
        }
        assert_eq!(
            nearest("zamba2"),
            Some(("granitemoehybrid", "shared blocks"))
        );
        assert_eq!(nearest("llama"), None);
    }
}
