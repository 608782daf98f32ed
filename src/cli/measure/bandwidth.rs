//! The rate at which all cores together read memory. It limits decode speed, because decode reads
//! every weight for each token. Reads from caches and writes are not measured.

use std::hint::black_box;
use std::num::NonZero;
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

/// Bytes that each thread reads in a pass. They are more than the thread's share of any current
/// cache.
const BYTES: usize = 256 << 20;

/// Number of passes. The fastest pass counts, because other programs can only slow a pass down.
const PASSES: usize = 5;

/// Number of independent sums in each thread. With several sums, an addition need not wait for the
/// preceding one.
const LANES: usize = 32;

/// Reads memory with all threads of this process, and returns the bytes per second of all threads
/// together. Each thread reads its own memory from start to end, [`PASSES`] times. It needs a
/// quarter of a GiB per core.
pub fn read_bandwidth() -> f64 {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    measure(threads, BYTES / size_of::<u64>())
}

/// Like [`read_bandwidth`], with this number of threads and `words` 64-bit integers per thread.
fn measure(threads: usize, words: usize) -> f64 {
    // The thread that reads the memory also writes it first, so that the system allocates it near
    // that thread's core.
    let start = std::sync::Barrier::new(threads);
    let passes = thread::scope(|scope| {
        let readers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let memory: Vec<u64> = (0..words as u64).collect();
                    [(); PASSES].map(|()| {
                        start.wait();
                        let began = Instant::now();
                        black_box(sum(black_box(&memory)));
                        began.elapsed().as_secs_f64()
                    })
                })
            })
            .collect();
        let joined = readers.into_iter().map(ScopedJoinHandle::join);
        joined.collect::<Result<Vec<_>, _>>()
    });
    let passes = passes.unwrap_or_default();
    // A pass takes as long as its slowest thread.
    let seconds = (0..PASSES).map(|pass| {
        passes
            .iter()
            .map(|thread_seconds| thread_seconds[pass])
            .fold(0.0, f64::max)
    });
    let fastest = seconds.fold(f64::INFINITY, f64::min);
    (threads * words * size_of::<u64>()) as f64 / fastest
}

/// The sum of all integers, written so that the compiler vectorizes it.
fn sum(memory: &[u64]) -> u64 {
    let mut sums = [0u64; LANES];
    for block in memory.as_chunks::<LANES>().0 {
        for (sum, value) in sums.iter_mut().zip(block) {
            *sum = sum.wrapping_add(*value);
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_read_and_the_rate_is_a_rate() {
        let memory: Vec<u64> = (0..1024).collect();
        assert_eq!(sum(&memory), 1024 * 1023 / 2);
        let rate = measure(2, 1 << 16);
        assert!(rate.is_finite() && rate > 0.0, "{rate}");
    }
}
