//! Converts a `config.json` to the metadata of a GGUF file.

use inference::{Error, ErrorKind, Result};
use inference_formats::Family;
use inference_formats::config::llama3_stretch;
use inference_formats::family::GgufExport;
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

/// A configuration to export, with the family whose names and keys the file uses.
pub(super) struct Config<'a> {
    pub fields: &'a Map<String, Value>,
    pub family: &'static Family,
    pub architecture: &'static str,
    export: GgufExport,
}

impl<'a> Config<'a> {
    pub fn new(fields: &'a Map<String, Value>) -> Result<Self> {
        if ["quantization", "quantization_config"]
            .iter()
            .any(|name| fields.get(*name).is_some_and(|value| !value.is_null()))
        {
            return Err(unsupported(String::from(
                "the model is quantized, and GGUF has other forms of that; make it dense first (--dequantize)",
            )));
        }
        let model_type = fields.get("model_type").and_then(Value::as_str);
        let model_type = model_type.unwrap_or_default();
        let exported = |family: &'static Family| {
            let gguf = family.gguf.as_ref()?;
            Some((family, gguf.architecture, gguf.export?))
        };
        // GGUF has names only for the text model of a multimodal checkpoint.
        let family = Family::of(model_type).filter(|f| f.model_type == model_type);
        let Some((family, architecture, export)) = family.and_then(exported) else {
            let known = Family::all().iter().copied().filter_map(exported);
            let known: Vec<&str> = known.map(|(family, ..)| family.model_type).collect();
            return Err(unsupported(format!(
                "{model_type:?} is not exported to GGUF; these are: {}",
                known.join(", ")
            )));
        };
        Ok(Self {
            fields,
            family,
            architecture,
            export,
        })
    }

    /// An unsigned integer of the configuration.
    pub fn number(&self, name: &str) -> Result<Option<u32>> {
        match self.fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64().and_then(|n| u32::try_from(n).ok()) {
                Some(n) => Ok(Some(n)),
                None => Err(Error::new(
                    ErrorKind::InvalidModel,
                    format!(
                        "config.json: {name} is {value}; it must be a whole number from 0 to 4294967295"
                    ),
                )),
            },
        }
    }

    pub fn required(&self, name: &str) -> Result<u32> {
        self.number(name)?.filter(|n| *n > 0).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidModel,
                format!("config.json: {name} is missing"),
            )
        })
    }

    fn float(&self, name: &str) -> Option<f64> {
        self.fields.get(name).and_then(Value::as_f64)
    }

    /// The elements of a head.
    pub fn head_dim(&self) -> Result<u32> {
        let heads = self.required("num_attention_heads")?;
        let quotient = self.required("hidden_size")? / heads;
        Ok(self.number("head_dim")?.unwrap_or(quotient))
    }

    /// Number of key and value heads.
    pub fn kv_heads(&self) -> Result<u32> {
        let heads = self.required("num_attention_heads")?;
        Ok(self.number("num_key_value_heads")?.unwrap_or(heads))
    }

    /// Writes the keys of the architecture. Returns Llama 3's frequency factors, which GGUF stores
    /// as a tensor.
    pub fn write(&self, to: &mut Metadata) -> Result<Option<Vec<f32>>> {
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let head_dim = self.head_dim()?;
        to.u32(&key("block_count"), self.required("num_hidden_layers")?);
        to.u32(&key("embedding_length"), self.required("hidden_size")?);
        to.u32(
            &key("feed_forward_length"),
            self.required("intermediate_size")?,
        );
        to.u32(
            &key("attention.head_count"),
            self.required("num_attention_heads")?,
        );
        to.u32(&key("attention.head_count_kv"), self.kv_heads()?);
        to.u32(&key("attention.key_length"), head_dim);
        to.u32(&key("attention.value_length"), head_dim);
        to.u32(&key("rope.dimension_count"), head_dim);
        to.u32(&key("vocab_size"), self.required("vocab_size")?);
        if let Some(context) = self.number("max_position_embeddings")? {
            to.u32(&key("context_length"), context);
        }
        let defaults = self.family.defaults;
        let epsilon = self.float("rms_norm_eps").unwrap_or(defaults.norm_eps);
        to.f32(&key("attention.layer_norm_rms_epsilon"), epsilon as f32);
        let parameters = self.fields.get("rope_parameters");
        let theta = self
            .float("rope_theta")
            .or_else(|| parameters?.get("rope_theta")?.as_f64())
            .unwrap_or(defaults.rope_theta);
        to.f32(&key("rope.freq_base"), theta as f32);
        for (theirs, ours) in self.export.factors {
            to.f32(&key(theirs), self.float(ours).unwrap_or(1.0) as f32);
        }
        for &(field, assumed) in self.export.assumed {
            if self.number(field)?.is_some_and(|n| n != assumed) {
                return Err(unsupported(format!(
                    "only {field} {assumed} is exported to GGUF"
                )));
            }
        }
        let sliding = self.number("sliding_window")?.is_some();
        if sliding && self.fields.get("use_sliding_window") != Some(&Value::Bool(false)) {
            return Err(unsupported(String::from(
                "models with a sliding window are not exported to GGUF",
            )));
        }
        self.scaling(to, theta, head_dim)
    }

    fn scaling(&self, to: &mut Metadata, theta: f64, head_dim: u32) -> Result<Option<Vec<f32>>> {
        let key = |name: &str| format!("{}.rope.scaling.{name}", self.architecture);
        let scaling = self
            .fields
            .get("rope_scaling")
            .filter(|value| !value.is_null());
        let scaling = scaling.or(self.fields.get("rope_parameters"));
        let Some(scaling) = scaling else {
            return Ok(None);
        };
        let number = |name: &str| scaling.get(name).and_then(Value::as_f64);
        let kind = scaling.get("rope_type").or(scaling.get("type"));
        let factor = number("factor").unwrap_or(1.0);
        match kind.and_then(Value::as_str) {
            None | Some("default") => Ok(None),
            Some("linear") => {
                to.text(&key("type"), "linear");
                to.f32(&key("factor"), factor as f32);
                Ok(None)
            }
            Some("yarn") => {
                to.text(&key("type"), "yarn");
                to.f32(&key("factor"), factor as f32);
                let original = number("original_max_position_embeddings");
                let original = original.map(|n| n as u32);
                let original = original.or(self.number("max_position_embeddings")?);
                to.u32(
                    &key("original_context_length"),
                    original.unwrap_or_default(),
                );
                for name in ["beta_fast", "beta_slow"] {
                    if let Some(beta) = number(name) {
                        to.f32(&key(&format!("yarn_{name}")), beta as f32);
                    }
                }
                Ok(None)
            }
            Some("llama3") => {
                let low = number("low_freq_factor").unwrap_or(1.0);
                let high = number("high_freq_factor").unwrap_or(4.0);
                let context = number("original_max_position_embeddings").unwrap_or(8192.0);
                let factors = (0..head_dim / 2).map(|i| {
                    let exponent = f64::from(2 * i) / f64::from(head_dim);
                    let wave = 2.0 * std::f64::consts::PI * theta.powf(exponent);
                    llama3_stretch(wave, factor, [low, high], context) as f32
                });
                Ok(Some(factors.collect()))
            }
            Some(other) => Err(unsupported(format!(
                "rope scaling {other:?} is not exported to GGUF; none, linear, yarn and llama3 are"
            ))),
        }
    }
}
