//! Checks the dependencies between the engine's modules and between the workspace's crates. Each
//! may only use modules or crates that precede it in a fixed order.

#[path = "../../../tests/common/layering.rs"]
mod layering;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use layering::{code, modules, upward};

/// The modules in this order. `module::*` means a module and all its submodules.
const ORDER: &[&str] = &[
    "error",
    "workdir",
    "text",
    "checkpoint::*",
    // Conversions from files to files, without a loaded model.
    "convert::faults",
    "convert::float_type",
    "convert::slice",
    "convert::tensor",
    "convert::joined",
    "convert::joined_matrix",
    "convert::given",
    "convert::quantization",
    "convert::rules",
    "convert::options",
    "convert::gguf",
    "convert::source",
    "convert::stored",
    "convert::scales",
    "convert::plan",
    "convert::planned",
    "convert::config",
    "convert::execute",
    "convert::write",
    "convert",
    // The engine. Only `exec` chooses between the kernels and MLX.
    "exec::*",
    "cache::*",
    "cache::prefix",
    "cache::tier::*",
    "nn::hooks",
    "nn::adapter::*",
    "nn::norm",
    "nn::linear",
    "nn::embedding",
    "nn::rope",
    "nn::mlp",
    "nn::expert_router",
    "nn::moe",
    "nn::feed_forward",
    "nn::router",
    "nn::sparse",
    "nn::walk",
    "nn::attention_mask",
    "nn::attention_parts",
    "nn::attention",
    "nn::attention_kernels",
    "nn::attention_scores",
    "nn::full_attention",
    "nn::fused",
    "nn::mixer",
    "nn::no_mixer",
    "nn::gated_attention",
    "nn::uneven_attention",
    "nn::indexer",
    "nn::head_matrices",
    "nn::latent_attention",
    "nn::recurrence",
    "nn::head_norm",
    "nn::causal_conv",
    "nn::short_conv",
    "nn::chunks",
    "nn::delta_rule",
    "nn::diagonal_rule",
    "nn::gated_delta",
    "nn::delta_attention",
    "nn::rwkv",
    "nn::ssd",
    "nn::mamba",
    "nn::mamba2",
    "nn::parallel_mixers",
    "nn::mlstm_cell",
    "nn::mlstm",
    "nn::slstm",
    "nn",
    "loader::*",
    "gate_scores",
    "arch::*",
    "adapter::kind",
    "adapter::naming",
    "adapter::stored",
    "adapter::lora",
    "adapter::part",
    "adapter::files",
    "adapter::decoder",
    "adapter::named",
    "adapter",
    "sentence",
    "sample::*",
    "engine::forward",
    "engine",
    "engine::adapters",
    "engine::tier",
    "steer",
    "generate::*",
    "inspect::*",
    "embed",
    // The implementation of the public traits, and the loader.
    "model",
    "model::adapters",
    "model::inspect",
    "model::steerable",
    "model::encoder",
    "divided",
    "backend::place",
    "backend::options",
    "backend::cache_cost",
    "backend::source",
    "backend::load",
    "backend",
    "ffn::*",
    "extract",
    // Tasks that load a model themselves.
    "model_report",
    "train::*",
    "quant::*",
    "lib",
];

/// Returns the source of each module of the engine, except test modules.
fn engine() -> BTreeMap<String, String> {
    let mut all = modules(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    all.retain(|name, _| !name.ends_with("tests"));
    all
}

#[test]
fn layers_use_only_what_is_below_them() {
    let modules = engine();
    let faults = upward(ORDER, &modules);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for name in ORDER {
        let name = name.trim_end_matches("::*");
        assert!(modules.contains_key(name), "{name} is no module any more");
    }
}

#[test]
fn arrows_that_point_up_are_found() {
    let faults = |module: &str, text: &str| {
        let mut all = engine();
        all.values_mut().for_each(String::clear);
        all.insert(module.to_owned(), text.to_owned());
        upward(ORDER, &all)
    };
    for (module, text) in [
        ("engine", "use crate::model::MlxModel;\n"),
        ("nn::attention", "use crate::arch::{Decoder};\n"),
        ("nn::mlp", "use super::moe::Mixture;\n"),
        ("arch::llama", "fn f() { crate::engine::forward::ids() }\n"),
        ("model", "use crate::train::LoraAdapter;\n"),
        ("cache::rotating", "use super::prefix::Prefixes;\n"),
        ("unknown", ""),
    ] {
        assert_eq!(faults(module, text).len(), 1, "{module}: {text}");
    }
    // `arch::*` in `ORDER` also includes a new file. Paths in comments do not count as uses.
    let fine = "// use crate::train::Run;\nuse super::stack::Stack;\nuse crate::nn::Linear;\n";
    assert_eq!(faults("arch::another", fine), [""; 0]);
}

/// Returns the modules outside `exec` that name the kernels of `mlx-rs-core`. Only `exec` may
/// choose between kernels and MLX.
fn names_kernels(modules: &BTreeMap<String, String>) -> Vec<&str> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let names = |code: &str| {
        code.match_indices("cpu").any(|(at, name)| {
            let (before, after) = (&code[..at], &code[at + name.len()..]);
            let is_whole_word = !before.ends_with(word) && !after.starts_with(word);
            let in_path = after.starts_with("::") || before.ends_with("::");
            let in_list = before.trim_end().ends_with([',', '{']) && after.starts_with([',', '}']);
            is_whole_word && (in_path || in_list) && !before.ends_with("Device::")
        })
    };
    let other = |module: &str| module != "exec" && !module.starts_with("exec::");
    let all = modules.iter().filter(|(module, _)| other(module));
    all.filter(|(_, text)| names(&code(text)))
        .map(|(module, _)| module.as_str())
        .collect()
}

