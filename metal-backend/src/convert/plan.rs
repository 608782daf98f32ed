//! Plans the work for each tensor before any data is read. Sizes and positions are then known.

use std::collections::{BTreeMap, HashMap, HashSet};

use inference::{Error, ErrorKind, Result};
use mlx_rs_core::QuantMode;
use safetensors::Dtype;
use serde_json::{Map, Value};

use super::faults::wrong;
use super::float_type::FloatType;
use super::given::Given;
use super::options::ConvertOptions;
use super::rules::{self, Chooser, Format, base_format};
use super::scales;
use super::source::Source;
use super::stored::StoredQuantization;
use super::tensor::{Stored, Tensor};
use crate::checkpoint::Family;
use crate::checkpoint::family::JoinedExperts;

/// A tensor of the output.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Out {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl Out {
    /// The size in bytes.
    pub(super) fn nbytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * (self.dtype.bitsize() / 8) as u64
    }
}

/// How a tensor's rows are converted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Work {
    /// Copies the bytes unchanged.
    Copy,
    /// Casts to another type.
    Cast(FloatType),
    /// Quantizes to a format, with scales and biases of this type.
    Quantize(Format, FloatType),
    /// Converts GGUF blocks to MLX's layout without changing values.
    Repack(FloatType),
    /// Dequantizes packed integers. Scales and biases are the second and third input.
    Dequantize(Format, FloatType),
}

/// One or more input tensors, and the output tensors made from them.
#[derive(Debug, Clone)]
pub(super) struct Item {
    /// The indices of the inputs: one tensor, the members of a stack, or the three parts of a
    /// [`Work::Dequantize`].
    pub parts: Vec<usize>,
    pub work: Work,
    /// Whether the input is stored transposed.
    pub transposed: bool,
    pub outs: Vec<Out>,
}

/// All tensors that the conversion writes.
pub(super) struct Plan {
    pub items: Vec<Item>,
    /// The quantization entry of `config.json`; `None` removes an existing entry.
    pub quantization: Option<Map<String, Value>>,
    pub dtype: Option<FloatType>,
    pub parameters: u64,
    pub quantized: usize,
    pub notes: Vec<String>,
}

impl Plan {
    pub(super) fn bytes(&self) -> u64 {
        self.items
            .iter()
            .flat_map(|i| &i.outs)
            .map(Out::nbytes)
            .sum()
    }

    pub(super) fn new(source: &Source, options: &ConvertOptions, given: &Given) -> Result<Self> {
        let stored = StoredQuantization::read(source)?;
        let Some(quantize) = options.quantize.as_ref().filter(|_| stored.is_quantized) else {
            return Planner::new(source, options, stored, given)?.run();
        };
        let wanted = base_format(quantize)?;
        if quantize.recipe.is_some() || stored.base() != Some(wanted) {
            let have = stored
                .base()
                .map_or_else(String::new, |f| format!(" ({})", f.told()));
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "the model is quantized already{have}; quantizing again would round twice: convert the \
                     original, or --dequantize it first"
                ),
            ));
        }
        let mut as_it_is = options.clone();
        as_it_is.quantize = None;
        let mut plan = Planner::new(source, &as_it_is, stored, given)?.run()?;
        plan.notes.push(format!(
            "the model already has this quantization ({}); its packed weights are unchanged",
            wanted.told()
        ));
        Ok(plan)
    }
}

struct Planner<'a> {
    source: &'a Source,
    options: &'a ConvertOptions,
    given: &'a Given,
    stored: StoredQuantization,
    chooser: Option<Chooser>,
    by_name: HashMap<&'a str, usize>,
    family: Option<&'static Family>,
    tied: bool,
    formats: BTreeMap<String, Format>,
    counts: HashMap<Format, u64>,
    dense_blocks: u64,
    /// The number of matrices whose GGUF blocks are dequantized and quantized again, by block type.
    requantized: BTreeMap<String, usize>,
    dropped: usize,
    /// Stacks of experts in a form that cannot be quantized, so they are written dense.
    dense_experts: Vec<String>,
    items: Vec<Item>,
    parameters: u64,
}

