//! Loads the model that `--model` and `--backend` select.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use inference::{
    AttentionSums, Backend, ComputeType, FeedForwardPlan, LoadOptions, Precision, TextModel,
};

use crate::cli::options::cache::{CacheDirArgs, KvArgs};
use crate::cli::options::preset::{self, Preset};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::progress::{HubProgress, Spinner};

/// The flag that selects the model.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ModelArgs {
    /// The model: a directory, a .gguf file, a known name (see `mlx pull --list`) or owner/name on
    /// the Hugging Face Hub, downloaded once [default: the first known model]
    #[arg(long, short, aliases = ["hf-path", "hf-repo"], value_name = "MODEL")]
    pub model: Option<String>,
}

/// The flags for loading a model.
#[derive(Debug, Clone, clap::Args)]
pub struct LoadArgs {
    /// The backend (see `mlx backends`) [default: MLX_BACKEND, otherwise the best available]
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Layers to compute on a GPU. MLX computes all layers on one device: 0 means the CPU, any
    /// other number or `all` means a GPU if there is one
    #[arg(long, visible_alias = "n-gpu-layers", value_name = "N", allow_negative_numbers = true, conflicts_with = "backend", value_parser = gpu_layers)]
    pub gpu_layers: Option<GpuLayers>,
    /// Maximum positions in each layer's cache; beyond it, the oldest positions are dropped
    #[arg(long, short = 'c', visible_alias = "max-kv-size", value_name = "N", value_parser = at_least_one)]
    pub ctx_size: Option<usize>,
    #[command(flatten)]
    pub kv: KvArgs,
    /// A trained adapter to apply to the model: the directory with its adapters.safetensors
    #[arg(long, value_name = "DIR")]
    pub adapter_path: Option<PathBuf>,
    /// Compute in this type instead of the backend's choice: float32, float16 or bfloat16
    #[arg(long, value_name = "TYPE", value_parser = compute_type)]
    pub dtype: Option<ComputeType>,
    /// Compute prompts exactly, or fast with inputs rounded to 8 bits [default: MLX_CPU_PROMPTS,
    /// otherwise the backend's choice]
    #[arg(long, value_name = "PRECISION", value_parser = precision)]
    pub precision: Option<Precision>,
    /// Compute attention in this type: native, or float64 as a check (slow, CPU only)
    #[arg(long, value_name = "TYPE", default_value_t = AttentionSums::Native, value_parser = attention_sums)]
    pub attention_sums: AttentionSums,
    #[command(flatten)]
    pub feed_forward: FeedForwardArgs,
    /// The flags of the commands that keep computed prompts.
    #[arg(skip)]
    cache_dir: CacheDirArgs,
}

/// The device of the layers, from llama.cpp's flag `-ngl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuLayers {
    /// The CPU computes all layers.
    None,
    /// A GPU computes all layers.
    Some,
}

/// Parses a number of layers. llama.cpp also accepts `all`, `auto` and -1.
pub fn gpu_layers(text: &str) -> Result<GpuLayers, String> {
    match (text, text.parse::<i32>()) {
        ("all" | "auto", _) => Ok(GpuLayers::Some),
        (_, Ok(0)) => Ok(GpuLayers::None),
        (_, Ok(-1 | 1..)) => Ok(GpuLayers::Some),
        _ => Err("must be 0 (the CPU), a number of layers, or `all`".into()),
    }
}

/// The flags for feed-forward parts.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct FeedForwardArgs {
    /// How to compute the feed-forward parts of layers, such as `0-11=dense,12-=sparse:512`; also
    /// `walk:K`, `attention-only` and `gain:G` (docs/feed-forward.md)
    #[arg(long = "ffn", value_name = "PLAN", value_parser = plans)]
    plan: Option<Plans>,
    /// The features for walking layers: a directory written by `mlx vindex build`
    #[arg(long, value_name = "DIR", requires = "plan")]
    vindex: Option<PathBuf>,
    /// Do not load the feed-forward weights of walking layers: needs less memory, but the gate is
    /// also read from the features
    #[arg(long)]
    walk_only: bool,
}

