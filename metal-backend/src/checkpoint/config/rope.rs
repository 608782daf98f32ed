//! How a configuration stretches the rotary embedding: `rope_scaling`, or `rope_parameters` as
//! transformers 5 writes it. The formulas are in `nn/rope.rs`.

use super::fields::{Fault, Fields, shown};

/// How positions are stretched beyond the trained context.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    None,
    /// Positions divided by `factor`.
    Linear {
        /// The stretch.
        factor: f32,
    },
    /// Llama 3.1: long wavelengths stretched, short ones kept.
    Llama3 {
        /// The stretch of the longest wavelengths.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are stretched in full.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f32,
        /// The trained context, in positions.
        original_context: f32,
    },
}

/// What a configuration says about rotary embedding.
pub(super) struct Rope {
    pub theta: f32,
    pub scaling: RopeScaling,
}

/// The largest context that positions may count to.
pub(super) const MAX_POSITIONS: usize = i32::MAX as usize;
const DEFAULT_THETA: f32 = 10_000.0;
const KNOWN: &str = "default, linear, llama3";

/// An error's text and whether the fault is that we lack the feature.
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

pub(super) fn parse(fields: &Fields<'_>, max_positions: Option<usize>) -> Result<Rope, RopeFault> {
    let parameters = fields.nested("rope_parameters", "rope_parameters.")?;
    let scaling = fields.nested("rope_scaling", "rope_scaling.")?;
    for name in ["full_attention", "sliding_attention"] {
        if parameters.as_ref().is_some_and(|p| p.get(name).is_some()) {
            return Err(unsupported(
                "rope_parameters differ by layer type, which is not supported".into(),
            ));
        }
    }
    let rotated = |f: &Fields<'_>| f.positive("partial_rotary_factor");
    for factor in [
        rotated(fields)?,
        parameters.as_ref().map(rotated).transpose()?.flatten(),
    ] {
        if factor.is_some_and(|f| f != 1.0) {
            return Err(unsupported(
                "partial_rotary_factor is not 1: rotating a part of each head is not supported"
                    .into(),
            ));
        }
    }
    let theta = match fields.positive("rope_theta")? {
        Some(theta) => Some(theta),
        None => parameters
            .as_ref()
            .map(|p| p.positive("rope_theta"))
            .transpose()?
            .flatten(),
    };
    let scaling = match scaling.or(parameters) {
        Some(f) => parse_scaling(&f, max_positions)?,
        None => RopeScaling::None,
    };
    Ok(Rope {
        theta: theta.unwrap_or(DEFAULT_THETA),
        scaling,
    })
}

fn parse_scaling(
    fields: &Fields<'_>,
    max_positions: Option<usize>,
) -> Result<RopeScaling, RopeFault> {
    // `type` is the older name.
    let kind = match fields.str("rope_type")? {
        Some(kind) => Some(kind),
        None => fields.str("type")?,
    };
    let original = || -> Fault<usize> {
        let field = "original_max_position_embeddings";
        match fields.uint(field, 1..=MAX_POSITIONS)?.or(max_positions) {
            Some(n) => Ok(n),
            None => Err(fields.missing(field)),
        }
    };
    Ok(match kind {
        None | Some("default" | "none") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear {
            factor: fields.required_positive("factor")?,
        },
        Some("llama3") => {
            let low_freq_factor = fields.required_positive("low_freq_factor")?;
            let high_freq_factor = fields.required_positive("high_freq_factor")?;
            if low_freq_factor >= high_freq_factor {
                return Err(RopeFault::from(format!(
                    "rope_scaling.low_freq_factor is {low_freq_factor}; it must be below \
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
