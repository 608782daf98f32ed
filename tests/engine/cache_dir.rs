//! Tests of computed prompts in a directory: a model that is loaded again continues a conversation
//! without computing it again, and its numbers do not change. Unit tests of `cache/tier` check
//! names, hashes and the index.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use crate::common::{fixture, greedy, load as load_plain};
use inference::{
    ErrorKind, GenerateOptions, LoadOptions, LoraConfig, Precision, Prompt, Split, TextModel,
};

/// Ids of the tiny vocabulary.
fn ids(seed: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + seed * 61) % 260 + 16).collect()
}

fn options(dir: &Path) -> LoadOptions {
    LoadOptions::new()
        .with_backend("cpu")
        .with_precision(Precision::Exact)
        .with_cache_dir(dir.to_owned())
}

fn load_with(name: &str, options: &LoadOptions) -> Box<dyn TextModel> {
    inference::load_model(fixture("tiny").join(name), options).unwrap()
}

fn load(name: &str, dir: &Path) -> Box<dyn TextModel> {
    load_with(name, &options(dir))
}

/// A reply, the bits of the logits of each of its tokens, and the number of cached tokens.
#[derive(Debug, PartialEq)]
struct Reply {
    tokens: Vec<u32>,
    logits: Vec<Vec<u32>>,
    cached: usize,
}

fn reply_with(model: &dyn TextModel, prompt: &[u32], options: &GenerateOptions) -> Reply {
    let prompt = Prompt::Tokens(prompt.to_vec());
    let options = options.clone().with_logits(true);
    let mut stream = model.generate(&prompt, &options).unwrap();
    let mut reply = Reply {
        tokens: Vec::new(),
        logits: Vec::new(),
        cached: 0,
    };
    for token in &mut stream {
        let token = token.unwrap();
        reply.tokens.push(token.id);
        let logits = token.logits.unwrap();
        reply
            .logits
            .push(logits.iter().map(|x| x.to_bits()).collect());
    }
    reply.cached = stream.metrics().cached_tokens;
    reply
}

fn reply(model: &dyn TextModel, prompt: &[u32]) -> Reply {
    reply_with(model, prompt, &greedy(12))
}

/// Loads a model, lets it answer once, and closes it, which waits for the disk.
fn once(name: &str, options: &LoadOptions, prompt: &[u32]) -> Reply {
    let model = load_with(name, options);
    let reply = reply(model.as_ref(), prompt);
    model.close().unwrap();
    reply
}

/// The names and sizes of the entries in a directory.
fn entries(dir: &Path) -> Vec<(PathBuf, u64)> {
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap());
    let mut all: Vec<_> = files
        .filter(|file| file.file_name().to_string_lossy().starts_with("prefix-"))
        .map(|file| (file.path(), file.metadata().unwrap().len()))
        .collect();
    all.sort();
    all
}

/// The next turn of a conversation.
fn next(prompt: &[u32], reply: &Reply) -> Vec<u32> {
    [prompt, &reply.tokens, &ids(9, 7)].concat()
}

#[test]
fn a_conversation_goes_on_after_a_restart() {
    for name in [
        "llama",
        "llama-bf16",
        "llama-q4",
        "qwen2-window",
        "mistral-window",
        "gemma3-text",
        "gpt-oss",
        "llama4-text",
        "deepseek-v3",
        "deepseek-v32",
        "mamba",
        "lfm2",
        "jamba",
        "kimi-linear",
        "falcon-h1",
        "qwen3-next",
        "rwkv7",
        "xlstm",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let first = ids(1, 30);
        let one = once(name, &options(dir.path()), &first);
        assert_eq!(one.cached, 0, "{name}");
        assert_eq!(entries(dir.path()).len(), 1, "{name}");

        let second = next(&first, &one);
        let two = once(name, &options(dir.path()), &second);
        // The last token of a reply is never fed to the model, so it is not cached.
        assert_eq!(two.cached, first.len() + one.tokens.len() - 1, "{name}");
        let fresh = load_plain(&fixture("tiny").join(name));
        let uncached = greedy(12).with_cache_prompt(false);
        let expected = reply_with(fresh.as_ref(), &second, &uncached);
        assert_eq!(two.tokens, expected.tokens, "{name}");
        // The last bits depend on how a prompt is divided into steps. Caches in memory divide it in
        // the same way.
        let model = load_plain(&fixture("tiny").join(name));
        assert_eq!(reply(model.as_ref(), &first), one, "{name}");
        assert!(reply(model.as_ref(), &second) == two, "{name}");

        let third = next(&second, &two);
        let three = once(name, &options(dir.path()), &third);
        assert_eq!(three.cached, second.len() + two.tokens.len() - 1, "{name}");
        assert!(reply(model.as_ref(), &third) == three, "{name}");
    }
}

