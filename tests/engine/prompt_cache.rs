//! Tests of saved prompt caches in the format of Python's mlx-lm. The engine must read mlx-lm's
//! files, and must write files of the same form. mlx-lm made the golden files
//! (`tools/golden/prompt_cache.py`). `mlx_lm/prompt_caches.rs` runs the real package instead.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::{fixture, golden, greedy, ids, max_difference, tiny};
use inference::{ErrorKind, Interrupt, LoadOptions, Precision, Prompt, TextModel};
use inference_formats::safetensors::SafetensorsCheckpoint;
use serde_json::Value;

fn cases() -> Vec<Value> {
    let cases = golden(&fixture("prompt-cache"));
    cases.as_array().unwrap().clone()
}

/// The model of a case, loaded with the case's flags.
fn model(case: &Value) -> Box<dyn TextModel> {
    let mut options = LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact);
    let flags = case["flags"].as_array().unwrap();
    for pair in flags.chunks(2) {
        let n: usize = pair[1].as_str().unwrap().parse().unwrap();
        options = match pair[0].as_str().unwrap() {
            "--ctx-size" => options.with_context_len(n),
            "--kv-bits" => options.with_kv_bits(n as u32),
            "--kv-group-size" => options.with_kv_group_size(n as u32),
            "--quantized-kv-start" => options.with_quantized_kv_start(n),
            other => panic!("{other}"),
        };
    }
    let path = fixture("tiny").join(case["model"].as_str().unwrap());
    inference::load_model(path, &options).unwrap()
}

fn tokens(model: &dyn TextModel, file: &Path, more: &[u32], n: usize) -> (Vec<u32>, usize) {
    let prompt_cache = model.as_prompt_cache().unwrap();
    let more = Prompt::Tokens(more.to_vec());
    let stream = prompt_cache
        .continue_prompt_cache(file, &more, &greedy(n))
        .unwrap();
    let output = stream.collect_output().unwrap();
    (output.tokens, output.metrics.cached_tokens)
}

#[test]
fn files_of_mlx_lm_are_gone_on_from() {
    // mlx-lm 0.32 and 0.30 wrote these files.
    let dirs = ["prompt-cache", "prompt-cache/0.30"].map(fixture);
    for (dir, case) in dirs
        .iter()
        .flat_map(|dir| cases().into_iter().map(move |c| (dir, c)))
    {
        let file = dir.join(case["file"].as_str().unwrap());
        let model = model(&case);
        let (prompt, expected) = (ids(&case["prompt"]), ids(&case["greedy"]));
        let prompt_cache = model.as_prompt_cache().unwrap();
        assert_eq!(prompt_cache.prompt_cache_len(&file).unwrap(), prompt.len());
        // The second run must not depend on state of the first run.
        for _ in 0..2 {
            let (got, cached) = tokens(model.as_ref(), &file, &ids(&case["more"]), expected.len());
            assert_eq!(got, expected, "{}", case["file"]);
            assert_eq!(cached, prompt.len());
        }
        // mlx-lm's file does not contain the prompt's tokens, so the engine refuses it without
        // tokens.
        let error = prompt_cache.load_prompt_cache(&file).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        // Without further tokens there is nothing to compute, so generation must fail.
        let none =
            prompt_cache.continue_prompt_cache(&file, &Prompt::Tokens(Vec::new()), &greedy(1));
        assert_eq!(none.err().unwrap().kind(), ErrorKind::InvalidOption);
    }
}

/// The text metadata that mlx-lm reads: class names of layer caches, and which entries are
/// integers.
fn texts(path: &Path) -> BTreeMap<String, String> {
    let mut texts = SafetensorsCheckpoint::metadata(path).unwrap();
    texts.retain(|key, _| key.starts_with("1.") || key.starts_with("2."));
    texts
}

/// The integer in a tensor with one element.
fn number(file: &SafetensorsCheckpoint, tensor: &str) -> Option<i32> {
    let values = file.read::<i32>(file.info(tensor)?).unwrap();
    assert_eq!(values.len(), 1, "{tensor}");
    Some(values[0])
}

/// The first `positions` positions of keys or values, shape `[1, H, n, ..]`.
fn begun(values: &[f32], shape: &[usize], positions: usize) -> Vec<f32> {
    let width = values.len() / (shape[1] * shape[2]);
    let heads = values.chunks(shape[2] * width);
    heads
        .flat_map(|head| head[..positions * width].to_vec())
        .collect()
}

