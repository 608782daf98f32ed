//! `mlx serve`: serves models over HTTP to clients of OpenAI, Anthropic and Ollama.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use inference::{CancelToken, ComputeType, LoadOptions, Precision};
use inference_server::{
    Config, Limits, ModelSource, ServedModel, Server, ServerTools, parse_keep_alive,
};

use crate::cli::options::cache::size;
use crate::cli::options::engine::DraftArgs;
use crate::cli::options::load::{
    FeedForwardArgs, GpuLayers, Loaded, at_least_one, backend_for, compute_type, count, find_model,
    gpu_layers, load_with_options, precision,
};
use crate::cli::options::mcp::McpArgs;
use crate::cli::serve::defaults::{CacheArgs, DefaultArgs, LogLevel};
use crate::cli::serve::models::{Adapter, Source, check_lookup, entry, one};
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_signals;

/// Serve models over HTTP to clients of OpenAI, Anthropic and Ollama
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Models to load at the start, named as for --model of other commands. Without a MODEL and
    /// without --models-dir, --cached and --allow-pull, the first known model is served
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    /// A model to load at the start, as by the argument MODEL; may be repeated
    #[arg(long = "model", short = 'm', value_name = "MODEL")]
    more_models: Vec<String>,
    /// The name of the model in requests, if there is exactly one model
    #[arg(long, short = 'a', value_name = "NAME")]
    alias: Option<String>,
    /// Address to listen on; an address that other machines can reach requires an API key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = address)]
    host: IpAddr,
    /// Port to listen on; 0 means any free port
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// The key that clients must send; prefer the variable MLX_API_KEY, which other users cannot
    /// see
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// A file whose first line is the API key
    #[arg(long, value_name = "FILE", conflicts_with = "api_key")]
    api_key_file: Option<PathBuf>,
    /// Maximum number of requests that run together
    #[arg(long, alias = "decode-concurrency", value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    parallel: usize,
    /// Maximum tokens of a prompt and its reply [default: the context for which the model was
    /// trained]
    #[arg(long, short = 'c', value_name = "N", value_parser = at_least_one)]
    ctx_size: Option<usize>,
    /// Maximum number of waiting requests; further requests are refused
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count)]
    max_queue: usize,
    /// Memory for the KV caches of running requests, such as 8GiB. A request counts with its prompt
    /// and its longest possible reply, and waits until it fits
    #[arg(long, value_name = "SIZE", value_parser = size)]
    kv_budget: Option<u64>,
    /// Memory for the KV caches of finished requests, which later requests with the same beginning
    /// reuse, such as 8GiB; 0 keeps none [default: 2GiB, or one request]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    prompt_cache_bytes: Option<u64>,
    /// Also serve the models below this directory; each is loaded when a request first names it;
    /// may be repeated
    #[arg(long, value_name = "DIR")]
    models_dir: Vec<PathBuf>,
    /// Also serve the models in the caches (see `mlx ls`); each is loaded when a request first
    /// names it
    #[arg(long)]
    cached: bool,
    /// Let clients download models (Ollama's /api/pull) and use them; also serves the caches, as
    /// --cached does
    #[arg(long)]
    allow_pull: bool,
    /// Let clients delete models from the caches (Ollama's /api/delete); also serves the caches, as
    /// --cached does
    #[arg(long)]
    allow_delete: bool,
    /// How long a model loaded by name stays loaded after its last request, such as 5m or 1h30m; 0
    /// unloads it at once, -1 never. With this flag, models named at the start are also unloaded,
    /// and loaded again on demand [default: 5m]
    #[arg(long, value_name = "DURATION", allow_hyphen_values = true, value_parser = keep_alive)]
    keep_alive: Option<KeepAlive>,
    /// Seconds that running replies may continue after Ctrl-C or SIGTERM; then they are cancelled
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32))]
    drain_timeout: u32,
    /// Maximum number of models loaded by name; before another is loaded, the least recently used
    /// is unloaded
    #[arg(long, alias = "models-max", value_name = "N", default_value_t = 3, value_parser = at_least_one)]
    max_models: usize,
    /// Let the first model answer requests that name an unknown model, for clients with a fixed
    /// model name
    #[arg(long)]
    any_model: bool,
    /// Let requests change the model's states during inference, by edits in their field `steering`
    /// (docs/edits.md)
    #[arg(long)]
    allow_steering: bool,
    /// Also serve MODEL:NAME, each model with the adapter in this directory; may be repeated
    #[arg(long, value_name = "NAME=DIR", value_parser = adapter)]
    adapter: Vec<Adapter>,
    /// Accept requests of web pages from this origin, such as `https://chat.example`; may be
    /// repeated or contain several origins separated by commas; `*` means all
    #[arg(
        long,
        alias = "allowed-origins",
        value_name = "ORIGIN",
        value_delimiter = ','
    )]
    allow_origin: Vec<String>,
    /// Do not serve the chat page at `/`
    #[arg(long, alias = "no-webui")]
    no_ui: bool,
    /// How much to log to standard error; overrides -v and RUST_LOG
    #[arg(long, value_name = "LEVEL", ignore_case = true)]
    log_level: Option<LogLevel>,
    /// The backend (see `mlx backends`) [default: MLX_BACKEND, otherwise the best available]
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Layers to compute on a GPU. MLX computes all layers on one device: 0 means the CPU, any
    /// other number or `all` means a GPU if there is one
    #[arg(long, visible_alias = "n-gpu-layers", value_name = "N", allow_negative_numbers = true, conflicts_with = "backend", value_parser = gpu_layers)]
    gpu_layers: Option<GpuLayers>,
    /// A trained adapter to apply to the model, if there is exactly one model
    #[arg(long, value_name = "DIR")]
    adapter_path: Option<PathBuf>,
    /// Compute in this type instead of the backend's choice: float32, float16 or bfloat16
    #[arg(long, value_name = "TYPE", value_parser = compute_type)]
    dtype: Option<ComputeType>,
    /// Compute prompts exactly, or fast with inputs rounded to 8 bits [default: MLX_CPU_PROMPTS,
    /// otherwise the backend's choice]
    #[arg(long, value_name = "PRECISION", value_parser = precision)]
    precision: Option<Precision>,
    #[command(flatten)]
    mcp: McpArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    defaults: DefaultArgs,
    #[command(flatten)]
    feed_forward: FeedForwardArgs,
}

