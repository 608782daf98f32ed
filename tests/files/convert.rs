//! Compares `mlx convert` with mlx-lm's converter, tensor by tensor (`tools/golden/convert.py`). A
//! model converted from GGUF must have the file's weights. After a failure, no output directory may
//! exist.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{
    fixture, floats, golden, greedy, ids, load, max_difference, order_bound, reference_bound,
};
use inference::{ChatPrompt, Interrupt, Message, Prompt};
use metal_backend as _;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn mlx(model: &Path, output: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mlx"))
        .arg("convert")
        .arg("--model")
        .arg(model)
        .arg("--output")
        .arg(output)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn convert(model: &Path, output: &Path, arguments: &[&str]) {
    let run = mlx(model, output, arguments);
    assert!(
        run.status.success(),
        "{}: {}",
        model.display(),
        String::from_utf8_lossy(&run.stderr)
    );
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// In mlx-lm, `-q` means quantize. If `mlx convert` read `-q` as `--quiet`, it would copy the model
/// unquantized.
#[test]
fn q_quantizes() {
    let dirs = tempfile::tempdir().unwrap();
    for flag in ["-q", "-Q", "--quantize"] {
        let made = dirs.path().join(flag);
        convert(&fixture("tiny/llama"), &made, &[flag]);
        let config = json(&made.join("config.json"));
        assert_eq!(config["quantization"]["bits"], 4, "{flag}");
    }
}

/// The type, shape and digest of each tensor in a directory.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Value, String)> {
    let mut tensors = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = fs::read(&path).unwrap();
        let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
        for (name, entry) in header.as_object().unwrap() {
            if name == "__metadata__" {
                assert_eq!(entry["format"], "mlx");
                continue;
            }
            let at = |i: usize| start + entry["data_offsets"][i].as_u64().unwrap() as usize;
            let digest = Sha256::digest(&bytes[at(0)..at(1)]);
            let digest: String = digest.iter().map(|b| format!("{b:02x}")).collect();
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            tensors.insert(
                name.clone(),
                (dtype, entry["shape"].clone(), digest[..32].to_owned()),
            );
        }
    }
    tensors
}

/// The group size, bits and mode of a layer, in any form of the configuration.
fn format(quantization: &Value, layer: &str) -> (i64, i64, String) {
    let of = |field: &str| {
        let layer_value = &quantization[layer][field];
        if layer_value.is_null() {
            quantization[field].clone()
        } else {
            layer_value.clone()
        }
    };
    let number = |field: &str| of(field).as_i64().unwrap();
    let mode = of("mode").as_str().unwrap_or("affine").to_owned();
    (number("group_size"), number("bits"), mode)
}

#[test]
fn tensors_are_those_that_mlx_lm_writes() {
    let golden = json(&fixture("convert.json"));
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() >= 17);
    let dir = tempfile::tempdir().unwrap();
    for (i, case) in cases.iter().enumerate() {
        let name = case["fixture"].as_str().unwrap();
        let arguments: Vec<&str> = case["arguments"]
            .as_array()
            .unwrap()
            .iter()
            .map(|a| a.as_str().unwrap())
            .collect();
        let what = format!("{name} {arguments:?}");
        let output = dir.path().join(i.to_string());
        convert(&fixture("tiny").join(name), &output, &arguments);
        let ours = tensors(&output);
        let theirs = case["tensors"].as_object().unwrap();
        assert_eq!(
            ours.keys().collect::<Vec<_>>(),
            theirs.keys().collect::<Vec<_>>(),
            "{what}"
        );
        let config = json(&output.join("config.json"));
        assert_eq!(
            config["quantization"].is_null(),
            case["quantization"].is_null(),
            "{what}"
        );
        assert_eq!(
            config["quantization"], config["quantization_config"],
            "{what}"
        );
        // MLX 0.32 made the golden numbers; MLX 0.30 chooses other scales.
        let mx = arguments.iter().any(|a| a.starts_with("mxfp"));
        let other_scales = mx && mlx_rs_core::mlx_version().unwrap().starts_with("0.30.");
        for (tensor, (dtype, shape, digest)) in &ours {
            let expected = &theirs[tensor];
            assert_eq!(dtype, &expected[0], "{what}: {tensor}");
            assert_eq!(shape, &expected[1], "{what}: {tensor}");
            if !other_scales {
                assert_eq!(digest, &expected[2], "{what}: {tensor}");
            }
            if let Some(layer) = tensor.strip_suffix(".scales") {
                assert_eq!(
                    format(&config["quantization"], layer),
                    format(&case["quantization"], layer),
                    "{what}: {layer}"
                );
            }
        }
        // Our engine must also load the output.
        drop(load(&output));
    }
}

