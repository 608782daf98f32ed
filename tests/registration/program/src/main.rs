//! Lists the registered backends, one name per line. One line of code refers to the plugin, so the
//! linker keeps it.

use plugin as _;

fn main() {
    for backend in inference::backends() {
        println!("{}", backend.name());
    }
}