fn address(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => text
            .parse()
            .map_err(|_| String::from("must be an IP address, such as 127.0.0.1, ::1 or 0.0.0.0")),
    }
}

/// A duration in its own type, because clap would read a plain `Option` as an optional flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct KeepAlive(Option<Duration>);

fn keep_alive(text: &str) -> Result<KeepAlive, String> {
    match parse_keep_alive(text) {
        Ok(time) => Ok(KeepAlive(time)),
        Err(e) => Err(e.message().to_owned()),
    }
}

fn adapter(text: &str) -> Result<Adapter, String> {
    let usable = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    match text.split_once('=') {
        Some((name, dir)) if !name.is_empty() && name.chars().all(usable) && !dir.is_empty() => {
            Ok(Adapter {
                name: name.to_owned(),
                path: PathBuf::from(dir),
            })
        }
        _ => Err(String::from(
            "must be NAME=DIR, with a name of letters, digits, dots, dashes and underscores",
        )),
    }
}

impl Args {
    fn config(&self) -> Result<Config, Failure> {
        let key = self.key()?;
        let config = Config::new()
            .with_address(SocketAddr::new(self.host, self.port))
            .with_api_key(key)
            .with_parallel(self.parallel)
            .with_max_queue(self.max_queue)
            .with_kv_budget(self.kv_budget)
            .with_max_models(self.max_models)
            .with_any_model(self.any_model)
            .with_steering(self.allow_steering)
            .with_ui(!self.no_ui)
            .with_defaults(self.defaults.defaults(&self.draft)?)
            .with_allowed_origins(self.allow_origin.clone());
        let mut limits = Limits::default();
        limits.drain_timeout = Duration::from_secs(self.drain_timeout.into());
        let config = config.with_limits(limits);
        let config = match self.keep_alive {
            Some(KeepAlive(time)) => config.with_keep_alive(time),
            None => config,
        };
        config.validate().map_err(|e| Failure::usage(e.message()))?;
        let models = self.models().count();
        if self.alias.is_some() && models > 1 {
            return Err(Failure::usage(
                "--alias is for one model; serve one, or leave it out",
            ));
        }
        if self.adapter_path.is_some() && models > 1 {
            return Err(Failure::usage(
                "--adapter-path is for one model; serve one, or leave it out",
            ));
        }
        if self.draft.draft_model.is_some()
            && (models > 1 || self.loads_by_name() || !self.adapter.is_empty())
        {
            return Err(Failure::usage(
                "--draft-model drafts for one model; serve one, without --adapter, --models-dir, \
                 --cached, --allow-pull and --allow-delete",
            ));
        }
        if self.feed_forward.is_given()
            && (models > 1 || self.loads_by_name() || !self.adapter.is_empty())
        {
            return Err(Failure::usage(
                "--ffn and --vindex are for one model; serve one, without --adapter, --models-dir, \
                 --cached, --allow-pull and --allow-delete",
            ));
        }
        Ok(config)
    }

