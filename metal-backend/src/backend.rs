//! The MLX backend: registration under three names, and loading of models.

mod cache_cost;
mod load;
mod options;
mod place;
mod source;

use std::path::Path;
use std::sync::Arc;

use inference::{
    AttentionSums, Backend, Capabilities, ComputeType, Error, ErrorKind, FeedForwardPlan,
    LoadOptions, ModelInfo, Result, Split, TextModel,
};
use mlx_rs_core::Stream;

use crate::arch;
use crate::cache::tier::Directory;
use crate::checkpoint::Family;
use crate::divided;
use crate::engine::{Engine, Parts};
use crate::error::engine;
use crate::exec;
use crate::generate::check_rewinds;
use crate::loader::options_of_vindex;
use crate::model::{EncoderModel, MlxModel};
use crate::nn::router::FfnRouter;
use crate::sample;
use crate::text::TextPipeline;

pub(crate) use cache_cost::CacheCost;
use load::load;
pub(crate) use load::{copied, open_weights, reduced};
use options::warn_of_gpu_layers;
pub(crate) use options::{cache_options, check_attention_sums, check_keyless};
pub(crate) use place::Place;
pub(crate) use source::OpenModel;

inference::register_backend!("metal", || Box::new(MlxBackend(Place::Metal)));
inference::register_backend!("cuda", || Box::new(MlxBackend(Place::Cuda)));
inference::register_backend!("cpu", || Box::new(MlxBackend(Place::Cpu)));

/// The supported architectures by `model_type`, sorted.
#[must_use]
pub fn architectures() -> Vec<&'static str> {
    arch::names().collect()
}

/// The architecture names in GGUF files with the `model_type` of each, sorted.
///
/// GGUF files store Mistral and Mixtral as `llama`; a model with experts is Mixtral. They store
/// OLMo 3 as `olmo2`; a model with a sliding window is OLMo 3.
#[must_use]
pub fn gguf_architectures() -> Vec<(&'static str, &'static str)> {
    let families = Family::all().iter();
    let mut all: Vec<_> = families
        .filter_map(|f| Some((f.gguf.as_ref()?.architecture, f.model_type)))
        .collect();
    all.sort_unstable();
    all
}

struct MlxBackend(Place);

impl Backend for MlxBackend {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn available(&self) -> bool {
        self.0.is_available()
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
            // A feed-forward plan names layers of the main model, so it does not fit the draft
            // model.
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

/// Describes the settings that change computed keys and values, besides the model, its adapter and
/// the type of its caches. Includes the program's version, because another version may compute
/// other values.
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

/// Creates the model type for `engine`: an encoder or a decoder.
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
    let Some(place) = Place::named(options.backend.as_deref()) else {
        return Err(Error::new(
            ErrorKind::UnknownBackend,
            "this needs the backend metal, cuda or cpu, but the options name another",
        ));
    };
    MlxBackend(place).engine(path, options, router)
}

/// Whether two models tokenize texts in the same way.
fn alike(a: &TextPipeline, b: &TextPipeline) -> Result<bool> {
    const SAMPLE: &str =
        "The quick brown fox (aged 13) isn't lazy;\n\tGr\u{f6}\u{df}e, \u{6771}\u{4eac}!";
    Ok(a.tokenizer().encode(SAMPLE, false)? == b.tokenizer().encode(SAMPLE, false)?)
}