#[test]
fn files_of_ours_have_the_form_of_theirs() {
    let dir = tempfile::tempdir().unwrap();
    for case in cases() {
        let name = case["file"].as_str().unwrap();
        let (ours, theirs) = (dir.path().join(name), fixture("prompt-cache").join(name));
        let writer = model(&case);
        let prompt = ids(&case["prompt"]);
        let written_cache = writer.as_prompt_cache().unwrap();
        let n = written_cache.save_prompt_cache(
            &Prompt::Tokens(prompt.clone()),
            &ours,
            &Interrupt::new(),
        );
        assert_eq!(n.unwrap(), prompt.len());
        let [a, b] = [&ours, &theirs].map(|path| texts(path));
        assert_eq!(a, b, "{name}");
        let [ours_read, theirs_read] =
            [&ours, &theirs].map(|path| SafetensorsCheckpoint::open_file(path).unwrap());
        assert!(ours_read.names().eq(theirs_read.names()), "{name}");
        // A ring buffer may start at any slot; our files start with the oldest position.
        let rings: Vec<Option<usize>> = (0..8)
            .map(|i| number(&theirs_read, &format!("{i}.5")).map(|next| next as usize))
            .collect();
        for tensor in ours_read.names() {
            let (ours_info, theirs_info) = (
                ours_read.info(tensor).unwrap(),
                theirs_read.info(tensor).unwrap(),
            );
            assert_eq!(ours_info.dtype, theirs_info.dtype, "{name}: {tensor}");
            if ours_info.shape.is_empty() {
                assert!(theirs_info.shape.is_empty(), "{name}: {tensor}");
                if !tensor.ends_with(".5") {
                    let [a, b] = [&ours_read, &theirs_read].map(|file| number(file, tensor));
                    assert_eq!(a, b, "{name}: {tensor}");
                }
                continue;
            }
            // mlx-lm's tensors have capacity for more positions than they contain.
            let mut shape = theirs_info.shape.clone();
            assert!(shape[2] >= ours_info.shape[2], "{name}: {tensor}");
            shape[2] = ours_info.shape[2];
            assert_eq!(ours_info.shape, shape, "{name}: {tensor}");
            if ours_info.dtype == safetensors::Dtype::F32 {
                let layer: usize = tensor.split('.').next().unwrap().parse().unwrap();
                let theirs = theirs_read.read::<f32>(theirs_info).unwrap();
                let theirs = begun(&theirs, &theirs_info.shape, shape[2]);
                let theirs = in_order(&theirs, &shape, rings[layer]);
                let ours = ours_read.read::<f32>(ours_info).unwrap();
                let difference = max_difference(&ours, &theirs);
                // mlx-lm quantizes its cache only after the prompt, so the prompt's attention uses
                // exact keys and values. Ours uses quantized ones, so the inputs of all layers
                // after the first differ.
                let allowed = if name.starts_with("packed") {
                    0.1
                } else {
                    1e-3
                };
                assert!(
                    difference < allowed,
                    "{name}: {tensor} differs by {difference}"
                );
            }
        }
        // Without our own metadata the file looks like a file of mlx-lm, and must be refused like
        // one.
        let metadata = SafetensorsCheckpoint::metadata(&ours).unwrap();
        assert_eq!(metadata["0.tokenizer_config"], "{}");
        assert!(Path::new(&metadata["0.model"]).is_dir(), "{metadata:?}");
        let expected = ids(&case["greedy"]);
        let (got, cached) = tokens(writer.as_ref(), &ours, &ids(&case["more"]), expected.len());
        assert_eq!((got, cached), (expected.clone(), prompt.len()), "{name}");
        let reader = model(&case);
        let read_cache = reader.as_prompt_cache().unwrap();
        assert_eq!(read_cache.load_prompt_cache(&ours).unwrap(), prompt);
        strip(&ours);
        assert!(read_cache.load_prompt_cache(&ours).is_err());
        let (got, _) = tokens(reader.as_ref(), &ours, &ids(&case["more"]), expected.len());
        assert_eq!(got, expected, "{name}: stripped");
    }
}

