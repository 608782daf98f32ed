//! Tests of `mlx arch`, which lists architectures, and `mlx inspect`, which reports a model's
//! memory.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::{fixture, floats, load, max_difference, tiny_names};
use inference::Interrupt;
use serde_json::{Value, json};

fn mlx(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn stdout(arguments: &[&str]) -> String {
    let run = mlx(arguments);
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{arguments:?}: {stderr}");
    String::from_utf8(run.stdout).unwrap()
}

fn report(path: &Path) -> Value {
    let arguments = ["inspect", "--no-load", "--precision", "exact", "--json"];
    let text = stdout(&[&arguments[..], &[path.to_str().unwrap()]].concat());
    serde_json::from_str::<Value>(&text).unwrap()["report"].clone()
}

#[test]
fn architectures_are_listed_as_the_error_for_an_unknown_one_lists_them() {
    let text = stdout(&["arch"]);
    let names: Vec<&str> = text
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().next().unwrap())
        .collect();
    assert_eq!(names, metal_backend::architectures());
    assert!(names.len() >= 24 && names.is_sorted());
    let row = |name: &str| {
        text.lines()
            .find(|l| l.starts_with(name))
            .unwrap()
            .to_owned()
    };
    assert!(row("qwen2_moe").ends_with("qwen2moe"), "{text}");
    assert!(row("mixtral").ends_with("llama"), "{text}");
    assert!(row("olmo3").ends_with("olmo2"), "{text}");
    let json: Value = serde_json::from_str(&stdout(&["arch", "--json"])).unwrap();
    assert_eq!(json.as_array().unwrap().len(), names.len());
    assert_eq!(json[0]["model_type"], names[0]);
}

#[test]
fn headers_tell_what_loading_finds() {
    let files = tiny_names()
        .into_iter()
        .map(|name| fixture("tiny").join(name))
        .chain(
            std::fs::read_dir(fixture("gguf"))
                .unwrap()
                .map(|e| e.unwrap().path()),
        );
    for path in files {
        let what = path.display().to_string();
        let report = report(&path);
        let info = load(&path).info();
        assert_eq!(report["supported"], true, "{what}");
        assert_eq!(
            report["template"].is_null(),
            !info.has_chat_template,
            "{what}"
        );
        let sum = |list: &str, field: &str| -> u64 {
            let all = report[list].as_array().unwrap().iter();
            all.map(|share| share[field].as_u64().unwrap()).sum()
        };
        for list in ["parts", "formats"] {
            assert_eq!(
                sum(list, "parameters"),
                report["parameters"],
                "{what}: {list}"
            );
            assert_eq!(
                sum(list, "stored_bytes"),
                report["stored_bytes"],
                "{what}: {list}"
            );
        }
        // Files may contain more than the loader reads: a second embedding, rotary factors, other
        // modalities. Gemma 4 uses some key weights as values, too. After loading, such weights
        // count twice.
        let about =
            |files: u64, loaded: u64| files + files / 20 >= loaded && files < loaded * 13 / 10;
        let parameters = report["parameters"].as_u64().unwrap();
        assert!(
            about(parameters, info.parameters),
            "{what}: {parameters}, loaded {}",
            info.parameters
        );
        let memory = &report["memory"];
        let weights = memory["weights"].as_u64().unwrap();
        // The kernels pad the last rows of packed matrices. In such small models the padding is a
        // visible share of the memory.
        assert!(
            weights.abs_diff(info.weight_bytes) <= info.weight_bytes / 100,
            "{what}: {weights}, loaded {}",
            info.weight_bytes
        );
        assert_eq!(memory["compute_type"], "float32", "{what}");
        assert!(memory["room_for_tokens"].as_u64().unwrap() > 1000, "{what}");
    }
}