    /// The key that clients must send.
    fn key(&self) -> Result<Option<String>, Failure> {
        if let Some(path) = &self.api_key_file {
            let fail =
                |why: String| Failure::usage(format!("--api-key-file {}: {why}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
            return match text.lines().next().map(str::trim) {
                Some(key) if !key.is_empty() => Ok(Some(key.to_owned())),
                _ => Err(fail(String::from(
                    "the first line is empty; it must be the key",
                ))),
            };
        }
        match (&self.api_key, std::env::var("MLX_API_KEY")) {
            (Some(key), _) => Ok(Some(key.clone())),
            (None, Ok(key)) if !key.is_empty() => Ok(Some(key)),
            (None, Err(e @ std::env::VarError::NotUnicode(_))) => {
                Err(Failure::usage(format!("MLX_API_KEY: {e}")))
            }
            (None, _) => Ok(None),
        }
    }

    /// The models to load at the start.
    fn models(&self) -> impl Iterator<Item = &str> {
        self.models
            .iter()
            .chain(&self.more_models)
            .map(String::as_str)
    }

    /// The log level, if the command line sets one.
    pub fn log_level(&self) -> Option<&'static str> {
        self.log_level.map(LogLevel::name)
    }

    /// Whether requests may name models that are not on the command line.
    fn loads_by_name(&self) -> bool {
        self.cached || self.allow_pull || self.allow_delete || !self.models_dir.is_empty()
    }

    /// The models that may be loaded by name, without those of the command line.
    fn source(&self, options: LoadOptions) -> Source {
        Source {
            options,
            context: self.ctx_size,
            dirs: self.models_dir.clone(),
            cached: self.cached || self.allow_pull || self.allow_delete,
            pulls: self.allow_pull,
            deletes: self.allow_delete,
            named: Vec::new(),
            reload: self.keep_alive.is_some(),
            prompt_lookup: self.draft.prompt_lookup,
            adapters: self.adapter.clone(),
        }
    }

    /// Refuses options that several processes with divided models do not support.
    #[cfg(all(unix, feature = "mlx-backend"))]
    pub fn check_together(&self, split: inference::Split) -> Result<(), Failure> {
        self.config()?;
        let by_name = self.loads_by_name() || self.keep_alive.is_some();
        if by_name || !self.adapter.is_empty() || self.mcp.is_given() {
            return Err(Failure::usage(
                "several processes serve the models of the command line; leave out --models-dir, \
                 --cached, --allow-pull, --allow-delete, --keep-alive, --adapter and --mcp",
            ));
        }
        let options = self.unchecked_options("")?.with_split(split);
        options.validate().map_err(|e| Failure::usage(e.message()))
    }

    fn load_options(&self, backend: &str) -> Result<LoadOptions, Failure> {
        let options = self.unchecked_options(backend)?;
        #[cfg(all(unix, feature = "mlx-backend"))]
        let options = match inference_group::current() {
            Some(member) => options.with_split(member.split),
            None => options,
        };
        options
            .validate()
            .map_err(|e| Failure::usage(e.message()))?;
        Ok(options)
    }

    fn unchecked_options(&self, backend: &str) -> Result<LoadOptions, Failure> {
        let mut options = LoadOptions::new()
            .with_backend(backend)
            .with_parallel_slots(self.parallel)
            .with_prompt_cache_bytes(self.prompt_cache_bytes)
            .with_dtype(self.dtype)
            .with_precision(self.precision);
        options.adapter_path.clone_from(&self.adapter_path);
        self.feed_forward.set(&mut options);
        self.cache.set(&mut options)?;
        Ok(options)
    }
}

/// The name of a model in requests. For a path, it is the last part without `.gguf`; otherwise it
/// is the given name.
fn name_of(given: &str, path: &Path) -> String {
    match Path::new(given).exists() {
        false => given.to_owned(),
        true => {
            let is_gguf = path.extension().is_some_and(|e| e == "gguf");
            let name = if is_gguf {
                path.file_stem()
            } else {
                path.file_name()
            };
            name.map_or_else(
                || String::from("model"),
                |name| name.to_string_lossy().into_owned(),
            )
        }
    }
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let config = args.config()?;
    #[cfg(feature = "otel")]
    let _traces = super::traces::Traces::start()?;
    let backend = backend_for(args.backend.as_deref(), args.gpu_layers)?;
    let mut options = args.load_options(backend.name())?;
    if let Some(draft) = args.draft.draft_model.as_deref() {
        options.draft_model = Some(find_model(Some(draft), console)?);
    }
    let lookup = args.draft.prompt_lookup;
    let mut source = args.source(options.clone());
    source.check()?;
    let default = rust_mlx::hub::catalog().first().map(|model| model.name);
    let by_name = args.loads_by_name();
    let mut given: Vec<&str> = args.models().collect();
    if given.is_empty() && !by_name {
        given.extend(default);
    }
    if given.is_empty() && args.alias.is_some() {
        return Err(Failure::usage(
            "--alias is for a model that is loaded at the start; name one",
        ));
    }
    #[cfg(all(unix, feature = "mlx-backend"))]
    if let Some(member) = inference_group::current() {
        args.check_together(member.split)?;
        if !member.gives_orders() {
            return Err(Failure::failed(
                "several processes serve a model on a ring only; start them with `mlx launch`",
            ));
        }
        let shared = load_all(
            (&given, args.alias.as_deref()),
            &backend,
            (&options, lookup),
            console,
        )?;
        return together(member, args.ctx_size, &config, shared, console);
    }
    // If a tool server does not start, the error comes before the models are loaded.
    let tools = args.mcp.start()?.map(|mcp| {
        let host: Arc<dyn inference_server::ToolHost> = mcp.host;
        ServerTools::new(host, mcp.max_rounds)
    });
    if let Some(tools) = &tools {
        let names: Vec<&str> = tools.tools().iter().map(|t| t.name.as_str()).collect();
        console.note(&format!("tools of MCP servers: {}", names.join(", ")));
    }
    let config = config.with_tools(tools);
    let mut models = Vec::new();
    for (name, loaded) in load_all(
        (&given, args.alias.as_deref()),
        &backend,
        (&options, lookup),
        console,
    )? {
        source.named.push((name.clone(), loaded.path.clone()));
        let capabilities = loaded.backend.capabilities();
        let files = entry(name.clone(), &loaded.path, one(&loaded.path).as_ref());
        let model = ServedModel::new(name, loaded.model, capabilities)?;
        models.push(model.with_context(args.ctx_size).with_files(files));
    }
    let stop = CancelToken::new();
    let _guard = console.catches_interrupts.then(|| cancel_on_signals(&stop));
    let mut names: Vec<String> = models.iter().map(|m| m.id().to_owned()).collect();
    if by_name {
        names.push(String::from("models by name"));
    }
    let source: Arc<dyn ModelSource> = Arc::new(source);
    let server = Server::bind_with_source(&config, models, source)?;
    console.note(&format!("serving {}", names.join(", ")));
    console.line(&format!("http://{}", server.address()))?;
    Ok(server.run(&stop)?)
}

/// A model of the command line, with its name in requests.
type Named = (String, Loaded);

/// Loads the models of the command line.
fn load_all(
    (given, alias): (&[&str], Option<&str>),
    backend: &Arc<dyn inference::Backend>,
    (options, lookup): (&LoadOptions, usize),
    console: &mut Console<'_>,
) -> Result<Vec<Named>, Failure> {
    let load = |given: &&str| {
        let path = find_model(Some(given), console)?;
        // For `.` and similar paths, the name comes from the directory.
        let named = path.canonicalize().unwrap_or_else(|_| path.clone());
        let loaded = load_with_options(Arc::clone(backend), &path, options, console)?;
        check_lookup(loaded.model.as_ref(), lookup)?;
        let name = alias.map_or_else(|| name_of(given, &named), str::to_owned);
        Ok((name, loaded))
    };
    given.iter().map(load).collect()
}

/// Serves models that several processes compute. Rank 0 runs the server, and the other ranks
/// execute its commands.
#[cfg(all(unix, feature = "mlx-backend"))]
fn together(
    member: &inference_group::Member,
    context: Option<usize>,
    config: &Config,
    models: Vec<Named>,
    console: &mut Console<'_>,
) -> Result<(), Failure> {
    use inference::TextModel;
    use inference_group::{Leader, LedModel, follow};

    let stop = CancelToken::new();
    // The other ranks end when rank 0 ends. Rank 0 first completes running replies, so signals must
    // not stop the other ranks.
    let _guard = console.catches_interrupts.then(|| cancel_on_signals(&stop));
    if member.rank > 0 {
        let models: Vec<Box<dyn TextModel>> = models.into_iter().map(|(_, m)| m.model).collect();
        return Ok(follow(member.rank, &models, inference_group::next_order)?);
    }
    let leader = Leader::new(inference_group::order);
    let mut served = Vec::new();
    for (number, (name, loaded)) in models.into_iter().enumerate() {
        let capabilities = loaded.backend.capabilities();
        let led = LedModel::new(loaded.model, number, Arc::clone(&leader));
        let led: Arc<dyn TextModel> = Arc::new(led);
        served.push(ServedModel::new(name, led, capabilities)?.with_context(context));
    }
    let names: Vec<String> = served.iter().map(|m| m.id().to_owned()).collect();
    let server = Server::bind(config, served)?;
    console.note(&format!(
        "serving {} with {} processes",
        names.join(", "),
        member.size
    ));
    console.line(&format!("http://{}", server.address()))?;
    let ended = server.run(&stop);
    let told = Leader::stop(&leader);
    ended?;
    Ok(told?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_given_or_the_last_part_of_a_path() {
        let here = env!("CARGO_MANIFEST_DIR");
        for (given, path, name) in [
            ("owner/name", "/cache/snapshots/1234", "owner/name"),
            (here, "/models/Tiny-Chat", "Tiny-Chat"),
            (here, "/models/tiny.Q4_0.gguf", "tiny.Q4_0"),
            (here, "/", "model"),
        ] {
            assert_eq!(name_of(given, Path::new(path)), name);
        }
    }

    #[test]
    fn adapters_have_a_name_and_a_directory() {
        let given = adapter("law-2=somewhere/a=b").unwrap();
        assert_eq!(given.name, "law-2");
        assert_eq!(given.path, Path::new("somewhere/a=b"));
        for bad in ["", "law", "=dir", "law=", "a:b=dir", "a b=dir"] {
            assert!(adapter(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations() {
        assert_eq!(
            keep_alive("2m"),
            Ok(KeepAlive(Some(Duration::from_secs(120))))
        );
        assert_eq!(keep_alive("-1"), Ok(KeepAlive(None)));
        assert!(keep_alive("soon").is_err());
    }

    #[test]
    fn addresses() {
        assert!(address("localhost").unwrap().is_loopback());
        assert!(address("::1").unwrap().is_loopback());
        assert!(address("example.com").is_err());
    }
}
