//! The MLX backend: registration under three names, and loading of models.

use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::sync::Arc;

use inference::{
    AttentionSums, Backend, Capabilities, ComputeType, Error, ErrorKind, FeedForwardPlan,
    LoadOptions, ModelInfo, Precision, Result, SamplingDefaults, Split, TextModel,
};
use inference_formats::footprint::{Footprint, WeightStorage};
use mlx_rs_core::distributed::Group;
use mlx_rs_core::{Device, Dtype, Stream, cuda_is_available, memory, metal_is_available};
use safetensors::Dtype as FileDtype;

use crate::arch;
use crate::arch::routes::Routes;
use crate::cache::tier::Directory;
use crate::cache::{CacheOptions, Packing};
use crate::checkpoint::files::{MAX_TEXT_FILE, invalid, read_text};
use crate::checkpoint::safetensors::SafetensorsCheckpoint;
use crate::checkpoint::{
    Family, Gguf, ModelConfig, ModelFiles, config, gguf_config, identity, locate,
};
use crate::divided::{self, OwnPart, loaded_bytes};
use crate::engine::{Engine, Parts};
use crate::error::engine;
use crate::exec::{self, PrefillInputs};
use crate::generate::check_rewinds;
use crate::loader::{Features, Weights, options_of_vindex};
use crate::model::{EncoderModel, MlxModel};
use crate::nn::router::FfnRouter;
use crate::sample;
use crate::sentence::Sentence;
use crate::text::{ChatTemplate, TextPipeline};

inference::register_backend!("metal", || Box::new(MlxBackend(Place::Metal)));
inference::register_backend!("cuda", || Box::new(MlxBackend(Place::Cuda)));
inference::register_backend!("cpu", || Box::new(MlxBackend(Place::Cpu)));

/// The supported architectures by `model_type`, sorted.
#[must_use]
pub fn architectures() -> Vec<&'static str> {
    arch::names().collect()
}

/// The architecture names in GGUF files with the `model_type` of each, sorted. GGUF files store
/// Mistral and Mixtral as llama; Mixtral is recognized by its experts. They store OLMo 3 as olmo2
/// with a sliding window.
#[must_use]
pub fn gguf_architectures() -> Vec<(&'static str, &'static str)> {
    let families = Family::all().iter();
    let mut all: Vec<_> = families
        .filter_map(|f| Some((f.gguf.as_ref()?.architecture, f.model_type)))
        .collect();
    all.sort_unstable();
    all
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Metal,
    Cuda,
    Cpu,
}

struct MlxBackend(Place);

impl Place {
    pub(crate) fn device(self) -> Device {
        match self {
            Place::Metal | Place::Cuda => Device::gpu(),
            Place::Cpu => Device::cpu(),
        }
    }

    /// The place of the backend `name`. `None` means the best available backend.
    pub(crate) fn named_or_best(name: Option<&str>) -> Self {
        let all = [Place::Metal, Place::Cuda, Place::Cpu];
        let named = all
            .into_iter()
            .find(|p| Some(MlxBackend(*p).name()) == name);
        let best = || all.into_iter().find(|p| MlxBackend(*p).available());
        named.or_else(best).unwrap_or(Place::Cpu)
    }

    /// The compute type: the requested type if there is one. Otherwise float32 on a CPU, where half
    /// types are emulated, and the checkpoint's type on a GPU.
    pub(crate) fn compute_type(
        self,
        asked: Option<ComputeType>,
        stored: FileDtype,
    ) -> Result<(Dtype, ComputeType)> {
        let chosen = match (asked, stored) {
            (Some(t), _) => t,
            (None, _) if self == Place::Cpu => ComputeType::Float32,
            (None, FileDtype::F16) => ComputeType::Float16,
            (None, FileDtype::BF16) => ComputeType::BFloat16,
            (None, _) => ComputeType::Float32,
        };
        // The kernels sum in float32. In half types, MLX's own operations take minutes per reply on
        // a CPU.
        let chosen = match self.kept_half(asked) {
            Some(_) => ComputeType::Float32,
            None => chosen,
        };
        match chosen {
            ComputeType::Float32 => Ok((Dtype::Float32, chosen)),
            ComputeType::Float16 => Ok((Dtype::Float16, chosen)),
            ComputeType::BFloat16 => Ok((Dtype::Bfloat16, chosen)),
            other => Err(Error::new(
                ErrorKind::Unsupported,
                format!("cannot compute in {other}"),
            )),
        }
    }

