//! Loads a model: from its files to the parts of an engine.

use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;

use inference::{ComputeType, Error, ErrorKind, LoadOptions, ModelInfo, Result, SamplingDefaults};
use inference_formats::footprint::Footprint;
use mlx_rs_core::distributed::Group;
use mlx_rs_core::{Dtype, Stream, memory};

use super::cache_cost::CacheCost;
use super::options::{
    cache_options, check_attends, check_attention_sums, check_keyless, stored_as,
};
use super::place::Place;
use super::source::OpenModel;
use crate::arch;
use crate::arch::Decoder;
use crate::arch::routes::Routes;
use crate::cache::CacheOptions;
use crate::checkpoint::{ModelConfig, ModelFiles, identity, locate};
use crate::divided::{OwnPart, loaded_bytes};
use crate::engine::Parts;
use crate::error::engine;
use crate::exec::PrefillInputs;
use crate::loader::{Features, Weights};
use crate::nn::router::FfnRouter;
use crate::sentence::Sentence;
use crate::text::{ChatTemplate, TextPipeline};

/// Returns the sizes of the tensors to load, without the tensors that a vindex replaces.
pub(crate) fn reduced(footprint: Footprint, features: Option<&Features>) -> Footprint {
    match features {
        Some(features) => features.reduce(footprint),
        None => footprint,
    }
}

/// Returns how many bytes of a vindex's features loading copies to memory.
pub(crate) fn copied(features: Option<&Features>, on_cpu: bool, dtype: Dtype) -> u64 {
    features.map_or(0, |features| features.copied_bytes(on_cpu, dtype))
}

/// Returns an error if the weights cannot fit into memory. Call it before reading weights.
fn check_memory(path: &Path, bytes: u64) -> Result<()> {
    let budget = memory::budget();
    if bytes <= budget {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::OutOfMemory,
        format!("the weights need about {bytes} bytes, more than the {budget} bytes of memory"),
    )
    .with_path(path))
}

/// Opens the configuration and the weights of the model at `path`, and applies `options`. Reads
/// only headers.
pub(crate) fn open_weights(
    path: &Path,
    options: &LoadOptions,
    place: Place,
) -> Result<(ModelConfig, Weights)> {
    let model = OpenModel::open(path, place, options.dtype)?;
    let (config, mut weights) = model.into_weights();
    hold(&mut weights, options, place)?;
    Ok((config, weights))
}

/// Configures how `weights` are stored and computed. Returns the type to which prefill converts
/// inputs of quantized matrices; `None` if MLX computes them.
fn hold(
    weights: &mut Weights,
    options: &LoadOptions,
    place: Place,
) -> Result<Option<PrefillInputs>> {
    let prefill_inputs = place.prefill_inputs(weights.dtype(), options.precision)?;
    if let Some(prefill_inputs) = prefill_inputs {
        weights.use_cpu(prefill_inputs);
    }
    if let Some(half) = place.kept_half(options.dtype) {
        weights.keep_half(half);
    }
    check_attention_sums(options, place)?;
    weights.set_attention_sums(options.attention_sums);
    Ok(prefill_inputs)
}

/// Values that are read before the model's weights.
struct Before {
    text: TextPipeline,
    sampling: SamplingDefaults,
    features: Option<Features>,
    compute: ComputeType,
    /// Whether KV caches use 16 bits if `kv_bits` is not set.
    half_caches: bool,
    /// Bytes of vindex features that loading copies to memory.
    copied: u64,
}

/// Reads the model's headers and tokenizer, and selects the weights that this process loads.
///
/// Returns an error if the weights cannot fit into memory.
fn prepare(
    path: &Path,
    options: &LoadOptions,
    place: Place,
    group: Option<Group>,
) -> Result<(ModelConfig, Weights, Before)> {
    let model = OpenModel::open(path, place, options.dtype)?;
    let at = |e: Error| e.with_path(model.path());
    let config = &model.config;
    let (dtype, compute) = model.compute_type();
    let features = Features::open(options, path, config)?;
    let footprint = reduced(model.footprint(), features.as_ref());
    let part = (group.map(|group| OwnPart::new(group, options.split, config, model.is_gguf())))
        .transpose()
        .map_err(at)?;
    let bytes = loaded_bytes(part.as_ref(), config, &footprint).map_err(at)?;
    let copied = copied(features.as_ref(), model.on_cpu(), dtype);
    check_memory(model.path(), bytes.saturating_add(copied))?;
    for expansion in footprint.expansions() {
        tracing::warn!("expanded to plain numbers, which costs speed: {expansion}");
    }
    let text = model.text()?;
    let text = match &options.chat_template {
        Some(source) => text.with_template(ChatTemplate::new(source, "chat_template")?),
        None => text,
    };
    let before = Before {
        text,
        sampling: model.sampling(),
        features,
        compute,
        half_caches: model.has_half_caches(options)?,
        copied,
    };
    let (config, mut weights) = model.into_weights();
    if let Some(part) = part {
        part.choose(&mut weights);
    }
    Ok((config, weights, before))
}

