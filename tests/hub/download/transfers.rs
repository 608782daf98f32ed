//! Tests of downloads that break off, resume, or run concurrently.

use super::*;

#[test]
fn a_broken_transfer_goes_on_where_it_stopped() {
    let hub = small();
    hub.fault("GET", "/store/", Fault::DropAfter(1_000_000), 1);
    hub.fault("GET", "/store/", Fault::DropAfter(1_234), 1);
    pull(&hub).unwrap();
    assert_whole(&hub);
    let ranges: Vec<_> = hub
        .log()
        .into_iter()
        .filter(|r| r.at_store)
        .map(|r| r.headers.get("range").cloned())
        .collect();
    let want = [
        None,
        Some("bytes=1000000-".to_owned()),
        Some("bytes=1001234-".to_owned()),
    ];
    assert_eq!(ranges, want);
}

#[test]
fn a_killed_run_is_continued_by_the_next() {
    let hub = small();
    // The connection breaks more often than one run retries, and only the first attempt makes
    // progress.
    hub.fault("GET", "/store/", Fault::DropAfter(500_000), 1);
    hub.fault("GET", "/store/", Fault::DropAfter(0), 20);
    let error = pull(&hub).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(
        !hub.repository().join("refs/main").exists(),
        "nothing claims to be whole"
    );
    let left = format!("{}.incomplete", etag_of("model.safetensors", &weights()));
    assert_eq!(
        fs::metadata(hub.repository().join("blobs").join(&left))
            .unwrap()
            .len(),
        500_000
    );

    let hub = restart(hub);
    pull(&hub).unwrap();
    assert_whole(&hub);
    let first = hub.log().into_iter().find(|r| r.at_store).unwrap();
    assert_eq!(first.headers["range"], "bytes=500000-");
}

/// A hub without faults that has the same repository and cache.
fn restart(hub: FakeHub) -> FakeHub {
    let mut fresh = small();
    fresh.cache = hub.cache;
    fresh
}

#[test]
fn a_server_without_ranges_sends_it_all_again() {
    let hub = small();
    hub.fault("GET", "/store/", Fault::DropAfter(400_000), 1);
    hub.fault("GET", "/store/", Fault::WholeFile, 1);
    pull(&hub).unwrap();
    assert_whole(&hub);
}

#[test]
fn what_an_earlier_run_left_is_not_believed() {
    for left in [
        vec![7u8; 100_000],
        vec![7u8; 9_000_000],
        weights()[..5].to_vec(),
        {
            let mut bytes = weights();
            bytes[3] ^= 1;
            bytes
        },
    ] {
        let hub = small();
        let etag = etag_of("model.safetensors", &weights());
        fs::create_dir_all(hub.repository().join("blobs")).unwrap();
        fs::write(
            hub.repository().join(format!("blobs/{etag}.incomplete")),
            left,
        )
        .unwrap();
        pull(&hub).unwrap();
        assert_whole(&hub);
    }
}

#[test]
fn passing_failures_are_repeated_and_lasting_ones_are_not() {
    for status in [429, 500, 502, 503] {
        let hub = small();
        let busy = || Fault::Status(status, vec![("Retry-After", "0".into())]);
        hub.fault("GET", "/api/", busy(), 2);
        hub.fault("HEAD", "/resolve/", busy(), 2);
        hub.fault("GET", "/store/", busy(), 2);
        pull(&hub).unwrap_or_else(|e| panic!("{status}: {e}"));
        assert_whole(&hub);
    }
    for (status, kind) in [
        (401, ErrorKind::ModelNotFound),
        (403, ErrorKind::Io),
        (404, ErrorKind::ModelNotFound),
        (500, ErrorKind::Io),
        (429, ErrorKind::Io),
    ] {
        for (method, part) in [("GET", "/api/"), ("HEAD", "/resolve/"), ("GET", "/store/")] {
            let hub = small();
            hub.fault(method, part, Fault::Status(status, vec![]), 1000);
            let error = pull(&hub).unwrap_err();
            assert_eq!(error.kind(), kind, "{status} {part}: {error}");
            assert!(error.to_string().contains(&status.to_string()), "{error}");
            let tries = hub
                .log()
                .iter()
                .filter(|r| r.method == method && r.path.contains(part))
                .count();
            assert_eq!(
                tries,
                if matches!(status, 429 | 500) { 5 } else { 1 },
                "{status} {part}"
            );
            assert!(hub.client().cached(&spec("own/tiny")).is_none());
        }
    }
}

#[test]
fn many_at_once_fetch_each_file_once() {
    let hub = small();
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..6).map(|_| scope.spawn(|| pull(&hub))).collect();
        for run in runs {
            assert_eq!(run.join().unwrap().unwrap(), hub.snapshot());
        }
    });
    assert_whole(&hub);
    assert_eq!(hub.log().iter().filter(|r| r.at_store).count(), 1);
}
