//! Views without elements, and views that begin at an address that is not aligned for their type.

use mlx_rs_core::cpu::DenseMatrix;
use mlx_rs_core::transforms::{compile, grad, vmap};
use mlx_rs_core::{All, Array, Device, Dtype, Element, Result, Stream, fast, linalg, zeros};

use super::is;

/// Runs `work`, and ends the process if it takes longer than a minute. An ordinary exit would wait
/// for MLX's computation.
fn ends(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = std::sync::mpsc::channel();
    let work = std::thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    let limit = std::time::Duration::from_secs(60);
    if ended.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        eprintln!("no end in {limit:?}");
        std::process::abort();
    }
    work.join().unwrap();
}

/// For some empty views, MLX counts elements down from zero and does not end.
#[test]
fn empty_views_come_to_an_end() {
    ends(|| {
        for shape in [&[0, 3, 4][..], &[2, 0], &[0, 1, 2], &[0]] {
            let a = zeros(shape, Dtype::Float16).unwrap().transpose().unwrap();
            let last = a.shape()[a.ndim() - 1];
            let weight = zeros(&[last], Dtype::Float16).unwrap();
            let results = [
                fast::rms_norm(&a, Some(&weight), 1e-5),
                fast::rms_norm(&a, None, 1e-5),
                fast::layer_norm(&a, Some(&weight), Some(&weight), 1e-5),
                linalg::norm(&a, linalg::Norm::L2, All, false),
                linalg::norm(&a, linalg::Norm::L2, 0, false),
                a.softmax(-1, true),
                a.logsumexp(-1, true),
                a.mean(All, false),
                a.var(All, false, 0),
            ];
            for result in results {
                let Ok(result) = result else { continue };
                result.eval().unwrap();
            }
            assert!(a.array_equal(&a).unwrap());
            assert!(a.all_close(&a, 1e-3, 1e-3).unwrap());
        }
    });
}

/// For some empty views, MLX's reductions read lengths from uninitialized stack memory.
#[test]
fn empty_views_add_up_to_nothing() {
    ends(|| {
        let large = zeros(&[16, 3, 64], Dtype::Float32).unwrap();
        let large = large.add(&Array::scalar(1.0f32).unwrap()).unwrap();
        let large = large.transpose_axes(&[1, 2, 0]).unwrap();
        let empty = zeros(&[2, 0], Dtype::Float32).unwrap();
        let x = Array::vector(&[1.0f32, 2.0]).unwrap();
        for _ in 0..20 {
            for axes in [&[1][..], &[0, 1], &[2, 0]] {
                large.sum(axes, false).unwrap().eval().unwrap();
                let a = empty.transpose().unwrap();
                is(linalg::norm(&a, linalg::Norm::L2, 0, false), &[0.0, 0.0]);
                large.sum(axes, false).unwrap().eval().unwrap();
                is(
                    linalg::norm(&a, linalg::Norm::P(1.0), 0, false),
                    &[0.0, 0.0],
                );
                large.sum(axes, false).unwrap().eval().unwrap();
                assert!(a.array_equal(&a.negative().unwrap()).unwrap());
                large.sum(axes, false).unwrap().eval().unwrap();
                assert!(a.all_close(&x, 0.0, 0.0).unwrap());
                // The gradient of a broadcast is a sum.
                for wide in [
                    |x: &Array| x.broadcast_to(&[0, 2]),
                    |x: &Array| x.add(&zeros(&[0, 2], Dtype::Float32)?),
                ] {
                    large.sum(axes, false).unwrap().eval().unwrap();
                    let slope = grad(
                        move |x: &[Array]| -> Result<Vec<Array>> {
                            let turned = wide(&x[0])?.transpose()?;
                            let squares = x[0].square()?.sum(All, false)?;
                            Ok(vec![turned.square()?.sum(All, false)?.add(&squares)?])
                        },
                        &[0],
                    )(std::slice::from_ref(&x));
                    is(Ok(slope.unwrap().remove(0)), &[2.0, 4.0]);
                }
            }
        }
    });
}

/// Empty arguments, their gradients and their batches keep their shapes.
#[test]
fn shapes_of_nothing() {
    let x = zeros(&[3, 0], Dtype::Float16).unwrap().transpose().unwrap();
    let total =
        |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].transpose()?.exp()?.sum(All, false)?]) };
    let slope = grad(total, &[0])(std::slice::from_ref(&x))
        .unwrap()
        .remove(0);
    assert_eq!(
        (slope.shape(), slope.dtype()),
        (&[0, 3][..], Dtype::Float16)
    );
    slope.eval().unwrap();
    let mut rows = vmap(
        |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].exp()?, x[0].sum(All, false)?]) },
        0,
        0,
    );
    let of_rows = rows(std::slice::from_ref(&x)).unwrap();
    assert_eq!(
        (of_rows[0].shape(), of_rows[1].shape()),
        (&[0, 3][..], &[0][..])
    );
    let columns = x.transpose().unwrap();
    let of_columns = rows(std::slice::from_ref(&columns)).unwrap();
    assert_eq!(of_columns[0].shape(), [3, 0]);
    is(of_columns[1].astype(Dtype::Float32), &[0.0; 3]);
    let compiled = mlx_rs_core::transforms::compile(total);
    is(
        compiled.call(&[x]).unwrap()[0].astype(Dtype::Float32),
        &[0.0],
    );
}

