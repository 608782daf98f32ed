//! xLSTM (Beck et al. 2025, arXiv:2503.13427; reference: `modeling_xlstm` of Hugging Face
//! transformers). A block has an mLSTM layer and a gated feed-forward part, each with a norm on its
//! input. A sequence has a state of fixed size instead of keys and values.
//!
//! The names of the tensors determine the kinds of the blocks (`wiring.rs`). The configuration must
//! agree with them. Matrices are stored separately (`weight_mode` `single`) or combined (`fused`).
//! The names of the tensors also determine this mode, and the field `weight_mode` must agree with
//! it if it exists.
//!
//! The configuration has three types. Only `torch_dtype` determines the compute type. The state and
//! all its inputs are float32, so `inference_state_dtype` must be float32. `autocast_kernel_dtype`
//! is the type in which other implementations multiply. This engine multiplies in the compute type,
//! which is at least as precise.

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::{Array, Dtype};

use super::Decoder;
use super::build::{Builder, MAX_CONV, int, invalid};
use super::stack::{Block, Head, Stack};
use super::wiring::{BlockInfo, BlockKind, Wiring};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::loader::Weights;
use crate::nn::adapter::{SlotKind, SlotView};
use crate::nn::head_matrices::HeadMatrices;
use crate::nn::slstm::HeadwiseLinear;
use crate::nn::{
    Activation, CausalConv, FeedForward, GatedMlp, HeadNorm, Linear, Mixer, Mlstm, MlstmShape,
    Norm, Slstm, Weight,
};

/// The prefix of the blocks in a checkpoint.
pub const BLOCKS: &str = "backbone.blocks.";

/// The names of combined matrices: of queries, keys, values and output gates; of both gates; of
/// gate and up.
const QKVO: &str = "qkv_opreact";
const GATES: &str = "ifgate_preact";
const GATE_AND_UP: &str = "proj_up_gate_z";

/// The maximum number of positions per chunk. A greater `chunk_size` is reduced to it.
const MAX_CHUNK: usize = 256;

/// Returns the sizes of an mLSTM layer.
///
/// # Errors
/// [`ErrorKind::InvalidModel`] for widths that are not divisible by the heads, or values out of
/// range.
pub fn shape(config: &ModelConfig) -> Result<MlstmShape> {
    let heads = config.num_attention_heads;
    let width = |field: &str, default: f32| -> Result<i32> {
        let factor = config.number(field)?.unwrap_or(default);
        let width = (config.hidden_size as f64 * f64::from(factor)) as usize;
        if factor <= 0.0 || width == 0 || width > limits::INTERMEDIATE {
            return Err(invalid(format!(
                "{field} is {factor}, which makes a width of {width}"
            )));
        }
        if !width.is_multiple_of(heads) {
            return Err(invalid(format!(
                "{field} {factor} makes a width of {width}, which is not a multiple of {heads} heads"
            )));
        }
        int(field, width / heads)
    };
    let cap = config.number("gate_soft_cap")?;
    let eps = config.number("eps")?.unwrap_or(1e-6);
    if cap.is_some_and(|cap| cap <= 0.0) || eps < 0.0 {
        return Err(invalid("gate_soft_cap must be above 0, and eps not below"));
    }
    let chunk = config.uint("chunk_size", 1..=limits::POSITIONS)?;
    Ok(MlstmShape {
        heads: int("num_heads", heads)?,
        qk_dim: width("qk_dim_factor", 0.5)?,
        v_dim: width("v_dim_factor", 1.0)?,
        gate_cap: cap,
        eps,
        // The cost of a chunk is quadratic in its length, so long chunks are slow. The result does
        // not depend on the length.
        chunk: int("chunk_size", chunk.unwrap_or(64).min(MAX_CHUNK))?,
    })
}

