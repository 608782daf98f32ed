//! Converts a `config.json` to the metadata of a GGUF file.

use std::path::Path;

use inference::{Error, ErrorKind, Result};
use inference_formats::config::{RopeScaling, llama3_stretch};
use inference_formats::family::{Family, GgufExport, GgufFamily};
use inference_formats::gguf_config::is_unset;
use inference_formats::{ModelConfig, files, python_json};
use serde_json::{Map, Value};

/// Keys and values in the order of the file.
#[derive(Default)]
pub(super) struct Metadata {
    keys: Vec<Vec<u8>>,
}

/// A string in GGUF's encoding.
pub(super) fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Metadata {
    /// Adds a key, the number of its type, and its value.
    fn add(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.keys
            .push([text(key).as_slice(), &kind.to_le_bytes(), value].concat());
    }

    pub fn u32(&mut self, key: &str, value: u32) {
        self.add(key, 4, &value.to_le_bytes());
    }

    pub fn f32(&mut self, key: &str, value: f32) {
        self.add(key, 6, &value.to_le_bytes());
    }

    pub fn bool(&mut self, key: &str, value: bool) {
        self.add(key, 7, &[u8::from(value)]);
    }

    pub fn text(&mut self, key: &str, value: &str) {
        self.add(key, 8, &text(value));
    }

    fn array(&mut self, key: &str, kind: u32, count: usize, items: &[u8]) {
        let count = (count as u64).to_le_bytes();
        let value = [kind.to_le_bytes().as_slice(), &count, items].concat();
        self.add(key, 9, &value);
    }

    pub fn texts(&mut self, key: &str, values: &[String]) {
        let items: Vec<u8> = values.iter().flat_map(|value| text(value)).collect();
        self.array(key, 8, values.len(), &items);
    }

    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        let items: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.array(key, 5, values.len(), &items);
    }

    pub fn f32s(&mut self, key: &str, values: &[f32]) {
        let items: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.array(key, 6, values.len(), &items);
    }

    /// The number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// All keys and values as bytes.
    pub fn bytes(&self) -> Vec<u8> {
        self.keys.concat()
    }
}

fn unsupported(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}

/// Refuses a family that cannot be exported.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if GGUF files of this `model_type` cannot be written. The message
/// lists the others.
pub fn check_family(model_type: &str) -> Result<()> {
    exported(model_type).map(|_| ())
}

/// The GGUF files of a `model_type`, and the metadata to write.
fn exported(model_type: &str) -> Result<(&'static GgufFamily, GgufExport)> {
    let export = |family: &'static Family| {
        let gguf = family.gguf.as_ref()?;
        Some((family, gguf, gguf.export?))
    };
    let found = Family::of(model_type).and_then(export);
    let found = found.filter(|(family, _, export)| {
        family.model_type == model_type || export.multimodal.contains(&model_type)
    });
    if let Some((_, gguf, export)) = found {
        return Ok((gguf, export));
    }
    let known = Family::all().iter().copied().filter_map(export);
    let known: Vec<&str> = known.map(|(family, ..)| family.model_type).collect();
    Err(unsupported(format!(
        "{model_type:?} is not exported to GGUF; these are: {}",
        known.join(", ")
    )))
}

/// The configuration of a model directory, with the family whose names and keys the file uses.
pub(super) struct Config {
    pub model: ModelConfig,
    pub gguf: &'static GgufFamily,
    export: GgufExport,
}