/// One plan, or several plans that `mlx bench` compares.
#[derive(Debug, Clone)]
struct Plans(Vec<FeedForwardPlan>);

impl FeedForwardArgs {
    /// The plans to compare, if there are several.
    pub fn several(&self) -> Option<&[FeedForwardPlan]> {
        let plans = &self.plan.as_ref()?.0;
        (plans.len() > 1).then_some(plans)
    }

    /// Returns these flags with only one plan. If no layer of the plan walks, removes the vindex.
    #[must_use]
    pub fn only(&self, plan: &FeedForwardPlan) -> Self {
        let walks = plan.walks();
        Self {
            plan: Some(Plans(vec![plan.clone()])),
            vindex: self.vindex.clone().filter(|_| walks),
            walk_only: self.walk_only && walks,
        }
    }

    fn one(&self) -> FeedForwardPlan {
        let first = self.plan.as_ref().and_then(|plans| plans.0.first());
        first.cloned().unwrap_or_default()
    }

    pub fn is_given(&self) -> bool {
        self.plan.is_some() || self.vindex.is_some() || self.walk_only
    }

    /// The plan as text.
    pub fn shown(&self) -> String {
        self.one().to_string()
    }

    /// Removes the plan, because the caller makes one per measurement. Returns whether plans skip
    /// the weights of walking layers.
    #[cfg(feature = "probe")]
    pub fn without_plan(&mut self) -> Result<bool, Failure> {
        if self.plan.is_some() || self.vindex.is_some() {
            return Err(Failure::usage(
                "this command makes its own plans; leave --ffn and --vindex out",
            ));
        }
        Ok(std::mem::take(&mut self.walk_only))
    }

    /// Sets these flags in `options`.
    pub fn set(&self, options: &mut LoadOptions) {
        options.feed_forward = self.one();
        options.vindex.clone_from(&self.vindex);
        options.walk_only = self.walk_only;
    }
}

/// A loaded model with its backend and path.
pub struct Loaded {
    pub model: Box<dyn TextModel>,
    /// The backend that loaded it.
    pub backend: Arc<dyn Backend>,
    /// The path of the model.
    pub path: PathBuf,
    /// Load time in seconds, without the download.
    pub load_seconds: f64,
}

/// Parses a count of at least one.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match count(text) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("must be a whole number, 1 or more".into()),
    }
}

pub fn count(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| "must be a whole number, 0 or more".into())
}

/// Parses one or several plans: a plan by layers, several such plans separated by `;`, or several
/// strategies for all layers, such as `dense,walk:64`.
fn plans(text: &str) -> Result<Plans, String> {
    let plan =
        |text: &str| (text.trim().parse::<FeedForwardPlan>()).map_err(|e| e.message().to_owned());
    if text.contains(';') {
        return text
            .split(';')
            .map(plan)
            .collect::<Result<_, _>>()
            .map(Plans);
    }
    let single = plan(text).map(|plan| Plans(vec![plan]));
    let for_all = |text: &str| !text.contains('=') && text.contains(',');
    match single {
        Err(why) if for_all(text) => {
            let several = text.split(',').map(plan).collect::<Result<_, _>>();
            several.map(Plans).map_err(|_| why)
        }
        single => single,
    }
}

pub fn compute_type(text: &str) -> Result<ComputeType, String> {
    text.parse()
        .map_err(|_| "must be float32, float16 or bfloat16".to_owned())
}

pub fn precision(text: &str) -> Result<Precision, String> {
    text.parse().map_err(|_| "must be exact or fast".to_owned())
}

pub fn attention_sums(text: &str) -> Result<AttentionSums, String> {
    text.parse()
        .map_err(|_| "must be native or float64".to_owned())
}

