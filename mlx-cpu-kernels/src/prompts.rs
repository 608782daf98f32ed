//! How precise inputs of many rows are where they meet quantized matrices. Not which instructions
//! multiply them (`isa.rs`).

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use crate::isa::Isa;

/// What inputs become before 16 or more of their rows meet a quantized matrix. Where an instruction
/// set or a format has no kernel for it, they are float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Prompts {
    /// Integers of 8 bits, with a float32 scale for 32 neighbors: AVX2 and AVX-512.
    Int8,
    /// As [`Self::Int8`], with a second integer for the remainder where the scale is above the
    /// row's average: AVX2 and AVX-512.
    Mixed,
    /// Integers of 16 bits, with a float32 scale for 8 neighbors: AVX-512.
    Int16,
    /// They stay float32.
    Float32,
}

impl Prompts {
    /// All of them, the most precise first.
    pub const ALL: [Self; 4] = [Self::Float32, Self::Int16, Self::Mixed, Self::Int8];

    /// The one that the environment variable `MLX_CPU_PROMPTS` names.
    ///
    /// ```
    /// use mlx_cpu_kernels::Prompts;
    /// let for_models = Prompts::from_environment().unwrap_or_default();
    /// assert!(Prompts::ALL.contains(&for_models));
    /// ```
    pub fn from_environment() -> Option<Self> {
        static WANTED: OnceLock<Option<Prompts>> = OnceLock::new();
        *WANTED.get_or_init(|| {
            let named = std::env::var("MLX_CPU_PROMPTS").ok();
            named.and_then(|name| Self::named(&name))
        })
    }

    /// What inputs become with the instruction set that is used here: itself, or float32 where the
    /// set lacks it.
    ///
    /// ```
    /// use mlx_cpu_kernels::Prompts;
    /// assert_eq!(Prompts::Float32.available(), Prompts::Float32);
    /// ```
    pub fn available(self) -> Self {
        #[cfg(target_arch = "x86_64")]
        match (self, Isa::detect()) {
            (Self::Int8 | Self::Mixed, Isa::Avx2) | (_, Isa::Avx512 | Isa::Amx) => return self,
            _ => {}
        }
        Self::Float32
    }

    /// The name of what inputs become before matrices of integers of `bits` bits: that of
    /// [`Prompts::available`], or `bfloat16x2`, the sum of two bfloat16, where AMX tiles come first.
    ///
    /// ```
    /// use mlx_cpu_kernels::Prompts;
    /// assert_eq!(Prompts::Float32.used_for(6), "float32");
    /// ```
    pub fn used_for(self, bits: u32) -> &'static str {
        #[cfg(target_arch = "x86_64")]
        if Isa::detect() == Isa::Amx && matches!(bits, 4 | 8) {
            return "bfloat16x2";
        }
        let _ = bits;
        self.available().name()
    }

    /// Its name in `MLX_CPU_PROMPTS`.
    ///
    /// ```
    /// assert_eq!(mlx_cpu_kernels::Prompts::Int8.name(), "int8");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Int16 => "int16",
            Self::Mixed => "mixed",
            Self::Int8 => "int8",
        }
    }

    /// The one of this name, in any case.
    ///
    /// ```
    /// use mlx_cpu_kernels::Prompts;
    /// assert_eq!(Prompts::named("INT16"), Some(Prompts::Int16));
    /// assert_eq!(Prompts::named("int4"), None);
    /// ```
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|own| own.name().eq_ignore_ascii_case(name))
    }
}

impl Default for Prompts {
    /// Float32. docs/kernels.md has the error of the others.
    fn default() -> Self {
        Self::Float32
    }
}
