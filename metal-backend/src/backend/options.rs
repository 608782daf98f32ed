//! Checks load options that depend on the backend or on the model, and selects the type of KV
//! caches.

use inference::{AttentionSums, ComputeType, Error, ErrorKind, LoadOptions, Result};

use super::place::Place;
use crate::cache::{CacheOptions, Packing};

/// Returns a warning that `gpu_layers` is ignored, because MLX runs the whole model on one device.
/// Returns `None` on a CPU, and if the option is missing or -1 (all layers).
fn gpu_layers_warning(options: &LoadOptions, place: Place) -> Option<&'static str> {
    let some = options.gpu_layers.is_some_and(|n| n >= 0);
    (some && place != Place::Cpu)
        .then_some("gpu_layers is ignored: MLX runs the whole model on its device")
}

/// Logs [`gpu_layers_warning`], if there is a warning.
pub(crate) fn warn_of_gpu_layers(options: &LoadOptions, place: Place) {
    if let Some(warning) = gpu_layers_warning(options, place) {
        tracing::warn!("{warning}");
    }
}

/// Returns an error if `attention_sums` is not native on a GPU, which lacks double precision.
///
/// # Errors
/// [`ErrorKind::Unsupported`].
pub(crate) fn check_attention_sums(options: &LoadOptions, place: Place) -> Result<()> {
    if options.attention_sums == AttentionSums::Native || place == Place::Cpu {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "attention_sums is {}, which MLX supports on a CPU only; use backend `cpu`, or leave the option out",
            options.attention_sums
        ),
    ))
}

/// Returns an error if `attention_sums` is set for an architecture without attention.
///
/// # Errors
/// [`ErrorKind::Unsupported`].
pub(crate) fn check_attends(options: &LoadOptions, architecture: &str) -> Result<()> {
    if options.attention_sums == AttentionSums::Native {
        return Ok(());
    }
    let message = format!(
        "attention_sums needs attention, which {architecture} does not have; leave the option out"
    );
    Err(Error::new(ErrorKind::Unsupported, message))
}

/// Returns an error if KV cache options are set for an architecture without keys and values.
///
/// # Errors
/// [`ErrorKind::Unsupported`].
pub(crate) fn check_keyless(options: &LoadOptions, architecture: &str) -> Result<()> {
    for (option, given) in [
        ("context_len", options.context_len.is_some()),
        ("kv_bits", options.kv_bits.is_some()),
    ] {
        if given {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{option} limits keys and values, but {architecture} has none: its state has the same size at every length; leave the option out"
                ),
            ));
        }
    }
    Ok(())
}

/// Returns the cache options for a model whose heads have `head_dim` elements and whose compute
/// type has `size` bytes. If `kv_bits` is not set, `half` selects 16-bit caches; see
/// [`super::source::OpenModel::has_half_caches`].
///
/// # Errors
/// [`ErrorKind::InvalidOption`] for values that do not suit the model.
pub(crate) fn cache_options(
    options: &LoadOptions,
    head_dim: usize,
    size: usize,
    half: bool,
) -> Result<CacheOptions> {
    let int = |name: &str, n: usize| {
        i32::try_from(n).map_err(|_| {
            let message = format!("{name} is {n}; it must be at most {}", i32::MAX);
            Error::new(ErrorKind::InvalidOption, message)
        })
    };
    let packing = match options.kv_bits {
        Some(32) if size < 4 => {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "kv_bits is 32, but the compute type has {} bits, and unquantized caches have \
                     it; use dtype float32, or leave kv_bits out",
                    8 * size
                ),
            ));
        }
        None | Some(16 | 32) => None,
        Some(bits) => {
            let group = options.kv_group_size;
            if !head_dim.is_multiple_of(group as usize) {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!(
                        "kv_group_size is {group}, which does not divide this model's heads of \
                         {head_dim} elements"
                    ),
                ));
            }
            Some(Packing {
                bits: int("kv_bits", bits as usize)?,
                group_size: int("kv_group_size", group as usize)?,
                start: int("quantized_kv_start", options.quantized_kv_start)?,
            })
        }
    };
    Ok(CacheOptions {
        bound: options
            .context_len
            .map(|n| int("context_len", n))
            .transpose()?,
        packing,
        // Caches use the compute type, so 16-bit compute types need no conversion.
        half: size == 4
            && match options.kv_bits {
                Some(bits) => bits == 16,
                None => half,
            },
        trimmable: None,
    })
}

/// Describes for users how caches store keys and values.
pub(crate) fn stored_as(caches: &CacheOptions, compute: ComputeType) -> String {
    match caches.packing {
        Some(Packing {
            bits, group_size, ..
        }) => format!("{bits} bits, groups of {group_size}"),
        None if caches.half => ComputeType::Float16.to_string(),
        None => compute.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn double_precision_is_for_cpus() {
        let wide = LoadOptions::new().with_attention_sums(AttentionSums::Float64);
        check_attention_sums(&wide, Place::Cpu).unwrap();
        for place in [Place::Metal, Place::Cuda] {
            check_attention_sums(&LoadOptions::new(), place).unwrap();
            let error = check_attention_sums(&wide, place).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains("backend `cpu`"), "{error}");
        }
    }

    #[test]
    fn layers_for_a_gpu_are_warned_of_where_there_is_one() {
        let warning = |layers: Option<i32>, place| {
            let options = LoadOptions::new().with_gpu_layers(layers);
            gpu_layers_warning(&options, place)
        };
        for place in [Place::Metal, Place::Cuda] {
            for some in [0, 20] {
                let said = warning(Some(some), place).unwrap();
                assert!(said.contains("gpu_layers is ignored"), "{said}");
            }
            // MLX always runs all layers on the device, so these values need no warning.
            assert_eq!(
                (warning(None, place), warning(Some(-1), place)),
                (None, None)
            );
        }
        assert_eq!(warning(Some(20), Place::Cpu), None);
    }

    /// Runs `body` and returns the warnings that it logs.
    fn logged(body: impl FnOnce()) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::WARN)
            .with_writer(std::sync::Arc::new(file.reopen().unwrap()))
            .finish();
        tracing::subscriber::with_default(subscriber, body);
        std::fs::read_to_string(file.path()).unwrap()
    }

    #[test]
    fn no_layers_for_a_gpu_is_logged() {
        let none = LoadOptions::new().with_gpu_layers(0);
        for place in [Place::Metal, Place::Cuda] {
            let said = logged(|| warn_of_gpu_layers(&none, place));
            let once = said.matches("gpu_layers is ignored").count();
            assert!(once == 1 && said.contains("WARN"), "{said:?}");
        }
        // A CPU has no GPU layers, so there must be no warning.
        assert_eq!(logged(|| warn_of_gpu_layers(&none, Place::Cpu)), "");
        let all = LoadOptions::new().with_gpu_layers(-1);
        assert_eq!(logged(|| warn_of_gpu_layers(&all, Place::Metal)), "");
    }
}
