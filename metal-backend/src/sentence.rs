//! Tokenizes texts for embedding, and computes vectors from hidden states: pooling, layers on the
//! pooled vector, and normalization. The settings come from a sentence-transformers directory.
//! `embed.rs` runs the forward pass.

use std::path::Path;

use inference::{EmbedOptions, EmbeddingInfo, Error, ErrorKind, Pooling, Prompt, Result};
use inference_formats::sentence::{DenseActivation, DenseModule, LogitScore, SentenceConfig};
use mlx_rs_core::{Array, Dtype, concatenate};

use crate::checkpoint::ModelConfig;
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::error::engine;
use crate::exec::Activation;
use crate::loader::Weights;
use crate::nn::Linear;
use crate::text::TextPipeline;

/// How a model embeds texts.
#[derive(Debug, Default)]
pub struct Sentence {
    info: EmbeddingInfo,
    include_prompt: bool,
    lower_case: bool,
    dense: Vec<Dense>,
    scorer: Option<Scorer>,
}

/// How a decoder scores a document for a query.
#[derive(Debug)]
pub enum Scorer {
    /// Scores by the logits of one or two tokens.
    Words(LogitScore),
    /// Scores by a layer on the last hidden state.
    Head(Linear),
}

/// A layer that is applied to pooled vectors.
#[derive(Debug)]
struct Dense {
    linear: Linear,
    activation: DenseActivation,
}

impl Sentence {
    /// Returns the default for models without sentence-transformers files: the normalized mean of
    /// the hidden states, which have `hidden` elements.
    #[must_use]
    pub fn plain(hidden: usize) -> Self {
        let mut info = EmbeddingInfo::default();
        info.dimensions = hidden;
        info.normalize = true;
        Self {
            info,
            include_prompt: true,
            lower_case: false,
            dense: Vec::new(),
            scorer: None,
        }
    }

    /// Reads the settings in a GGUF file's metadata. The field `pooling_type` has llama.cpp's
    /// values.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] for an unknown value.
    pub fn of_gguf(config: &ModelConfig) -> Result<Self> {
        let mut sentence = Self::plain(config.hidden_size);
        sentence.info.pooling = match config.uint("pooling_type", 0..=4)? {
            Some(2) => Pooling::Cls,
            Some(3) => Pooling::Last,
            // The value 0 means none, 1 the mean, and 4 a reranking score.
            _ => Pooling::Mean,
        };
        Ok(sentence)
    }

    /// Reads the settings in the files of `dir`. Layers after pooling compute in the type of
    /// `weights`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidModel`] for damaged files, or layers whose sizes do not match;
    /// [`ErrorKind::Unsupported`] for an unknown module.
    pub fn from_dir(
        dir: &Path,
        config: &ModelConfig,
        weights: &Weights,
        is_encoder: bool,
    ) -> Result<Self> {
        let settings = SentenceConfig::from_dir(dir)?;
        let mut sentence = Self::plain(config.hidden_size);
        for module in &settings.dense {
            let width = sentence.info.dimensions;
            if module.inputs != width {
                return Err(Error::new(
                    ErrorKind::InvalidModel,
                    format!(
                        "a layer for {} elements follows vectors of {width}",
                        module.inputs
                    ),
                )
                .with_path(&module.path));
            }
            sentence.info.dimensions = module.outputs;
            sentence.dense.push(dense(module, config, weights)?);
        }
        let info = &mut sentence.info;
        if let Some(pooling) = settings.pooling {
            info.pooling = pooling.parse()?;
        }
        info.normalize = settings.normalize.unwrap_or(true);
        // In a decoder without an embedding configuration, the tokenizer's limit is meant for
        // conversations, so it is ignored.
        let bounds = is_encoder || settings.normalize.is_some();
        info.max_length = settings
            .max_length
            .or(settings.tokenizer_length.filter(|_| bounds));
        info.prompts = settings.prompts;
        info.default_prompt = settings.default_prompt;
        sentence.include_prompt = settings.include_prompt;
        sentence.lower_case = settings.lower_case;
        sentence.scorer = settings.logit_score.map(Scorer::Words);
        Ok(sentence)
    }

    /// Sets a layer that scores documents, if there is one.
    #[must_use]
    pub fn with_score_layer(mut self, layer: Option<Linear>) -> Self {
        self.scorer = layer.map(Scorer::Head).or(self.scorer);
        self
    }

    /// Returns how a decoder scores documents; `None` if it is not trained to score documents.
    pub fn scorer(&self) -> Option<&Scorer> {
        self.scorer.as_ref()
    }

    /// Limits the tokens of a text to the network's maximum.
    pub fn bound(&mut self, most: Option<usize>) {
        self.info.max_length = match (self.info.max_length, most) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }

    /// The default settings for embeddings.
    pub fn info(&self) -> &EmbeddingInfo {
        &self.info
    }

    /// The pooling for a request with these options.
    pub fn pooling(&self, options: &EmbedOptions) -> Pooling {
        options.pooling.unwrap_or(self.info.pooling)
    }

