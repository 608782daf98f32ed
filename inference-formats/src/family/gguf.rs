//! Properties of the GGUF files of one family: names, the order of rows, and properties that the
//! metadata do not contain.

use serde_json::{Map, Value};

use super::fields::Names;
use crate::error::Result;
use crate::gguf::keys::Keys;
use crate::gguf::{Gguf, GgufArray, GgufValue};
use crate::limits;

/// The GGUF files of one family.
#[non_exhaustive]
#[derive(Debug, Clone, Copy)]
pub struct GgufFamily {
    /// `general.architecture`. Two families may have the same name.
    pub architecture: &'static str,
    /// Alternative names of `general.architecture` for these files.
    pub(crate) also: &'static [&'static str],
    /// The keys of the number of heads and of the feed-forward width. Files without attention
    /// contain 0 as the number of heads. Their families name other keys here, and `read` replaces
    /// the values.
    pub(crate) sizes: (&'static str, &'static str),
    /// Whether the layout differs from a directory's layout in more than names. Such files can be
    /// run but not converted.
    pub runs_only: bool,
    /// Whether files of this architecture are first read as another family. That family's `read`
    /// or the `claims` of this family then detects this family.
    pub is_variant: bool,
    /// Another architecture whose files may belong to this family, and the test that detects them.
    pub(crate) claims: Option<Claim>,
    /// The activation of the feed-forward block, as transformers names it.
    pub activation: &'static str,
    /// The field of `config.json` that contains the activation.
    pub activation_field: &'static str,
    /// Whether converters reorder the rows of query and key heads, so that the rotation pairs
    /// adjacent elements.
    pub permuted: bool,
    /// Whether norms subtract the mean. Such norms have their epsilon under a different key.
    pub layer_norm: bool,
    /// Whether converters store the weights of norms with 1 added.
    pub norm_plus_one: bool,
    /// Whether a directory converted from such a file keeps the added 1.
    pub keeps_plus_one: bool,
    /// How tensors differ from those of a directory, apart from their names in blocks. Each entry
    /// has a part of the usual name and the change.
    pub changes: &'static [(&'static str, GgufChange)],
    /// Whether `config.json` has a field for biases. In other families, the architecture determines
    /// whether there are biases.
    pub optional_biases: bool,
    /// Whether layers may differ in width and number of heads. `read` then returns these numbers,
    /// and the common fields are those of the first layer.
    pub layers_differ: bool,
    /// Whether layers may also differ in the number of query heads. `read` then returns these
    /// numbers.
    pub(crate) heads_differ: bool,
    /// Whether value heads may be narrower than key heads. `read` then returns their width.
    pub(crate) narrow_values: bool,
    /// Whether the factors of wavelengths (`rope_freqs`) apply only to layers without a window.
    /// There may then be more factors than such layers need.
    pub full_layers_scale: bool,
    /// Whether the keys and values of all heads are one short vector per position. The number of
    /// key heads and the width of a head in the metadata then describe that vector.
    pub(crate) is_latent: bool,
    /// Reads the fields that only this family has from the metadata.
    pub(crate) read: fn(&GgufHeader<'_>) -> Result<Value>,
    /// Changes the fields of a `config.json` to the form that transformers and mlx-lm expect.
    pub write: fn(&mut Map<String, Value>),
    /// The metadata of an exported file in addition to the sizes; `None` if the family cannot be
    /// exported.
    pub export: Option<GgufExport>,
    /// Names inside blocks that replace names of `block`.
    pub(crate) overrides: Names,
    /// Names inside `blk.N` in GGUF files, each with its name in transformers.
    pub(crate) block: Names,
    /// Names inside blocks that have a suffix in GGUF files but none in transformers.
    pub(crate) unsuffixed: Names,
    /// Names outside of blocks.
    pub(crate) global: Names,
    /// The prefix of blocks in transformers, before their number.
    pub(crate) prefix: &'static str,
    /// The name of a mixture in transformers.
    pub(crate) mixture: &'static str,
}

/// How a tensor of a file differs from those of a directory, apart from its name.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufChange {
    /// The file has negated exponentials of the directory's values. The text replaces the part of
    /// the name.
    NegatedExponentials(&'static str),
    /// Each entry of the first axis is a tensor of the directory. The texts replace the part of the
    /// name.
    Entries(&'static [&'static str]),
    /// The weight of a convolution. Directories have three axes: channels, one, and positions.
    Convolution,
    /// A vector that directories store in rows. The field of `config.json` is their length.
    Rows(&'static str),
    /// The text replaces the part of the name, and the family's own names do not apply.
    Named(&'static str),
    /// Directories do not have the tensor.
    Absent,
}

/// An architecture, and a test whether a file of this architecture belongs to the family. At most
/// one family claims a file.
pub(crate) type Claim = (&'static str, fn(&GgufHeader<'_>) -> Result<bool>);

