//! Tests that only the descriptor of a family contains the family's name. All other code must use
//! the descriptor, so that a new family needs no change elsewhere.

use std::collections::BTreeSet;
use std::path::Path;

use inference_formats::{Family, ModelConfig};
use serde_json::json;

#[path = "../../../tests/common/layering.rs"]
#[allow(dead_code)]
mod layering;

/// The folder of the descriptors: its crate and module.
const DESCRIPTORS: (&str, &str) = ("inference-formats", "family");

/// Exceptions: crate, module, and names that have another meaning in that module.
const OTHER_MEANINGS: &[(&str, &str, &[&str])] = &[
    // Kinds of tokenizers and pre-tokenizers in GGUF metadata.
    (
        "inference-text",
        "tokenizer_gguf",
        &[
            "bert",
            "command-r",
            "dbrx",
            "exaone-moe",
            "gemma4",
            "gpt2",
            "llama",
            "olmo",
            "qwen2",
            "qwen35",
            "smollm",
        ],
    ),
    (
        "inference-text",
        "tokenizer_gguf_words",
        &[
            "afmoe",
            "bailingmoe",
            "cohere2moe",
            "command-r",
            "dbrx",
            "exaone",
            "exaone-moe",
            "exaone4",
            "glm4",
            "hunyuan",
            "hunyuan-dense",
            "laguna",
            "lfm2",
            "llama4",
            "minimax-m2",
            "olmo",
            "qwen2",
            "qwen35",
            "smollm",
            "starcoder",
        ],
    ),
    ("inference-text", "tokenizer_greedy", &["rwkv"]),
    // Kinds of layers in configurations.
    ("inference-formats", "config::layers", &["mamba"]),
    // Chat formats in messages.
    ("inference-text", "template_defaults", &["gemma", "mistral"]),
    // Syntaxes of tool calls.
    ("inference-text", "reply::choice", &["kimi_k2", "minimax"]),
    (
        "inference-text",
        "reply::family",
        &[
            "deepseek_v3",
            "gemma4",
            "glm4",
            "glm4_moe",
            "kimi_k2",
            "lfm2",
            "minimax",
            "olmo3",
        ],
    ),
    // Steps of training, decoding and charts.
    ("inference-probe", "chart", &["step"]),
    ("inference-python", "train", &["step"]),
    ("metal-backend", "sample", &["step"]),
    ("metal-backend", "train::progress", &["step"]),
    ("metal-backend", "train::step::compiled", &["step"]),
    // ollama's model names.
    (
        "",
        "hub::elsewhere",
        &[
            "gemma2", "gemma3", "gpt-oss", "mistral", "mixtral", "phi3", "qwen3", "smollm3",
        ],
    ),
];

/// All names of families: each `model_type`, its name in GGUF, and the word before its version
/// number.
fn names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for family in Family::all() {
        let gguf = family.gguf.as_ref().map(|gguf| gguf.architecture);
        for name in family.model_types().chain(gguf) {
            let word = name.trim_end_matches(|c: char| !c.is_alphabetic());
            let word = word.split(|c: char| c.is_ascii_digit()).next().unwrap();
            names.extend([name.to_owned(), word.to_owned()]);
        }
    }
    names
}

/// The names that occur as strings in the code of a module.
fn spelled<'n>(names: &'n BTreeSet<String>, text: &str) -> BTreeSet<&'n str> {
    let code = layering::code(text);
    let spelled = names
        .iter()
        .filter(|name| code.contains(&format!("\"{name}\"")));
    spelled.map(String::as_str).collect()
}

/// Each module that contains a family's name, unless the name has another meaning there.
fn faults(modules: &[(String, String, String)]) -> Vec<String> {
    let names = names();
    let mut faults = Vec::new();
    for (of, module, text) in modules {
        let other = OTHER_MEANINGS
            .iter()
            .find(|(c, m, _)| (*c, *m) == (of, module));
        let allowed = other.map_or(&[][..], |(_, _, names)| names);
        for name in spelled(&names, text) {
            if !allowed.contains(&name) {
                faults.push(format!(
                    "{of}: {module} spells {name:?}; a descriptor in inference-formats/src/family \
                     says what differs"
                ));
            }
        }
    }
    faults
}

/// Crate, module and text of all library and program code in the workspace, without descriptors.
fn sources() -> Vec<(String, String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&root).unwrap() {
        let folder = entry.unwrap().path();
        if folder.join("Cargo.toml").is_file() && folder.join("src").is_dir() {
            let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
            all.push((name, folder.join("src")));
        }
    }
    all.push((String::new(), root.join("src")));
    let mut sources = Vec::new();
    for (name, src) in all {
        for (module, text) in layering::modules(&src) {
            let is_test = module.ends_with("tests") || module.ends_with("testing");
            let below = module.strip_prefix(DESCRIPTORS.1);
            let is_descriptor = name == DESCRIPTORS.0
                && below.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"));
            if !is_test && !is_descriptor {
                sources.push((name.clone(), module, text));
            }
        }
    }
    sources
}