/// The names of converted tensors are mlx-lm's, which differ from those of the source in some
/// families.
#[test]
fn every_small_directory_runs_after_quantization() {
    let dir = tempfile::tempdir().unwrap();
    let mut converted = 0;
    for entry in fs::read_dir(fixture("tiny")).unwrap() {
        let model = entry.unwrap().path();
        let name = model.file_name().unwrap().to_str().unwrap().to_owned();
        if !model.join("config.json").exists() {
            continue;
        }
        let output = dir.path().join(&name);
        let run = mlx(
            &model,
            &output,
            &["-q", "--bits", "8", "--group-size", "32"],
        );
        let said = String::from_utf8_lossy(&run.stderr);
        if said.contains("would round twice") || said.contains("loaded as they are") {
            continue;
        }
        assert!(run.status.success(), "{name}: {said}");
        assert!(
            !said.contains("experts are not quantized"),
            "{name}: {said}"
        );
        let loaded = load(&output);
        let prompt = Prompt::Tokens(vec![5, 17, 42]);
        let tokens = loaded.as_token_model().unwrap();
        let logits = tokens
            .logits(&prompt, false, &Interrupt::new())
            .unwrap()
            .logits;
        assert!(logits.iter().all(|v| v.is_finite()), "{name}");
        converted += 1;
    }
    assert!(converted >= 100, "{converted}");
}

/// With a hidden size of twice the experts' width, the matrix of gate and up is square, so that
/// only the other matrix shows that both are `[in, out]`.
#[test]
fn square_matrices_of_experts_are_read_in_their_orientation() {
    use mlx_rs_core::{Array, Device, Stream, concatenate, io};
    const STORED: i32 = 24;
    const WIDTH: i32 = 16;
    let from = fixture("tiny/llama4");
    let dir = tempfile::tempdir().unwrap();
    // Two equivalent models: one without the last inputs of the down matrices, and one with zeros
    // for these inputs.
    let (cut, zeroed) = (dir.path().join("cut"), dir.path().join("zeroed"));
    let stored = Stream::default_of(Device::cpu()).unwrap();
    stored.scope(|| {
        for (to, is_cut) in [(&cut, true), (&zeroed, false)] {
            fs::create_dir(to).unwrap();
            for file in ["tokenizer.json", "tokenizer_config.json"] {
                fs::copy(from.join(file), to.join(file)).unwrap();
            }
            let mut config = json(&from.join("config.json"));
            config["intermediate_size"] = (if is_cut { WIDTH } else { STORED }).into();
            fs::write(to.join("config.json"), config.to_string()).unwrap();
            let mut arrays = io::load_safetensors(from.join("model.safetensors"))
                .unwrap()
                .arrays;
            let part = |a: &Array, axis, first| a.slice_axis(axis, first, first + WIDTH).unwrap();
            for (name, array) in &mut arrays {
                let axis = match name.rsplit_once("feed_forward.") {
                    Some((_, "experts.gate_up_proj")) if is_cut => {
                        let halves = [part(array, 2, 0), part(array, 2, STORED)];
                        *array = concatenate(&[&halves[0], &halves[1]], 2).unwrap();
                        continue;
                    }
                    Some((
                        _,
                        "shared_expert.gate_proj.weight" | "shared_expert.up_proj.weight",
                    )) if is_cut => {
                        *array = part(array, 0, 0);
                        continue;
                    }
                    Some((_, "experts.down_proj" | "shared_expert.down_proj.weight")) => 1,
                    _ => continue,
                };
                let kept = part(array, axis, 0);
                let rest = array.slice_axis(axis, WIDTH, STORED).unwrap();
                let none = rest.subtract(&rest).unwrap();
                *array = match is_cut {
                    true => kept,
                    false => concatenate(&[&kept, &none], axis).unwrap(),
                };
            }
            let path = to.join("model.safetensors");
            io::save_safetensors(path, &arrays, &[]).unwrap();
        }
    });
    let converted = dir.path().join("converted");
    convert(&cut, &converted, &[]);
    let logits = |model: &Path| {
        let loaded = load(model);
        let tokens = loaded.as_token_model().unwrap();
        let prompt = Prompt::Tokens(vec![5, 17, 42, 7]);
        let output = tokens.logits(&prompt, true, &Interrupt::new());
        output.unwrap().logits
    };
    let expected = logits(&zeroed);
    assert!(max_difference(&logits(&cut), &expected) < 1e-4);
    assert!(max_difference(&logits(&converted), &expected) < 1e-4);
    assert!(max_difference(&logits(&from), &expected) > 1e-2);
}