    /// Whether our kernels compute this type at this place. The kernels compute in float32. MLX's
    /// own operations compute other types.
    pub(crate) fn uses_kernels(self, dtype: Dtype) -> bool {
        self == Place::Cpu && dtype == Dtype::Float32
    }

    /// The half type in which dense matrices are stored, if a half type is requested but our
    /// kernels compute in float32.
    pub(crate) fn kept_half(self, asked: Option<ComputeType>) -> Option<Dtype> {
        let half = match asked {
            Some(ComputeType::Float16) => Dtype::Float16,
            Some(ComputeType::BFloat16) => Dtype::Bfloat16,
            _ => return None,
        };
        (self == Place::Cpu && exec::enabled()).then_some(half)
    }

    /// The type to which prefill converts inputs of quantized matrices, if our kernels compute;
    /// `None` if MLX computes.
    ///
    /// # Errors
    /// `Unsupported` if fast prefill is requested without the kernels.
    pub(crate) fn prefill_inputs(
        self,
        dtype: Dtype,
        precision: Option<Precision>,
    ) -> Result<Option<PrefillInputs>> {
        let kernels = self.uses_kernels(dtype) && exec::enabled();
        match precision {
            Some(Precision::Fast) if !kernels => Err(Error::new(
                ErrorKind::Unsupported,
                "precision fast needs the CPU kernels: the backend cpu, the type float32, and \
                 MLX_CPU_KERNELS not off",
            )),
            _ if !kernels => Ok(self.uses_kernels(dtype).then_some(PrefillInputs::Float32)),
            Some(Precision::Fast) => Ok(Some(PrefillInputs::Int8)),
            Some(_) => Ok(Some(PrefillInputs::Float32)),
            // Decode also uses 16-bit integers. So the result hardly depends on how many tokens of
            // the prompt are computed at a time.
            None => Ok(Some(
                PrefillInputs::from_environment().unwrap_or(PrefillInputs::Int16),
            )),
        }
    }

    /// How [`Weights`] stores tensors in memory, for a model that computes in `dtype`.
    pub(crate) fn weight_storage(self, dtype: Dtype) -> WeightStorage {
        Weights::storage(self == Place::Cpu, dtype)
    }
}

impl Backend for MlxBackend {
    fn name(&self) -> &str {
        match self.0 {
            Place::Metal => "metal",
            Place::Cuda => "cuda",
            Place::Cpu => "cpu",
        }
    }

    fn available(&self) -> bool {
        match self.0 {
            Place::Metal => metal_is_available(),
            Place::Cuda => cuda_is_available(),
            Place::Cpu => Device::cpu().is_available(),
        }
    }

    fn unavailable_reason(&self) -> Option<String> {
        if let Err(e) = mlx_rs_core::library::load() {
            return Some(e.message().to_owned());
        }
        let reason = match self.0 {
            Place::Metal => "MLX has no Metal device here; Metal needs macOS on Apple silicon",
            Place::Cuda => {
                if let Some(reason) = mlx_rs_core::library::set_aside() {
                    return Some(format!("the CUDA build of MLX cannot be loaded: {reason}"));
                }
                "MLX has no CUDA device here; build with feature `cuda` on Linux with an NVIDIA GPU"
            }
            Place::Cpu => return None,
        };
        Some(reason.to_owned())
    }