impl LoadArgs {
    /// The defaults without any flag.
    #[cfg(test)]
    pub fn none() -> Self {
        let defaults = LoadOptions::default();
        Self {
            backend: None,
            gpu_layers: None,
            ctx_size: None,
            kv: KvArgs::default(),
            adapter_path: None,
            dtype: None,
            precision: None,
            attention_sums: defaults.attention_sums,
            feed_forward: FeedForwardArgs::default(),
            cache_dir: CacheDirArgs::default(),
        }
    }

    /// Returns these flags, extended by the flags of a command that keeps computed prompts.
    #[must_use]
    pub fn keeping(&self, cache_dir: &CacheDirArgs) -> Self {
        let mut args = self.clone();
        args.cache_dir.clone_from(cache_dir);
        args
    }

    fn options(&self, backend: &str) -> LoadOptions {
        let mut options = LoadOptions::default();
        options.backend = Some(backend.to_owned());
        options.context_len = self.ctx_size;
        options.dtype = self.dtype;
        options.precision = self.precision;
        options.attention_sums = self.attention_sums;
        self.kv.set(&mut options);
        options.adapter_path.clone_from(&self.adapter_path);
        self.feed_forward.set(&mut options);
        self.cache_dir.set(&mut options);
        #[cfg(all(unix, feature = "mlx-backend"))]
        if let Some(member) = inference_group::current() {
            options.split = member.split;
        }
        options
    }

    /// Whether a given flag changes the needed memory, or is refused by some models or devices. The
    /// flags for backend and type do not count.
    #[cfg(feature = "mlx-backend")]
    pub fn changes_needs(&self) -> bool {
        self.feed_forward.is_given()
            || self.adapter_path.is_some()
            || self.ctx_size.is_some()
            || self.kv.bits.is_some()
            || self.attention_sums != AttentionSums::Native
    }

    /// Refuses options that a model divided among processes does not support.
    #[cfg(all(unix, feature = "mlx-backend"))]
    pub fn check_split(&self, split: inference::Split) -> Result<(), Failure> {
        let options = self.options("").with_split(split);
        options
            .validate()
            .map_err(|e| Failure::usage(e.to_string()))
    }

    /// The options for a backend, checked.
    pub fn checked(&self, backend: &str) -> Result<LoadOptions, Failure> {
        if self.feed_forward.several().is_some() {
            return Err(Failure::usage(
                "--ffn has several plans, which `mlx bench` compares; this command takes one",
            ));
        }
        let options = self.options(backend);
        options
            .validate()
            .map_err(|e| Failure::usage(e.to_string()))?;
        Ok(options)
    }
}

/// The best backend that is available.
fn default_backend() -> Result<Arc<dyn Backend>, Failure> {
    let error = match inference::default_backend() {
        Ok(backend) => return Ok(backend),
        Err(error) => error,
    };
    // Without MLX's library, each backend fails for this reason. The other error would repeat the
    // reason for each backend.
    #[cfg(feature = "mlx-backend")]
    if let Err(e) = mlx_rs_core::library::load() {
        return Err(Failure::failed(format!("no backend can be used: {e}")));
    }
    Err(error.into())
}

/// The names of backends that compute on a GPU.
pub const GPUS: [&str; 2] = ["metal", "cuda"];

/// The name that selects any available GPU.
const GPU: &str = "gpu";

/// The available GPU backend.
fn gpu() -> Result<Option<Arc<dyn Backend>>, Failure> {
    for name in GPUS {
        // This program may be built without the backend.
        let Ok(backend) = inference::backend(name) else {
            continue;
        };
        if inference::availability(backend.as_ref()).is_ok() {
            return Ok(Some(backend));
        }
    }
    Ok(None)
}

impl LoadArgs {
    /// The backend that the flags name. Otherwise the backend in `MLX_BACKEND`, otherwise the
    /// default backend.
    pub fn backend(&self) -> Result<Arc<dyn Backend>, Failure> {
        self.kv.check()?;
        if self.ctx_size.is_some() && self.kv.is_quantized() {
            return Err(Failure::usage(
                "--kv-bits below 16 and --ctx-size do not go together: a bounded cache is not quantized",
            ));
        }
        backend_for(self.backend.as_deref(), self.gpu_layers)
    }
}

