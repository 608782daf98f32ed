//! Tests of finding and reading files: models, file sizes, and paths that lead out of the
//! directory.

use std::fs;

use super::*;

#[test]
fn what_a_path_holds() {
    let tmp = tempfile::tempdir().unwrap();
    let at = tmp.path();
    let message = |p: &Path| locate(p).unwrap_err().message().to_owned();
    assert_eq!(
        locate(&at.join("no")).unwrap_err().kind(),
        ErrorKind::NotFound
    );
    assert!(message(at).contains("not a model directory"));
    fs::write(at.join("x.txt"), "").unwrap();
    assert!(message(&at.join("x.txt")).contains("not a model"));
    fs::write(at.join("a.gguf"), "").unwrap();
    assert_eq!(locate(at).unwrap(), ModelFiles::Gguf(at.join("a.gguf")));
    assert_eq!(
        locate(&at.join("a.gguf")).unwrap(),
        ModelFiles::Gguf(at.join("a.gguf"))
    );
    // Repositories with a GGUF file often also contain the original model's configuration.
    fs::write(at.join("config.json"), "{}").unwrap();
    assert_eq!(locate(at).unwrap(), ModelFiles::Gguf(at.join("a.gguf")));
    fs::write(at.join("b.gguf"), "").unwrap();
    let several = message(at);
    assert!(
        several.contains("a.gguf") && several.contains("b.gguf"),
        "{several}"
    );
    fs::write(at.join("model.safetensors"), "").unwrap();
    assert_eq!(locate(at).unwrap(), ModelFiles::Directory(at.to_owned()));

    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("config.json"), "{}").unwrap();
    assert!(message(other.path()).contains("converted"));
}

#[test]
fn names_stay_inside() {
    let tmp = tempfile::tempdir().unwrap();
    let root = tmp.path().join("m");
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::write(root.join("sub/ok"), "x").unwrap();
    fs::write(tmp.path().join("secret"), "x").unwrap();
    let dir = ModelDir::open(&root).unwrap();
    assert_eq!(dir.find("sub/ok").unwrap(), Some(root.join("sub/ok")));
    assert_eq!(dir.find("none").unwrap(), None);
    assert!(
        dir.require("none")
            .unwrap_err()
            .message()
            .contains("missing")
    );
    let long = "x".repeat(2000);
    for bad in [
        "",
        "../secret",
        "/etc/passwd",
        "sub/../../secret",
        "a\0b",
        "sub\\ok",
        "a\nb",
        &long,
    ] {
        let e = dir.find(bad).unwrap_err();
        assert!(e.message().contains("refused"), "{bad:?}: {e}");
    }
    assert!(ModelDir::open(&root.join("sub/ok")).is_err());
}

#[cfg(unix)]
#[test]
fn links_stay_inside_but_for_the_hub_cache() {
    use std::os::unix::fs::symlink;
    let tmp = tempfile::tempdir().unwrap();
    let at = tmp.path();
    let root = at.join("m");
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::write(at.join("secret"), "x").unwrap();
    fs::write(root.join("real"), "x").unwrap();
    let dir = ModelDir::open(&root).unwrap();
    for (target, name, fine) in [
        (at.join("secret"), "out", false),
        ("../secret".into(), "relative", false),
        ("real".into(), "in", true),
        ("sub/../real".into(), "roundabout", true),
    ] {
        symlink(target, root.join(name)).unwrap();
        assert_eq!(dir.find(name).is_ok(), fine, "{name}");
    }
    symlink(at, root.join("up")).unwrap();
    assert!(
        dir.find("up/secret")
            .unwrap_err()
            .message()
            .contains("leads out")
    );
    symlink("nothing", root.join("broken")).unwrap();
    assert!(dir.find("broken").is_err());
    // The user named this link, so it may be followed.
    symlink(&root, at.join("alias")).unwrap();
    assert!(
        ModelDir::open(&at.join("alias"))
            .unwrap()
            .find("real")
            .unwrap()
            .is_some()
    );

    // <model>/snapshots/<revision>/<file> -> <model>/blobs/<hash>
    let snapshot = at.join("hub/models--a--b/snapshots/r1");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(at.join("hub/models--a--b/blobs")).unwrap();
    fs::create_dir_all(at.join("hub/models--c--d/blobs")).unwrap();
    fs::write(at.join("hub/models--a--b/blobs/h"), "x").unwrap();
    fs::write(at.join("hub/models--c--d/blobs/h"), "x").unwrap();
    symlink("../../blobs/h", snapshot.join("w")).unwrap();
    symlink("../../../models--c--d/blobs/h", snapshot.join("other")).unwrap();
    let dir = ModelDir::open(&snapshot).unwrap();
    assert!(dir.find("w").unwrap().is_some());
    assert!(
        dir.find("other")
            .unwrap_err()
            .message()
            .contains("leads out")
    );
    // Outside a Hugging Face cache, links into a directory named `blobs` are refused.
    fs::create_dir_all(at.join("blobs")).unwrap();
    fs::write(at.join("blobs/h"), "x").unwrap();
    symlink(at.join("blobs/h"), root.join("blob")).unwrap();
    assert!(ModelDir::open(&root).unwrap().find("blob").is_err());
}

#[test]
fn files_are_bounded_regular_text() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("t");
    fs::write(&path, "12345").unwrap();
    assert_eq!(read_text(&path, 5).unwrap(), "12345");
    assert!(
        read_text(&path, 4)
            .unwrap_err()
            .message()
            .contains("at most 4")
    );
    fs::write(&path, [0xff, 0xfe]).unwrap();
    assert!(read_text(&path, 5).unwrap_err().message().contains("UTF-8"));
    assert!(
        read_capped(tmp.path(), 5)
            .unwrap_err()
            .message()
            .contains("regular")
    );
    #[cfg(unix)]
    assert!(
        read_capped(Path::new("/dev/zero"), 5)
            .unwrap_err()
            .message()
            .contains("regular")
    );
}

#[test]
fn reads_are_exact() {
    let tmp = tempfile::tempdir().unwrap();
    let path = tmp.path().join("t");
    fs::write(&path, [1, 2, 3, 4, 5]).unwrap();
    let file = CheckedFile::open(&path).unwrap();
    let mut two = [0; 2];
    file.read_exact_at(&mut two, 3).unwrap();
    assert_eq!(two, [4, 5]);
    for offset in [4, 5, u64::MAX - 1, u64::MAX] {
        assert!(
            file.read_exact_at(&mut two, offset)
                .unwrap_err()
                .message()
                .contains("outside")
        );
    }
    assert_eq!(file.read_vec::<u16>(1, 4).unwrap(), [0x0302, 0x0504]);
    assert!(file.read_vec::<u16>(0, 3).is_err());
    assert!(file.read_vec::<u8>(0, usize::MAX).is_err());
    assert!(file.read_vec::<u8>(u64::MAX, 1).is_err());
    assert_eq!(file.read_vec::<u32>(5, 0).unwrap(), [0; 0]);
}