    fn device(&self) -> String {
        let version = mlx_rs_core::mlx_version().unwrap_or_else(|_| String::from("unknown"));
        match self.0 {
            Place::Metal => format!("Apple GPU through Metal (MLX {version})"),
            Place::Cuda => format!("NVIDIA GPU through CUDA (MLX {version})"),
            Place::Cpu => format!("host processor (MLX {version}; {})", exec::status()),
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new()
            .with_streaming()
            .with_chat()
            .with_classify()
            .with_batch_generate()
            .with_logits()
            .with_attention_inspection()
            .with_gguf()
            .with_safetensors()
            .with_seeds()
            .with_logprobs()
            .with_grammars()
            .with_batch_sessions()
            .with_embeddings()
            .with_prompt_cache()
            .with_hidden_states()
            .with_training()
            .with_adapters()
            .with_tensor_parallel()
            .with_pipeline_parallel()
            .with_steering()
            .with_reranking()
            .with_named_adapters()
    }

    fn load_model(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
        let engine = self.engine(path, options, &FfnRouter::new())?;
        model_on(Arc::new(engine))
    }
}

impl MlxBackend {
    fn engine(&self, path: &Path, options: &LoadOptions, router: &FfnRouter) -> Result<Engine> {
        options.validate()?;
        if options.split != Split::None && !router.is_empty() {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                "split and feed-forward backends do not go together: each process has a part of \
                 the features",
            ));
        }
        if !self.available() {
            let reason = self.unavailable_reason().unwrap_or_default();
            return Err(Error::new(ErrorKind::UnavailableBackend, reason));
        }
        if self.0 == Place::Cpu && !exec::OPTIMIZED {
            static WARNED: std::sync::Once = std::sync::Once::new();
            WARNED.call_once(|| {
                tracing::warn!(
                    "the engine is built without optimization and is many times slower: build with \
                     --release, or set opt-level = 3 under [profile.dev.package.\"*\"]"
                );
            });
        }
        warn_of_gpu_layers(options, self.0);
        let cache_dir = match &options.cache_dir {
            Some(_) if !router.is_empty() => {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    "cache_dir and feed-forward backends do not go together: the program's \
                     backends have no name by which a later process knows them",
                ));
            }
            Some(dir) => Some(Directory::open(dir, options.cache_dir_bytes)?),
            None => None,
        };
        let stream = Stream::default_of(self.0.device()).map_err(engine("device"))?;
        let group = divided::group(options)?;
        let of_vindex = options_of_vindex(options, path)?;
        let options = of_vindex.as_ref().unwrap_or(options);
        let mut model = stream.scope(|| load(path, (options, router), self.0, group))?;
        if let Some(group) = group {
            stream.scope(|| {
                divided::check_alike(group, options, &model.info)?;
                sample::agree_on_entropy(group).map_err(engine("group"))
            })?;
        }
        if let Some(draft) = &options.draft_model {
            // The draft model and its heads are small, so its cache is not quantized.
            let plain = options.clone().with_kv_bits(None);
            // The plan refers to the main model's layers, so the draft model is dense.
            let plain = (plain.with_feed_forward(FeedForwardPlan::dense()))
                .with_vindex(None)
                .with_walk_only(false)
                .with_attention_sums(AttentionSums::Native);
            let draft = stream
                // The draft model is small, so each process loads all of it.
                .scope(|| load(draft, (&plain, &FfnRouter::new()), self.0, None))
                .map_err(|e| e.context("draft_model"))?;
            if !alike(&draft.text, &model.text)? {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    "draft_model has another tokenizer than the model; they must be of one family",
                ));
            }
            check_rewinds(model.decoder.as_ref(), "the model")?;
            check_rewinds(draft.decoder.as_ref(), "draft_model")?;
            model.draft = Some(draft.decoder);
        }
        let variant = variant(options, &model.info);
        let mut engine = Engine::new(Parts { stream, ..model });
        if let Some(dir) = cache_dir {
            engine = engine.with_tier(dir, variant)?;
        }
        if let Some(adapter) = &options.adapter_path {
            engine.load_adapter(adapter)?;
        }
        Ok(engine)
    }
}

