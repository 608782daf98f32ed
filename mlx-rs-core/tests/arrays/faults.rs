//! Tests one table for each class of mlx-c: how each of its calls can fail (a status, a null
//! handle, a missing object). The failure must be an error of the right kind that names the fault.
//! The same class must work afterwards.

use std::slice::from_ref;

use mlx_rs_core::fast::{self, Mask, RopeBase};
use mlx_rs_core::io::{self, SafetensorsFile};
use mlx_rs_core::kernel::{CudaKernel, Launch, MetalKernel};
use mlx_rs_core::linalg::{self, Norm, Triangle};
use mlx_rs_core::random::{self, Key};
use mlx_rs_core::transforms::{
    CustomFunction, ImportedFunction, Kwargs, compile, export_function, export_function_kwargs,
    grad, jvp, vjp, vmap,
};
use mlx_rs_core::{
    All, Array, Conv, Device, Dtype, Error, ErrorKind, GridIndexing, QuantMode, Quantized, Result,
    ScatterMode, Stream, array, broadcast_arrays, concatenate, distributed, einsum, fft, idx,
    memory, meshgrid, metal, ones, stack, where_, zeros,
};

/// The action, the expected kind of error, a part of the expected text, and the result.
type Row = (&'static str, ErrorKind, &'static str, Result<()>);

fn row<T>(what: &'static str, kind: ErrorKind, text: &'static str, result: Result<T>) -> Row {
    (what, kind, text, result.map(drop))
}

/// Checks that every row failed with its own error, not with the message of another call.
fn all_fail(class: &str, rows: Vec<Row>) {
    for (what, kind, text, result) in rows {
        let e = match result {
            Ok(()) => panic!("{class}, {what}: succeeded"),
            Err(e) => e,
        };
        assert_eq!(e.kind(), kind, "{class}, {what}: {e}");
        assert!(e.to_string().contains(text), "{class}, {what}: {e}");
        assert!(
            !e.message().contains("without a message"),
            "{class}, {what}: {e}"
        );
        assert!(!e.op().is_empty(), "{class}, {what}");
        // A failure must have no lasting effect: the next call succeeds, and the next failure has
        // its own message.
        let sum = ones(&[3], Dtype::Float32).and_then(|a| a.sum(All, false)?.item::<f32>());
        assert_eq!(sum.unwrap(), 3.0, "{class}, {what}");
    }
}

fn a(shape: &[i32]) -> Array {
    ones(shape, Dtype::Float32).unwrap()
}

use ErrorKind::{Dtype as Type, Format, Index, Io, Mlx, OutOfMemory, Shape, Unsupported, Value};

#[test]
fn arrays() {
    let m = a(&[2, 3]);
    all_fail(
        "array",
        vec![
            row(
                "more values than the shape",
                Shape,
                "[3]",
                Array::from_slice(&[1.0f32; 4], &[3]),
            ),
            row(
                "a shape that cannot be",
                Shape,
                "",
                Array::from_vec(vec![1u8], &[-1, -1]),
            ),
            row("one value of many", Shape, "[2, 3]", m.item::<f32>()),
            row("another type", Type, "float32", m.to_vec::<i32>()),
            row(
                "a borrowed view of another type",
                Type,
                "",
                m.data::<f64>().map(drop),
            ),
            row("an axis that is not there", Index, "axis 2", m.dim(2)),
            row(
                "rows side by side of other lengths",
                Shape,
                "",
                Array::from_nested(&vec![vec![1], vec![1, 2]]),
            ),
        ],
    );
}

