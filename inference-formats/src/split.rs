//! Divides the tensors of a model among processes that compute each layer together (tensor
//! parallelism, Shoeybi et al. 2019). Attention heads and the feed-forward width are divided. A
//! projection into a divided part keeps some of its outputs. A projection out of a divided part
//! keeps some of its inputs, and the sum over all processes is the layer's output. Embeddings,
//! norms, routers and the output head are complete in each process.
//!
//! This module handles only names and sizes. An engine reads the parts, and a report shows them.

use std::ops::Range;

use serde::Serialize;

use crate::config::ModelConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::family::TensorParallel;
use crate::footprint::{Footprint, Part};

/// The maximum number of processes.
const MAX_PROCESSES: usize = 1 << 10;

/// A quantized matrix may be cut only at multiples of this number, the smallest group of MLX.
const LEAST_GROUP: usize = 32;

/// The division of one model among some processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSplit {
    processes: usize,
    heads: usize,
    kv_heads: usize,
    parallel: TensorParallel,
}

/// The range of a tensor that one process keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// The axis that is divided.
    pub axis: usize,
    /// The length of that axis in the whole tensor.
    pub length: usize,
    /// The ranges that are kept, in order.
    pub ranges: Vec<Range<usize>>,
}

/// The share of a tensor that a process has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Share {
    /// The whole tensor.
    Whole,
    /// Some outputs: rows of the matrix, and elements of the bias.
    Outputs,
    /// Some inputs: columns of the matrix. The results are summed over all processes.
    Inputs,
    /// A bias that is added after such a sum, so only one process may add it.
    Once,
}

/// The unit in which an axis is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Queries,
    Keys,
    Width,
}

/// Where a tensor is cut. If the axis is `stacked`, it consists of several parts in sequence, and
/// each part is cut.
#[derive(Debug, Clone, Copy)]
struct Rule {
    share: Share,
    units: &'static [Unit],
    /// The axis, counted from the last one, which is 1.
    from_end: usize,
}

impl TensorSplit {
    /// The division of a model among `processes`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a family that cannot be divided, and when a size in the
    /// configuration, which the message names, is not divisible.
    pub fn new(config: &ModelConfig, processes: usize) -> Result<Self> {
        let fault = |message: String| Err(Error::new(ErrorKind::Unsupported, message));
        if !(1..=MAX_PROCESSES).contains(&processes) {
            return fault(format!(
                "a model is divided among 1 to {MAX_PROCESSES} processes, not {processes}"
            ));
        }
        // A model without a `model_type` is read like llama.
        let parallel = match config.family() {
            Some(family) => family.tensor_parallel,
            None => TensorParallel::Heads,
        };
        if parallel == TensorParallel::No {
            let name = config.model_type.as_deref().unwrap_or_default();
            return fault(format!(
                "models of type {name:?} cannot be divided among processes yet"
            ));
        }
        let split = Self {
            processes,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            parallel,
        };
        split.part_of("num_attention_heads", split.heads)?;
        let (kv, n) = (split.kv_heads, processes);
        if kv % n != 0 && (kv == 0 || n % kv != 0) {
            return fault(format!(
                "num_key_value_heads is {kv}, which neither divides among {n} processes nor \
                 divides their number"
            ));
        }
        // A group of query heads is not cut.
        if parallel == TensorParallel::Grouped && kv > 1 {
            split.part_of("num_key_value_heads", kv)?;
        }
        split.part_of("intermediate_size", config.intermediate_size)?;
        for name in ["moe_intermediate_size", "shared_expert_intermediate_size"] {
            if let Some(width) = config.uint(name, 1..=usize::MAX)? {
                split.part_of(name, width)?;
            }
        }
        Ok(split)
    }

    /// The division of a GGUF file of the model. Its matrices of queries, keys and values are never
    /// grouped by key heads.
    #[must_use]
    pub fn of_gguf(mut self) -> Self {
        if self.parallel == TensorParallel::Grouped {
            self.parallel = TensorParallel::Heads;
        }
        self
    }

    /// The number of processes.
    #[must_use]
    pub fn processes(&self) -> usize {
        self.processes
    }

    /// Query heads of one process.
    #[must_use]
    pub fn heads(&self) -> usize {
        self.heads / self.processes
    }