/// Everything that changes computed keys and values, besides the model, its adapter and the kinds of
/// its caches. Another version of the program may compute other values.
fn variant(options: &LoadOptions, info: &ModelInfo) -> String {
    let compute = info.compute_type.map_or("", ComputeType::as_str);
    format!(
        "{} {} {compute} {} {} {}",
        env!("CARGO_PKG_VERSION"),
        info.device,
        info.prompts.as_deref().unwrap_or_default(),
        options.attention_sums,
        options.feed_forward,
    )
}

/// The model on an engine: an encoder or a decoder.
fn model_on(engine: Arc<Engine>) -> Result<Box<dyn TextModel>> {
    Ok(match engine.is_encoder()? {
        true => Box::new(EncoderModel::new(engine)),
        false => Box::new(MlxModel::new(engine)),
    })
}

/// Loads a model with the backend that the options name, or the best available one: its engine, and
/// the model that serves requests on this engine.
pub(crate) fn open(
    path: &Path,
    options: &LoadOptions,
) -> Result<(Arc<Engine>, Box<dyn TextModel>)> {
    let engine = Arc::new(open_engine(path, options, &FfnRouter::new())?);
    let model = model_on(Arc::clone(&engine))?;
    Ok((engine, model))
}

/// Loads a decoder with the program's own feed-forward backends.
pub(crate) fn open_routed(
    path: &Path,
    options: &LoadOptions,
    router: &FfnRouter,
) -> Result<MlxModel> {
    let engine = open_engine(path, options, router)?;
    if engine.is_encoder()? {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} is an encoder, whose feed-forward parts have no backends",
                engine.info().architecture
            ),
        )
        .with_path(path));
    }
    Ok(MlxModel::new(engine))
}

fn open_engine(path: &Path, options: &LoadOptions, router: &FfnRouter) -> Result<Engine> {
    let all = [Place::Metal, Place::Cuda, Place::Cpu].map(MlxBackend);
    let chosen = match options.backend.as_deref() {
        Some(name) => all.into_iter().find(|b| b.name() == name),
        None => all.into_iter().find(Backend::available),
    };
    let Some(backend) = chosen else {
        return Err(Error::new(
            ErrorKind::UnknownBackend,
            "this needs the backend metal, cuda or cpu, but the options name another",
        ));
    };
    backend.engine(path, options, router)
}

/// Whether two models tokenize texts in the same way.
fn alike(a: &TextPipeline, b: &TextPipeline) -> Result<bool> {
    const SAMPLE: &str =
        "The quick brown fox (aged 13) isn't lazy;\n\tGr\u{f6}\u{df}e, \u{6771}\u{4eac}!";
    Ok(a.tokenizer().encode(SAMPLE, false)? == b.tokenizer().encode(SAMPLE, false)?)
}

/// The footprint of the tensors to load, without those that a vindex replaces.
pub(crate) fn reduced(footprint: Footprint, features: Option<&Features>) -> Footprint {
    match features {
        Some(features) => features.reduce(footprint),
        None => footprint,
    }
}

/// Bytes of features that loading copies to memory.
pub(crate) fn copied(features: Option<&Features>, on_cpu: bool, dtype: Dtype) -> u64 {
    features.map_or(0, |features| features.copied_bytes(on_cpu, dtype))
}

/// Refuses a model that cannot fit into memory, before its weights are read.
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

