//! Reads directories of sentence-transformers: the modules after the network, and the prompts
//! before texts. The files are `modules.json`, `sentence_bert_config.json`,
//! `config_sentence_transformers.json`, and one `config.json` per module. This module reads no
//! weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, ErrorKind, Result};
use crate::files::{ModelDir, invalid, read_capped};
use crate::limits;
use crate::python_json;

/// The largest accepted file, in bytes.
const MAX_BYTES: u64 = 16 << 20;

/// The maximum number of modules in a pipeline.
const MAX_MODULES: usize = 16;

/// The names of files that may state the maximum length of a text.
const LENGTH_FILES: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// The modules after the network, and the prompts before texts.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct SentenceConfig {
    /// How hidden states become one vector: `cls`, `mean`, `max`, `mean_sqrt_length`,
    /// `weighted_mean` or `last`. `None` if the directory does not state it.
    pub pooling: Option<&'static str>,
    /// Whether pooling includes the tokens of the prompt.
    pub include_prompt: bool,
    /// Layers on the pooled vector, in order.
    pub dense: Vec<DenseModule>,
    /// Whether the vector is scaled to length one. `None` without a `modules.json`.
    pub normalize: Option<bool>,
    /// The maximum number of tokens in a text.
    pub max_length: Option<usize>,
    /// Maximum length according to the tokenizer's file, which newer versions use.
    pub tokenizer_length: Option<usize>,
    /// Whether texts are converted to lower case before tokenization.
    pub lower_case: bool,
    /// Prompts by name.
    pub prompts: BTreeMap<String, String>,
    /// The name of the prompt that is used by default.
    pub default_prompt: Option<String>,
    /// For a decoder that answers with a word: the tokens whose logits are the score of a query
    /// with a document.
    pub logit_score: Option<LogitScore>,
}

/// The score of a decoder: one logit, or the difference of two logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogitScore {
    /// The token that means "the document answers the query".
    pub yes: u32,
    /// The token that means "the document does not answer the query".
    pub no: Option<u32>,
}

/// A layer on the pooled vector.
#[derive(Debug, Clone, PartialEq)]
pub struct DenseModule {
    /// The directory with its weights.
    pub path: PathBuf,
    /// Elements of its input.
    pub inputs: usize,
    /// Elements of its output.
    pub outputs: usize,
    /// Whether the module has a bias.
    pub bias: bool,
    /// The activation of its output.
    pub activation: DenseActivation,
}

/// The activation of a layer on the pooled vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseActivation {
    /// No activation.
    Identity,
    /// The hyperbolic tangent.
    Tanh,
    /// `x * Phi(x)`.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `x * sigmoid(x)`.
    Silu,
}

impl SentenceConfig {
    /// Reads the files of a directory. Missing files leave their fields unset.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a damaged file; [`ErrorKind::Unsupported`] for an unknown module.
    /// The message names them.
    pub fn from_dir(path: &Path) -> Result<Self> {
        let dir = ModelDir::open(path)?;
        let mut config = Self {
            include_prompt: true,
            ..Self::default()
        };
        for name in LENGTH_FILES {
            if let Some((map, _)) = object(&dir, name)? {
                config.lengths(&map);
                break;
            }
        }
        if let Some((map, _)) = object(&dir, "tokenizer_config.json")? {
            config.tokenizer_length = length(&map, "model_max_length");
        }
        if let Some((map, file)) = object(&dir, "config_sentence_transformers.json")? {
            config.prompts(&map).map_err(|m| invalid(&file, m))?;
        }
        let Some((value, file)) = value(&dir, "modules.json")? else {
            return Ok(config);
        };
        let modules = value.as_array().filter(|list| list.len() <= MAX_MODULES);
        let Some(modules) = modules else {
            let message = format!("not a list of at most {MAX_MODULES} modules");
            return Err(invalid(&file, message));
        };
        config.normalize = Some(false);
        for (i, module) in modules.iter().enumerate() {
            config.module(&dir, module, i).map_err(|e| match e.path() {
                Some(_) => e,
                None => e.with_path(&file),
            })?;
        }
        Ok(config)
    }

    fn lengths(&mut self, map: &Map<String, Value>) {
        self.max_length = length(map, "max_seq_length");
        self.lower_case = map.get("do_lower_case").and_then(Value::as_bool) == Some(true);
    }

