//! Checks of loading: paths and options that must work, and others that must be rejected.

use std::path::{Path, PathBuf};

use inference::{ErrorKind, FinishReason};

use crate::context::{Context, Stop, Verdict, ensure, fail, skip};
use crate::probe::{N, greedy, refused, reply};

pub(crate) fn load(context: &Context) -> Verdict {
    match context.backend.load_model(&context.path, &context.load) {
        Ok(_) => Ok(()),
        Err(e) => fail(format!("the model cannot be loaded: {e}")),
    }
}

const NO_MODEL: [ErrorKind; 4] = [
    ErrorKind::ModelNotFound,
    ErrorKind::InvalidModel,
    ErrorKind::Unsupported,
    ErrorKind::Io,
];

pub(crate) fn missing(context: &Context) -> Verdict {
    let path = Path::new("no/such/directory/no-such-model");
    let answer = context.backend.load_model(path, &context.load);
    let e = refused("a path with nothing at it", answer, &NO_MODEL)?;
    ensure!(
        e.kind() != ErrorKind::Unsupported,
        "a path with nothing at it is called unsupported: {e}"
    );
    ensure!(
        e.to_string().contains("no-such-model"),
        "the error does not name the path: {e}"
    );
    Ok(())
}

/// A temporary directory of one check. It is deleted at the end.
pub(super) struct Scratch(pub(super) PathBuf);

impl Scratch {
    pub(super) fn new(name: &str) -> Result<Self, Stop> {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!(
            "inference-conformance-{}-{number}-{name}",
            std::process::id()
        ));
        match std::fs::create_dir(&dir) {
            Ok(()) => Ok(Self(dir)),
            Err(e) => skip(format!("{} cannot be made: {e}", dir.display())),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn not_a_model(context: &Context) -> Verdict {
    let scratch = Scratch::new("noise")?;
    let load = |path: &Path| context.backend.load_model(path, &context.load);
    refused("an empty directory", load(&scratch.0), &NO_MODEL)?;
    for name in ["noise.gguf", "noise.safetensors", "noise"] {
        let path = scratch.0.join(name);
        let noise: Vec<u8> = (0..4096u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        if let Err(e) = std::fs::write(&path, noise) {
            return skip(format!("{} cannot be written: {e}", path.display()));
        }
        refused(&format!("a file of noise, {name},"), load(&path), &NO_MODEL)?;
    }
    Ok(())
}

pub(crate) fn bad_options(context: &Context) -> Verdict {
    let with = || context.load.clone();
    for (what, options) in [
        ("context_len 0", with().with_context_len(0)),
        ("parallel_slots 0", with().with_parallel_slots(0)),
        ("gpu_layers -2", with().with_gpu_layers(-2)),
        ("an empty adapter_path", with().with_adapter_path("")),
    ] {
        let answer = context.backend.load_model(&context.path, &options);
        refused(what, answer, &[ErrorKind::InvalidOption])?;
    }
    Ok(())
}

pub(crate) fn adapter(context: &Context) -> Verdict {
    let options = context.load.clone().with_adapter_path("no/such/adapter");
    let answer = context.backend.load_model(&context.path, &options);
    if context.capabilities.adapters {
        let kinds = [
            ErrorKind::ModelNotFound,
            ErrorKind::InvalidModel,
            ErrorKind::InvalidOption,
            ErrorKind::Io,
        ];
        refused("an adapter that is not there", answer, &kinds)?;
    } else {
        let what = "an adapter, which is not declared,";
        refused(what, answer, &[ErrorKind::Unsupported])?;
    }
    Ok(())
}

/// Checks that the backend declares the model's format. Only two formats have a capability, so the
/// check is skipped for others.
pub(crate) fn formats(context: &Context) -> Verdict {
    context.model()?;
    let is = |path: &Path, extension: &str| path.extension().is_some_and(|e| e == extension);
    let holds = |extension: &str| {
        if context.path.is_file() {
            return is(&context.path, extension);
        }
        let entries = std::fs::read_dir(&context.path).into_iter().flatten();
        entries.flatten().any(|e| is(&e.path(), extension))
    };
    let declared = context.capabilities;
    let formats = [
        ("safetensors", declared.safetensors, holds("safetensors")),
        ("gguf", declared.gguf, holds("gguf")),
    ];
    let there = || formats.iter().filter(|(_, _, there)| *there);
    if there().next().is_none() {
        return skip("the model is neither of safetensors nor a GGUF file");
    }
    // If a directory contains both formats, the backend must load one of them.
    ensure!(
        there().any(|(_, declared, _)| *declared),
        "a model of {} loads, but that is not declared",
        there()
            .map(|(name, ..)| *name)
            .collect::<Vec<_>>()
            .join(" and ")
    );
    Ok(())
}

/// Checks a cache limit that a long prompt or reply exceeds.
pub(crate) fn context_len(context: &Context) -> Verdict {
    let prompt = context.prompt();
    let free = reply(context.model()?.as_ref(), &prompt, &greedy(2 * N))?;
    // The first limit is above the length of all prompts and replies, and the second is below.
    for (n, changes_nothing) in [(4096, true), (N, false)] {
        let options = context.load.clone().with_context_len(n);
        let model = match context.backend.load_model(&context.path, &options) {
            Ok(model) => model,
            Err(e) if e.kind() == ErrorKind::Unsupported => return skip(e.to_string()),
            Err(e) => return fail(format!("context_len {n}: {e}")),
        };
        let got = reply(model.as_ref(), &prompt, &greedy(2 * N))?;
        ensure!(
            got.ids.len() == 2 * N && got.finish == Some(FinishReason::Length),
            "with context_len {n} the reply has {} tokens of {} and ended with {:?}",
            got.ids.len(),
            2 * N,
            got.finish
        );
        ensure!(
            got.ids == free.ids || !changes_nothing,
            "with context_len {n} the reply is {:?}, without {:?}",
            got.ids,
            free.ids
        );
    }
    Ok(())
}