/// Models that the engine can run but the program cannot convert.
const RUN_ONLY: [&str; 17] = [
    "apertus",
    "bailing-moe",
    "bailing-moe-groups",
    "falcon-h1",
    "falcon-mamba",
    "gemma3n",
    "gpt-neox",
    "granitemoehybrid",
    "granitemoehybrid-dense",
    "internlm2",
    "mamba",
    "mamba2",
    "nemotron-h",
    "nemotron-h-moe",
    "qwen3-5",
    "qwen3-5-moe",
    "qwen3-next",
];

#[test]
fn files_with_another_layout_run_and_are_not_converted() {
    let dir = tempfile::tempdir().unwrap();
    for name in RUN_ONLY {
        let file = fixture("gguf").join(format!("{name}.gguf"));
        let output = dir.path().join(name);
        let run = mlx(&file, &output, &[]);
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(
            !run.status.success() && said.contains("runs without a conversion"),
            "{name}: {said}"
        );
        assert!(!output.exists(), "{name}");
    }
}

fn gguf_models() -> Vec<(String, PathBuf)> {
    let mut models: Vec<_> = fs::read_dir(fixture("gguf"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .map(|p| (p.file_stem().unwrap().to_str().unwrap().to_owned(), p))
        .filter(|(name, _)| !RUN_ONLY.contains(&name.as_str()))
        .collect();
    for name in ["llama-gguf", "qwen2-gguf"] {
        models.push((
            name.to_owned(),
            fixture("tiny").join(name).join("model.gguf"),
        ));
    }
    models.sort();
    models
}

#[test]
fn a_gguf_file_becomes_a_directory_with_its_numbers_and_its_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let models = gguf_models();
    assert!(models.len() >= 18);
    for (name, file) in models {
        let output = dir.path().join(&name);
        convert(&file, &output, &[]);
        let (from, to) = (load(&file), load(&output));
        let (before, after) = (from.as_token_model().unwrap(), to.as_token_model().unwrap());
        assert_eq!(from.info().parameters, to.info().parameters, "{name}");
        let golden = golden(&fixture("tiny").join(&name));
        for case in golden["prompts"].as_array().unwrap() {
            let prompt = Prompt::Tokens(ids(&case["tokens"]));
            let ours = after
                .logits(&prompt, false, &Interrupt::new())
                .unwrap()
                .logits;
            let difference = max_difference(
                &ours,
                &before
                    .logits(&prompt, false, &Interrupt::new())
                    .unwrap()
                    .logits,
            );
            // Experts packed in MXFP4 become dense. Multiplications with dense weights do not round
            // their inputs.
            let bound = match name.as_str() {
                "gpt-oss-mxfp4" => 2e-4,
                _ => order_bound(1e-5),
            };
            assert!(difference <= bound, "{name}: {difference} from the file");
            let difference = max_difference(&ours, &floats(&case["logits"]));
            assert!(
                difference < reference_bound(1e-3),
                "{name}: {difference} from the reference"
            );
            let expected = ids(&case["greedy"]);
            let reply = to.generate(&prompt, &greedy(expected.len())).unwrap();
            assert_eq!(reply.collect_output().unwrap().tokens, expected, "{name}");
        }
        for case in golden["text"]["encode"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(
                after.encode(text, false).unwrap(),
                ids(&case["tokens"]),
                "{name}: {text:?}"
            );
            assert_eq!(
                after.encode(text, true).unwrap(),
                before.encode(text, true).unwrap(),
                "{name}: {text:?}"
            );
        }
        let chat = ChatPrompt::new([
            Message::user("Hello!"),
            Message::assistant("Hi."),
            Message::user("Bye <|im_end|>"),
        ]);
        assert_eq!(
            after.prepare_chat(&chat).unwrap(),
            before.prepare_chat(&chat).unwrap(),
            "{name}"
        );
    }
}

/// Files do not state the groups of experts, so the golden numbers do not apply.
#[test]
fn a_file_of_kimi_linear_becomes_a_directory_that_computes_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (file, output) = (
        fixture("gguf_other").join("kimi-linear.gguf"),
        dir.path().join("kimi-linear"),
    );
    convert(&file, &output, &[]);
    let (from, to) = (load(&file), load(&output));
    assert_eq!(from.info().parameters, to.info().parameters);
    let golden = golden(&fixture("tiny").join("kimi-linear"));
    for case in golden["prompts"].as_array().unwrap() {
        let prompt = Prompt::Tokens(ids(&case["tokens"]));
        let [before, after] = [&from, &to].map(|model| {
            let tokens = model.as_token_model().unwrap();
            let all = tokens.logits(&prompt, false, &Interrupt::new()).unwrap();
            all.logits
        });
        let difference = max_difference(&after, &before);
        assert!(difference <= 1e-5, "{difference}");
    }
    let config = json(&output.join("config.json"));
    let linear = &config["linear_attn_config"];
    assert_eq!(linear["kda_layers"], serde_json::json!([1, 2, 4]));
    assert_eq!(linear["full_attn_layers"], serde_json::json!([3]));
}

