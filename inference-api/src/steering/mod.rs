//! Edits: what a request changes inside a model while it computes. A list of places, each with one
//! operation. `json.rs` reads them, `check.rs` compares them with a model.

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

/// A place in a decoder block. The names are those of TransformerLens, so that its users find them
/// again. Arrays are `[positions, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hook {
    /// `resid_pre`: the residual stream that the block reads, of the hidden size.
    ResidPre,
    /// `resid_mid`: the residual stream between attention and feed-forward part. A block that
    /// computes both from one input has none.
    ResidMid,
    /// `resid_post`: the residual stream that the block gives to the next.
    ResidPost,
    /// `attn_out`: what attention, or a recurrent mixer, adds to the stream, after a norm on it and
    /// before a factor on it.
    AttnOut,
    /// `mlp_out`: what the feed-forward part adds to the stream, after a norm on it and before a
    /// factor on it.
    MlpOut,
    /// `z`: what each head found, before the output projection; heads one after another,
    /// `n_heads * head_dim` wide.
    Heads,
    /// `mlp_post`: activations of the feed-forward part, before the down projection, of its inner
    /// width.
    Neurons,
}

impl Hook {
    /// All of them, in the order in which a block comes to them.
    pub const ALL: [Hook; 7] = [
        Hook::ResidPre,
        Hook::Heads,
        Hook::AttnOut,
        Hook::ResidMid,
        Hook::Neurons,
        Hook::MlpOut,
        Hook::ResidPost,
    ];

    /// The name in files.
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

/// Numbers of layers or of positions, from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Numbers {
    /// Every one.
    All,
    /// These.
    List(Vec<usize>),
    /// From the first to the last, both included; without a last, all from the first on.
    Range(usize, Option<usize>),
}

impl Numbers {
    /// Whether `n` is one of them.
    #[must_use]
    pub fn has(&self, n: usize) -> bool {
        match self {
            Self::All => true,
            Self::List(list) => list.contains(&n),
            Self::Range(first, last) => n >= *first && last.is_none_or(|last| n <= last),
        }
    }
}

/// Positions of a sequence that an edit changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EditPositions {
    /// By number, from 0, which is the first token of the prompt.
    At(Numbers),
    /// Those of the prompt.
    Prompt,
    /// The last one of the prompt, from which the first token is drawn.
    Last,
    /// The last one of the prompt and all after it: those from which tokens are drawn.
    Reply,
}

impl EditPositions {
    /// Whether `position` of a sequence with a prompt of `prompt` tokens is one of them.
    #[must_use]
    pub fn has(&self, position: usize, prompt: usize) -> bool {
        match self {
            Self::At(numbers) => numbers.has(position),
            Self::Prompt => position < prompt,
            Self::Last => position + 1 == prompt,
            Self::Reply => position + 1 >= prompt,
        }
    }

    /// Whether the same token at the same place may be edited with one prompt and not with another.
    #[must_use]
    pub fn depend_on_prompt(&self) -> bool {
        !matches!(self, Self::At(_))
    }
}

/// What becomes of the states at a place.
#[derive(Debug, Clone, PartialEq)]
pub enum EditOperation {
    /// `coefficient * vector` is added.
    Add {
        /// As wide as what the edit changes.
        vector: Arc<[f32]>,
        /// Its factor.
        coefficient: f32,
    },
    /// They are multiplied with a factor; 0 switches heads or neurons off.
    Scale(f32),
    /// This stands in their place, at every position.
    Replace(Arc<[f32]>),
    /// What the unedited model computes for another prompt at the same place stands in theirs.
    Patch {
        /// The other prompt.
        prompt: Prompt,
        /// A position of it for each edited position, which must then be a list. `None` takes the
        /// position of the same number, or for [`EditPositions::Last`] the last one.
        from: Option<Vec<usize>>,
    },
}

/// One edit.
#[derive(Debug, Clone, PartialEq)]
pub struct Edit {
    /// In which layers.
    pub layers: Numbers,
    /// Where in them.
    pub hook: Hook,
    /// At which positions.
    pub positions: EditPositions,
    /// Which heads of [`Hook::Heads`] or neurons of [`Hook::Neurons`]; `None` for all there are.
    /// A vector has the numbers of these alone, in this order.
    pub units: Option<Vec<usize>>,
    /// What becomes of it.
    pub operation: EditOperation,
}

/// A list of edits, applied in order, from one request to the next the same: clones share it.
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
    /// The most edits in a list.
    pub const MOST_EDITS: usize = 1024;
    /// The most numbers in all vectors together.
    pub const MOST_NUMBERS: usize = 1 << 24;

    /// These edits, in this order.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`] naming the edit and the field that cannot be right for any
    /// model.
    pub fn new(edits: Vec<Edit>) -> Result<Self> {
        check::alone(&edits)?;
        Ok(Self {
            edits: edits.into(),
        })
    }

    /// Reads a JSON file. Vectors may be in other files, `{"file": "v.npy"}` or `{"file":
    /// "v.safetensors", "tensor": "name"}`, beside it; a `row` chooses one of several.
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

    /// Whether computed beginnings of prompts can be used by other prompts with the same edits.
    #[must_use]
    pub fn depends_on_prompt(&self) -> bool {
        (self.edits.iter()).any(|edit| edit.positions.depend_on_prompt())
    }
}

#[cfg(test)]
mod tests;
