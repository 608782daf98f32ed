//! Builds parts of blocks that only some families have.

use inference::{Error, ErrorKind, Result};

use super::build::Builder;
use crate::checkpoint::ModelConfig;
use crate::checkpoint::config::limits;
use crate::error::engine;
use crate::nn::{Activation, FeedForward, HeadNorms, Linear, Mlp, Norm};

/// Returns an error if the configuration enables an unsupported feature.
///
/// # Errors
/// [`ErrorKind::Unsupported`] unless the field `name` is missing, null or false.
pub fn refuse(config: &ModelConfig, name: &str) -> Result<()> {
    match config.fields.get(name) {
        None | Some(serde_json::Value::Null | serde_json::Value::Bool(false)) => Ok(()),
        Some(_) => Err(Error::new(
            ErrorKind::Unsupported,
            format!("the configuration sets {name}, which is not supported"),
        )),
    }
}

impl Builder<'_> {
    /// Loads queries, keys and values from one matrix. It combines groups of heads: the query heads
    /// of a key head, the key head, and its value head. The rows are reordered when they are
    /// loaded, so adapters are not supported.
    pub fn grouped_qkv(&mut self, prefix: &str, bias: bool) -> Result<[Linear; 3]> {
        let dims = self.dims;
        let repeats = dims.n_heads / dims.n_kv_heads;
        let total = (dims.n_heads + 2 * dims.n_kv_heads) * dims.head_dim;
        let weight = self.weights.matrix(prefix, total, dims.hidden)?;
        let bias = match bias {
            true => Some(self.weights.vector(&format!("{prefix}.bias"), total)?),
            false => None,
        };
        let part = |b: &Self, first: i32, count: i32| -> Result<Linear> {
            let heads = (0..dims.n_kv_heads).flat_map(|group| {
                let start = group * (repeats + 2) + first;
                start..start + count
            });
            let rows: Vec<u32> = heads
                .flat_map(|head| head * dims.head_dim..(head + 1) * dims.head_dim)
                .map(i32::unsigned_abs)
                .collect();
            let weight = weight.picked(&rows).map_err(engine("weights"))?;
            let bias = bias
                .as_ref()
                .map(|bias| bias.take_ids(&rows, 0))
                .transpose();
            b.weights.layer(weight, bias.map_err(engine("weights"))?)
        };
        Ok([
            part(self, 0, repeats)?,
            part(self, repeats, 1)?,
            part(self, repeats + 1, 1)?,
        ])
    }

    /// Loads the norms `q_norm` and `k_norm`. The first spans all query heads, the second all key
    /// heads.
    pub fn wide_head_norms(&mut self, prefix: &str) -> Result<HeadNorms> {
        let dims = self.dims;
        let group = self.weights.group();
        let mut norm = |part: &str, width: i32| {
            let prefix = format!("{prefix}.{part}");
            match group {
                Some(group) => Ok(Norm::Divided {
                    weight: self.weights.vector(&format!("{prefix}.weight"), width)?,
                    eps: dims.eps,
                    group,
                }),
                None => self.norm(&prefix, width),
            }
        };
        Ok(HeadNorms {
            q: Some(norm("q_norm", dims.n_heads * dims.head_dim)?),
            k: Some(norm("k_norm", dims.n_kv_heads * dims.head_dim)?),
            across_heads: true,
            ..HeadNorms::default()
        })
    }

    /// Loads a feed-forward block of two matrices, `up_proj` and `down_proj`.
    pub fn plain_mlp(
        &mut self,
        prefix: &str,
        activation: Activation,
        bias: bool,
    ) -> Result<FeedForward> {
        let (hidden, width) = (self.dims.hidden, self.dims.intermediate);
        Ok(FeedForward::Plain(Mlp {
            up: self.linear(&format!("{prefix}.up_proj"), hidden, width, bias)?,
            down: self.linear(&format!("{prefix}.down_proj"), width, hidden, bias)?,
            activation,
        }))
    }

    /// Ignores the layers for multi-token prediction. Their indices follow those of all other
    /// layers.
    ///
    /// # Errors
    /// If the configured number of such layers is too large.
    pub fn ignore_predicting_layers(&mut self) -> Result<()> {
        let layers = self.config.num_hidden_layers;
        let more = self
            .config
            .uint("num_nextn_predict_layers", 0..=limits::LAYERS)?;
        for layer in layers..layers + more.unwrap_or(0) {
            self.weights.ignore(&format!("model.layers.{layer}"));
        }
        Ok(())
    }
}