/// Metadata of an exported file that only this family has. Keys have no prefix of the architecture;
/// each has the field of `config.json` that contains its value.
#[non_exhaustive]
#[derive(Debug, Clone, Copy)]
pub struct GgufExport {
    /// Floats. If the field is missing, the value is 1.
    pub factors: Names,
    /// Floats that are written if the field is present.
    pub floats: Names,
    /// Whole numbers that are written if the field is present.
    pub numbers: Names,
    /// Booleans that are written if the field is present.
    pub flags: Names,
    /// Fields that a GGUF file cannot express, with the only value that readers assume.
    pub assumed: &'static [(&'static str, u32)],
    /// Fields that a GGUF file cannot express. They must be missing, false, zero or empty.
    pub absent: &'static [&'static str],
    /// The `model_type`s of multimodal checkpoints whose text part can be exported.
    pub multimodal: &'static [&'static str],
    /// Other names that a `config.json` may have for the activation. The network is the same.
    pub activations: &'static [&'static str],
}

impl GgufExport {
    /// No metadata in addition to the sizes.
    pub(super) const PLAIN: Self = Self {
        factors: &[],
        floats: &[],
        numbers: &[],
        flags: &[],
        assumed: &[],
        absent: &[],
        multimodal: &[],
        activations: &[],
    };

    /// Only the number of experts, and how many of them each token uses.
    pub(super) const EXPERTS: Self = Self {
        numbers: &[
            ("expert_count", "num_experts"),
            ("expert_used_count", "num_experts_per_tok"),
        ],
        absent: &["clip_qkv"],
        ..Self::PLAIN
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
    ("ffn_gate_up_exps", "mlp.switch_mlp.gate_up_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_norm", "post_attention_layernorm"),
];

/// In families with norms after attention and feed-forward, these GGUF names mean other norms.
pub(super) const SANDWICH: Names = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// The tanh approximation of GELU.
pub(super) const TANH_GELU: &str = "gelu_pytorch_tanh";

/// The properties of a family without an entry.
pub(crate) static PLAIN: GgufFamily = GgufFamily::new("");

impl GgufFamily {
    /// A family like llama, but with rows in the usual order.
    pub(super) const fn new(architecture: &'static str) -> Self {
        Self {
            architecture,
            also: &[],
            sizes: ("attention.head_count", "feed_forward_length"),
            runs_only: false,
            is_variant: false,
            claims: None,
            activation: "silu",
            activation_field: "hidden_act",
            permuted: false,
            layer_norm: false,
            norm_plus_one: false,
            keeps_plus_one: false,
            changes: &[],
            optional_biases: false,
            layers_differ: false,
            heads_differ: false,
            narrow_values: false,
            full_layers_scale: false,
            is_latent: false,
            read: |_| Ok(Value::Null),
            write: |_| {},
            export: None,
            overrides: &[],
            block: BLOCK,
            unsuffixed: &[],
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
    /// All blocks in the file, including those that predict further tokens.
    pub blocks: usize,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl GgufHeader<'_> {
    /// Whether a layer has a tensor, such as `ssm_norm.weight`.
    pub fn has(&self, part: &str) -> bool {
        let named = |layer: usize| format!("blk.{layer}.{part}");
        (0..self.layers).any(|layer| self.file.tensors().contains_key(&named(layer)))
    }

    /// Whether queries have biases, in a tensor of their own or in one with keys and values.
    pub fn has_query_biases(&self) -> bool {
        self.has("attn_q.bias") || self.has("attn_qkv.bias")
    }

    /// The sliding window; `None` if the value is zero.
    pub fn window(&self) -> Result<Option<usize>> {
        let window = self
            .keys
            .uint("attention.sliding_window", 0, limits::POSITIONS)?;
        Ok(window.filter(|n| *n > 0))
    }

    /// Number of experts in a mixture; `None` without a mixture.
    pub fn experts(&self) -> Result<Option<usize>> {
        let experts = self.keys.uint("expert_count", 0, limits::EXPERTS)?;
        Ok(experts.filter(|n| *n > 0))
    }

    /// Reads one number per layer. The file may contain a single number for all layers.
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
            all if [self.layers, self.blocks].contains(&all.len()) => {
                let used = all.iter().take(self.layers);
                used.map(number).collect::<Result<_>>().map(Some)
            }
            all => {
                let message = format!("has {} values for {} layers", all.len(), self.layers);
                Err(self.keys.wrong(name, message))
            }
        }
    }