/// Returns the number of bytes of one sequence's state in all blocks.
///
/// # Errors
/// The errors of [`shape`].
pub fn state_bytes(config: &ModelConfig, blocks: &[BlockInfo]) -> Result<u64> {
    let mlstm = shape(config)?.layout().nbytes();
    let width = config
        .uint("conv1d_kernel_size", 0..=MAX_CONV)?
        .unwrap_or(4);
    let width = int("conv1d_kernel_size", width)?;
    let slstm = Slstm::state_layout(int("hidden_size", config.hidden_size)?, width).nbytes();
    let bytes = |block: &BlockInfo| match block.kind {
        BlockKind::Mlstm => mlstm as u64,
        BlockKind::Slstm => slstm as u64,
        _ => 0,
    };
    Ok(blocks.iter().map(bytes).fold(0, u64::saturating_add))
}

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let names = weights.names();
    let wiring = Wiring::from_names(BLOCKS, names.iter().map(String::as_str))?;
    if wiring.blocks.len() != config.num_hidden_layers {
        return Err(invalid(format!(
            "num_blocks is {}, but there are tensors of {} blocks",
            config.num_hidden_layers,
            wiring.blocks.len()
        )));
    }
    let runs = |b: &&BlockInfo| matches!(b.kind, BlockKind::Mlstm | BlockKind::Slstm);
    if let Some(other) = wiring.blocks.iter().find(|b| !runs(b)) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "block {} is of kind {}; supported are {} and {}",
                other.index,
                other.kind,
                BlockKind::Mlstm,
                BlockKind::Slstm
            ),
        ));
    }
    if let Some(other) = config.uint("embedding_dim", 1..=limits::HIDDEN)?
        && other != config.hidden_size
    {
        return Err(invalid(format!(
            "embedding_dim is {other} and hidden_size {}; they must be equal",
            config.hidden_size
        )));
    }
    check_types(config)?;
    check_weight_mode(config, &names)?;
    let shape = shape(config)?;
    let bias = config.flag("use_bias")?.unwrap_or(false);
    let mut b = Builder::new(config, weights)?;
    let blocks = b.blocks_at(BLOCKS, |b, i, prefix| {
        let (norm, mixer): (_, Box<dyn Mixer>) = match wiring.blocks.get(i).map(|info| info.kind) {
            Some(BlockKind::Slstm) => {
                let layer = slstm(b, &format!("{prefix}.slstm_layer"), shape.heads)?;
                ("norm_slstm", Box::new(layer))
            }
            _ => {
                let layer = mlstm(b, &format!("{prefix}.mlstm_layer"), shape, bias)?;
                ("norm_mlstm", Box::new(layer))
            }
        };
        Ok(Block {
            mixer_in: Some(block_norm(b, &format!("{prefix}.{norm}"), bias)?),
            mixer,
            mixer_out: None,
            mlp_in: Some(block_norm(b, &format!("{prefix}.norm_ffn"), bias)?),
            mlp: feed_forward(b, &format!("{prefix}.ffn"), bias)?,
            mlp_out: None,
            residual: None,
            parallel: false,
        })
    })?;
    let norm = out_norm(&mut b)?;
    Ok(Box::new(Stack {
        embedding: b.embedding("backbone.embeddings")?,
        embedding_scale: None,
        embedding_norm: None,
        positions: None,
        blocks,
        norm,
        head: head(&mut b)?,
    }))
}

/// The configuration's fields whose values are types.
const TYPES: [&str; 4] = ["torch_dtype", "dtype", AUTOCAST, STATE];
const AUTOCAST: &str = "autocast_kernel_dtype";
const STATE: &str = "inference_state_dtype";

