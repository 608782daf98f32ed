//! The messages between this program and the bridge: one JSON object per line. `process.rs` sends
//! messages, `bridge.py` is the Python side, and `docs/mlx-lm.md` lists all messages.

use inference::{Error, ErrorKind, FinishReason, ModelInfo};
use serde::Deserialize;

/// The version of the protocol. Both sides must have the same version.
pub const PROTOCOL: u64 = 1;

/// The logits of some positions.
#[derive(Debug, Default)]
pub struct Rows {
    /// The ids of the prompt.
    pub tokens: Vec<u32>,
    /// The number of rows.
    pub count: usize,
    /// The rows, one after another.
    pub values: Vec<f32>,
}

/// A message of the bridge. Its fields determine its kind.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reply {
    /// The request that the message answers.
    pub id: Option<u64>,
    /// Whether the bridge has started.
    pub ready: bool,
    /// The protocol version of the bridge.
    pub protocol: u64,
    /// Whether a short request succeeded.
    pub ok: bool,
    /// The error of a request.
    pub error: Option<String>,
    /// The error's kind.
    pub kind: Option<String>,
    /// Whether the prompt was accepted.
    pub started: bool,
    /// The length of the prompt in tokens.
    pub prompt_tokens: usize,
    /// Number of prompt tokens that were processed.
    pub progress: Option<usize>,
    /// The text of a new token.
    pub token: Option<String>,
    /// The id of the new token.
    pub token_id: Option<u32>,
    /// Whether a later token completes the text of this one.
    pub pending: bool,
    /// The logits from which the token was sampled, encoded as in [`floats`].
    pub logits: Option<String>,
    /// The log-probability of the token, followed by those of the tokens in `top`, encoded as in
    /// [`floats`].
    pub logprob: Option<String>,
    /// The most probable tokens: id and text of each.
    pub top: Vec<(u32, String)>,
    /// Logits of one position, in the encoding of [`floats`].
    pub row: Option<String>,
    /// Whether the request has ended.
    pub done: bool,
    /// Why the reply ended.
    pub finish_reason: Option<FinishReason>,
    /// A text, or the remaining text at the end of a reply.
    pub text: Option<String>,
    /// The ids of a text.
    pub tokens: Option<Vec<u32>>,
    /// The peak memory of MLX, in bytes.
    pub peak_memory: u64,
    /// Memory of MLX in use at the end, in bytes.
    pub active_memory: u64,
    /// The version and path of Python, in `ready` and in a probe.
    pub python: Option<String>,
    /// The version of mlx-lm.
    pub mlx_lm: Option<String>,
    /// The version of MLX.
    pub mlx: Option<String>,
    /// `cpu`, `metal` or `cuda`.
    pub device: Option<String>,
    // These fields describe a model, in answers to `load` and `info`.
    model_type: String,
    vocab_size: usize,
    layers: usize,
    hidden_size: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    context_length: Option<usize>,
    quantization_bits: Option<u32>,
    quantization_group: Option<u32>,
    parameters: u64,
    weight_bytes: u64,
    compute: Option<String>,
    has_chat_template: bool,
    /// Tokens that end a reply.
    pub eos: Vec<u32>,
}

impl Reply {
    /// Reads a line.
    ///
    /// # Errors
    /// Why the line is not a message.
    pub fn parse(line: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(line)
            .map_err(|e| format!("not UTF-8 at byte {}", e.valid_up_to()))?;
        let start = || text.chars().take(60).collect::<String>();
        // serde would also accept an array of the field values.
        if !text.trim_start().starts_with('{') {
            return Err(format!("not an object: {:?}", start()));
        }
        serde_json::from_str(text).map_err(|e| format!("{e}: {:?}", start()))
    }