    fn prompts(&mut self, map: &Map<String, Value>) -> Result<(), String> {
        if let Some(Value::Object(prompts)) = map.get("prompts") {
            for (name, text) in prompts {
                let text = text.as_str().ok_or(format!("prompts.{name} is not text"))?;
                self.prompts.insert(name.clone(), text.to_owned());
            }
        }
        match map.get("default_prompt_name") {
            None | Some(Value::Null) => Ok(()),
            Some(Value::String(name)) if self.prompts.contains_key(name) => {
                self.default_prompt = Some(name.clone());
                Ok(())
            }
            Some(other) => Err(format!(
                "default_prompt_name is {other}, which is not the name of a prompt"
            )),
        }
    }

    fn module(&mut self, dir: &ModelDir, module: &Value, at: usize) -> Result<()> {
        let text = |name: &str| module.get(name).and_then(Value::as_str);
        let kind = text("type").unwrap_or_default();
        let path = text("path").unwrap_or_default();
        let class = kind.rsplit('.').next().unwrap_or_default();
        match (class, at) {
            ("Transformer", 0) if path.is_empty() => Ok(()),
            ("Transformer", 0) => Err(unsupported(format!(
                "the network is in {path:?}; copy the files of that directory beside modules.json"
            ))),
            ("Pooling", _) => self.pooling_module(dir, path),
            ("Dense", _) => self.dense_module(dir, path),
            ("Normalize", _) => {
                self.normalize = Some(true);
                Ok(())
            }
            ("LogitScore", _) => self.logit_score_module(dir, path),
            ("Dropout", _) => Ok(()),
            _ => Err(unsupported(format!(
                "module {at} is {kind:?}; supported are Transformer, Pooling, Dense, Normalize, \
                 LogitScore and Dropout"
            ))),
        }
    }

    fn logit_score_module(&mut self, dir: &ModelDir, path: &str) -> Result<()> {
        let (map, file) = required(dir, &format!("{path}/config.json"))?;
        let id = |name: &str| match map.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => (value.as_u64().and_then(|id| u32::try_from(id).ok()))
                .map(Some)
                .ok_or_else(|| invalid(&file, format!("{name} is {value}, which is not a token"))),
        };
        let Some(yes) = id("true_token_id")? else {
            return Err(invalid(&file, "true_token_id is missing"));
        };
        let no = id("false_token_id")?;
        self.logit_score = Some(LogitScore { yes, no });
        Ok(())
    }

    fn pooling_module(&mut self, dir: &ModelDir, path: &str) -> Result<()> {
        const MODES: [(&str, &str, &str); 6] = [
            ("pooling_mode_cls_token", "cls", "cls"),
            ("pooling_mode_mean_tokens", "mean", "mean"),
            ("pooling_mode_max_tokens", "max", "max"),
            (
                "pooling_mode_mean_sqrt_len_tokens",
                "mean_sqrt_len_tokens",
                "mean_sqrt_length",
            ),
            (
                "pooling_mode_weightedmean_tokens",
                "weightedmean",
                "weighted_mean",
            ),
            ("pooling_mode_lasttoken", "lasttoken", "last"),
        ];
        let (map, file) = required(dir, &format!("{path}/config.json"))?;
        let on = |name: &str| map.get(name).and_then(Value::as_bool) == Some(true);
        let named = map.get("pooling_mode").and_then(Value::as_str);
        let chosen: Vec<&str> = MODES
            .iter()
            .filter(|(flag, name, _)| on(flag) || named == Some(name))
            .map(|(_, _, pooling)| *pooling)
            .collect();
        if let Some(n) = map.get("include_prompt").and_then(Value::as_bool) {
            self.include_prompt = n;
        }
        match chosen.as_slice() {
            [one] => {
                self.pooling = Some(one);
                Ok(())
            }
            [] => Err(unsupported(format!(
                "the pooling mode {} is not supported",
                named.map_or_else(|| String::from("is not given: that"), |n| format!("{n:?}"))
            ))
            .with_path(&file)),
            several => Err(unsupported(format!(
                "vectors of several poolings ({}) one after another are not supported",
                several.join(", ")
            ))
            .with_path(&file)),
        }
    }

    fn dense_module(&mut self, dir: &ModelDir, path: &str) -> Result<()> {
        let (map, file) = required(dir, &format!("{path}/config.json"))?;
        let size = |name: &str| {
            let n = map.get(name).and_then(Value::as_u64);
            let n = n.and_then(|n| usize::try_from(n).ok());
            n.filter(|n| (1..=limits::HIDDEN).contains(n))
                .ok_or_else(|| {
                    let message = format!("{name} must be a number from 1 to {}", limits::HIDDEN);
                    invalid(&file, message)
                })
        };
        let name = map.get("activation_function").and_then(Value::as_str);
        let activation = match name.map(|name| name.rsplit('.').next().unwrap_or_default()) {
            Some("Identity") => DenseActivation::Identity,
            None | Some("Tanh") => DenseActivation::Tanh,
            Some("GELU") => DenseActivation::Gelu,
            Some("ReLU") => DenseActivation::Relu,
            Some("SiLU") => DenseActivation::Silu,
            Some(other) => {
                return Err(unsupported(format!(
                    "activation_function {other:?} is not supported; supported are Identity, Tanh, \
                     GELU, ReLU and SiLU"
                ))
                .with_path(&file));
            }
        };
        if self.normalize == Some(true) || self.pooling.is_none() {
            let message = "a Dense module must come after Pooling and before Normalize";
            return Err(unsupported(message).with_path(&file));
        }
        let inner = map.get("module_input_name").and_then(Value::as_str);
        if let Some(other) = inner.filter(|name| *name != "sentence_embedding") {
            let message = format!("a Dense module on {other:?} is not supported");
            return Err(unsupported(message).with_path(&file));
        }
        self.dense.push(DenseModule {
            inputs: size("in_features")?,
            outputs: size("out_features")?,
            bias: map.get("bias").and_then(Value::as_bool).unwrap_or(true),
            activation,
            path: file.parent().unwrap_or(&file).to_owned(),
        });
        Ok(())
    }
}