#[test]
fn the_directory_needs_no_prompts_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path()).with_prompt_cache_bytes(0);
    let first = ids(1, 40);
    let one = once("llama", &options, &first);
    assert_eq!((one.cached, entries(dir.path()).len()), (0, 1));
    let two = once("llama", &options, &next(&first, &one));
    assert_eq!(two.cached, first.len() + one.tokens.len() - 1);
}

#[test]
fn a_longer_entry_replaces_those_that_it_can_be_cut_to() {
    // A recurrent state and a full window cannot be truncated, so the shorter entries remain useful
    // and are kept.
    for (name, kept) in [("llama", 1), ("qwen2-window", 2), ("mamba", 2)] {
        let dir = tempfile::tempdir().unwrap();
        let first = ids(1, 30);
        let one = once(name, &options(dir.path()), &first);
        let second = next(&first, &one);
        once(name, &options(dir.path()), &second);
        let before = entries(dir.path());
        assert_eq!(before.len(), kept, "{name}");
        // A repeated request writes nothing.
        let other = [&first[..], &one.tokens[..5], &[200, 201]].concat();
        once(name, &options(dir.path()), &second);
        assert_eq!(entries(dir.path()), before, "{name}");
        // Another branch of the conversation begins at the common prefix, if that is possible.
        let cut = once(name, &options(dir.path()), &other);
        let expected = if kept == 1 { first.len() + 5 } else { 0 };
        assert_eq!(cut.cached, expected, "{name}");
    }
}

#[test]
fn salts_and_adapters_and_models_are_separate() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = ids(2, 30);
    let salted = |salt: &str| greedy(12).with_cache_salt(salt.to_owned());
    let model = load("llama", dir.path());
    let first = reply_with(model.as_ref(), &prompt, &salted("a"));
    model.close().unwrap();
    let second = next(&prompt, &first);
    let adapted = options(dir.path()).with_adapter_path(fixture("training/llama-4"));
    for (which, options, salt, expected) in [
        ("none", options(dir.path()), None, 0),
        ("other salt", options(dir.path()), Some("b"), 0),
        ("adapter", adapted.clone(), Some("a"), 0),
        (
            "bounded",
            options(dir.path()).with_context_len(100),
            Some("a"),
            0,
        ),
        ("same", options(dir.path()), Some("a"), 41),
        // Now each of these cases finds the file that it wrote above.
        ("adapter again", adapted, Some("a"), 48),
        ("other salt again", options(dir.path()), Some("b"), 48),
    ] {
        let model = load_with("llama", &options);
        let how = salt.map_or_else(|| greedy(12), salted);
        let reply = reply_with(model.as_ref(), &second, &how);
        assert_eq!(reply.cached, expected, "{which}");
        model.close().unwrap();
    }
    // No file contains the salt in plain text.
    for (path, _) in entries(dir.path()) {
        let text = fs::read(&path).unwrap();
        assert!(!text.windows(9).any(|part| part == b"\"salt\":\"a"));
    }
    // Another model in the same directory.
    let other = once("qwen3", &options(dir.path()), &second);
    assert_eq!(other.cached, 0);
    let continued = next(&second, &other);
    assert_eq!(once("qwen3", &options(dir.path()), &continued).cached, 60);
}

#[test]
fn an_adapter_of_memory_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let model = load("llama", dir.path());
    let trainable = model.as_trainable().unwrap();
    trainable.apply_lora(&LoraConfig::default()).unwrap();
    let prompt = ids(3, 30);
    reply(model.as_ref(), &prompt);
    trainable.remove_adapter().unwrap();
    let one = reply(model.as_ref(), &prompt);
    assert_eq!(one.cached, 0);
    model.close().unwrap();
    assert_eq!(entries(dir.path()).len(), 1);
    let again = once("llama", &options(dir.path()), &next(&prompt, &one));
    assert_eq!(again.cached, 41);
}