    /// The error that the message reports, if there is one.
    pub fn failure(&self) -> Option<Error> {
        let message = self.error.as_ref()?;
        let kind = match self.kind.as_deref() {
            Some("invalid_model") => ErrorKind::InvalidModel,
            Some("invalid_option") => ErrorKind::InvalidOption,
            Some("unsupported") => ErrorKind::Unsupported,
            Some("out_of_memory") => ErrorKind::OutOfMemory,
            Some("unavailable") => ErrorKind::UnavailableBackend,
            _ => ErrorKind::Engine,
        };
        Some(Error::new(kind, message.clone()))
    }

    /// The model that the message describes.
    pub fn model(&self) -> ModelInfo {
        let mut info = ModelInfo::default();
        info.architecture.clone_from(&self.model_type);
        info.vocab_size = self.vocab_size;
        info.num_layers = self.layers;
        info.hidden_size = self.hidden_size;
        info.num_heads = self.heads;
        info.num_kv_heads = self.kv_heads;
        info.head_dim = self.head_dim;
        info.context_length = self.context_length;
        info.quantization_bits = self.quantization_bits;
        info.quantization_group = self.quantization_group;
        info.parameters = self.parameters;
        info.weight_bytes = self.weight_bytes;
        info.device = self.device.clone().unwrap_or_default();
        info.compute_type = self.compute.as_deref().and_then(|c| c.parse().ok());
        info.has_chat_template = self.has_chat_template;
        info
    }
}

/// Decodes little-endian float32 in base64 (RFC 4648, with padding).
///
/// # Errors
/// What is wrong with the text.
pub fn floats(text: &str) -> Result<Vec<f32>, String> {
    let body = text.trim_end_matches('=').as_bytes();
    if !text.len().is_multiple_of(4) || text.len() - body.len() > 2 {
        return Err(format!(
            "a text of {} characters is not base64: its length or padding is wrong",
            text.len()
        ));
    }
    let mut bytes = Vec::with_capacity(body.len() * 3 / 4);
    let (mut bits, mut bit_count) = (0u32, 0);
    for &c in body {
        let six = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return Err(format!("{:?} is not base64", char::from(c))),
        };
        bits = (bits << 6) | u32::from(six);
        bit_count += 6;
        if bit_count >= 8 {
            bit_count -= 8;
            bytes.push((bits >> bit_count) as u8);
        }
    }
    let (words, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(format!(
            "{} bytes are not a whole number of float32 values",
            bytes.len()
        ));
    }
    Ok(words.iter().map(|w| f32::from_le_bytes(*w)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_and_others_refused() {
        let reply = Reply::parse(br#"{"id": 3, "token": "a", "token_id": 7}"#).unwrap();
        assert_eq!((reply.id, reply.token_id), (Some(3), Some(7)));
        for bad in [
            &b"hello"[..],
            b"[1]",
            b"{\"id\": -1}",
            b"{\"what\": 1}",
            b"",
            b"\xff",
        ] {
            assert!(Reply::parse(bad).is_err(), "{bad:?}");
        }
        assert!(Reply::parse(b"{\"a\xe9").unwrap_err().contains("byte 3"));
    }

    #[test]
    fn kinds_of_errors_survive() {
        let kind = |kind: &str| {
            let line = format!(r#"{{"id": 1, "error": "x", "kind": "{kind}"}}"#);
            Reply::parse(line.as_bytes())
                .unwrap()
                .failure()
                .unwrap()
                .kind()
        };
        assert_eq!(kind("invalid_option"), ErrorKind::InvalidOption);
        assert_eq!(kind("unsupported"), ErrorKind::Unsupported);
        assert_eq!(kind("nonsense"), ErrorKind::Engine);
        assert!(Reply::default().failure().is_none());
    }

    #[test]
    fn floats_come_out_of_base64() {
        // The text is base64 of 1.0f32 and -2.5f32, little-endian.
        assert_eq!(floats("AACAPwAAIMA=").unwrap(), [1.0, -2.5]);
        assert_eq!(floats("").unwrap(), [0f32; 0]);
        for bad in ["A", "AAAA", "AAA?AAA=", "====", "AACAPwAAIMA"] {
            assert!(floats(bad).is_err(), "{bad}");
        }
    }
}
