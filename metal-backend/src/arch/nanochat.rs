//! nanochat (Karpathy 2025; reference: `modeling_nanochat` of Hugging Face transformers). Norms
//! have no weights, and also apply to the embedding and to query and key heads. The rotation has
//! the opposite direction. The feed-forward part has two matrices and a squared ReLU. Logits are
//! capped.

use inference::Result;

use super::Decoder;
use super::build::{Builder, NormKind};
use super::gemma2::cap;
use super::llama::{MlpKind, Variant, variant_stack};
use crate::checkpoint::ModelConfig;
use crate::loader::Weights;

pub(super) fn load(config: &ModelConfig, weights: &mut Weights) -> Result<Box<dyn Decoder>> {
    let variant = Variant {
        // The reference rotates before these norms. Both orders give the same result: the norms
        // have no weights, and a rotation does not change a vector's length.
        qk_norm: true,
        norms: NormKind::PlainRms,
        reversed: true,
        mlp: MlpKind::Plain,
        ..Variant::configured(config)
    };
    let mut stack = variant_stack(config, weights, variant)?;
    let mut b = Builder::new(config, weights)?.with_norms(NormKind::PlainRms);
    stack.embedding_norm = Some(b.hidden_norm("model.embed_norm")?);
    let softcap = cap(config, "final_logit_softcapping")?;
    stack.head.softcap = softcap.map(|cap| b.scalar(cap)).transpose()?;
    Ok(Box::new(stack))
}