#[test]
fn damaged_and_foreign_files_are_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = ids(4, 30);
    let one = once("llama", &options(dir.path()), &prompt);
    let second = next(&prompt, &one);
    let expected = once("llama", &options(dir.path()), &second);
    assert_eq!(expected.cached, 41);
    let (path, _) = entries(dir.path()).remove(0);
    let intact = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(intact[..8].try_into().unwrap()) as usize;
    let longer = next(&second, &expected);
    let rest = |content: &[u8]| {
        for (path, _) in entries(dir.path()) {
            fs::remove_file(path).unwrap();
        }
        fs::write(&path, content).unwrap();
    };
    let flipped = |at: usize| {
        let mut content = intact.clone();
        content[at] ^= 1;
        content
    };
    let is_there = || path.exists();
    // Damaged files are removed, and their prompts are computed again.
    for content in [
        flipped(0),
        flipped(10),
        flipped(header / 2),
        flipped(header),
        flipped(intact.len() - 1),
        intact[..intact.len() - 1].to_vec(),
        intact[..20].to_vec(),
        Vec::new(),
    ] {
        rest(&content);
        let reply = once("llama", &options(dir.path()), &longer);
        assert_eq!(reply.cached, 0, "{} bytes", content.len());
        assert!(!is_there(), "{} bytes", content.len());
    }
    // A file of a later version is not removed.
    rest(&intact);
    let mut later = intact.clone();
    let version = br#"\"version\":1"#;
    let at = later.windows(version.len()).position(|p| p == version);
    later[at.unwrap() + version.len() - 1] = b'2';
    rest(&later);
    let notes = dir.path().join("notes.txt");
    fs::write(&notes, "mine").unwrap();
    assert_eq!(once("llama", &options(dir.path()), &longer).cached, 0);
    assert_eq!(fs::read(&path).unwrap(), later);
    assert_eq!(fs::read(&notes).unwrap(), b"mine");
    // The intact file is used again.
    rest(&intact);
    let reply = once("llama", &options(dir.path()), &longer);
    assert_eq!(reply.cached, second.len() + 11);
}

/// Sets the time of the last use.
fn used(path: &Path, ago: u64) {
    let file = fs::File::open(path).unwrap();
    let time = SystemTime::now() - Duration::from_secs(ago);
    file.set_modified(time).unwrap();
}

#[test]
fn the_directory_is_bounded_and_the_least_recently_used_goes() {
    let dir = tempfile::tempdir().unwrap();
    let prompts: Vec<Vec<u32>> = (5..9).map(|seed| ids(seed, 30)).collect();
    let one = once("llama", &options(dir.path()), &prompts[0]);
    let (first, bytes) = entries(dir.path()).remove(0);
    let bounded = options(dir.path()).with_cache_dir_bytes(bytes * 5 / 2);
    once("llama", &bounded, &prompts[1]);
    let second = (entries(dir.path()).into_iter())
        .find(|(path, _)| *path != first)
        .unwrap()
        .0;
    used(&first, 20);
    used(&second, 10);
    // Later processes must see that an entry was used.
    assert_eq!(once("llama", &bounded, &next(&prompts[0], &one)).cached, 41);
    assert!(!first.exists(), "replaced by the longer one");
    once("llama", &bounded, &prompts[2]);
    let all = entries(dir.path());
    assert!(!second.exists(), "the least recently used");
    assert!(all.iter().map(|(_, bytes)| bytes).sum::<u64>() <= bytes * 5 / 2);

    // Files of another model count toward the bound, and are not removed.
    let mine = options(dir.path()).with_cache_dir_bytes(bytes * 2);
    let reply = once("qwen3", &mine, &prompts[3]);
    assert_eq!((reply.cached, entries(dir.path())), (0, all.clone()));
    // A bound below the size of a single file changes nothing.
    let least = options(dir.path()).with_cache_dir_bytes(1);
    once("llama", &least, &prompts[3]);
    assert_eq!(entries(dir.path()), all);
}

#[test]
fn two_processes_share_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let models = [0, 1].map(|_| load("llama", dir.path()));
    // Both processes write at the same time: some prompts in common, and some of their own.
    std::thread::scope(|scope| {
        for (i, model) in (1..).zip(&models) {
            scope.spawn(move || {
                for seed in [10, 11, 12, 10 * i + 10, 10 * i + 11] {
                    reply(model.as_ref(), &ids(seed, 30));
                }
            });
        }
    });
    let [one, two] = models;
    one.close().unwrap();
    // The first process has removed all files; the second one does not know.
    for (path, _) in entries(dir.path()) {
        fs::remove_file(path).unwrap();
    }
    let prompt = ids(10, 31);
    assert_eq!(reply(two.as_ref(), &prompt).tokens.len(), 12);
    two.close().unwrap();
    // The directory must contain only entries. No hidden temporary file of a writer remains.
    let all: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(all.len(), entries(dir.path()).len());
}

