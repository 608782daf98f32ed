//! Lists the registered backends, one name a line. The plugin is in Cargo.toml, but nothing here
//! refers to it.

fn main() {
    for backend in inference::backends() {
        println!("{}", backend.name());
    }
}