#[test]
fn a_recurrent_model_has_a_state_in_place_of_a_cache() {
    let path = fixture("tiny/xlstm");
    let arguments = ["inspect", "--backend", "cpu", "--no-load"];
    let path = path.to_str().unwrap();
    let text = stdout(&[&arguments[..], &["--json", path]].concat());
    let json: Value = serde_json::from_str(&text).unwrap();
    let memory = &json["report"]["memory"];
    // Two blocks with four heads each. A head stores C (16 x 32), n (16) and m (1), in float32.
    assert_eq!(memory["state"], 2 * 4 * (16 * 32 + 16 + 1) * 4);
    assert_eq!(memory["cache_per_token"], 0);
    assert!(memory["room_for_tokens"].as_u64().unwrap() > 1000);
    let blocks = json["report"]["blocks"].as_array().unwrap();
    assert_eq!(blocks.len(), 2);
    assert_eq!(
        (&blocks[1]["index"], &blocks[1]["kind"]),
        (&json!(1), &json!("mlstm"))
    );
    let layers = blocks[0]["components"].as_array().unwrap();
    assert!(
        layers.contains(&json!("mlstm_layer.igate_preact")),
        "{layers:?}"
    );
    let text = stdout(&[&arguments[..], &[path]].concat());
    assert!(text.contains("2 of kind mLSTM"), "{text}");
    assert!(text.contains("of state at any length"), "{text}");
}

#[test]
fn a_hybrid_has_a_state_beside_a_cache() {
    let path = fixture("tiny/lfm2");
    let exact = ["--precision", "exact"];
    let arguments = [&["inspect", "--backend", "cpu", "--no-load"], &exact[..]].concat();
    let path = path.to_str().unwrap();
    let text = stdout(&[&arguments[..], &["--json", path]].concat());
    let json: Value = serde_json::from_str(&text).unwrap();
    let memory = &json["report"]["memory"];
    // Three convolutions store two inputs of 32 channels each. Two layers store keys and values of
    // two heads with 8 elements. All values are float32.
    assert_eq!(memory["state"], 3 * 2 * 32 * 4);
    assert_eq!(memory["cache_per_token"], 2 * 2 * 2 * 8 * 4);
    let text = stdout(&[&arguments[..], &[path]].concat());
    assert!(text.contains("3 of kind convolution"), "{text}");
    assert!(text.contains("2 of kind attention"), "{text}");
    assert!(
        text.contains("for 1000 tokens,") && text.contains("of state"),
        "{text}"
    );
}

#[test]
fn states_of_each_kind_of_layer_are_counted() {
    let memory = |name: &str| {
        let path = fixture("tiny").join(name);
        let path = path.to_str().unwrap();
        let arguments = ["--backend", "cpu", "--no-load", "--precision", "exact"];
        let text = stdout(&[&["inspect"], &arguments[..], &["--json", path]].concat());
        let json: Value = serde_json::from_str(&text).unwrap();
        let memory = &json["report"]["memory"];
        let number = |field: &str| memory[field].as_u64().unwrap();
        (number("state"), number("cache_per_token"))
    };
    // Three layers store three inputs of 2 * 16 + 24 channels and four heads of 8 x 6. One layer
    // stores keys and values of two heads with 16 elements.
    let delta = 3 * (3 * 56 + 4 * 8 * 6) * 4;
    assert_eq!(memory("qwen3-next"), (delta, 2 * 2 * 16 * 4));
    assert_eq!(memory("qwen3-5-moe"), (delta, 2 * 2 * 16 * 4));
    // The state stores three inputs of 64 + 2 * 2 * 6 channels and eight heads of 6 x 8.
    let ssd = (3 * 88 + 8 * 6 * 8) * 4;
    assert_eq!(memory("mamba2"), (3 * ssd, 0));
    assert_eq!(memory("granitemoehybrid"), (3 * ssd, 2 * 2 * 8 * 4));
    // The state stores three inputs of 48 + 2 * 2 * 5 channels and six heads of 5 x 8. The key
    // cache has two heads with 10 elements.
    let ssd = (3 * 68 + 6 * 5 * 8) * 4;
    assert_eq!(memory("falcon-h1"), (3 * ssd, 3 * 2 * 2 * 10 * 4));
    // Two of the five blocks are recurrent, and one block has a KV cache.
    assert_eq!(memory("nemotron-h"), (2 * ssd, 2 * 2 * 12 * 4));
}

