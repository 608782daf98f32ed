//! A *vindex*: the feed-forward features of a model as files, for searching, reading single
//! features, and comparing them without the model.
//!
//! A feature is a row of the gate matrix, a row of the up matrix, and a column of the down matrix
//! (Geva et al. 2021). The gate row determines which states activate the feature. The down column
//! is added to the output. A vindex is a directory:
//!
//! | file | what | level |
//! |---|---|---|
//! | `index.json` | sizes, and SHA-256 of every part of every file and of itself | |
//! | `gate_vectors.bin` | for each layer the gate rows `[features, hidden]` | `browse` |
//! | `biases.bin` | for each layer with biases: gate, up, down; float32 | `browse` |
//! | `down_meta.bin` | the output of each feature: its tokens with the greatest logits | `browse` |
//! | `embeddings.bin` | the table of tokens, `[vocab, hidden]` | `browse` |
//! | `tokenizer.json` | the tokenizer | `browse` |
//! | `up_features.bin` | the up rows of layers with a gate | `inference` |
//! | `down_features.bin` | the columns of the down matrix, `[features, hidden]` | `inference` |
//! | `attn_weights.bin` | attention and recurrent layers | `all` |
//! | `norms.bin`, `lm_head.bin` | norms; the head if it is not the table of tokens | `all` |
//! | `router_weights.bin` | routers and shared experts of layers with experts | `all` |
//! | `weight_manifest.json` | name, shape and position of each tensor that is not a feature | |
//!
//! Each level includes the files of the levels above it in the table. Numbers are little-endian
//! float32, or float16 where the index says so. Files of numbers have no headers, and layers follow
//! one another. In a model without a gate, such as GPT-2, the up matrix takes the place of the
//! gate. The features of a layer with experts are those of its experts, one expert after another.
//!
//! `down_meta.bin` begins with `DMET` and three `u32`: version 1, the number of layers, and the
//! maximum number of tokens of a feature. Then follow the features, layer by layer: the first token
//! (`u32`), its logit (`f32`), the number of tokens (`u8`), and for each token its id (`u32`) and
//! its logit (`f32`).
//!
//! A directory gets its name when it is complete. Data is compared with its hash when a [`Vindex`]
//! reads it for the first time, so a damaged file causes an error rather than a wrong number.

mod activation;
mod build;
mod index;
mod layer;
mod numbers;
mod reader;
mod writer;

pub use activation::Activation;
pub use build::Build;
pub use index::{About, Experts, LayerIndex, Level, Numbers, TensorIndex, TensorKind, Tokens};
pub use layer::{Biases, Hit, Layer, Taken, greatest_by_magnitude};
pub use reader::{MatrixFile, MatrixPart, Vindex};
pub use writer::Writer;