impl<'a> Planner<'a> {
    fn new(
        source: &'a Source,
        options: &'a ConvertOptions,
        stored: StoredQuantization,
        given: &'a Given,
    ) -> Result<Self> {
        let layers = source
            .tensors
            .iter()
            .filter_map(|t| rules::layer_of(&t.name))
            .max();
        let layers = layers.map_or(0, |last| last.saturating_add(1));
        let chooser = match &options.quantize {
            Some(quantize) => Some(Chooser::new(quantize, layers)?),
            None => None,
        };
        let field = |name: &str| {
            let text = source.config.get("text_config").and_then(|t| t.get(name));
            source.config.get(name).or(text)
        };
        Ok(Self {
            source,
            options,
            given,
            stored,
            chooser,
            by_name: source
                .tensors
                .iter()
                .enumerate()
                .map(|(i, t)| (t.name.as_str(), i))
                .collect(),
            family: field("model_type")
                .and_then(Value::as_str)
                .and_then(Family::of),
            tied: field("tie_word_embeddings").and_then(Value::as_bool) == Some(true),
            formats: BTreeMap::new(),
            counts: HashMap::new(),
            dense_blocks: 0,
            requantized: BTreeMap::new(),
            dropped: 0,
            dense_experts: Vec::new(),
            items: Vec::new(),
            parameters: 0,
        })
    }

    fn run(mut self) -> Result<Plan> {
        let names = self.source.tensors.iter().map(|t| t.name.as_str());
        // For these families, mlx-lm does not stack experts.
        let stacks = match self.family.map(|family| family.joined_experts) {
            Some(JoinedExperts::Rows { .. }) => BTreeMap::new(),
            _ => rules::stacks(names),
        };
        let stacked: HashSet<&str> = stacks.values().flatten().copied().collect();
        for (name, members) in &stacks {
            let parts: Vec<usize> = members
                .iter()
                .filter_map(|m| self.by_name.get(m).copied())
                .collect();
            self.add_stack(name, parts)?;
        }
        for index in 0..self.source.tensors.len() {
            let tensor = &self.source.tensors[index];
            if stacked.contains(tensor.name.as_str()) {
                continue;
            }
            if rules::is_dropped(&tensor.name, self.tied) {
                self.dropped += 1;
                continue;
            }
            self.add(index)?;
        }
        self.items.sort_by(|a, b| order(a).cmp(&order(b)));
        let mut seen = HashSet::new();
        for out in self.items.iter().flat_map(|i| &i.outs) {
            if !seen.insert(out.name.as_str()) {
                return Err(wrong(
                    &self.source.path,
                    &out.name,
                    "two tensors would get this name",
                ));
            }
        }
        self.finish()
    }

    fn add_stack(&mut self, name: &str, parts: Vec<usize>) -> Result<()> {
        let tensors = &self.source.tensors;
        let Some(first) = parts.first().and_then(|p| tensors.get(*p)) else {
            return Ok(());
        };
        if let Some(other) = parts
            .iter()
            .map(|p| &tensors[*p])
            .find(|t| t.shape != first.shape || t.dtype != first.dtype)
        {
            return Err(wrong(
                &self.source.path,
                &other.name,
                "differs in shape or type from the first expert's",
            ));
        }
        let mut shape = vec![parts.len()];
        shape.extend(&first.shape);
        let first = first.clone();
        self.place(name, shape, &first, parts, false)
    }

    fn add(&mut self, index: usize) -> Result<()> {
        let tensor = self.source.tensors[index].clone();
        let (path, part) = tensor.name.rsplit_once('.').unwrap_or(("", &tensor.name));
        let packed = |path: &str| {
            self.by_name.contains_key(format!("{path}.scales").as_str())
                && self
                    .by_name
                    .get(format!("{path}.weight").as_str())
                    .is_some_and(|w| self.source.tensors[*w].dtype == Dtype::U32)
        };
        if packed(path) && matches!(part, "weight" | "scales" | "biases") {
            return match (part, self.options.dequantize) {
                ("weight", true) => self.add_dequantized(path, index),
                (_, true) => Ok(()), // converted together with the weight
                ("weight", false) => self.keep_packed(path, index, &tensor),
                _ => self.keep(index, &tensor),
            };
        }
        let name = match self.family {
            Some(family) => family.converted_name(&tensor.name),
            None => Some(tensor.name.clone()),
        };
        let Some(name) = name else {
            self.dropped += 1;
            return Ok(());
        };
        let transposed = self.family.is_some_and(|f| f.is_transposed(&tensor.name))
            && tensor.shape.len() == 2
            && tensor.float().is_some();
        let mut shape = tensor.shape.clone();
        if transposed {
            shape.reverse();
        }
        self.place(&name, shape, &tensor, vec![index], transposed)
    }