#[test]
fn only_descriptors_spell_the_name_of_a_family() {
    let sources = sources();
    assert!(sources.len() > 400, "{} modules were found", sources.len());
    let faults = faults(&sources);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    // An exception that is no longer needed must be removed.
    let names = names();
    for (of, module, allowed) in OTHER_MEANINGS {
        let source = sources
            .iter()
            .find(|(c, m, _)| (c, m) == (&(*of).into(), &(*module).into()));
        let (_, _, text) = source.unwrap_or_else(|| panic!("{of}: {module} is no module any more"));
        let spelled: Vec<_> = spelled(&names, text).into_iter().collect();
        assert_eq!(spelled, *allowed, "{of}: {module}");
    }
}

#[test]
fn a_name_in_other_code_is_found() {
    let fault = |of: &str, module: &str, text: &str| {
        faults(&[(of.to_owned(), module.to_owned(), text.to_owned())]).len()
    };
    let text = "fn f(t: &str) -> bool { t == \"gemma3_text\" }\n";
    assert_eq!(fault("metal-backend", "loader", text), 1);
    let text = "fn f(t: &str) -> bool { t.starts_with(\"qwen\") }\n";
    assert_eq!(fault("metal-backend", "loader", text), 1);
    assert_eq!(
        fault(
            "inference-text",
            "tokenizer_gguf",
            "const A: &str = \"gpt2\";\n"
        ),
        0
    );
    assert_eq!(
        fault(
            "inference-text",
            "tokenizer_gguf",
            "const A: &str = \"phi3\";\n"
        ),
        1
    );
    let comment = "/// Such as \"llama\".\nfn f() {}\n\nmod tests {\n \"llama\"\n}\n";
    assert_eq!(fault("metal-backend", "loader", comment), 0);
}

#[test]
fn each_family_fills_in_what_its_reference_does() {
    // These are the defaults of the configuration classes in transformers.
    for (model_type, norm_eps, theta) in [
        ("llama", 1e-6, 1e4),
        ("smollm3", 1e-6, 2e6),
        ("olmo2", 1e-5, 1e4),
        ("mixtral", 1e-5, 1e6),
        ("glm4", 1.5625e-7, 1e4),
        ("gpt_oss", 1e-5, 1.5e5),
        ("lfm2", 1e-5, 1e6),
        ("lfm2_moe", 1e-5, 1e6),
        ("qwen3_next", 1e-6, 1e4),
        ("qwen3_5_text", 1e-6, 1e4),
        ("granitemoehybrid", 1e-6, 1e4),
        ("mamba2", 1e-5, 1e4),
        ("falcon_h1", 1e-5, 1e4),
        ("nemotron_h", 1e-5, 1e4),
        ("gemma3", 1e-6, 1e6),
        ("gemma3_text", 1e-6, 1e6),
        ("ministral3", 1e-5, 1e6),
        ("seed_oss", 1e-6, 1e4),
        ("helium", 1e-8, 1e5),
        ("ernie4_5", 1e-5, 5e5),
        ("cohere", 1e-5, 5e5),
        ("glm4_moe", 1e-5, 1e4),
        ("deepseek_v3", 1e-6, 1e4),
    ] {
        let config = json!({"model_type": model_type, "hidden_size": 64, "num_hidden_layers": 1,
            "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
            "vocab_size": 128, "rms_norm_eps": null});
        let config = ModelConfig::from_json(config.to_string().as_bytes()).unwrap();
        let read = (config.rms_norm_eps, config.rope.theta);
        assert_eq!(read, (norm_eps, theta), "{model_type}");
        let family = config.family().unwrap();
        assert!(family.model_types().any(|name| name == model_type));
    }
    assert!(Family::of("gemma3").unwrap().is_multimodal("gemma3"));
    // Several names of one family, for text models and multimodal models.
    for (name, family, multimodal) in [
        ("qwen2_5_vl", "qwen2", true),
        ("qwen3_vl_moe", "qwen3_moe", true),
        ("kimi_k2", "deepseek_v3", false),
        ("minimax_m2", "minimax", false),
        ("xverse", "llama", false),
    ] {
        let family_of_name = Family::of(name).unwrap();
        assert_eq!(family_of_name.model_type, family);
        assert_eq!(family_of_name.is_multimodal(name), multimodal, "{name}");
    }
    assert!(
        !Family::of("gemma3_text")
            .unwrap()
            .is_multimodal("gemma3_text")
    );
    assert!(Family::of("").is_none() && Family::of("llama9").is_none());
}
