//! The largest accepted value of each field; see [`crate::ModelConfig::validate`].

/// `hidden_size`.
pub const HIDDEN: usize = 1 << 17;
/// `num_hidden_layers`.
pub const LAYERS: usize = 1 << 12;
/// `intermediate_size`.
pub const INTERMEDIATE: usize = 1 << 20;
/// `num_attention_heads` and `num_key_value_heads`.
pub const HEADS: usize = 1 << 12;
/// `head_dim`.
pub const HEAD_DIM: usize = 1 << 12;
/// `vocab_size`.
pub const VOCAB: usize = 1 << 22;
/// `num_experts` and its other names.
pub const EXPERTS: usize = 1 << 12;
/// `max_position_embeddings` and `sliding_window`.
pub const POSITIONS: usize = i32::MAX as usize;
