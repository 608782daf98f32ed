//! Instruction sets, and the choice among them.

#[cfg(target_arch = "x86_64")]
use std::arch::asm;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::__cpuid_count;
#[cfg(any(test, feature = "testing"))]
use std::cell::Cell;
use std::sync::OnceLock;

#[cfg(any(test, feature = "testing"))]
thread_local! {
    /// The instruction set that a test forces for the operations of its thread.
    pub(crate) static FORCED: Cell<Option<Isa>> = const { Cell::new(None) };
}

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// `Avx2` plus AVX-512 F, VL, BW and VNNI. `detect` returns it only if all of these exist, so
    /// a processor with `Avx512` also has all of `Avx2`. Without VL, code with vectors of two sizes
    /// has only half of the registers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// `Avx512` plus AMX with bfloat16 tiles. `detect` returns it only if the system permits AMX. A
    /// processor with `Amx` also has all of `Avx512` and `Avx2`.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// NEON. `detect` returns it only on aarch64. Tests use it on every processor, because
    /// `simd/neon/emulation.rs` then replaces the instructions.
    #[cfg(any(target_arch = "aarch64", test))]
    Neon,
    /// NEON with dotprod. Everything but the dot products of bytes is as for `Neon`.
    #[cfg(any(target_arch = "aarch64", test))]
    Dot,
    /// No explicit vector instructions.
    Portable,
}

/// Defines a function that runs portable code compiled for the vectors of `isa`, its first
/// argument. The portable function must be `#[inline(always)]`; its loops over lanes then become
/// vector instructions.
macro_rules! compiled_for_each_isa {
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $output:ty)?
            = $portable:ident;
    ) => {
        $(#[$attribute])*
        $visibility fn $name(isa: $crate::isa::Isa, $($argument: $type),*) $(-> $output)? {
            /// # Safety
            /// The processor must have avx2 and fma.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($argument: $type),*) $(-> $output)? {
                $portable($($argument),*)
            }
            /// # Safety
            /// The processor must have avx2, fma and avx512f.
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f")]
            unsafe fn avx512($($argument: $type),*) $(-> $output)? {
                $portable($($argument),*)
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: only `detect` makes `Isa::Avx2`, on processors with avx2 and fma.
                $crate::isa::Isa::Avx2 => unsafe { avx2($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: only `detect` makes these, on processors with avx2, fma and avx512f.
                $crate::isa::Isa::Avx512 | $crate::isa::Isa::Amx => unsafe {
                    avx512($($argument),*)
                },
                _ => $portable($($argument),*),
            }
        }
    };
}
pub(crate) use compiled_for_each_isa;

impl Isa {
    /// The best instruction set of this processor, or the lesser one that the environment selects.
    pub fn detect() -> Self {
        static FOUND: OnceLock<Isa> = OnceLock::new();
        #[cfg(any(test, feature = "testing"))]
        if let Some(isa) = FORCED.get() {
            return isa;
        }
        *FOUND.get_or_init(|| {
            let all = Self::all();
            let wanted = all.iter().find(|isa| wanted(isa.name()));
            wanted.or(all.last()).copied().unwrap_or(Self::Portable)
        })
    }

    /// The instruction sets that this processor supports, in ascending order.
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            all.push(Self::Avx2);
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vnni")
            {
                all.push(Self::Avx512);
                if amx_available() {
                    all.push(Self::Amx);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            all.push(Self::Neon);
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                all.push(Self::Dot);
            }
        }
        all
    }

    /// The processor features that the next better instruction set requires. `None` if this
    /// processor architecture has no better one.
    pub fn next_needs(self) -> Option<&'static str> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Some("AVX-512 with VNNI"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Some("AMX with bfloat16"),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => None,
            #[cfg(any(target_arch = "aarch64", test))]
            Self::Neon => Some("dotprod"),
            #[cfg(any(target_arch = "aarch64", test))]
            Self::Dot => None,
            Self::Portable if cfg!(target_arch = "x86_64") => Some("AVX2, FMA and F16C"),
            Self::Portable => None,
        }
    }

    /// Whether the instruction set has AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_avx2(self) -> bool {
        matches!(self, Self::Avx2 | Self::Avx512 | Self::Amx)
    }

    /// Whether the instruction set has tiles of bfloat16.
    pub(crate) fn has_bf16_tiles(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, Self::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether the processor has a better instruction set than this one.
    pub fn has_better(self) -> bool {
        Self::all().last() != Some(&self)
    }

    /// The name in `MLX_CPU_KERNELS`.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Amx => "amx",
            #[cfg(any(target_arch = "aarch64", test))]
            Self::Neon => "neon",
            #[cfg(any(target_arch = "aarch64", test))]
            Self::Dot => "neon+dotprod",
            Self::Portable => "portable",
        }
    }
}

/// Whether `MLX_CPU_KERNELS` names this instruction set. If so, better ones of the processor are
/// not used. This is for tests and comparisons.
fn wanted(name: &str) -> bool {
    std::env::var("MLX_CPU_KERNELS").is_ok_and(|v| v.eq_ignore_ascii_case(name))
}

/// Whether the processor has bfloat16 tiles, and the operating system permits this process to use
/// them. Call this function only on processors with AVX-512.
#[cfg(target_arch = "x86_64")]
fn amx_available() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let features = __cpuid_count(7, 0);
        let (bf16, tile) = (features.edx >> 22 & 1, features.edx >> 24 & 1);
        // The decoders of 8-bit codes need AVX-512 FP16, and shifts across two vectors (VBMI2). All
        // processors with AMX tiles have had both so far.
        let (float16, shifts) = (features.edx >> 23 & 1, features.ecx >> 6 & 1);
        bf16 & tile & float16 & shifts == 1 && enabled_by_system() && permitted()
    })
}

/// Whether the system saves tile registers per thread.
#[cfg(target_arch = "x86_64")]
fn enabled_by_system() -> bool {
    let low: u32;
    // SAFETY: a processor with AVX-512 enabled has this instruction, which reads a state register.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack));
    }
    low >> 17 & 3 == 3
}

/// Requests permission for the tile registers from Linux.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: this call neither reads nor writes our memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn permitted() -> bool {
    false
}