/// Opens the configuration and the weights of the model at `path`, with settings from the options
/// and for the place. No weight is read yet.
pub(crate) fn open_weights(
    path: &Path,
    options: &LoadOptions,
    place: Place,
) -> Result<(ModelConfig, Weights)> {
    let (config, mut weights) = match locate(path)? {
        ModelFiles::Directory(dir) => {
            let config = ModelConfig::from_file(&dir.join("config.json"))?;
            let checkpoint = SafetensorsCheckpoint::open(&dir)?;
            let stored = arch::stored_type(&config, checkpoint.float_type());
            let (dtype, _) = place.compute_type(options.dtype, stored)?;
            let weights = Weights::from_safetensors(checkpoint, &dir, &config, dtype);
            (config, weights)
        }
        ModelFiles::Gguf(file) => {
            let gguf = Gguf::open(&file)?;
            let config = gguf_config::config(&gguf)?;
            let (dtype, _) = place.compute_type(options.dtype, FileDtype::F16)?;
            let weights = Weights::from_gguf(gguf, &config, dtype);
            (config, weights)
        }
    };
    hold(&mut weights, options, place)?;
    Ok((config, weights))
}

/// Sets how `weights` are stored, from the options and the place. Returns the type to which prefill
/// converts inputs, if our kernels compute.
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

