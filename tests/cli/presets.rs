//! Tests of presets from Modelfiles: they are created, listed, shown, used and removed.

use std::path::Path;

use crate::common::fixture;
use crate::program::{mlx, refused, stdout, text};
use serde_json::Value;

fn run(home: &Path, args: &[&str]) -> String {
    stdout(&mlx(home, args).output().unwrap())
}

fn fails(home: &Path, args: &[&str], code: i32) -> String {
    refused(&mlx(home, args).output().unwrap(), code)
}

/// A home directory with the tiny model and a Modelfile that contains this text.
fn home_with(modelfile: &str) -> (tempfile::TempDir, String) {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("files/model");
    std::fs::create_dir_all(&model).unwrap();
    for file in std::fs::read_dir(fixture("tiny/gpt2")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    let file = home.path().join("files/Modelfile");
    std::fs::write(&file, modelfile).unwrap();
    let file = file.to_str().unwrap().to_owned();
    (home, file)
}

/// `run` samples by default. These flags make it greedy, like `generate`.
const GREEDY: [&str; 4] = ["--temp", "0", "--repeat-penalty", "1"];

const PIRATE: &str = r#"
FROM ./model
SYSTEM Speak like a pirate.
PARAMETER num_predict 6
PARAMETER num_ctx 200
PARAMETER num_gpu 1
MESSAGE user Hello
MESSAGE assistant Ahoy
LICENSE """Of the
seven seas"""
"#;

#[test]
fn a_preset_is_its_model_with_all_it_says() {
    let (home, file) = home_with(PIRATE);
    let home = home.path();
    let made = mlx(home, &["create", "Pirate", "-f", &file])
        .output()
        .unwrap();
    assert_eq!(stdout(&made), "Pirate\n");
    assert!(
        text(&made.stderr).contains("num_gpu"),
        "{}",
        text(&made.stderr)
    );

    // The expected prompt, in the template's format.
    let raw = "<|im_start|>system\nSpeak like a pirate.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n\
               <|im_start|>assistant\nAhoy<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let model = home.join("files/model").to_str().unwrap().to_owned();
    let by_hand = [
        "generate",
        "-m",
        &model,
        "--raw",
        "-p",
        raw,
        "-c",
        "200",
        "--backend",
        "cpu",
    ];
    let wanted = run(home, &[&by_hand[..], &["-n", "6"]].concat());
    for args in [
        ["run", "pirate", "hi", "--backend", "cpu"],
        ["run", "PIRATE:latest", "hi", "--backend", "cpu"],
        ["generate", "hi", "-m", "pirate", "--backend=cpu"],
    ] {
        let args = [&args[..], &GREEDY].concat();
        assert_eq!(run(home, &args), wanted, "{args:?}");
    }
    let mut chat = mlx(home, &["chat", "-m", "pirate", "--backend", "cpu"]);
    chat.stdin(std::process::Stdio::piped());
    assert_eq!(stdout(&crate::program::piped(chat, "hi\n")), wanted);
    // A flag overrides the preset.
    let wanted = run(home, &[&by_hand[..], &["-n", "2"]].concat());
    let args = ["run", "pirate", "hi", "--backend", "cpu", "-n", "2"];
    assert_eq!(run(home, &[&args[..], &GREEDY].concat()), wanted);
}

#[test]
fn a_preset_is_listed_shown_and_removed() {
    let (home, file) = home_with(PIRATE);
    let home = home.path();
    run(home, &["create", "pirate", "-f", &file]);
    let listed: Value = serde_json::from_str(&run(home, &["ls", "--json"])).unwrap();
    assert_eq!(listed[0]["name"], "pirate");
    assert!(listed[0]["preset_of"].as_str().unwrap().ends_with("model"));
    assert!(run(home, &["list"]).contains("preset of "));

    let shown = run(home, &["show", "pirate"]);
    for part in ["gpt2", "Speak like a pirate.", "num_predict", "seven seas"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert_eq!(
        run(home, &["show", "pirate", "--system"]),
        "Speak like a pirate.\n"
    );
    assert_eq!(
        run(home, &["show", "pirate", "--license"]),
        "Of the\nseven seas\n"
    );
    assert_eq!(
        run(home, &["show", "pirate", "--parameters"]),
        "num_predict 6\nnum_ctx 200\n"
    );
    // The Modelfile that the program prints for a preset creates an equal preset.
    let again = home.join("again");
    std::fs::write(&again, run(home, &["show", "pirate", "--modelfile"])).unwrap();
    run(home, &["create", "other", "-f", again.to_str().unwrap()]);
    let [one, other] = ["pirate", "other"]
        .map(|name| std::fs::read_to_string(home.join(format!("presets/{name}.json"))).unwrap());
    assert_eq!(one, other);

    fails(home, &["rm", "pirate"], 2);
    run(home, &["rm", "pirate", "--yes"]);
    let told = fails(home, &["run", "pirate", "hi"], 1);
    assert!(told.contains("no model \"pirate\""), "{told}");
    let told = fails(home, &["run", "othr", "hi"], 1);
    assert!(told.contains("did you mean other?"), "{told}");
}

#[test]
fn a_preset_may_stand_on_another_and_have_a_template() {
    let (home, file) = home_with(PIRATE);
    let home = home.path();
    run(home, &["create", "pirate", "-f", &file]);
    let second = home.join("second");
    std::fs::write(
        &second,
        "FROM pirate\nTEMPLATE {{ messages[0].content }}|{{ messages[-1].content }}\nPARAMETER num_predict 3\n",
    )
    .unwrap();
    run(home, &["create", "second", "-f", second.to_str().unwrap()]);
    let model = home.join("files/model").to_str().unwrap().to_owned();
    let by_hand = [
        "generate",
        "-m",
        &model,
        "--raw",
        "-p",
        "Speak like a pirate.|hi",
    ];
    let wanted = run(
        home,
        &[&by_hand[..], &["-n", "3", "-c", "200", "--backend", "cpu"]].concat(),
    );
    let args = ["run", "second", "hi", "--backend", "cpu"];
    assert_eq!(run(home, &[&args[..], &GREEDY].concat()), wanted);
    let template = run(home, &["show", "second", "--template"]);
    assert!(
        template.starts_with("{{ messages[0].content }}|"),
        "{template}"
    );
    // Commands that ignore presets use the preset's model.
    let args = [
        "perplexity",
        "-m",
        "second",
        "-p",
        "some text",
        "--backend",
        "cpu",
    ];
    assert!(run(home, &args).contains("perplexity"));
}

#[test]
fn mistakes_in_a_modelfile_name_file_and_line() {
    for (wrong, says) in [
        ("FROM ./model\nRUN x", "line 2: unknown instruction RUN"),
        ("FROM ./model\n\nPARAMETER top_p 2", "line 3"),
        (
            "FROM ./model\nPARAMETER mirostat 1",
            "no parameter \"mirostat\"",
        ),
        ("FROM ./nothing", "FROM ./nothing"),
        ("FROM ./model\nADAPTER ./none", "ADAPTER ./none"),
        ("FROM ./model\nTEMPLATE {{ .Prompt }}", "Go"),
        ("FROM ./model\nTEMPLATE {% if %}", "TEMPLATE"),
    ] {
        let (home, file) = home_with(wrong);
        let told = fails(home.path(), &["create", "x", "-f", &file], 2);
        assert!(told.contains(says) && told.contains("Modelfile"), "{told}");
        assert!(!home.path().join("presets").exists());
    }
    let (home, file) = home_with("FROM ./model");
    for name in ["../x", "a/b", "smollm2", ""] {
        let told = fails(home.path(), &["create", name, "-f", &file], 2);
        assert!(told.contains("name"), "{told}");
    }
    let told = fails(home.path(), &["create", "x", "-f", "no-such-file"], 2);
    assert!(told.contains("no-such-file"), "{told}");
}

#[cfg(unix)]
#[test]
fn presets_are_private_files() {
    use std::os::unix::fs::PermissionsExt;
    let (home, file) = home_with(PIRATE);
    run(home.path(), &["create", "pirate", "-f", &file]);
    let metadata = std::fs::metadata(home.path().join("presets/pirate.json")).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
}
