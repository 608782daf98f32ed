//! A training run. The options are those of `mlx train`, by their names in a config file.

use std::sync::Arc;

#[cfg(not(feature = "metal-backend"))]
use pyo3::prelude::*;

use crate::shared::Shared;

#[cfg(feature = "metal-backend")]
pub(crate) use run::train;

/// A module without the MLX engine cannot train.
#[cfg(not(feature = "metal-backend"))]
pub(crate) fn train(
    py: Python<'_>,
    _: &Arc<Shared>,
    _: &str,
    _: &str,
    _: bool,
    _: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    let error = inference::Error::new(
        inference::ErrorKind::Unsupported,
        "this module was built without the MLX engine, which trains; build it with the feature \
         metal-backend",
    );
    Err(crate::error::exception(py, &error))
}

#[cfg(feature = "metal-backend")]
mod run {
    use inference::bindings::object;
    use inference::{CancelToken, Error, ErrorKind, LoadOptions, Result};
    use metal_backend::train::config::{Method, TrainConfig};
    use metal_backend::train::{Event, Run, Start, Summary};
    use pyo3::prelude::*;
    use rust_mlx::hub;
    use serde_json::{Map, Value, json};

    use super::{Arc, Shared};
    use crate::error::no_thread;
    use crate::error::raised;
    use crate::worker::{Report, Worker};

    fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidOption, message)
    }

    /// The options of the adapter's shape, which a config file has in a separate table.
    const SHAPE: [&str; 4] = ["rank", "dropout", "scale", "keys"];

    /// Reads the options of a run.
    fn config(shared: &Shared, mut fields: Map<String, Value>) -> Result<TrainConfig> {
        fields.retain(|_, value| !value.is_null());
        for name in ["model", "backend", "dtype"] {
            if fields.contains_key(name) {
                return Err(invalid(format!(
                    "{name} is that of the loaded model; leave it out, or load the model with it"
                )));
            }
        }
        if fields.remove("train").is_some_and(|train| train != true) {
            return Err(invalid("train is False, but this method trains"));
        }
        let mut shape = match fields.remove("lora_parameters") {
            None => Map::new(),
            Some(Value::Object(shape)) => shape,
            Some(_) => return Err(invalid("lora_parameters is not an object")),
        };
        for name in SHAPE {
            if let Some(value) = fields.remove(name)
                && shape.insert(name.to_owned(), value).is_some()
            {
                return Err(invalid(format!(
                    "{name} is given twice, alone and in lora_parameters"
                )));
            }
        }
        let alpha = match fields.remove("alpha") {
            None => None,
            Some(_) if shape.contains_key("scale") => {
                return Err(invalid("alpha and scale are given; leave one of them out"));
            }
            Some(value) => Some(
                value
                    .as_f64()
                    .ok_or_else(|| invalid(format!("alpha is {value}; it must be a number")))?,
            ),
        };
        if let Some(alpha) = alpha {
            let rank = match shape.get("rank") {
                Some(rank) => rank.as_u64().unwrap_or(0),
                None => TrainConfig::default().lora_parameters.rank as u64,
            };
            shape.insert("scale".to_owned(), json!(alpha / rank.max(1) as f64));
        }
        let about_preferences = ["beta", "label_smoothing"].map(|name| fields.contains_key(name));
        if !shape.is_empty() {
            fields.insert("lora_parameters".to_owned(), Value::Object(shape));
        }
        // JSON is YAML. This reader checks each option and records which were given.
        let mut config = TrainConfig::from_yaml(&Value::Object(fields).to_string())?;
        let preference = matches!(
            config.method,
            Method::Dpo | Method::Orpo | Method::Kto | Method::Grpo
        );
        if !preference && about_preferences.contains(&true) {
            return Err(invalid(
                "beta and label_smoothing are about preferences; add method=\"dpo\"",
            ));
        }
        if config.method == Method::Grpo && config.reward_command.is_none() {
            return Err(invalid(
                "method grpo needs reward_command, the program that judges replies",
            ));
        }
        config.train = true;
        config.model = Some(shared.name.clone());
        config.backend = shared.options.backend.clone();
        config.dtype = shared.options.dtype;
        Ok(config)
    }

    /// The load options of the run: those that do not concern replies.
    fn load(shared: &Shared) -> LoadOptions {
        let mut load = LoadOptions::new();
        load.backend = shared.options.backend.clone();
        load.dtype = shared.options.dtype;
        load
    }

    fn event(event: &Event<'_>) -> Value {
        let named = |name: &str, value: Result<Value, serde_json::Error>| {
            let mut value = value.unwrap_or_default();
            value["event"] = name.into();
            value
        };
        match event {
            Event::Step {
                step,
                iters,
                report,
                tokens_per_second,
                memory,
            } => json!({
                "event": "step",
                "step": step,
                "iters": iters,
                "loss": report.loss,
                "tokens_per_second": tokens_per_second,
                "memory_bytes": memory,
            }),
            Event::Train(report) => named("train", serde_json::to_value(report)),
            Event::Judging { done, total } => {
                json!({"event": "judging", "done": done, "total": total})
            }
            Event::Validation(score) => named("validation", serde_json::to_value(score)),
            Event::Test(score) => named("test", serde_json::to_value(score)),
            Event::Best { step, dir } => {
                json!({"event": "best", "step": step, "adapter_path": dir})
            }
            Event::StoppedEarly { step } => json!({"event": "stopped_early", "step": step}),
            Event::Saved { step, dir } => {
                json!({"event": "saved", "step": step, "adapter_path": dir})
            }
        }
    }

    /// The result as `mlx train --json` prints it, and the notes.
    fn summary(config: &TrainConfig, notes: &[String], summary: &Summary) -> Value {
        let mut value = summary.to_json(&config.adapter_path);
        value["notes"] = notes.into();
        value
    }

    fn started(start: &str) -> Result<Start> {
        match start {
            "fresh" => Ok(Start::Fresh),
            "resume" => Ok(Start::Resume),
            "overwrite" => Ok(Start::Overwrite),
            _ => Err(invalid(format!(
                "start is {start:?}; it must be fresh, resume or overwrite"
            ))),
        }
    }

    pub(crate) fn train(
        py: Python<'_>,
        shared: &Arc<Shared>,
        options: &str,
        start: &str,
        apply: bool,
        callback: Option<Bound<'_, PyAny>>,
    ) -> PyResult<String> {
        let read = || {
            if shared.model.as_trainable().is_none() {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "this backend does not train; load the model with metal, cuda or cpu",
                ));
            }
            let config = config(shared, object("options", options)?)?;
            Ok((config, started(start)?))
        };
        let (config, start) = raised(py, read())?;
        let (shared, cancel) = (Arc::clone(shared), CancelToken::new());
        let cancelled = cancel.clone();
        let worker: Worker<String, Result<String>> = Worker::start(cancel, move |report| {
            let path = hub::resolve(Some(&shared.name), &mut hub::Silent)?;
            let mut run = Run::prepare(&path, &load(&shared), config, start)?;
            let done = run.train(&cancelled, &mut |e| {
                // If the receiver is gone, the run is already cancelled.
                report.event(event(e).to_string());
            })?;
            let result = summary(run.config(), run.notes(), &done);
            let adapter = run.config().adapter_path.clone();
            // The run's copy of the weights is freed before the adapter is loaded.
            drop(run);
            if apply
                && !done.interrupted
                && let Some(model) = shared.model.as_trainable()
            {
                model.load_adapter(&adapter)?;
            }
            Ok(result.to_string())
        })
        .map_err(no_thread)?;
        let mut result = String::new();
        while let Some(report) = worker.next(py)? {
            match (report, &callback) {
                (Report::Event(event), Some(callback)) => {
                    if let Err(e) = callback.call1((event,)) {
                        worker.stop(py);
                        return Err(e);
                    }
                }
                (Report::Event(_), None) => {}
                (Report::Done(done), _) => result = raised(py, done)?,
            }
        }
        Ok(result)
    }
}
