//! Tests `cpu::KvBuffer`, which writes keys and values in place: in compiled functions, which run
//! operations again; in long unevaluated chains; and with sizes beyond any machine's memory.

use mlx_rs_core::cpu::{Block, DenseMatrix, Gate, Heads, KvBuffer, KvSlot, Matrix};
use mlx_rs_core::transforms::compile;
use mlx_rs_core::{Array, Device, ErrorKind, Result, Stream};

const D: i32 = 8;

fn on_cpu(f: impl FnOnce()) {
    Stream::default_of(Device::cpu()).unwrap().scope(f);
}

fn keys(values: &[f32]) -> Array {
    let positions = values.len() as i32;
    let all: Vec<f32> = values.iter().flat_map(|&v| [v; D as usize]).collect();
    Array::from_slice(&all, &[1, 1, positions, D]).unwrap()
}

/// The first element of each of the first `n` values in the buffer.
fn firsts(memory: &KvBuffer, n: i32) -> Vec<f32> {
    let values = memory.copy(n).unwrap().1.to_vec::<f32>().unwrap();
    values.chunks(D as usize).map(|v| v[0]).collect()
}

fn is_nan(values: &[f32]) -> bool {
    values.iter().all(|v| v.is_nan())
}

/// A decoder block with identity matrices, so that a token's key and value equal the token. `new`
/// returns `None` if this crate's kernels are disabled.
struct Identity {
    heads: Heads,
    matrix: Matrix,
}

impl Identity {
    fn new() -> Option<Self> {
        let mut one = vec![0.0f32; (D * D) as usize];
        one.iter_mut()
            .step_by(D as usize + 1)
            .for_each(|v| *v = 1.0);
        let one = Array::from_slice(&one, &[D, D]).unwrap();
        let heads = Heads {
            n_heads: 1,
            n_kv_heads: 1,
            head_dim: D,
            scale: 1.0,
            softcap: None,
            q_norm: None,
            k_norm: None,
            rotation: None,
            sinks: None,
        };
        let matrix = DenseMatrix::new(&one).unwrap().map(Matrix::Dense)?;
        Some(Self { heads, matrix })
    }

    fn step(&self, x: &Array, memory: &mut KvBuffer, offset: i32) -> Result<Array> {
        let one = (&self.matrix, None);
        let block = Block {
            heads: &self.heads,
            attention_norm: None,
            projections: [one; 3],
            output: one,
            feed_norm: None,
            gate: Gate::Relu,
            gate_up: [one; 2],
            down: one,
        };
        let slot = KvSlot {
            length: 1,
            offset,
            memory,
            window: None,
        };
        block.step(x, &mut [slot])
    }
}

fn token(value: f32) -> Array {
    Array::from_slice(&[value; D as usize], &[1, 1, D]).unwrap()
}

#[test]
fn memory_made_inside_a_compiled_function_is_written_once() {
    on_cpu(|| {
        let copied = compile(|x: &[Array]| -> Result<Vec<Array>> {
            Ok(vec![KvBuffer::holding(&x[0], &x[0], 4, 64)?.copy(4)?.0])
        });
        let first = keys(&[1.0, 2.0, 3.0, 4.0]);
        let mut arrays = Vec::new();
        for call in 0..50 {
            let y = copied.call(std::slice::from_ref(&first)).unwrap().remove(0);
            let values = y.to_vec::<f32>().unwrap();
            if call == 0 {
                assert_eq!(values, first.to_vec::<f32>().unwrap());
            } else {
                assert!(is_nan(&values), "call {call}: {values:?}");
            }
            // New data takes the place of freed memory, so reads of freed memory return 7.
            arrays.push(Array::from_slice(&[7.0f32; 4096], &[4096]).unwrap());
        }
    });
}

#[test]
fn forks_made_inside_a_compiled_function_are_written_once() {
    on_cpu(|| {
        let memory = KvBuffer::holding(&keys(&[1.0, 2.0]), &keys(&[1.0, 2.0]), 2, 4).unwrap();
        memory.written().unwrap().eval().unwrap();
        let memory = std::sync::Mutex::new(memory);
        let forked = compile(move |x: &[Array]| -> Result<Vec<Array>> {
            let mut fork = memory.lock().unwrap().fork(2, 8)?;
            fork.grow(2, 16)?;
            Ok(vec![fork.copy(2)?.0.add(&x[0])?])
        });
        let zero = [Array::scalar(0.0f32).unwrap()];
        let call = || forked.call(&zero).unwrap()[0].to_vec::<f32>().unwrap();
        assert_eq!(call()[..9], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]);
        assert!((0..20).all(|_| is_nan(&call())));
    });
}

