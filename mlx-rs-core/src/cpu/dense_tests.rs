use super::*;
use crate::cpu::{Epilogue, Matrix, Projection};
use crate::{Device, Stream};

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 61) as f32 / 8.0 - 3.5).collect()
}

fn bytes_of(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let bytes = |value: &f32| match dtype {
        Dtype::Float16 => f16::from_f32(*value).to_le_bytes().to_vec(),
        Dtype::Bfloat16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

fn on_cpu(run: impl FnOnce()) {
    Stream::default_of(Device::cpu()).unwrap().scope(run);
}

/// A file with 64 other bytes before the elements of a matrix `[n, k]`.
fn file_of(values: &[f32], dtype: Dtype) -> (tempfile::TempDir, MappedFile, Range<usize>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("matrix");
    let elements = bytes_of(values, dtype);
    std::fs::write(&path, [&[7; 64][..], &elements].concat()).unwrap();
    (
        dir,
        MappedFile::open(&path).unwrap(),
        64..64 + elements.len(),
    )
}

#[test]
fn mapped_matrices_give_what_copies_give() {
    const N: usize = 70;
    const K: usize = 96;
    let (all, shape) = (values(N * K), [N as i32, K as i32]);
    on_cpu(|| {
        for dtype in [Dtype::Float16, Dtype::Bfloat16, Dtype::Float32] {
            let (_dir, file, bytes) = file_of(&all, dtype);
            let Some(mapped) = DenseMatrix::mapped(&file, bytes, dtype, shape).unwrap() else {
                assert!(!enabled());
                continue;
            };
            let copy = mapped.weight().unwrap();
            assert_eq!(copy.dtype(), dtype);
            assert_eq!(
                copy.astype(Dtype::Float32)
                    .unwrap()
                    .to_vec::<f32>()
                    .unwrap(),
                all
            );
            let copied = DenseMatrix::new(&copy).unwrap().unwrap();
            assert_eq!(
                (mapped.dtype(), mapped.shape()),
                (copied.dtype(), copied.shape())
            );
            for rows in [1, 3, 40] {
                let x = Array::from_slice(&values(rows * K), &[rows as i32, K as i32]).unwrap();
                let [a, b] = [&mapped, &copied].map(|m| m.product(&x).unwrap());
                assert!(a.array_equal(&b).unwrap(), "{dtype}, {rows} rows");
                // The same with an epilogue.
                let [a, b] = [&mapped, &copied].map(|m| {
                    let matrix = Matrix::Dense(m.clone());
                    let parts = [(&matrix, None), (&matrix, None)];
                    let then = Epilogue::Gate(mlx_cpu_kernels::Gate::Silu);
                    let norm = None;
                    Projection {
                        parts: &parts,
                        norm,
                        then,
                    }
                    .of(&x)
                    .unwrap()
                });
                assert!(a.array_equal(&b).unwrap(), "{dtype}, {rows} rows, gated");
                let [a, b] = [&mapped, &copied]
                    .map(|m| Matrix::Dense(m.clone()).product_for_gradients(&x).unwrap());
                assert!(a.array_equal(&b).unwrap());
            }
            for ids in [
                Array::from_slice(&[69i32, 0, -5, 70], &[2, 2]).unwrap(),
                Array::from_slice(&[69u8, 0], &[2]).unwrap(),
                Array::from_slice(&[u32::MAX, 1], &[2]).unwrap(),
            ] {
                let [a, b] = [&mapped, &copied].map(|m| m.take_rows(&ids).unwrap());
                assert!(a.array_equal(&b).unwrap(), "{dtype}, {ids:?}");
            }
        }
    });
}

#[test]
fn bytes_that_are_no_matrix_are_refused() {
    if !enabled() {
        return;
    }
    let (_dir, file, bytes) = file_of(&values(64), Dtype::Float16);
    let map = |bytes: Range<usize>, shape| DenseMatrix::mapped(&file, bytes, Dtype::Float16, shape);
    assert!(map(bytes.clone(), [2, 32]).unwrap().is_some());
    let kind = |bytes, shape| map(bytes, shape).unwrap_err().kind();
    assert_eq!(kind(bytes.clone(), [2, 31]), ErrorKind::Shape);
    assert_eq!(kind(bytes.clone(), [0, 32]), ErrorKind::Shape);
    assert_eq!(kind(bytes.clone(), [-2, -32]), ErrorKind::Shape);
    assert_eq!(
        kind(bytes.start + 2..bytes.end + 2, [2, 32]),
        ErrorKind::Value
    );
    // Kernels read aligned elements only.
    assert!(
        map(bytes.start - 1..bytes.end - 1, [2, 32])
            .unwrap()
            .is_none()
    );
    let integers = DenseMatrix::mapped(&file, bytes, Dtype::Int16, [2, 32]);
    assert!(integers.unwrap().is_none());
}

#[cfg(unix)]
#[test]
fn a_truncated_file_is_an_error_and_its_products_are_no_numbers() {
    if !enabled() {
        return;
    }
    on_cpu(|| {
        const N: usize = 64;
        const K: usize = 4096; // several pages
        let all = values(N * K);
        let (dir, file, bytes) = file_of(&all, Dtype::Float16);
        let shape = [N as i32, K as i32];
        let matrix = DenseMatrix::mapped(&file, bytes, Dtype::Float16, shape).unwrap();
        let matrix = matrix.unwrap();
        let x = Array::from_slice(&values(K), &[1, K as i32]).unwrap();
        let begun = matrix.product(&x).unwrap();
        let ids = Array::from_slice(&[N as i32 - 1], &[1]).unwrap();
        let rows = matrix.take_rows(&ids).unwrap();
        let path = dir.path().join("matrix");
        let shrunk = std::fs::File::options().write(true).open(path).unwrap();
        shrunk.set_len(64).unwrap();
        for late in [begun, rows] {
            assert!(late.to_vec::<f32>().unwrap().iter().all(|v| v.is_nan()));
        }
        for later in [matrix.product(&x), matrix.take_rows(&ids), matrix.weight()] {
            let error = later.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io);
            assert!(error.message().contains("truncated"), "{error}");
        }
    });
}
