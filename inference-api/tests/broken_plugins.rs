//! Tests a program whose plugins panic, report a wrong name or share a name. Each fault must become
//! an error with the plugin's name, and the other plugins must work.

#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;

use inference::{Backend, Capabilities, Error, ErrorKind, LoadOptions, Result, TextModel};

struct Named(&'static str);

impl Backend for Named {
    fn name(&self) -> &str {
        assert!(self.0 != "no-name", "asked for a name");
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
        Err(Error::new(ErrorKind::Unsupported, "nothing is loaded"))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        assert!(self.0 != "other-name", "dropped");
    }
}

mod first {
    inference::register_backend!("cpu", || Box::new(super::Named("cpu")));
}
mod second {
    inference::register_backend!("cpu", || Box::new(super::Named("cpu")));
}
inference::register_backend!("works", || Box::new(Named("works")));
inference::register_backend!("misnamed", || Box::new(Named("another")));
inference::register_backend!("misnamed-panics", || Box::new(Named("other-name")));
inference::register_backend!("panics", || panic!("no driver"));
inference::register_backend!("silent", || Box::new(Named("no-name")));

fn refused(name: &str) -> Error {
    inference::backend(name).err().expect("must be refused")
}

#[test]
fn what_works_is_served_and_what_does_not_is_listed_with_its_reason() {
    assert_eq!(inference::backend("works").unwrap().name(), "works");
    let backends = inference::backends();
    let names: Vec<_> = backends.iter().map(|b| b.name()).collect();
    assert_eq!(
        names,
        ["misnamed", "misnamed-panics", "panics", "silent", "works"]
    );
    for (name, says) in [
        ("misnamed", "calls itself `another`"),
        ("misnamed-panics", "panicked when it was made"),
        ("panics", "no driver"),
        ("silent", "asked for a name"),
    ] {
        let e = refused(name);
        assert_eq!(e.kind(), ErrorKind::UnavailableBackend, "{e}");
        assert!(e.message().contains(says), "{e}");
        assert!(e.message().contains("available are: works"), "{e}");
        let stub = backends.iter().find(|b| b.name() == name).unwrap();
        assert!(
            stub.unavailable_reason()
                .is_some_and(|r| e.message().contains(&r))
        );
        let load = stub.load_model(Path::new("."), &LoadOptions::new());
        assert_eq!(load.err().unwrap().kind(), ErrorKind::UnavailableBackend);
    }
    // A backend that reports a wrong name must not occupy that name.
    assert_eq!(refused("another").kind(), ErrorKind::UnknownBackend);
}

#[test]
fn two_of_one_name_are_both_named_and_neither_is_served() {
    assert_eq!(inference::duplicates(), ["cpu"]);
    let both = |e: Error| {
        assert_eq!(e.kind(), ErrorKind::DuplicateBackend);
        assert!(
            e.message().contains("broken_plugins::first:")
                && e.message().contains("broken_plugins::second:"),
            "{e}"
        );
    };
    both(refused("cpu"));
    // `cpu` precedes `works` in the preference order. Choosing `works` would hide the duplicate.
    both(inference::default_backend().err().unwrap());
    both(refused(""));
    both(inference::register(Arc::new(Named("cpu"))).unwrap_err());
    let e = inference::register(Arc::new(Named("works"))).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::DuplicateBackend);
    assert!(e.message().contains("by broken_plugins:"), "{e}");
    let e = refused("cpuu");
    assert_eq!(e.kind(), ErrorKind::UnknownBackend);
    assert!(e.message().contains("did you mean `cpu`?"), "{e}");
}
