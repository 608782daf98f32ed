//! In a program without backends, each request for a backend must return an error with a remedy.
//! There is one registry per process and the last step fills it, so this is a single test.

#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;

use inference::{ErrorKind, LoadOptions};
use inference_conformance::scripted::ScriptedBackend;

#[test]
fn an_empty_registry_names_a_crate_to_link() {
    assert!(inference::backends().is_empty());
    assert!(inference::duplicates().is_empty());

    let here = env!("CARGO_MANIFEST_DIR");
    let e = inference::default_backend().err().unwrap();
    assert_eq!(e.kind(), ErrorKind::NoBackend);
    assert!(e.message().contains("rust-mlx-metal-backend"), "{e}");

    let e = inference::backend("metal").err().unwrap();
    assert_eq!(e.kind(), ErrorKind::UnknownBackend);
    assert!(
        e.message().contains("`metal`") && e.message().contains("rust-mlx-metal-backend"),
        "{e}"
    );

    let e = inference::load_model(here, &LoadOptions::new())
        .err()
        .unwrap();
    assert_eq!(e.kind(), ErrorKind::NoBackend);

    // The missing model must be reported first, because a backend would not help.
    let e = inference::load_model("/no/such/model", &LoadOptions::new())
        .err()
        .unwrap();
    assert_eq!(e.kind(), ErrorKind::ModelNotFound);

    inference::register(Arc::new(ScriptedBackend::new("late"))).unwrap();
    let e = inference::load_model(here, &LoadOptions::new())
        .err()
        .unwrap();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    assert_eq!(e.path(), Some(Path::new(here)));
}
