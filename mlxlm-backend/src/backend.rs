//! The backend `mlx_lm`: its registration, the check of its Python, and loading.

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use inference::{
    Backend, Capabilities, ComputeType, Error, ErrorKind, LoadOptions, Result, SamplingDefaults,
    TextModel,
};
use parking_lot::Mutex;
use serde_json::json;

use crate::model::MlxLmModel;
use crate::options;
use crate::session::{self, Session};
use crate::settings::{PYTHON_VARIABLE, Settings};

inference::register_backend!("mlx_lm", || Box::new(MlxLmBackend::default()));

/// How long a failed probe is remembered. The user may install mlx-lm in the meantime.
const DOUBT: Duration = Duration::from_secs(5);

/// The backend `mlx_lm`.
#[derive(Debug, Default)]
pub struct MlxLmBackend {
    settings: Settings,
    /// The result of the last probe, kept because importing mlx-lm takes seconds.
    known: Mutex<Option<Known>>,
}

#[derive(Debug)]
struct Known {
    interpreter: OsString,
    at: Instant,
    /// The description of the interpreter, or the reason why it cannot be used.
    found: Result<String, String>,
}

impl MlxLmBackend {
    /// A backend with other settings than the registered one. This does not register it.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            known: Mutex::new(None),
        }
    }

    /// Probes the interpreter, unless the result is known.
    fn found(&self) -> Result<String, String> {
        // Concurrent callers wait for one probe.
        let mut known = self.known.lock();
        let interpreter = self.settings.interpreter();
        let fresh = |k: &&Known| {
            k.interpreter == interpreter && (k.found.is_ok() || k.at.elapsed() < DOUBT)
        };
        if let Some(known) = known.as_ref().filter(fresh) {
            return known.found.clone();
        }
        let probed = self.probe(&interpreter);
        *known = Some(Known {
            interpreter,
            at: Instant::now(),
            found: probed.clone(),
        });
        probed
    }

    fn probe(&self, interpreter: &OsString) -> Result<String, String> {
        let python = interpreter.to_string_lossy();
        let reply = session::probe(&self.settings).map_err(|e| e.to_string())?;
        if let Some(why) = reply.error {
            let why = one_line(&why);
            return Err(format!(
                "`{python}` cannot import mlx_lm ({why}); install it with `{python} -m pip install mlx-lm`, or set \
                 {PYTHON_VARIABLE} to an interpreter that has it"
            ));
        }
        let part = |text: Option<String>| text.unwrap_or_else(|| String::from("?"));
        Ok(format!(
            "{} through Python {} (mlx-lm {}, MLX {})",
            part(reply.device),
            part(reply.python),
            part(reply.mlx_lm),
            part(reply.mlx)
        ))
    }
}

impl Backend for MlxLmBackend {
    fn name(&self) -> &str {
        "mlx_lm"
    }

    fn available(&self) -> bool {
        self.found().is_ok()
    }

    fn unavailable_reason(&self) -> Option<String> {
        self.found().err()
    }

    fn device(&self) -> String {
        self.found().unwrap_or_else(|_| {
            let python = self.settings.interpreter();
            format!("Python (`{}`)", python.to_string_lossy())
        })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new()
            .with_streaming()
            .with_chat()
            .with_logits()
            .with_adapters()
            .with_safetensors()
            .with_seeds()
            .with_logprobs()
    }

    fn load_model(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
        options.validate()?;
        check_path(path)?;
        let path = absolute(path)?;
        let adapter = options.adapter_path.as_deref().map(absolute).transpose()?;
        if let Some(adapter) = &adapter
            && !Path::new(adapter).is_dir()
        {
            return Err(Error::new(
                ErrorKind::ModelNotFound,
                "there is no adapter here; give the directory with adapter_config.json and \
                 adapters.safetensors",
            )
            .with_path(adapter));
        }
        if options.gpu_layers.is_some_and(|n| n > 0) {
            tracing::warn!("gpu_layers is ignored: MLX runs the whole model on its device");
        }
        if options.draft_model.is_some() {
            return options::native("draft_model");
        }
        if options.kv_bits.is_some_and(|bits| bits >= 16) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "kv_bits of 16 or 32 is not supported by mlx-lm, whose caches have the compute type; \
                 use 8 or fewer, or leave it out",
            ));
        }
        refuse_unknown(options)?;
        let load = json!({
            "op": "load",
            "context_len": options.context_len,
            "kv_bits": options.kv_bits,
            "kv_group_size": options.kv_group_size,
            "quantized_kv_start": options.quantized_kv_start,
            "path": path,
            "adapter": adapter,
            "dtype": options.dtype.map(ComputeType::as_str),
        });
        // MLX cannot divide layers between devices. It can only honor 0, no layer on the GPU.
        let on_cpu = options.gpu_layers == Some(0);
        let (session, loaded) = Session::open(self.settings.clone(), load, on_cpu)
            .map_err(|e| at_model(e, path.as_ref()))?;
        let recommended = SamplingDefaults::from_dir(path.as_ref()).unwrap_or_else(|e| {
            tracing::warn!("the model's recommended sampling is ignored: {e}");
            SamplingDefaults::default()
        });
        let model = MlxLmModel::new(session, &loaded, recommended)?;
        Ok(Box::new(model))
    }
}