    /// Number of key and value heads of one process, at least one. With more processes than heads,
    /// several processes have a copy of one head.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        (self.kv_heads / self.processes).max(1)
    }

    /// The number that one process gets of `length` equal units. Error messages call the units
    /// `name`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when `length` is not divisible.
    pub fn part_of(&self, name: &str, length: usize) -> Result<usize> {
        if length.is_multiple_of(self.processes) {
            return Ok(length / self.processes);
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{name} is {length}, which does not divide among {} processes",
                self.processes
            ),
        ))
    }

    /// The share that a process has of the tensor with this name in transformers.
    #[must_use]
    pub fn share(&self, name: &str) -> Share {
        self.rule(name).map_or(Share::Whole, |rule| rule.share)
    }

    /// The window that `rank` keeps of the tensor `name`; `part` is the shape of that window.
    /// `None` for the whole tensor.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a shape that no part can have.
    pub fn window(&self, rank: usize, name: &str, part: &[usize]) -> Result<Option<Window>> {
        self.window_of(rank, name, part, |from_end| from_end)
    }

    /// As [`Self::window`], for a matrix, or a stack of matrices, that is stored as `[.., inputs,
    /// outputs]`.
    ///
    /// # Errors
    /// As [`Self::window`].
    pub fn turned_window(&self, rank: usize, name: &str, part: &[usize]) -> Result<Option<Window>> {
        self.window_of(rank, name, part, |from_end| match from_end {
            1 => 2,
            2 => 1,
            other => other,
        })
    }

    /// The window of a tensor. `axis` receives the usual axis, counted from the last one, which is
    /// 1, and returns the stored axis.
    fn window_of(
        &self,
        rank: usize,
        name: &str,
        part: &[usize],
        axis: impl Fn(usize) -> usize,
    ) -> Result<Option<Window>> {
        let Some(rule) = self.rule(name).filter(|r| r.share != Share::Once) else {
            return Ok(None);
        };
        let fault = || {
            Error::new(
                ErrorKind::Invalid,
                format!(
                    "a part of shape {part:?} does not fit a {} divided among {} processes",
                    "tensor", self.processes
                ),
            )
            .with_tensor(name)
        };
        let axis = part
            .len()
            .checked_sub(axis(rule.from_end))
            .ok_or_else(fault)?;
        let mine: usize = rule.units.iter().map(|unit| self.counts(*unit).1).sum();
        let length = part.get(axis).copied().unwrap_or(0);
        if length == 0 || mine == 0 || !length.is_multiple_of(mine) {
            return Err(fault());
        }
        let unit = length / mine;
        let mut start = 0usize;
        let mut ranges: Vec<Range<usize>> = Vec::with_capacity(rule.units.len());
        for kind in rule.units {
            let (all, size) = self.counts(*kind);
            let first = start + self.first(*kind, rank) * unit;
            ranges.push(first..first + size * unit);
            start += all * unit;
        }
        Ok(Some(Window {
            axis,
            length: start,
            ranges,
        }))
    }

    /// The total number of a unit, and the number that a process keeps.
    fn counts(&self, unit: Unit) -> (usize, usize) {
        match unit {
            Unit::Queries => (self.heads, self.heads()),
            Unit::Keys => (self.kv_heads, self.kv_heads()),
            Unit::Width => (self.processes, 1),
        }
    }

    /// The index of the first unit that `rank` keeps.
    fn first(&self, unit: Unit, rank: usize) -> usize {
        match unit {
            Unit::Queries => rank * self.heads(),
            // With more processes than heads, processes with adjacent ranks share a head.
            Unit::Keys => rank * self.kv_heads / self.processes,
            Unit::Width => rank,
        }
    }

    fn rule(&self, name: &str) -> Option<Rule> {
        if self.processes == 1 {
            return None;
        }
        let mut parts = name.rsplit('.');
        let last = parts.next()?;
        let (layer, part) = match last {
            "weight" | "scales" | "biases" | "bias" => (parts.next()?, last),
            // In the names of expert stacks, this suffix is missing or follows a `_`.
            _ => match last.rsplit_once("proj_") {
                Some((layer, part)) => (&last[..layer.len() + 4], part),
                None => (last, ""),
            },
        };
        let alternating = self.parallel == TensorParallel::Alternating;
        let attends = matches!(parts.next(), Some("self_attn" | "attention" | "attn"));
        let (inputs, units): (bool, &'static [Unit]) = match layer {
            "q_proj" | "sinks" => (false, &[Unit::Queries]),
            "k_proj" | "v_proj" => (false, &[Unit::Keys]),
            "o_proj" => (true, &[Unit::Queries]),
            "out_proj" | "dense" | "c_proj" if attends => (true, &[Unit::Queries]),
            // Each key head and its value head follow their query heads.
            "qkv_proj" if self.parallel == TensorParallel::Grouped && self.kv_heads > 1 => {
                (false, &[Unit::Keys])
            }
            "qkv_proj" | "c_attn" => (false, &[Unit::Queries, Unit::Keys, Unit::Keys]),
            // Latent attention: the heads are computed from short vectors that are whole.
            "q_b_proj" | "kv_b_proj" | "embed_q" | "unembed_out" => (false, &[Unit::Queries]),
            "q_norm" if self.parallel == TensorParallel::HeadsAndNorms => (false, &[Unit::Queries]),
            "k_norm" if self.parallel == TensorParallel::HeadsAndNorms => (false, &[Unit::Keys]),
            "gate_proj" | "up_proj" | "w1" | "w3" | "c_fc" | "fc1" => (false, &[Unit::Width]),
            "down_proj" | "w2" | "c_proj" | "fc2" | "output_linear" => (true, &[Unit::Width]),
            // Rows of gate and up alternate, so a range of all rows is a range of each.
            "gate_up_proj" if alternating => (false, &[Unit::Width]),
            "gate_up_proj" | "input_linear" => (false, &[Unit::Width, Unit::Width]),
            _ => return None,
        };
        let vector = matches!(layer, "sinks" | "q_norm" | "k_norm");
        // Three axes. The first one is the heads.
        let stacked_heads = matches!(layer, "embed_q" | "unembed_out");
        let (share, from_end) = match (part, inputs) {
            ("bias", true) => (Share::Once, 1),
            ("bias", false) => (Share::Outputs, 1),
            // Four axes: experts, outputs, groups, bytes of a group.
            ("blocks", true) => (Share::Inputs, 2),
            ("blocks", false) => (Share::Outputs, 3),
            // Stored as `[experts, in, out]`.
            ("", true) if alternating => (Share::Inputs, 2),
            (_, false) if vector => (Share::Outputs, 1),
            (_, false) if stacked_heads => (Share::Outputs, 3),
            ("", false) if alternating => (Share::Outputs, 1),
            (_, true) => (Share::Inputs, 1),
            (_, false) => (Share::Outputs, 2),
        };
        Some(Rule {
            share,
            units,
            from_end,
        })
    }
}