fn load(
    path: &Path,
    (options, router): (&LoadOptions, &FfnRouter),
    place: Place,
    group: Option<Group>,
) -> Result<Parts> {
    let (config, mut weights, text, (compute, features), defaults) = match locate(path)? {
        ModelFiles::Directory(dir) => {
            let mut config = ModelConfig::from_file(&dir.join("config.json"))?;
            let checkpoint = SafetensorsCheckpoint::open(&dir)?;
            let stored = arch::stored_type(&config, checkpoint.float_type());
            let (dtype, compute) = place.compute_type(options.dtype, stored)?;
            let storage = place.weight_storage(dtype);
            let footprint = Footprint::of_safetensors(&checkpoint, &config, &storage);
            let on_cpu = place.uses_kernels(dtype);
            let features = Features::open(options, path, &config)?;
            let footprint = reduced(footprint, features.as_ref());
            let part = (group.map(|group| OwnPart::new(group, options.split, &config)))
                .transpose()
                .map_err(|e| e.with_path(&dir))?;
            let bytes =
                loaded_bytes(part.as_ref(), &config, &footprint).map_err(|e| e.with_path(&dir))?;
            let copied = copied(features.as_ref(), on_cpu, dtype);
            check_memory(&dir, bytes.saturating_add(copied))?;
            let text =
                TextPipeline::from_dir(&dir, config.model_type.as_deref().unwrap_or_default())?;
            let extra = generation_eos(&dir)?;
            config.eos_token_ids.extend(extra);
            let eos = config.eos_token_ids.clone();
            let mut weights = Weights::from_safetensors(checkpoint, &dir, &config, dtype);
            if let Some(part) = part {
                part.choose(&mut weights);
            }
            let sampling = recommended(SamplingDefaults::from_dir(&dir));
            (config, weights, text, (compute, features), (eos, sampling))
        }
        ModelFiles::Gguf(file) if group.is_some() && options.split == Split::Tensor => {
            return Err(divided::tensors_of_gguf().with_path(file));
        }
        ModelFiles::Gguf(file) => {
            let gguf = Gguf::open(&file)?;
            let config = gguf_config::config(&gguf)?;
            let (dtype, compute) = place.compute_type(options.dtype, FileDtype::F16)?;
            let storage = place.weight_storage(dtype);
            let footprint = Footprint::of_gguf(&gguf, &config, &storage);
            let on_cpu = place.uses_kernels(dtype);
            let features = Features::open(options, path, &config)?;
            let footprint = reduced(footprint, features.as_ref());
            let part = (group.map(|group| OwnPart::new(group, options.split, &config)))
                .transpose()
                .map_err(|e| e.with_path(&file))?;
            let bytes =
                loaded_bytes(part.as_ref(), &config, &footprint).map_err(|e| e.with_path(&file))?;
            let copied = copied(features.as_ref(), on_cpu, dtype);
            check_memory(&file, bytes.saturating_add(copied))?;
            for expansion in footprint.expansions() {
                tracing::warn!("expanded to plain numbers, which costs speed: {expansion}");
            }
            let parts = gguf_config::tokenizer_parts(&gguf)?;
            let text =
                TextPipeline::from_gguf(&parts, config.model_type.as_deref().unwrap_or_default())?;
            let sampling = recommended(SamplingDefaults::from_gguf(&gguf));
            let mut weights = Weights::from_gguf(gguf, &config, dtype);
            if let Some(part) = part {
                part.choose(&mut weights);
            }
            (
                config,
                weights,
                text,
                (compute, features),
                (Vec::new(), sampling),
            )
        }
    };
    let text = match &options.chat_template {
        Some(source) => text.with_template(ChatTemplate::new(source, "chat_template")?),
        None => text,
    };
    let sentence_dir = match locate(path)? {
        ModelFiles::Directory(dir) => Some(dir),
        ModelFiles::Gguf(_) => None,
    };
    let prefill_inputs = hold(&mut weights, options, place)?;
    if place == Place::Cpu && options.kv_bits.is_some_and(|bits| bits < 16) {
        tracing::warn!(
            "kv_bits: attention over a packed cache runs outside the CPU kernels, on one core"
        );
    }
    if place == Place::Cpu && weights.dtype() != Dtype::Float32 {
        tracing::warn!(
            "{compute} runs outside the CPU kernels, hundreds of times slower than float32"
        );
    }
    if let Some(features) = &features {
        features.leave_out(&mut weights);
    }
    let score = arch::score_layer(&config, &mut weights).map_err(|e| e.with_path(path))?;
    let (architecture, mut decoder) =
        arch::load(&config, &mut weights).map_err(|e| e.with_path(path))?;
    let mut sentence = match &sentence_dir {
        Some(dir) => {
            let is_encoder = decoder.encoder().is_some();
            Sentence::from_dir(dir, &config, &weights, is_encoder)?
        }
        None => Sentence::of_gguf(&config)?,
    }
    .with_score_layer(score);
    if let Some(encoder) = decoder.encoder() {
        sentence.bound(encoder.max_length());
    }
    let layers = config.num_hidden_layers;
    let on_cpu = place.uses_kernels(weights.dtype());
    let routes = Routes {
        plan: &options.feed_forward,
        router,
        features: features.as_ref(),
        on_cpu,
        dtype: weights.dtype(),
    };
    arch::routes::apply(decoder.as_mut(), &routes, layers)?;

    let states = decoder.new_caches(&CacheOptions::default());
    let has_keys = states.iter().any(|state| state.as_kv().is_some());
    if !has_keys {
        check_keyless(options, &architecture)?;
        if decoder.encoder().is_none() {
            check_attends(options, &architecture)?;
        }
    }

    let (mut eos, sampling) = defaults;
    eos.extend(text.tokenizer().eos_ids());
    eos.sort_unstable();
    eos.dedup();

    let mut info = ModelInfo::default();
    info.architecture = architecture;
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
    let copied = copied(features.as_ref(), on_cpu, weights.dtype());
    info.weight_bytes = (weights.bytes()).saturating_add(copied);
    info.device = match place {
        Place::Metal => "metal",
        Place::Cuda => "cuda",
        Place::Cpu => "cpu",
    }
    .to_owned();
    info.compute_type = Some(compute);
    info.prompts = prefill_inputs
        .zip(weights.quantization())
        .map(|(prefill_inputs, (bits, _))| prefill_inputs.used_for(bits).to_owned());
    let caches = cache_options(options, info.head_dim, weights.dtype().size())?;
    info.cache = has_keys.then(|| stored_as(&caches, compute));
    info.has_chat_template = text.template().is_some();
    info.sampling = sampling;

    let stream = Stream::default_of(place.device()).map_err(engine("device"))?;
    let mut identity = identity(path)?;
    if !options.feed_forward.is_dense() {
        // Keys and values depend on the plan, so the identity does too.
        identity = format!("{identity}+{}", options.feed_forward);
    }
    if !router.is_empty() {
        // The program's backends have no name, so the identity is random: saved caches are valid
        // only for this engine.
        identity = format!("{identity}+{:016x}", RandomState::new().hash_one(()));
    }
    Ok(Parts {
        decoder,
        text,
        stream,
        info,
        eos,
        caches,
        slots: match weights.stage() {
            Some(_) => 0,
            None => remembered(options.parallel_slots.unwrap_or(1)),
        },
        draft: None,
        identity,
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

/// The number of finished requests whose caches are kept, if `parallel` requests run at a time. It
/// exceeds `parallel`, because users pause between the turns of a conversation.
fn remembered(parallel: usize) -> usize {
    match parallel {
        1 => 1,
        n => n.saturating_mul(4),
    }
}

/// A warning that `gpu_layers` is ignored, because MLX runs the whole model on one device. `None`
/// if the option is missing, if it covers all layers, or on a CPU.
fn gpu_layers_warning(options: &LoadOptions, place: Place) -> Option<&'static str> {
    let some = options.gpu_layers.is_some_and(|n| n >= 0);
    (some && place != Place::Cpu)
        .then_some("gpu_layers is ignored: MLX runs the whole model on its device")
}

/// Logs [`gpu_layers_warning`], if there is a warning.
fn warn_of_gpu_layers(options: &LoadOptions, place: Place) {
    if let Some(warning) = gpu_layers_warning(options, place) {
        tracing::warn!("{warning}");
    }
}

/// Refuses double precision on a device that lacks it.
///
/// # Errors
/// [`ErrorKind::Unsupported`].
pub(crate) fn check_attention_sums(options: &LoadOptions, place: Place) -> Result<()> {
    if options.attention_sums == AttentionSums::Native || place == Place::Cpu {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "attention_sums is {}, which MLX supports on a CPU only; use backend `cpu`, or leave the option out",
            options.attention_sums
        ),
    ))
}

