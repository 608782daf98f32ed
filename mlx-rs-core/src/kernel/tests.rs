//! Tests errors that need no device, and the handles that are passed to C.

use super::handle::{self, Api, Cuda, Metal, Strings};
use super::*;
use crate::{Device, Stream, cuda_is_available, metal_is_available};

fn define(name: &str, inputs: &[&str], outputs: &[&str]) -> Result<MetalKernel> {
    MetalKernel::new(name, inputs, outputs, "out[0] = a[0];")
}

#[test]
fn names_become_source_and_must_be_names() {
    for bad in ["", "1a", "a b", "a;b", "a\0b", "é", "a(){}", "%n"] {
        assert_eq!(
            define(bad, &["a"], &["out"]).unwrap_err().kind(),
            ErrorKind::Value,
            "{bad:?}"
        );
        assert!(define("k", &[bad], &["out"]).is_err(), "{bad:?}");
        assert!(define("k", &["a"], &[bad]).is_err(), "{bad:?}");
    }
    assert!(define("k", &["a"], &[]).is_err());
    assert!(define("k", &["a", "a"], &["out"]).is_err());
    assert!(define("k", &["a"], &["a"]).is_err());
    assert!(MetalKernel::new("k", &[], &["out"], "a\0b").is_err());
    assert!(CudaKernel::new("k", &[], &["out"], "a\0b").is_err());
    assert!(define("k", &[], &["out"]).unwrap().header("\0").is_err());
    assert!(
        CudaKernel::new("k", &[], &["o"], "")
            .unwrap()
            .shared_memory(u32::MAX)
            .is_err()
    );
    assert!(define("_k9", &["a"], &["out"]).is_ok());
}

#[test]
fn launches_that_no_device_could_run_are_refused() {
    let x = Array::scalar(1.0f32).unwrap();
    let kernel = define("k", &["a"], &["out"]).unwrap();
    let good = || Launch::new().input(&x).output(&[2], Dtype::Float32);
    let table = [
        Launch::new(),
        Launch::new().input(&x),
        good().input(&x),
        good().output(&[1], Dtype::Float32),
        good().grid(0, 1, 1),
        good().grid(1, u32::MAX, 1),
        good().grid(1, 1, i32::MAX.unsigned_abs()),
        good().thread_group(1, 1, 0),
        good().thread_group(1024, 2, 1),
        good().thread_group(u32::MAX, u32::MAX, u32::MAX),
        good().template("a b", 1),
        good().template("T", 1).template("T", true),
        Launch::new().input(&x).output(&[-1], Dtype::Float32),
        Launch::new()
            .input(&x)
            .output(&[i32::MAX, i32::MAX, i32::MAX], Dtype::Float32),
    ];
    for (i, launch) in table.iter().enumerate() {
        // SAFETY: the launch is refused, so no code runs.
        let e = unsafe { kernel.launch(launch) }.unwrap_err();
        assert!(
            matches!(e.kind(), ErrorKind::Value | ErrorKind::Shape),
            "{i}: {e}"
        );
    }
}

#[test]
fn a_missing_device_is_said() {
    let x = Array::scalar(1.0f32).unwrap();
    let launch = Launch::new().input(&x).output(&[], Dtype::Float32);
    let metal = define("k", &["a"], &["out"]).unwrap();
    let cuda = CudaKernel::new("k", &["a"], &["out"], "out[0] = a[0];").unwrap();
    Stream::default_of(Device::cpu()).unwrap().scope(|| {
        // SAFETY: both launches are refused, so no code runs. The last check refuses the stream.
        for e in unsafe { [metal.launch(&launch), cuda.launch(&launch)] } {
            assert_eq!(e.unwrap_err().kind(), ErrorKind::Unsupported);
        }
    });
    // SAFETY: one thread copies one element, which exists.
    let (metal, cuda) = unsafe { (metal.launch(&launch), cuda.launch(&launch)) };
    for (result, there) in [(metal, metal_is_available()), (cuda, cuda_is_available())] {
        match result {
            Ok(out) => assert!(there && out[0].item::<f32>().unwrap() == 1.0),
            Err(e) => assert!(!there && e.kind() == ErrorKind::Unsupported, "{e}"),
        }
    }
}

