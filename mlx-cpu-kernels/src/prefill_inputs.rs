//! The input types of many-row multiplication with quantized matrices. Inputs are converted to this
//! type first. `isa.rs` selects the instructions.

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use crate::isa::Isa;

/// The type of inputs when 16 or more rows are multiplied with a quantized matrix. If an
/// instruction set or a format has no kernel for the type, inputs stay float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PrefillInputs {
    /// 8-bit integers, with a float32 scale per 32 adjacent inputs: AVX2 and AVX-512.
    Int8,
    /// Like [`Self::Int8`], with a second integer for the residual where the scale exceeds the root
    /// mean square of the row's scales: AVX2 and AVX-512.
    Mixed,
    /// 16-bit integers, with a float32 scale per 16 adjacent inputs: AVX2 and AVX-512.
    Int16,
    /// No conversion.
    Float32,
}

impl PrefillInputs {
    /// All variants, from the most precise to the least precise.
    pub const ALL: [Self; 4] = [Self::Float32, Self::Int16, Self::Mixed, Self::Int8];

    /// The variant that the environment variable `MLX_CPU_PROMPTS` names.
    ///
    /// ```
    /// use mlx_cpu_kernels::PrefillInputs;
    /// let for_models = PrefillInputs::from_environment().unwrap_or_default();
    /// assert!(PrefillInputs::ALL.contains(&for_models));
    /// ```
    pub fn from_environment() -> Option<Self> {
        static WANTED: OnceLock<Option<PrefillInputs>> = OnceLock::new();
        *WANTED.get_or_init(|| {
            let named = std::env::var("MLX_CPU_PROMPTS").ok();
            named.and_then(|name| Self::named(&name))
        })
    }

    /// This variant if the current instruction set supports it, otherwise float32.
    ///
    /// ```
    /// use mlx_cpu_kernels::PrefillInputs;
    /// assert_eq!(PrefillInputs::Float32.available(), PrefillInputs::Float32);
    /// ```
    pub fn available(self) -> Self {
        #[cfg(target_arch = "x86_64")]
        match Isa::detect() {
            Isa::Avx2 | Isa::Avx512 | Isa::Amx => return self,
            _ => {}
        }
        Self::Float32
    }

    /// The name of the input type for matrices with `bits`-bit codes: that of
    /// [`PrefillInputs::available`], or `bfloat16x2`, the sum of two bfloat16, if AMX tiles are
    /// preferred.
    ///
    /// ```
    /// use mlx_cpu_kernels::PrefillInputs;
    /// assert_eq!(PrefillInputs::Float32.used_for(6), "float32");
    /// ```
    pub fn used_for(self, bits: u32) -> &'static str {
        #[cfg(target_arch = "x86_64")]
        if Isa::detect() == Isa::Amx && matches!(bits, 4 | 8) {
            return "bfloat16x2";
        }
        let _ = bits;
        self.available().name()
    }

    /// The name in `MLX_CPU_PROMPTS`.
    ///
    /// ```
    /// assert_eq!(mlx_cpu_kernels::PrefillInputs::Int8.name(), "int8");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Int16 => "int16",
            Self::Mixed => "mixed",
            Self::Int8 => "int8",
        }
    }

    /// The variant with this name, ignoring case.
    ///
    /// ```
    /// use mlx_cpu_kernels::PrefillInputs;
    /// assert_eq!(PrefillInputs::named("INT16"), Some(PrefillInputs::Int16));
    /// assert_eq!(PrefillInputs::named("int4"), None);
    /// ```
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|format| format.name().eq_ignore_ascii_case(name))
    }
}

impl Default for PrefillInputs {
    /// Float32. docs/kernels.md lists the errors of the other variants.
    fn default() -> Self {
        Self::Float32
    }
}
