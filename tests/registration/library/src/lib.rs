//! Two C functions without arguments. One lists the registered backends, and one registers a
//! backend.

use std::sync::Arc;

use plugin as _;

/// Prints the names of the registered backends in one line.
#[unsafe(no_mangle)]
pub extern "C" fn print_backends() {
    let backends = inference::backends();
    let names: Vec<_> = backends.iter().map(|b| b.name()).collect();
    println!("[{}]", names.join(" "));
}

/// Registers the backend `called`. Returns whether it worked; a second call fails.
#[unsafe(no_mangle)]
pub extern "C" fn register_called() -> bool {
    inference::register(Arc::new(named::Named("called"))).is_ok()
}
