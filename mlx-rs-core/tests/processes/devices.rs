//! Tests devices and streams: the default device, scopes, and the error for a device that does not
//! exist. It runs in a separate process, because the default device applies to the whole process.

use mlx_rs_core::{Device, Error, ErrorKind, Stream, array, eval};

#[test]
fn the_default_is_settable_and_scopes_go_before_it() {
    crate::alone::alone(
        "devices::the_default_is_settable_and_scopes_go_before_it",
        the_default_is_settable_and_scopes_go_before_it_alone,
    );
}

fn the_default_is_settable_and_scopes_go_before_it_alone() {
    let initial = Device::default_device();
    assert_eq!(
        initial.kind() == Device::gpu().kind(),
        Device::gpu().is_available()
    );
    assert_eq!(Device::cpu().set_default().unwrap(), initial);
    assert_eq!(Device::default_device(), Device::cpu());
    let default = Stream::default_of(Device::cpu()).unwrap();
    assert_eq!(Stream::current().unwrap(), default);
    if !Device::gpu().is_available() {
        let e = Device::gpu().set_default().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert_eq!(Device::default_device(), Device::cpu());
        let e = Device::gpu().scope(|| Ok::<_, Error>(())).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
    }

    // Scopes can be nested, end with their closure, and apply only to their thread.
    let (a, b) = (
        Stream::new(Device::cpu()).unwrap(),
        Stream::new(Device::cpu()).unwrap(),
    );
    assert_ne!(a, b);
    a.scope(|| {
        assert_eq!(Stream::current().unwrap(), a);
        b.scope(|| assert_eq!(Stream::current().unwrap(), b));
        assert_eq!(Stream::current().unwrap(), a);
        let inner: Result<(), Error> = Device::cpu().scope(|| {
            assert_eq!(Stream::current()?, default);
            Err(Error::new(ErrorKind::Value, "test", "passed on"))
        });
        assert_eq!(inner.unwrap_err().message(), "passed on");
        assert_eq!(Stream::current().unwrap(), a);
        std::thread::scope(|s| {
            s.spawn(|| assert_eq!(Stream::current().unwrap(), default));
        });
        // A stream that is passed to another thread can become current there.
        let here = Stream::current().unwrap();
        std::thread::spawn(move || here.scope(Stream::current).unwrap())
            .join()
            .map(|there| assert_eq!(there, a))
            .unwrap();
    });
    assert_eq!(Stream::current().unwrap(), default);

    // Work on a stream waits for inputs that another stream computes.
    let x = array!([1.0, 2.0]).unwrap();
    let y = a.scope(|| x.exp()).unwrap();
    let z = b.scope(|| y.log()).unwrap();
    let sum = z.add(&y.multiply(&y).unwrap()).unwrap();
    eval([&sum]).unwrap();
    a.synchronize().unwrap();
    let got = sum.to_vec::<f32>().unwrap();
    for (got, x) in got.iter().zip([1.0f32, 2.0]) {
        assert!((got - (x + (2.0 * x).exp())).abs() < 1e-4, "{got}");
    }
    initial.set_default().unwrap();
}
