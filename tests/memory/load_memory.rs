//! Loading a model, and its first request, must need at most a quarter more memory than the model
//! itself, at any time.
//!
//! The test has its own binary, because the peak of resident memory covers the whole process. It
//! makes models of about 100 MB in each storage format. As in real small models, the embedding is
//! the largest tensor.

#![cfg(target_os = "linux")]

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;

use crate::common::{fixture, load};
use inference::{Interrupt, Prompt};
use metal_backend::model_report::ModelReport;
use serde_json::{Map, json};

const VOCAB: usize = 24_000;
const HIDDEN: usize = 512;
const WIDE: usize = 1408;
const LAYERS: usize = 4;

/// Names and shapes of a llama with tied output weights, also with GGUF's names. Row and layer
/// counts are multiplied by `times`.
fn tensors(times: usize) -> Vec<(String, String, Vec<usize>)> {
    let mut all = vec![
        (
            "model.embed_tokens".into(),
            "token_embd".into(),
            vec![VOCAB * times, HIDDEN],
        ),
        ("model.norm".into(), "output_norm".into(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS * times {
        for (name, gguf, shape) in [
            ("input_layernorm", "attn_norm", vec![HIDDEN]),
            ("post_attention_layernorm", "ffn_norm", vec![HIDDEN]),
            ("self_attn.q_proj", "attn_q", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", "attn_k", vec![HIDDEN, HIDDEN]),
            ("self_attn.v_proj", "attn_v", vec![HIDDEN, HIDDEN]),
            ("self_attn.o_proj", "attn_output", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj", "ffn_gate", vec![WIDE, HIDDEN]),
            ("mlp.up_proj", "ffn_up", vec![WIDE, HIDDEN]),
            ("mlp.down_proj", "ffn_down", vec![HIDDEN, WIDE]),
        ] {
            let name = format!("model.layers.{layer}.{name}");
            all.push((name, format!("blk.{layer}.{gguf}"), shape));
        }
    }
    all
}

/// Element `i` of a fixed pattern, small enough that activations stay finite.
fn number(i: usize) -> f32 {
    ((i.wrapping_mul(2_654_435_761) >> 8) % 1000) as f32 / 20_000.0 - 0.025
}

#[derive(Clone, Copy, Debug)]
enum Storage {
    F32,
    Bf16,
    FourBits,
}

/// Size factor of packed models. A packed weight is small, so packed models have more weights.
const PACKED_TIMES: usize = 6;

fn directory(dir: &Path, storage: Storage) {
    let times = match storage {
        Storage::FourBits => PACKED_TIMES,
        Storage::Bf16 => 2,
        Storage::F32 => 1,
    };
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(fixture("tiny/llama").join(name), dir.join(name)).unwrap();
    }
    let mut config = json!({
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS * times,
        "intermediate_size": WIDE, "num_attention_heads": 8, "num_key_value_heads": 8,
        "vocab_size": VOCAB * times, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    if matches!(storage, Storage::FourBits) {
        config["quantization"] = json!({"bits": 4, "group_size": 64});
    }
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut header = Map::new();
    let mut files: Vec<(&str, usize)> = Vec::new();
    let mut at = 0;
    let mut add = |name: String, dtype: &'static str, shape: Vec<usize>| {
        let elements: usize = shape.iter().product();
        let bytes = elements * if matches!(dtype, "F32" | "U32") { 4 } else { 2 };
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]});
        header.insert(name, entry);
        files.push((dtype, elements));
        at += bytes;
    };
    for (name, _, shape) in tensors(times) {
        let is_matrix = shape.len() == 2;
        match storage {
            Storage::FourBits if is_matrix => {
                let groups = vec![shape[0], shape[1] / 64];
                add(
                    format!("{name}.weight"),
                    "U32",
                    vec![shape[0], shape[1] / 8],
                );
                add(format!("{name}.scales"), "F16", groups.clone());
                add(format!("{name}.biases"), "F16", groups);
            }
            Storage::Bf16 => add(format!("{name}.weight"), "BF16", shape),
            _ => add(format!("{name}.weight"), "F32", shape),
        }
    }
    let header = serde_json::to_string(&header).unwrap();
    let mut out = BufWriter::new(fs::File::create(dir.join("model.safetensors")).unwrap());
    out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    out.write_all(header.as_bytes()).unwrap();
    for (dtype, elements) in files {
        for i in 0..elements {
            match dtype {
                "F32" => out.write_all(&number(i).to_le_bytes()),
                "U32" => out.write_all(&(i as u32).wrapping_mul(2_654_435_761).to_le_bytes()),
                "BF16" => out.write_all(&number(i).to_le_bytes()[2..]),
                // 2^-10 as float16.
                _ => out.write_all(&0x1400u16.to_le_bytes()),
            }
            .unwrap();
        }
    }
    out.flush().unwrap();
}

/// Writes a GGUF file. As in llama.cpp, the embedding is Q8_0, matrices are Q4_1 and norms F32;
/// with `halves`, all matrices are BF16.
fn gguf(path: &Path, halves: bool) {
    let times = if halves { 2 } else { PACKED_TIMES };
    fn text(out: &mut Vec<u8>, s: &str) {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    }
    fn key(out: &mut Vec<u8>, name: &str, kind: u32) {
        text(out, name);
        out.extend(kind.to_le_bytes());
    }
    let mut meta = Vec::new();
    let mut keys = 0u64;
    for (name, value) in [
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "default"),
    ] {
        key(&mut meta, name, 8);
        text(&mut meta, value);
        keys += 1;
    }
    for (name, value) in [
        ("llama.block_count", LAYERS * times),
        ("llama.embedding_length", HIDDEN),
        ("llama.feed_forward_length", WIDE),
        ("llama.attention.head_count", 8),
        ("llama.context_length", 256),
    ] {
        key(&mut meta, name, 4);
        meta.extend((value as u32).to_le_bytes());
        keys += 1;
    }
    key(&mut meta, "llama.attention.layer_norm_rms_epsilon", 6);
    meta.extend(1e-5f32.to_le_bytes());
    let golden: serde_json::Value =
        serde_json::from_slice(&fs::read(fixture("tiny/llama/tokenizer.json")).unwrap()).unwrap();
    let mut tokens: Vec<(u64, String)> = golden["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (id.as_u64().unwrap(), token.clone()))
        .collect();
    tokens.sort();
    key(&mut meta, "tokenizer.ggml.tokens", 9);
    meta.extend(8u32.to_le_bytes());
    meta.extend((tokens.len() as u64).to_le_bytes());
    for (_, token) in &tokens {
        text(&mut meta, token);
    }
    keys += 2;
    let mut infos = Vec::new();
    let mut at = 0u64;
    let all = tensors(times);
    let stored = |gguf: &str, shape: &[usize]| {
        let elements: usize = shape.iter().product();
        match (gguf, shape.len()) {
            (_, 2) if halves => (30u32, elements * 2),
            ("token_embd", _) => (8, elements / 32 * 34),
            (_, 2) => (3, elements / 32 * 20),
            _ => (0, elements * 4),
        }
    };
    for (_, name, shape) in &all {
        let (kind, bytes) = stored(name, shape);
        text(&mut infos, &format!("{name}.weight"));
        infos.extend((shape.len() as u32).to_le_bytes());
        for d in shape.iter().rev() {
            infos.extend((*d as u64).to_le_bytes());
        }
        infos.extend(kind.to_le_bytes());
        infos.extend(at.to_le_bytes());
        at += (bytes as u64).next_multiple_of(32);
    }
    let mut head = b"GGUF".to_vec();
    head.extend(3u32.to_le_bytes());
    head.extend((all.len() as u64).to_le_bytes());
    head.extend(keys.to_le_bytes());
    head.extend(meta);
    head.extend(infos);
    head.resize(head.len().next_multiple_of(32), 0);
    let mut out = BufWriter::new(fs::File::create(path).unwrap());
    out.write_all(&head).unwrap();
    for (_, name, shape) in &all {
        let (kind, bytes) = stored(name, shape);
        for i in 0..bytes {
            let byte = match kind {
                0 => number(i / 4).to_le_bytes()[i % 4],
                30 => number(i / 2).to_le_bytes()[2 + i % 2],
                // Each block starts with its float16 scale, 2^-10.
                8 if i % 34 < 2 => [0x00, 0x14][i % 34],
                3 if i % 20 < 4 => [0x00, 0x14, 0x00, 0x94][i % 20],
                _ => (i.wrapping_mul(2_654_435_761) >> 16) as u8,
            };
            out.write_all(&[byte]).unwrap();
        }
        let end = bytes.next_multiple_of(32) - bytes;
        out.write_all(&vec![0; end]).unwrap();
    }
    out.flush().unwrap();
}

/// A line of `/proc/self/status`, converted to bytes.
fn status(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with(name)).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

/// The variable that makes a child process of this test load a model and report its memory.
const CHILD: &str = "LOAD_MEMORY_OF";

/// The full name of the test, with which the child process runs no other test.
const TEST: &str = "load_memory::loading_takes_at_most_a_quarter_more_than_the_model";

fn measure(path: &Path) {
    // The first load also allocates memory once per process (MLX, threads, tables). It must not
    // count as memory of the measured model.
    drop(load(&fixture("tiny/llama")));
    let before = status("VmRSS:");
    let model = load(path);
    // Inference proves that the loaded model works. Matrices of GGUF files may be packed or read
    // only now.
    let prompt = Prompt::Tokens(vec![5, 6, 7]);
    let output = model
        .as_token_model()
        .unwrap()
        .logits(&prompt, false, &Interrupt::new());
    assert!(output.unwrap().logits.iter().all(|x| x.is_finite()));
    let peak = status("VmHWM:").saturating_sub(before);
    let report = ModelReport::read(path, Some("cpu"), None).unwrap();
    let estimate = report.memory.weights;
    println!("measured {peak} {} {estimate}", model.info().weight_bytes);
}

#[test]
fn loading_takes_at_most_a_quarter_more_than_the_model() {
    if let Some(path) = std::env::var_os(CHILD) {
        return measure(Path::new(&path));
    }
    let mut models = Vec::new();
    for storage in [Storage::F32, Storage::Bf16, Storage::FourBits] {
        let dir = tempfile::tempdir().unwrap();
        directory(dir.path(), storage);
        models.push((format!("{storage:?}"), dir));
    }
    let dir = tempfile::tempdir().unwrap();
    gguf(&dir.path().join("model.gguf"), false);
    models.push(("GGUF".to_owned(), dir));
    let dir = tempfile::tempdir().unwrap();
    gguf(&dir.path().join("model.gguf"), true);
    models.push(("GGUF of Bf16".to_owned(), dir));
    let mut misses = Vec::new();
    for (what, dir) in models {
        let run = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture"])
            .env(CHILD, dir.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&run.stdout);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{what}: {text}{error}");
        let line = text.split("measured ").nth(1).unwrap();
        let mut numbers = line
            .split_whitespace()
            .map(|n| n.parse::<u64>().unwrap_or(0));
        let mut number = || numbers.next().unwrap();
        let (peak, bytes, estimate) = (number(), number(), number());
        let ratio = peak as f64 / bytes as f64;
        println!("{what}: {bytes} bytes of weights, {peak} at the peak: {ratio:.2}");
        // Loading refuses a model by this estimate. It must equal the allocated bytes.
        let miss = estimate.abs_diff(bytes);
        assert!(miss <= bytes / 100, "{what}: {estimate}, loaded {bytes}");
        assert!(bytes > 80 << 20, "{what}: {bytes}");
        // 16-bit matrices keep their type in memory; norms become float32.
        if what.contains("Bf16") {
            let files = fs::read_dir(dir.path()).unwrap();
            let stored: u64 = files.map(|f| f.unwrap().metadata().unwrap().len()).sum();
            assert!(bytes < stored + stored / 100, "{what}: {bytes} of {stored}");
        }
        if !(0.8..=1.25).contains(&ratio) {
            misses.push(format!("{what}: {ratio:.2}"));
        }
    }
    assert!(misses.is_empty(), "{misses:?}");
}
