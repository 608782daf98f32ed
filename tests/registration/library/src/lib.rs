//! Two C functions without arguments: one lists the registered backends, one registers a backend.

use std::sync::Arc;

use plugin as _;

/// Prints the names of the registered backends in one line.
#[unsafe(no_mangle)]
pub extern "C" fn print_backends() {
    let backends = inference::backends();
    let names: Vec<_> = backends.iter().map(|b| b.name()).collect();
    println!("[{}]", names.join(" "));
}

/// Registers `called`. Returns whether that worked; the second call fails.
#[unsafe(no_mangle)]
pub extern "C" fn register_called() -> bool {
    inference::register(Arc::new(named::Named("called"))).is_ok()
}
