//! Selects the files that a model needs, from the files of a repository. Also checks whether a
//! directory contains all of them. It reads file names and the weights' index, but no weights.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use inference::{Error, ErrorKind, Result};
use serde_json::Value;

use super::ModelSpec;
use super::names::is_safe_name;

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
/// Maximum size of an index in bytes.
const MAX_INDEX: u64 = 64 << 20;
/// Maximum number of weight files in an index. No model has more.
const MAX_SHARDS: usize = 4096;

/// The files that a model needs besides its weights, if they exist.
const COMPANIONS: [&str; 12] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "rwkv_vocab_v20230424.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
];

/// The files to fetch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// One GGUF file, which is the whole model.
    Gguf(String),
    /// A directory of safetensors files.
    Directory {
        /// All files except the weights and their index.
        companions: Vec<String>,
        /// The index that lists the weight files.
        index: Option<String>,
    },
}

/// Chooses among the files of a repository.
pub(super) fn choose(names: &[&str], spec: &ModelSpec) -> Result<Choice> {
    if let Some(file) = spec.file() {
        return find_gguf(names, file).map(Choice::Gguf);
    }
    let has = |name: &str| names.contains(&name);
    if has(CONFIG) && (has(INDEX) || !loose_weights(names).is_empty()) {
        let known = std::iter::once(CONFIG).chain(COMPANIONS);
        let companions = known.filter(|name| has(name)).map(str::to_owned).collect();
        let index = has(INDEX).then(|| INDEX.to_owned());
        return Ok(Choice::Directory { companions, index });
    }
    match ggufs(names).as_slice() {
        [one] => Ok(Choice::Gguf((*one).to_owned())),
        [] => Err(Error::new(
            ErrorKind::InvalidModel,
            "the repository has neither config.json with .safetensors files nor a .gguf file; \
             weights in another format must be converted",
        )),
        several => Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "the repository has {} GGUF files; name one as {spec}:FILE or :QUANTIZATION: {}",
                several.len(),
                shown(several)
            ),
        )),
    }
}

/// The weight files in a directory without an index.
pub(super) fn loose_weights(names: &[&str]) -> Vec<String> {
    let all: Vec<&str> = names
        .iter()
        .copied()
        .filter(|n| n.ends_with(".safetensors") && !n.contains('/'))
        .collect();
    let model: Vec<&str> = all
        .iter()
        .copied()
        .filter(|n| n.starts_with("model"))
        .collect();
    // Adapters do not belong to the model, and neither does a second copy in the publisher's own
    // layout.
    let others = all
        .iter()
        .copied()
        .filter(|n| !n.starts_with("adapter") && !n.starts_with("consolidated"));
    let chosen = if model.is_empty() {
        others.collect()
    } else {
        model
    };
    chosen.into_iter().map(str::to_owned).collect()
}

/// The weight files that the index lists. The index is at `path` and called `name`. All files must
/// be in the repository.
pub(super) fn shards(path: &Path, name: &str, names: &[&str]) -> Result<Vec<String>> {
    let shards = index_shards(path)?;
    for shard in &shards {
        if !names.contains(&shard.as_str()) {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!("{name} names {shard:?}, which the repository does not have"),
            ));
        }
    }
    Ok(shards)
}

fn index_shards(path: &Path) -> Result<Vec<String>> {
    let bad = |why: &str| Error::new(ErrorKind::InvalidModel, why).with_path(path);
    let length = std::fs::metadata(path).map_or(0, |m| m.len());
    if length > MAX_INDEX {
        return Err(bad("the index is too large"));
    }
    let bytes = std::fs::read(path).map_err(|e| {
        Error::new(ErrorKind::Io, "cannot read the index")
            .with_path(path)
            .with_source(e)
    })?;
    let json: Value =
        serde_json::from_slice(&bytes).map_err(|e| bad("the index is not JSON").with_source(e))?;
    let map = json["weight_map"]
        .as_object()
        .ok_or_else(|| bad("the index has no weight_map"))?;
    let mut shards = BTreeSet::new();
    for shard in map.values() {
        let shard = shard
            .as_str()
            .ok_or_else(|| bad("the index names no file"))?;
        if !is_safe_name(shard) {
            return Err(bad(&format!(
                "the file name {shard:?} in the index is refused because it leads out of the directory"
            )));
        }
        shards.insert(shard.to_owned());
        if shards.len() > MAX_SHARDS {
            return Err(bad("the index names too many files"));
        }
    }
    if shards.is_empty() {
        return Err(bad("the index names no files"));
    }
    Ok(shards.into_iter().collect())
}