#[test]
fn one_layer_chooses_between_kernels_and_mlx() {
    let modules = engine();
    assert_eq!(names_kernels(&modules), [""; 0]);
    let inside = modules
        .iter()
        .filter(|(module, _)| module.starts_with("exec"));
    let inside: BTreeMap<_, _> = inside.map(|(m, t)| (format!("x{m}"), t.clone())).collect();
    assert!(
        names_kernels(&inside).len() > 3,
        "the kernels have another name"
    );
    for (text, named) in [
        ("use mlx_rs_core::{Array, cpu, eval};\n", true),
        ("fn f() -> bool { mlx_rs_core::cpu::enabled() }\n", true),
        ("use mlx_rs_core::cpu as kernels;\n", true),
        (
            "fn f() { Device::cpu(); g(\"a cpu\", on_cpu, cpus) }\n",
            false,
        ),
        (
            "/// By `mlx_rs_core::cpu`.\nfn f() {}\n\nmod tests {\n use x::cpu;\n}\n",
            false,
        ),
    ] {
        let one = BTreeMap::from([("nn::linear".to_owned(), text.to_owned())]);
        assert_eq!(names_kernels(&one).len(), usize::from(named), "{text}");
    }
}

/// The workspace's crates in this order, each with the crates on which it may depend. Tests may use
/// additional crates.
const CRATES: &[(&str, &[&str])] = &[
    ("rust-mlx-inference-formats", &[]),
    ("rust-mlx-inference-api", &["rust-mlx-inference-formats"]),
    (
        "rust-mlx-inference-text",
        &["rust-mlx-inference-formats", "rust-mlx-inference-api"],
    ),
    (
        "rust-mlx-inference-conformance",
        &["rust-mlx-inference-api"],
    ),
    (
        "rust-mlx-inference-server",
        &["rust-mlx-inference-api", "rust-mlx-inference-text"],
    ),
    ("rust-mlx-inference-probe", &["rust-mlx-inference-formats"]),
    ("rust-mlx-mlxlm-backend", &["rust-mlx-inference-api"]),
    ("rust-mlx-cpu-kernels", &[]),
    ("rust-mlx-sys", &[]),
    (
        "rust-mlx-core",
        &[
            "rust-mlx-inference-formats",
            "rust-mlx-sys",
            "rust-mlx-cpu-kernels",
        ],
    ),
    (
        "rust-mlx-inference-group",
        &["rust-mlx-inference-api", "rust-mlx-core"],
    ),
    (
        "rust-mlx-metal-backend",
        &[
            "rust-mlx-inference-formats",
            "rust-mlx-inference-text",
            "rust-mlx-inference-api",
            "rust-mlx-inference-probe",
            "rust-mlx-core",
        ],
    ),
    (
        "rust-mlx",
        &[
            "rust-mlx-inference-formats",
            "rust-mlx-inference-text",
            "rust-mlx-inference-api",
            "rust-mlx-inference-group",
            "rust-mlx-inference-probe",
            "rust-mlx-inference-server",
            "rust-mlx-metal-backend",
            "rust-mlx-core",
            "rust-mlx-mlxlm-backend",
        ],
    ),
    (
        "rust-mlx-inference-c",
        &[
            "rust-mlx-inference-api",
            "rust-mlx-metal-backend",
            "rust-mlx",
        ],
    ),
    (
        "rust-mlx-inference-python",
        &[
            "rust-mlx-inference-api",
            "rust-mlx-metal-backend",
            "rust-mlx",
        ],
    ),
];