/// Loads the model at `path`. With a group, loads only this process's share of the model.
pub(crate) fn load(
    path: &Path,
    (options, router): (&LoadOptions, &FfnRouter),
    place: Place,
    group: Option<Group>,
) -> Result<Parts> {
    let (config, mut weights, before) = prepare(path, options, place, group)?;
    let prefill_inputs = hold(&mut weights, options, place)?;
    warn_of_slow_paths(place, &weights, before.compute);
    if let Some(features) = &before.features {
        features.leave_out(&mut weights);
    }
    let score = arch::score_layer(&config, &mut weights).map_err(|e| e.with_path(path))?;
    let (architecture, mut decoder) =
        arch::load(&config, &mut weights).map_err(|e| e.with_path(path))?;
    let sentence = sentence(path, &config, &weights, decoder.as_ref())?.with_score_layer(score);
    let routes = Routes {
        plan: &options.feed_forward,
        router,
        features: before.features.as_ref(),
        on_cpu: place.uses_kernels(weights.dtype()),
        dtype: weights.dtype(),
    };
    arch::routes::apply(decoder.as_mut(), &routes, config.num_hidden_layers)?;

    let states = decoder.new_caches(&CacheOptions::default());
    let has_keys = states.iter().any(|state| state.as_kv().is_some());
    if !has_keys {
        check_keyless(options, &architecture)?;
        if decoder.encoder().is_none() {
            check_attends(options, &architecture)?;
        }
    }

    let mut info = described(&config, &weights, &before);
    info.architecture = architecture;
    info.device = place.name().to_owned();
    info.prompts = prefill_inputs
        .zip(weights.quantization())
        .map(|(prefill_inputs, (bits, _))| prefill_inputs.used_for(bits).to_owned());
    let size = weights.dtype().size();
    let caches = cache_options(options, info.head_dim, size, before.half_caches)?;
    info.cache = has_keys.then(|| stored_as(&caches, before.compute));
    let numbers = match has_keys {
        true => arch::key_numbers(&config)?,
        false => 0,
    };
    let cost = CacheCost::new(caches, numbers, size);
    info.cache_bytes_per_token = Some(cost.per_token());

    let mut eos = config.eos_token_ids;
    eos.extend(before.text.tokenizer().eos_ids());
    eos.sort_unstable();
    eos.dedup();
    Ok(Parts {
        decoder,
        text: before.text,
        stream: Stream::default_of(place.device()).map_err(engine("device"))?,
        info,
        eos,
        caches,
        slots: match weights.stage() {
            Some(_) => 0,
            None => remembered(options.parallel_slots.unwrap_or(1)),
        },
        prompt_cache_bytes: options.prompt_cache_bytes,
        draft: None,
        identity: identity_with(path, options, router)?,
        source: path.to_owned(),
        param_slots: weights.slots().to_vec(),
        is_part: group.is_some(),
        shares_prefixes: weights.stage().is_none(),
        feed_forward: options.feed_forward.clone(),
        is_routed: !options.feed_forward.is_dense() || !router.is_empty(),
        has_dense: !options.walk_only,
        sentence,
    })
}

/// Warns if the compute type bypasses the CPU kernels, which compute only in float32.
fn warn_of_slow_paths(place: Place, weights: &Weights, compute: ComputeType) {
    if place == Place::Cpu && weights.dtype() != Dtype::Float32 {
        tracing::warn!(
            "{compute} runs outside the CPU kernels, hundreds of times slower than float32"
        );
    }
}

/// Reads how the model embeds texts, from the files beside a checkpoint or from GGUF metadata.
fn sentence(
    path: &Path,
    config: &ModelConfig,
    weights: &Weights,
    decoder: &dyn Decoder,
) -> Result<Sentence> {
    let encoder = decoder.encoder();
    let mut sentence = match locate(path)? {
        ModelFiles::Directory(dir) => Sentence::from_dir(&dir, config, weights, encoder.is_some())?,
        ModelFiles::Gguf(_) => Sentence::of_gguf(config)?,
    };
    if let Some(encoder) = encoder {
        sentence.bound(encoder.max_length());
    }
    Ok(sentence)
}

/// Describes the model for users, from its configuration and weights.
fn described(config: &ModelConfig, weights: &Weights, before: &Before) -> ModelInfo {
    let mut info = ModelInfo::default();
    info.vocab_size = config.vocab_size;
    info.num_layers = config.num_hidden_layers;
    info.hidden_size = config.hidden_size;
    info.num_heads = config.num_attention_heads;
    info.num_kv_heads = config.num_key_value_heads;
    info.head_dim = config
        .head_dim
        .unwrap_or(config.hidden_size / config.num_attention_heads);
    info.context_length = config.max_position_embeddings;
    info.quantization_bits = weights.quantization().map(|q| q.0);
    info.quantization_group = weights.quantization().map(|q| q.1);
    info.parameters = weights.parameters();
    info.weight_bytes = (weights.bytes()).saturating_add(before.copied);
    info.compute_type = Some(before.compute);
    info.has_chat_template = before.text.template().is_some();
    info.sampling = before.sampling;
    info
}

/// Returns an identity for saved keys and values: the model plus its feed-forward plan.
fn identity_with(path: &Path, options: &LoadOptions, router: &FfnRouter) -> Result<String> {
    let mut identity = identity(path)?;
    if !options.feed_forward.is_dense() {
        identity = format!("{identity}+{}", options.feed_forward);
    }
    if !router.is_empty() {
        // The program's backends have no name, so the identity is random: saved caches are valid
        // only for this engine.
        identity = format!("{identity}+{:016x}", RandomState::new().hash_one(()));
    }
    Ok(identity)
}

/// Returns how many finished requests keep their caches, if `parallel` requests run at a time. It
/// exceeds `parallel`, because users pause between the turns of a conversation.
fn remembered(parallel: usize) -> usize {
    match parallel {
        1 => 1,
        n => n.saturating_mul(4),
    }
}
