use super::*;
use crate::cache::test_support::recurrent;
use crate::cache::{CacheOptions, Switch};
use mlx_rs_core::{Array, Dtype, Stream, zeros};

fn computation(model: &str) -> Computation {
    Computation {
        model: model.to_owned(),
        variant: "toy".to_owned(),
        source: "models/toy".to_owned(),
        device: Device::cpu(),
    }
}

fn tier(path: &Path, model: &str) -> Tier {
    let dir = Directory::open(path, 1 << 20).unwrap();
    Tier::new(dir, computation(model)).unwrap()
}

/// Keys whose values depend on the position.
fn filled(n: u16) -> Caches {
    let mut cache = CacheOptions::default().cache(None);
    if n > 0 {
        let numbers: Vec<f32> = (0..n * 2).map(f32::from).collect();
        let part = Array::from_slice(&numbers, &[1, 1, i32::from(n), 2]).unwrap();
        cache.update(&part, &part).unwrap();
    }
    Caches::from(cache).with_switches([Switch::Once(20)])
}

const PLAIN: Of<'_> = Of {
    adapter: None,
    salt: None,
};

fn put(tier: &Tier, of: Of<'_>, tokens: &[u32], caches: Caches) {
    let stream = Stream::default_of(Device::cpu()).unwrap();
    stream.scope(|| tier.put(of, tokens, &caches.for_sequence(tokens.len())));
}

fn take(
    tier: &Tier,
    of: Of<'_>,
    prompt: &[u32],
    have: usize,
    empty: fn() -> Caches,
) -> Option<(Caches, usize)> {
    let stream = Stream::default_of(Device::cpu()).unwrap();
    let like = empty().for_sequence(prompt.len());
    stream.scope(|| {
        let mut one = || {
            let mut cache = CacheOptions::default().cache(None);
            let part = zeros(&[1, 1, 1, 2], Dtype::Float32).map_err(engine("test"))?;
            cache.update(&part, &part).map_err(engine("test"))?;
            Ok(Caches::from(cache))
        };
        tier.take(of, prompt, (&like, have), (&empty, &mut one))
    })
}

fn keys() -> Caches {
    filled(0)
}

fn state() -> Caches {
    recurrent(0)
}

#[test]
fn the_longest_beginning_is_read_and_cut() {
    let dir = tempfile::tempdir().unwrap();
    let first = tier(dir.path(), "a");
    put(&first, PLAIN, &[1, 2, 3, 4], filled(4));
    put(&first, PLAIN, &[1, 9], filled(2));
    drop(first);
    let second = tier(dir.path(), "a");
    let n = |prompt: &[u32], have| take(&second, PLAIN, prompt, have, keys).map(|(_, n)| n);
    assert_eq!(n(&[1, 2, 3, 4, 5], 0), Some(4));
    // The last token must remain to be computed.
    assert_eq!(n(&[1, 2, 3, 4], 0), Some(3));
    assert_eq!(n(&[1, 2, 7], 0), Some(2));
    assert_eq!(n(&[1, 9, 9], 0), Some(2));
    assert_eq!(n(&[7], 0), None);
    // The caller already has as many tokens.
    assert_eq!(n(&[1, 2, 3, 4, 5], 4), None);
    assert_eq!(n(&[1, 2, 3, 4, 5], 3), Some(4));
    let (caches, _) = take(&second, PLAIN, &[1, 2, 3, 8], 0, keys).unwrap();
    assert_eq!(offset(&caches), 3);
    let stream = Stream::default_of(Device::cpu()).unwrap();
    let snapshot = stream.scope(|| caches[0].snapshot()).unwrap();
    let keys = snapshot.arrays["keys"].to_vec::<f32>().unwrap();
    assert_eq!(keys, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn an_entry_that_a_request_reads_before_it_is_known_keeps_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let tier = tier(dir.path(), "a");
    put(&tier, PLAIN, &[1, 2, 3, 4], filled(4));
    tier.shared.until_idle();
    let (name, about) = {
        let index = tier.shared.index.lock();
        let (name, about) = index.entries.first_key_value().unwrap();
        (name.clone(), About::clone(about))
    };
    // A request may read the directory between the file's last rename and this call.
    tier.shared.add_written(name.clone(), about);
    assert!(dir.path().join(&name).is_file());
    assert_eq!(tier.shared.index.lock().entries.len(), 1);
    // A longer entry must remove the file.
    put(&tier, PLAIN, &[1, 2, 3, 4, 5], filled(5));
    tier.shared.until_idle();
    assert!(!dir.path().join(&name).exists());
    assert_eq!(tier.shared.index.lock().entries.len(), 1);
}

#[test]
fn other_models_adapters_salts_and_kinds_do_not_match() {
    let dir = tempfile::tempdir().unwrap();
    let of = |adapter, salt| Of { adapter, salt };
    let mine = tier(dir.path(), "a");
    let all = [
        of(None, None),
        of(None, Some("")),
        of(None, Some("x")),
        of(Some("x"), None),
        of(Some("x"), Some("x")),
    ];
    for (i, which) in all.iter().enumerate() {
        assert!(take(&mine, *which, &[1, 2, 3, 4], 0, keys).is_none());
        put(&mine, *which, &[1, 2, 3, i as u32 + 10], filled(4));
        mine.shared.until_idle();
    }
    for (i, which) in all.iter().enumerate() {
        let prompt = [1, 2, 3, i as u32 + 10, 5];
        let (_, n) = take(&mine, *which, &prompt, 0, keys).unwrap();
        assert_eq!(n, 4, "{which:?}");
        assert!(take(&mine, *which, &prompt, 0, state).is_none());
    }
    let other = tier(dir.path(), "b");
    assert!(take(&other, PLAIN, &[1, 2, 3, 10, 5], 0, keys).is_none());
    let mut changed = computation("a");
    changed.variant = "another".to_owned();
    let directory = Directory::open(dir.path(), 1 << 20).unwrap();
    let changed = Tier::new(directory, changed).unwrap();
    assert!(take(&changed, PLAIN, &[1, 2, 3, 10, 5], 0, keys).is_none());
}

#[test]
fn a_recurrent_state_is_read_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let tier = tier(dir.path(), "a");
    put(&tier, PLAIN, &[1, 2, 3], recurrent(3));
    put(&tier, PLAIN, &[1, 2, 3, 4, 5], recurrent(5));
    tier.shared.until_idle();
    let n = |prompt: &[u32]| take(&tier, PLAIN, prompt, 0, state).map(|(_, n)| n);
    assert_eq!(n(&[1, 2, 3, 4, 5, 6]), Some(5));
    assert_eq!(n(&[1, 2, 3, 4, 9]), Some(3));
    assert_eq!((n(&[1, 2, 9]), n(&[1, 2, 3])), (None, None));
}