/// Views bytes at every offset as every wider type. Typed slices must be aligned and have the right
/// values.
#[test]
fn views_as_wider_types_begin_where_the_type_can() -> Result<()> {
    fn check<T: Element>(bytes: &[u8], a: &Array) -> Result<()> {
        assert!(a.data::<T>()?.as_ptr().is_aligned());
        assert_eq!(&a.bytes()?[..], bytes, "{a:?}");
        Ok(())
    }
    let bytes: Vec<u8> = (0..64u8).map(|i| i.wrapping_mul(37) & 0x3f).collect();
    let bytes_array = Array::from_slice(&bytes, &[64])?;
    for from in 0..9 {
        let part = &bytes[from as usize..from as usize + 32];
        let views = [
            // In order: a lazy slice of data, a lazy slice of a computation, an evaluated slice, a
            // slice of a slice, a donated buffer, and a slice of a Rust vector.
            bytes_array.slice_axis(0, from, from + 32)?,
            bytes_array
                .maximum(&bytes_array)?
                .slice_axis(0, from, from + 32)?,
            {
                let a = bytes_array.slice_axis(0, from, from + 32)?;
                a.eval()?;
                a
            },
            bytes_array.slice_axis(0, from, 64)?.slice_axis(0, 0, 32)?,
            {
                let minimum = bytes_array.minimum(&bytes_array)?;
                minimum.slice_axis(0, from, from + 32)?.abs()?
            },
            Array::from_vec(bytes.clone(), &[64])?.slice_axis(0, from, from + 32)?,
        ];
        for a in &views {
            check::<u16>(part, &a.view(Dtype::Uint16)?)?;
            check::<u32>(part, &a.view(Dtype::Uint32)?)?;
            check::<f32>(part, &a.view(Dtype::Float32)?)?;
            check::<u64>(part, &a.view(Dtype::Uint64)?)?;
            check::<f64>(part, &a.view(Dtype::Float64)?)?;
            check::<u64>(part, &a.view(Dtype::Complex64)?.view(Dtype::Uint64)?)?;
            // Two rows: contiguous, transposed and back, flattened, and split.
            let rows = a.reshape(&[2, 16])?.view(Dtype::Uint32)?;
            check::<u32>(part, &rows.contiguous()?)?;
            check::<u32>(part, &rows.transpose()?.transpose()?)?;
            check::<u32>(part, &rows.flatten(0, -1)?)?;
            let halves = rows.split(2, 0)?;
            check::<u32>(&part[16..], &halves[1])?;
            // Values computed from a view of wider elements.
            let sum = rows.add(&rows)?.to_vec::<u32>()?;
            let words = part
                .chunks(4)
                .map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
            assert_eq!(sum, words.map(|w| w.wrapping_add(w)).collect::<Vec<_>>());
        }
    }
    // `vmap` over rows that begin at unaligned addresses.
    let rows = bytes_array.as_strided(&[3, 8], &[9, 1], 1)?;
    let got = vmap(|x: &[Array]| Ok(vec![x[0].view(Dtype::Uint32)?]), 0, 0)(&[rows])?;
    let expected: Vec<u8> = [1, 10, 19]
        .iter()
        .flat_map(|&i| bytes[i..i + 8].to_vec())
        .collect();
    check::<u32>(&expected, &got[0])?;
    // In a traced function, the address of an argument is unknown.
    let compiled = compile(|x: &[Array]| Ok(vec![x[0].view(Dtype::Uint32)?]));
    for from in 0..4 {
        let part = bytes_array.slice_axis(0, from, from + 8)?;
        let got = compiled.call(&[part])?;
        check::<u32>(&bytes[from as usize..from as usize + 8], &got[0])?;
    }
    Ok(())
}

/// This crate's kernels must read unaligned views like MLX's own operations.
#[test]
fn kernels_read_views_that_begin_anywhere() -> Result<()> {
    Stream::default_of(Device::cpu())?.scope(|| {
        let odd = |values: &[f32], shape: &[i32]| -> Result<Array> {
            let mut bytes = vec![0u8; 3];
            bytes.extend(values.iter().flat_map(|v| v.to_ne_bytes()));
            let n = bytes.len() as i32;
            let all = Array::from_slice(&bytes, &[n])?.slice_axis(0, 3, n)?;
            all.view(Dtype::Float32)?.reshape(shape)
        };
        let numbers: Vec<f32> = (0..32 * 64)
            .map(|i| ((i * 7) % 19) as f32 * 0.25 - 2.0)
            .collect();
        let w = Array::from_slice(&numbers, &[32, 64])?;
        let x = Array::from_slice(&numbers[..128], &[2, 64])?;
        let expected = x.matmul(&w.transpose()?)?.to_vec::<f32>()?;
        let Some(matrix) = DenseMatrix::new(&odd(&numbers, &[32, 64])?)? else {
            return Ok(());
        };
        let got = matrix
            .product(&odd(&numbers[..128], &[2, 64])?)?
            .to_vec::<f32>()?;
        for (a, b) in got.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-3 * (1.0 + b.abs()), "{a}, not {b}");
        }
        Ok(())
    })
}
