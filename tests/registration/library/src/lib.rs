//! Behind C functions without arguments: lists the registered backends, and registers one by a
//! call.

use std::sync::Arc;

use plugin as _;

/// Prints the names of the registered backends in one line.
#[unsafe(no_mangle)]
pub extern "C" fn print_backends() {
    let backends = inference::backends();
    let names: Vec<_> = backends.iter().map(|b| b.name()).collect();
    println!("[{}]", names.join(" "));
}

/// Registers `called`; whether that worked. The second time it does not.
#[unsafe(no_mangle)]
pub extern "C" fn register_called() -> bool {
    inference::register(Arc::new(named::Named("called"))).is_ok()
}