/// Cached keys and values have 16 bits if the floats in the files have 16 bits and kernels round
/// the inputs of matrices. A flag selects 32 bits.
#[test]
fn caches_have_16_bits_where_the_files_have() {
    let per_token = |name: &str, more: &[&str]| {
        let path = fixture("tiny").join(name);
        let base = ["inspect", "--backend", "cpu", "--no-load", "--json"];
        let all = [&base[..], more, &[path.to_str().unwrap()]].concat();
        let json: Value = serde_json::from_str(&stdout(&all)).unwrap();
        json["report"]["memory"]["cache_per_token"]
            .as_u64()
            .unwrap()
    };
    let inputs = mlx_rs_core::cpu::PrefillInputs::Int16.available();
    let rounds = inputs == mlx_rs_core::cpu::PrefillInputs::Int16;
    let wide = per_token("llama-bf16", &["--kv-bits", "32"]);
    let by_default = per_token("llama-bf16", &[]);
    assert_eq!(by_default, if rounds { wide / 2 } else { wide });
    for exact in [
        &["--precision", "exact"][..],
        &["--dtype", "float32"],
        &["--attention-sums", "float64"],
    ] {
        assert_eq!(per_token("llama-bf16", exact), wide, "{exact:?}");
    }
    assert_eq!(per_token("llama-bf16", &["--kv-bits", "16"]), wide / 2);
    let floats = per_token("llama", &[]);
    assert_eq!(floats, per_token("llama", &["--kv-bits", "32"]));
}

/// A saved prompt cache must have the size per token that `mlx inspect` reports.
#[test]
fn keys_of_a_token_are_those_that_are_kept() {
    const TOKENS: u64 = 5;
    let dir = tempfile::tempdir().unwrap();
    let mut checked = 0;
    for name in tiny_names() {
        let path = fixture("tiny").join(&name);
        let memory = report(&path)["memory"].clone();
        let per_token = memory["cache_per_token"].as_u64().unwrap();
        if memory["state"] != 0 {
            continue; // the file also contains the recurrent state
        }
        let file = dir.path().join(format!("{name}.safetensors"));
        let model = load(&path);
        let keeper = model.as_prompt_cache().unwrap();
        let prompt = inference::Prompt::Tokens(vec![9, 10, 11, 12, 13]);
        let saved = keeper
            .save_prompt_cache(&prompt, &file, &Interrupt::new())
            .unwrap();
        assert_eq!(saved as u64, TOKENS);
        let bytes = std::fs::read(&file).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let numbers: usize = (file.iter())
            .filter(|(_, tensor)| tensor.shape().len() == 4)
            .map(|(_, tensor)| tensor.shape().iter().product::<usize>())
            .sum();
        assert_eq!(numbers as u64 * 4, TOKENS * per_token, "{name}");
        checked += 1;
    }
    assert!(checked > 30, "{checked}");
    let gemma = report(&fixture("tiny/gemma4-small"));
    assert_eq!(gemma["memory"]["cache_per_token"], 1024);
}

