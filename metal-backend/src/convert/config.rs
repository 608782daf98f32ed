//! Writes all files of an MLX directory except the weights: `config.json` and the tokenizer's
//! files.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use inference::Result;
use serde_json::{Map, Value};

use super::faults::failed;
use super::gguf;
use super::plan::Plan;
use super::source::Source;
use crate::checkpoint::Family;
use crate::checkpoint::files::{MAX_TEXT_FILE, ModelDir, read_capped};
use crate::text::Tokenizer;

/// Files that are copied unchanged if the model has them. None of these files is code.
const COMPANIONS: [&str; 14] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    Tokenizer::GREEDY_FILE,
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "NOTICE",
];

/// Returns the files that a reader of dense weights needs, each with its name: `config.json`
/// without quantization, and the tokenizer's files.
pub(crate) fn text_files(path: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let source = Source::open(path)?;
    let mut config = source.config.clone();
    for key in OF_OTHER_WEIGHTS {
        config.shift_remove(key);
    }
    spell_out(&mut config);
    let config_path = path.join("config.json");
    let json = |path: &Path, value: &Value| {
        serde_json::to_vec_pretty(value).map_err(|e| failed("cannot write", path, e.into()))
    };
    let mut files = Vec::new();
    if let Some(file) = source.gguf() {
        for (name, value) in gguf::tokenizer_files(file, &source.config)? {
            files.push((name.to_owned(), json(path, &value)?));
        }
        if let Some(text) = gguf::greedy_vocabulary(file)? {
            files.push((Tokenizer::GREEDY_FILE.to_owned(), text.into_bytes()));
        }
    } else {
        let from = ModelDir::open(&source.path)?;
        for name in COMPANIONS {
            if let Some(path) = from.find(name)? {
                files.push((name.to_owned(), read_capped(&path, MAX_TEXT_FILE)?));
            }
        }
    }
    files.push((
        String::from("config.json"),
        json(&config_path, &Value::Object(config))?,
    ));
    Ok(files)
}

/// Configuration fields that are removed: the source's name, its quantization, and the settings of
/// networks for images and audio, whose weights are not copied.
const OF_OTHER_WEIGHTS: [&str; 5] = [
    "_name_or_path",
    "vision_config",
    "audio_config",
    "quantization",
    "quantization_config",
];

/// Writes all files except the weights.
pub(super) fn write(source: &Source, plan: &Plan, dir: &Path) -> Result<()> {
    let mut config = source.config.clone();
    for key in OF_OTHER_WEIGHTS {
        // A model that another tool quantized keeps its quantization entry, because its tensors are
        // copied unchanged.
        let foreign = key == "quantization_config"
            && plan.quantization.is_none()
            && is_foreign(config.get(key));
        if !foreign {
            config.shift_remove(key);
        }
    }
    spell_out(&mut config);
    if let Some(quantization) = &plan.quantization {
        let value = Value::Object(quantization.clone());
        config.insert("quantization".into(), value.clone());
        config.insert("quantization_config".into(), value);
    }
    if let Some(dtype) = plan.dtype {
        let key = if config.contains_key("dtype") {
            "dtype"
        } else {
            "torch_dtype"
        };
        config.insert(key.into(), dtype.name().into());
    }
    write_json(&dir.join("config.json"), &Value::Object(config))?;
    if let Some(file) = source.gguf() {
        for (name, json) in gguf::tokenizer_files(file, &source.config)? {
            write_json(&dir.join(name), &json)?;
        }
        if let Some(text) = gguf::greedy_vocabulary(file)? {
            write_file(&dir.join(Tokenizer::GREEDY_FILE), text.as_bytes())?;
        }
        return Ok(());
    }
    let from = ModelDir::open(&source.path)?;
    for name in COMPANIONS {
        let Some(path) = from.find(name)? else {
            continue;
        };
        let bytes = read_capped(&path, MAX_TEXT_FILE)?;
        write_file(&dir.join(name), &bytes)?;
    }
    Ok(())
}

/// Adds fields that older readers need, and that transformers 5 moved or removed.
fn spell_out(config: &mut Map<String, Value>) {
    if let Some(Value::Object(rope)) = config.get("rope_parameters").cloned() {
        if let Some(theta) = rope.get("rope_theta") {
            config.entry("rope_theta").or_insert(theta.clone());
        }
        let kind = rope.get("rope_type").and_then(Value::as_str);
        if let Some(kind) = kind.filter(|kind| *kind != "default") {
            let mut scaling = rope.clone();
            scaling.insert("type".into(), kind.into());
            config
                .entry("rope_scaling")
                .or_insert(Value::Object(scaling));
        }
    }
    let model_type = config.get("model_type").and_then(Value::as_str);
    let family = model_type.and_then(Family::of);
    for (newer, older) in family.map_or(&[][..], |family| family.older_fields) {
        if let Some(value) = config.get(*newer).cloned() {
            config.entry(*older).or_insert(value);
        }
    }
}

fn is_foreign(value: Option<&Value>) -> bool {
    value.is_some_and(|v| v.get("quant_method").is_some() && v.get("group_size").is_none())
}

/// Writes a value as indented JSON.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut bytes =
        serde_json::to_vec_pretty(value).map_err(|e| failed("cannot write", path, e.into()))?;
    bytes.push(b'\n');
    write_file(path, &bytes)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create_new(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| failed("cannot write", path, e))
}
