//! Lists the registered backends, one name on each line. Cargo.toml has the plugin, but no code
//! refers to it.

fn main() {
    for backend in inference::backends() {
        println!("{}", backend.name());
    }
}
