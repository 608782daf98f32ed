//! A complete third-party backend. Its language model counts which byte follows each pair of bytes
//! in a text. It shows the code that an author of a backend writes, and it passes the conformance
//! suite (`tests/conformance.rs`). It contains no engine and no neural network.
//!
//! A model is a `.txt` file, or a directory with a `corpus.txt`.

#![forbid(unsafe_code)]

mod counts;
mod model;
mod request;
mod sampler;

use std::io::Read;
use std::path::Path;

use inference::{
    Backend, Capabilities, ComputeType, Error, ErrorKind, LoadOptions, Result, Split, TextModel,
};

use counts::Counts;
use model::EchoModel;

// This line registers the backend in each program that links this crate.
inference::register_backend!("echo", || Box::new(Echo));

/// The backend `echo`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Echo;

/// Maximum size of a corpus in bytes.
const MAX_CORPUS: u64 = 16 << 20;

impl Backend for Echo {
    fn name(&self) -> &str {
        "echo"
    }

    fn available(&self) -> bool {
        true
    }

    fn device(&self) -> String {
        String::from("host processor, by counting")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new()
            .with_streaming()
            .with_chat()
            .with_classify()
            .with_batch_generate()
            .with_logits()
            .with_seeds()
            .with_logprobs()
    }

    fn load_model(&self, path: &Path, options: &LoadOptions) -> Result<Box<dyn TextModel>> {
        // A program may call the backend directly, without the registry, so the options are checked
        // here.
        options.validate()?;
        let unsupported = |what: &str| Err(Error::new(ErrorKind::Unsupported, what));
        if options.adapter_path.is_some() {
            return unsupported("backend `echo` has no adapters; leave adapter_path out");
        }
        if options.split != Split::None {
            return unsupported("backend `echo` runs in one process; leave split out");
        }
        if options.dtype.is_some_and(|t| t != ComputeType::Float32) {
            return unsupported("backend `echo` computes in float32 only; leave dtype out");
        }
        let corpus = read_corpus(path)?;
        Ok(Box::new(EchoModel::new(
            Counts::from_corpus(&corpus),
            options.context_len,
        )))
    }
}

fn read_corpus(path: &Path) -> Result<String> {
    let fault = |kind, message: String, at: &Path| Err(Error::new(kind, message).with_path(at));
    let file = match std::fs::metadata(path) {
        Ok(m) if m.is_dir() => path.join("corpus.txt"),
        Ok(_) if path.extension().is_some_and(|e| e == "txt") => path.to_owned(),
        Ok(_) => {
            let message = "not a model of `echo`; give a .txt file, or a directory with corpus.txt";
            return fault(ErrorKind::InvalidModel, message.into(), path);
        }
        Err(e) => {
            let message = format!("there is no model here: {e}");
            return fault(ErrorKind::ModelNotFound, message, path);
        }
    };
    let mut corpus = String::new();
    let read =
        std::fs::File::open(&file).and_then(|f| f.take(MAX_CORPUS + 1).read_to_string(&mut corpus));
    match read {
        Err(e) => fault(
            ErrorKind::InvalidModel,
            format!("the text cannot be read: {e}"),
            &file,
        ),
        Ok(n) if n as u64 > MAX_CORPUS => {
            let message = format!("the text is longer than {MAX_CORPUS} bytes; cut it");
            fault(ErrorKind::InvalidModel, message, &file)
        }
        Ok(_) if corpus.trim().is_empty() => {
            fault(ErrorKind::InvalidModel, "the text is empty".into(), &file)
        }
        Ok(_) => Ok(corpus),
    }
}