/// Factors of rotary wavelengths, which GGUF stores as tensors: name and values.
pub(super) type Factors = (&'static str, Vec<f32>);

impl Config {
    /// Reads and checks a `config.json`.
    pub fn read(path: &Path) -> Result<Self> {
        let text = files::read_text(path, files::MAX_TEXT_FILE)?;
        let fields: Map<String, Value> = python_json::from_slice(text.as_bytes())
            .and_then(serde_json::from_value)
            .map_err(|e| {
                Error::new(ErrorKind::InvalidModel, format!("not a JSON object: {e}"))
                    .with_path(path)
            })?;
        Self::new(fields).map_err(|e| e.with_path(path))
    }

    fn new(fields: Map<String, Value>) -> Result<Self> {
        if ["quantization", "quantization_config"]
            .iter()
            .any(|name| fields.get(*name).is_some_and(|value| !value.is_null()))
        {
            return Err(unsupported(String::from(
                "the model is quantized, and GGUF has other forms of that; make it dense first (--dequantize)",
            )));
        }
        let model_type = fields.get("model_type").and_then(Value::as_str);
        let model_type = model_type.unwrap_or_default().to_owned();
        let (gguf, export) = exported(&model_type)?;
        let model = ModelConfig::from_map(fields)?;
        for field in export.absent {
            if let Some(value) = model.fields.get(*field).filter(|value| !is_unset(value)) {
                return Err(unsupported(format!(
                    "{field} is {value}, which a GGUF file of this architecture cannot express"
                )));
            }
        }
        for &(field, assumed) in export.assumed {
            let value = model.fields.get(field).filter(|value| !value.is_null());
            if value.is_some_and(|value| *value != assumed) {
                return Err(unsupported(format!(
                    "only {field} {assumed} is exported to GGUF"
                )));
            }
        }
        Ok(Self {
            model,
            gguf,
            export,
        })
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.gguf.architecture)
    }

    /// The number of elements of a head that rotate.
    fn rotated(&self) -> usize {
        (self.model.rope.partial * self.model.head_size() as f32).round() as usize
    }

    /// Writes the keys of the architecture. Returns the factors of rotary wavelengths.
    pub fn write(&self, to: &mut Metadata) -> Result<Vec<Factors>> {
        let model = &self.model;
        let head_dim = model.head_size();
        let epsilon = match self.gguf.layer_norm {
            true => "attention.layer_norm_epsilon",
            false => "attention.layer_norm_rms_epsilon",
        };
        for (name, value) in [
            ("block_count", model.num_hidden_layers),
            ("embedding_length", model.hidden_size),
            ("feed_forward_length", model.intermediate_size),
            ("attention.head_count", model.num_attention_heads),
            ("attention.head_count_kv", model.num_key_value_heads),
            ("attention.key_length", head_dim),
            ("attention.value_length", head_dim),
            ("rope.dimension_count", self.rotated()),
            ("vocab_size", model.vocab_size),
        ] {
            // The limits of a checked configuration are far below 2^32.
            to.u32(&self.key(name), value as u32);
        }
        let context = model.max_position_embeddings.ok_or_else(|| {
            let message = "max_position_embeddings is missing, which GGUF files need";
            Error::new(ErrorKind::InvalidModel, message)
        })?;
        to.u32(&self.key("context_length"), context as u32);
        to.f32(&self.key(epsilon), model.rms_norm_eps);
        to.f32(&self.key("rope.freq_base"), model.rope.theta);
        if let Some(sliding) = &model.rope_sliding {
            to.f32(&self.key("rope.freq_base_swa"), sliding.theta);
        }
        for (name, field) in self.export.factors {
            let factor = model.number(field)?.unwrap_or(1.0);
            to.f32(&self.key(name), factor);
        }
        for (name, field) in self.export.floats {
            if let Some(value) = model.number(field)? {
                to.f32(&self.key(name), value);
            }
        }
        for (name, field) in self.export.numbers {
            if let Some(value) = model.uint(field, 0..=u32::MAX as usize)? {
                to.u32(&self.key(name), value as u32);
            }
        }
        for (name, field) in self.export.flags {
            if let Some(value) = model.flag(field)? {
                to.bool(&self.key(name), value);
            }
        }
        self.scaling(to)
    }

    fn scaling(&self, to: &mut Metadata) -> Result<Vec<Factors>> {
        let key = |name: &str| self.key(&format!("rope.scaling.{name}"));
        let rope = &self.model.rope;
        let unknown = |name: &str| {
            Err(unsupported(format!(
                "rope scaling {name:?} is not exported to GGUF; none, linear, yarn, llama3 and \
                 longrope are"
            )))
        };
        match &rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                to.text(&key("type"), "linear");
                to.f32(&key("factor"), *factor);
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                ..
            } => {
                to.text(&key("type"), "yarn");
                to.f32(&key("factor"), *factor);
                to.u32(&key("original_context_length"), *original_context as u32);
                to.f32(&key("yarn_beta_fast"), *beta_fast);
                to.f32(&key("yarn_beta_slow"), *beta_slow);
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                let bounds = [*low_freq_factor, *high_freq_factor].map(f64::from);
                let (theta, rotated) = (f64::from(rope.theta), self.rotated());
                let factors = (0..rotated / 2).map(|pair| {
                    let exponent = (2 * pair) as f64 / rotated as f64;
                    let wave = 2.0 * std::f64::consts::PI * theta.powf(exponent);
                    let (factor, context) = (f64::from(*factor), f64::from(*original_context));
                    llama3_stretch(wave, factor, bounds, context) as f32
                });
                return Ok(vec![("rope_freqs.weight", factors.collect())]);
            }
            RopeScaling::LongRope {
                short,
                long,
                original_context,
                attention_factor,
            } => {
                to.u32(&key("original_context_length"), *original_context as u32);
                to.f32(&key("attn_factor"), *attention_factor);
                return Ok(vec![
                    ("rope_factors_long.weight", long.clone()),
                    ("rope_factors_short.weight", short.clone()),
                ]);
            }
            RopeScaling::Dynamic { .. } => return unknown("dynamic"),
            RopeScaling::Proportional { .. } => return unknown("proportional"),
        }
        Ok(Vec::new())
    }
}
