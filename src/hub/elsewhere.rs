//! Names of models in other tools, with their repositories on the Hugging Face Hub. The
//! repositories are not pinned, so such a name downloads nothing; the error message says how to get
//! the model. This file is data without I/O.

/// A model on the hub, and its names in other tools.
struct Elsewhere {
    names: &'static [&'static str],
    repository: &'static str,
}

macro_rules! elsewhere {
    ($($($name:literal)|+ => $repository:literal;)*) => {
        &[$(Elsewhere { names: &[$($name),+], repository: $repository }),*]
    };
}

const ELSEWHERE: &[Elsewhere] = elsewhere! {
    "llama3.2" | "llama3.2:3b" => "mlx-community/Llama-3.2-3B-Instruct-4bit";
    "llama3.2:1b" => "mlx-community/Llama-3.2-1B-Instruct-4bit";
    "llama3.1" | "llama3.1:8b" => "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit";
    "llama3" | "llama3:8b" => "mlx-community/Meta-Llama-3-8B-Instruct-4bit";
    "mistral" | "mistral:7b" => "mlx-community/Mistral-7B-Instruct-v0.3-4bit";
    "mixtral" | "mixtral:8x7b" => "mistralai/Mixtral-8x7B-Instruct-v0.1";
    "qwen3:0.6b" => "mlx-community/Qwen3-0.6B-4bit";
    "qwen3:1.7b" => "mlx-community/Qwen3-1.7B-4bit";
    "qwen3:4b" => "mlx-community/Qwen3-4B-4bit";
    "qwen3" | "qwen3:8b" => "mlx-community/Qwen3-8B-4bit";
    "qwen3:14b" => "mlx-community/Qwen3-14B-4bit";
    "qwen3:32b" => "mlx-community/Qwen3-32B-4bit";
    "qwen3:30b" => "mlx-community/Qwen3-30B-A3B-4bit";
    "qwen2.5:0.5b" => "mlx-community/Qwen2.5-0.5B-Instruct-4bit";
    "qwen2.5:1.5b" => "mlx-community/Qwen2.5-1.5B-Instruct-4bit";
    "qwen2.5:3b" => "mlx-community/Qwen2.5-3B-Instruct-4bit";
    "qwen2.5" | "qwen2.5:7b" => "mlx-community/Qwen2.5-7B-Instruct-4bit";
    "gemma3:1b" => "mlx-community/gemma-3-1b-it-4bit";
    "gemma3" | "gemma3:4b" => "mlx-community/gemma-3-4b-it-4bit";
    "gemma2:2b" => "mlx-community/gemma-2-2b-it-4bit";
    "gemma2" | "gemma2:9b" => "mlx-community/gemma-2-9b-it-4bit";
    "phi3" | "phi3:mini" => "microsoft/Phi-3-mini-4k-instruct";
    "phi3.5" => "microsoft/Phi-3.5-mini-instruct";
    "gpt-oss" | "gpt-oss:20b" => "openai/gpt-oss-20b";
    "smollm2:360m" => "HuggingFaceTB/SmolLM2-360M-Instruct";
    "smollm2:1.7b" => "HuggingFaceTB/SmolLM2-1.7B-Instruct";
    "smollm3" | "smollm3:3b" => "HuggingFaceTB/SmolLM3-3B";
};

/// The repository for a name from another tool. Letter case is ignored, and a missing tag means
/// `:latest`.
#[must_use]
pub fn on_the_hub(name: &str) -> Option<&'static str> {
    let name = name.trim();
    let name = name.strip_suffix(":latest").unwrap_or(name);
    let entry = ELSEWHERE.iter().find(|entry| {
        entry
            .names
            .iter()
            .any(|known| known.eq_ignore_ascii_case(name))
    });
    entry.map(|entry| entry.repository)
}

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    ELSEWHERE.iter().flat_map(|entry| entry.names).copied()
}

#[cfg(test)]
mod tests {
    use super::super::{ModelSpec, find};
    use super::*;

    #[test]
    fn names_are_found_in_any_case_and_with_latest() {
        for name in ["llama3.2", "Llama3.2:latest", " llama3.2:3B "] {
            let repository = on_the_hub(name).unwrap();
            assert!(repository.ends_with("Llama-3.2-3B-Instruct-4bit"));
        }
        assert_eq!(on_the_hub("llama"), None);
        assert_eq!(on_the_hub(""), None);
    }

    #[test]
    fn every_name_means_one_repository_and_none_is_pinned() {
        let mut seen = std::collections::HashSet::new();
        for entry in ELSEWHERE {
            assert!(
                ModelSpec::parse(entry.repository).is_some(),
                "{}",
                entry.repository
            );
            for name in entry.names {
                assert!(seen.insert(name.to_ascii_lowercase()), "{name} twice");
                assert!(find(name).is_none(), "{name} is in the catalog");
            }
        }
    }
}