/// The share of each process of a divided model, from the headers of the model's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SplitPlan {
    /// The number of processes.
    pub processes: usize,
    /// Bytes of weights in the memory of each process.
    pub bytes_per_process: u64,
    /// Bytes of weights in the memory of one process that has the whole model.
    pub bytes_whole: u64,
    /// Query heads of each process.
    pub heads: usize,
    /// Key and value heads of each process.
    pub kv_heads: usize,
    /// The tensors that are loaded, sorted by name.
    pub tensors: Vec<PlannedTensor>,
}

/// A tensor of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedTensor {
    /// The tensor's name in transformers.
    pub name: String,
    /// The share that each process has.
    pub share: Share,
    /// The part of the network that it belongs to.
    #[serde(skip)]
    pub part: Part,
    /// Bytes in memory of the whole tensor.
    pub bytes_whole: u64,
    /// Bytes in memory of each process.
    pub bytes_per_process: u64,
}

impl SplitPlan {
    /// The plan for a model of these tensors.
    ///
    /// # Errors
    /// As [`TensorSplit::new`].
    pub fn new(config: &ModelConfig, footprint: &Footprint, processes: usize) -> Result<Self> {
        let split = TensorSplit::new(config, processes)?;
        if config.quantization.is_some() {
            let head_dim = config
                .head_dim
                .unwrap_or(config.hidden_size / config.num_attention_heads.max(1));
            let outputs = split.heads() * head_dim;
            let width = split.part_of("intermediate_size", config.intermediate_size)?;
            check_cut("the outputs of a process's heads", outputs)?;
            check_cut("a process's part of intermediate_size", width)?;
        }
        let mut tensors: Vec<PlannedTensor> = footprint
            .tensors()
            .iter()
            .filter(|t| t.loaded_bytes > 0)
            .map(|t| {
                let (all, numerator) = match split.rule(&t.name).filter(|r| r.share != Share::Once)
                {
                    Some(rule) => rule.units.iter().fold((0, 0), |(all, numerator), unit| {
                        let (a, k) = split.counts(*unit);
                        (all + a as u64, numerator + k as u64)
                    }),
                    None => (1, 1),
                };
                PlannedTensor {
                    name: t.name.clone(),
                    share: split.share(&t.name),
                    part: t.part,
                    bytes_whole: t.loaded_bytes,
                    bytes_per_process: (t.loaded_bytes / all.max(1)).saturating_mul(numerator),
                }
            })
            .collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let sum =
            |of: fn(&PlannedTensor) -> u64| tensors.iter().map(of).fold(0, u64::saturating_add);
        Ok(Self {
            processes,
            bytes_per_process: sum(|t| t.bytes_per_process),
            bytes_whole: sum(|t| t.bytes_whole),
            heads: split.heads(),
            kv_heads: split.kv_heads(),
            tensors,
        })
    }
}

