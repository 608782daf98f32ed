//! A *vindex*: the feed-forward features of a model as files, so that they can be searched, read
//! feature by feature and compared without the model.
//!
//! A feature is a row of the gate matrix, which says what it answers to, a row of the up matrix,
//! and a column of the down matrix, which says what it adds (Geva et al. 2021). A vindex is a
//! directory:
//!
//! | file | what | level |
//! |---|---|---|
//! | `index.json` | sizes, and SHA-256 of every part of every file; of itself, too | |
//! | `gate_vectors.bin` | for each layer the gate rows `[features, hidden]` | `browse` |
//! | `biases.bin` | for each layer that has them: gate, up, down; float32 | `browse` |
//! | `down_meta.bin` | what each feature would say: its tokens with the greatest logits | `browse` |
//! | `embeddings.bin` | the table of tokens, `[vocab, hidden]` | `browse` |
//! | `tokenizer.json` | the tokenizer | `browse` |
//! | `up_features.bin` | the same of the up matrix, where there is a gate beside it | `inference` |
//! | `down_features.bin` | the columns of the down matrix, `[features, hidden]` | `inference` |
//! | `attn_weights.bin` | attention and recurrent layers | `all` |
//! | `norms.bin`, `lm_head.bin` | norms; the head where it is not the table of tokens | `all` |
//! | `router_weights.bin` | routers and shared experts of layers with experts | `all` |
//! | `weight_manifest.json` | name, shape and place of each tensor that is no feature | |
//!
//! A level has the files of those above it. Numbers are little-endian float32, or float16 where the
//! index says so, without headers, one layer after another. Without a gate, as in GPT-2, the up
//! matrix counts as the gate. The features of a layer with experts are those of its experts, one
//! expert after another. `down_meta.bin` is `DMET`, three `u32` (version 1, layers, tokens of a
//! feature at most) and for each feature, layer by layer: `u32` the first token, `f32` its logit,
//! `u8` how many there are, and as many pairs of `u32` and `f32`.
//!
//! A directory appears under its name when it is whole. What is read is compared with its hash, once
//! by each [`Vindex`], so that a damaged file is an error and never a wrong number.

mod build;
mod index;
mod layer;
mod numbers;
mod reader;
mod writer;

pub use build::Build;
pub use index::{About, Experts, LayerIndex, Level, Numbers, TensorIndex, TensorKind, Tokens};
pub use layer::{Activation, Biases, Hit, Layer, Taken, greatest_by_magnitude};
pub use reader::{MatrixFile, MatrixPart, Vindex};
pub use writer::Writer;
