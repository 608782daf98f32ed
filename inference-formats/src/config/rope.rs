//! Parses rotary position embeddings: `rope_theta` and `rope_scaling`, or `rope_parameters` of
//! transformers 5. Each kind of layer can have its own parameters. The engine implements the
//! formulas. Only [`llama3_stretch`] is here, because GGUF files store its results.

use super::fields::{Fault, Fields, shown};
use crate::limits;

/// How wavelengths are stretched beyond the trained context.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum RopeScaling {
    /// No scaling.
    #[default]
    None,
    /// Divides positions by `factor`.
    Linear {
        /// The divisor of positions.
        factor: f32,
    },
    /// Dynamic NTK: beyond the trained context, the base grows with the length of the sequence.
    Dynamic {
        /// The factor by which the base grows.
        factor: f32,
        /// The trained context length, in positions.
        original_context: usize,
    },
    /// Llama 3.1: stretches long wavelengths, but not short ones.
    Llama3 {
        /// The factor that multiplies the longest wavelengths.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` get the full factor.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` stay unchanged.
        high_freq_factor: f32,
        /// The trained context length, in positions.
        original_context: f32,
    },
    /// `YaRN` (Peng et al. 2023): a gradual transition from unstretched to stretched wavelengths.
    Yarn {
        /// The factor that multiplies the longest wavelengths.
        factor: f32,
        /// The trained context length, in positions.
        original_context: f32,
        /// A pair with more rotations than this in the trained context is not stretched.
        beta_fast: f32,
        /// A pair with fewer rotations than this in the trained context gets the full factor.
        beta_slow: f32,
        /// Whether the ends of the transition are rounded to integer element numbers.
        truncate: bool,
        /// Factor on queries and keys.
        attention_factor: f32,
    },
    /// `LongRoPE` (Ding et al. 2024): a factor for each pair of elements. There are two sets of
    /// factors: one while the sequence fits into the trained context, and one for longer sequences.
    LongRope {
        /// Factors for sequences within the trained context.
        short: Vec<f32>,
        /// Factors for longer sequences.
        long: Vec<f32>,
        /// The trained context length, in positions.
        original_context: usize,
        /// Factor on queries and keys.
        attention_factor: f32,
    },
    /// Gemma 4: wavelengths depend on the width of the whole head, but only the first part of the
    /// head rotates.
    Proportional {
        /// The divisor of positions.
        factor: f32,
    },
}

/// The rotary position embeddings of one kind of layer.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f32,
    /// The scaling of the wavelengths.
    pub scaling: RopeScaling,
    /// The fraction of each head that rotates, counted from its start; 1 means the whole head.
    pub partial: f32,
}

impl RopeConfig {
    /// Creates a rotation of the whole head, without scaling.
    pub fn plain(theta: f32) -> Self {
        Self {
            theta,
            scaling: RopeScaling::None,
            partial: 1.0,
        }
    }
}

/// The factor by which Llama 3.1 lengthens a wavelength (in positions): `factor` above
/// `original_context / low`, 1 below `original_context / high`.
pub fn llama3_stretch(
    wavelength: f64,
    factor: f64,
    [low, high]: [f64; 2],
    original_context: f64,
) -> f64 {
    if wavelength > original_context / low {
        factor
    } else if wavelength < original_context / high || low == high {
        // In Llama 4 the two bounds are equal, so there is no transition.
        1.0
    } else {
        let ramp = (original_context / wavelength - low) / (high - low);
        1.0 / ((1.0 - ramp) / factor + ramp)
    }
}

/// The rotary position embeddings of full layers and of sliding layers.
pub(super) struct Ropes {
    pub full: RopeConfig,
    /// `None` if sliding layers rotate like full layers.
    pub sliding: Option<RopeConfig>,
}

const KNOWN: &str = "default, mrope, linear, dynamic, llama3, yarn, longrope, \
                     proportional";
/// The maximum length of a list of factors.
const MAX_PAIRS: usize = 2048;