fn is_gguf(name: &str) -> bool {
    name.len() > 5 && name.to_ascii_lowercase().ends_with(".gguf")
}

/// The GGUF files that can be language models, without vision projectors.
fn ggufs<'a>(names: &[&'a str]) -> Vec<&'a str> {
    let mut ggufs: Vec<&str> = names
        .iter()
        .copied()
        .filter(|n| is_gguf(n) && !n.to_ascii_lowercase().contains("mmproj"))
        .collect();
    ggufs.sort_unstable();
    ggufs
}

/// The GGUF file with the name or the quantization `wanted`.
fn find_gguf(names: &[&str], wanted: &str) -> Result<String> {
    if is_gguf(wanted) && names.contains(&wanted) {
        return Ok(wanted.to_owned());
    }
    let candidates = ggufs(names);
    let none = |why: &str| {
        let list = if candidates.is_empty() {
            "it has none".to_owned()
        } else {
            format!("there are {}", shown(&candidates))
        };
        Error::new(ErrorKind::ModelNotFound, format!("{why}; {list}"))
    };
    if is_gguf(wanted) {
        return Err(none(&format!("the repository has no file {wanted:?}")));
    }
    let matching: Vec<&str> = candidates
        .iter()
        .copied()
        .filter(|n| is_of(n, wanted))
        .collect();
    match matching.as_slice() {
        [one] => Ok((*one).to_owned()),
        [] => Err(none(&format!(
            "the repository has no GGUF file of quantization {wanted:?}"
        ))),
        several if several.iter().all(|n| n.contains("-of-")) => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{wanted} is split into {} files ({}), which must be merged with llama-gguf-split",
                several.len(),
                shown(several)
            ),
        )),
        several => Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "{wanted} matches several files; name one: {}",
                shown(several)
            ),
        )),
    }
}

/// Whether a file name contains the quantization: for `Q4_K_M`, `x-Q4_K_M.gguf` but not
/// `x-IQ4_K_M.gguf`.
fn is_of(name: &str, tag: &str) -> bool {
    let stem = name.rsplit('/').next().unwrap_or(name).to_ascii_lowercase();
    let stem = stem.strip_suffix(".gguf").unwrap_or(&stem);
    let tag = tag.to_ascii_lowercase();
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    stem.match_indices(&tag).any(|(at, _)| {
        let before = stem[..at].chars().next_back();
        let after = stem[at + tag.len()..].chars().next();
        !before.is_some_and(part) && !after.is_some_and(part)
    })
}

fn shown(names: &[&str]) -> String {
    let mut text = names
        .iter()
        .take(24)
        .copied()
        .collect::<Vec<_>>()
        .join(", ");
    if names.len() > 24 {
        text.push_str(&format!(" and {} more", names.len() - 24));
    }
    text
}

/// The path of a snapshot's model, if all its files exist: the directory or the GGUF file.
pub(super) fn complete(snapshot: &Path, file: Option<&str>) -> Option<PathBuf> {
    let names = names_below(snapshot);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    if let Some(file) = file {
        return find_gguf(&names, file).ok().map(|name| snapshot.join(name));
    }
    if names.contains(&CONFIG) {
        // Python's tools may have downloaded only a configuration, without weights.
        let weights = if names.contains(&INDEX) {
            index_shards(&snapshot.join(INDEX)).ok()?
        } else {
            loose_weights(&names)
        };
        if !weights.is_empty() {
            let all = weights.iter().all(|w| names.contains(&w.as_str()));
            return all.then(|| snapshot.to_owned());
        }
    }
    match ggufs(&names).as_slice() {
        [one] => Some(snapshot.join(one)),
        _ => None,
    }
}

