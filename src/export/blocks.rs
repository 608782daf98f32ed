//! The tensor types that the export can write: the GGUF types with an encoder.

use inference_formats::quantization::{GgmlType, TYPES, encode};

/// The type of matrices. Norms, vectors and the routers of experts are always float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgufType(GgmlType);

impl GgufType {
    /// 32 bits.
    pub const F32: Self = Self(GgmlType::F32);
    /// IEEE float16, the type that mlx-lm exports.
    pub const F16: Self = Self(GgmlType::F16);
    /// bfloat16: the upper half of a float32.
    pub const BF16: Self = Self(GgmlType::BF16);
    /// 8-bit codes in blocks of 32 that share a scale. If a row's length is not a multiple of 32,
    /// the tensor is F16.
    pub const Q8_0: Self = Self(GgmlType::Q8_0);

    /// All types, by number.
    pub fn all() -> impl Iterator<Item = Self> {
        let written = TYPES.iter().filter(|row| row.is_written());
        written.map(|row| Self(row.kind))
    }

    /// The names of all types, as part of a sentence.
    ///
    /// ```
    /// assert_eq!(rust_mlx::export::GgufType::names(), "f32, f16, q8_0 or bf16");
    /// ```
    pub fn names() -> String {
        let mut names: Vec<_> = Self::all().map(|kind| kind.to_string()).collect();
        let last = names.pop().unwrap_or_default();
        format!("{} or {last}", names.join(", "))
    }
}

impl Default for GgufType {
    fn default() -> Self {
        Self::F16
    }
}

impl std::str::FromStr for GgufType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(known) = Self::all().find(|kind| kind.0.name().eq_ignore_ascii_case(text)) {
            return Ok(known);
        }
        // For example Q4_K_M and the i-quants.
        let other = text.to_ascii_lowercase();
        let is_quant = other.contains("_k") || other.starts_with(['q', 'i']);
        let how = match is_quant {
            true => "; llama.cpp's `llama-quantize` makes others of an f16 or bf16 file",
            false => "",
        };
        Err(format!("must be {}{how}", Self::names()))
    }
}

impl std::fmt::Display for GgufType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.name().to_ascii_lowercase())
    }
}

impl GgufType {
    /// The type's number in ggml.
    pub(super) fn id(self) -> u32 {
        self.0.id()
    }

    /// The value of `general.file_type`, the type of most matrices.
    pub(super) fn file_type(self) -> Option<u32> {
        let names = self.0.row()?.file_types;
        names.first().map(|(number, _)| *number)
    }

    /// Number of values and bytes of a block.
    fn block(self) -> (usize, usize) {
        self.0.block().unwrap_or((1, 1))
    }

    /// The type for a tensor of this shape.
    pub(super) fn of(self, shape: &[usize]) -> Self {
        let row = shape.last().copied().unwrap_or(0);
        match self {
            _ if shape.len() < 2 => Self::F32,
            blocked if !row.is_multiple_of(blocked.block().0) => Self::F16,
            unchanged => unchanged,
        }
    }

    /// The size of `numbers` values in bytes.
    pub(super) fn bytes(self, numbers: u64) -> u64 {
        let (block, bytes) = self.block();
        numbers / block as u64 * bytes as u64
    }

    /// The encoded values; `None` if a value is out of the type's range.
    pub(super) fn encode(self, numbers: &[f32]) -> Option<Vec<u8>> {
        encode(self.0, numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_names_and_others_are_told_a_way() {
        let all: Vec<String> = GgufType::all().map(|kind| kind.to_string()).collect();
        assert_eq!(all, ["f32", "f16", "q8_0", "bf16"]);
        for name in ["f32", "f16", "bf16", "q8_0"] {
            assert_eq!(name.parse::<GgufType>().unwrap().to_string(), name);
            let upper = name.to_ascii_uppercase();
            assert_eq!(upper.parse::<GgufType>().unwrap().to_string(), name);
        }
        for name in ["q4_K_M", "IQ3_S", "q5_0"] {
            let error = name.parse::<GgufType>().unwrap_err();
            assert!(error.contains("llama-quantize"), "{name}: {error}");
        }
        let error = "x".parse::<GgufType>().unwrap_err();
        assert_eq!(error, "must be f32, f16, q8_0 or bf16");
    }

    #[test]
    fn blocks_are_counted() {
        assert_eq!(GgufType::Q8_0.bytes(64), 68);
        assert_eq!(GgufType::Q8_0.encode(&[1.0; 64]).unwrap().len(), 68);
        assert!(GgufType::F16.encode(&[70_000.0]).is_none());
        assert_eq!(GgufType::Q8_0.of(&[4, 48]), GgufType::F16);
        assert_eq!(GgufType::Q8_0.of(&[64]), GgufType::F32);
        let numbers = GgufType::all().map(|kind| (kind.id(), kind.file_type()));
        let expected = [(0, Some(0)), (1, Some(1)), (8, Some(7)), (30, Some(32))];
        assert_eq!(numbers.collect::<Vec<_>>(), expected);
    }
}
