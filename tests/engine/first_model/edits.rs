//! Tests the edits of the first model in docs/edits.md: the states that lead to the answer "Paris",
//! and a vector that changes the tone.

use std::path::Path;

use serde_json::Value;

use super::{mlx, stdout};

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&stdout(&mlx(args))).unwrap()
}

/// Up to layer 22, the state at the country's name determines the answer. From layer 23 on, the
/// state at the last token does.
#[test]
fn patched_states_bring_paris_back() {
    let report = json(&[
        "trace",
        "--prompt",
        "The capital of France is",
        "--patch",
        "The capital of Italy is",
        "--for",
        " Paris",
        "--against",
        " Rome",
        "--layers",
        "20-25",
        "--json",
    ]);
    assert_eq!(report["answer"]["text"], " Paris");
    let number = |value: &Value| value.as_f64().unwrap();
    assert!(number(&report["difference"]) > 5.0, "{report}");
    assert!(number(&report["corrupted_difference"]) < -4.0, "{report}");
    let rows = report["layers"].as_array().unwrap();
    assert_eq!(rows.len(), 6);
    for row in rows {
        let layer = row["layer"].as_u64().unwrap();
        let carries = if layer <= 22 { 3 } else { 4 };
        let recovered = row["recovered"].as_array().unwrap();
        assert_eq!(recovered.len(), 5);
        for (position, part) in recovered.iter().enumerate() {
            let expected = if position == carries { 1.0 } else { 0.0 };
            let difference = (number(part) - expected).abs();
            assert!(difference < 0.06, "{layer}, {position}: {part}");
        }
    }
}

const GLAD: &str = "What a wonderful day, I am so happy.\nThis is lovely news, I love it.\n\
                    I feel great, everything is beautiful.\nWe had so much fun, it was delightful.\n";
const SAD: &str = "What a terrible day, I am so sad.\nThis is awful news, I hate it.\n\
                   I feel sick, everything is ugly.\nWe had so much pain, it was dreadful.\n";
const TEXT: &str = "The library opens at nine. Visitors return their books at the desk near the \
                    door, and new cards are issued on the second floor.";

/// The vector makes glad words more likely, and its opposite makes sad words more likely. The
/// perplexity of a neutral text measures the damage.
#[test]
fn a_direction_changes_the_tone_and_perplexity_says_the_cost() {
    if crate::alone::ran_elsewhere(
        "first_model::edits::a_direction_changes_the_tone_and_perplexity_says_the_cost",
    ) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(file("glad.txt"), GLAD).unwrap();
    std::fs::write(file("sad.txt"), SAD).unwrap();
    let direction = |name: &str, coefficient: &str| {
        let path = file(name);
        let sets = [file("glad.txt"), file("sad.txt")];
        let args = ["probe", "direction", "--positive", &sets[0], "--negative"];
        let more = [&sets[1], "--layers", "14-16", "--coefficient", coefficient];
        stdout(&mlx(&[&args[..], &more, &["-o", &path]].concat()));
        assert!(Path::new(&path).is_file());
        path
    };
    let (joy, grief) = (direction("joy.json", "1"), direction("grief.json", "-1"));

    let tokens = super::MODEL.as_token_model().unwrap();
    let first = |word: &str| tokens.encode(word, false).unwrap()[0] as usize;
    let words = [" beautiful", " lovely", " terrible", " dreadful"].map(first);
    let tone = |steer: &[&str]| {
        let args = ["logits", "--prompt", "The weather this morning is"];
        let report = json(&[&args[..], steer].concat());
        let logits = crate::common::floats(&report["logits"]);
        let [a, b, c, d] = words.map(|word| logits[word]);
        a + b - c - d
    };
    let plain = tone(&[]);
    let (up, down) = (tone(&["--steer", &joy]), tone(&["--steer", &grief]));
    assert!(
        up > plain + 1.0 && down < plain - 1.0,
        "{down} {plain} {up}"
    );

    let reply = |steer: &[&str]| {
        let args = ["generate", "--raw", "-n", "20", "--temp", "0", "--prompt"];
        let prompt = ["The weather this morning is"];
        stdout(&mlx(&[&args[..], &prompt, steer].concat()))
    };
    assert_ne!(reply(&[]), reply(&["--steer", &joy]));

    let perplexity = |steer: &[&str]| {
        let report = json(&[&["perplexity", "--prompt", TEXT], steer].concat());
        report["perplexity"].as_f64().unwrap()
    };
    let (before, after) = (perplexity(&[]), perplexity(&["--steer", &joy]));
    assert!(after > before && after < 4.0 * before, "{before} {after}");
}
