//! Lists the registered backends, one name on each line. One line refers to the plugin.

use plugin as _;

fn main() {
    for backend in inference::backends() {
        println!("{}", backend.name());
    }
}
