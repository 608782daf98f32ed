//! Encoding of tensors' numbers in GGUF's types.

use half::{bf16, f16};

/// The type of matrices. Vectors, such as the weights of norms, are always float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GgufType {
    /// 32 bits.
    F32,
    /// 16 bits, as mlx-lm exports them.
    #[default]
    F16,
    /// The upper half of a float32.
    Bf16,
    /// 8 bits in blocks of 32, which share a scale. Rows are F16 if their length is not a multiple
    /// of 32.
    Q8_0,
}

/// The count of numbers that share a scale in [`GgufType::Q8_0`].
pub(super) const BLOCK: usize = 32;

impl std::str::FromStr for GgufType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            "q8_0" => Ok(Self::Q8_0),
            other => {
                // Such types are Q4_K_M and the i-quants, for example.
                let is_quant = other.contains("_k") || other.starts_with(['q', 'i']);
                let how = match is_quant {
                    true => "; llama.cpp's `llama-quantize` makes others of an f16 or bf16 file",
                    false => "",
                };
                Err(format!("must be f16, q8_0, bf16 or f32{how}"))
            }
        }
    }
}

impl std::fmt::Display for GgufType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
        })
    }
}

impl GgufType {
    /// The type's number in ggml.
    pub(super) fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
        }
    }

    /// The value of `general.file_type`, the type of most matrices.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Bf16 => 32,
        }
    }

    /// The type of a tensor of this shape.
    pub(super) fn of(self, shape: &[usize]) -> Self {
        let row = shape.last().copied().unwrap_or(0);
        match self {
            _ if shape.len() < 2 => Self::F32,
            Self::Q8_0 if !row.is_multiple_of(BLOCK) => Self::F16,
            unchanged => unchanged,
        }
    }

    /// The bytes of `numbers` numbers.
    pub(super) fn bytes(self, numbers: u64) -> u64 {
        match self {
            Self::F32 => 4 * numbers,
            Self::F16 | Self::Bf16 => 2 * numbers,
            Self::Q8_0 => numbers / BLOCK as u64 * 34,
        }
    }

    /// The encoded numbers; `None` if one is out of the type's range.
    pub(super) fn encode(self, numbers: &[f32]) -> Option<Vec<u8>> {
        let mut bytes = Vec::with_capacity(numbers.len() * 4);
        match self {
            Self::F32 => bytes.extend(numbers.iter().flat_map(|x| x.to_le_bytes())),
            Self::F16 => {
                for x in numbers {
                    let half = f16::from_f32(*x);
                    if half.is_infinite() && x.is_finite() {
                        return None;
                    }
                    bytes.extend(half.to_le_bytes());
                }
            }
            Self::Bf16 => {
                bytes.extend(
                    numbers
                        .iter()
                        .flat_map(|x| bf16::from_f32(*x).to_le_bytes()),
                );
            }
            Self::Q8_0 => {
                for block in numbers.chunks(BLOCK) {
                    // As in ggml, the largest number becomes 127, and codes are rounded before the
                    // scale.
                    let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    let scale = most / 127.0;
                    let stored = f16::from_f32(scale);
                    if stored.is_infinite() {
                        return None;
                    }
                    bytes.extend(stored.to_le_bytes());
                    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                    bytes.extend(block.iter().map(|x| ((x * inverse).round() as i8) as u8));
                }
            }
        }
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_names_and_others_are_told_a_way() {
        for name in ["f32", "f16", "bf16", "q8_0"] {
            assert_eq!(name.parse::<GgufType>().unwrap().to_string(), name);
        }
        for name in ["q4_K_M", "IQ3_S", "q5_0"] {
            let error = name.parse::<GgufType>().unwrap_err();
            assert!(error.contains("llama-quantize"), "{name}: {error}");
        }
        assert!(!"x".parse::<GgufType>().unwrap_err().contains("llama"));
    }

    #[test]
    fn blocks_are_ggml_s() {
        let mut numbers = vec![0.0f32; 64];
        (numbers[0], numbers[1], numbers[2]) = (127.0, -127.0, 63.4);
        let bytes = GgufType::Q8_0.encode(&numbers).unwrap();
        assert_eq!(bytes.len(), 68);
        assert_eq!(bytes[..2], f16::from_f32(1.0).to_le_bytes());
        assert_eq!(bytes[2..5], [127, 0x81, 63]);
        assert!(bytes[34..].iter().all(|b| *b == 0));
        assert_eq!(GgufType::Q8_0.bytes(64), 68);
        assert!(GgufType::F16.encode(&[70_000.0]).is_none());
        assert!(GgufType::F16.encode(&[f32::INFINITY]).is_some());
        assert_eq!(GgufType::Q8_0.of(&[4, 48]), GgufType::F16);
        assert_eq!(GgufType::Q8_0.of(&[64]), GgufType::F32);
    }
}