#[test]
fn flags_count_also_without_loading() {
    let llama = fixture("tiny/llama").display().to_string();
    let base = ["inspect", "--no-load", "--backend", "cpu", "--json"];
    let with = |more: &[&str]| mlx(&[&base[..], more, &[&llama]].concat());
    let needs = |more: &[&str]| -> Value {
        let run = with(more);
        assert!(run.status.success(), "{more:?}");
        let json: Value = serde_json::from_slice(&run.stdout).unwrap();
        json["report"]["memory"].clone()
    };
    let number = |needs: &Value, name: &str| needs[name].as_u64().unwrap();
    let plain = needs(&[]);
    let adapter = fixture("training/llama-4").display().to_string();
    let more = needs(&["--adapter-path", &adapter]);
    assert!(number(&more, "weights") > number(&plain, "weights"));
    // Three layers store keys and values of 4 heads with 8 elements.
    assert_eq!(number(&plain, "cache_per_token"), 3 * 64 * 4);
    let bounded = needs(&["--ctx-size", "64"]);
    assert_eq!(bounded["room_for_tokens"], i32::MAX);
    let absent = fixture("absent").display().to_string();
    for (flags, code, why) in [
        (&["--ffn", "99=sparse:4"][..], 1, "the model has 3"),
        (&["--adapter-path", &absent], 1, "no adapter here"),
        (&["--vindex", &absent, "--ffn", "walk:4"], 1, "absent"),
        (&["--kv-bits", "4"], 1, "does not divide"),
        (&["--split", "2", "--ctx-size", "64"], 2, "leave out"),
    ] {
        let run = with(flags);
        let stderr = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(code), "{flags:?}: {stderr}");
        assert!(stderr.contains(why), "{flags:?}: {stderr}");
    }
    let xlstm = fixture("tiny/xlstm").display().to_string();
    let run = mlx(&["inspect", "--no-load", "--ctx-size", "9", &xlstm]);
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(
        !run.status.success() && stderr.contains("has none"),
        "{stderr}"
    );
}

/// In bfloat16, sums over a sequence lose small values. Therefore a GPU computes a recurrent model
/// in float32 unless a flag selects another type.
#[test]
fn a_recurrent_model_is_computed_in_float32_on_a_gpu_too() {
    let compute_type = |name: &str, more: &[&str]| {
        let path = fixture("tiny").join(name).display().to_string();
        let base = ["inspect", "--backend", "cuda", "--no-load", "--json", &path];
        let json: Value = serde_json::from_str(&stdout(&[&base[..], more].concat())).unwrap();
        json["report"]["memory"]["compute_type"].clone()
    };
    // Both models are stored in bfloat16.
    assert_eq!(compute_type("xlstm", &[]), "float32");
    assert_eq!(compute_type("llama-bf16", &[]), "bfloat16");
    assert_eq!(compute_type("xlstm", &["--dtype", "bfloat16"]), "bfloat16");
}

/// The flag for attention in double precision must reach the model. A GPU backend refuses the flag,
/// both when it only inspects and when it loads.
#[test]
fn attention_in_double_precision_changes_roundings_and_needs_a_cpu() {
    let path = fixture("tiny/llama").display().to_string();
    let logits = |sums: &str| {
        let base = ["logits", "--backend", "cpu", "--model", &path];
        let more = ["--tokens", "5,17,42,99,7,63", "--attention-sums", sums];
        let json: Value = serde_json::from_str(&stdout(&[&base[..], &more].concat())).unwrap();
        floats(&json["logits"])
    };
    let (native, wide) = (logits("native"), logits("float64"));
    assert_eq!(native.len(), 300);
    assert_ne!(native, wide);
    assert!(max_difference(&native, &wide) < 1e-4);
    let refused = |more: &[&str], code: i32, message: &str| {
        let run = mlx(&[&["inspect", "--no-load", &path], more].concat());
        let stderr = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(message), "{stderr}");
    };
    let gpu = ["--backend", "cuda", "--attention-sums", "float64"];
    refused(&gpu, 1, "use backend `cpu`");
    refused(
        &["--attention-sums", "float16"],
        2,
        "must be native or float64",
    );
    refused(
        &["--attention-sums", "float64", "--kv-bits", "4"],
        2,
        "do not go together",
    );
}

