//! The descriptor of a family: its type, and what follows from one descriptor.

use serde_json::{Map, Value};

use super::fields::Names;
use super::gguf::GgufFamily;

/// The models of one architecture: their configurations, tensor names and formats.
#[non_exhaustive]
#[derive(Debug)]
pub struct Family {
    /// The `model_type` of a `config.json`.
    pub model_type: &'static str,
    /// The `model_type`s of multimodal checkpoints whose text part is of this family.
    pub multimodal: &'static [&'static str],
    /// Other `model_type`s of text models that are read the same way.
    pub aliases: &'static [&'static str],
    /// Parts of tensor names that differ from the usual ones, each with the usual one. All that
    /// match are replaced, in this order.
    pub names: Names,
    /// The class in transformers.
    pub class: &'static str,
    /// Whether the model is an encoder: every position attends to all others, and no next token is
    /// predicted.
    pub encoder: bool,
    /// Values that a `config.json` may leave out.
    pub defaults: Defaults,
    /// Changes fields before their usual names are filled in.
    pub(crate) prepare: fn(&mut Map<String, Value>),
    /// Sets the remaining fields that a `config.json` leaves out, under their usual names.
    pub(crate) complete: fn(&mut Map<String, Value>),
    /// Fields of newer configurations, each with its name in older readers.
    pub older_fields: Names,
    /// Whether the output matrix is the embedding even when the files store one, or do not say that
    /// it is tied.
    pub always_tied: bool,
    /// Which layers keep a state of fixed size instead of keys and values.
    pub recurrence: Recurrence,
    /// Whether the keys and values of all heads are kept as one short vector per position.
    pub latent: bool,
    /// Whether sums over a whole sequence need float32 throughout. A GPU then computes in float32,
    /// even if the weights have another type.
    pub sums_in_float32: bool,
    /// How the model is divided among processes.
    pub tensor_parallel: TensorParallel,
    /// Whether a layer needs only the output of the previous layer, under the usual names. Such
    /// layers can be stages of a pipeline ([`crate::pipeline`]) unless they are recurrent.
    pub pipeline: bool,
    /// How mlx-lm's names differ from those of transformers.
    pub mlx_lm: Renaming,
    /// Name suffixes of matrices that the checkpoints of transformers store as `[in, out]`. Those
    /// with names of mlx-lm are `[out, in]`.
    pub transposed: &'static [&'static str],
    /// How the checkpoints of transformers store experts that share a tensor.
    pub joined_experts: JoinedExperts,
    /// Name suffixes of tensors that the engine computes and does not load, such as masks.
    pub buffers: &'static [&'static str],
    /// Name prefixes of tensors that the language model does not use, such as those of layers that
    /// predict several tokens at once.
    pub spare: &'static [&'static str],
    /// The published chat format, for models without a template.
    pub chat: Option<ChatFormat>,
    /// The format of tool calls in a reply, by its name in `inference-text`. It applies when the
    /// template does not show the format.
    pub reply: Option<&'static str>,
    /// Properties of the GGUF files; `None` when the family is not read from GGUF.
    pub gguf: Option<GgufFamily>,
}

/// Values that all families have and a `config.json` may leave out. They are those of the reference
/// implementation.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// The layers with a sliding window.
    pub windows: Windows,
}

/// Which layers have a sliding window if the file does not list them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// All layers, if the file has a window.
    All,
    /// With `use_sliding_window`, the layers from `max_window_layers` on; otherwise none.
    FromLayer,
    /// All layers except every n-th.
    AllBut {
        /// The n, which the field `sliding_window_pattern` overrides.
        every: usize,
        /// Whether the last layer is full as well, whatever its number.
        last_is_full: bool,
    },
    /// None.
    Never,
}

/// Which layers keep a state of fixed size instead of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recurrence {
    /// None.
    None,
    /// Every layer.
    Every,
    /// The layers that `layer_types` lists as recurrent.
    Listed,
    /// Every layer, in addition to its keys and values.
    Beside,
}

/// How a model is divided among processes that compute each layer together
/// ([`crate::split`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorParallel {
    /// The model cannot be divided.
    No,
    /// Attention is divided by heads, and feed-forward parts by their width. Tensors have the usual
    /// names. Each process has all of a recurrent layer.
    Heads,
    /// As `Heads`, and the norms of queries and keys, which cover all heads, are divided with them.
    HeadsAndNorms,
    /// As `Heads`. In matrices that compute queries, keys and values together, each key head and
    /// its value head follow their query heads.
    Grouped,
    /// As `Heads`, but experts that are stored together are `[in, out]`, and rows of gate and up
    /// alternate (gpt-oss).
    Alternating,
}