#[test]
fn a_gguf_file_keeps_its_blocks_packed_or_is_quantized_anew() {
    let dir = tempfile::tempdir().unwrap();
    let file = fixture("tiny/llama-gguf/model.gguf");
    let packed_dir = dir.path().join("kept");
    convert(&file, &packed_dir, &[]);
    let quantization = &json(&packed_dir.join("config.json"))["quantization"];
    assert_eq!(
        format(quantization, "model.layers.0.mlp.up_proj"),
        (32, 4, "affine".into())
    );
    assert_eq!(
        format(quantization, "model.embed_tokens"),
        (32, 8, "affine".into())
    );

    let dense = dir.path().join("dense");
    convert(&file, &dense, &["--dequantize", "--dtype", "float32"]);
    assert!(json(&dense.join("config.json"))["quantization"].is_null());
    let golden = golden(&fixture("tiny/llama-gguf"));
    let case = &golden["prompts"][0];
    let model = load(&dense);
    let prompt = Prompt::Tokens(ids(&case["tokens"]));
    let ours = model
        .as_token_model()
        .unwrap()
        .logits(&prompt, false, &Interrupt::new())
        .unwrap();
    assert!(max_difference(&ours.logits, &floats(&case["logits"])) < reference_bound(1e-3));

    let anew = dir.path().join("anew");
    let run = mlx(&file, &anew, &["--quantize", "--bits", "8"]);
    assert!(run.status.success());
    assert_eq!(load(&anew).info().quantization_bits, Some(8));
    // A message warns that weights are rounded a second time. The new scales must not exceed the
    // scales of the blocks.
    let told = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(
        told.contains("quantized again to affine, 8 bits in groups of 64"),
        "{told}"
    );
    let kind = |dir: &Path, name: &str| tensors(dir)[name].0.clone();
    let scales = "model.layers.0.mlp.up_proj.scales";
    assert_eq!(kind(&anew, scales), "F16");
    // A matrix that already has the target format keeps its codes, and no message appears.
    let same = dir.path().join("same");
    let run = mlx(&file, &same, &["--quantize", "--group-size", "32"]);
    assert!(run.status.success());
    let weight = "model.layers.0.mlp.up_proj.weight";
    assert_eq!(tensors(&same)[weight], tensors(&packed_dir)[weight]);
    assert_eq!(kind(&same, scales), "F16");
}

