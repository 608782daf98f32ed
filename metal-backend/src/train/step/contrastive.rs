//! Training steps and evaluations of encoders on texts that belong together.

use std::sync::Arc;

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::transforms::value_and_grad_tree;
use mlx_rs_core::{All, Array, eval};

use super::{ItemEvaluation, RelatedTexts, StepReport, Trainer};
use crate::adapter::Params;
use crate::arch::Decoder;
use crate::arch::EncoderInput;
use crate::engine::Engine;
use crate::error::engine as engine_error;
use crate::nn::adapter::{Scope, within};
use crate::sentence::Sentence;
use crate::train::loss::contrastive;

impl Trainer {
    /// Trains an encoder on a batch by [`contrastive`]. Positives and negatives of the other
    /// examples are also negatives. `scale` is the factor on cosine similarities, usually 20.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the model is not an encoder, or several processes train
    /// together; [`ErrorKind::InvalidOption`] for a batch without negatives or an empty text;
    /// [`ErrorKind::Engine`] if the loss is not finite. The state does not change in any case.
    pub fn step_by_similarity(&mut self, batch: &[RelatedTexts], scale: f32) -> Result<StepReport> {
        if self.together.is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "similarity is trained by one process: each text is compared with the whole batch",
            ));
        }
        check(&self.engine, batch, scale)?;
        let engine = Arc::clone(&self.engine);
        let decoder = engine.decoder()?;
        let packed = engine
            .scope(|| Packed::new(batch, scale))
            .map_err(engine_error("batch"))?;
        let scope = self.scope_of_batch();
        let (report, _) = self.step_by(packed.ids.len(), |params| {
            let loss = packed.loss_with(decoder.as_ref(), engine.sentence(), scope, params)?;
            Ok((loss, Vec::new()))
        })?;
        Ok(report)
    }

    /// Returns the loss and the gradients by parameter name, without an update.
    ///
    /// # Errors
    /// The errors of [`Self::step_by_similarity`].
    pub fn similarity_gradients(
        &self,
        batch: &[RelatedTexts],
        scale: f32,
    ) -> Result<(f32, Params)> {
        check(&self.engine, batch, scale)?;
        let loaded = &self.engine;
        let decoder = loaded.decoder()?;
        let scope = self.scope_of_batch();
        let params = self.trainable()?;
        loaded
            .scope(|| -> mlx_rs_core::Result<_> {
                let packed = Packed::new(batch, scale)?;
                let (loss, (), grads) = value_and_grad_tree(&params, |params| {
                    let sentence = loaded.sentence();
                    let loss = packed.loss_with(decoder.as_ref(), sentence, scope, params)?;
                    Ok::<_, mlx_rs_core::Error>((loss, ()))
                })?;
                eval(grads.values())?;
                Ok((loss.item::<f32>()?, grads))
            })
            .map_err(engine_error("gradients"))
    }

    /// Returns the loss of the current model on texts that belong together, without dropout.
    ///
    /// # Errors
    /// The errors of [`Self::step_by_similarity`].
    pub fn evaluate_similarity(
        &self,
        batch: &[RelatedTexts],
        scale: f32,
    ) -> Result<ItemEvaluation> {
        evaluate_similarity_on(&self.engine, batch, scale)
    }
}

/// Returns the loss of an encoder on texts that belong together, and how often the positive is the
/// most similar candidate.
pub(in crate::train) fn evaluate_similarity_on(
    loaded: &Engine,
    batch: &[RelatedTexts],
    scale: f32,
) -> Result<ItemEvaluation> {
    check(loaded, batch, scale)?;
    let decoder = loaded.decoder()?;
    let (losses, best) = loaded
        .scope(|| -> mlx_rs_core::Result<_> {
            let packed = Packed::new(batch, scale)?;
            let (losses, logits) = packed.losses(decoder.as_ref(), loaded.sentence())?;
            let best = logits.argmax(-1, false)?;
            eval([&losses, &best])?;
            Ok((losses.to_f32_vec()?, best.to_vec::<u32>()?))
        })
        .map_err(engine_error("evaluate"))?;
    let right = (0u32..).zip(&best).filter(|(i, best)| i == *best);
    Ok(ItemEvaluation {
        loss: losses.iter().map(|loss| f64::from(*loss)).sum(),
        items: batch.len(),
        correct: right.count(),
        tokens: batch.iter().map(RelatedTexts::tokens).sum(),
    })
}

