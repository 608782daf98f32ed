//! Runs a matrix memory as an operation: reads the inputs, and divides the work among threads.

use std::cell::RefCell;

use crate::isa::Isa;
use crate::partition::{SharedOutput, parallel_parts};
use crate::pool;
use crate::recurrence::chunk::{Scratch, run_head};
use crate::recurrence::matrix_memory::{Buffers, MatrixMemory, Part, Positions};
use crate::work::{Input, Work};

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Work for MatrixMemory {
    unsafe fn run(&self, inputs: &[Input], output: &mut [f32]) {
        let isa = Isa::detect();
        let normalized = self.rule.is_normalized();
        let (state, positions) = inputs.split_at(if normalized { 3 } else { 1 });
        let [y, new_c, new_n, new_m] = self.sizes();
        let (outputs, rest) = output.split_at_mut(y);
        let (c, rest) = rest.split_at_mut(new_c);
        let (n, m) = rest.split_at_mut(new_n);
        debug_assert_eq!(m.len(), new_m);
        // SAFETY: the caller passes float32 that exists and is not written during the call.
        let of = |input: &Input| unsafe { Positions::new(input) };
        // SAFETY: the caller passes row-contiguous float32 that exists during the call and is not
        // written.
        let slice_of = |at: usize| unsafe { state[at].as_slice::<f32>() };
        let buffers = Buffers {
            c: slice_of(0),
            n: if normalized { slice_of(1) } else { &[] },
            m: if normalized { slice_of(2) } else { &[] },
            q: of(&positions[0]),
            k: of(&positions[1]),
            v: of(&positions[2]),
            f: of(&positions[3]),
            second: positions.get(4).map(of),
            y: SharedOutput::new(outputs),
            new_c: SharedOutput::new(c),
            new_n: SharedOutput::new(n),
            new_m: SharedOutput::new(m),
        };
        let splits = self.splits(pool::pool().threads());
        let panels = self.repeats() * self.panels();
        let work = 2 * self.rows * self.length * self.heads * self.key_dim * self.value_dim;
        let parts = self.rows * self.key_heads * splits;
        parallel_parts(parts, work, &|indices| {
            SCRATCH.with_borrow_mut(|scratch| {
                for part in indices {
                    let (shared, split) = (part / splits, part % splits);
                    let part = Part {
                        row: shared / self.key_heads,
                        key_head: shared % self.key_heads,
                        panels: panels * split / splits..panels * (split + 1) / splits,
                    };
                    run_head(isa, self, &buffers, &part, scratch);
                }
            });
        });
    }

    fn outputs(&self) -> usize {
        self.sizes().iter().sum()
    }
}
