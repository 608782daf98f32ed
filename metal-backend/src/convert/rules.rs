//! Rules about tensor names, as in `mlx-lm`'s `convert`: which matrices to quantize and with which
//! bits, which tensors to drop, and which to stack.

use std::collections::BTreeMap;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::QuantMode;

use super::quantization::{Quantization, Recipe};

/// The quantization format of one matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Format {
    pub bits: i32,
    pub group_size: i32,
    pub mode: QuantMode,
}

impl Format {
    /// Returns a description of the format for the user.
    pub(super) fn told(self) -> String {
        let (bits, group, mode) = (self.bits, self.group_size, self.mode_name());
        format!("{mode}, {bits} bits in groups of {group}")
    }

    /// The mode's name in `config.json`.
    pub(super) fn mode_name(self) -> &'static str {
        match self.mode {
            QuantMode::Mxfp4 => "mxfp4",
            QuantMode::Mxfp8 => "mxfp8",
            QuantMode::Nvfp4 => "nvfp4",
            _ => "affine",
        }
    }
}

/// Returns the format of most matrices.
///
/// # Errors
/// If the mode does not support the bits or group size, or a recipe conflicts with other options.
pub(super) fn base_format(quantize: &Quantization) -> Result<Format> {
    let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
    let mode = quantize.mode;
    let (group, bits) = match mode {
        QuantMode::Mxfp4 => (32, 4),
        QuantMode::Mxfp8 => (32, 8),
        QuantMode::Nvfp4 => (16, 4),
        _ => (64, 4),
    };
    let mut format = Format {
        bits: quantize.bits.unwrap_or(bits),
        group_size: quantize.group_size.unwrap_or(group),
        mode,
    };
    if let Some(recipe) = quantize.recipe {
        if mode != QuantMode::Affine {
            return bad(format!("{} is for the mode affine only", recipe.name()));
        }
        let (low, _) = recipe.bits();
        if quantize.bits.is_some_and(|bits| bits != low) {
            return bad(format!(
                "{} sets the bits itself; leave --bits out",
                recipe.name()
            ));
        }
        format.bits = low;
    }
    let fine = match mode {
        QuantMode::Affine => {
            matches!(format.bits, 2 | 3 | 4 | 5 | 6 | 8)
                && matches!(format.group_size, 32 | 64 | 128)
        }
        _ => (format.group_size, format.bits) == (group, bits),
    };
    if !fine {
        let allowed = if mode == QuantMode::Affine {
            "bits 2, 3, 4, 5, 6 or 8 in groups of 32, 64 or 128".to_owned()
        } else {
            format!("{bits} bits in groups of {group}")
        };
        return bad(format!(
            "{} takes {allowed}, not {} bits in groups of {}",
            format.mode_name(),
            format.bits,
            format.group_size
        ));
    }
    Ok(format)
}

/// Chooses the format of each matrix.
pub(super) struct Chooser {
    pub base: Format,
    recipe: Option<Recipe>,
    layers: usize,
}

impl Chooser {
    pub(super) fn new(quantize: &Quantization, layers: usize) -> Result<Self> {
        Ok(Self {
            base: base_format(quantize)?,
            recipe: quantize.recipe,
            layers,
        })
    }

    /// Returns the format of the matrix `path` (a name without `.weight`) with this shape. Returns
    /// `None` if it is not quantized.
    pub(super) fn format(&self, path: &str, shape: &[usize]) -> Option<Format> {
        let cols = shape.last().copied().unwrap_or(0);
        if !is_matrix(path, shape)
            || cols == 0
            || !cols.is_multiple_of(self.base.group_size.unsigned_abs() as usize)
        {
            return None;
        }
        if is_router(path) {
            // A router's errors affect the choice of experts, so routers get more bits.
            let group_size = [64, 32].into_iter().find(|g| cols.is_multiple_of(*g))?;
            return Some(Format {
                bits: 8,
                group_size: group_size as i32,
                mode: QuantMode::Affine,
            });
        }
        let Some(recipe) = self.recipe else {
            return Some(self.base);
        };
        let (low, high) = recipe.bits();
        let layer = layer_of(path).unwrap_or(0);
        let eighth = self.layers / 8;
        let careful =
            layer < eighth || layer >= 7 * self.layers / 8 || layer.wrapping_sub(eighth) % 3 == 2;
        let has = |part: &str| path.contains(part);
        let valued = has("v_proj") || has("v_a_proj") || has("v_b_proj") || has("down_proj");
        let more = (valued && careful) || has("lm_head");
        Some(Format {
            bits: if more { high } else { low },
            ..self.base
        })
    }
}