    /// The maximum number of tokens of a text in a request.
    pub fn most(&self, max_length: Option<usize>) -> Option<usize> {
        match (max_length, self.info.max_length) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Returns the token ids of a prompt. Checks everything except that ids are in the vocabulary.
    ///
    /// # Errors
    /// The errors of [`inference::EmbeddingModel::embedding_tokens`].
    pub fn tokens(
        &self,
        text: &TextPipeline,
        prompt: &Prompt,
        options: &EmbedOptions,
    ) -> Result<Vec<u32>> {
        options.validate(&self.info)?;
        let most = self.most(options.max_length);
        match prompt {
            Prompt::Text(string) => {
                let prefix = self.info.prefix(&options.prompt).unwrap_or_default();
                if !prefix.is_empty() && !self.include_prompt {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        "this model leaves the prompt's tokens out of the pooling, which is not \
                         supported; use no prompt",
                    ));
                }
                let string = match self.lower_case {
                    true => string.to_lowercase(),
                    false => string.clone(),
                };
                text.encode_bounded(&format!("{prefix}{string}"), most, options.truncate)
            }
            Prompt::Tokens(ids) => match most {
                Some(most) if ids.len() > most && options.truncate => Ok(ids[..most].to_vec()),
                Some(most) if ids.len() > most => Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!(
                        "the text has {} tokens; at most {most} are read, and truncate cuts the \
                         rest",
                        ids.len()
                    ),
                )),
                _ => Ok(ids.clone()),
            },
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                "this kind of prompt is not supported",
            )),
        }
    }

    /// Applies the layers after pooling, then truncation and normalization, to pooled vectors.
    pub fn finish(&self, pooled: Vec<Vec<f32>>, options: &EmbedOptions) -> Result<Vec<Vec<f32>>> {
        let mut vectors = self.through(pooled).map_err(engine("embed"))?;
        for vector in &mut vectors {
            if let Some(n) = options.dimensions {
                vector.truncate(n);
            }
            if options.normalize.unwrap_or(self.info.normalize) {
                normalize(vector);
            }
        }
        Ok(vectors)
    }

    /// Pools the hidden states `[1, T, hidden]` of packed texts with these lengths. Returns unit
    /// vectors `[texts, dimensions]` in float32. Unlike [`Self::finish`], this function stays in
    /// MLX's graph, so that gradients flow through it.
    ///
    /// # Errors
    /// If shapes do not match.
    pub fn unit_vectors(&self, states: &Array, lengths: &[i32]) -> mlx_rs_core::Result<Array> {
        let states = states.astype(Dtype::Float32)?;
        let mut from = 0;
        let mut rows = Vec::with_capacity(lengths.len());
        for &length in lengths {
            let text = states.slice_axis(1, from, from + length)?;
            rows.push(pooled_array(&text, length, self.info.pooling)?);
            from += length;
        }
        let x = concatenate(&rows.iter().collect::<Vec<_>>(), 0)?;
        let x = self.layers(x)?;
        let square = x.square()?.sum(-1, true)?;
        // The lower bound is as in `normalize`. It also avoids the root of zero, which has no
        // gradient.
        let length = square.maximum(&square.scalar_like(1e-24)?)?.sqrt()?;
        x.divide(&length)
    }

    fn through(&self, pooled: Vec<Vec<f32>>) -> mlx_rs_core::Result<Vec<Vec<f32>>> {
        let Some(width) = pooled.first().map(Vec::len).filter(|n| *n > 0) else {
            return Ok(pooled);
        };
        if self.dense.is_empty() {
            return Ok(pooled);
        }
        let int = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let x = Array::from_slice(&pooled.concat(), &[int(pooled.len()), int(width)])?;
        let values = self.layers(x)?.to_f32_vec()?;
        let out = self.info.dimensions.max(1);
        Ok(values.chunks_exact(out).map(<[f32]>::to_vec).collect())
    }

    /// Applies the layers after pooling: `[texts, hidden] -> [texts, dimensions]`.
    fn layers(&self, mut x: Array) -> mlx_rs_core::Result<Array> {
        for Dense { linear, activation } in &self.dense {
            x = linear.forward(&x)?; // [texts, in] -> [texts, out]
            x = match activation {
                DenseActivation::Identity => x,
                DenseActivation::Tanh => x.tanh()?,
                DenseActivation::Gelu => Activation::Gelu.apply(&x)?,
                DenseActivation::Relu => Activation::Relu.apply(&x)?,
                DenseActivation::Silu => Activation::Silu.apply(&x)?,
            };
        }
        Ok(x)
    }
}

/// Loads the weights of a layer.
fn dense(module: &DenseModule, config: &ModelConfig, weights: &Weights) -> Result<Dense> {
    let size = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let checkpoint = SafetensorsCheckpoint::open(&module.path)?;
    let mut module_weights = weights.beside(checkpoint, &module.path, config);
    let (inputs, outputs) = (size(module.inputs), size(module.outputs));
    let linear = module_weights.linear("linear", inputs, outputs, module.bias)?;
    module_weights.finish()?;
    Ok(Dense {
        linear,
        activation: module.activation,
    })
}

