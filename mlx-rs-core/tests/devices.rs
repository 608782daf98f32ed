//! Devices and streams: what they are, which are there, and the default of the process. One test,
//! since the default belongs to the process.

use mlx_rs_core::{
    Device, DeviceInfo, DeviceKind, Dtype, ErrorKind, Stream, metal, metal_is_available, ones,
};

#[test]
fn devices_and_streams_are_what_they_say() {
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
    // Devices that do not exist are refused everywhere.
    let gpus = Device::gpu().count().unwrap();
    for missing in [
        Device::new(DeviceKind::Cpu, 1),
        Device::new(DeviceKind::Cpu, -1),
        Device::new(DeviceKind::Gpu, gpus),
        Device::new(DeviceKind::Gpu, i32::MAX),
        Device::new(DeviceKind::Gpu, i32::MIN),
    ] {
        assert!(!missing.is_available(), "{missing:?}");
        for e in [
            missing.info().err(),
            missing.set_default().err(),
            Stream::new(missing).err(),
            Stream::default_of(missing).err(),
        ] {
            assert_eq!(e.unwrap().kind(), ErrorKind::Unsupported, "{missing:?}");
        }
    }
    if !metal_is_available() {
        let e = metal::start_capture("trace.gputrace").unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
    }

    // The default before anything is chosen, then a chosen one.
    let first = Device::default_device();
    assert_eq!(Device::current().unwrap(), first);
    cpu.set_default().unwrap();
    assert_eq!(
        (Device::default_device(), Device::current().unwrap()),
        (cpu, cpu)
    );
    let (a, b) = (Stream::new(cpu).unwrap(), Stream::new(cpu).unwrap());
    assert!(a != b && a == a && a.index().unwrap() != b.index().unwrap());
    assert!(a.to_string().contains("cpu"), "{a}");
    for _ in 0..3 {
        a.set_default().unwrap();
        assert_eq!(Stream::default_of(cpu).unwrap(), a);
        let sum = ones(&[4], Dtype::Float32).unwrap().sum(0, false).unwrap();
        assert_eq!(sum.item::<f32>().unwrap(), 4.0);
        b.set_default().unwrap();
    }
    // A default outlives the handle that was made one.
    drop((a, b));
    let sum = ones(&[5], Dtype::Float32).unwrap().sum(0, false).unwrap();
    assert_eq!(sum.item::<f32>().unwrap(), 5.0);
    first.set_default().unwrap();
    assert_eq!(Device::default_device(), first);
}