/// Keys or values `[1, H, n, D]` of a ring buffer, oldest position first. `next` is the slot of the
/// next write.
fn in_order(values: &[f32], shape: &[usize], next: Option<usize>) -> Vec<f32> {
    let (positions, width) = (shape[2], shape[3]);
    let next = next.unwrap_or(0) % positions;
    let heads = values.chunks(positions * width);
    heads
        .flat_map(|head| {
            let (newer, older) = head.split_at(next * width);
            [older, newer].concat()
        })
        .collect()
}

/// Removes the metadata that only our files have.
fn strip(path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut metadata = SafetensorsCheckpoint::metadata(path).unwrap();
    assert!(metadata.remove("0.rust_mlx").is_some());
    let metadata = Some(metadata.into_iter().collect());
    let out = safetensors::serialize(read.tensors(), metadata).unwrap();
    std::fs::write(path, out).unwrap();
}

/// Copies a file and changes one metadata value.
fn changed(from: &Path, to: &Path, key: &str, value: &str) {
    let bytes = std::fs::read(from).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut metadata = SafetensorsCheckpoint::metadata(from).unwrap();
    metadata.insert(key.to_owned(), value.to_owned());
    let metadata = Some(metadata.into_iter().collect());
    std::fs::write(
        to,
        safetensors::serialize(read.tensors(), metadata).unwrap(),
    )
    .unwrap();
}

fn refused(model: &dyn TextModel, file: &Path) -> inference::Error {
    let prompt_cache = model.as_prompt_cache().unwrap();
    let more = Prompt::Tokens(vec![7]);
    let error = prompt_cache.continue_prompt_cache(file, &more, &greedy(1));
    let error = error.map(drop).expect_err("it is refused");
    assert_eq!(error.kind(), ErrorKind::InvalidModel, "{error}");
    error
}

#[test]
fn damaged_files_and_those_of_others_are_refused() {
    let file = |name: &str| fixture("prompt-cache").join(format!("{name}.safetensors"));
    let says = |error: &inference::Error, text: &str| {
        assert!(error.to_string().contains(text), "{error}");
    };
    let (llama, qwen3) = (tiny("llama"), tiny("qwen3"));
    says(&refused(qwen3.as_ref(), &file("growing")), "3 layers");
    says(&refused(llama.as_ref(), &file("bounded")), "2 layers");
    // This model has the same number of layers as the saved one, but other heads.
    let granite = tiny("granite");
    says(
        &refused(granite.as_ref(), &file("bounded")),
        "another model",
    );
    // The error names the flags that the file was made with.
    says(&refused(qwen3.as_ref(), &file("bounded")), "--ctx-size 24");
    let packed = tiny("qwen3-q4");
    let error = refused(packed.as_ref(), &file("packed"));
    says(&error, "--kv-bits 8 --kv-group-size 32");
    let xlstm = tiny("xlstm");
    says(&refused(xlstm.as_ref(), &file("bounded")), "recurrent");

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.safetensors");
    let original = std::fs::read(file("growing")).unwrap();
    for eighths in 0..8 {
        std::fs::write(&path, &original[..original.len() * eighths / 8]).unwrap();
        refused(llama.as_ref(), &path);
    }
    for (key, value, text) in [
        ("1.1", "ArraysCache", "ArraysCache"),
        ("1.1", "QuantizedKVCache", "1.3"),
        ("1.0", "RotatingKVCache", "0.3"),
        ("0.rust_mlx", "{", "damaged"),
        (
            "0.rust_mlx",
            r#"{"identity": "x", "tokens": [1], "stretch": 0}"#,
            "another model",
        ),
    ] {
        changed(&file("growing"), &path, key, value);
        says(&refused(llama.as_ref(), &path), text);
    }
    // The form before 0.32 stores numbers as texts.
    let file = |name: &str| fixture("prompt-cache/0.30").join(format!("{name}.safetensors"));
    for (key, value, text) in [
        ("2.1", "ArraysCache", "ArraysCache"),
        ("2.1", "QuantizedKVCache", "0.1.0"),
        ("2.0", "RotatingKVCache", "0.0.2"),
        ("1.rust_mlx", "{", "damaged"),
    ] {
        changed(&file("growing"), &path, key, value);
        says(&refused(llama.as_ref(), &path), text);
    }
    let cases = cases();
    let bounded = cases.iter().find(|c| c["file"] == "bounded.safetensors");
    let bounded = model(bounded.unwrap());
    for (key, value) in [
        ("0.1.0", "24"),
        ("0.1.1", "0"),
        ("0.1.1", "-5"),
        ("0.1.2", "21"),
        ("0.0.2", "0"),
        ("0.1.2", "9999999999"),
        ("0.1.3", "x"),
    ] {
        changed(&file("bounded"), &path, key, value);
        let prompt_cache = bounded.as_prompt_cache().unwrap();
        let more = Prompt::Tokens(vec![7]);
        let run = prompt_cache.continue_prompt_cache(&path, &more, &greedy(1));
        assert!(run.is_err(), "{key} = {value}");
    }
    let packed_case = cases.iter().find(|c| c["file"] == "packed.safetensors");
    let packed = model(packed_case.unwrap());
    for (key, value) in [
        ("0.1.2", "0"),
        ("0.1.2", "3"),
        ("0.1.1", "0"),
        ("0.1.0", "21"),
    ] {
        changed(&file("packed"), &path, key, value);
        refused(packed.as_ref(), &path);
    }
}

