//! Edits of activations during the forward passes of a request. Each edit has one operation, and
//! the layers, the hook and the positions at which it applies. `json.rs` parses edits, and
//! `check.rs` checks them against a model.

mod check;
mod json;
mod model;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::message::Prompt;

pub use check::{LayerHooks, SteeringShape};
pub use model::{HookStates, SteerableModel};

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidOption, message))
}

/// A place in a decoder block where states can be edited. The names are those of TransformerLens.
/// States are `[positions, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// `resid_pre`: the residual stream at the block's input, `hidden_size` wide.
    ResidPre,
    /// `resid_mid`: the residual stream between attention and feed-forward part. A block that
    /// computes both from one input lacks it.
    ResidMid,
    /// `resid_post`: the residual stream at the block's output.
    ResidPost,
    /// `attn_out`: the contribution of attention or a recurrent mixer to the residual stream. An
    /// output norm is applied, but an output factor is not.
    AttnOut,
    /// `mlp_out`: the contribution of the feed-forward part to the residual stream. An output norm
    /// is applied, but an output factor is not.
    MlpOut,
    /// `z`: the output of each head before the output projection. Heads are concatenated, so the
    /// width is `n_heads * head_dim`.
    Heads,
    /// `mlp_post`: the activations of the feed-forward part before the down projection. Their width
    /// is the inner width.
    Neurons,
}

impl Hook {
    /// All hooks, in the order in which a block reaches them.
    pub const ALL: [Hook; 7] = [
        Hook::ResidPre,
        Hook::Heads,
        Hook::AttnOut,
        Hook::ResidMid,
        Hook::Neurons,
        Hook::MlpOut,
        Hook::ResidPost,
    ];

    /// The name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Hook::ResidPre => "resid_pre",
            Hook::ResidMid => "resid_mid",
            Hook::ResidPost => "resid_post",
            Hook::AttnOut => "attn_out",
            Hook::MlpOut => "mlp_out",
            Hook::Heads => "z",
            Hook::Neurons => "mlp_post",
        }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of layers or positions, counted from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Numbers {
    /// All layers or positions.
    All,
    /// The listed layers or positions.
    List(Vec<usize>),
    /// From the first number to the last, both included. Without a last number, there is no upper
    /// end.
    Range(usize, Option<usize>),
}

impl Numbers {
    /// Whether `n` is in the set.
    #[must_use]
    pub fn has(&self, n: usize) -> bool {
        match self {
            Self::All => true,
            Self::List(list) => list.contains(&n),
            Self::Range(first, last) => n >= *first && last.is_none_or(|last| n <= last),
        }
    }
}

/// The positions of a sequence that an edit changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EditPositions {
    /// Positions by number; 0 is the first token of the prompt.
    At(Numbers),
    /// All positions of the prompt.
    Prompt,
    /// The last position of the prompt, whose logits select the first token of the reply.
    Last,
    /// The last position of the prompt and all later ones: their logits select the tokens of the
    /// reply.
    Reply,
}

impl EditPositions {
    /// Whether `position` is selected in a sequence with `prompt` prompt tokens.
    #[must_use]
    pub fn has(&self, position: usize, prompt: usize) -> bool {
        match self {
            Self::At(numbers) => numbers.has(position),
            Self::Prompt => position < prompt,
            Self::Last => position + 1 == prompt,
            Self::Reply => position + 1 >= prompt,
        }
    }

    /// Whether the selected positions depend on the length of the prompt.
    #[must_use]
    pub fn depend_on_prompt(&self) -> bool {
        !matches!(self, Self::At(_))
    }
}

/// The operation on the states at a hook.
#[derive(Debug, Clone, PartialEq)]
pub enum EditOperation {
    /// Adds `coefficient * vector`.
    Add {
        /// The vector, as wide as the edited states.
        vector: Arc<[f32]>,
        /// The factor.
        coefficient: f32,
    },
    /// Multiplies by a factor; 0 switches heads or neurons off.
    Scale(f32),
    /// Replaces the states at every position.
    Replace(Arc<[f32]>),
    /// Replaces the states by the states of another prompt at the same hook. The unedited model
    /// computes these states.
    Patch {
        /// The other prompt.
        prompt: Prompt,
        /// The source position for each edited position; the edited positions must then be a list.
        /// With `None`, the source position equals the edited position; for
        /// [`EditPositions::Last`], it is the other prompt's last position.
        from: Option<Vec<usize>>,
    },
}

/// One edit.
#[derive(Debug, Clone, PartialEq)]
pub struct Edit {
    /// The layers.
    pub layers: Numbers,
    /// The hook in each layer.
    pub hook: Hook,
    /// The positions.
    pub positions: EditPositions,
    /// The heads of [`Hook::Heads`] or neurons of [`Hook::Neurons`] to edit; `None` means all. A
    /// vector contains values for these units only, in this order.
    pub units: Option<Vec<usize>>,
    /// The operation.
    pub operation: EditOperation,
}

/// A list of edits, applied in order. Clones share the list.
///
/// In JSON it is `{"edits": [...]}`:
///
/// ```
/// use inference::Steering;
///
/// let json = r#"{"edits": [
///     {"layers": "4-6", "hook": "resid_post", "op": "add", "vector": [0.5, -1], "coefficient": 2},
///     {"layers": 3, "hook": "z", "heads": [0, 2], "op": "zero"},
///     {"layers": [5], "hook": "resid_post", "positions": [3], "op": "patch",
///      "prompt": "The capital of Italy is"}]}"#;
/// let steering: Steering = serde_json::from_str(json).unwrap();
/// assert_eq!(steering.edits().len(), 3);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "json::File", into = "json::File")]
pub struct Steering {
    edits: Arc<[Edit]>,
}

impl Steering {
    /// The maximum number of edits in a list.
    pub const MOST_EDITS: usize = 1024;
    /// The maximum number of values in all vectors together.
    pub const MOST_NUMBERS: usize = 1 << 24;

    /// A list of these edits, in this order.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] naming the edit and the field that is invalid for every model.
    pub fn new(edits: Vec<Edit>) -> Result<Self> {
        check::alone(&edits)?;
        Ok(Self {
            edits: edits.into(),
        })
    }

    /// Reads a JSON file. A vector may be in a separate file, `{"file": "v.npy"}` or `{"file":
    /// "v.safetensors", "tensor": "name"}`. `row` selects one of several vectors in a file.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] and [`ErrorKind::Io`] naming the file, the edit and the field.
    pub fn read(path: &Path) -> Result<Self> {
        json::read(path)
    }

    /// The edits, in order.
    #[must_use]
    pub fn edits(&self) -> &[Edit] {
        &self.edits
    }

    /// Whether the edits depend on the prompt. If they do, other prompts cannot reuse its caches.
    #[must_use]
    pub fn depends_on_prompt(&self) -> bool {
        (self.edits.iter()).any(|edit| edit.positions.depend_on_prompt())
    }
}

#[cfg(test)]
mod tests;