#[test]
fn operations() {
    let m = a(&[2, 3]);
    all_fail(
        "operations",
        vec![
            row("a status", Mlx, "matmul", m.matmul(&m)),
            row(
                "a status with both shapes",
                Mlx,
                "[2, 3], [4]",
                m.add(&a(&[4])),
            ),
            row(
                "a null array stands for none",
                Value,
                "limit",
                m.clip(None, None),
            ),
            row(
                "shapes that do not broadcast",
                Mlx,
                "",
                where_(&m, &a(&[4]), &m),
            ),
            row("an axis", Index, "axis", m.sum(5, false)),
            row("a size that differs", Mlx, "reshape", m.reshape(&[7])),
            row("an index", Index, "99", m.take(&array!([99]).unwrap(), 0)),
            row(
                "an index of another type",
                Type,
                "",
                m.take(&array!([0.5]).unwrap(), 0),
            ),
            row(
                "indices of another number",
                Shape,
                "",
                m.gather(&[], &[0], &[1, 1]),
            ),
            row(
                "updates that do not fit",
                Shape,
                "",
                m.scatter(&[&array!([0]).unwrap()], &a(&[9]), &[0], ScatterMode::Add),
            ),
            row("an index expression", Index, "", m.get(idx![7])),
            row("a convolution", Shape, "", m.conv(&m, &Conv::default())),
            row(
                "beyond the budget",
                OutOfMemory,
                "budget",
                m.expand_dims(-1)
                    .unwrap()
                    .broadcast_to(&[2, 3, i32::MAX])
                    .and_then(|b| b.broadcast_to(&[i32::MAX, 2, 3, i32::MAX])),
            ),
        ],
    );
}

#[test]
fn vectors_maps_and_strings() {
    let m = a(&[2, 3]);
    let dir = tempfile::tempdir().unwrap();
    let nul = Kwargs::from([("a\0b".to_string(), m.clone())]);
    let path = dir.path().join("f.mlxfn");
    let first = |x: &[Array], _: &Kwargs| -> Result<Vec<Array>> { Ok(x.to_vec()) };
    all_fail(
        "vectors",
        vec![
            row("an empty one", Value, "at least one", concatenate(&[], 0)),
            row(
                "an empty one to stack",
                Value,
                "at least one",
                stack(&[], 0),
            ),
            row("other shapes", Mlx, "", stack(&[&m, &a(&[1])], 0)),
            row(
                "nothing in common",
                Mlx,
                "",
                broadcast_arrays(&[&m, &a(&[7])]),
            ),
            row(
                "an empty grid",
                Value,
                "",
                meshgrid(&[], false, GridIndexing::Ij),
            ),
        ],
    );
    all_fail(
        "maps",
        vec![row(
            "a name with a NUL",
            Value,
            "NUL",
            export_function_kwargs(&path, first, from_ref(&m), &nul, false),
        )],
    );
    all_fail(
        "strings",
        vec![
            row("a NUL", Value, "", einsum("i\0j->i", &[&m])),
            row("what printf would read", Value, "", einsum("%n%s->", &[&m])),
            row(
                "a name that is none",
                Value,
                "%n",
                MetalKernel::new("%n%s", &["x"], &["y"], ""),
            ),
        ],
    );
}

#[test]
fn streams_devices_and_memory() {
    let mut rows = Vec::new();
    if !Device::gpu().is_available() {
        rows = vec![
            row("a stream", Unsupported, "gpu", Stream::new(Device::gpu())),
            row(
                "its default stream",
                Unsupported,
                "gpu",
                Stream::default_of(Device::gpu()),
            ),
            row("its description", Unsupported, "gpu", Device::gpu().info()),
            row(
                "the default",
                Unsupported,
                "gpu",
                Device::gpu().set_default(),
            ),
            row(
                "a scope",
                Unsupported,
                "gpu",
                Device::gpu().scope(|| Ok::<_, Error>(())),
            ),
        ];
    }
    all_fail("a device that is not there", rows);
    if !metal::is_available() {
        all_fail(
            "metal",
            vec![row(
                "a capture",
                Unsupported,
                "Metal",
                metal::start_capture("a.gputrace"),
            )],
        );
    }
    all_fail(
        "memory",
        vec![
            row(
                "beyond what is there",
                OutOfMemory,
                "budget",
                zeros(&[i32::MAX, i32::MAX], Dtype::Uint8),
            ),
            row(
                "beyond what can be counted",
                Shape,
                "",
                zeros(&[i32::MAX; 5], Dtype::Float64),
            ),
        ],
    );
    assert!(memory::active().is_ok());
}