#[test]
fn a_step_inside_a_compiled_function_rewrites_no_token() {
    on_cpu(|| {
        let Some(block) = Identity::new() else {
            return;
        };
        let memory =
            std::sync::Arc::new(std::sync::Mutex::new(KvBuffer::empty((1, D), 4).unwrap()));
        let before = {
            let mut memory = memory.lock().unwrap();
            block.step(&token(1.0), &mut memory, 0).unwrap()
        };
        before.eval().unwrap();
        // The witness reads the buffer after the replays. It does not depend on the step inside the
        // compiled function, so their order is not fixed.
        let witness = memory.lock().unwrap().fork(1, 4).unwrap();
        let inside = std::sync::Arc::clone(&memory);
        let stepped = compile(move |x: &[Array]| -> Result<Vec<Array>> {
            let mut memory = inside.lock().unwrap();
            Ok(vec![block.step(&x[0], &mut memory, 0)?])
        });
        let first = stepped.call(&[token(5.0)]).unwrap()[0]
            .to_vec::<f32>()
            .unwrap();
        assert!(first.iter().all(|v| v.is_finite() && *v == first[0]));
        for value in [6.0, 7.0, 8.0] {
            assert!(is_nan(
                &stepped.call(&[token(value)]).unwrap()[0]
                    .to_vec::<f32>()
                    .unwrap()
            ));
        }
        assert_eq!(firsts(&witness, 1), [1.0]);
        // The buffer now depends on a traced operation, which has no values. Reading it must be an
        // error, not a wrong token.
        let e = memory.lock().unwrap().copy(1).unwrap().0.eval();
        assert!(e.is_err(), "{e:?}");
    });
}

#[test]
fn a_captured_step_runs_once() {
    on_cpu(|| {
        let Some(block) = Identity::new() else {
            return;
        };
        let mut memory = KvBuffer::empty((1, D), 4).unwrap();
        let y = block.step(&token(1.0), &mut memory, 0).unwrap();
        let captured = y.clone();
        let added =
            compile(move |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].add(&captured)?]) });
        let zero = [token(0.0)];
        let first = added.call(&zero).unwrap()[0].to_vec::<f32>().unwrap();
        assert!(first.iter().all(|v| v.is_finite()));
        for _ in 0..20 {
            assert!(is_nan(
                &added.call(&zero).unwrap()[0].to_vec::<f32>().unwrap()
            ));
        }
        // The captured step has run inside the compiled function, so it must not run again outside.
        assert!(is_nan(&y.to_vec::<f32>().unwrap()));
        drop(added);

        // A step that is evaluated before it is captured is an ordinary value.
        let mut memory = KvBuffer::empty((1, D), 4).unwrap();
        let y = block.step(&token(1.0), &mut memory, 0).unwrap();
        let expected = y.to_vec::<f32>().unwrap();
        let added = compile(move |x: &[Array]| -> Result<Vec<Array>> { Ok(vec![x[0].add(&y)?]) });
        for _ in 0..3 {
            let values = added.call(&zero).unwrap()[0].to_vec::<f32>().unwrap();
            assert_eq!(values, expected);
        }
        assert_eq!(firsts(&memory, 1), [1.0]);
    });
}

#[test]
fn sizes_that_no_machine_has_are_errors() {
    on_cpu(|| {
        for layers in [1 << 40, usize::MAX] {
            let e = KvBuffer::several(layers, (1, 1), 1).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{layers}: {e}");
        }
        for heads in [(i32::MAX, i32::MAX), (1 << 20, 1 << 20)] {
            let e = KvBuffer::empty(heads, i32::MAX).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::OutOfMemory, "{heads:?}: {e}");
        }
        let mut memory = KvBuffer::empty((1, D), 4).unwrap();
        assert!(memory.grow(0, i32::MAX).is_ok() || memory.capacity() == 4);
    });
}

/// The stack has 256 KiB, less than the default of any platform's threads.
#[test]
fn a_long_chain_of_unevaluated_growth_is_dropped() {
    let small = std::thread::Builder::new().stack_size(256 << 10);
    let grown = small.spawn(|| {
        on_cpu(|| {
            let pair = keys(&[1.0]);
            let mut memory = KvBuffer::holding(&pair, &pair, 1, 1).unwrap();
            for _ in 0..300_000 {
                memory.grow(1, 1).unwrap();
            }
            drop(memory);
            let mut memory = KvBuffer::holding(&pair, &pair, 1, 1).unwrap();
            for _ in 0..20_000 {
                memory = memory.fork(1, 1).unwrap();
            }
            assert_eq!(firsts(&memory, 1), [1.0]);
        });
    });
    grown.unwrap().join().unwrap();
}