#[test]
fn the_name_holds_all_that_the_code_depends_on() {
    let (x, y) = (Array::scalar(1.0f32).unwrap(), Array::scalar(1i32).unwrap());
    let kernel = || define("k", &["a"], &["out"]).unwrap().definition;
    let launch = || Launch::new().input(&x).output(&[1], Dtype::Float32);
    let base = kernel().unique_name(&launch(), 0).unwrap();
    assert!(base.to_str().unwrap().starts_with("k_"));
    // Shapes and numbers of threads are arguments of the code, so they do not change the name.
    let same = Launch::new()
        .input(&x)
        .output(&[7], Dtype::Float32)
        .grid(9, 1, 1);
    assert_eq!(base, kernel().unique_name(&same, 0).unwrap());
    let mut other = kernel();
    other.header = c"int f();".into();
    let others = [
        other.unique_name(&launch(), 0),
        kernel().unique_name(&launch(), 1),
        kernel().unique_name(&launch().template("N", 1), 0),
        kernel().unique_name(&launch().template("N", 2), 0),
        kernel().unique_name(&Launch::new().input(&y).output(&[1], Dtype::Float32), 0),
        kernel().unique_name(&Launch::new().input(&x).output(&[1], Dtype::Float16), 0),
    ];
    for (i, name) in others.iter().enumerate() {
        let name = name.as_ref().unwrap();
        assert_ne!(*name, base, "{i}");
        assert!(
            others[..i].iter().all(|o| o.as_ref().unwrap() != name),
            "{i}"
        );
    }
}

/// Without the device, MLX refuses to create a kernel. All steps before that are the same as with a
/// device.
#[test]
fn handles_are_filled_and_freed_and_refusals_are_errors() {
    fn run<A: Api>(launch: &Launch<'_>, make: impl FnOnce() -> A::Kernel) -> Result<Vec<Array>> {
        let config = A::config();
        let names: Vec<CString> = launch
            .template
            .iter()
            .map(|(n, _)| text("t", n))
            .collect::<Result<_>>()?;
        // SAFETY: the configuration was created above, and is freed only once.
        unsafe {
            assert!(A::fill(config, launch, &names));
            A::free_config(config);
        }
        handle::launch::<A>("t", launch, make)
    }
    let x = Array::scalar(1.0f32).unwrap();
    let launch = Launch::new()
        .input(&x)
        .output(&[2, 3], Dtype::Float16)
        .output(&[], Dtype::Int32)
        .init_value(0.5)
        .template("T", Dtype::Float32)
        .template("N", -3)
        .template("B", true);
    let _guard = crate::call::lock();
    let names = Strings::new("t", &[c"a".into()]).unwrap();
    let outputs = Strings::new("t", &[c"b".into(), c"c".into()]).unwrap();
    let (n, o) = (names.raw(), outputs.raw());
    if !metal_is_available() {
        // SAFETY: the strings end in NUL, and the lists are live.
        let make = || unsafe {
            mlx_sys::mlx_fast_metal_kernel_new(
                c"k".as_ptr(),
                n,
                o,
                c"".as_ptr(),
                c"".as_ptr(),
                true,
                false,
            )
        };
        assert_eq!(
            run::<Metal>(&launch, make).unwrap_err().kind(),
            ErrorKind::Mlx
        );
    }
    if !cuda_is_available() {
        // SAFETY: the strings end in NUL, and the lists are live.
        let make = || unsafe {
            mlx_sys::mlx_fast_cuda_kernel_new(
                c"k".as_ptr(),
                n,
                o,
                c"".as_ptr(),
                c"".as_ptr(),
                true,
                0,
            )
        };
        assert_eq!(
            run::<Cuda>(&launch, make).unwrap_err().kind(),
            ErrorKind::Mlx
        );
    }
}