#[test]
fn numbers() {
    let (m, key) = (a(&[2, 3]), Key::new(0).unwrap());
    all_fail(
        "linalg",
        vec![
            row("not square", Shape, "", linalg::inv(&m)),
            row(
                "another type",
                Type,
                "",
                linalg::cholesky(&array!([[1]]).unwrap(), false),
            ),
            row("one axis", Shape, "", linalg::svd(&a(&[3]))),
            row(
                "sides that do not fit",
                Shape,
                "",
                linalg::solve(&a(&[2, 2]), &a(&[3])),
            ),
            row(
                "a norm of three axes",
                Shape,
                "",
                linalg::norm(&a(&[1, 1, 1]), Norm::Frobenius, All, false),
            ),
            row(
                "no matrix",
                Shape,
                "",
                linalg::eigh(&a(&[]), Triangle::Lower),
            ),
        ],
    );
    all_fail(
        "fft",
        vec![
            row("an axis", Index, "axis 4", fft::fft(&m, None, 4)),
            row("a length", Value, "0", fft::rfft(&m, Some(0), -1)),
            row(
                "lengths of another number",
                Shape,
                "",
                fft::fftn(&m, Some(&[2]), &[0, 1]),
            ),
        ],
    );
    all_fail(
        "random",
        vec![
            row(
                "a shape",
                Shape,
                "-1",
                random::normal(0.0, 1.0, &[-1], Dtype::Float32, &key),
            ),
            row(
                "a type",
                Type,
                "int32",
                random::uniform(0.0, 1.0, &[1], Dtype::Int32, &key),
            ),
            row(
                "an empty interval",
                Value,
                "",
                random::randint(3, 3, &[1], Dtype::Int32, &key),
            ),
            row(
                "nothing to draw from",
                Index,
                "",
                random::categorical(&zeros(&[2, 0], Dtype::Float32).unwrap(), -1, &key),
            ),
            row(
                "parameters that do not broadcast",
                Mlx,
                "",
                random::bernoulli(&a(&[5]), &[2], &key),
            ),
        ],
    );
    let q = || a(&[1, 2, 4, 8]);
    all_fail(
        "fast",
        vec![
            row(
                "a weight",
                Mlx,
                "",
                fast::rms_norm(&m, Some(&a(&[7])), 1e-5),
            ),
            row(
                "odd rotary dimensions",
                Value,
                "3",
                fast::rope(&q(), 3, false, RopeBase::Theta(1e4), 1.0, 0),
            ),
            row(
                "other heads",
                Mlx,
                "",
                fast::scaled_dot_product_attention(
                    &q(),
                    &a(&[1, 3, 4, 8]),
                    &a(&[1, 3, 4, 8]),
                    1.0,
                    Mask::None,
                ),
            ),
            row(
                "other lengths",
                Shape,
                "",
                fast::scaled_dot_product_attention(&q(), &a(&[1, 2, 5, 8]), &q(), 1.0, Mask::None),
            ),
            row(
                "a mask",
                Mlx,
                "",
                fast::scaled_dot_product_attention(&q(), &q(), &q(), 1.0, Mask::Array(&a(&[9, 9]))),
            ),
            row(
                "quantized parts",
                Value,
                "",
                Quantized::quantize(&a(&[8, 64]), 7, 4, QuantMode::Affine),
            ),
        ],
    );
}

#[test]
fn closures_and_transforms() {
    let (x, int) = (a(&[]), array!(1).unwrap());
    let square = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].square()?]) };
    let none = |_: &[Array]| -> Result<Vec<Array>> { Ok(Vec::new()) };
    let refuse = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].reshape(&[9])?]) };
    all_fail(
        "transforms",
        vec![
            row(
                "an argument that is not there",
                Index,
                "",
                grad(square, &[1])(from_ref(&x)),
            ),
            row(
                "an argument of another type",
                Type,
                "",
                grad(square, &[0])(&[int]),
            ),
            row(
                "a value that is no scalar",
                Shape,
                "",
                grad(square, &[0])(&[a(&[2])]),
            ),
            row("no outputs", Value, "", grad(none, &[0])(from_ref(&x))),
            row(
                "the error of the function",
                Mlx,
                "reshape",
                grad(refuse, &[0])(from_ref(&x)),
            ),
            row(
                "cotangents of another number",
                Shape,
                "",
                vjp(square, from_ref(&x), &[]),
            ),
            row(
                "tangents of another number",
                Shape,
                "",
                jvp(square, from_ref(&x), &[]),
            ),
            row(
                "an axis of the batch",
                Index,
                "",
                vmap(square, 3, 0)(&[a(&[2])]),
            ),
            row(
                "no outputs of a custom function",
                Value,
                "",
                CustomFunction::new(none).call(from_ref(&x)),
            ),
            row(
                "an error in a trace",
                Mlx,
                "reshape",
                compile(refuse).call(&[x]),
            ),
        ],
    );
}

