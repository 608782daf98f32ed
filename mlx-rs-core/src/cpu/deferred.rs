//! Parts of matrices that are packed after a model is loaded: by a thread, in the order in which
//! the matrices were made, or by the first operation that reads a matrix.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::{fmt, thread};

use parking_lot::Mutex;

use super::matrix_arrays::MatrixArrays;
use crate::array::{Array, ChunkedArray, Region, fill_regions, unfilled_arrays};
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::fill_arrays;

/// Packs matrices in a thread. A clone is another handle to the same thread. The thread ends when
/// the last handle is dropped. Each matrix made with a handle also keeps a handle.
///
/// The thread calls no function of MLX. So an operation that holds locks can wait for it without a
/// deadlock.
#[derive(Debug, Clone, Default)]
pub struct Packer(Arc<PackingThread>);

/// A running thread, and the channel that sends it matrices.
type Started = (Sender<Weak<Pending>>, JoinHandle<()>);

#[derive(Debug, Default)]
struct PackingThread {
    state: Mutex<Option<Started>>,
    stopped: Arc<AtomicBool>,
}

impl Packer {
    /// The parts of a matrix, whose values are written later. The arguments are those of
    /// [`fill_arrays`]. An error of `fill` becomes the error of each operation that reads the
    /// matrix.
    ///
    /// ```
    /// use mlx_rs_core::{ChunkedArray, Dtype, cpu::{Packer, QuantizedMatrix}};
    /// let part = |width, dtype, bytes| ChunkedArray {
    ///     shape: vec![2, width, 8],
    ///     dtype,
    ///     chunk_bytes: bytes,
    /// };
    /// let parts = [part(16, Dtype::Uint32, 512), part(2, Dtype::Float16, 32)];
    /// let parts = Packer::default().parts(&parts, 2, || (), |(), _, chunks| {
    ///     chunks[0].fill(129); // the code of 1
    ///     chunks[1].copy_from_slice(&[0, 60].repeat(16)); // 1
    ///     Ok(())
    /// })?;
    /// if let Some(matrix) = QuantizedMatrix::from_symmetric(parts, 9, 8)? {
    ///     let rows = matrix.take_rows(&mlx_rs_core::Array::from_slice(&[8i32], &[1])?)?;
    ///     assert_eq!(rows.to_vec::<f32>()?, [1.0; 64]);
    /// }
    /// # Ok::<(), mlx_rs_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`fill_arrays`], without the errors of `fill`.
    pub fn parts<S>(
        &self,
        parts: &[ChunkedArray],
        threads: usize,
        start: impl Fn() -> S + Send + Sync + 'static,
        fill: impl Fn(&mut S, usize, &mut [&mut [u8]]) -> Result<()> + Send + Sync + 'static,
    ) -> Result<MatrixParts> {
        let Some((arrays, regions)) = unfilled_arrays(parts)? else {
            return Ok(fill_arrays(parts, threads, start, fill)??.into());
        };
        let shapes = MatrixParts::shapes(&arrays);
        let job = move |regions: &[Region]| {
            // SAFETY: the regions are those of the arrays in `Pending`, which calls the job once
            // and before all reads.
            unsafe { fill_regions(regions, threads, &start, &fill) }
        };
        let pending = Arc::new(Pending {
            arrays: MatrixArrays::new(arrays)?,
            job: Mutex::new(Some((regions, Box::new(job)))),
            filled: OnceLock::new(),
        });
        self.0.add(&pending);
        let values = Values::Later(pending, self.clone());
        Ok(MatrixParts { shapes, values })
    }
}

impl PackingThread {
    /// Adds a matrix to those that the thread packs. If no thread can be started, the first reader
    /// packs it.
    fn add(&self, pending: &Arc<Pending>) {
        let mut state = self.state.lock();
        if state.is_none() {
            let (sender, receiver) = channel();
            let stopped = Arc::clone(&self.stopped);
            let run = move || pack_all(&receiver, &stopped);
            let started = thread::Builder::new().name("mlx-pack".into()).spawn(run);
            *state = started.ok().map(|thread| (sender, thread));
        }
        if let Some((sender, _)) = &*state {
            let _ = sender.send(Arc::downgrade(pending));
        }
    }
}