    /// The kinds of layers. The file contains one bool per layer (true means sliding), or a number
    /// n, which makes every n-th layer a full layer.
    pub fn layer_types(&self) -> Result<Vec<&'static str>> {
        const NAME: &str = "attention.sliding_window_pattern";
        let (keys, layers) = (&self.keys, self.layers);
        let slides: Vec<bool> = match keys.metadata.get(&keys.key(NAME)) {
            Some(GgufValue::Array(GgufArray::Bool(listed))) if listed.len() < layers => {
                let message = format!("has {} values; block_count is {layers}", listed.len());
                return Err(keys.wrong(NAME, message));
            }
            Some(GgufValue::Array(GgufArray::Bool(listed))) => listed[..layers].to_vec(),
            // Some files have numbers instead of booleans.
            Some(GgufValue::Array(_)) => {
                let listed = self.by_layer(NAME, (0, 1))?.unwrap_or_default();
                listed.into_iter().map(|n| n == 1).collect()
            }
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

    /// As [`Self::layer_types`], for files in which a missing pattern means that the first of each
    /// four layers is a full layer. Without a window, all layers are full.
    pub fn layer_types_full_first(&self) -> Result<Vec<&'static str>> {
        if self.window()?.is_none() {
            return Ok(vec!["full_attention"; self.layers]);
        }
        let pattern = self.keys.key("attention.sliding_window_pattern");
        if self.keys.metadata.get(&pattern).is_some() {
            return self.layer_types();
        }
        let kind = |layer: usize| match layer % 4 {
            0 => "full_attention",
            _ => "sliding_attention",
        };
        Ok((0..self.layers).map(kind).collect())
    }

    /// Returns the number that all layers of a kind share; `None` if no layer is of this kind.
    /// `numbers` has a number for each layer, from the metadata under `key`.
    ///
    /// # Errors
    /// If layers of this kind have different numbers.
    pub fn of_kind(
        &self,
        key: &str,
        numbers: &[usize],
        kinds: &[&str],
        kind: &str,
    ) -> Result<Option<usize>> {
        let mut layers = (0..).zip(numbers.iter().zip(kinds));
        let mut of_kind = layers.by_ref().filter(|(_, (_, k))| **k == kind);
        let first = of_kind.next().map(|(_, (n, _))| *n);
        match of_kind.find(|(_, (n, _))| Some(**n) != first) {
            Some((layer, _)) => {
                let message =
                    format!("of layer {layer} differs from that of other layers of its kind");
                Err(self.keys.unsupported(key, message))
            }
            None => Ok(first),
        }
    }

    /// Which layers have experts, as `mlp_layer_types`. The tensors show it.
    pub fn mixtures(&self) -> Vec<&'static str> {
        let router = |layer| format!("blk.{layer}.ffn_gate_inp.weight");
        let kind = |layer| match self.file.tensors().contains_key(&router(layer)) {
            true => "sparse",
            false => "dense",
        };
        (0..self.layers).map(kind).collect()
    }

    /// The width that determines the scale of attention scores. It is `head_dim`, but in the
    /// largest model of a family it is `hidden_size` divided by the number of heads. The metadata
    /// do not contain it.
    pub fn score_dim(&self, layers_of_largest: usize) -> usize {
        if self.layers == layers_of_largest {
            self.hidden / self.heads
        } else {
            self.head_dim
        }
    }
}

/// The hidden size divided by the number of heads. It is written for readers that have another
/// default.
pub(super) fn quotient(config: &Map<String, Value>) -> u64 {
    let number = |name: &str| config.get(name).and_then(Value::as_u64).unwrap_or(0);
    number("hidden_size") / number("num_attention_heads").max(1)
}

/// Renames fields to the names that the family's own files have.
pub(super) fn publish(config: &mut Map<String, Value>, names: Names) {
    for (usual, published) in names {
        if let Some(value) = config.remove(*usual) {
            config.insert((*published).to_owned(), value);
        }
    }
}

/// Adds each of these fields that is missing.
pub(super) fn add(config: &mut Map<String, Value>, fields: Value) {
    let Value::Object(fields) = fields else {
        return;
    };
    for (name, value) in fields {
        config.entry(name).or_insert(value);
    }
}

/// The fields of two objects. A field of both has the value of the second.
pub(super) fn joined(mut fields: Value, others: Value) -> Value {
    if let (Value::Object(fields), Value::Object(others)) = (&mut fields, others) {
        fields.extend(others);
    }
    fields
}
