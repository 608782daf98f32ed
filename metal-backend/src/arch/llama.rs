//! Llama (Touvron et al. 2023; reference: `modeling_llama` of Hugging Face transformers), and the
//! decoder that mistral, qwen2 and qwen3 share with it: pre-norm blocks of grouped-query attention
//! and a gated feed-forward, with the differences as [`Variant`].

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::Array;

use super::Decoder;
use crate::cache::{Caches, ChunkedCache};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::weights::Weights;
use crate::error::engine;
use crate::nn::attention::Positions;
use crate::nn::{Attention, Embedding, GatedMlp, Linear, RmsNorm, Rope};

/// What tells the llama-like architectures apart.
#[derive(Debug, Clone, Copy, Default)]
pub struct Variant {
    /// Biases on the query, key and value projections.
    pub qkv_bias: bool,
    /// A bias on the attention's output projection.
    pub o_bias: bool,
    /// Biases in the feed-forward block.
    pub mlp_bias: bool,
    /// Norms on query and key heads before rotation.
    pub qk_norm: bool,
    /// The sliding window of every layer, in positions.
    pub window: Option<i32>,
}

/// Loads a llama checkpoint.
pub fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        qkv_bias: config.attention_bias,
        o_bias: config.attention_bias,
        mlp_bias: config.mlp_bias,
        ..Variant::default()
    };
    load_variant(config, weights, variant)
}

/// Loads the shared decoder as `variant`.
pub fn load_variant(
    config: &ModelConfig,
    weights: &mut Weights,
    variant: Variant,
) -> Result<Box<dyn Decoder>> {
    Ok(Box::new(LlamaDecoder::load(config, weights, variant)?))
}

#[derive(Debug)]
struct Block {
    input_norm: RmsNorm,
    attention: Attention,
    post_attention_norm: RmsNorm,
    mlp: GatedMlp,
}

impl Block {
    /// `[B, L, hidden] -> [B, L or 1, hidden]`.
    fn forward(
        &self,
        x: &Array,
        cache: &mut dyn crate::cache::KvCache,
        positions: Positions,
    ) -> mlx_rs_core::Result<Array> {
        let attended = self
            .attention
            .forward(&self.input_norm.forward(x)?, cache, positions)?;
        let residual = match positions {
            Positions::Last => last_position(x)?,
            Positions::All => x.clone(),
        };
        let x = residual.add(&attended)?;
        x.add(&self.mlp.forward(&self.post_attention_norm.forward(&x)?)?)
    }
}

/// `[B, L, hidden] -> [B, 1, hidden]`.
fn last_position(x: &Array) -> mlx_rs_core::Result<Array> {
    let length = x.dim(1)?;
    if length == 1 {
        Ok(x.clone())
    } else {
        x.slice_axis(1, length - 1, length)
    }
}

#[derive(Debug)]
struct LlamaDecoder {
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    /// `None` when the output is tied to the embedding.
    lm_head: Option<Linear>,
}

impl LlamaDecoder {
    fn load(config: &ModelConfig, weights: &mut Weights, variant: Variant) -> Result<Self> {
        let dims = Dims::new(config, weights)?;
        let embed_tokens = weights.embedding("model.embed_tokens", dims.vocab, dims.hidden)?;
        let rope = build_rope(config, weights, dims.head_dim)?;
        let blocks = (0..config.num_hidden_layers)
            .map(|i| load_block(weights, &dims, variant, &rope, &format!("model.layers.{i}")))
            .collect::<Result<Vec<_>>>()?;
        let norm = RmsNorm::new(weights.vector("model.norm.weight", dims.hidden)?, dims.eps);
        // A tied model may still carry the tensor; transformers ignores it then, and so do we.
        let tied = config
            .tie_word_embeddings
            .unwrap_or_else(|| !weights.contains("lm_head.weight"));
        let lm_head = if tied {
            weights.ignore("lm_head");
            None
        } else {
            Some(weights.linear("lm_head", dims.hidden, dims.vocab, false)?)
        };
        Ok(Self {
            embed_tokens,
            blocks,
            norm,
            lm_head,
        })
    }
}

impl Decoder for LlamaDecoder {
    fn forward(
        &self,
        ids: &Array,
        caches: &mut Caches,
        positions: Positions,
    ) -> mlx_rs_core::Result<Array> {
        let mut x = self.embed_tokens.forward(ids)?; // [B, L] -> [B, L, hidden]
        let last = self.blocks.len().saturating_sub(1);
        for (i, (block, cache)) in self.blocks.iter().zip(caches.iter_mut()).enumerate() {
            // Only the last block may drop positions: the others feed the keys of the next.
            let keep = if i == last { positions } else { Positions::All };
            x = block.forward(&x, cache.as_mut(), keep)?;
        }
        let x = self.norm.forward(&x)?;
        match &self.lm_head {
            Some(head) => head.forward(&x),
            None => self.embed_tokens.as_output(&x),
        }
    }