#[test]
fn keys_of_another_rotation_are_neither_written_nor_read() {
    let dir = tempfile::tempdir().unwrap();
    let tier = tier(dir.path(), "a");
    let tokens: Vec<u32> = (0..10).collect();
    let stream = Stream::default_of(Device::cpu()).unwrap();
    // These keys are rotated for a sequence of 30 positions, and a file cannot record this.
    stream.scope(|| tier.put(PLAIN, &tokens, &filled(10).for_sequence(30)));
    tier.shared.until_idle();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    put(&tier, PLAIN, &tokens, filled(10));
    tier.shared.until_idle();
    let longer: Vec<u32> = (0..30).collect();
    assert!(take(&tier, PLAIN, &longer, 0, keys).is_none());
    assert!(take(&tier, PLAIN, &longer[..15], 0, keys).is_some());
}

#[test]
fn every_changed_byte_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let first = tier(dir.path(), "a");
    put(&first, PLAIN, &[1, 2, 3, 4], filled(4));
    drop(first);
    let file = fs::read_dir(dir.path()).unwrap().next().unwrap();
    let path = file.unwrap().path();
    entry::verify(&path).unwrap();
    let intact = fs::read(&path).unwrap();
    for at in 0..intact.len() {
        let mut content = intact.clone();
        content[at] ^= 0x20;
        fs::write(&path, &content).unwrap();
        assert!(entry::verify(&path).is_err(), "byte {at}");
    }
    for length in [0, 7, 8, 9, intact.len() / 2, intact.len() - 1] {
        fs::write(&path, &intact[..length]).unwrap();
        assert!(entry::verify(&path).is_err(), "{length} bytes");
    }
}

#[test]
fn names_are_those_of_entries_only() {
    let about = About::default();
    assert!(entry::is_entry(&about.name()));
    let mut other = about.clone();
    other.tokens.push(1);
    assert_ne!(about.name(), other.name());
    // The same letters, but divided differently between the fields.
    let (mut one, mut two) = (about.clone(), about);
    one.model = "ab".to_owned();
    two.model = "a".to_owned();
    two.variant = "b".to_owned();
    assert_ne!(one.name(), two.name());
    for name in ["prefix-", "prefix-00.safetensors", "model.safetensors", ""] {
        assert!(!entry::is_entry(name), "{name}");
    }
}
