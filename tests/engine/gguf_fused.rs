//! Tests GGUF files that join matrices which directories store separately: one matrix for queries,
//! keys and values, and one stack for the gate and up matrices of experts.

use std::path::Path;

use inference::{Interrupt, Prompt, TextModel};
use inference_formats::Gguf;

use crate::common::{fixture, golden, ids, load, max_difference};
use crate::gguf_quantized::{Stored, file, with_tensors};

const QKV: [&str; 3] = ["attn_q.", "attn_k.", "attn_v."];
const GATE_UP: [&str; 2] = ["ffn_gate_exps.", "ffn_up_exps."];

/// Writes a copy of a file in which `parts` of each block are one tensor with the name `fused`,
/// joined along axis `axis`. Returns how many such tensors there are.
fn fused(path: &Path, to: &Path, (parts, fused): (&[&str], &str), axis: usize) -> usize {
    let gguf = Gguf::open(path).unwrap();
    let tensor = |name: &str| -> Option<Stored> {
        let tensor = gguf.tensors().get(name)?;
        let bytes = gguf.read(tensor).unwrap();
        Some((
            name.to_owned(),
            tensor.kind.id(),
            tensor.shape.clone(),
            bytes,
        ))
    };
    let (mut tensors, mut count) = (Vec::new(), 0);
    for name in gguf.tensors().keys() {
        let is_part = |part: &&str| name.contains(&format!(".{part}"));
        let Some(part) = parts.iter().find(|part| is_part(part)) else {
            tensors.push(tensor(name).unwrap());
            continue;
        };
        let all: Option<Vec<Stored>> = parts
            .iter()
            .map(|other| tensor(&name.replace(part, other)))
            .collect();
        // If a layer lacks one of the parts, for example because its keys serve as values, its
        // tensors are not joined.
        let Some(all) = all.filter(|all| all.iter().all(|(_, kind, ..)| *kind == all[0].1)) else {
            tensors.push(tensor(name).unwrap());
            continue;
        };
        if *part != parts[0] {
            continue;
        }
        let mut shape = all[0].2.clone();
        shape[axis] = all.iter().map(|(_, _, shape, _)| shape[axis]).sum();
        let outer: usize = shape[..axis].iter().product();
        let mut bytes = Vec::new();
        for i in 0..outer {
            for (_, _, _, data) in &all {
                let size = data.len() / outer;
                bytes.extend(&data[i * size..(i + 1) * size]);
            }
        }
        tensors.push((name.replace(part, fused), all[0].1, shape, bytes));
        count += 1;
    }
    with_tensors(path, to, tensors);
    count
}

/// The logits of all prompts of a model's golden file.
fn logits(model: &dyn TextModel, name: &str) -> Vec<Vec<f32>> {
    let golden = golden(&fixture("tiny").join(name));
    let tokens = model.as_token_model().unwrap();
    (golden["prompts"].as_array().unwrap().iter())
        .map(|case| {
            let prompt = Prompt::Tokens(ids(&case["tokens"]));
            let all = tokens.logits(&prompt, false, &Interrupt::new()).unwrap();
            all.logits
        })
        .collect()
}

#[test]
fn joined_matrices_compute_as_single_ones_do() {
    let dir = tempfile::tempdir().unwrap();
    let joined = |names: &[&str], parts: &[&str], to: &str, axis: usize| {
        for name in names {
            let (apart, together) = (file(name), dir.path().join(format!("{name}-{to}gguf")));
            let count = fused(&apart, &together, (parts, to), axis);
            assert!(count >= 1, "{name} has no {parts:?}");
            let [apart, together] = [&*apart, &*together].map(|path| logits(&*load(path), name));
            for (apart, together) in apart.iter().zip(&together) {
                let difference = max_difference(apart, together);
                assert!(difference < 1e-5, "{name} {to}: {difference}");
            }
        }
    };
    let families = [
        "cohere2",
        "exaone4",
        "gemma2",
        "glm4",
        "lfm2-moe",
        "nemotron",
        "olmo2",
        "qwen2-moe",
        "qwen3-moe",
        "seed-oss",
        "starcoder2",
    ];
    joined(&families, &QKV, "attn_qkv.", 0);
    let mixtures = ["lfm2-moe", "llama4", "qwen3-moe"];
    joined(&mixtures, &GATE_UP, "ffn_gate_up_exps.", 1);
}

/// Converters reorder the rows of queries and keys of these files. The order of rows of a joined
/// matrix is not known.
#[test]
fn joined_matrices_of_reordered_rows_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["granite", "minicpm"] {
        let together = dir.path().join(format!("{name}.gguf"));
        assert!(fused(&file(name), &together, (&QKV, "attn_qkv."), 0) >= 1);
        let options = inference::LoadOptions::new().with_backend("cpu");
        let Err(error) = inference::load_model(&together, &options) else {
            panic!("{name} loads");
        };
        assert!(error.to_string().contains("attn_qkv"), "{name}: {error}");
    }
}
