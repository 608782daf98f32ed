//! Tests of window stores: round trips, offsets for numpy, atomic writes, and detection of each
//! damaged byte.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use inference_probe::window_store::{Tier, WindowStore};
use proptest::prelude::*;

const WIDTH: usize = 3;

fn vector(seed: usize) -> Vec<f32> {
    (0..WIDTH)
        .map(|i| ((seed * 7 + i * 3) % 11) as f32 * 0.25 - 1.0)
        .collect()
}

fn boundaries(lengths: &[usize]) -> WindowStore {
    let mut store = WindowStore::boundaries(WIDTH, 10).unwrap();
    for (i, length) in lengths.iter().enumerate() {
        store.push(*length, &vector(i), &[], &[]).unwrap();
    }
    store
}

fn context(tier: Tier, layers: &[usize], lengths: &[usize]) -> WindowStore {
    let mut store = WindowStore::context(WIDTH, 10, 6, tier, layers).unwrap();
    let parts = |first: usize, present: bool| -> Vec<Vec<f32>> {
        let count = if present { layers.len() } else { 0 };
        (0..count).map(|l| vector(first + l)).collect()
    };
    for (i, length) in lengths.iter().enumerate() {
        let feed_forward = parts(100 * i + 10, tier >= Tier::FeedForward);
        let mixer = parts(100 * i + 20, tier >= Tier::Full);
        let f: Vec<&[f32]> = feed_forward.iter().map(Vec::as_slice).collect();
        let m: Vec<&[f32]> = mixer.iter().map(Vec::as_slice).collect();
        store.push(*length, &vector(i), &f, &m).unwrap();
    }
    store
}

fn stores() -> Vec<WindowStore> {
    vec![
        boundaries(&[10, 10, 4]),
        boundaries(&[]),
        context(Tier::Residual, &[], &[10, 3]),
        context(Tier::FeedForward, &[1, 4], &[10, 3]),
        context(Tier::Full, &[3, 4, 5], &[10, 10, 1]),
    ]
}

fn written(store: &WindowStore, dir: &Path) -> Vec<u8> {
    let path = dir.join("store");
    store.write(&path).unwrap();
    std::fs::read(&path).unwrap()
}

fn read(bytes: &[u8], dir: &Path) -> Result<WindowStore, String> {
    let path = dir.join("read");
    std::fs::write(&path, bytes).unwrap();
    WindowStore::read(&path).map_err(|e| e.to_string())
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn float(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(word(bytes, at))
}

#[test]
fn what_is_written_is_read() {
    let dir = tempfile::tempdir().unwrap();
    for store in stores() {
        let bytes = written(&store, dir.path());
        assert_eq!(read(&bytes, dir.path()).unwrap(), store);
    }
    let store = boundaries(&[10, 10, 4]);
    assert_eq!((store.windows(), store.tokens(), store.width()), (3, 24, 3));
    assert_eq!(store.window(2).unwrap().tokens, 20..24);
    assert_eq!(store.window(1).unwrap().residual, vector(1));
    assert_eq!(store.window(3), None);
    let windows = [0, 9, 10, 23, 24].map(|token| store.window_of(token));
    assert_eq!(windows, [Some(0), Some(0), Some(1), Some(2), None]);
}

/// The test states the offsets as numbers, because other readers rely on them.
#[test]
fn fields_are_at_the_offsets_of_the_documentation() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = written(&boundaries(&[10, 4]), dir.path());
    assert_eq!(&bytes[..4], b"BNDX");
    let words = [4, 8, 12, 16, 20].map(|at| word(&bytes, at));
    assert_eq!(words, [1, 3, 10, 2, 14]);
    let entry = [80, 84, 88, 92].map(|at| word(&bytes, at));
    assert_eq!(entry, [10, 4, 64 + 2 * 16 + 12, 0]);
    assert_eq!(float(&bytes, 64 + 32 + 12 + 4), vector(1)[1]);
    assert_eq!(bytes.len(), 64 + 2 * (16 + 12));

    let bytes = written(&context(Tier::Full, &[2, 5], &[10, 4]), dir.path());
    assert_eq!(&bytes[..4], b"CTXT");
    let words = [4, 8, 12, 16, 32, 36].map(|at| word(&bytes, at));
    assert_eq!(words, [1, 3, 6, 10, 2, 14]);
    assert_eq!(bytes[20..32], [3, 2, 0, 0, 2, 5, 0, 0, 0, 0, 0, 0]);
    let data = 128 + 2 * 24;
    let size = 5 * 12;
    let entry = [152, 156, 160, 164, 168, 172].map(|at| word(&bytes, at));
    assert_eq!(entry, [10, 4, (data + size) as u32, 0, 0, 0]);
    let second = data + size;
    let firsts = [0, 1, 2, 3, 4].map(|v| float(&bytes, second + 12 * v));
    let expected = [1, 110, 111, 120, 121].map(|seed| vector(seed)[0]);
    assert_eq!(firsts, expected);
}

