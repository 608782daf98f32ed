//! The registration, in a module of its own that nothing refers to: what a linker might leave out.

use named::Named;

inference::register_backend!("linked", || Box::new(Named("linked")));
