//! Creates many streams. If they are dropped, few threads must exist. If they are kept, there must
//! be an error at the limit. There is only one test, because tests of a process share its streams.

use mlx_rs_core::{Array, Device, ErrorKind, Stream};

#[test]
fn streams_are_used_again_and_have_a_most() {
    crate::alone::alone(
        "streams::streams_are_used_again_and_have_a_most",
        streams_are_used_again_and_have_a_most_alone,
    );
}

fn streams_are_used_again_and_have_a_most_alone() {
    let first = Stream::new(Device::cpu()).unwrap();
    let mut indices = std::collections::BTreeSet::new();
    for i in 0..20_000 {
        let stream = Stream::new(Device::cpu()).unwrap();
        assert_ne!(stream, first);
        indices.insert(stream.index());
        if i % 1000 == 0 {
            let sum = stream.scope(|| Array::scalar(1.0f32)?.add(&Array::scalar(i as f32)?));
            assert_eq!(sum.unwrap().item::<f32>().unwrap(), 1.0 + i as f32);
        }
    }
    assert_eq!(indices.len(), 1, "each dropped stream is used again");

    // A stream stays in use while another handle of it exists.
    let stream = Stream::new(Device::cpu()).unwrap();
    let same = stream.scope(|| Stream::current().unwrap());
    let index = stream.index();
    drop(stream);
    assert_ne!(Stream::new(Device::cpu()).unwrap().index(), index);
    drop(same);

    let mut streams = Vec::new();
    let e = loop {
        match Stream::new(Device::cpu()) {
            Ok(stream) => streams.push(stream),
            Err(e) => break e,
        }
        assert!(streams.len() < 10_000);
    };
    assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
    assert!(streams.len() > 100, "{}", streams.len());
    let all: std::collections::BTreeSet<i32> = streams.iter().map(Stream::index).collect();
    assert_eq!(all.len(), streams.len(), "no two are the same");
    streams.truncate(10);
    assert!(Stream::new(Device::cpu()).is_ok());
}