#[test]
fn parts_add_up_where_all_are_there() {
    let store = context(Tier::Full, &[3, 4, 5], &[10, 3]);
    let sum = store.reconstruct(1).unwrap();
    for (i, ours) in sum.iter().enumerate() {
        let seeds = [1, 110, 111, 112, 120, 121, 122];
        let expected: f32 = seeds.iter().map(|s| vector(*s)[i]).sum();
        assert!((ours - expected).abs() < 1e-6, "{ours} {expected}");
    }
    assert_eq!(store.reconstruct(2), None);
    let gap = context(Tier::Full, &[3, 5], &[10]);
    assert_eq!(gap.reconstruct(0), None);
    let less = context(Tier::FeedForward, &[3, 4], &[10]);
    assert_eq!(less.reconstruct(0), None);
    assert_eq!(boundaries(&[10]).reconstruct(0), None);
}

#[test]
fn damage_at_every_byte_and_every_truncation_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    for store in stores() {
        let original = written(&store, dir.path());
        for at in 0..original.len() {
            let mut bytes = original.clone();
            bytes[at] ^= 0x40;
            assert!(read(&bytes, dir.path()).is_err(), "byte {at}");
            assert!(read(&original[..at], dir.path()).is_err(), "{at} bytes");
        }
        let longer = [original.as_slice(), &[0]].concat();
        assert!(read(&longer, dir.path()).is_err());
    }
}

/// Files of other writers have no hash. Everything except the vectors must still be checked.
#[test]
fn headers_and_entries_are_checked_without_a_hash_too() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        (boundaries(&[10, 4]), 64, 16),
        (context(Tier::Full, &[1, 2], &[10, 4]), 128, 24),
    ];
    for (store, header, entry) in cases {
        let mut plain = written(&store, dir.path());
        plain[header - 32..header].fill(0);
        assert_eq!(read(&plain, dir.path()).unwrap(), store);
        for n in 0..plain.len() {
            assert!(read(&plain[..n], dir.path()).is_err(), "{n} bytes");
        }
        // A damaged entry, count, tier or reserved byte must be detected. A wrong model size,
        // window size or layer cannot be detected, because no other field depends on it.
        let free = [12, 13, 14, 15, 16, 17, 18, 19, 24, 25];
        let fields = (0..header - 32).chain(header..header + 2 * entry);
        for at in fields.filter(|at| !free.contains(at) || header == 64 && *at >= 16) {
            let mut bytes = plain.clone();
            bytes[at] ^= 0x80;
            assert!(read(&bytes, dir.path()).is_err(), "byte {at}");
        }
        // Files of larql have unused entries before the vectors.
        let mut spare = plain[..header + 2 * entry].to_vec();
        spare.resize(header + 5 * entry, 0);
        spare.extend(&plain[header + 2 * entry..]);
        for i in 0..2 {
            let at = header + i * entry + 8;
            let moved = word(&spare, at) + 3 * entry as u32;
            spare[at..at + 4].copy_from_slice(&moved.to_le_bytes());
        }
        assert_eq!(read(&spare, dir.path()).unwrap(), store);
    }
}