/// A message, and whether a feature is unsupported (otherwise the file is invalid).
pub(super) struct RopeFault {
    pub message: String,
    pub unsupported: bool,
}

impl From<String> for RopeFault {
    fn from(message: String) -> Self {
        Self {
            message,
            unsupported: false,
        }
    }
}

fn unsupported(message: String) -> RopeFault {
    RopeFault {
        message,
        unsupported: true,
    }
}

pub(super) fn parse(fields: &Fields<'_>, max_positions: Option<usize>) -> Result<Ropes, RopeFault> {
    let parameters = fields.nested("rope_parameters", "rope_parameters.")?;
    if let Some(by_kind) = &parameters
        && (by_kind.get("full_attention").is_some() || by_kind.get("sliding_attention").is_some())
    {
        let kind = |name, prefix| -> Result<Option<RopeConfig>, RopeFault> {
            by_kind
                .nested(name, prefix)?
                .map(|of_kind| one(fields, Some(&of_kind), Some(&of_kind), max_positions))
                .transpose()
        };
        let full = kind("full_attention", "rope_parameters.full_attention.")?;
        let sliding = kind("sliding_attention", "rope_parameters.sliding_attention.")?;
        return Ok(match (full, sliding) {
            (Some(full), sliding) => Ropes { full, sliding },
            (None, Some(only)) => Ropes {
                full: only,
                sliding: None,
            },
            (None, None) => return Err(by_kind.missing("full_attention").into()),
        });
    }
    let scaling = fields.nested("rope_scaling", "rope_scaling.")?;
    let full = one(
        fields,
        parameters.as_ref(),
        scaling.as_ref().or(parameters.as_ref()),
        max_positions,
    )?;
    let sliding = fields
        .positive("rope_local_base_freq")?
        .map(RopeConfig::plain);
    Ok(Ropes { full, sliding })
}

/// Parses the rotation of one kind of layer. Base and fraction come from `parameters` or the
/// configuration; the scaling comes from `scaling`.
fn one(
    fields: &Fields<'_>,
    parameters: Option<&Fields<'_>>,
    scaling: Option<&Fields<'_>>,
    max_positions: Option<usize>,
) -> Result<RopeConfig, RopeFault> {
    let number = |name: &str| -> Fault<Option<f32>> {
        match parameters.map(|p| p.positive(name)).transpose()?.flatten() {
            Some(value) => Ok(Some(value)),
            None => fields.positive(name),
        }
    };
    let partial = number("partial_rotary_factor")?.unwrap_or(1.0);
    if partial > 1.0 {
        return Err(RopeFault::from(format!(
            "partial_rotary_factor is {partial}; it must be at most 1"
        )));
    }
    let scaling = match scaling {
        Some(f) => parse_scaling(f, fields, max_positions)?,
        None => RopeScaling::None,
    };
    Ok(RopeConfig {
        theta: number("rope_theta")?.ok_or_else(|| fields.missing("rope_theta"))?,
        scaling,
        partial,
    })
}