/// Refuses a type of attention sums for an architecture without attention.
///
/// # Errors
/// [`ErrorKind::Unsupported`].
fn check_attends(options: &LoadOptions, architecture: &str) -> Result<()> {
    if options.attention_sums == AttentionSums::Native {
        return Ok(());
    }
    let message = format!(
        "attention_sums needs attention, which {architecture} does not have; leave the option out"
    );
    Err(Error::new(ErrorKind::Unsupported, message))
}

/// Refuses KV cache options for an architecture without keys and values.
///
/// # Errors
/// [`ErrorKind::Unsupported`].
pub fn check_keyless(options: &LoadOptions, architecture: &str) -> Result<()> {
    for (option, given) in [
        ("context_len", options.context_len.is_some()),
        ("kv_bits", options.kv_bits.is_some()),
    ] {
        if given {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{option} limits keys and values, but {architecture} has none: its state has the same size at every length; leave the option out"
                ),
            ));
        }
    }
    Ok(())
}

/// The cache options for a model whose heads have `head_dim` elements, and whose compute type has
/// `size` bytes.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] for values that do not suit the model.
pub fn cache_options(options: &LoadOptions, head_dim: usize, size: usize) -> Result<CacheOptions> {
    let int = |name: &str, n: usize| {
        i32::try_from(n).map_err(|_| {
            let message = format!("{name} is {n}; it must be at most {}", i32::MAX);
            Error::new(ErrorKind::InvalidOption, message)
        })
    };
    let packing = match options.kv_bits {
        Some(32) if size < 4 => {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "kv_bits is 32, but the compute type has {} bits, and unquantized caches have \
                     it; use dtype float32, or leave kv_bits out",
                    8 * size
                ),
            ));
        }
        None | Some(16 | 32) => None,
        Some(bits) => {
            let group = options.kv_group_size;
            if !head_dim.is_multiple_of(group as usize) {
                return Err(Error::new(
                    ErrorKind::InvalidOption,
                    format!(
                        "kv_group_size is {group}, which does not divide this model's heads of \
                         {head_dim} elements"
                    ),
                ));
            }
            Some(Packing {
                bits: int("kv_bits", bits as usize)?,
                group_size: int("kv_group_size", group as usize)?,
                start: int("quantized_kv_start", options.quantized_kv_start)?,
            })
        }
    };
    Ok(CacheOptions {
        bound: options
            .context_len
            .map(|n| int("context_len", n))
            .transpose()?,
        packing,
        // A compute type of 16 bits is also the type of caches.
        half: options.kv_bits == Some(16) && size == 4,
        trimmable: None,
    })
}

