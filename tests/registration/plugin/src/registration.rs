//! The registration is in a separate module that nothing refers to, so a linker might drop it.

use named::Named;

inference::register_backend!("linked", || Box::new(Named("linked")));
