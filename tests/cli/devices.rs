//! Device files have no end, so a command must refuse them or limit how much it reads. Both happen
//! before a model is loaded.
#![cfg(unix)]

use crate::program::{output, refused, tiny};

#[test]
fn devices_are_no_texts_and_no_results() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = dir.path().join("prompts.txt");
    std::fs::write(&prompts, "a\n").unwrap();
    let (prompts, tiny) = (prompts.display().to_string(), tiny());
    let batch = ["batch", "--model", &tiny, "--text", "--input", &prompts];
    for device in ["/dev/full", "/dev/null", "/dev/stdout"] {
        let wrong = refused(&output(&[&batch[..], &["--output", device]].concat()), 1);
        assert!(wrong.contains("not a regular file"), "{device}: {wrong}");
    }
    let npy = dir.path().join("a.npy").display().to_string();
    for args in [
        &["perplexity", "--model", &tiny, "--file", "/dev/zero"][..],
        #[cfg(feature = "probe")]
        &[
            "probe",
            "extract",
            "--model",
            &tiny,
            "-s",
            "/dev/zero",
            "-o",
            &npy,
        ],
    ] {
        let wrong = refused(&output(args), 1);
        assert!(
            wrong.contains("more than 67108864 bytes"),
            "{args:?}: {wrong}"
        );
    }
}
