//! Tests of checkpoints that GPTQ, AWQ or an FP8 quantizer packed: variants of the formats, and
//! files that contradict their configuration. `tests/engine/golden.rs` compares their numbers.

use inference::{ErrorKind, LoadOptions};
use safetensors::Dtype;
use serde_json::json;

use crate::common::fixture;
use crate::layouts::{Checkpoint, Tensor, same_after};

const MATRIX: &str = "model.layers.1.mlp.down_proj";

/// The words of a tensor, each changed.
fn words(tensor: &mut Tensor, change: impl Fn(u32) -> u32) {
    for word in tensor.data.as_chunks_mut::<4>().0 {
        *word = change(u32::from_le_bytes(*word)).to_le_bytes();
    }
}

/// Adds 1 to each code of 4 bits. The greatest code becomes 0.
fn add_one(word: u32) -> u32 {
    (0..8).fold(0, |sum, i| sum | (((word >> (4 * i)) + 1) & 15) << (4 * i))
}

/// The second version of GPTQ's format stores zero points unchanged. The first version stores each
/// zero point minus 1.
#[test]
fn the_second_version_of_gptq_has_other_zero_points() {
    same_after("llama-gptq", |c| {
        c.config["quantization_config"]["checkpoint_format"] = json!("gptq_v2");
        for (name, tensor) in &mut c.tensors {
            if name.ends_with("qzeros") {
                words(tensor, add_one);
            }
        }
    });
}

/// If each group consists of adjacent inputs, the file needs no `g_idx`.
#[test]
fn neighbors_in_groups_need_no_list_of_groups() {
    same_after("llama-gptq", |c| {
        c.tensors.retain(|name, _| !name.ends_with("g_idx"));
        c.config["quantization_config"]["desc_act"] = json!(false);
    });
}

/// Without zero points, the middle code represents zero.
#[test]
fn absent_zero_points_are_the_middle() {
    let prompt = inference::Prompt::Tokens((40..60).collect());
    for name in ["llama-gptq", "llama-awq"] {
        let source = fixture("tiny").join(name);
        let logits = |change: &dyn Fn(&mut Checkpoint)| {
            let mut checkpoint = Checkpoint::read(&source);
            change(&mut checkpoint);
            let dir = tempfile::tempdir().unwrap();
            checkpoint.write(dir.path(), &source);
            let model = crate::common::load(dir.path());
            let model = model.as_token_model().unwrap();
            let output = model.logits(&prompt, false, &inference::Interrupt::new());
            output.unwrap().logits
        };
        let absent = logits(&|c| c.tensors.retain(|name, _| !name.ends_with("qzeros")));
        // Format 1 of GPTQ stores 8 as 7.
        let middle = if name == "llama-awq" {
            0x8888_8888
        } else {
            0x7777_7777
        };
        let explicit = logits(&|c| {
            for (name, tensor) in &mut c.tensors {
                if name.ends_with("qzeros") {
                    words(tensor, |_| middle);
                }
            }
        });
        assert_eq!(absent, explicit, "{name}");
    }
}

/// A fault of a file: its description, the change that causes it, and a part of the error message.
type Fault = (
    &'static str,
    &'static str,
    fn(&mut Checkpoint),
    &'static str,
);

#[test]
fn contradictions_are_errors_that_name_the_tensor() {
    let faults: [Fault; 10] = [
        (
            "no scales",
            "llama-gptq",
            |c| drop(c.take(&format!("{MATRIX}.scales"))),
            "scales",
        ),
        (
            "a list of groups out of range",
            "llama-gptq",
            |c| {
                words(
                    c.tensors.get_mut(&format!("{MATRIX}.g_idx")).unwrap(),
                    |_| 4,
                );
            },
            "g_idx",
        ),
        (
            "groups of negative number",
            "llama-gptq-order",
            |c| {
                words(
                    c.tensors.get_mut(&format!("{MATRIX}.g_idx")).unwrap(),
                    |_| u32::MAX,
                );
            },
            "g_idx",
        ),
        (
            "codes as floats",
            "llama-gptq",
            |c| {
                c.tensors
                    .get_mut(&format!("{MATRIX}.qweight"))
                    .unwrap()
                    .dtype = Dtype::F32;
            },
            "F32",
        ),
        (
            "codes of another shape",
            "llama-awq",
            |c| {
                c.tensors
                    .get_mut(&format!("{MATRIX}.qweight"))
                    .unwrap()
                    .shape
                    .reverse();
            },
            "qweight",
        ),
        (
            "zero points of another shape",
            "llama-awq",
            |c| {
                c.tensors
                    .get_mut(&format!("{MATRIX}.qzeros"))
                    .unwrap()
                    .shape
                    .reverse();
            },
            "qzeros",
        ),
        (
            "scales of another shape",
            "llama-awq",
            |c| {
                c.tensors
                    .get_mut(&format!("{MATRIX}.scales"))
                    .unwrap()
                    .shape
                    .reverse();
            },
            "scales",
        ),
        (
            "no configuration",
            "llama-gptq",
            |c| {
                c.config
                    .as_object_mut()
                    .unwrap()
                    .remove("quantization_config");
            },
            "quantization_config",
        ),
        (
            "no scales of blocks",
            "llama-fp8",
            |c| {
                drop(c.take(&format!("{MATRIX}.weight_scale_inv")));
            },
            "weight_scale_inv",
        ),
        (
            "other blocks",
            "llama-fp8",
            |c| {
                c.config["quantization_config"]["weight_block_size"] = json!([16, 16]);
            },
            "weight_scale_inv",
        ),
    ];
    for (what, name, change, says) in faults {
        let source = fixture("tiny").join(name);
        let mut checkpoint = Checkpoint::read(&source);
        change(&mut checkpoint);
        let dir = tempfile::tempdir().unwrap();
        checkpoint.write(dir.path(), &source);
        let loaded = inference::load_model(dir.path(), &LoadOptions::new().with_backend("cpu"));
        let error = loaded.err().unwrap_or_else(|| panic!("{what}: it loaded"));
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{what}: {error}");
        assert!(error.to_string().contains(says), "{what}: {error}");
    }
}

/// A conversion would copy the packed tensors beside quantized ones.
#[test]
fn converting_them_is_an_error() {
    for name in ["llama-gptq", "llama-awq", "llama-fp8"] {
        let to = tempfile::tempdir().unwrap();
        let options = metal_backend::convert::ConvertOptions::default();
        let from = fixture("tiny").join(name);
        let error = metal_backend::convert::convert(
            &from,
            &to.path().join("out"),
            &options,
            &mut |_, _| {},
        );
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}: {error}");
        assert!(
            error.to_string().contains(&name["llama-".len()..]),
            "{error}"
        );
        assert!(!to.path().join("out").exists());
    }
}