/// A number of tokens; `None` for the huge number that tokenizers without a maximum write.
fn length(map: &Map<String, Value>, name: &str) -> Option<usize> {
    let length = map.get(name).and_then(Value::as_u64);
    let length = length.and_then(|n| usize::try_from(n).ok());
    length.filter(|n| (1..=limits::POSITIONS).contains(n))
}

fn unsupported(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, message)
}

/// The value in a file of the directory, and its path; `None` without the file.
fn value(dir: &ModelDir, name: &str) -> Result<Option<(Value, PathBuf)>> {
    let Some(path) = dir.find(name)? else {
        return Ok(None);
    };
    let bytes = read_capped(&path, MAX_BYTES)?;
    let value = python_json::from_slice(&bytes)
        .map_err(|e| invalid(&path, "not valid JSON").with_source(e))?;
    Ok(Some((value, path)))
}

fn object(dir: &ModelDir, name: &str) -> Result<Option<(Map<String, Value>, PathBuf)>> {
    match value(dir, name)? {
        None => Ok(None),
        Some((Value::Object(map), path)) => Ok(Some((map, path))),
        Some((_, path)) => Err(invalid(&path, "not a JSON object")),
    }
}

fn required(dir: &ModelDir, name: &str) -> Result<(Map<String, Value>, PathBuf)> {
    object(dir, name)?.ok_or_else(|| {
        let message = format!("modules.json names {name:?}, which is missing");
        Error::new(ErrorKind::Invalid, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A directory with these files.
    fn dir(files: &[(&str, Value)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content.to_string()).unwrap();
        }
        dir
    }

    fn modules(classes: &[(&str, &str)]) -> Value {
        let list = classes.iter();
        list.map(|(class, path)| json!({"type": format!("sentence_transformers.x.{class}"), "path": path}))
            .collect()
    }

    #[test]
    fn a_directory_of_each_generation_is_read() {
        let list = modules(&[
            ("Transformer", ""),
            ("Pooling", "1_Pooling"),
            ("Dense", "2_Dense"),
            ("Normalize", "3_Normalize"),
        ]);
        let dense = json!({"in_features": 8, "out_features": 4, "bias": false,
            "activation_function": "torch.nn.modules.linear.Identity"});
        for pooling in [
            json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}),
            json!({"pooling_mode": "cls", "include_prompt": true}),
        ] {
            let dir = dir(&[
                ("modules.json", list.clone()),
                ("1_Pooling/config.json", pooling),
                ("2_Dense/config.json", dense.clone()),
                (
                    "sentence_bert_config.json",
                    json!({"max_seq_length": 256, "do_lower_case": true}),
                ),
                ("tokenizer_config.json", json!({"model_max_length": 512})),
                (
                    "config_sentence_transformers.json",
                    json!({"prompts": {"query": "q: "}, "default_prompt_name": "query"}),
                ),
            ]);
            let config = SentenceConfig::from_dir(dir.path()).unwrap();
            assert_eq!(
                (config.pooling, config.normalize),
                (Some("cls"), Some(true))
            );
            assert_eq!(
                (config.max_length, config.tokenizer_length),
                (Some(256), Some(512))
            );
            assert!(config.lower_case && config.include_prompt);
            assert_eq!(config.default_prompt.as_deref(), Some("query"));
            assert_eq!(config.prompts["query"], "q: ");
            let [dense] = config.dense.as_slice() else {
                panic!("{:?}", config.dense);
            };
            assert_eq!((dense.inputs, dense.outputs, dense.bias), (8, 4, false));
            assert_eq!(dense.activation, DenseActivation::Identity);
            assert_eq!(dense.path, dir.path().join("2_Dense"));
        }
        let plain = SentenceConfig::from_dir(dir(&[]).path()).unwrap();
        assert_eq!(
            (plain.pooling, plain.normalize, plain.max_length),
            (None, None, None)
        );
    }

    #[test]
    fn what_is_not_understood_is_an_error_that_names_it() {
        let mean = json!({"pooling_mode": "mean"});
        let dense = json!({"in_features": 8, "out_features": 4});
        let transformer = ("Transformer", "");
        for (files, word) in [
            (
                vec![("modules.json", modules(&[("Transformer", "0_Transformer")]))],
                "0_Transformer",
            ),
            (
                vec![("modules.json", modules(&[transformer, ("CNN", "1")]))],
                "CNN",
            ),
            (
                vec![("modules.json", modules(&[transformer, ("Pooling", "1")]))],
                "missing",
            ),
            (
                vec![("modules.json", modules(&[transformer, ("Pooling", "../x")]))],
                "refused",
            ),
            (vec![("modules.json", json!({"a": 1}))], "not a list"),
            (
                vec![
                    ("modules.json", modules(&[transformer, ("Pooling", "1")])),
                    ("1/config.json", json!({"pooling_mode": ["mean", "cls"]})),
                ],
                "pooling mode",
            ),
            (
                vec![
                    ("modules.json", modules(&[transformer, ("Pooling", "1")])),
                    (
                        "1/config.json",
                        json!({"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}),
                    ),
                ],
                "several poolings",
            ),
            (
                vec![
                    ("modules.json", modules(&[transformer, ("Dense", "2")])),
                    ("2/config.json", dense.clone()),
                ],
                "after Pooling",
            ),
            (
                vec![
                    (
                        "modules.json",
                        modules(&[transformer, ("Pooling", "1"), ("Dense", "2")]),
                    ),
                    ("1/config.json", mean.clone()),
                    (
                        "2/config.json",
                        json!({"in_features": 0, "out_features": 4}),
                    ),
                ],
                "in_features",
            ),
            (
                vec![
                    ("modules.json", modules(&[transformer, ("LogitScore", "1")])),
                    ("1/config.json", json!({"true_token_id": -1})),
                ],
                "not a token",
            ),
            (
                vec![(
                    "config_sentence_transformers.json",
                    json!({"default_prompt_name": "x"}),
                )],
                "not the name of a prompt",
            ),
        ] {
            let dir = dir(&files);
            let error = SentenceConfig::from_dir(dir.path()).unwrap_err();
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
    }

    #[test]
    fn words_that_score_are_read() {
        let dir = dir(&[
            (
                "modules.json",
                modules(&[("Transformer", ""), ("LogitScore", "1")]),
            ),
            (
                "1/config.json",
                json!({"true_token_id": 9, "false_token_id": null}),
            ),
        ]);
        let config = SentenceConfig::from_dir(dir.path()).unwrap();
        assert_eq!(config.logit_score, Some(LogitScore { yes: 9, no: None }));
    }
}