/// Whether a weight belongs to a linear layer, an embedding or a stack of experts, judged by name
/// and shape.
pub(super) fn is_matrix(path: &str, shape: &[usize]) -> bool {
    let stacked = path.contains("switch_mlp") || path.contains(".experts");
    if shape.len() != 2 && !(shape.len() == 3 && stacked) {
        return false;
    }
    // Convolutions and position tables also have two axes, but are never quantized. The input and
    // forget gates of xLSTM are exponents with one row per head, so they need full precision.
    let last = path.rsplit('.').next().unwrap_or(path);
    !["norm", "conv", "position"]
        .iter()
        .any(|part| last.contains(part))
        && !matches!(last, "wpe" | "rotary_emb" | "rope_freqs")
        && !["igate_preact", "fgate_preact", "ifgate_preact"].contains(&last)
}

fn is_router(path: &str) -> bool {
    [
        "mlp.gate",
        "feed_forward.gate",
        "router.layer",
        "block_sparse_moe.gate",
        ".router",
        "router.proj",
        "shared_expert_gate",
    ]
    .iter()
    .any(|end| path.ends_with(end))
}

/// The layer index in a name: the number after `layers` or `h`.
pub(super) fn layer_of(path: &str) -> Option<usize> {
    let mut parts = path.split('.');
    parts.find(|part| matches!(*part, "layers" | "h"))?;
    parts.next()?.parse().ok()
}

/// Whether a text model does not need a tensor: towers of other modalities, values that can be
/// computed, and the output matrix of a tied model.
pub(super) fn is_dropped(name: &str, tied: bool) -> bool {
    const TOWERS: [&str; 7] = [
        "vision_tower.",
        "vision_model.",
        "visual.",
        "multi_modal_projector.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
    ];
    let inner = name.strip_prefix("model.").unwrap_or(name);
    if TOWERS.iter().any(|tower| inner.starts_with(tower)) || name.ends_with("rotary_emb.inv_freq")
    {
        return true;
    }
    let head = name.strip_prefix("language_model.").unwrap_or(name);
    tied && head.starts_with("lm_head.")
}

/// Whether a tensor contains the matrices of all experts in a form that cannot be quantized: the
/// form of the Transformers library (Llama 4, gpt-oss, Qwen3.5, DBRX), or Granite's.
pub(super) fn is_fused_stack(name: &str, shape: &[usize]) -> bool {
    let unnamed = name.contains(".experts.") && !name.ends_with(".weight");
    let granite = name.ends_with("input_linear.weight") || name.ends_with("output_linear.weight");
    match shape.len() {
        0 | 1 => false,
        2 => unnamed && !name.ends_with("bias"),
        _ => (unnamed && !name.ends_with("bias")) || granite,
    }
}

/// Returns the name of the stack to which an expert's matrix belongs, and its index in the stack.
pub(super) fn expert(name: &str) -> Option<(String, usize)> {
    let path = name.strip_suffix(".weight")?;
    let (rest, part) = path.rsplit_once('.')?;
    let (rest, index) = rest.rsplit_once('.')?;
    let block = rest.strip_suffix(".experts")?;
    let part = match part {
        "w1" | "gate_proj" => "gate_proj",
        "w2" | "down_proj" => "down_proj",
        "w3" | "up_proj" => "up_proj",
        _ => return None,
    };
    Some((
        format!("{block}.switch_mlp.{part}.weight"),
        index.parse().ok()?,
    ))
}

/// Returns the complete stacks that these names form, each with its members in order.
pub(super) fn stacks<'a>(
    names: impl Iterator<Item = &'a str> + Clone,
) -> BTreeMap<String, Vec<&'a str>> {
    let mut stacks: BTreeMap<String, BTreeMap<usize, &str>> = BTreeMap::new();
    let mut spoilt = Vec::new();
    for name in names {
        if let Some((stack, index)) = expert(name) {
            stacks.entry(stack).or_default().insert(index, name);
        } else if let Some((path, "scales" | "biases" | "bias")) = name.rsplit_once('.')
            && let Some((stack, _)) = expert(&format!("{path}.weight"))
        {
            // A stack is not built if its members are already quantized, or if they have biases,
            // which would need a stack, too.
            spoilt.push(stack);
        }
    }
    stacks.retain(|stack, members| {
        !spoilt.contains(stack) && members.keys().copied().eq(0..members.len())
    });
    let gated: Vec<String> = (stacks.keys())
        .filter_map(|stack| Some(stack.strip_suffix("gate_proj.weight")?.to_owned()))
        .collect();
    stacks
        .into_iter()
        .map(|(stack, members)| {
            let name = match stack.rsplit_once("switch_mlp.") {
                Some((block, part)) if !gated.contains(&format!("{block}switch_mlp.")) => {
                    format!("{block}switch_mlp.{}", ungated(part))
                }
                _ => stack,
            };
            (name, members.into_values().collect())
        })
        .collect()
}

/// Returns mlx-lm's name for a matrix of experts without a gate (Nemotron-H).
fn ungated(part: &str) -> &str {
    match part {
        "up_proj.weight" => "fc1.weight",
        "down_proj.weight" => "fc2.weight",
        part => part,
    }
}