/// How caches store keys and values.
fn stored_as(caches: &CacheOptions, compute: ComputeType) -> String {
    match caches.packing {
        Some(Packing {
            bits, group_size, ..
        }) => format!("{bits} bits, groups of {group_size}"),
        None if caches.half => ComputeType::Float16.to_string(),
        None => compute.to_string(),
    }
}

/// The sampling options that the model's files recommend. An error in these files does not prevent
/// loading.
fn recommended(read: Result<SamplingDefaults, inference_formats::Error>) -> SamplingDefaults {
    read.unwrap_or_else(|e| {
        tracing::warn!("the model's recommended sampling is ignored: {e}");
        SamplingDefaults::default()
    })
}

/// Further end-of-text tokens from `generation_config.json`, if the file exists.
fn generation_eos(dir: &Path) -> Result<Vec<u32>> {
    let path = dir.join("generation_config.json");
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let text = read_text(&path, MAX_TEXT_FILE)?;
    let value: serde_json::Value = serde_json::from_str(&text)
        .map_err(|e| invalid(&path, "not a JSON file").with_source(e))?;
    config::token_ids("eos_token_id", value.get("eos_token_id")).map_err(|m| invalid(&path, m))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn double_precision_is_for_cpus() {
        let wide = LoadOptions::new().with_attention_sums(AttentionSums::Float64);
        check_attention_sums(&wide, Place::Cpu).unwrap();
        for place in [Place::Metal, Place::Cuda] {
            check_attention_sums(&LoadOptions::new(), place).unwrap();
            let error = check_attention_sums(&wide, place).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains("backend `cpu`"), "{error}");
        }
    }

    #[test]
    fn layers_for_a_gpu_are_warned_of_where_there_is_one() {
        let warning = |layers: Option<i32>, place| {
            let options = LoadOptions::new().with_gpu_layers(layers);
            gpu_layers_warning(&options, place)
        };
        for place in [Place::Metal, Place::Cuda] {
            for some in [0, 20] {
                let said = warning(Some(some), place).unwrap();
                assert!(said.contains("gpu_layers is ignored"), "{said}");
            }
            // MLX always runs all layers on the device, so these values need no warning.
            assert_eq!(
                (warning(None, place), warning(Some(-1), place)),
                (None, None)
            );
        }
        assert_eq!(warning(Some(20), Place::Cpu), None);
    }

    /// Runs `body` and returns the warnings that it logs.
    fn logged(body: impl FnOnce()) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(tracing::Level::WARN)
            .with_writer(std::sync::Arc::new(file.reopen().unwrap()))
            .finish();
        tracing::subscriber::with_default(subscriber, body);
        std::fs::read_to_string(file.path()).unwrap()
    }

    #[test]
    fn no_layers_for_a_gpu_is_logged() {
        let none = LoadOptions::new().with_gpu_layers(0);
        for place in [Place::Metal, Place::Cuda] {
            let said = logged(|| warn_of_gpu_layers(&none, place));
            let once = said.matches("gpu_layers is ignored").count();
            assert!(once == 1 && said.contains("WARN"), "{said:?}");
        }
        // A CPU has no GPU layers, so there must be no warning.
        assert_eq!(logged(|| warn_of_gpu_layers(&none, Place::Cpu)), "");
        let all = LoadOptions::new().with_gpu_layers(-1);
        assert_eq!(logged(|| warn_of_gpu_layers(&all, Place::Metal)), "");
    }
}