fn pack_all(receiver: &Receiver<Weak<Pending>>, stopped: &AtomicBool) {
    for pending in receiver {
        if stopped.load(Ordering::Acquire) {
            break;
        }
        if let Some(pending) = pending.upgrade() {
            // The thread that reads the matrix reports an error.
            let _ = pending.wait();
        }
    }
}

impl Drop for PackingThread {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        if let Some((sender, thread)) = self.state.get_mut().take() {
            drop(sender);
            // A panic of the thread already became an error of the matrix.
            let _ = thread.join();
        }
    }
}

/// Writes the values of a matrix.
type Job = Box<dyn FnOnce(&[Region]) -> Result<()> + Send>;

/// The arrays of a matrix that may not have their values yet.
pub(super) struct Pending {
    arrays: Arc<MatrixArrays>,
    job: Mutex<Option<(Vec<Region>, Job)>>,
    filled: OnceLock<Result<()>>,
}

impl Pending {
    /// Waits until the arrays have their values, or writes them.
    ///
    /// # Errors
    /// The error of the job.
    pub(super) fn wait(&self) -> Result<()> {
        self.filled.get_or_init(|| self.run()).clone()
    }

    fn run(&self) -> Result<()> {
        let job = self.job.lock().take();
        // A job that panicked has already been taken.
        let (regions, job) = job.ok_or_else(|| {
            let message = "packing a matrix failed before";
            Error::new(ErrorKind::Mlx, "cpu::QuantizedMatrix", message)
        })?;
        job(&regions)
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let filled = self.filled.get();
        f.debug_struct("Pending").field("filled", &filled).finish()
    }
}

/// The parts from which a [`QuantizedMatrix`](super::QuantizedMatrix) is made: arrays, or arrays of
/// a [`Packer`].
#[derive(Debug, Clone)]
pub struct MatrixParts {
    shapes: Vec<(Dtype, Vec<i32>)>,
    values: Values,
}

#[derive(Debug, Clone)]
enum Values {
    Ready(Vec<Array>),
    Later(Arc<Pending>, Packer),
}

impl MatrixParts {
    fn shapes(arrays: &[Array]) -> Vec<(Dtype, Vec<i32>)> {
        let of = |a: &Array| (a.dtype(), a.shape().to_vec());
        arrays.iter().map(of).collect()
    }

    /// The number of parts.
    pub(super) fn count(&self) -> usize {
        self.shapes.len()
    }

    /// The type and the shape of each part.
    pub(super) fn described(&self) -> &[(Dtype, Vec<i32>)] {
        &self.shapes
    }

    /// The length of the second axis of part `i`; 0 if the part is missing or has one axis.
    pub(super) fn width(&self, i: usize) -> i32 {
        let shape = self.shapes.get(i).map(|(_, shape)| shape);
        shape.and_then(|shape| shape.get(1)).copied().unwrap_or(0)
    }

    /// The arrays, and whether their values may be missing.
    pub(super) fn stored(self) -> Result<(Arc<MatrixArrays>, Option<Awaited>)> {
        match self.values {
            Values::Ready(arrays) => {
                let arrays: Vec<Array> = arrays
                    .iter()
                    .map(Array::contiguous)
                    .collect::<Result<_>>()?;
                crate::eval(&arrays)?;
                Ok((MatrixArrays::new(arrays)?, None))
            }
            Values::Later(pending, packer) => {
                let arrays = Arc::clone(&pending.arrays);
                Ok((arrays, Some(Awaited(pending, packer))))
            }
        }
    }
}

/// The values of a matrix, and the thread that writes them.
#[derive(Debug, Clone)]
pub(super) struct Awaited(
    Arc<Pending>,
    #[allow(dead_code, reason = "keeps the thread")] Packer,
);

impl Awaited {
    /// As [`Pending::wait`].
    pub(super) fn wait(&self) -> Result<()> {
        self.0.wait()
    }
}