    /// Plans the weight of a quantized matrix that stays quantized.
    fn keep_packed(&mut self, path: &str, index: usize, tensor: &Tensor) -> Result<()> {
        let weights = self.stored.of(path).map_or(0, |format| {
            (elements(&tensor.shape) * 32)
                .checked_div(format.bits.unsigned_abs().into())
                .unwrap_or(0)
        });
        self.items.push(Item {
            parts: vec![index],
            work: Work::Copy,
            transposed: false,
            outs: vec![Out {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
            }],
        });
        self.parameters += weights;
        if let Some(format) = self.stored.of(path) {
            *self.counts.entry(format).or_default() += 1;
        }
        Ok(())
    }

    /// Plans the scales or biases of a quantized matrix that stays quantized.
    fn keep(&mut self, index: usize, tensor: &Tensor) -> Result<()> {
        let to = self.options.dtype.filter(|_| tensor.float().is_some());
        let dtype = to.map_or(tensor.dtype, file_type);
        self.items.push(Item {
            parts: vec![index],
            work: to.map_or(Work::Copy, Work::Cast),
            transposed: false,
            outs: vec![Out {
                name: tensor.name.clone(),
                dtype,
                shape: tensor.shape.clone(),
            }],
        });
        Ok(())
    }

    fn add_dequantized(&mut self, path: &str, weight: usize) -> Result<()> {
        let tensors = &self.source.tensors;
        let name = format!("{path}.weight");
        let bad = |message: &str| wrong(&self.source.path, &name, message);
        let format = self
            .stored
            .of(path)
            .ok_or_else(|| bad("config.json does not say how it is quantized"))?;
        let part = |part: &str| self.by_name.get(format!("{path}.{part}").as_str()).copied();
        let scales = part("scales").ok_or_else(|| bad("has no scales"))?;
        let biases = part("biases");
        if (format.mode == QuantMode::Affine) != biases.is_some() {
            return Err(bad(
                "the mode affine needs biases, and no other mode has them",
            ));
        }
        let shape = &tensors[weight].shape;
        let words = shape.last().copied().unwrap_or(0);
        let cols = (words * 32)
            .checked_div(format.bits.unsigned_abs() as usize)
            .unwrap_or(0);
        let groups = tensors[scales].shape.last().copied().unwrap_or(0);
        let alike =
            |a: &[usize], b: &[usize]| a.split_last().map(|x| x.1) == b.split_last().map(|x| x.1);
        let fits = groups.checked_mul(format.group_size.unsigned_abs() as usize) == Some(cols)
            && alike(shape, &tensors[scales].shape)
            && biases.is_none_or(|b| {
                tensors[b].shape == tensors[scales].shape
                    && tensors[b].dtype == tensors[scales].dtype
            })
            && shape.len() >= 2;
        if !fits {
            return Err(bad(
                "its parts do not match each other or the quantization in config.json",
            ));
        }
        let stored = tensors[scales].float();
        if format.mode == QuantMode::Affine && stored.is_none() {
            return Err(bad("its scales are not F32, F16 or BF16"));
        }
        let to = self.options.dtype.or(stored).unwrap_or(FloatType::BF16);
        let mut shape = shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = cols;
        }
        self.parameters += elements(&shape);
        let parts = std::iter::once(weight)
            .chain([scales])
            .chain(biases)
            .collect();
        self.items.push(Item {
            parts,
            work: Work::Dequantize(format, to),
            transposed: false,
            outs: vec![Out {
                name,
                dtype: file_type(to),
                shape,
            }],
        });
        Ok(())
    }

    /// Plans a tensor, or a stack of tensors, that is not quantized in the source.
    fn place(
        &mut self,
        name: &str,
        shape: Vec<usize>,
        like: &Tensor,
        parts: Vec<usize>,
        transposed: bool,
    ) -> Result<()> {
        self.parameters += elements(&shape);
        let path = name.strip_suffix(".weight");
        let kind = match &like.stored {
            Stored::Gguf { kind, .. } => Some(*kind),
            Stored::Safetensors | Stored::Slice { .. } => None,
        };
        if let (Some(path), Some(float)) = (path, like.float()) {
            if let Some(format) = self.format(path, &shape) {
                let block = kind.filter(|kind| scales::is_block(*kind));
                let work = match block {
                    Some(kind) if scales::packing(kind) == Some(format) => {
                        Work::Repack(self.scales_of(&parts)?)
                    }
                    Some(kind) => {
                        *self.requantized.entry(kind.name()).or_default() += 1;
                        // The default is float16, because the scales of GGUF blocks have this
                        // precision.
                        Work::Quantize(format, self.options.dtype.unwrap_or(FloatType::F16))
                    }
                    None => Work::Quantize(format, self.options.dtype.unwrap_or(float)),
                };
                return self.push_packed(path, &shape, parts, work, format, transposed);
            }
            let repacked = kind.filter(|_| {
                !self.options.dequantize && self.chooser.is_none() && rules::is_matrix(path, &shape)
            });
            if let Some(format) = repacked.and_then(scales::packing) {
                let work = Work::Repack(self.scales_of(&parts)?);
                return self.push_packed(path, &shape, parts, work, format, transposed);
            }
        }
        if kind.is_some_and(scales::is_block) {
            self.dense_blocks += 1;
        }
        if self.chooser.is_some() && like.float().is_some() && rules::is_fused_stack(name, &shape) {
            self.dense_experts.push(name.to_owned());
        }
        let is_given = self.given.dense.contains_key(name);
        let (work, dtype) = match (like.float(), self.options.dtype) {
            (Some(float), to)
                if transposed || kind.is_some() || is_given || to.is_some_and(|to| to != float) =>
            {
                let to = to.unwrap_or(float);
                (Work::Cast(to), file_type(to))
            }
            _ => (Work::Copy, like.dtype),
        };
        self.items.push(Item {
            parts,
            work,
            transposed,
            outs: vec![Out {
                name: name.to_owned(),
                dtype,
                shape,
            }],
        });
        Ok(())
    }

    /// Returns the format of the matrix `path`; `None` if it is not quantized.
    fn format(&self, path: &str, shape: &[usize]) -> Option<Format> {
        let chosen = self.chooser.as_ref()?.format(path, shape)?;
        let Some((bits, group_size)) = self.given.formats.get(path).copied() else {
            return Some(chosen);
        };
        Some(Format {
            bits,
            group_size,
            mode: QuantMode::Affine,
        })
    }

    /// Returns the type of the scales of repacked blocks.
    fn scales_of(&self, parts: &[usize]) -> Result<FloatType> {
        match self.options.dtype {
            Some(dtype) => Ok(dtype),
            None => {
                let tensors = parts.iter().map(|part| &self.source.tensors[*part]);
                scales::exact(self.source, tensors)
            }
        }
    }

    fn push_packed(
        &mut self,
        path: &str,
        shape: &[usize],
        parts: Vec<usize>,
        work: Work,
        format: Format,
        transposed: bool,
    ) -> Result<()> {
        let (scales, has_biases) = match (work, format.mode) {
            (Work::Quantize(_, to) | Work::Repack(to), QuantMode::Affine) => (file_type(to), true),
            _ => (Dtype::U8, false),
        };
        let cols = shape.last().copied().unwrap_or(0);
        let bits = format.bits.unsigned_abs() as usize;
        let with_cols = |n: usize| {
            let mut shape = shape.to_vec();
            if let Some(last) = shape.last_mut() {
                *last = n;
            }
            shape
        };
        let groups = with_cols(cols / format.group_size.unsigned_abs() as usize);
        let mut outs = vec![
            Out {
                name: format!("{path}.weight"),
                dtype: Dtype::U32,
                shape: with_cols(cols * bits / 32),
            },
            Out {
                name: format!("{path}.scales"),
                dtype: scales,
                shape: groups.clone(),
            },
        ];
        if has_biases {
            outs.push(Out {
                name: format!("{path}.biases"),
                dtype: scales,
                shape: groups,
            });
        }
        self.formats.insert(path.to_owned(), format);
        *self.counts.entry(format).or_default() += elements(shape);
        self.items.push(Item {
            parts,
            work,
            transposed,
            outs,
        });
        Ok(())
    }

    fn finish(self) -> Result<Plan> {
        if self.options.quantize.is_some() && self.formats.is_empty() {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                "no matrix can be quantized: none is a float matrix whose rows divide into the groups",
            ));
        }
        let mut notes = Vec::new();
        if self.dropped > 0 {
            notes.push(format!(
                "{} tensors are left out: parts for images or sound, or what is computed anyway",
                self.dropped
            ));
        }
        if self.dense_blocks > 0 && !self.options.dequantize {
            notes.push(format!(
                "{} quantized tensors have no MLX form with the same numbers and are written dense; --quantize makes them small again",
                self.dense_blocks
            ));
        }
        if let (Some(chooser), false) = (&self.chooser, self.requantized.is_empty()) {
            let kinds: Vec<String> = self
                .requantized
                .iter()
                .map(|(kind, n)| format!("{n} of {kind}"))
                .collect();
            notes.push(format!(
                "the file is quantized already: {} matrices are quantized again to {}, which rounds twice; \
                 without --quantize they keep their numbers where MLX has a form for them",
                kinds.join(", "),
                chooser.base.told()
            ));
        }
        if let [first, others @ ..] = self.dense_experts.as_slice() {
            let more = match others.len() {
                0 => String::new(),
                n => format!(" and {n} more"),
            };
            notes.push(format!(
                "experts are not quantized, because one tensor has the matrices of all: {first}{more}"
            ));
        }
        let keeps_quantization =
            self.formats.is_empty() && self.stored.is_quantized && !self.options.dequantize;
        let quantization = if keeps_quantization {
            let said = self
                .source
                .config
                .get("quantization")
                .or_else(|| self.source.config.get("quantization_config"));
            said.and_then(Value::as_object).cloned()
        } else {
            self.quantization()
        };
        Ok(Plan {
            quantized: if keeps_quantization {
                self.counts.values().sum::<u64>() as usize
            } else {
                self.formats.len()
            },
            items: self.items,
            quantization,
            dtype: self.options.dtype,
            parameters: self.parameters,
            notes,
        })
    }

    /// Returns the quantization entry of `config.json`: the format of most weights, and exceptions
    /// by layer.
    fn quantization(&self) -> Option<Map<String, Value>> {
        let base = match &self.chooser {
            Some(chooser) => chooser.base,
            None => *self
                .counts
                .iter()
                .max_by_key(|(f, n)| (**n, f.bits))
                .map(|(f, _)| f)?,
        };
        let object = |format: Format| {
            let mut map = Map::new();
            map.insert("group_size".into(), format.group_size.into());
            map.insert("bits".into(), format.bits.into());
            map.insert("mode".into(), format.mode_name().into());
            map
        };
        let mut map = object(base);
        for (path, format) in self.formats.iter().filter(|(_, f)| **f != base) {
            map.insert(path.clone(), Value::Object(object(*format)));
        }
        (!self.formats.is_empty()).then_some(map)
    }
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().product::<usize>() as u64
}

/// Returns the sort key of an item. Items of one layer are adjacent, so that they share a shard.
fn order(item: &Item) -> (usize, &str) {
    let name = item.outs.first().map_or("", |o| o.name.as_str());
    (rules::layer_of(name).map_or(0, |n| n + 1), name)
}

pub(super) fn file_type(float: FloatType) -> Dtype {
    match float {
        FloatType::F32 => Dtype::F32,
        FloatType::F16 => Dtype::F16,
        FloatType::BF16 => Dtype::BF16,
    }
}