/// Normalizes a vector to length one. A zero vector does not change.
fn normalize(vector: &mut [f32]) {
    let square: f64 = vector.iter().map(|v| f64::from(*v).powi(2)).sum();
    let factor = 1.0 / square.sqrt().max(1e-12);
    for v in vector {
        *v = (f64::from(*v) * factor) as f32;
    }
}

/// Pools the hidden states of a text, `[1, tokens, hidden] -> [1, hidden]`. Computes the same as
/// [`pooled`], but in MLX's graph.
fn pooled_array(states: &Array, tokens: i32, pooling: Pooling) -> mlx_rs_core::Result<Array> {
    let n = f64::from(tokens.max(1));
    match pooling {
        Pooling::Cls => states.slice_axis(1, 0, 1)?.squeeze_axis(1),
        Pooling::Last => states.slice_axis(1, tokens - 1, tokens)?.squeeze_axis(1),
        Pooling::Max => states.max(1, false),
        Pooling::MeanSqrtLength => {
            let sum = states.sum(1, false)?;
            sum.divide(&sum.scalar_like(n.sqrt() as f32)?)
        }
        Pooling::WeightedMean => {
            let divisor = n * (n + 1.0) / 2.0;
            let weights: Vec<f32> = (1..=tokens)
                .map(|i| (f64::from(i) / divisor) as f32)
                .collect();
            let weights = Array::vector(&weights)?.expand_dims(0)?.expand_dims(-1)?;
            states.multiply(&weights)?.sum(1, false)
        }
        _ => states.mean(1, false),
    }
}

/// Pools the hidden states of a text, `[tokens, hidden]` row-major.
#[must_use]
pub fn pooled(states: &[f32], hidden: usize, pooling: Pooling) -> Vec<f32> {
    let rows = || states.chunks_exact(hidden.max(1));
    let count = rows().len();
    let sum = |weight: &dyn Fn(usize) -> f64, divisor: f64| -> Vec<f32> {
        let mut total = vec![0.0f64; hidden];
        for (i, row) in rows().enumerate() {
            let weight = weight(i);
            for (total, v) in total.iter_mut().zip(row) {
                *total += weight * f64::from(*v);
            }
        }
        total.into_iter().map(|v| (v / divisor) as f32).collect()
    };
    let n = count as f64;
    match pooling {
        Pooling::Cls => rows().next().unwrap_or_default().to_vec(),
        Pooling::Last => rows().next_back().unwrap_or_default().to_vec(),
        Pooling::MeanSqrtLength => sum(&|_| 1.0, n.sqrt()),
        Pooling::WeightedMean => sum(&|i| (i + 1) as f64, n * (n + 1.0) / 2.0),
        Pooling::Max => {
            let mut most = vec![f32::NEG_INFINITY; hidden];
            for row in rows() {
                for (most, v) in most.iter_mut().zip(row) {
                    // `max` would drop NaN, so the comparison is explicit.
                    if v.is_nan() || *v > *most {
                        *most = *v;
                    }
                }
            }
            most
        }
        _ => sum(&|_| 1.0, n),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poolings_are_those_of_their_definitions() {
        let states = [1.0f32, -8.0, 3.0, 2.0, 5.0, 0.0, 7.0, 2.0];
        for (pooling, expected) in [
            (Pooling::Mean, [4.0, -1.0]),
            (Pooling::Last, [7.0, 2.0]),
            (Pooling::Cls, [1.0, -8.0]),
            (Pooling::Max, [7.0, 2.0]),
            (Pooling::MeanSqrtLength, [8.0, -2.0]),
            // (1 * 1 + 2 * 3 + 3 * 5 + 4 * 7) / 10
            (Pooling::WeightedMean, [5.0, 0.4]),
        ] {
            assert_eq!(pooled(&states, 2, pooling), expected, "{pooling:?}");
        }
        let array = Array::from_slice(&states, &[1, 4, 2]).unwrap();
        for (_, pooling) in Pooling::ALL {
            let got = pooled_array(&array, 4, pooling).unwrap();
            assert_eq!(got.shape(), [1, 2]);
            let got = got.to_f32_vec().unwrap();
            let expected = pooled(&states, 2, pooling);
            let off = got.iter().zip(&expected).map(|(a, b)| (a - b).abs());
            assert!(off.fold(0.0, f32::max) < 1e-5, "{pooling:?}: {got:?}");
        }
        let mut nan = states;
        nan[2] = f32::NAN;
        assert!(pooled(&nan, 2, Pooling::Max)[0].is_nan());
    }

    #[test]
    fn vectors_are_cut_before_they_are_scaled() {
        let sentence = Sentence::plain(3);
        let options = EmbedOptions::new().with_dimensions(2);
        let vectors = sentence.finish(vec![vec![3.0, 4.0, 12.0], vec![0.0; 3]], &options);
        assert_eq!(vectors.unwrap(), [[0.6, 0.8], [0.0, 0.0]]);
        let options = options.with_normalize(false);
        let vectors = sentence.finish(vec![vec![3.0, 4.0, 12.0]], &options);
        assert_eq!(vectors.unwrap(), [[3.0, 4.0]]);
    }
}