#[test]
fn people_see_parts_formats_template_and_fit() {
    let path = fixture("tiny/mixtral-q4");
    for load in [true, false] {
        let mut arguments = vec!["inspect", "--backend", "cpu"];
        arguments.extend((!load).then_some("--no-load"));
        arguments.push(path.to_str().unwrap());
        let text = stdout(&arguments);
        for row in [
            "architecture       mixtral",
            "memory by part     embedding: ",
            "                   experts: ",
            "stored as ",
            "affine 4 bits, groups of 32: ",
            "chat template ",
            "tokenizer_config.json",
            "fits               yes: ",
            "needs ",
        ] {
            assert!(text.contains(row), "{row:?} is not in\n{text}");
        }
    }
}

/// The words of the row `name` in the report of `mlx inspect`.
fn row<'t>(text: &'t str, name: &str) -> Vec<&'t str> {
    let rows: Vec<&str> = (text.lines())
        .filter_map(|line| line.strip_prefix(&format!("{name:<18} ")))
        .collect();
    assert_eq!(rows.len(), 1, "{name} in\n{text}");
    rows[0].split_whitespace().collect()
}

/// Free memory is enough for more tokens than the model's context, so the report must name the
/// context. The report must show one memory figure; an earlier version showed a measured and an
/// estimated figure.
#[test]
fn memory_is_one_figure_and_room_ends_with_the_context() {
    let path = fixture("tiny/llama");
    let context = load(&path).info().context_length.unwrap();
    let path = path.to_str().unwrap();
    for flags in [
        &["inspect", "--backend", "cpu"][..],
        &["inspect", "--no-load"],
    ] {
        let text = stdout(&[flags, &[path]].concat());
        let fits = row(&text, "fits").join(" ");
        let room = format!("room for the whole context of {context} tokens");
        assert!(fits.contains(&room), "{flags:?}: {fits}");
        let needs = row(&text, "needs");
        assert_eq!(needs[2..4], ["for", "weights,"], "{flags:?}: {needs:?}");
        let measures = |word: &&&str| ["B", "KiB", "MiB", "GiB"].contains(*word);
        // The report has one figure for the weights, and one figure for the cache of 1000 tokens.
        assert_eq!(
            needs.iter().filter(measures).count(),
            2,
            "{flags:?}: {needs:?}"
        );
        let loaded: u64 = report(Path::new(path))["memory"]["weights"]
            .as_u64()
            .unwrap();
        let shown: f64 = needs[0].parse().unwrap();
        let unit = match needs[1] {
            "B" => 1.0,
            "KiB" => 1024.0,
            "MiB" => 1_048_576.0,
            other => panic!("{other}"),
        };
        assert!(
            (shown * unit / loaded as f64 - 1.0).abs() < 0.06,
            "{needs:?}, {loaded}"
        );
    }
    // The report does not promise a context that free memory cannot hold.
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(path).unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, dir.path().join(file.file_name().unwrap())).unwrap();
    }
    let config = dir.path().join("config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    json["max_position_embeddings"] = json!(i32::MAX);
    std::fs::write(&config, json.to_string()).unwrap();
    let text = stdout(&["inspect", "--no-load", dir.path().to_str().unwrap()]);
    let fits = row(&text, "fits").join(" ");
    let tokens = report(dir.path())["memory"]["room_for_tokens"]
        .as_u64()
        .unwrap();
    let full = tokens >= i32::MAX.unsigned_abs().into();
    assert_eq!(fits.contains("whole context"), full, "{fits}");
}

#[test]
fn what_is_not_supported_is_still_described() {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("tiny/llama")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = dir.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("\"llama\"", "\"zamba2\"")).unwrap();
    let path = dir.path().to_str().unwrap();
    let text = stdout(&["inspect", "--no-load", path]);
    assert!(
        text.contains("zamba2 (not supported; see `mlx arch`)"),
        "{text}"
    );
    let run = mlx(&["inspect", "--backend", "cpu", path]);
    assert_eq!(run.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&run.stderr);
    for name in metal_backend::architectures() {
        assert!(stderr.contains(name), "{name} is not in {stderr}");
    }
}