/// The options that are honored, or that have no effect on this backend.
const KNOWN: [&str; 8] = [
    "context_len",
    "parallel_slots",
    "adapter_path",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "draft_model",
    "dtype",
];

/// Refuses options that later versions of the contract may add, unless they have their defaults.
fn refuse_unknown(options: &LoadOptions) -> Result<()> {
    match options.first_not_of(&KNOWN)? {
        Some(name) => options::native(&format!("the option {name}")),
        None => Ok(()),
    }
}

/// Python's output as one short line. The output may be long and have many lines.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text
        .split(|c: char| c.is_control() || c.is_whitespace())
        .filter(|word| !word.is_empty())
        .collect();
    let line = words.join(" ");
    match line.char_indices().nth(300) {
        Some((at, _)) => format!("{} ...", &line[..at]),
        None => line,
    }
}

/// Refuses a path that is not a model's directory, before a process is started.
fn check_path(path: &Path) -> Result<()> {
    if path.is_file() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "mlx-lm loads directories with config.json and safetensors files, not single files; for a .gguf file use \
             the native backend: `metal`, `cuda` or `cpu`",
        )
        .with_path(path));
    }
    if !path.is_dir() {
        return Err(Error::new(
            ErrorKind::ModelNotFound,
            "there is no model here; give a directory with config.json and safetensors files",
        )
        .with_path(path));
    }
    if !path.join("config.json").is_file() {
        return Err(Error::new(
            ErrorKind::InvalidModel,
            "config.json is missing; mlx-lm loads directories with config.json, tokenizer.json and safetensors files",
        )
        .with_path(path));
    }
    Ok(())
}

/// The absolute path for Python, because mlx-lm could read a relative path as a repository's name.
fn absolute(path: &Path) -> Result<String> {
    let full = std::path::absolute(path).map_err(|e| {
        Error::new(
            ErrorKind::Io,
            format!("the path cannot be made absolute: {e}"),
        )
        .with_path(path)
        .with_source(e)
    })?;
    full.into_os_string().into_string().map_err(|_| {
        Error::new(
            ErrorKind::Unsupported,
            "the path is not UTF-8, and messages to Python are; rename the directory",
        )
        .with_path(path)
    })
}

/// Adds the model's path to errors about the model.
fn at_model(error: Error, path: &Path) -> Error {
    match error.kind() {
        ErrorKind::UnavailableBackend => error,
        _ => error.with_path(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_python_says_becomes_a_part_of_a_line() {
        assert_eq!(
            one_line("ImportError: no\n  lib\u{1b}[31m\r\n"),
            "ImportError: no lib [31m"
        );
        let long = one_line(&"é".repeat(1000));
        assert_eq!(long.chars().count(), 304);
        assert!(long.ends_with("é ..."));
    }

    #[test]
    fn a_directory_of_computed_prompts_is_refused() {
        let options = LoadOptions::new().with_cache_dir(std::path::PathBuf::from("prompts"));
        let error = refuse_unknown(&options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("cache_dir"), "{error}");
    }

    #[test]
    fn other_feed_forward_strategies_are_refused() {
        refuse_unknown(&LoadOptions::new().with_kv_bits(4)).unwrap();
        let plan = "0=attention-only".parse().unwrap();
        let error = refuse_unknown(&LoadOptions::new().with_feed_forward(plan)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("feed_forward"), "{error}");
    }

    #[test]
    fn it_is_registered_by_being_linked() {
        let names: Vec<String> = inference::backends()
            .iter()
            .map(|b| b.name().to_owned())
            .collect();
        assert_eq!(names, ["mlx_lm"]);
    }
}
