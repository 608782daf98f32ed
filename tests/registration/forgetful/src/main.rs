//! Lists the registered backends, one name per line. Cargo.toml depends on the plugin, but no code
//! refers to it.

fn main() {
    for backend in inference::backends() {
        println!("{}", backend.name());
    }
}
