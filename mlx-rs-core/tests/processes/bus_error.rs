//! The handler for mapped files that shrink (`io::MappedFile`) must handle only its own files. Any
//! other cause of SIGBUS must end the process, as it would without the handler.
#![cfg(unix)]

use std::fs::File;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use mlx_rs_core::io::MappedFile;

/// The variable with the directory of the child's files.
const DIR: &str = "RUST_MLX_TEST_BUS_ERROR";

#[test]
#[ignore = "a process of its own, started by other_causes_of_the_signal_end_the_process"]
fn child() {
    let dir = std::path::PathBuf::from(std::env::var_os(DIR).unwrap());
    let write = |name: &str| {
        let path = dir.join(name);
        std::fs::write(&path, vec![7u8; 1 << 17]).unwrap();
        path
    };
    let shrink = |name: &str| {
        let file = File::options().write(true).open(dir.join(name)).unwrap();
        file.set_len(0).unwrap();
    };
    let ours = MappedFile::open(write("ours")).unwrap();
    let other = File::open(write("other")).unwrap();
    // SAFETY: this process ends at the first read after the file was truncated.
    let other = unsafe { memmap2::Mmap::map(&other) }.unwrap();
    assert_eq!(std::hint::black_box(&other)[70_000], 7);
    shrink("ours");
    assert_eq!(std::hint::black_box(ours.bytes())[70_000], 0);
    assert!(ours.check().is_err());
    println!("ours was read");
    shrink("other");
    println!("{}", std::hint::black_box(&other)[70_000]);
    println!("other was read");
}

#[test]
fn other_causes_of_the_signal_end_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "bus_error::child", "--ignored", "--nocapture"])
        .env(DIR, dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(said.contains("ours was read"), "{said}");
    assert!(!said.contains("other was read"), "{said}");
    assert_eq!(run.status.signal(), Some(libc::SIGBUS), "{said}");
}