/// A model that already has the requested quantization is copied with its packed weights. Another
/// quantization is refused.
#[test]
fn a_quantized_directory_is_not_quantized_again() {
    let dir = tempfile::tempdir().unwrap();
    let source = fixture("tiny/llama-q4");
    let config = json(&source.join("config.json"));
    let group = config["quantization"]["group_size"].to_string();
    let (copy, same) = (dir.path().join("copy"), dir.path().join("same"));
    convert(&source, &copy, &[]);
    let run = mlx(&source, &same, &["--quantize", "--group-size", &group]);
    let told = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(run.status.success(), "{told}");
    assert!(told.contains("its packed weights are unchanged"), "{told}");
    assert_eq!(tensors(&same), tensors(&copy));
    let run = mlx(
        &source,
        &dir.path().join("x"),
        &["--quantize", "--bits", "8"],
    );
    let told = String::from_utf8_lossy(&run.stderr).into_owned();
    assert_eq!(run.status.code(), Some(1));
    assert!(
        told.contains("(affine, 4 bits in groups of") && told.contains("--dequantize"),
        "{told}"
    );
}

#[test]
fn shards_are_no_larger_than_asked_and_the_index_names_every_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let (single, parts) = (dir.path().join("whole"), dir.path().join("parts"));
    convert(&fixture("tiny/llama"), &single, &[]);
    convert(
        &fixture("tiny/llama"),
        &parts,
        &["--max-shard-size", "20 KB"],
    );
    assert!(single.join("model.safetensors").is_file());
    assert_eq!(tensors(&single), tensors(&parts));
    let index = json(&parts.join("model.safetensors.index.json"));
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), tensors(&parts).len());
    let mut files: Vec<&str> = map.values().map(|f| f.as_str().unwrap()).collect();
    files.sort_unstable();
    files.dedup();
    assert!(files.len() > 3, "{files:?}");
    let last = format!("model-{0:05}-of-{0:05}.safetensors", files.len());
    assert_eq!(files.last(), Some(&last.as_str()));
    for file in files {
        let bytes = fs::metadata(parts.join(file)).unwrap().len();
        assert!(bytes < 48 << 10, "{file}: {bytes}");
    }
    let model = load(&parts);
    let case = &golden(&fixture("tiny/llama"))["prompts"][0];
    let ours = model
        .as_token_model()
        .unwrap()
        .logits(
            &Prompt::Tokens(ids(&case["tokens"])),
            false,
            &Interrupt::new(),
        )
        .unwrap();
    assert!(max_difference(&ours.logits, &floats(&case["logits"])) < reference_bound(1e-3));
}

