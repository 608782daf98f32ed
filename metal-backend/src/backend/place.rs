//! The three devices on which MLX computes, and the compute types of each.

use inference::{ComputeType, Error, ErrorKind, Precision, Result};
use inference_formats::footprint::WeightStorage;
use mlx_rs_core::{Device, Dtype, cuda_is_available, metal_is_available};
use safetensors::Dtype as FileDtype;

use crate::exec::{self, PrefillInputs};
use crate::loader::Weights;

/// A kind of device on which MLX computes. Each kind is one backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Metal,
    Cuda,
    Cpu,
}

impl Place {
    pub(crate) fn device(self) -> Device {
        match self {
            Place::Metal | Place::Cuda => Device::gpu(),
            Place::Cpu => Device::cpu(),
        }
    }

    /// Returns the name of the backend.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Place::Metal => "metal",
            Place::Cuda => "cuda",
            Place::Cpu => "cpu",
        }
    }

    /// Whether MLX can compute on this device here.
    pub(crate) fn is_available(self) -> bool {
        match self {
            Place::Metal => metal_is_available(),
            Place::Cuda => cuda_is_available(),
            Place::Cpu => Device::cpu().is_available(),
        }
    }

    /// Returns the device of the backend `name`, or the best available device if `name` is `None`.
    /// Returns `None` for the name of another engine's backend.
    pub(crate) fn named(name: Option<&str>) -> Option<Self> {
        let mut all = [Place::Metal, Place::Cuda, Place::Cpu].into_iter();
        match name {
            Some(name) => all.find(|place| place.name() == name),
            None => all.find(|place| place.is_available()),
        }
    }

    /// Returns the device of the backend `name`. Returns the best available device if `name` is
    /// `None` or names another engine's backend.
    pub(crate) fn named_or_best(name: Option<&str>) -> Self {
        let best = || Self::named(None);
        name.and_then(|name| Self::named(Some(name)))
            .or_else(best)
            .unwrap_or(Place::Cpu)
    }

    /// Returns the compute type. A requested type wins, but a half type on a CPU becomes float32 if
    /// the CPU kernels are enabled. The default is float32 on a CPU, where half types are emulated,
    /// and the checkpoint's type on a GPU.
    pub(crate) fn compute_type(
        self,
        asked: Option<ComputeType>,
        stored: FileDtype,
    ) -> Result<(Dtype, ComputeType)> {
        let chosen = match (asked, stored) {
            (Some(t), _) => t,
            (None, _) if self == Place::Cpu => ComputeType::Float32,
            (None, FileDtype::F16) => ComputeType::Float16,
            (None, FileDtype::BF16) => ComputeType::BFloat16,
            (None, _) => ComputeType::Float32,
        };
        // The CPU kernels sum in float32. Without them, MLX's own operations take minutes per reply
        // in half types.
        let chosen = match self.kept_half(asked) {
            Some(_) => ComputeType::Float32,
            None => chosen,
        };
        match chosen {
            ComputeType::Float32 => Ok((Dtype::Float32, chosen)),
            ComputeType::Float16 => Ok((Dtype::Float16, chosen)),
            ComputeType::BFloat16 => Ok((Dtype::Bfloat16, chosen)),
            other => Err(Error::new(
                ErrorKind::Unsupported,
                format!("cannot compute in {other}"),
            )),
        }
    }

    /// Whether the CPU kernels compute this type on this device. They compute only float32; MLX's
    /// own operations compute other types.
    pub(crate) fn uses_kernels(self, dtype: Dtype) -> bool {
        self == Place::Cpu && dtype == Dtype::Float32
    }

    /// Returns the half type in which dense matrices are stored, if a half type is requested but
    /// the CPU kernels compute in float32.
    pub(crate) fn kept_half(self, asked: Option<ComputeType>) -> Option<Dtype> {
        let half = match asked {
            Some(ComputeType::Float16) => Dtype::Float16,
            Some(ComputeType::BFloat16) => Dtype::Bfloat16,
            _ => return None,
        };
        (self == Place::Cpu && exec::enabled()).then_some(half)
    }

    /// Returns the type to which prefill converts inputs of quantized matrices; `None` if MLX
    /// computes them.
    ///
    /// # Errors
    /// `Unsupported` if fast prefill is requested without the kernels.
    pub(crate) fn prefill_inputs(
        self,
        dtype: Dtype,
        precision: Option<Precision>,
    ) -> Result<Option<PrefillInputs>> {
        let kernels = self.uses_kernels(dtype) && exec::enabled();
        match precision {
            Some(Precision::Fast) if !kernels => Err(Error::new(
                ErrorKind::Unsupported,
                "precision fast needs the CPU kernels: the backend cpu, the type float32, and \
                 MLX_CPU_KERNELS not off",
            )),
            _ if !kernels => Ok(self.uses_kernels(dtype).then_some(PrefillInputs::Float32)),
            Some(Precision::Fast) => Ok(Some(PrefillInputs::Int8)),
            Some(_) => Ok(Some(PrefillInputs::Float32)),
            // Decode also uses 16-bit integers. With the same type in prefill, results hardly
            // depend on the prefill step size.
            None => Ok(Some(
                PrefillInputs::from_environment().unwrap_or(PrefillInputs::Int16),
            )),
        }
    }

    /// How [`Weights`] stores tensors in memory, for a model that computes in `dtype`.
    pub(crate) fn weight_storage(self, dtype: Dtype) -> WeightStorage {
        Weights::storage(self == Place::Cpu, dtype)
    }
}