/// Checks that each type in the configuration is known, and that the state's type is float32.
fn check_types(config: &ModelConfig) -> Result<()> {
    for field in TYPES {
        let value = match config.fields.get(field) {
            None | Some(serde_json::Value::Null) => continue,
            Some(value) => value,
        };
        match value.as_str() {
            Some("float32") => {}
            Some(other @ ("bfloat16" | "float16")) if field == STATE => {
                let message =
                    format!("{field} is {other}; only float32 is supported for the state");
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
            Some("bfloat16" | "float16") => {}
            _ => {
                return Err(invalid(format!(
                    "{field} is {value}; it must be float32, bfloat16 or float16"
                )));
            }
        }
    }
    Ok(())
}

/// Checks that the matrices are stored as `weight_mode` says, if the field exists.
fn check_weight_mode(config: &ModelConfig, names: &[String]) -> Result<()> {
    let value = match config.fields.get("weight_mode") {
        None | Some(serde_json::Value::Null) => return Ok(()),
        Some(value) => value,
    };
    let parts = [QKVO, GATES, GATE_AND_UP];
    let fused = names.iter().find(|name| {
        let mut parts = parts.iter();
        parts.any(|part| name.ends_with(&format!(".{part}.weight")))
    });
    match (value.as_str(), fused) {
        (Some("single"), None) | (Some("fused"), Some(_)) => Ok(()),
        (Some("single"), Some(name)) => {
            let message = format!("weight_mode is single, and the tensor {name} is fused");
            Err(invalid(message))
        }
        (Some("fused"), None) => {
            let parts = parts.join(", ");
            let message = format!("weight_mode is fused, and no tensor is: {parts}");
            Err(invalid(message))
        }
        _ => Err(invalid(format!(
            "weight_mode is {value}; it must be single or fused"
        ))),
    }
}

/// Loads a norm over the hidden dimension. A norm with `bias` adds a bias to its output.
fn block_norm(b: &mut Builder<'_>, prefix: &str, bias: bool) -> Result<Norm> {
    let norm = b.hidden_norm(prefix)?;
    if !bias {
        return Ok(norm);
    }
    let hidden = b.dims.hidden;
    let bias = b.weights.vector(&format!("{prefix}.bias"), hidden)?;
    Ok(Norm::Biased {
        norm: Box::new(norm),
        bias,
    })
}

/// Loads the norm after the blocks. It has a bias only if one is stored, because transformers
/// stores none even with `use_bias`. With `add_out_norm` false, the package `xlstm` has no such
/// norm, but transformers always stores and applies it. So the norm is omitted only if it is not
/// stored.
fn out_norm(b: &mut Builder<'_>) -> Result<Norm> {
    let wanted = b.config.flag("add_out_norm")?.unwrap_or(true);
    match wanted || b.weights.contains("backbone.out_norm.weight") {
        true => {
            let bias = b.weights.contains("backbone.out_norm.bias");
            block_norm(b, "backbone.out_norm", bias)
        }
        false => Ok(Norm::Identity),
    }
}

fn head(b: &mut Builder<'_>) -> Result<Head> {
    let mut head = b.head(Some(false))?;
    head.softcap = match b.config.number("output_logit_soft_cap")? {
        Some(cap) if cap > 0.0 => Some(b.scalar(cap)?),
        Some(cap) => return Err(invalid(format!("output_logit_soft_cap is {cap}"))),
        None => None,
    };
    Ok(head)
}

/// Loads layers that are stored separately below `prefix`, or combined in the matrix `fused`.
fn layers<const N: usize>(
    b: &mut Builder<'_>,
    prefix: &str,
    (fused, names): (&str, [&str; N]),
    widths: [i32; N],
    bias: bool,
) -> Result<[Linear; N]> {
    let (inputs, fused) = (b.dims.hidden, format!("{prefix}.{fused}"));
    let layers = if b.weights.contains(&format!("{fused}.weight")) {
        b.fused(&fused, inputs, &widths, bias)?
    } else {
        (names.iter().zip(widths))
            .map(|(name, width)| b.linear(&format!("{prefix}.{name}"), inputs, width, bias))
            .collect::<Result<_>>()?
    };
    <[Linear; N]>::try_from(layers).map_err(|_| invalid("a fused matrix has other parts"))
}

fn mlstm(b: &mut Builder<'_>, prefix: &str, shape: MlstmShape, bias: bool) -> Result<Mlstm> {
    let (qk, v) = (shape.heads * shape.qk_dim, shape.heads * shape.v_dim);
    let names = ["q", "k", "v", "ogate_preact"];
    let [q_proj, k_proj, v_proj, output_gate] =
        layers(b, prefix, (QKVO, names), [qk, qk, v, v], bias)?;
    let names = ["igate_preact", "fgate_preact"];
    let widths = [shape.heads; 2];
    let [input_gate, forget_gate] = layers(b, prefix, (GATES, names), widths, true)?;
    let name = format!("{prefix}.multihead_norm");
    let weight = b.weights.vector(&format!("{name}.weight"), v)?;
    let kind = SlotKind::Norm { plus: 0.0 };
    let slot = b.weights.slot(&name, kind, &Weight::Dense(weight.clone()));
    let norm_bias = match bias {
        true => Some(b.weights.vector(&format!("{name}.bias"), v)?),
        false => None,
    };
    Ok(Mlstm {
        q_proj,
        k_proj,
        v_proj,
        output_gate,
        input_gate,
        forget_gate,
        norm: HeadNorm {
            weight,
            bias: norm_bias,
            slot,
            eps: b.dims.eps,
            centered: true,
        },
        o_proj: b.linear(&format!("{prefix}.out_proj"), v, b.dims.hidden, bias)?,
        shape,
        layout: shape.layout(),
    })
}

/// Builds an sLSTM layer from the names and layouts of the package `xlstm`. In this package, the
/// matrix `fgate` computes the input gate, and `igate` computes the forget gate.
fn slstm(b: &mut Builder<'_>, prefix: &str, heads: i32) -> Result<Slstm> {
    let hidden = b.dims.hidden;
    if hidden % heads != 0 {
        return Err(invalid(format!(
            "hidden_size is {hidden}, which is not a multiple of {heads} heads"
        )));
    }
    let dim = hidden / heads;
    let on_cpu = b.weights.is_on_cpu();
    let mut gate = |name: &str| -> Result<HeadwiseLinear> {
        let name = format!("{prefix}.{name}");
        let weight = (b.weights).tensor(&format!("{name}.weight"), &[heads, dim, dim])?;
        let stored = Weight::Dense(weight.clone());
        let slot = b.weights.slot(&name, SlotKind::Matrix, &stored);
        // The state is float32, so the inputs must be float32, too.
        let matrices = (weight.astype(Dtype::Float32))
            .and_then(|w| w.swap_axes(-1, -2))
            .and_then(|w| HeadMatrices::new(w, on_cpu))
            .map_err(engine("weights"))?;
        Ok(HeadwiseLinear {
            matrices,
            slot: SlotView::new(slot, None),
        })
    };
    let gates = [
        gate("fgate")?,
        gate("igate")?,
        gate("zgate")?,
        gate("ogate")?,
    ];
    let conv = format!("{prefix}.conv1d.conv");
    let conv = match b.conv_width(&conv)? {
        Some(width) => Some(b.causal_conv(&conv, hidden, width)?),
        None => None,
    };
    let name = format!("{prefix}.group_norm");
    let kind = SlotKind::Norm { plus: 1.0 };
    let stored = b.weights.vector(&format!("{name}.weight"), hidden)?;
    let weight = Array::scalar(1.0f32)
        .and_then(|one| stored.add(&one.astype(stored.dtype())?))
        .and_then(|w| w.eval().map(|()| w))
        .map_err(engine("weights"))?;
    let slot = b.weights.slot(&name, kind, &Weight::Dense(weight.clone()));
    let width = conv.as_ref().map_or(1, CausalConv::width);
    Ok(Slstm {
        conv,
        gates,
        recurrent: recurrent(
            b,
            &format!("{prefix}.slstm_cell._recurrent_kernel_"),
            (heads, dim),
        )?,
        bias: gate_bias(b, &format!("{prefix}.slstm_cell._bias_"), (heads, dim))?,
        norm: HeadNorm {
            weight,
            bias: None,
            slot,
            eps: 1e-5,
            centered: true,
        },
        heads,
        dim,
        layout: Slstm::state_layout(hidden, width),
    })
}

/// Loads the recurrent matrices as `[heads, dim, 4 * dim]`. In the checkpoint, the axis of gates
/// may come before the axis of inputs (as in the package's plain cell) or after it.
fn recurrent(b: &mut Builder<'_>, name: &str, (heads, dim): (i32, i32)) -> Result<Array> {
    let turned = match b.weights.shape(name).map(<[usize]>::len) {
        Some(4) => {
            let stored = b.weights.tensor(name, &[heads, dim, 4, dim])?;
            stored.reshape(&[heads, dim, 4 * dim])
        }
        _ => {
            let stored = b.weights.tensor(name, &[heads, 4 * dim, dim])?;
            stored.swap_axes(1, 2)
        }
    };
    // Each position reads the matrices in this layout, so they are converted once.
    turned
        .and_then(|matrices| matrices.astype(Dtype::Float32)?.contiguous())
        .and_then(|matrices| matrices.eval().map(|()| matrices))
        .map_err(engine("weights"))
}

/// Loads the biases of the gates as `[4, heads, dim]`.
fn gate_bias(b: &mut Builder<'_>, name: &str, (heads, dim): (i32, i32)) -> Result<Array> {
    let turned = match b.weights.shape(name).map(<[usize]>::len) {
        Some(3) => {
            let stored = b.weights.tensor(name, &[heads, 4, dim])?;
            stored.swap_axes(0, 1)
        }
        _ => {
            let stored = b.weights.vector(name, 4 * heads * dim)?;
            stored.reshape(&[4, heads, dim])
        }
    };
    turned.map_err(engine("weights"))
}

fn feed_forward(b: &mut Builder<'_>, prefix: &str, bias: bool) -> Result<FeedForward> {
    let (hidden, width) = (b.dims.hidden, b.dims.intermediate);
    let names = ["proj_up_gate", "proj_up"];
    let [gate, up] = layers(b, prefix, (GATE_AND_UP, names), [width; 2], bias)?;
    Ok(FeedForward::Gated(GatedMlp {
        gate,
        up,
        down: b.linear(&format!("{prefix}.proj_down"), width, hidden, bias)?,
        activation: Activation::Silu,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(more: &str) -> ModelConfig {
        let json = format!(r#"{{"model_type": "xlstm", "vocab_size": 131{more}}}"#);
        ModelConfig::from_json(json.as_bytes()).unwrap()
    }

    #[test]
    fn sizes_come_from_the_configuration_and_transformers_defaults() {
        let seven_b = shape(&config("")).unwrap();
        assert_eq!(
            (seven_b.heads, seven_b.qk_dim, seven_b.v_dim),
            (8, 256, 512)
        );
        assert_eq!((seven_b.chunk, seven_b.gate_cap), (64, Some(15.0)));
        // The 7B model's state has 8 heads. Each head has 256 x 512, 256 and 1 elements of 4 bytes.
        assert_eq!(seven_b.layout().nbytes(), 8 * (256 * 512 + 256 + 1) * 4);
        let more = r#", "hidden_size": 128, "num_heads": 4, "gate_soft_cap": 7, "chunk_size": 16"#;
        let tiny = shape(&config(more)).unwrap();
        assert_eq!((tiny.qk_dim, tiny.v_dim, tiny.chunk), (16, 32, 16));
        assert_eq!(tiny.gate_cap, Some(7.0));
        let chunk = |size: u32| {
            shape(&config(&format!(r#", "chunk_size": {size}"#)))
                .unwrap()
                .chunk
        };
        assert_eq!([1, 256, 257, 16_384].map(chunk), [1, 256, 256, 256]);
        for wrong in [
            r#", "qk_dim_factor": 0"#,
            r#", "qk_dim_factor": -1"#,
            r#", "v_dim_factor": 1e30"#,
            r#", "qk_dim_factor": 0.3, "num_heads": 7, "hidden_size": 126"#,
            r#", "gate_soft_cap": -15"#,
            r#", "eps": -1"#,
            r#", "chunk_size": 0"#,
        ] {
            assert!(shape(&config(wrong)).is_err(), "{wrong}");
        }
    }
}