impl From<Vec<Array>> for MatrixParts {
    fn from(arrays: Vec<Array>) -> Self {
        Self {
            shapes: Self::shapes(&arrays),
            values: Values::Ready(arrays),
        }
    }
}

impl<const N: usize> From<[Array; N]> for MatrixParts {
    fn from(arrays: [Array; N]) -> Self {
        Vec::from(arrays).into()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::cpu::{QuantizedMatrix, enabled};
    use crate::{Device, Stream};

    /// The parts of a matrix `[8, 32]` with the codes 129 (one) and the scale 1.
    fn layout() -> [ChunkedArray; 2] {
        let part = |width, dtype, chunk_bytes| ChunkedArray {
            shape: vec![1, width, 8],
            dtype,
            chunk_bytes,
        };
        [part(8, Dtype::Uint32, 256), part(1, Dtype::Float16, 16)]
    }

    fn write_ones(out: &mut [&mut [u8]]) {
        out[0].fill(129);
        out[1].copy_from_slice(&[0, 60].repeat(8));
    }

    fn matrix(
        packer: &Packer,
        fill: impl Fn(&mut [&mut [u8]]) -> Result<()> + Send + Sync + 'static,
    ) -> QuantizedMatrix {
        let parts = packer.parts(&layout(), 1, || (), move |(), _, out| fill(out));
        let matrix = QuantizedMatrix::from_symmetric(parts.unwrap(), 8, 8).unwrap();
        matrix.unwrap()
    }

    fn first_row(matrix: &QuantizedMatrix) -> Result<Vec<f32>> {
        Stream::default_of(Device::cpu())?.scope(|| {
            matrix
                .take_rows(&Array::from_slice(&[0i32], &[1])?)?
                .to_vec()
        })
    }

    #[test]
    fn readers_wait_for_values_or_write_them() {
        if !enabled() {
            return;
        }
        let packer = Packer::default();
        let (go, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        // The thread is busy with the first matrix until this test drops `go`.
        let first = matrix(&packer, move |out| {
            let _ = wait.lock().recv();
            write_ones(out);
            Ok(())
        });
        let second = matrix(&packer, |out| {
            write_ones(out);
            Ok(())
        });
        assert_eq!(first.nbytes(), 256 + 16);
        // Neither form reads values.
        assert!(format!("{first:?} {first:#?}").contains("uint32"));
        assert_eq!(first_row(&second).unwrap(), [1.0; 32]);
        let clone = first.clone();
        let reader = thread::spawn(move || first_row(&clone));
        drop(go);
        assert_eq!(reader.join().unwrap().unwrap(), [1.0; 32]);
        assert_eq!(first_row(&first).unwrap(), [1.0; 32]);
    }

    #[test]
    fn faults_are_errors_of_each_reader() {
        if !enabled() {
            return;
        }
        let packer = Packer::default();
        let faulty = matrix(&packer, |_| {
            Err(Error::new(
                ErrorKind::Io,
                "weights",
                "the file became shorter",
            ))
        });
        for _ in 0..2 {
            let error = first_row(&faulty).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io);
            assert!(error.message().contains("shorter"), "{error}");
        }
        assert!(faulty.to_quantized().is_err() && faulty.rows(0, 8).is_err());
        let x = Array::from_slice(&[1.0f32; 32], &[1, 32]).unwrap();
        assert!(faulty.product(&x).is_err());
        // Other matrices are not affected.
        let whole = matrix(&packer, |out| {
            write_ones(out);
            Ok(())
        });
        assert_eq!(first_row(&whole).unwrap(), [1.0; 32]);
    }

    #[test]
    fn matrices_that_are_dropped_are_not_packed() {
        if !enabled() {
            return;
        }
        let packer = Packer::default();
        let (go, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let busy = matrix(&packer, move |_| {
            let _ = wait.lock().recv();
            Ok(())
        });
        let packed = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&packed);
        drop(matrix(&packer, move |_| {
            flag.store(true, Ordering::Release);
            Ok(())
        }));
        drop(go);
        // The last handle ends the thread.
        drop((busy, packer));
        assert!(!packed.load(Ordering::Acquire));
    }
}
