//! Reads a model's files without its weights: sizes, the chat template, the license.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use inference_formats::{Gguf, ModelConfig, ModelFiles, gguf_config, locate};
use inference_text::{ChatTemplate, TextPipeline, Tokenizer};

use crate::cli::terminal::failure::Failure;

/// Maximum number of bytes of a license text.
const MAX_LICENSE: u64 = 1 << 20;
/// The names of license files.
const LICENSES: [&str; 5] = [
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "COPYING",
    "USE_POLICY.md",
];

/// The headers of a model's files.
pub struct Files {
    /// The sizes and kinds of layers.
    pub config: ModelConfig,
    /// The tokenizer and the chat template.
    pub text: TextPipeline,
    /// The license: its text or its name.
    pub license: Option<String>,
}

impl Files {
    /// Reads the files. `template` replaces the model's own template.
    pub fn read(path: &Path, template: Option<ChatTemplate>) -> Result<Self, Failure> {
        match locate(path)? {
            ModelFiles::Directory(dir) => {
                let config = ModelConfig::from_file(&dir.join("config.json"))?;
                let text = match template {
                    Some(template) => TextPipeline::new(Tokenizer::from_dir(&dir)?, Some(template)),
                    None => TextPipeline::from_dir(
                        &dir,
                        config.model_type.as_deref().unwrap_or_default(),
                    )?,
                };
                Ok(Self {
                    config,
                    text,
                    license: license_in(&dir),
                })
            }
            ModelFiles::Gguf(file) => {
                let gguf = Gguf::open(&file)?;
                let config = gguf_config::config(&gguf)?;
                let parts = gguf_config::tokenizer_parts(&gguf)?;
                let text = match template {
                    Some(template) => {
                        TextPipeline::new(Tokenizer::from_gguf(&parts)?, Some(template))
                    }
                    None => {
                        let model_type = config.model_type.as_deref().unwrap_or_default();
                        TextPipeline::from_gguf(&parts, model_type)?
                    }
                };
                let license = gguf.metadata().str("general.license").ok().flatten();
                Ok(Self {
                    config,
                    text,
                    license: license.map(str::to_owned),
                })
            }
        }
    }
}

/// The license of a model directory: the text of its license file, otherwise the license name in
/// the header of README.md.
fn license_in(dir: &Path) -> Option<String> {
    let text = LICENSES.iter().find_map(|name| read(dir.join(name)));
    text.or_else(|| license_of_card(&read(dir.join("README.md"))?))
}

fn read(path: PathBuf) -> Option<String> {
    let mut text = String::new();
    let file = File::open(path).ok()?;
    file.take(MAX_LICENSE).read_to_string(&mut text).ok()?;
    (!text.trim().is_empty()).then_some(text)
}

/// The value of `license: NAME` in the header of a model card, between two lines of dashes.
fn license_of_card(card: &str) -> Option<String> {
    let mut lines = card.lines();
    if lines.next()?.trim_end() != "---" {
        return None;
    }
    let head = lines.take_while(|line| line.trim_end() != "---");
    let name = head
        .filter_map(|line| line.strip_prefix("license:"))
        .next()?;
    let name = name.trim().trim_matches(['"', '\'']);
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_license_is_a_file_or_a_word_in_the_card() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(license_in(dir.path()), None);
        let card = "---\nlanguage: en\nlicense: \"apache-2.0\"\n---\nlicense: other\n";
        std::fs::write(dir.path().join("README.md"), card).unwrap();
        assert_eq!(license_in(dir.path()).as_deref(), Some("apache-2.0"));
        std::fs::write(dir.path().join("LICENSE"), "All of it.\n").unwrap();
        assert_eq!(license_in(dir.path()).as_deref(), Some("All of it.\n"));
        assert_eq!(license_of_card("# A model\nlicense: mit\n"), None);
    }
}
