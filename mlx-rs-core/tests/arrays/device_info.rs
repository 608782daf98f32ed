//! Tests the properties of devices and streams, and the errors for devices that do not exist.

use mlx_rs_core::{Device, DeviceInfo, ErrorKind, Stream, metal, metal_is_available};

#[test]
fn devices_say_what_they_are() {
    let cpu = Device::cpu();
    assert!(cpu.is_available());
    assert_eq!(cpu.count().unwrap(), 1);
    let info = cpu.info().unwrap();
    if let Some(name) = info.get("device_name") {
        assert!(
            matches!(name, DeviceInfo::Text(t) if !t.is_empty()),
            "{info:?}"
        );
    }
    let gpu = Device::gpu();
    assert_eq!(gpu.count().unwrap() > 0, gpu.is_available());
    if gpu.is_available() {
        assert!(!gpu.info().unwrap().is_empty());
    } else {
        assert_eq!(gpu.info().unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(Stream::new(gpu).unwrap_err().kind(), ErrorKind::Unsupported);
        assert!(Stream::default_of(gpu).is_err());
    }
    let stream = Stream::new(cpu).unwrap();
    assert!(stream.to_string().contains("cpu"), "{stream}");
}

#[test]
fn a_capture_needs_metal_and_a_new_file() {
    let expected = if metal_is_available() {
        ErrorKind::Value
    } else {
        ErrorKind::Unsupported
    };
    for path in ["%n%s%p", "Cargo.toml", ""] {
        assert_eq!(metal::start_capture(path).unwrap_err().kind(), expected);
    }
}