/// The backend that `flag` names, or a backend for the device of `--gpu-layers`.
pub fn backend_for(
    flag: Option<&str>,
    layers: Option<GpuLayers>,
) -> Result<Arc<dyn Backend>, Failure> {
    match layers {
        None => choose_backend(flag),
        Some(GpuLayers::None) => choose_backend(Some("cpu")),
        // As in llama.cpp, the CPU computes the layers if there is no GPU.
        Some(GpuLayers::Some) => match gpu()? {
            Some(backend) => Ok(backend),
            None => choose_backend(flag),
        },
    }
}

/// The backend that the flag names. Otherwise the backend in `MLX_BACKEND`, otherwise the default
/// backend.
pub fn choose_backend(flag: Option<&str>) -> Result<Arc<dyn Backend>, Failure> {
    let variable = match std::env::var("MLX_BACKEND") {
        Ok(name) => Some(name),
        Err(std::env::VarError::NotPresent) => None,
        Err(e) => return Err(Failure::failed(format!("MLX_BACKEND: {e}"))),
    };
    let (name, origin) = match (flag, variable.as_deref().map(str::trim)) {
        (Some(name), _) => (name, "--backend"),
        (None, Some(name)) if !name.is_empty() => (name, "MLX_BACKEND"),
        _ => return default_backend(),
    };
    if name.eq_ignore_ascii_case(GPU) {
        return gpu()?.ok_or_else(|| {
            Failure::failed(format!(
                "{origin}: no GPU works here; `mlx backends` says why not"
            ))
        });
    }
    // An empty name would select the default backend, but a user who gives the flag wants a
    // specific one.
    if name.trim().is_empty() {
        return Err(Failure::usage("--backend needs a name; see `mlx backends`"));
    }
    Ok(inference::backend(name).map_err(|e| e.context(origin))?)
}

/// The preset that `--model` names. A file with that name has priority.
pub fn find_preset(model: Option<&str>) -> Result<Option<Preset>, Failure> {
    match model {
        Some(name) if !Path::new(name).exists() => preset::find(name),
        _ => Ok(None),
    }
}

/// Finds a model, and downloads a known model that is not cached. For a preset, finds only the
/// preset's model.
///
/// # Errors
/// If the preset has an adapter, because the callers would ignore it.
pub fn find_model(model: Option<&str>, console: &mut Console<'_>) -> Result<PathBuf, Failure> {
    match find_preset(model)? {
        None => fetched(model, console),
        Some(Preset {
            adapter: Some(adapter),
            from,
            ..
        }) => Err(Failure::usage(format!(
            "{} is a preset with an adapter, which is not for this command; give {from}, and the adapter {adapter} where \
             one is taken",
            model.unwrap_or_default()
        ))),
        Some(preset) => fetched(Some(&preset.from), console),
    }
}

/// Finds a model that is not a preset, and downloads it if necessary.
pub fn fetched(model: Option<&str>, console: &mut Console<'_>) -> Result<PathBuf, Failure> {
    let mut progress = HubProgress::new(console);
    let error = match rust_mlx::hub::resolve(model, &mut progress) {
        Ok(path) => return Ok(path),
        Err(error) => error,
    };
    drop(progress);
    if error.kind() == inference::ErrorKind::ModelNotFound
        && !error.message().contains("did you mean")
        && let (Some(name), Ok(presets)) = (model, preset::all())
    {
        let names: Vec<String> = presets.into_iter().map(|(name, ..)| name).collect();
        let like = rust_mlx::hub::similar(name, &names);
        if let Some(preset) = like.iter().find(|name| names.contains(name)) {
            return Err(Failure::failed(format!(
                "{}; did you mean {preset}?",
                crate::cli::terminal::failure::chain(&error)
            )));
        }
    }
    Err(error.into())
}

