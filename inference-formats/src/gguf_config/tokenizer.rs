//! The parts of a tokenizer in GGUF metadata, with consistency checks. A tokenizer library
//! assembles them.

use crate::error::Result;

use crate::files::invalid;
use crate::gguf::Gguf;

/// The tokenizer in a GGUF file. All ids are below `tokens.len()`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufTokenizerParts {
    /// The kind, such as `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// The pre-tokenizer, which splits text before BPE, such as `smollm` or `qwen2`.
    pub pre: Option<String>,
    /// The text of each token, in order of ids.
    pub tokens: Vec<String>,
    /// The score of each token, if the kind has scores.
    pub scores: Option<Vec<f32>>,
    /// The type of each token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Option<Vec<i32>>,
    /// BPE merges in order of application. Each is two parts separated by a space.
    pub merges: Vec<String>,
    /// The token that starts a text.
    pub bos_id: Option<u32>,
    /// The token that ends a text.
    pub eos_id: Option<u32>,
    /// The token for text that no other token can express.
    pub unk_id: Option<u32>,
    /// The token that pads a batch.
    pub pad_id: Option<u32>,
    /// The token before a text that an encoder reads.
    pub cls_id: Option<u32>,
    /// The token after each text that an encoder reads.
    pub sep_id: Option<u32>,
    /// Further tokens that end a reply: end of turn and end of message.
    pub extra_eos_ids: Vec<u32>,
    /// Whether a text starts with `bos`.
    pub add_bos: Option<bool>,
    /// Whether a text ends with `eos`.
    pub add_eos: Option<bool>,
    /// Whether a space is added at the start of a text; `None` if the file does not state it.
    pub add_space_prefix: Option<bool>,
    /// The chat template, in Jinja.
    pub chat_template: Option<String>,
    /// The separate chat template for conversations with tools, if the model has one.
    pub tool_use_template: Option<String>,
}

const TOKENS: &str = "tokenizer.ggml.tokens";
/// Keys of further tokens that end a reply.
const END_KEYS: [&str; 2] = ["eot_token_id", "eom_token_id"];

/// Reads the parts from the metadata of a file.
///
/// # Errors
/// If there is no tokenizer, a key has the wrong type, or parts contradict each other.
pub fn tokenizer_parts(file: &Gguf) -> Result<GgufTokenizerParts> {
    let metadata = file.metadata();
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let text = |key: &str| -> Result<Option<String>> { Ok(metadata.str(key)?.map(str::to_owned)) };
    let id = |name: &str| -> Result<Option<u32>> {
        // Some writers store -1 for an absent token.
        let none = metadata
            .i32s(&key(name))
            .is_ok_and(|v| v.as_deref() == Some(&[-1]));
        Ok(if none {
            None
        } else {
            metadata.u32(&key(name))?
        }
        .filter(|id| *id != u32::MAX))
    };
    let mut extra_eos_ids = Vec::new();
    for name in END_KEYS {
        extra_eos_ids.extend(id(name)?);
    }
    let model =
        text("tokenizer.ggml.model")?.ok_or_else(|| metadata.missing("tokenizer.ggml.model"))?;
    let tokens = metadata
        .strings(TOKENS)?
        .ok_or_else(|| metadata.missing(TOKENS))?
        .to_vec();
    let parts = GgufTokenizerParts {
        model,
        pre: text("tokenizer.ggml.pre")?,
        scores: metadata.f32s("tokenizer.ggml.scores")?.map(<[_]>::to_vec),
        token_types: metadata.i32s("tokenizer.ggml.token_type")?,
        merges: metadata
            .strings("tokenizer.ggml.merges")?
            .unwrap_or_default()
            .to_vec(),
        bos_id: id("bos_token_id")?,
        eos_id: id("eos_token_id")?,
        unk_id: id("unknown_token_id")?,
        pad_id: id("padding_token_id")?,
        cls_id: id("cls_token_id")?,
        // The misspelled key is part of the format.
        sep_id: id("seperator_token_id")?,
        extra_eos_ids,
        add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        // Some files store the name of a built-in llama.cpp template instead of its text. A name
        // has no `{`.
        chat_template: text("tokenizer.chat_template")?.filter(|text| text.contains('{')),
        tool_use_template: text("tokenizer.chat_template.tool_use")?,
        tokens,
    };
    parts
        .check()
        .map_err(|message| invalid(file.path(), message))?;
    Ok(parts)
}

impl GgufTokenizerParts {
    fn check(&self) -> Result<(), String> {
        let count = self.tokens.len();
        if count == 0 {
            return Err(format!("{TOKENS} is empty"));
        }
        for (what, len) in [
            ("scores", self.scores.as_ref().map(Vec::len)),
            ("token_type", self.token_types.as_ref().map(Vec::len)),
        ] {
            if let Some(len) = len.filter(|l| *l != count) {
                return Err(format!(
                    "tokenizer.ggml.{what} has {len} entries and there are {count} tokens"
                ));
            }
        }
        let ends = self.extra_eos_ids.iter().map(|id| ("an end of reply", *id));
        let named = [
            ("bos_token_id", self.bos_id),
            ("eos_token_id", self.eos_id),
            ("unknown_token_id", self.unk_id),
            ("padding_token_id", self.pad_id),
            ("cls_token_id", self.cls_id),
            ("seperator_token_id", self.sep_id),
        ];
        let named = named
            .into_iter()
            .filter_map(|(what, id)| id.map(|id| (what, id)));
        for (what, id) in named.chain(ends) {
            if id as usize >= count {
                return Err(format!("{what} is {id}; there are {count} tokens"));
            }
        }
        Ok(())
    }
}