    fn new_caches(&self) -> Caches {
        self.blocks
            .iter()
            .map(|_| Box::new(ChunkedCache::new()) as _)
            .collect()
    }
}

/// Sizes as MLX counts them, checked once.
struct Dims {
    hidden: i32,
    intermediate: i32,
    vocab: i32,
    n_heads: i32,
    n_kv_heads: i32,
    head_dim: i32,
    eps: f32,
}

impl Dims {
    fn new(config: &ModelConfig, weights: &Weights) -> Result<Self> {
        let int = |name: &str, value: usize| {
            i32::try_from(value).map_err(|_| {
                Error::new(
                    ErrorKind::InvalidModel,
                    format!("{name} {value} is too large"),
                )
            })
        };
        let n_heads = int("num_attention_heads", config.num_attention_heads)?;
        // Some checkpoints leave head_dim out although it is not hidden / heads.
        let head_dim = match config.head_dim {
            Some(d) => int("head_dim", d)?,
            None => match weights.rows("model.layers.0.self_attn.q_proj") {
                Some(rows) if rows % config.num_attention_heads == 0 => {
                    int("head_dim", rows / config.num_attention_heads)?
                }
                _ => int("head_dim", config.hidden_size / config.num_attention_heads)?,
            },
        };
        Ok(Self {
            hidden: int("hidden_size", config.hidden_size)?,
            intermediate: int("intermediate_size", config.intermediate_size)?,
            vocab: int("vocab_size", config.vocab_size)?,
            n_heads,
            n_kv_heads: int("num_key_value_heads", config.num_key_value_heads)?,
            head_dim,
            eps: config.rms_norm_eps,
        })
    }
}

fn build_rope(config: &ModelConfig, weights: &mut Weights, head_dim: i32) -> Result<Rope> {
    let rope = Rope::new(
        head_dim,
        config.rope_theta,
        config.rope_traditional,
        &config.rope_scaling,
    )
    .map_err(engine("rope"))?;
    // GGUF files store the scaling as a tensor of factors.
    match weights.optional_host_vector("rope_freqs.weight", head_dim / 2)? {
        Some(factors) => rope.with_factors(&factors).map_err(engine("rope")),
        None => Ok(rope),
    }
}

fn load_block(
    weights: &mut Weights,
    dims: &Dims,
    variant: Variant,
    rope: &Rope,
    prefix: &str,
) -> Result<Block> {
    let name = |part: &str| format!("{prefix}.{part}");
    let (q_dim, kv_dim) = (
        dims.n_heads * dims.head_dim,
        dims.n_kv_heads * dims.head_dim,
    );
    let (hidden, mlp) = (dims.hidden, dims.intermediate);
    let bias = variant.qkv_bias;
    let mut head_norm = |part: &str| -> Result<Option<RmsNorm>> {
        if !variant.qk_norm {
            return Ok(None);
        }
        Ok(Some(RmsNorm::new(
            weights.vector(&name(part), dims.head_dim)?,
            dims.eps,
        )))
    };
    let (q_norm, k_norm) = (
        head_norm("self_attn.q_norm.weight")?,
        head_norm("self_attn.k_norm.weight")?,
    );
    let attention = Attention {
        q_proj: weights.linear(&name("self_attn.q_proj"), hidden, q_dim, bias)?,
        k_proj: weights.linear(&name("self_attn.k_proj"), hidden, kv_dim, bias)?,
        v_proj: weights.linear(&name("self_attn.v_proj"), hidden, kv_dim, bias)?,
        o_proj: weights.linear(&name("self_attn.o_proj"), q_dim, hidden, variant.o_bias)?,
        q_norm,
        k_norm,
        rope: rope.clone(),
        n_heads: dims.n_heads,
        n_kv_heads: dims.n_kv_heads,
        head_dim: dims.head_dim,
        scale: (dims.head_dim as f32).powf(-0.5),
        window: variant.window,
    };
    // Old llama checkpoints carry the inverse frequencies; they follow from the configuration.
    weights.ignore(&name("self_attn.rotary_emb.inv_freq"));
    Ok(Block {
        input_norm: RmsNorm::new(
            weights.vector(&name("input_layernorm.weight"), hidden)?,
            dims.eps,
        ),
        attention,
        post_attention_norm: RmsNorm::new(
            weights.vector(&name("post_attention_layernorm.weight"), hidden)?,
            dims.eps,
        ),
        mlp: GatedMlp {
            gate: weights.linear(&name("mlp.gate_proj"), hidden, mlp, variant.mlp_bias)?,
            up: weights.linear(&name("mlp.up_proj"), hidden, mlp, variant.mlp_bias)?,
            down: weights.linear(&name("mlp.down_proj"), mlp, hidden, variant.mlp_bias)?,
        },
    })
}