#[test]
fn numbers_that_cannot_be_stored_are_errors() {
    assert!(WindowStore::boundaries(0, 1).is_err());
    assert!(WindowStore::boundaries(1, 0).is_err());
    let layers = |blocks: usize, layers: &[usize]| {
        WindowStore::context(1, 1, blocks, Tier::Full, layers).is_err()
    };
    assert!(layers(6, &[6]) && layers(6, &[2, 1]) && layers(6, &[1, 1]));
    assert!(layers(400, &[256]) && layers(20, &[0, 1, 2, 3, 4, 5, 6, 7, 8]));
    assert!(!layers(400, &[255]) && !layers(20, &[0, 1, 2, 3, 4, 5, 6, 7]));
    let mut store = WindowStore::context(2, 4, 3, Tier::FeedForward, &[1]).unwrap();
    let (two, three) = ([0.0; 2], [0.0; 3]);
    assert!(store.push(0, &two, &[&two], &[]).is_err());
    assert!(store.push(5, &two, &[&two], &[]).is_err());
    assert!(store.push(4, &three, &[&two], &[]).is_err());
    assert!(store.push(4, &two, &[&three], &[]).is_err());
    assert!(store.push(4, &two, &[], &[]).is_err());
    assert!(store.push(4, &two, &[&two], &[&two]).is_err());
    assert_eq!((store.windows(), store.tokens()), (0, 0));
}

/// The child process of the test below. It writes two stores alternately until it is killed.
#[test]
fn a_killed_writer_leaves_a_whole_file_or_none() {
    const CHILD: &str = "WINDOW_STORE_TEST_PATH";
    let large = |n: usize| {
        let mut store = WindowStore::boundaries(1 << 14, 10).unwrap();
        for _ in 0..n {
            store.push(10, &vec![n as f32; 1 << 14], &[], &[]).unwrap();
        }
        store
    };
    let both = [large(20), large(30)];
    if let Some(path) = std::env::var_os(CHILD) {
        for store in both.iter().cycle() {
            store.write(Path::new(&path)).unwrap();
        }
    }
    let mut seen = 0;
    for run in 0..12 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.bndx");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "windows::a_killed_writer_leaves_a_whole_file_or_none",
            ])
            .env(CHILD, &path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(20 + 45 * run));
        child.kill().unwrap();
        child.wait().unwrap();
        if path.exists() {
            let store = WindowStore::read(&path).unwrap();
            assert!(both.contains(&store));
            seen += 1;
        }
    }
    assert!(seen > 0, "no run was long enough to write a file");
}

proptest! {
    #[test]
    fn any_store_is_read_as_it_was(
        lengths in prop::collection::vec(1usize..=10, 0..6),
        tier in prop::sample::select(vec![Tier::Residual, Tier::FeedForward, Tier::Full]),
        layers in prop::sample::subsequence((0..6usize).collect::<Vec<_>>(), 0..=6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        for store in [boundaries(&lengths), context(tier, &layers, &lengths)] {
            let bytes = written(&store, dir.path());
            let back = read(&bytes, dir.path()).unwrap();
            prop_assert_eq!(&back, &store);
            prop_assert_eq!(back.tokens(), lengths.iter().sum::<usize>());
        }
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 8..300), small in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = bytes;
        if small {
            // Small numbers reach more code of the reader than random numbers do.
            bytes.iter_mut().for_each(|b| *b &= (*b >> 3) & 3);
        }
        for magic in [b"BNDX\x01\0\0\0", b"CTXT\x01\0\0\0"] {
            bytes[..8].copy_from_slice(magic);
            let header = if magic[0] == b'B' { 64 } else { 128 };
            if let Some(hash) = bytes.get_mut(header - 32..header) {
                hash.fill(0);
            }
            let _ = read(&bytes, dir.path());
        }
    }
}
