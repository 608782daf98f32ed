//! `mlx serve`: models over HTTP, for clients of OpenAI, Anthropic and Ollama.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use inference::{CancelToken, ComputeType, LoadOptions};
use inference_server::{Config, ServedModel, Server};

use super::console::Console;
use super::failure::Failure;
use super::interrupt::cancel_on_signals;
use super::load::{
    at_least_one, choose_backend, compute_type, count, find_model, load_with_options,
};

/// Serve models over HTTP to clients of OpenAI, Anthropic and Ollama
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Models to serve, as --model of other commands takes them; without one, the first known model
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    /// Address to listen on; any but one of this machine alone needs an API key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = address)]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Clients must show this key; better in the variable MLX_API_KEY, which other users cannot see
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Requests that run together
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    parallel: usize,
    /// The most tokens of a prompt and its reply; without it, what the model was trained for
    #[arg(long, short = 'c', value_name = "N", value_parser = at_least_one)]
    ctx_size: Option<usize>,
    /// Requests that wait for a place; more are refused
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = count)]
    max_queue: usize,
    /// Let web pages of this origin ask, such as `https://chat.example`; may be repeated, `*` is
    /// all
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// The backend (see `mlx backends`); without it, MLX_BACKEND, else the best available
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// A trained adapter to put on the model, of which there must be one
    #[arg(long, value_name = "DIR")]
    adapter_path: Option<PathBuf>,
    /// Compute in this type instead of the backend's choice: float32, float16 or bfloat16
    #[arg(long, value_name = "TYPE", value_parser = compute_type)]
    dtype: Option<ComputeType>,
}

fn address(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => text
            .parse()
            .map_err(|_| String::from("must be an IP address, such as 127.0.0.1, ::1 or 0.0.0.0")),
    }
}

impl Args {
    fn config(&self) -> Result<Config, Failure> {
        let key = match (&self.api_key, std::env::var("MLX_API_KEY")) {
            (Some(key), _) => Some(key.clone()),
            (None, Ok(key)) if !key.is_empty() => Some(key),
            (None, Err(e @ std::env::VarError::NotUnicode(_))) => {
                return Err(Failure::usage(format!("MLX_API_KEY: {e}")));
            }
            (None, _) => None,
        };
        let config = Config::new()
            .with_address(SocketAddr::new(self.host, self.port))
            .with_api_key(key)
            .with_parallel(self.parallel)
            .with_max_queue(self.max_queue)
            .with_allowed_origins(self.allow_origin.clone());
        config.validate().map_err(|e| Failure::usage(e.message()))?;
        if self.adapter_path.is_some() && self.models.len() > 1 {
            return Err(Failure::usage(
                "--adapter-path is for one model; serve one, or leave it out",
            ));
        }
        Ok(config)
    }

    fn load_options(&self, backend: &str) -> Result<LoadOptions, Failure> {
        let mut options = LoadOptions::new()
            .with_backend(backend)
            .with_parallel_slots(self.parallel)
            .with_dtype(self.dtype);
        options.adapter_path.clone_from(&self.adapter_path);
        options
            .validate()
            .map_err(|e| Failure::usage(e.message()))?;
        Ok(options)
    }
}

/// The name of a model for requests: the given one, but of a path only the last part, without
/// `.gguf`.
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

/// Runs the command.
pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let config = args.config()?;
    let backend = choose_backend(args.backend.as_deref())?;
    let options = args.load_options(backend.name())?;
    let default = rust_mlx::hub::catalog().first().map(|model| model.name);
    let given: Vec<&str> = match args.models.as_slice() {
        [] => default.into_iter().collect(),
        models => models.iter().map(String::as_str).collect(),
    };
    let mut models = Vec::new();
    for given in given {
        let path = find_model(Some(given), console)?;
        // Of `.` and the like the name is that of the directory.
        let named = path.canonicalize().unwrap_or_else(|_| path.clone());
        let name = name_of(given, &named);
        let loaded = load_with_options(backend.clone(), &path, &options, console)?;
        let capabilities = loaded.backend.capabilities();
        let model = ServedModel::new(name, loaded.model, capabilities)?;
        models.push(model.with_context(args.ctx_size));
    }
    let stop = CancelToken::new();
    let _guard = console.catches_interrupts.then(|| cancel_on_signals(&stop));
    let names: Vec<&str> = models.iter().map(ServedModel::id).collect();
    let serving = format!("serving {}", names.join(", "));
    let server = Server::bind(&config, models)?;
    console.note(&serving);
    console.line(&format!("http://{}", server.address()))?;
    Ok(server.run(&stop)?)
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
    fn addresses() {
        assert!(address("localhost").unwrap().is_loopback());
        assert!(address("::1").unwrap().is_loopback());
        assert!(address("example.com").is_err());
    }
}