/// The directories of the crates that may contain unsafe code. In `inference-c`, only one file
/// contains it, for the pointers of callers.
const UNSAFE: [&str; 4] = ["mlx-sys", "mlx-cpu-kernels", "mlx-rs-core", "inference-c"];

#[test]
fn unsafe_code_is_where_it_may_be() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let workspace: toml::Table = manifest.parse().unwrap();
    let mut allowed = 0;
    for member in workspace["workspace"]["members"].as_array().unwrap() {
        let member = member.as_str().unwrap();
        let text = fs::read_to_string(root.join(member).join("src/lib.rs")).unwrap();
        let forbids = text.contains("\n#![forbid(unsafe_code)]\n");
        let may = UNSAFE.contains(&member);
        assert_ne!(forbids, may, "{member}");
        allowed += usize::from(may);
    }
    assert_eq!(allowed, UNSAFE.len());
    for (module, text) in modules(&root.join("inference-c/src")) {
        // In `lib`, the word occurs only in the attributes that allow unsafe code in `abi`.
        let code = code(&text)
            .replace("unsafe_code", "")
            .replace("unsafe code", "");
        let has = code.contains("unsafe");
        assert_eq!(has, module == "abi", "inference-c: {module}");
    }
}

/// Returns the name of a crate, and the dependencies of its library and build script on any target.
fn dependencies(manifest: &str) -> (String, BTreeSet<String>) {
    let table: toml::Table = manifest.parse().unwrap();
    let name = table["package"]["name"].as_str().unwrap().to_owned();
    let targets = table.get("target").and_then(toml::Value::as_table);
    let tables = targets
        .into_iter()
        .flat_map(|t| t.values())
        .filter_map(toml::Value::as_table)
        .chain([&table]);
    let mut names = BTreeSet::new();
    for table in tables {
        for kind in ["dependencies", "build-dependencies"] {
            let all = table.get(kind).and_then(toml::Value::as_table);
            for (key, value) in all.into_iter().flatten() {
                // For a renamed dependency, `package` contains the crate's real name.
                let package = value.get("package").and_then(toml::Value::as_str);
                names.insert(package.unwrap_or(key).to_owned());
            }
        }
    }
    (name, names)
}

/// Returns the workspace crates on which a manifest depends, although `CRATES` does not allow it.
fn wrong_crates(manifest: &str) -> Vec<String> {
    let (name, names) = dependencies(manifest);
    let Some((_, allowed)) = CRATES.iter().find(|(listed, _)| *listed == name) else {
        return vec![format!("{name} has no place in the order")];
    };
    CRATES
        .iter()
        .filter(|(other, _)| names.contains(*other) && !allowed.contains(other))
        .map(|(other, _)| format!("{name} depends on {other}"))
        .collect()
}

#[test]
fn crates_depend_only_on_what_stands_below_them() {
    for (i, (name, allowed)) in CRATES.iter().enumerate() {
        let below: BTreeMap<_, _> = CRATES[..i].iter().copied().collect();
        for other in *allowed {
            assert!(below.contains_key(other), "{name} stands below {other}");
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let workspace: toml::Table = manifest.parse().unwrap();
    let members = workspace["workspace"]["members"].as_array().unwrap();
    assert_eq!(members.len(), CRATES.len(), "each member has its place");
    for member in members {
        let path = root.join(member.as_str().unwrap()).join("Cargo.toml");
        let faults = wrong_crates(&fs::read_to_string(path).unwrap());
        assert_eq!(faults, [""; 0]);
    }
}

#[test]
fn crates_that_depend_on_one_above_are_found() {
    let package = "[package]\nname = \"rust-mlx-core\"\n";
    for wrong in [
        "[dependencies]\nrust-mlx-inference-api.workspace = true\n",
        "[build-dependencies]\nrust-mlx-metal-backend = { path = \"../metal-backend\" }\n",
        "[target.'cfg(unix)'.dependencies]\nx = { package = \"rust-mlx-metal-backend\", path = \"..\" }\n",
    ] {
        assert_eq!(
            wrong_crates(&format!("{package}{wrong}")).len(),
            1,
            "{wrong}"
        );
    }
    let fine = "[dependencies]\nrust-mlx-sys.workspace = true\n[dev-dependencies]\nrust-mlx-inference-api = \"0\"\n";
    assert_eq!(wrong_crates(&format!("{package}{fine}")), [""; 0]);
    assert_eq!(wrong_crates("[package]\nname = \"new\"\n").len(), 1);
}