/// Copies a file with another number in one tensor.
fn renumbered(from: &Path, to: &Path, tensor: &str, value: i32) {
    let bytes = std::fs::read(from).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let metadata = SafetensorsCheckpoint::metadata(from).unwrap();
    let new = value.to_le_bytes();
    let tensors = read.tensors().into_iter().map(|(name, view)| {
        let view = match name == tensor {
            true => safetensors::tensor::TensorView::new(view.dtype(), Vec::new(), &new).unwrap(),
            false => view,
        };
        (name, view)
    });
    let out = safetensors::serialize(tensors, Some(metadata.into_iter().collect())).unwrap();
    std::fs::write(to, out).unwrap();
}

#[test]
fn numbers_of_a_file_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.safetensors");
    for case in cases() {
        let file = fixture("prompt-cache").join(case["file"].as_str().unwrap());
        let model = model(&case);
        let edits: &[(&str, i32)] = match case["file"].as_str().unwrap() {
            "growing.safetensors" => &[("1.2", 0), ("1.2", 21), ("1.2", -1), ("1.2", 257)],
            "packed.safetensors" => &[("1.2", 21), ("1.3", 0), ("1.4", 0), ("1.4", 3)],
            "bounded.safetensors" => &[("1.2", 21), ("1.3", 24), ("1.4", 0), ("1.4", -5)],
            _ => &[("0.2", 0), ("0.2", i32::MAX), ("0.4", i32::MIN)],
        };
        for (tensor, value) in edits {
            renumbered(&file, &path, tensor, *value);
            refused(model.as_ref(), &path);
        }
    }
}

fn mlx(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let run = mlx(arguments);
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{arguments:?}: {stderr}");
    serde_json::from_slice(&run.stdout).unwrap()
}

/// As in mlx-lm, the file is the beginning of the user's message in the chat template, and the
/// prompt is the rest.
#[test]
fn a_message_is_begun_in_a_file_and_ended_by_the_prompt() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("begun.safetensors");
    let file = file.to_str().unwrap();
    let path = fixture("tiny/llama");
    let path = path.to_str().unwrap();
    let flags = ["--model", path, "--backend", "cpu", "--quiet"];
    let of_file = ["--prompt-cache-file", file, "--prompt"];
    let cached = json(&[&["cache-prompt"], &flags[..], &of_file, &["Once upon"]].concat());
    let limits = ["--max-tokens", "8", "--ignore-eos", "--json"];
    let ended = [&["generate"], &flags[..], &limits, &of_file, &[" a time"]].concat();
    let ended = json(&ended);
    let full_prompt = [
        &["generate"],
        &flags[..],
        &limits,
        &["--prompt", "Once upon a time"],
    ]
    .concat();
    let full_prompt = json(&full_prompt);
    assert_eq!(ended["metrics"]["cached_tokens"], cached["tokens"]);
    assert_eq!(ended["prompt_tokens"], full_prompt["prompt_tokens"]);
    assert_eq!(ended["tokens"], full_prompt["tokens"]);
    // `--raw` omits the template in both.
    let raw = ["--raw"];
    let plain = json(
        &[
            &["cache-prompt"],
            &flags[..],
            &raw,
            &of_file,
            &["Once upon"],
        ]
        .concat(),
    );
    assert!(
        plain["tokens"].as_u64() < cached["tokens"].as_u64(),
        "{plain}"
    );
}
