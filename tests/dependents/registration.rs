//! Tests that linking alone registers a backend: in programs, static libraries and dynamic
//! libraries, with and without link-time optimization. The test builds and runs
//! `tests/registration/`, and so verifies the statements of docs/plugins.md.

#![cfg(any(target_os = "linux", target_os = "macos"))]

use std::path::{Path, PathBuf};
use std::process::Command;

use parking_lot::Mutex;

const WORKSPACE: &str = "tests/registration";

/// A name, and settings of the profile `dev`. A profile of another name would have a directory of
/// its own, and Cargo would compile all procedural macros again.
type Profile = (&'static str, &'static [(&'static str, &'static str)]);

const DEV: Profile = ("dev", &[]);
const THIN: Profile = ("thin", &[("LTO", "thin"), OPTIMIZED, ASSERTIONS, OVERFLOW]);
const FAT: Profile = (
    "fat",
    &[
        ("LTO", "fat"),
        ("CODEGEN_UNITS", "1"),
        ("PANIC", "abort"),
        ("STRIP", "true"),
        OPTIMIZED,
        ASSERTIONS,
        OVERFLOW,
    ],
);
// A release without most of its optimization, which does not change what the linker leaves out.
const OPTIMIZED: (&str, &str) = ("OPT_LEVEL", "1");
const ASSERTIONS: (&str, &str) = ("DEBUG_ASSERTIONS", "false");
const OVERFLOW: (&str, &str) = ("OVERFLOW_CHECKS", "false");

/// Builds the workspace once for each profile, and returns a directory with a copy of its output:
/// the next profile overwrites the output itself.
fn built((name, settings): Profile) -> PathBuf {
    static DONE: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let copies = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("registration")
        .join(name);
    let mut done = DONE.lock();
    if done.contains(&name) {
        return copies;
    }
    let mut command = crate::dependant::cargo(WORKSPACE);
    // With this variable, a crate of `dev` has fewer object files, and the linker keeps more.
    command.env_remove("CARGO_INCREMENTAL");
    for (key, value) in settings {
        command.env(format!("CARGO_PROFILE_DEV_{key}"), value);
    }
    crate::dependant::stdout(command.args(["build", "--quiet"]));
    let output = crate::dependant::target().join("debug");
    std::fs::create_dir_all(&copies).unwrap();
    let library = dynamic(&output);
    for file in [
        "program",
        "forgetful",
        "liblibrary.a",
        library.file_name().unwrap().to_str().unwrap(),
    ] {
        // Linux refuses to overwrite a running program. So the file is removed, and a new file is
        // created.
        let _ = std::fs::remove_file(copies.join(file));
        std::fs::copy(output.join(file), copies.join(file)).unwrap();
    }
    done.push(name);
    copies
}

/// The lines that a built program prints.
fn lines(program: &Path, args: &[&Path]) -> Vec<String> {
    let mut command = crate::dependant::clean(Command::new(program));
    let out = crate::dependant::stdout(command.args(args));
    out.lines().map(String::from).collect()
}

/// Links `main.c` with the static library, either with the members it needs or with all members
/// (`whole_archive`).
fn c_program(dir: &Path, purpose: &str, whole_archive: bool) -> PathBuf {
    let archive = dir.join("liblibrary.a");
    // A unique file name, because a concurrent test may be running another program.
    let name = format!("c-{purpose}{}", if whole_archive { "-whole" } else { "" });
    let program = dir.join(name);
    let mut cc = Command::new("cc");
    cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/registration/main.c"));
    if cfg!(target_os = "macos") {
        if whole_archive {
            cc.arg("-Wl,-force_load").arg(&archive);
        } else {
            cc.arg(&archive);
        }
        cc.args(["-framework", "CoreFoundation", "-lSystem"]);
    } else {
        let (begin, end) = ("-Wl,--whole-archive", "-Wl,--no-whole-archive");
        cc.args(whole_archive.then_some(begin));
        cc.arg(&archive);
        cc.args(whole_archive.then_some(end));
        cc.args(["-lgcc_s", "-lpthread", "-ldl", "-lm", "-lc"]);
    }
    crate::dependant::stdout(cc.arg("-o").arg(&program));
    program
}

fn dynamic(dir: &Path) -> PathBuf {
    let extension = std::env::consts::DLL_EXTENSION;
    dir.join(format!("liblibrary.{extension}"))
}

#[test]
fn one_line_that_refers_to_the_crate_links_its_backends() {
    let dir = built(DEV);
    assert_eq!(lines(&dir.join("program"), &[]), ["linked"]);
}

#[test]
fn a_dependency_that_nothing_refers_to_is_not_linked() {
    let dir = built(DEV);
    assert_eq!(lines(&dir.join("forgetful"), &[]), [""; 0]);
}

#[test]
fn link_time_optimization_changes_nothing_in_programs() {
    for profile in [THIN, FAT] {
        let dir = built(profile);
        assert_eq!(lines(&dir.join("program"), &[]), ["linked"], "{profile:?}");
        assert_eq!(lines(&dir.join("forgetful"), &[]), [""; 0], "{profile:?}");
    }
}

#[test]
fn a_static_library_keeps_registrations_only_as_a_whole() {
    // A linker extracts from an archive only object files that other code refers to. Nothing refers
    // to a registration. A call of `register` works in any case.
    for profile in [DEV, THIN] {
        let dir = built(profile);
        let plain = c_program(&dir, "static", false);
        assert_eq!(lines(&plain, &[]), ["[]", "[called]"], "{profile:?}");
        let linked_whole = c_program(&dir, "static", true);
        let expected = ["[linked]", "[called linked]"];
        assert_eq!(lines(&linked_whole, &[]), expected, "{profile:?}");
    }
}

#[test]
fn a_static_library_with_fat_lto_keeps_registrations() {
    // With full link-time optimization, the library has all Rust code in one object file.
    let dir = built(FAT);
    let plain = c_program(&dir, "static", false);
    assert_eq!(lines(&plain, &[]), ["[linked]", "[called linked]"]);
}

#[test]
fn a_cdylib_has_its_registrations_and_a_registry_of_its_own() {
    // The program opens the library at run time. The backends linked into the library stay
    // invisible to the program, and the program's registrations stay invisible to the library.
    for profile in [DEV, THIN] {
        let dir = built(profile);
        let program = c_program(&dir, "opens", false);
        assert_eq!(
            lines(&program, &[&dynamic(&dir)]),
            ["[]", "[called]", "[linked]", "[called]"],
            "{profile:?}"
        );
    }
    let dir = built(FAT);
    let program = c_program(&dir, "opens", false);
    assert_eq!(
        lines(&program, &[&dynamic(&dir)]),
        ["[linked]", "[called linked]", "[linked]", "[called linked]"]
    );
}
