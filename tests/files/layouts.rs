//! Tests that one network loads from several file layouts: those of Hugging Face, MLX and older
//! tools. Each test rewrites a tiny checkpoint into another layout and expects equal logits.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{fixture, load, max_difference, order_bound};
use inference::{Interrupt, Prompt};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

/// A tensor with its bytes. Unpacked tensors of the tiny checkpoints are bfloat16.
#[derive(Clone)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

impl Tensor {
    fn width(&self) -> usize {
        self.dtype.bitsize() / 8
    }

    /// Selects and orders the rows of the second-to-last axis by `pick`, in each stacked matrix.
    fn rows(&self, pick: &dyn Fn(usize) -> Vec<usize>) -> Self {
        let n = self.shape.len();
        let (rows, cols) = (self.shape[n - 2], self.shape[n - 1] * self.width());
        let chosen = pick(rows);
        let mut data = Vec::new();
        for matrix in self.data.chunks(rows * cols) {
            for &row in &chosen {
                data.extend_from_slice(&matrix[row * cols..(row + 1) * cols]);
            }
        }
        let mut shape = self.shape.clone();
        shape[n - 2] = chosen.len();
        Self {
            shape,
            data,
            ..self.clone()
        }
    }

    /// Swaps the last two axes.
    fn transposed(&self) -> Self {
        let n = self.shape.len();
        let (rows, cols, w) = (self.shape[n - 2], self.shape[n - 1], self.width());
        let mut data = Vec::with_capacity(self.data.len());
        for matrix in self.data.chunks(rows * cols * w) {
            for c in 0..cols {
                for r in 0..rows {
                    let at = (r * cols + c) * w;
                    data.extend_from_slice(&matrix[at..at + w]);
                }
            }
        }
        let mut shape = self.shape.clone();
        shape.swap(n - 2, n - 1);
        Self {
            shape,
            data,
            ..self.clone()
        }
    }

    /// Stacks several tensors along a new first axis.
    fn stacked(parts: &[Self]) -> Self {
        let mut shape = vec![parts.len()];
        shape.extend(&parts[0].shape);
        Self {
            dtype: parts[0].dtype,
            shape,
            data: parts.iter().flat_map(|p| p.data.clone()).collect(),
        }
    }

    /// Appends the rows of another tensor.
    fn below(&self, other: &Self) -> Self {
        let mut shape = self.shape.clone();
        shape[0] += other.shape[0];
        Self {
            shape,
            data: [self.data.clone(), other.data.clone()].concat(),
            ..self.clone()
        }
    }

    fn as_column(&self) -> Self {
        let mut shape = self.shape.clone();
        shape.push(1);
        Self {
            shape,
            ..self.clone()
        }
    }

    fn without_last_axis(mut self) -> Self {
        self.shape.pop();
        self
    }
}

/// A checkpoint in memory.
pub struct Checkpoint {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Checkpoint {
    pub fn read(dir: &Path) -> Self {
        let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes)
            .unwrap()
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                let tensor = Tensor {
                    dtype: view.dtype(),
                    shape: view.shape().to_vec(),
                    data: view.data().to_vec(),
                };
                (name, tensor)
            })
            .collect();
        let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
        Self {
            config: serde_json::from_str(&config).unwrap(),
            tensors,
        }
    }

    pub fn write(&self, dir: &Path, tokenizer_from: &Path) {
        let views: Vec<(&String, TensorView<'_>)> = self
            .tensors
            .iter()
            .map(|(name, t)| {
                (
                    name,
                    TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap(),
                )
            })
            .collect();
        let bytes = safetensors::serialize(views, None).unwrap();
        std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(tokenizer_from.join(file), dir.join(file)).unwrap();
        }
    }

    /// Removes and returns a tensor.
    pub fn take(&mut self, name: &str) -> Tensor {
        self.tensors
            .remove(name)
            .unwrap_or_else(|| panic!("no tensor {name}"))
    }

    fn put(&mut self, name: String, tensor: Tensor) {
        assert!(self.tensors.insert(name, tensor).is_none());
    }

    fn rename(&mut self, new: impl Fn(&str) -> String) {
        self.tensors = std::mem::take(&mut self.tensors)
            .into_iter()
            .map(|(name, t)| (new(&name), t))
            .collect();
    }

    fn layers(&self) -> usize {
        let text = self.config.get("text_config").unwrap_or(&self.config);
        text["num_hidden_layers"]
            .as_u64()
            .or(text["n_layer"].as_u64())
            .unwrap() as usize
    }
}

