//! The file that contains this code: the program, or a shared library such as a Python module. A
//! shared library is not beside the program, so MLX's library is also searched near this file.

use std::path::{Path, PathBuf};

/// The number of directories above the file that are searched. A Python module may be in
/// `PREFIX/lib/pythonX.Y/site-packages/PACKAGE`, and libmlx in `PREFIX/lib/rust-mlx`.
const LEVELS: usize = 5;

/// The file from which the system loaded this code; `None` if it is the program itself, or unknown.
pub(crate) fn shared_library() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let file = file_at(&maps, shared_library as fn() -> Option<PathBuf> as usize)?;
    let file = file.canonicalize().ok()?;
    let program = std::env::current_exe().and_then(|exe| exe.canonicalize());
    (program.ok().as_deref() != Some(&file)).then_some(file)
}

/// The file that is mapped at an address, by the lines of `/proc/self/maps`: the first and last
/// address in hexadecimal, four other fields, and the path.
fn file_at(maps: &str, address: usize) -> Option<PathBuf> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (first, end) = range.split_once('-')?;
        let [first, end] = [first, end].map(|hex| usize::from_str_radix(hex, 16));
        if !(first.ok()?..end.ok()?).contains(&address) {
            return None;
        }
        let path = rest.get(rest.find('/')?..)?;
        Some(PathBuf::from(path))
    })
}

/// The directories where a shared library searches for libmlx: its own directory, and
/// `rust-mlx/PACKAGE/mlx/lib` in each directory above and in its `lib`.
pub(crate) fn places(file: &Path, package: &str) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = file.parent().map(Path::to_owned).into_iter().collect();
    for above in file.ancestors().skip(1).take(LEVELS) {
        for dir in [above.to_owned(), above.join("lib")] {
            places.push(dir.join("rust-mlx").join(package).join("mlx/lib"));
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapping_of_an_address_names_the_file() {
        let maps = "\
00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/python3.11
7f10-7f20 rw-p 00000000 00:00 0
7f0000001000-7f0000002000 r-xp 00001000 08:02 135522 /opt/a b/rust_mlx/_native.abi3.so
7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0 [stack]
";
        let at = |address| file_at(maps, address);
        let module = PathBuf::from("/opt/a b/rust_mlx/_native.abi3.so");
        assert_eq!(at(0x0040_0000), Some("/usr/bin/python3.11".into()));
        assert_eq!(at(0x7f00_0000_1fff), Some(module));
        assert_eq!(at(0x7f00_0000_2000), None);
        assert_eq!(at(0x7f10), None);
        assert_eq!(at(0x7ffc_0000_0000), None);
        // This code is in the test program.
        let own = file_at(
            &std::fs::read_to_string("/proc/self/maps").unwrap(),
            file_at as fn(&str, usize) -> Option<PathBuf> as usize,
        );
        let program = std::env::current_exe().unwrap().canonicalize().unwrap();
        assert_eq!(own.unwrap(), program);
        assert_eq!(shared_library(), None);
    }

    #[test]
    fn a_module_in_site_packages_finds_the_library_of_its_prefix() {
        let module = Path::new("/p/lib/python3.11/site-packages/rust_mlx/_native.abi3.so");
        let places = places(module, "mlx-cpu-1");
        assert!(places.contains(&"/p/lib/rust-mlx/mlx-cpu-1/mlx/lib".into()));
        let module = Path::new("/p/lib64/python3.11/site-packages/rust_mlx/_native.abi3.so");
        let other = super::places(module, "mlx-cpu-1");
        assert!(other.contains(&"/p/lib/rust-mlx/mlx-cpu-1/mlx/lib".into()));
        assert_eq!(places[0], module_dir("lib"));
    }

    fn module_dir(lib: &str) -> PathBuf {
        format!("/p/{lib}/python3.11/site-packages/rust_mlx").into()
    }
}
