//! A backend that has a name but no models. This crate does not register the backend.

#![forbid(unsafe_code)]

use std::path::Path;

use inference::{Backend, Capabilities, Error, ErrorKind, LoadOptions, Result, TextModel};

/// A backend of this name.
#[derive(Debug)]
pub struct Named(pub &'static str);

impl Backend for Named {
    fn name(&self) -> &str {
        self.0
    }
    fn available(&self) -> bool {
        true
    }
    fn device(&self) -> String {
        String::from("none")
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new()
    }
    fn load_model(&self, _: &Path, _: &LoadOptions) -> Result<Box<dyn TextModel>> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "there are no models of it",
        ))
    }
}