/// How the checkpoints of transformers store the matrices of experts that share a tensor, and where
/// mlx-lm stores them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinedExperts {
    /// One stack has the matrices of gate and up, another those of down. mlx-lm has three stacks.
    Stacks {
        /// The name suffix of the tensor with gate and up. Its shape is `[experts, 2 * width,
        /// hidden]` or `[experts, hidden, 2 * width]`.
        gate_up: &'static str,
        /// The name suffix of the tensor with down. Its shape is `[experts, hidden, width]` or
        /// `[experts, width, hidden]`.
        down: &'static str,
        /// The text that replaces these suffixes in mlx-lm's names, before `.gate_proj.weight`.
        prefix: &'static str,
        /// Whether rows of gate and up alternate. Otherwise the gate's rows are first.
        alternating: bool,
    },
    /// The rows of all experts' matrices are concatenated, `[experts * width, hidden]`. mlx-lm has
    /// a tensor for each expert, with the down matrix as `[hidden, width]`.
    Rows {
        /// The part of the name before `parts`.
        at: &'static str,
        /// The parts: gate, up and down.
        parts: [&'static str; 3],
        /// The text that replaces `at` in mlx-lm's names, before the index of the expert.
        prefix: &'static str,
    },
}

impl JoinedExperts {
    /// The names of most families.
    pub(crate) const BESIDE: Self = Self::stacks(".switch_mlp", false);

    /// The usual names in transformers, and mlx-lm's prefix.
    pub(crate) const fn stacks(prefix: &'static str, alternating: bool) -> Self {
        Self::Stacks {
            gate_up: ".experts.gate_up_proj",
            down: ".experts.down_proj",
            prefix,
            alternating,
        }
    }

    /// Granite's names.
    pub(crate) const GRANITE: Self = Self::Stacks {
        gate_up: ".block_sparse_moe.input_linear.weight",
        down: ".block_sparse_moe.output_linear.weight",
        prefix: ".block_sparse_moe.switch_mlp",
        alternating: false,
    };
}

/// A format of chats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatFormat {
    /// Always `<|im_start|>role … <|im_end|>`.
    ChatMl,
    /// `[INST] … [/INST]`, unless the vocabulary has the tokens of ChatML.
    Mistral,
    /// Always `<start_of_turn>role … <end_of_turn>`.
    Gemma,
}

/// Prefixes of tensor names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Renaming {
    /// Added in front of every new name.
    pub added: &'static str,
    /// The prefix that is removed from old names.
    pub dropped: &'static str,
}

impl Family {
    /// A family with rows in the usual order and names like llama's, and no other properties.
    pub(crate) const fn new(
        model_type: &'static str,
        class: &'static str,
        defaults: Defaults,
    ) -> Self {
        Self {
            model_type,
            multimodal: &[],
            aliases: &[],
            names: &[],
            class,
            encoder: false,
            defaults,
            prepare: |_| {},
            complete: |_| {},
            older_fields: &[],
            always_tied: false,
            recurrence: Recurrence::None,
            latent: false,
            sums_in_float32: false,
            tensor_parallel: TensorParallel::No,
            pipeline: true,
            mlx_lm: Renaming {
                added: "",
                dropped: "",
            },
            transposed: &[],
            joined_experts: JoinedExperts::BESIDE,
            buffers: &[],
            spare: &[],
            chat: None,
            reply: None,
            gguf: None,
        }
    }

    /// The `model_type`s of this family.
    pub fn model_types(&self) -> impl Iterator<Item = &'static str> {
        let others = self.multimodal.iter().chain(self.aliases).copied();
        others.chain([self.model_type])
    }

    /// Whether checkpoints of this `model_type` have other parts in addition to the text model.
    pub fn is_multimodal(&self, model_type: &str) -> bool {
        self.multimodal.contains(&model_type)
    }

    /// How mlx-lm names the layers of a model of this `model_type`. It keeps the text part of a
    /// multimodal checkpoint under a separate prefix.
    pub fn mlx_lm_names(&self, model_type: &str) -> Renaming {
        if self.is_multimodal(model_type) {
            Renaming {
                added: "language_model.",
                dropped: "",
            }
        } else {
            self.mlx_lm
        }
    }

    /// Whether a tensor of a checkpoint is a matrix that is stored as `[in, out]`.
    pub fn is_transposed(&self, name: &str) -> bool {
        !self.is_renamed(name) && self.transposed.iter().any(|end| name.ends_with(end))
    }

    /// The name that mlx-lm gives to a tensor when it converts a checkpoint. `None` for a tensor
    /// that it drops.
    pub fn converted_name(&self, name: &str) -> Option<String> {
        if self.buffers.iter().any(|end| name.ends_with(end)) || self.is_spare(name) {
            return None;
        }
        if self.is_renamed(name) {
            return Some(name.to_owned());
        }
        let Renaming { added, dropped } = self.mlx_lm;
        let rest = name.strip_prefix(dropped).unwrap_or(name);
        Some(format!("{added}{rest}"))
    }

    /// Whether the language model does not use a tensor.
    pub fn is_spare(&self, name: &str) -> bool {
        self.spare.iter().any(|start| name.starts_with(start))
    }

    /// Whether the tensor already has a name of mlx-lm.
    fn is_renamed(&self, name: &str) -> bool {
        let added = self.mlx_lm.added;
        !added.is_empty() && name.starts_with(added)
    }
}