/// Two servers take turns in one conversation.
#[test]
fn a_process_sees_what_another_writes() {
    let dir = tempfile::tempdir().unwrap();
    let models = [0, 1].map(|_| load("llama", dir.path()));
    let mut prompt = ids(14, 30);
    let mut expected = 0;
    for model in models.iter().chain(&models) {
        let before = entries(dir.path());
        let reply = reply(model.as_ref(), &prompt);
        assert_eq!(reply.cached, expected);
        expected = prompt.len() + reply.tokens.len() - 1;
        prompt = next(&prompt, &reply);
        let until = Instant::now() + Duration::from_secs(60);
        // Waits until one longer file has replaced the shorter file.
        while entries(dir.path()) == before || entries(dir.path()).len() != 1 {
            assert!(Instant::now() < until, "nothing is written");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The model starts from a file, but the draft model has no computed tokens. The reply must not
/// change.
#[test]
fn drafts_go_on_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = ids(15, 30);
    let drafted = options(dir.path()).with_draft_model(fixture("tiny/llama"));
    let ask = |prompt: &[u32]| {
        let model = load_with("llama", &drafted);
        let reply = reply_with(model.as_ref(), prompt, &greedy(12).with_num_draft_tokens(3));
        model.close().unwrap();
        reply
    };
    let one = ask(&prompt);
    let second = next(&prompt, &one);
    let two = ask(&second);
    assert!(one.cached == 0 && two.cached >= 41, "{}", two.cached);
    let plain = load_plain(&fixture("tiny/llama"));
    assert_eq!(reply(plain.as_ref(), &second).tokens, two.tokens);
}

#[test]
fn directories_that_cannot_be_used_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let refused = |options: &LoadOptions| {
        inference::load_model(fixture("tiny/llama"), options)
            .err()
            .unwrap()
    };
    for path in [file.clone(), file.join("below")] {
        let error = refused(&options(&path));
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert!(error.to_string().contains("cache_dir"), "{error}");
    }
    for bad in [
        options(Path::new("")),
        options(dir.path()).with_cache_dir_bytes(0),
        options(dir.path()).with_split(Split::Tensor),
    ] {
        let error = refused(&bad);
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
        assert!(error.to_string().contains("cache_dir"), "{error}");
    }
}

/// A disk that fails later does not fail requests.
#[test]
fn a_directory_that_vanishes_does_not_fail_requests() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    let model = load("llama", &path);
    fs::remove_dir_all(&path).unwrap();
    let prompt = ids(13, 30);
    let one = reply(model.as_ref(), &prompt);
    let two = reply(model.as_ref(), &next(&prompt, &one));
    assert_eq!((one.cached, two.cached), (0, 41));
    model.close().unwrap();
}

/// Runs `mlx` and returns its exit code, its output and its messages.
fn mlx(arguments: &[&str]) -> (Option<i32>, String, String) {
    let run = Command::new(env!("CARGO_BIN_EXE_mlx"))
        .args(arguments)
        .env_remove("MLX_BACKEND")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (run.status.code(), text(&run.stdout), text(&run.stderr))
}

#[test]
fn the_program_continues_from_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("prompts");
    let model = fixture("tiny/llama");
    let begin = [
        "generate",
        "--model",
        model.to_str().unwrap(),
        "--backend",
        "cpu",
    ];
    let how = [
        "--quiet",
        "--json",
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--tokens",
    ];
    let directory = [
        "--cache-dir",
        place.to_str().unwrap(),
        "--cache-dir-size",
        "1MiB",
    ];
    let ask = |more: &[&str], tokens: &str| -> serde_json::Value {
        let (code, output, messages) = mlx(&[&begin, more, &how, &[tokens]].concat());
        assert_eq!(code, Some(0), "{messages}");
        serde_json::from_str(&output).unwrap()
    };
    let first = ask(&directory, "20,30,40,50,60,70");
    assert_eq!(first["metrics"]["cached_tokens"], 0);
    let second = ask(&directory, "20,30,40,50,60,70,99");
    assert_eq!(second["metrics"]["cached_tokens"], 6);
    assert_eq!(second["tokens"], ask(&[], "20,30,40,50,60,70,99")["tokens"]);

    // The files of the directory are prompt caches.
    let (file, _) = entries(&place).remove(0);
    let cached = load_plain(&model);
    let cached = cached.as_prompt_cache().unwrap();
    assert!(cached.load_prompt_cache(&file).unwrap().len() > 6);

    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let (code, _, messages) = mlx(&[
        &begin[..],
        &["--cache-dir", file.to_str().unwrap(), "--tokens", "20"],
    ]
    .concat());
    assert_eq!(code, Some(1), "{messages}");
    assert!(messages.contains("cache_dir"), "{messages}");
    let (code, _, messages) = mlx(&[&begin[..], &["--cache-dir-size", "1MiB", "x"]].concat());
    assert_eq!(code, Some(2), "{messages}");
}
