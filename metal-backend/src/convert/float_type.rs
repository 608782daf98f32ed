//! The float types in which weights are stored.

/// A float type in which weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FloatType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an `f32`.
    BF16,
}

impl FloatType {
    /// Returns the type named `float32`, `float16` or `bfloat16`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::BF16]
            .into_iter()
            .find(|t| t.name() == name)
    }

    /// The name in a `config.json`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
        }
    }
}