fn parse_scaling(
    fields: &Fields<'_>,
    top: &Fields<'_>,
    max_positions: Option<usize>,
) -> Result<RopeScaling, RopeFault> {
    // `type` is the older name of `rope_type`.
    let kind = match fields.str("rope_type")? {
        Some(kind) => Some(kind),
        None => fields.str("type")?,
    };
    let original = || -> Fault<usize> {
        let field = "original_max_position_embeddings";
        let range = || 1..=limits::POSITIONS;
        match fields.uint(field, range())? {
            Some(n) => Ok(n),
            None => match top.uint(field, range())?.or(max_positions) {
                Some(n) => Ok(n),
                None => Err(fields.missing(field)),
            },
        }
    };
    Ok(match kind {
        // Qwen-VL has separate sections for time, height and width. For text, all three positions
        // are equal.
        None | Some("default" | "none" | "mrope") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear {
            factor: fields.required_positive("factor")?,
        },
        Some("dynamic") => RopeScaling::Dynamic {
            factor: fields.required_positive("factor")?,
            original_context: max_positions
                .ok_or_else(|| top.missing("max_position_embeddings"))?,
        },
        Some("llama3") => {
            let low_freq_factor = fields.required_positive("low_freq_factor")?;
            let high_freq_factor = fields.required_positive("high_freq_factor")?;
            if low_freq_factor > high_freq_factor {
                return Err(RopeFault::from(format!(
                    "rope_scaling.low_freq_factor is {low_freq_factor}; it must not be above \
                     high_freq_factor, which is {high_freq_factor}"
                )));
            }
            RopeScaling::Llama3 {
                factor: fields.required_positive("factor")?,
                low_freq_factor,
                high_freq_factor,
                original_context: original()? as f32,
            }
        }
        Some("yarn") => {
            let factor = fields.required_positive("factor")?;
            let (fast, slow) = (
                fields.positive("beta_fast")?.unwrap_or(32.0),
                fields.positive("beta_slow")?.unwrap_or(1.0),
            );
            if slow > fast {
                return Err(RopeFault::from(format!(
                    "rope_scaling.beta_slow is {slow}; it must not be above beta_fast, which is {fast}"
                )));
            }
            RopeScaling::Yarn {
                factor,
                original_context: original()? as f32,
                beta_fast: fast,
                beta_slow: slow,
                truncate: fields.bool("truncate")?.unwrap_or(true),
                attention_factor: yarn_attention(fields, factor)?,
            }
        }
        Some("longrope" | "su") => {
            let original_context = original()?;
            let factor = match fields.positive("factor")? {
                Some(factor) => factor,
                None => max_positions.map_or(1.0, |n| n as f32 / original_context as f32),
            };
            let by_length = || {
                if factor <= 1.0 || original_context < 2 {
                    1.0
                } else {
                    (1.0 + factor.ln() / (original_context as f32).ln()).sqrt()
                }
            };
            RopeScaling::LongRope {
                short: stretches(fields, "short_factor")?,
                long: stretches(fields, "long_factor")?,
                original_context,
                attention_factor: fields
                    .positive("attention_factor")?
                    .unwrap_or_else(by_length),
            }
        }
        Some("proportional") => RopeScaling::Proportional {
            factor: fields.positive("factor")?.unwrap_or(1.0),
        },
        Some(_) => {
            let name = if fields.get("rope_type").is_some() {
                "rope_type"
            } else {
                "type"
            };
            let value = fields.get(name).map(shown).unwrap_or_default();
            return Err(unsupported(format!(
                "rope scaling {value} is not supported; supported are {KNOWN}"
            )));
        }
    })
}

/// `YaRN`'s factor on queries and keys. It is in the file, or it is computed from the scaling
/// factor (equation 22 of the paper). `DeepSeek` files contain two weights that change it.
fn yarn_attention(fields: &Fields<'_>, factor: f32) -> Fault<f32> {
    if let Some(stated) = fields.positive("attention_factor")? {
        return Ok(stated);
    }
    let by = |weight: f32| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * weight * factor.ln() + 1.0
        }
    };
    // A weight of 0 means that there is no weight.
    let weight = |name: &str| -> Fault<Option<f32>> {
        match fields.get(name).and_then(serde_json::Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => fields.positive(name),
        }
    };
    Ok(match (weight("mscale")?, weight("mscale_all_dim")?) {
        (Some(one), Some(all)) => by(one) / by(all),
        _ => by(1.0),
    })
}

fn stretches(fields: &Fields<'_>, name: &str) -> Fault<Vec<f32>> {
    let values = fields.numbers(name)?.ok_or_else(|| fields.missing(name))?;
    if values.is_empty() || values.len() > MAX_PAIRS || values.iter().any(|v| *v <= 0.0) {
        return Err(format!(
            "rope_scaling.{name} must be a list of 1 to {MAX_PAIRS} numbers above 0"
        ));
    }
    Ok(values)
}
