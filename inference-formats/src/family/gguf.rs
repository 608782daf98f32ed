//! Common facts of the GGUF files of one family: names, the order of rows, and facts that the
//! metadata does not give.

use serde_json::{Map, Value};

use super::Names;
use crate::error::Result;
use crate::gguf::keys::Keys;
use crate::gguf::{Gguf, GgufArray, GgufValue};
use crate::limits;

/// The GGUF files of one family.
#[non_exhaustive]
#[derive(Debug, Clone, Copy)]
pub struct GgufFamily {
    /// `general.architecture`. Two families may share one.
    pub architecture: &'static str,
    /// Other names of `general.architecture` for the same files.
    pub(crate) also: &'static [&'static str],
    /// Whether no layer has attention: heads are those of the recurrence, and there is no
    /// feed-forward part.
    pub(crate) is_recurrent: bool,
    /// Whether the layout differs from that of a directory by more than names, so that files run
    /// and are not converted.
    pub runs_only: bool,
    /// Whether files of this architecture are read as another family at first, whose `read` finds
    /// out that they are of this one.
    pub is_variant: bool,
    /// The activation of the feed-forward block, as transformers names it.
    pub activation: &'static str,
    /// The field of a `config.json` that holds the activation.
    pub activation_field: &'static str,
    /// Whether converters reorder the rows of query and key heads, for a rotation of neighboring
    /// elements.
    pub permuted: bool,
    /// Whether norms subtract the mean. Their epsilon has a key of its own.
    pub layer_norm: bool,
    /// Whether converters store the weights of norms with 1 added.
    pub norm_plus_one: bool,
    /// Whether a `config.json` says if there are biases. In other families they are a part of the
    /// architecture, or there are none.
    pub optional_biases: bool,
    /// Whether widths and numbers of heads may differ between layers. `read` says how; the fields
    /// that all families have are those of the first layer.
    pub layers_differ: bool,
    /// The fields that only this family has, from the metadata.
    pub(crate) read: fn(&GgufHeader<'_>) -> Result<Value>,
    /// Changes the fields of a `config.json` to those that its readers expect.
    pub write: fn(&mut Map<String, Value>),
    /// What a file that is written says beyond the sizes; `None` for a family that is only read.
    pub export: Option<GgufExport>,
    /// Names that differ from `block`, in blocks.
    pub(crate) own: Names,
    /// Names in `blk.N`: GGUF's, and those of transformers.
    pub(crate) block: Names,
    /// Names in blocks with GGUF's suffix, and those of transformers, which have none.
    pub(crate) whole: Names,
    /// Names outside of blocks.
    pub(crate) global: Names,
    /// The prefix of blocks in transformers, before their number.
    pub(crate) prefix: &'static str,
    /// The name of a mixture in transformers.
    pub(crate) mixture: &'static str,
}

/// The facts of a written file that only its family has.
#[non_exhaustive]
#[derive(Debug, Clone, Copy)]
pub struct GgufExport {
    /// Keys below the architecture's, and the fields of `config.json` with their values, 1 where
    /// they are missing.
    pub factors: Names,
    /// Fields that files cannot say, and the only values that readers assume.
    pub assumed: &'static [(&'static str, u32)],
}

impl GgufExport {
    /// Nothing beyond the sizes.
    pub(super) const PLAIN: Self = Self {
        factors: &[],
        assumed: &[],
    };
}

/// Names outside of blocks.
const GLOBAL: Names = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

/// Names in blocks that most families share.
const BLOCK: Names = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.switch_mlp.gate_proj"),
    ("ffn_up_exps", "mlp.switch_mlp.up_proj"),
    ("ffn_down_exps", "mlp.switch_mlp.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_norm", "post_attention_layernorm"),
];

/// With norms behind attention and feed-forward, names of GGUF mean other norms.
pub(super) const SANDWICH: Names = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// The tanh approximation of GELU.
pub(super) const TANH_GELU: &str = "gelu_pytorch_tanh";

/// Names of a family that has no entry.
pub(crate) static PLAIN: GgufFamily = GgufFamily::new("");