#[test]
fn files_that_are_not_there_or_not_what_they_say() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("text"), "not an array").unwrap();
    let (missing, text, nowhere) = (path("%n%s"), path("text"), path("no/such/place"));
    let one = a(&[2]);
    let square = |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].square()?]) };
    // SAFETY: neither file passes the header check.
    let open = |p| unsafe { ImportedFunction::open(p) };
    all_fail(
        "files",
        vec![
            row("npy, not found", Io, "%n%s", io::load_npy(&missing)),
            row("npz, not found", Io, "%n%s", io::load_npz(&missing)),
            row(
                "safetensors, not found",
                Io,
                "%n%s",
                io::load_safetensors(&missing),
            ),
            row("npy of something else", Format, "text", io::load_npy(&text)),
            row("npz of something else", Format, "text", io::load_npz(&text)),
            row(
                "safetensors of something else",
                Format,
                "text",
                SafetensorsFile::open(&text),
            ),
            row(
                "npy to nowhere",
                Io,
                "no/such/place",
                io::save_npy(&nowhere, &one),
            ),
            row(
                "safetensors to nowhere",
                Io,
                "no/such/place",
                io::save_safetensors(&nowhere, [("a", &one)], &[]),
            ),
            row(
                "an export to nowhere",
                Value,
                "place",
                export_function(&nowhere, square, from_ref(&one), false),
            ),
            row("an import, not found", Value, "%n%s", open(&missing)),
            row("an import of something else", Value, "text", open(&text)),
        ],
    );
    io::save_safetensors(path("good"), [("a", &one)], &[]).unwrap();
    let file = SafetensorsFile::open(path("good")).unwrap();
    assert!(file.shape("b").is_none() && file.dtype("b").is_none());
    let e = file.load("b").unwrap_err();
    assert!(e.message().contains('b'), "{e}");
}

#[test]
fn groups_and_kernels() {
    let group = distributed::init(false).unwrap();
    all_fail(
        "groups",
        vec![
            row(
                "a member that is not there",
                Index,
                "",
                group.send(&a(&[1]), group.size()),
            ),
            row(
                "itself",
                Index,
                "",
                group.recv(&[1], Dtype::Float32, group.rank()),
            ),
        ],
    );
    if group.size() == 1 {
        all_fail(
            "groups",
            vec![row("the parts of one", Unsupported, "", group.split(0, 0))],
        );
    }
    all_fail(
        "kernels",
        vec![
            row(
                "no output",
                Value,
                "output",
                MetalKernel::new("k", &["x"], &[], ""),
            ),
            row(
                "a NUL",
                Value,
                "NUL",
                CudaKernel::new("k", &["x"], &["y"], "\0"),
            ),
            row(
                "more shared memory than there is",
                Value,
                "",
                CudaKernel::new("k", &["x"], &["y"], "").and_then(|k| k.shared_memory(u32::MAX)),
            ),
        ],
    );
    if !Device::gpu().is_available() {
        let k = MetalKernel::new("k", &[], &["y"], "").unwrap();
        let launch = Launch::new().output(&[1], Dtype::Float32);
        // SAFETY: there is no device to run it.
        let result = unsafe { k.launch(&launch) };
        all_fail(
            "kernels",
            vec![row("no device", Unsupported, "Metal", result)],
        );
    }
}
