//! Lists the registered backends, one name a line. The plugin is referred to by one line.

use plugin as _;

fn main() {
    for backend in inference::backends() {
        println!("{}", backend.name());
    }
}