/// Returns an error for a batch that has no loss, and for a model that is not an encoder.
fn check(loaded: &Engine, batch: &[RelatedTexts], scale: f32) -> Result<()> {
    let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
    if !loaded.is_encoder()? {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} is a decoder; similarity is trained with encoders",
                loaded.info().architecture
            ),
        ));
    }
    if !(scale.is_finite() && scale > 0.0) {
        return bad(format!("scale is {scale}; it must be a number above 0"));
    }
    let candidates: usize = batch.iter().map(|one| 1 + one.negatives.len()).sum();
    if candidates < 2 {
        return bad(format!(
            "the batch has {candidates} candidates; give at least two examples, or one with a \
             negative"
        ));
    }
    let most = loaded.sentence().most(None).unwrap_or(usize::MAX);
    for text in batch.iter().flat_map(RelatedTexts::texts) {
        loaded.check_prompt(text)?;
        if text.len() > most {
            return bad(format!(
                "a text has {} tokens; the model reads at most {most}",
                text.len()
            ));
        }
    }
    Ok(())
}

/// The texts of a batch, one after another: all anchors, then all positives, then all negatives.
struct Packed {
    ids: Vec<u32>,
    lengths: Vec<i32>,
    anchors: i32,
    scale: f32,
    /// The bias added to the logits: minus infinity for every other candidate that equals the
    /// anchor's positive, to exclude it. `None` if there are no such candidates.
    bias: Option<Array>,
}

impl Packed {
    fn new(batch: &[RelatedTexts], scale: f32) -> mlx_rs_core::Result<Self> {
        let int = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let positives = batch.iter().map(|one| &one.positive);
        let candidates: Vec<&Vec<u32>> = positives
            .chain(batch.iter().flat_map(|one| &one.negatives))
            .collect();
        let hidden = |i: usize, j: usize| j != i && candidates[j] == &batch[i].positive;
        let pairs = (0..batch.len()).flat_map(|i| (0..candidates.len()).map(move |j| (i, j)));
        let bias: Vec<f32> = pairs
            .map(|(i, j)| if hidden(i, j) { f32::NEG_INFINITY } else { 0.0 })
            .collect();
        let bias = bias.iter().any(|b| *b != 0.0).then_some(bias);
        let bias = bias
            .map(|bias| Array::from_slice(&bias, &[int(batch.len()), int(candidates.len())]))
            .transpose()?;
        let anchors = batch.iter().map(|one| &one.anchor);
        let texts: Vec<&Vec<u32>> = anchors.chain(candidates).collect();
        Ok(Self {
            ids: texts.iter().flat_map(|text| text.iter().copied()).collect(),
            lengths: texts.iter().map(|text| int(text.len())).collect(),
            anchors: int(batch.len()),
            scale,
            bias,
        })
    }

    /// Returns the losses of the anchors, `[n]`, and the logits, `[n, candidates]`.
    fn losses(
        &self,
        decoder: &dyn Decoder,
        sentence: &Sentence,
    ) -> mlx_rs_core::Result<(Array, Array)> {
        let Some(encoder) = decoder.encoder() else {
            let message = "the network is not an encoder";
            return Err(mlx_rs_core::Error::new(
                mlx_rs_core::ErrorKind::Unsupported,
                "similarity",
                message,
            ));
        };
        let types = vec![0; self.ids.len()];
        let states = encoder.encode(&EncoderInput {
            ids: &self.ids,
            types: &types,
            lengths: &self.lengths,
        })?;
        let vectors = sentence.unit_vectors(&states, &self.lengths)?; // [texts, dimensions]
        let anchors = vectors.slice_axis(0, 0, self.anchors)?;
        let candidates = vectors.slice_axis(0, self.anchors, vectors.dim(0)?)?;
        contrastive(&anchors, &candidates, self.scale, self.bias.as_ref())
    }

    /// Returns the mean loss with parameters `params`.
    fn loss_with(
        &self,
        decoder: &dyn Decoder,
        sentence: &Sentence,
        scope: Scope,
        params: &Params,
    ) -> mlx_rs_core::Result<Array> {
        let scope = Scope {
            params: params.clone(),
            ..scope
        };
        within(Arc::new(scope), || {
            self.losses(decoder, sentence)?.0.mean(All, false)
        })
    }
}