#[test]
fn nothing_is_left_behind_or_lost_when_it_fails() {
    let dir = tempfile::tempdir().unwrap();
    let entries = || {
        fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect::<Vec<_>>()
    };
    let output = dir.path().join("out");

    // This damage is in the last tensors, so the converter detects it late. No partial directory
    // may remain.
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer_config.json"] {
        fs::copy(fixture("tiny/llama").join(name), model.join(name)).unwrap();
    }
    // These float32 values exceed float16's range.
    let path = model.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&1e38f32.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let run = mlx(&model, &output, &["--dtype", "float16"]);
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert_eq!(run.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("float16") && stderr.contains("bfloat16"),
        "{stderr}"
    );
    assert_eq!(entries(), ["model"]);

    // The program keeps an existing output directory unless `--force` is given.
    convert(&fixture("tiny/llama"), &output, &[]);
    let before = tensors(&output);
    let run = mlx(&fixture("tiny/qwen3"), &output, &[]);
    assert_eq!(run.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&run.stderr).contains("--force"));
    assert_eq!(tensors(&output), before);
    convert(&fixture("tiny/qwen3"), &output, &["--force"]);
    assert_ne!(tensors(&output), before);

    // The output must not be the model's own directory. A quantized model must not be quantized
    // again.
    let run = mlx(&output, &output, &["--force"]);
    assert_eq!(run.status.code(), Some(1));
    let run = mlx(
        &fixture("tiny/llama-q4"),
        &dir.path().join("x"),
        &["--quantize", "--bits", "8"],
    );
    assert_eq!(run.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&run.stderr).contains("quantized already"));
    for wrong in [
        &["--bits", "4"][..],
        &["--quantize", "--bits", "7"],
        &["--quantize", "--dequantize"],
        &["--quantize", "--mode", "mxfp4", "--group-size", "64"],
        &["--dtype", "float8"],
    ] {
        let run = mlx(&fixture("tiny/llama"), &dir.path().join("x"), wrong);
        assert_eq!(run.status.code(), Some(2), "{wrong:?}");
    }
    assert_eq!(entries().len(), 2, "{:?}", entries());
}

#[test]
fn nothing_executable_is_copied() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(fixture("tiny/llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    for name in ["modeling_llama.py", "setup.sh", "pytorch_model.bin"] {
        fs::write(model.join(name), "print('no')").unwrap();
    }
    let output = dir.path().join("out");
    convert(&model, &output, &[]);
    let mut names: Vec<_> = fs::read_dir(&output)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "config.json",
            "model.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
}

/// Models that mlx-lm computes differently, or whose files it does not load because it requires
/// other fields or tensors.
const NOT_IN_MLX_LM: [&str; 15] = [
    "cohere2",
    "deepseek-v2-lite",
    "exaone-moe",
    "gemma2",
    "glm",
    "glm4-moe",
    "hunyuan",
    "jamba",
    "minimax",
    "mistral3",
    "phi3",
    "qwen",
    "solar-open",
    "starcoder2",
    "youtu-llm",
];

/// mlx-lm loads our output and computes the golden numbers from it.
#[test]
#[ignore = "needs Python with mlx-lm (tools/golden/requirements.txt): set MLX_LM_PYTHON to it"]
fn mlx_lm_loads_it_and_computes_the_same() {
    let python = std::env::var("MLX_LM_PYTHON").expect("MLX_LM_PYTHON names a Python with mlx-lm");
    let dir = tempfile::tempdir().unwrap();
    let mut outputs = Vec::new();
    // mlx-lm 0.32.2 computes these families correctly (docs/architectures.md).
    for (name, file) in gguf_models() {
        if NOT_IN_MLX_LM.contains(&name.as_str()) {
            continue;
        }
        let output = dir.path().join(&name);
        convert(&file, &output, &["--dtype", "float32"]);
        outputs.push(output);
    }
    for name in [
        "llama",
        "llama-rope3",
        "qwen3-moe",
        "gpt2",
        "gemma3-text",
        "olmo2",
        "olmo3",
        "exaone4",
        "llama-q4",
    ] {
        let output = dir.path().join(format!("{name}.copy"));
        convert(
            &fixture("tiny").join(name),
            &output,
            &["--dtype", "float32"],
        );
        outputs.push(output);
    }
    let run = Command::new(python)
        .arg("convert.py")
        .arg("--check")
        .args(&outputs)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tools/golden"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&run.stderr)
    );
    assert_eq!(text.lines().count(), outputs.len());
    for line in text.lines() {
        let (name, difference) = line.split_once(' ').unwrap();
        println!("{line}");
        assert!(
            difference.parse::<f32>().unwrap() < 1e-2,
            "{name}: {difference}"
        );
    }
}