/// Rejects a number of columns of a quantized matrix that is not a multiple of the group.
fn check_cut(what: &str, columns: usize) -> Result<()> {
    if columns.is_multiple_of(LEAST_GROUP) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!("{what} are {columns} inputs, which do not divide into groups of {LEAST_GROUP}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> ModelConfig {
        let mut all: serde_json::Map<_, _> = serde_json::from_str(
            r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 40,
                "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2,
                "head_dim": 8}"#,
        )
        .unwrap();
        let fields: serde_json::Map<_, _> = serde_json::from_str(text).unwrap();
        all.extend(fields);
        ModelConfig::from_map(all).unwrap()
    }

    /// The parts of all ranks, in order, must form the whole tensor. Heads that several ranks share
    /// are an exception.
    #[test]
    fn parts_make_up_the_whole() {
        for (name, part, length) in [
            ("model.layers.0.self_attn.q_proj.weight", vec![32, 64], 64),
            ("model.layers.0.self_attn.k_proj.weight", vec![8, 64], 16),
            ("model.layers.0.self_attn.k_proj.bias", vec![8], 16),
            ("model.layers.0.self_attn.o_proj.weight", vec![64, 32], 64),
            ("model.layers.0.mlp.up_proj.weight", vec![24, 64], 48),
            ("model.layers.0.mlp.down_proj.scales", vec![64, 3], 6),
            ("m.block_sparse_moe.experts.3.w2.weight", vec![64, 24], 48),
            ("m.mlp.switch_mlp.gate_proj.weight", vec![4, 24, 64], 48),
            ("m.mlp.experts.down_proj", vec![4, 64, 24], 48),
        ] {
            let split = TensorSplit::new(&config("{}"), 2).unwrap();
            let windows = [0, 1].map(|rank| split.window(rank, name, &part).unwrap().unwrap());
            assert_eq!(
                [windows[0].length, windows[1].length],
                [length; 2],
                "{name}"
            );
            let all: Vec<usize> = windows
                .iter()
                .flat_map(|w| w.ranges.clone())
                .flatten()
                .collect();
            assert_eq!(all, (0..length).collect::<Vec<_>>(), "{name}");
        }
    }

    #[test]
    fn parts_that_are_stored_together_are_cut_each() {
        let split = TensorSplit::new(&config("{}"), 2).unwrap();
        let window = |name: &str, part: &[usize]| split.window(1, name, part).unwrap().unwrap();
        // The fused matrix has 64 rows of queries, 16 of keys and 16 of values.
        let qkv = window("model.layers.0.self_attn.qkv_proj.weight", &[48, 64]);
        assert_eq!((qkv.axis, qkv.length), (0, 96));
        assert_eq!(qkv.ranges, [32..64, 72..80, 88..96]);
        let both = window("m.mlp.experts.gate_up_proj", &[4, 48, 64]);
        assert_eq!((both.axis, both.length), (1, 96));
        assert_eq!(both.ranges, [24..48, 72..96]);
    }

    #[test]
    fn other_layouts_are_cut_where_heads_end() {
        let of = |kind: &str| {
            let text = format!(r#"{{"model_type": "{kind}"}}"#);
            TensorSplit::new(&config(&text), 2).unwrap()
        };
        let second = |split: &TensorSplit, name: &str, part: &[usize]| {
            let window = split.window(1, name, part).unwrap().unwrap();
            (window.axis, window.length, window.ranges)
        };
        // Two groups of four query heads, a key head and a value head.
        let qkv = "model.layers.0.self_attn.qkv_proj.weight";
        let grouped = of("internlm2");
        assert_eq!(second(&grouped, qkv, &[48, 64]), (0, 96, vec![48..96; 1]));
        let stacked = second(&grouped.of_gguf(), qkv, &[48, 64]);
        assert_eq!(stacked, (0, 96, vec![32..64, 72..80, 88..96]));
        let norm = "model.layers.0.self_attn.q_norm.weight";
        assert_eq!(second(&of("olmo2"), norm, &[32]), (0, 64, vec![32..64; 1]));
        assert_eq!(of("qwen3").share(norm), Share::Whole);
        let latent = "model.layers.0.self_attn.embed_q.weight";
        let heads = second(&of("glm4_moe_lite"), latent, &[4, 12, 10]);
        assert_eq!(heads, (0, 8, vec![4..8; 1]));
        // GPT-2 stores `[in, out]`.
        let split = of("gpt2");
        let turned = |name: &str, part: &[usize]| {
            let window = split.turned_window(1, name, part).unwrap().unwrap();
            (window.axis, window.length, window.ranges)
        };
        let all = turned("h.0.attn.c_attn.weight", &[64, 96]);
        assert_eq!(all.0, 1);
        assert_eq!(
            turned("h.0.attn.c_proj.weight", &[32, 64]),
            (0, 64, vec![32..64; 1])
        );
        assert_eq!(
            turned("h.0.mlp.c_proj.weight", &[24, 64]),
            (0, 48, vec![24..48; 1])
        );
    }

    #[test]
    fn more_processes_than_heads_of_keys_share_them() {
        let split = TensorSplit::new(&config("{}"), 8).unwrap();
        assert_eq!((split.heads(), split.kv_heads()), (1, 1));
        let name = "model.layers.0.self_attn.v_proj.weight";
        let first = |rank| split.window(rank, name, &[8, 64]).unwrap().unwrap().ranges[0].start;
        let all: Vec<usize> = (0..8).map(first).collect();
        assert_eq!(all, [0, 0, 0, 0, 8, 8, 8, 8]);
    }

    #[test]
    fn alternating_rows_are_cut_together() {
        let split = TensorSplit::new(&config(r#"{"model_type": "gpt_oss"}"#), 2).unwrap();
        let window = |name: &str, part: &[usize]| {
            let window = split.window(1, name, part).unwrap();
            window.map(|w| (w.axis, w.length, w.ranges))
        };
        let at = |name: &str| format!("model.layers.0.mlp.experts.{name}");
        for (name, part, axis, length) in [
            ("gate_up_proj", vec![4, 64, 48], 2, 96),
            ("gate_up_proj_bias", vec![4, 48], 1, 96),
            ("gate_up_proj_blocks", vec![4, 48, 2, 16], 1, 96),
            ("gate_up_proj_scales", vec![4, 48, 2], 1, 96),
            ("down_proj", vec![4, 24, 64], 1, 48),
            ("down_proj_blocks", vec![4, 64, 3, 16], 2, 6),
            ("down_proj_scales", vec![4, 64, 3], 2, 6),
        ] {
            let half = length / 2..length;
            let actual = window(&at(name), &part);
            assert_eq!(actual, Some((axis, length, vec![half])), "{name}");
        }
        assert_eq!(window(&at("down_proj_bias"), &[4, 64]), None);
        assert_eq!(split.share(&at("down_proj_bias")), Share::Once);
        let sinks = window("model.layers.0.self_attn.sinks", &[4]);
        assert_eq!(sinks, Some((0, 8, vec![4..8; 1])));
    }

    #[test]
    fn what_is_not_divided_is_whole() {
        let split = TensorSplit::new(&config("{}"), 2).unwrap();
        for name in [
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.norm.weight",
            "model.layers.0.self_attn.q_norm.weight",
            "model.layers.0.mlp.gate.weight",
            "model.layers.0.mlp.shared_expert_gate.weight",
        ] {
            assert_eq!(split.share(name), Share::Whole, "{name}");
        }
        assert_eq!(split.share("m.o_proj.bias"), Share::Once);
    }

    #[test]
    fn what_does_not_divide_is_named() {
        let refusal = |text: &str, n| TensorSplit::new(&config(text), n).unwrap_err();
        for (text, n, named) in [
            ("{}", 3, "num_attention_heads is 8"),
            ("{}", 0, "1 to"),
            (r#"{"intermediate_size": 49}"#, 2, "intermediate_size is 49"),
            (
                r#"{"moe_intermediate_size": 7}"#,
                2,
                "moe_intermediate_size is 7",
            ),
            (
                r#"{"num_attention_heads": 24, "num_key_value_heads": 4}"#,
                6,
                "num_key_value_heads is 4",
            ),
            (r#"{"model_type": "xlstm"}"#, 2, "xlstm"),
            (
                r#"{"model_type": "gpt_neox"}"#,
                4,
                "num_key_value_heads is 2",
            ),
        ] {
            let error = refusal(text, n);
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains(named), "{error}");
        }
    }
}