/// The names of files in a directory and two levels below it, without broken links.
fn names_below(dir: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut open = vec![(dir.to_owned(), String::new(), 0)];
    while let Some((dir, prefix, depth)) = open.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let path = entry.path();
            if path.is_file() {
                names.push(format!("{prefix}{name}"));
            } else if depth < 2 && path.is_dir() && !name.starts_with('.') {
                open.push((path, format!("{prefix}{name}/"), depth + 1));
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> ModelSpec {
        ModelSpec::parse(text).unwrap()
    }

    #[test]
    fn only_what_a_model_needs_is_chosen() {
        let names = [
            ".gitattributes",
            "README.md",
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "pytorch_model.bin",
            "consolidated.safetensors",
            "adapters.safetensors",
            "chat_template.jinja",
            "onnx/model.onnx",
            "training.py",
        ];
        let Choice::Directory { companions, index } = choose(&names, &spec("o/m")).unwrap() else {
            panic!("a directory");
        };
        assert_eq!(
            companions,
            ["config.json", "tokenizer.json", "chat_template.jinja"]
        );
        assert_eq!(index, None);
        assert_eq!(loose_weights(&names), ["model.safetensors"]);
        assert_eq!(
            loose_weights(&["weights.00.safetensors", "adapter_model.safetensors"]),
            ["weights.00.safetensors"]
        );
    }

    #[test]
    fn gguf_files_are_chosen_by_name_or_quantization() {
        let names = [
            "README.md",
            "m-Q4_K_M.gguf",
            "m-IQ4_XS.gguf",
            "m-Q4_K_S.gguf",
            "m-f16.gguf",
            "mmproj-m-f16.gguf",
            "big/m-Q8_0-00001-of-00002.gguf",
            "big/m-Q8_0-00002-of-00002.gguf",
        ];
        let chosen = |text: &str| choose(&names, &spec(text));
        for (text, want) in [
            ("o/m:Q4_K_M", "m-Q4_K_M.gguf"),
            ("o/m:q4_k_s", "m-Q4_K_S.gguf"),
            ("o/m:F16", "m-f16.gguf"),
            ("o/m:m-IQ4_XS.gguf", "m-IQ4_XS.gguf"),
            (
                "o/m:big/m-Q8_0-00002-of-00002.gguf",
                "big/m-Q8_0-00002-of-00002.gguf",
            ),
        ] {
            assert_eq!(chosen(text).unwrap(), Choice::Gguf(want.into()), "{text}");
        }
        let message = |text: &str| chosen(text).unwrap_err().to_string();
        assert!(
            message("o/m").contains("m-Q4_K_M.gguf"),
            "{}",
            message("o/m")
        );
        assert!(message("o/m:Q4_K").contains("no GGUF file of quantization"));
        assert!(message("o/m:x.gguf").contains("no file"));
        assert!(message("o/m:Q8_0").contains("merged"));
        assert_eq!(
            choose(&["a.gguf"], &spec("o/m")).unwrap(),
            Choice::Gguf("a.gguf".into())
        );
        let none = choose(&["pytorch_model.bin", "config.json"], &spec("o/m")).unwrap_err();
        assert!(none.to_string().contains("converted"), "{none}");
    }

    #[test]
    fn an_index_names_files_of_the_repository_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(INDEX);
        let shards_of = |json: &str| {
            std::fs::write(&path, json).unwrap();
            shards(&path, INDEX, &["a.safetensors", "b.safetensors"])
        };
        let good =
            r#"{"weight_map":{"x":"b.safetensors","y":"a.safetensors","z":"a.safetensors"}}"#;
        assert_eq!(shards_of(good).unwrap(), ["a.safetensors", "b.safetensors"]);
        for (bad, why) in [
            (r#"{"weight_map":{"x":"../../a.safetensors"}}"#, "refused"),
            (r#"{"weight_map":{"x":"/etc/passwd"}}"#, "refused"),
            (r#"{"weight_map":{"x":"c.safetensors"}}"#, "does not have"),
            (r#"{"weight_map":{"x":1}}"#, "no file"),
            (r#"{"weight_map":{}}"#, "no files"),
            ("{}", "weight_map"),
            ("{", "JSON"),
        ] {
            let error = shards_of(bad).unwrap_err();
            assert!(error.to_string().contains(why), "{bad}: {error}");
        }
    }

    #[test]
    fn snapshots_are_complete_or_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert_eq!(complete(dir.path(), None), None);
        std::fs::write(at(CONFIG), "{}").unwrap();
        assert_eq!(complete(dir.path(), None), None);
        std::fs::write(
            at(INDEX),
            r#"{"weight_map":{"x":"a.safetensors","y":"b.safetensors"}}"#,
        )
        .unwrap();
        std::fs::write(at("a.safetensors"), "").unwrap();
        assert_eq!(complete(dir.path(), None), None);
        std::fs::write(at("b.safetensors"), "").unwrap();
        assert_eq!(complete(dir.path(), None).as_deref(), Some(dir.path()));
        assert_eq!(complete(dir.path(), Some("Q4_0")), None);
        std::fs::write(at("m-Q4_0.gguf"), "").unwrap();
        assert_eq!(complete(dir.path(), Some("Q4_0")), Some(at("m-Q4_0.gguf")));
    }
}
