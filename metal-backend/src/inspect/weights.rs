//! Reads weights without a forward pass: attention matrices and token embeddings.

use inference::{AttentionProjections, Error, ErrorKind, Result};
use mlx_rs_core::{Array, Dtype};

use crate::engine::Engine;
use crate::engine::forward::ids;
use crate::error::engine as engine_error;
use crate::nn::Linear;

/// The number of vectors per product with the embedding table. A large vocabulary needs much memory
/// per vector.
const TOGETHER: usize = 64;

/// Returns the matrices of a layer's attention.
///
/// # Errors
/// If the layer is unknown, has no plain attention or has an adapter, or the model is closed.
pub fn attention_projections(engine: &Engine, layer: usize) -> Result<AttentionProjections> {
    let count = engine.info().num_layers;
    if layer >= count {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!("layer {layer} does not exist; the model has {count} layers, numbered from 0"),
        ));
    }
    let refused = |why: &str| {
        let message = format!("the attention of layer {layer} cannot be shown: {why}");
        Error::new(ErrorKind::Unsupported, message)
    };
    let decoder = engine.decoder()?;
    let attention =
        (decoder.attention(layer)).ok_or_else(|| refused("the layer has no plain attention"))?;
    let keys =
        (attention.k_proj.as_ref()).ok_or_else(|| refused("it uses the keys of another layer"))?;
    let hidden = engine.info().hidden_size;
    let size = |n: i32| n.unsigned_abs() as usize;
    engine.scope(|| {
        let matrix = |linear: &Linear| -> Result<Array> {
            let (matrix, _) = linear.part().ok_or_else(|| {
                refused("it has an adapter; remove it, or fuse it into the weights")
            })?;
            matrix.dense().map_err(engine_error("weights"))
        };
        let rows = |matrix: Array| matrix.to_f32_vec().map_err(engine_error("weights"));
        let mut projections = AttentionProjections::default();
        projections.num_heads = size(attention.n_heads);
        projections.num_kv_heads = size(attention.n_kv_heads);
        projections.head_dim = size(attention.head_dim);
        projections.hidden_size = hidden;
        projections.queries = rows(matrix(&attention.q_proj)?)?;
        projections.keys = rows(matrix(keys)?)?;
        // Without a value matrix, the values are the keys before their norm.
        projections.values = match &attention.v_proj {
            Some(values) => rows(matrix(values)?)?,
            None => projections.keys.clone(),
        };
        let outputs = matrix(&attention.o_proj)?; // [hidden, heads * width]
        let columns = outputs.swap_axes(0, 1).map_err(engine_error("weights"))?;
        projections.outputs = rows(columns)?;
        Ok(projections)
    })
}

/// Returns the embeddings of `tokens`, concatenated.
///
/// # Errors
/// If a token is outside the vocabulary, or the model is closed.
pub fn token_embeddings(engine: &Engine, tokens: &[u32]) -> Result<Vec<f32>> {
    let vocab = engine.info().vocab_size;
    if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab) {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!("token {id} is outside the vocabulary of {vocab} tokens"),
        ));
    }
    if tokens.is_empty() {
        return Ok(Vec::new());
    }
    let decoder = engine.decoder()?;
    engine.scope(|| {
        ids(tokens)
            .and_then(|ids| decoder.token_vectors(&ids)?.to_f32_vec())
            .map_err(engine_error("embeddings"))
    })
}

/// Returns the dot products of all embeddings with each of `vectors`.
///
/// # Errors
/// If the length of `vectors` is not a multiple of the hidden size. Also if memory runs out, or the
/// model is closed.
pub fn token_scores(engine: &Engine, vectors: &[f32]) -> Result<Vec<Vec<f32>>> {
    let hidden = engine.info().hidden_size;
    if hidden == 0 || !vectors.len().is_multiple_of(hidden) {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "{} numbers are not a whole number of vectors of {hidden} elements",
                vectors.len()
            ),
        ));
    }
    let decoder = engine.decoder()?;
    let fault = engine_error("embeddings");
    engine.scope(|| {
        let mut all = Vec::with_capacity(vectors.len() / hidden);
        for part in vectors.chunks(hidden * TOGETHER) {
            engine.check_open()?;
            let width = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
            let shape = [1, width(part.len() / hidden), width(hidden)];
            let scores = Array::from_slice(part, &shape)
                .and_then(|x| {
                    let scores = decoder.token_scores(&x)?;
                    scores.astype(Dtype::Float32)?.to_vec::<f32>()
                })
                .map_err(&fault)?;
            let vocab = scores.len() / (part.len() / hidden);
            all.extend(scores.chunks_exact(vocab.max(1)).map(<[f32]>::to_vec));
        }
        Ok(all)
    })
}
