//! Lists every linked backend, whether it is available here, and its capabilities.
//!
//! ```text
//! cargo run --example backends
//! ```
//!
//! A program chooses a backend by name with `LoadOptions::with_backend`, or leaves the choice to
//! `default_backend`. This example loads no model.

// Naming the facade links the engine's backends into this program.
use rust_mlx::inference;

fn main() {
    for backend in inference::backends() {
        println!("{}: {}", backend.name(), backend.device());
        if backend.available() {
            println!("  can: {}", backend.capabilities().names().join(", "));
        } else {
            let reason = backend.unavailable_reason();
            println!(
                "  not here: {}",
                reason.as_deref().unwrap_or("no reason given")
            );
        }
    }
    match inference::default_backend() {
        Ok(backend) => println!("the default is {}", backend.name()),
        Err(error) => println!("no default: {error}"),
    }
}