impl GgufFamily {
    /// A family like llama, but with rows in the usual order.
    pub(super) const fn new(architecture: &'static str) -> Self {
        Self {
            architecture,
            also: &[],
            is_recurrent: false,
            runs_only: false,
            is_variant: false,
            activation: "silu",
            activation_field: "hidden_act",
            permuted: false,
            layer_norm: false,
            norm_plus_one: false,
            optional_biases: false,
            layers_differ: false,
            read: |_| Ok(Value::Null),
            write: |_| {},
            export: None,
            own: &[],
            block: BLOCK,
            whole: &[],
            global: GLOBAL,
            prefix: "model.layers.",
            mixture: "mlp",
        }
    }
}

/// The metadata of a file, with the sizes that all families have.
pub(crate) struct GgufHeader<'a> {
    pub file: &'a Gguf,
    pub keys: Keys<'a>,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl GgufHeader<'_> {
    /// The window; zero means none.
    pub fn window(&self) -> Result<Option<usize>> {
        let found = self
            .keys
            .uint("attention.sliding_window", 0, limits::POSITIONS)?;
        Ok(found.filter(|n| *n > 0))
    }

    /// Experts in a mixture, where there is one.
    pub fn experts(&self) -> Result<Option<usize>> {
        let found = self.keys.uint("expert_count", 0, limits::EXPERTS)?;
        Ok(found.filter(|n| *n > 0))
    }

    /// A number of each layer, of which a file may have one for all.
    pub fn by_layer(
        &self,
        name: &str,
        (least, most): (usize, usize),
    ) -> Result<Option<Vec<usize>>> {
        let Some(values) = self.keys.metadata.i32s(&self.keys.key(name))? else {
            return Ok(None);
        };
        let number = |&n: &i32| match usize::try_from(n) {
            Ok(n) if (least..=most).contains(&n) => Ok(n),
            _ => {
                let message = format!("is {n} in a layer; it must be from {least} to {most}");
                Err(self.keys.wrong(name, message))
            }
        };
        match values.as_slice() {
            [one] => Ok(Some(vec![number(one)?; self.layers])),
            all if all.len() == self.layers => {
                all.iter().map(number).collect::<Result<_>>().map(Some)
            }
            all => {
                let message = format!("has {} values for {} layers", all.len(), self.layers);
                Err(self.keys.wrong(name, message))
            }
        }
    }

    /// The kinds of layers: a bool for each, true for sliding ones, or a number n that makes each
    /// n-th layer full.
    pub fn layer_types(&self) -> Result<Vec<&'static str>> {
        const NAME: &str = "attention.sliding_window_pattern";
        let (keys, layers) = (&self.keys, self.layers);
        let slides: Vec<bool> = match keys.metadata.get(&keys.key(NAME)) {
            Some(GgufValue::Array(GgufArray::Bool(listed))) if listed.len() < layers => {
                let message = format!("has {} values; block_count is {layers}", listed.len());
                return Err(keys.wrong(NAME, message));
            }
            Some(GgufValue::Array(GgufArray::Bool(listed))) => listed[..layers].to_vec(),
            _ => {
                let every = keys.uint(NAME, 0, limits::LAYERS)?.unwrap_or(4);
                (1..=layers).map(|n| !n.is_multiple_of(every)).collect()
            }
        };
        let name = |slides| match slides {
            true => "sliding_attention",
            false => "full_attention",
        };
        Ok(slides.into_iter().map(name).collect())
    }

    /// The width by which scores are scaled: `head_dim`, but the residual width of a head in the
    /// largest model of a family, which the metadata does not say.
    pub fn score_dim(&self, layers_of_largest: usize) -> usize {
        if self.layers == layers_of_largest {
            self.hidden / self.heads
        } else {
            self.head_dim
        }
    }
}

/// The quotient of hidden size and heads, for readers that have another default.
pub(super) fn quotient(config: &Map<String, Value>) -> u64 {
    let number = |name: &str| config.get(name).and_then(Value::as_u64).unwrap_or(0);
    number("hidden_size") / number("num_attention_heads").max(1)
}

/// Adds each field that is missing.
pub(super) fn add(config: &mut Map<String, Value>, fields: Value) {
    let Value::Object(fields) = fields else {
        return;
    };
    for (name, value) in fields {
        config.entry(name).or_insert(value);
    }
}
