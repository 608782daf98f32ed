//! Tests of answers, file names and files that a download must refuse, and of the errors.

use super::*;

#[test]
fn gated_and_private_repositories_say_what_to_do() {
    let hub = small();
    let gated = || Fault::Status(403, vec![("X-Error-Code", "GatedRepo".into())]);
    hub.fault("HEAD", "/resolve/", gated(), 9);
    let error = pull(&hub).unwrap_err().to_string();
    assert!(
        error.contains("gated") && error.contains("HF_TOKEN"),
        "{error}"
    );

    let hub = small();
    hub.needs_token("hf_secret");
    let error = pull(&hub).unwrap_err().to_string();
    assert!(error.contains("HF_TOKEN"), "{error}");
    let client = hub.client().with_token("hf_wrong").unwrap();
    let error = client
        .pull(&spec("own/tiny"), false, &mut Silent)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("does not allow") && !error.contains("hf_wrong"),
        "{error}"
    );
    hub.forget_log();
    let client = hub.client().with_token("hf_secret").unwrap();
    client.pull(&spec("own/tiny"), false, &mut Silent).unwrap();
    assert_whole(&hub);
    // Only the hub receives the token, not the storage host.
    for request in hub.log() {
        assert_eq!(
            request.headers.contains_key("authorization"),
            !request.at_store,
            "{request:?}"
        );
    }
}

#[test]
fn bytes_that_are_not_what_was_announced_are_refused() {
    // The content is wrong on every attempt. If it were wrong once, the retry would succeed.
    let hub = small();
    hub.fault("GET", "/store/", Fault::Garbage, 9);
    let error = pull(&hub).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel);
    assert!(error.to_string().contains("has the hash"), "{error}");
    assert!(
        names(&hub.repository().join("blobs"))
            .iter()
            .all(|n| n.len() == 40),
        "only the config"
    );
    assert!(hub.client().cached(&spec("own/tiny")).is_none());

    // Small files are verified by git's hash.
    let hub = small();
    hub.fault("GET", "config.json", Fault::Garbage, 9);
    let error = pull(&hub).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel, "{error}");

    // The cases are a wrong hash, too many bytes, and an empty body although the header announced
    // bytes.
    let hub = small();
    hub.etag(&etag_of("model.safetensors", b"another"));
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("has the hash"), "{error}");
    let hub = small();
    let etag = etag_of("model.safetensors", &weights());
    let announce = vec![
        ("Location", "http://127.0.0.1:1/".to_owned()),
        ("X-Linked-Etag", etag),
        ("X-Linked-Size", "5".to_owned()),
    ];
    hub.fault("HEAD", "model.safetensors", Fault::Status(302, announce), 1);
    let error = pull(&hub).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidModel, "{error}");
    assert!(error.to_string().contains("more bytes"), "{error}");
    let hub = small();
    hub.fault("GET", "/store/", Fault::Length(0), 1000);
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert!(hub.client().cached(&spec("own/tiny")).is_none());
}

#[test]
fn names_that_lead_out_are_refused() {
    let outside = |hub: &FakeHub| {
        !hub.cache
            .path()
            .parent()
            .unwrap()
            .join("evil.gguf")
            .exists()
    };
    for name in [
        "../../../../evil.gguf",
        "/tmp/evil.gguf",
        "a\\..\\..\\evil.gguf",
        "a/../../evil.gguf",
    ] {
        let hub = FakeHub::new();
        hub.claim(name);
        let error = pull(&hub).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel, "{name}");
        assert!(error.to_string().contains("refused"), "{error}");
        assert!(outside(&hub));
        assert!(!hub.repository().exists());
    }
    let hub = FakeHub::new();
    hub.file("config.json", "{}");
    hub.file(
        "model.safetensors.index.json",
        r#"{"weight_map":{"x":"../../../evil.safetensors"}}"#,
    );
    hub.claim("../../../evil.safetensors");
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("refused"), "{error}");
    for etag in ["../../evil", "", "a/b", ".hidden", "x\\y"] {
        let hub = small();
        hub.etag(etag);
        let error = pull(&hub).unwrap_err();
        assert!(error.to_string().contains("ETag"), "{error}");
    }
}

#[test]
fn nobody_answering_is_an_error_with_the_way_out() {
    let hub = small();
    // The system has just assigned and released this port, so nothing listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let client = rust_mlx::hub::HfHub::new(&format!("http://127.0.0.1:{port}"), hub.cache.path())
        .unwrap()
        .with_retry_delay(std::time::Duration::from_millis(1));
    let error = client
        .pull(&spec("own/tiny"), false, &mut Silent)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn redirects_without_end_and_answers_that_are_no_hub_are_errors() {
    let hub = small();
    let around = Fault::Status(302, vec![("Location", "/own/tiny/resolve/x".into())]);
    hub.fault("HEAD", "/resolve/", around, 1000);
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("too many times"), "{error}");
    let hub = small();
    hub.fault("GET", "/api/", Fault::Status(200, vec![]), 1000);
    let error = pull(&hub).unwrap_err();
    assert!(error.to_string().contains("HF_ENDPOINT"), "{error}");
    let hub = small();
    let to_file = Fault::Status(302, vec![("Location", "file:///etc/passwd".into())]);
    hub.fault("GET", "/store/", to_file, 1000);
    assert!(
        pull(&hub)
            .unwrap_err()
            .to_string()
            .contains("without a valid address")
    );
}