/// Rewrites a fixture, and expects exactly the fixture's logits from the result.
pub fn same_after(name: &str, rewrite: impl FnOnce(&mut Checkpoint)) {
    let source = fixture("tiny").join(name);
    let mut checkpoint = Checkpoint::read(&source);
    rewrite(&mut checkpoint);
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(dir.path(), &source);
    let prompt = Prompt::Tokens((40..75).collect());
    let logits = |path: &Path| {
        let model = load(path);
        let output = model
            .as_token_model()
            .unwrap()
            .logits(&prompt, true, &Interrupt::new());
        (output.unwrap().logits, model.model_type().to_owned())
    };
    let ((expected, expected_type), (got, got_type)) = (logits(&source), logits(dir.path()));
    let difference = max_difference(&expected, &got);
    assert!(difference < order_bound(1e-5), "{name}: {difference}");
    assert_eq!(expected_type, got_type);
}

/// Stacks the tensors of separate experts into one tensor, as MLX stores experts.
fn stack_experts(c: &mut Checkpoint, at: &str, experts: usize, parts: [(&str, &str); 3]) {
    for layer in 0..c.layers() {
        for (from, to) in parts {
            let matrices: Vec<_> = (0..experts)
                .map(|e| {
                    c.take(&format!(
                        "model.layers.{layer}.{at}.experts.{e}.{from}.weight"
                    ))
                })
                .collect();
            c.put(
                format!("model.layers.{layer}.{at}.switch_mlp.{to}.weight"),
                Tensor::stacked(&matrices),
            );
        }
    }
}