/// Loads the model at `path` with `backend`. `draft` is the draft model.
pub fn load_with(
    backend: Arc<dyn Backend>,
    path: &Path,
    args: &LoadArgs,
    draft: Option<&str>,
    console: &mut Console<'_>,
) -> Result<Loaded, Failure> {
    let mut options = args.checked(backend.name())?;
    if let Some(draft) = draft {
        options.draft_model = Some(find_model(Some(draft), console)?);
    }
    load_with_options(backend, path, &options, console)
}

/// Loads the model at `path` with `backend`; `options` contains its name, too. A process that
/// belongs to a group joins the group first.
pub fn load_with_options(
    backend: Arc<dyn Backend>,
    path: &Path,
    options: &LoadOptions,
    console: &mut Console<'_>,
) -> Result<Loaded, Failure> {
    #[cfg(all(unix, feature = "mlx-backend"))]
    inference_group::join()?;
    tracing::info!(path = %path.display(), backend = backend.name(), "loading");
    tracing::debug!(?options, "load options");
    let spinner = Spinner::start("loading the model", console);
    let started = Instant::now();
    let model = inference::load_model(path, options);
    let load_seconds = started.elapsed().as_secs_f64();
    drop(spinner);
    let model = model?;
    tracing::info!(seconds = load_seconds, "loaded");
    let info = model.info();
    tracing::debug!(
        architecture = info.architecture,
        parameters = info.parameters,
        layers = info.num_layers,
        context = info.context_length,
        device = info.device,
        "the model"
    );
    Ok(Loaded {
        model,
        backend,
        path: path.to_owned(),
        load_seconds,
    })
}

/// Chooses the backend first, because this is fast and may fail. Then finds and loads the model.
pub fn load(
    model: &ModelArgs,
    args: &LoadArgs,
    console: &mut Console<'_>,
) -> Result<Loaded, Failure> {
    load_drafted(model, args, None, console)
}

/// [`load`] with a draft model, if the flags name one.
pub fn load_drafted(
    model: &ModelArgs,
    args: &LoadArgs,
    draft: Option<&str>,
    console: &mut Console<'_>,
) -> Result<Loaded, Failure> {
    let backend = args.backend()?;
    let path = find_model(model.model.as_deref(), console)?;
    load_with(backend, &path, args, draft, console)
}

/// [`load_drafted`] for a preset's model. Flags override the preset's adapter and context.
pub fn load_preset(
    preset: &Preset,
    args: &LoadArgs,
    draft: Option<&str>,
    console: &mut Console<'_>,
) -> Result<Loaded, Failure> {
    let mut args = args.clone();
    // A quantized cache cannot be bounded. Such a `--kv-bits` overrides the preset's bound.
    if !args.kv.is_quantized() {
        args.ctx_size = args.ctx_size.or(preset.ctx_size());
    }
    let adapter = preset.adapter.as_ref().map(PathBuf::from);
    args.adapter_path = args.adapter_path.or(adapter);
    let backend = args.backend()?;
    let path = fetched(Some(&preset.from), console)?;
    load_with(backend, &path, &args, draft, console)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_a_gpu_are_all_or_none() {
        assert_eq!(gpu_layers("0"), Ok(GpuLayers::None));
        for all in ["99", "1", "-1", "all", "auto"] {
            assert_eq!(gpu_layers(all), Ok(GpuLayers::Some), "{all}");
        }
        for bad in ["", "-2", "x", "1.5"] {
            assert!(gpu_layers(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn counts_are_at_least_one() {
        assert_eq!(at_least_one("1"), Ok(1));
        for bad in ["0", "-1", "", "1.5", "99999999999999999999999"] {
            assert!(at_least_one(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn types_are_named_in_the_error() {
        assert_eq!(compute_type("bfloat16"), Ok(ComputeType::BFloat16));
        assert!(compute_type("int8").unwrap_err().contains("float16"));
        assert_eq!(precision("fast"), Ok(Precision::Fast));
        assert!(precision("int8").unwrap_err().contains("exact"));
    }
}