#[test]
fn mixtral_with_stacked_experts() {
    same_after("mixtral", |c| {
        let parts = [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")];
        stack_experts(c, "block_sparse_moe", 4, parts);
    });
}

#[test]
fn qwen3_moe_with_stacked_and_with_fused_experts() {
    let same = ["gate_proj", "down_proj", "up_proj"].map(|p| (p, p));
    same_after("qwen3-moe", |c| stack_experts(c, "mlp", 6, same));
    same_after("qwen3-moe", |c| {
        for layer in 0..c.layers() {
            let at = format!("model.layers.{layer}.mlp.experts");
            let mut fused = Vec::new();
            let mut down = Vec::new();
            for e in 0..6 {
                let gate = c.take(&format!("{at}.{e}.gate_proj.weight"));
                let up = c.take(&format!("{at}.{e}.up_proj.weight"));
                fused.push(gate.below(&up));
                down.push(c.take(&format!("{at}.{e}.down_proj.weight")));
            }
            c.put(format!("{at}.gate_up_proj"), Tensor::stacked(&fused));
            c.put(format!("{at}.down_proj"), Tensor::stacked(&down));
        }
    });
}

#[test]
fn xlstm_with_fused_matrices() {
    same_after("xlstm", |c| {
        for layer in 0..c.layers() {
            let block = format!("backbone.blocks.{layer}");
            for (at, parts, fused, end) in [
                (
                    "mlstm_layer",
                    vec!["q", "k", "v", "ogate_preact"],
                    "qkv_opreact",
                    "weight",
                ),
                (
                    "mlstm_layer",
                    vec!["igate_preact", "fgate_preact"],
                    "ifgate_preact",
                    "weight",
                ),
                (
                    "mlstm_layer",
                    vec!["igate_preact", "fgate_preact"],
                    "ifgate_preact",
                    "bias",
                ),
                (
                    "ffn",
                    vec!["proj_up_gate", "proj_up"],
                    "proj_up_gate_z",
                    "weight",
                ),
            ] {
                let name = |part: &str| format!("{block}.{at}.{part}.{end}");
                let matrices = parts.iter().map(|part| c.take(&name(part)));
                let all = matrices.reduce(|all, part| all.below(&part)).unwrap();
                c.put(name(fused), all);
            }
        }
        c.config["weight_mode"] = json!("fused");
    });
}

/// mlx-lm transposes the convolutions, renames the dense block, and stacks the experts.
#[test]
fn lfm2_as_mlx_lm_stores_it() {
    for name in ["lfm2", "lfm2-moe"] {
        same_after(name, |c| {
            for layer in 0..c.layers() {
                let block = format!("model.layers.{layer}");
                let conv = format!("{block}.conv.conv.weight");
                if layer % 2 == 0 && layer < 4 && (name, layer) != ("lfm2", 2) {
                    let turned = c.take(&conv).transposed();
                    c.put(conv, turned);
                }
                if name == "lfm2" {
                    continue;
                }
                let at = format!("{block}.feed_forward");
                for (one, all) in [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")] {
                    if layer == 0 {
                        let dense = c.take(&format!("{at}.{one}.weight"));
                        c.put(format!("{at}.{all}.weight"), dense);
                        continue;
                    }
                    let parts: Vec<_> = (0..4)
                        .map(|e| c.take(&format!("{at}.experts.{e}.{one}.weight")))
                        .collect();
                    let stack = Tensor::stacked(&parts);
                    c.put(format!("{at}.switch_mlp.{all}.weight"), stack);
                }
            }
        });
    }
}

/// mlx-lm transposes the convolutions and adds one to most norms. bfloat16 cannot represent these
/// sums exactly, so the test stores them with more digits.
#[test]
fn qwen3_next_as_mlx_lm_stores_it() {
    for name in ["qwen3-next", "qwen3-5"] {
        same_after(name, |c| {
            let names: Vec<String> = c.tensors.keys().cloned().collect();
            for name in names {
                if name.ends_with("conv1d.weight") {
                    let turned = c.take(&name).transposed();
                    c.put(name, turned);
                } else if name.ends_with("norm.weight") && !name.contains(".linear_attn.") {
                    let stored = c.take(&name);
                    let plus_one = |b: &[u8]| {
                        let value = half::bf16::from_le_bytes([b[0], b[1]]).to_f32();
                        (value + 1.0).to_le_bytes()
                    };
                    let tensor = Tensor {
                        dtype: Dtype::F32,
                        data: stored.data.chunks(2).flat_map(plus_one).collect(),
                        ..stored
                    };
                    c.put(name, tensor);
                }
            }
        });
    }
}

/// mlx-lm splits gate and up, and renames the dense block.
#[test]
fn granite_as_mlx_lm_stores_it() {
    for name in ["granitemoehybrid", "granitemoehybrid-dense"] {
        same_after(name, |c| {
            let experts = name == "granitemoehybrid";
            let (from, to) = match experts {
                true => ("block_sparse_moe", "block_sparse_moe.switch_mlp"),
                false => ("shared_mlp", "mlp"),
            };
            for layer in 0..c.layers() {
                let block = format!("model.layers.{layer}");
                let both = c.take(&format!("{block}.{from}.input_linear.weight"));
                let down = c.take(&format!("{block}.{from}.output_linear.weight"));
                let gate = both.rows(&|n| (0..n / 2).collect());
                let up = both.rows(&|n| (n / 2..n).collect());
                c.put(format!("{block}.{to}.gate_proj.weight"), gate);
                c.put(format!("{block}.{to}.up_proj.weight"), up);
                c.put(format!("{block}.{to}.down_proj.weight"), down);
            }
        });
    }
}

/// The logits without a last norm are those of the unnormalized states. A norm of ones only scales
/// a state, so logits with such a norm are proportional to logits without one. transformers stores
/// the last norm and always applies it.
#[test]
fn xlstm_without_its_last_norm() {
    same_after("xlstm", |c| c.config["add_out_norm"] = json!(false));
    // The chunk length does not change the logits. A configuration may omit `weight_mode`.
    same_after("xlstm", |c| {
        c.config["chunk_size"] = json!(1000);
        c.config["weight_mode"] = Value::Null;
    });
    let source = fixture("tiny/xlstm");
    let mut checkpoint = Checkpoint::read(&source);
    checkpoint.config["add_out_norm"] = json!(false);
    // Without the cap on logits, logits are linear in the state.
    checkpoint.config["output_logit_soft_cap"] = Value::Null;
    let norm = checkpoint.take("backbone.out_norm.weight");
    let prompt = Prompt::Tokens((40..60).collect());
    let of = |checkpoint: &Checkpoint| {
        let dir = tempfile::tempdir().unwrap();
        checkpoint.write(dir.path(), &source);
        let model = load(dir.path());
        let logits = model
            .as_token_model()
            .unwrap()
            .logits(&prompt, false, &Interrupt::new())
            .unwrap();
        let inspector = model.as_attention_inspector().unwrap();
        let states = inspector
            .hidden_states(&prompt, &[19], &Interrupt::new())
            .unwrap();
        (logits.logits, states.blocks.last().unwrap().clone())
    };
    let (without, state) = of(&checkpoint);
    // These bytes are the value 1 in bfloat16.
    let ones = Tensor {
        data: [0x80, 0x3f].repeat(norm.data.len() / 2),
        ..norm
    };
    checkpoint.put("backbone.out_norm.weight".into(), ones);
    let (with, same_state) = of(&checkpoint);
    assert_eq!(state, same_state);
    let mean_square = state.iter().map(|x| x * x).sum::<f32>() / state.len() as f32;
    let root = (mean_square + 1e-6).sqrt();
    let scaled: Vec<f32> = with.iter().map(|x| x * root).collect();
    assert!(root > 0.0 && (root - 1.0).abs() > 1e-3, "{root}");
    assert!(max_difference(&without, &scaled) < 1e-4 * root.max(1.0));
}

/// The tensors' names must match the configuration.
#[test]
fn xlstm_with_other_blocks_than_it_says_is_refused() {
    let source = fixture("tiny/xlstm");
    for (change, says) in [
        (
            |c: &mut Checkpoint| c.config["num_blocks"] = json!(3),
            "blocks",
        ),
        (
            |c: &mut Checkpoint| {
                c.rename(|name| name.replace("blocks.0.mlstm_layer", "blocks.0.attn_layer"));
            },
            "block 0 is of kind attention",
        ),
        (
            |c: &mut Checkpoint| c.rename(|name| name.replace("blocks.0.", "blocks.7.")),
            "block 0 has no tensors",
        ),
        (
            |c: &mut Checkpoint| c.config["use_bias"] = json!(true),
            "q.bias",
        ),
        (
            |c: &mut Checkpoint| c.config["inference_state_dtype"] = json!("bfloat16"),
            "only float32 is supported for the state",
        ),
        (
            |c: &mut Checkpoint| c.config["inference_state_dtype"] = json!(16),
            "inference_state_dtype is 16",
        ),
        (
            |c: &mut Checkpoint| c.config["autocast_kernel_dtype"] = json!("int8"),
            "autocast_kernel_dtype is \"int8\"",
        ),
        (
            |c: &mut Checkpoint| c.config["dtype"] = json!("float64"),
            "dtype is \"float64\"",
        ),
        (
            |c: &mut Checkpoint| c.config["weight_mode"] = json!("fused"),
            "weight_mode is fused, and no tensor is",
        ),
        (
            |c: &mut Checkpoint| {
                c.rename(|name| name.replace("igate_preact.weight", "ifgate_preact.weight"));
            },
            "ifgate_preact.weight is fused",
        ),
        (
            |c: &mut Checkpoint| c.config["weight_mode"] = json!("both"),
            "weight_mode is \"both\"; it must be single or fused",
        ),
    ] as [(fn(&mut Checkpoint), &str); 11]
    {
        let mut checkpoint = Checkpoint::read(&source);
        checkpoint
            .config
            .as_object_mut()
            .unwrap()
            .remove("num_hidden_layers");
        checkpoint.config["num_blocks"] = json!(2);
        change(&mut checkpoint);
        let dir = tempfile::tempdir().unwrap();
        checkpoint.write(dir.path(), &source);
        let options = inference::LoadOptions::new().with_backend("cpu");
        let error = inference::load_model(dir.path(), &options).err().unwrap();
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn gpt2_as_mlx_stores_it_and_with_another_prefix() {
    same_after("gpt2", |c| {
        c.rename(|name| name.strip_prefix("transformer.").unwrap_or(name).to_owned());
    });
    same_after("gpt2", |c| {
        for tensor in c
            .tensors
            .iter_mut()
            .filter(|(name, t)| name.contains(".h.") && t.shape.len() == 2)
            .map(|(_, t)| t)
        {
            *tensor = tensor.transposed();
        }
        c.rename(|name| name.replacen("transformer.", "model.", 1));
    });
}

#[test]
fn the_text_part_of_gemma3_by_both_names() {
    // Multimodal checkpoints have used both of these prefixes. The loader skips the image parts.
    same_after("gemma3", |c| {
        assert!(c.tensors.keys().any(|n| n.contains("vision_tower")));
        c.rename(|name| {
            let moved = name
                .strip_prefix("language_model.model.")
                .or(name.strip_prefix("model.language_model."));
            match moved {
                Some(rest) if name.starts_with("model.") => format!("language_model.model.{rest}"),
                Some(rest) => format!("model.language_model.{rest}"),
                None => name.to_owned(),
            }
        });
    });
}

#[test]
fn gpt_oss_with_gate_and_up_apart() {
    let even = |n: usize| (0..n).step_by(2).collect::<Vec<_>>();
    let odd = |n: usize| (1..n).step_by(2).collect::<Vec<_>>();
    same_after("gpt-oss", |c| {
        for layer in 0..c.layers() {
            let at = format!("model.layers.{layer}.mlp.experts");
            let both = c.take(&format!("{at}.gate_up_proj")).transposed();
            let bias = c.take(&format!("{at}.gate_up_proj_bias")).as_column();
            let down = c.take(&format!("{at}.down_proj")).transposed();
            let down_bias = c.take(&format!("{at}.down_proj_bias"));
            for (part, pick) in [
                ("gate_proj", &even as &dyn Fn(usize) -> Vec<usize>),
                ("up_proj", &odd),
            ] {
                c.put(format!("{at}.{part}.weight"), both.rows(pick));
                let bias = bias.rows(pick).without_last_axis();
                c.put(format!("{at}.{part}.bias"), bias);
            }
            c.put(format!("{at}.down_proj.weight"), down);
            c.put(format!("{at}.down_proj.bias"), down_bias);
        }
    });
    // The packed MXFP4 layout has the same values; MLX's notation names the quantization.
    same_after("gpt-oss-mxfp4", |c| {
        for layer in 0..c.layers() {
            let at = format!("model.layers.{layer}.mlp.experts");
            let words = |mut t: Tensor| {
                let bytes = t.shape.pop().unwrap() * t.shape.pop().unwrap();
                t.shape.push(bytes / 4);
                t.dtype = Dtype::U32;
                t
            };
            for (stored, parts) in [
                (
                    "gate_up_proj",
                    vec![
                        ("gate_proj", &even as &dyn Fn(usize) -> Vec<usize>),
                        ("up_proj", &odd),
                    ],
                ),
                ("down_proj", vec![("down_proj", &|n| (0..n).collect())]),
            ] {
                let blocks = words(c.take(&format!("{at}.{stored}_blocks")));
                let scales = c.take(&format!("{at}.{stored}_scales"));
                let bias = c.take(&format!("{at}.{stored}_bias")).as_column();
                for (part, pick) in parts {
                    c.put(format!("{at}.{part}.weight"), blocks.rows(pick));
                    c.put(format!("{at}.{part}.scales"), scales.rows(pick));
                    c.put(
                        format!("{at}.{part}.bias"),
                        bias.rows(pick).without_last_axis(),
                    );
                }
            }
        }
        c.config
            .as_object_mut()
            .unwrap()
            .remove("quantization_config");
        c.config["quantization"] = json!({"group_size": 32, "bits": 4, "mode": "mxfp4"});
    });
}

#[test]
fn gemma4_with_sizes_listed_by_layer() {
    same_after("gemma4-large", |c| {
        let config = c.config.as_object_mut().unwrap();
        let head_dim = config.remove("global_head_dim").unwrap();
        let heads = config.remove("num_global_key_value_heads").unwrap();
        let full = json!({"head_dim": head_dim, "num_key_value_heads": heads});
        config.insert("per_layer_config".into(), json!({"2": full}));
    });
}

#[test]
fn olmo3_with_a_rotation_for_each_kind_of_layer() {
    // transformers 5 writes the rotary parameters in this form.
    same_after("olmo3", |c| {
        let config = c.config.as_object_mut().unwrap();
        let theta = config.remove("rope_theta").unwrap();
        let mut full = config.remove("rope_scaling").unwrap();
        full["rope_theta"] = theta.clone();
        let sliding = json!({"rope_type": "default", "rope_theta": theta});
        let both = json!({"full_attention": full, "sliding_attention": sliding});
        config.insert("rope_parameters".into(), both);
    });
    // Other tools write the rotary parameters in this form, and omit fields with default values.
    same_after("olmo3", |c| {
        let config = c.config.as_object_mut().unwrap();
        config.remove("rope_theta").unwrap();
        let mut rope = config.remove("rope_scaling").unwrap();
        rope["rope_theta"] = json!(5e5);
        config.insert("rope_parameters".into(), rope);
    });
    same_after("olmo3", |c| {
        c.config.as_object_mut().unwrap().remove("rope_theta");
    });
}

#[test]
fn exaone4_with_layers_by_letters_and_by_number() {
    for pattern in [json!("LLG"), json!("LLGLL"), json!(3)] {
        same_after("exaone4", |c| {
            let config = c.config.as_object_mut().unwrap();
            config.remove("layer_types").unwrap();
            config.insert("sliding_window_pattern".into(), pattern);
        });
    }
    same_after("exaone4-full", |c| {
        let config = c.config.as_object_mut().unwrap();
        config.remove("layer_types").unwrap();
        config.insert("sliding_window_pattern".into(), Value::Null);
    });
}

#[test]
fn without_a_model_type_the_weights_tell() {
    for name in ["qwen3", "qwen2", "llama"] {
        same_after(name, |c| {
            c.config.as_object_mut().unwrap().remove("model_type");
        });
    }
}

#[test]
fn without_head_dim_the_query_projection_tells() {
    // The fixture's `head_dim` is 16, but hidden_size / num_attention_heads is 8. Without the
    // field, only the query projection's shape tells.
    same_after("qwen3", |c| {
        assert_eq!(c.config["head_dim"], 16);
        c.config.as_object_mut().unwrap().remove("head_dim");
    });
}
