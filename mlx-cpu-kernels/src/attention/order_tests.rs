//! The attention of a query must not depend on the queries beside it.

use crate::attention::attend::{Around, Attention, AttentionMask, Query};
use crate::isa::Isa;
use crate::testing::{noise, with_each};
use crate::work::{Input, Work};

const HEADS: usize = 6;
const KV_HEADS: usize = 2;

/// A mask and options of an attention.
#[derive(Debug, Clone, Copy)]
struct Case {
    d: usize,
    mask: AttentionMask,
    softcap: Option<f32>,
    sinks: bool,
    slopes: bool,
}

/// An array `[1, KV_HEADS, n, d]`.
struct Cache {
    data: Vec<f32>,
    shape: [i32; 4],
    strides: [i64; 4],
}

impl Cache {
    fn new(n: usize, d: usize, seed: u32) -> Self {
        let strides = [KV_HEADS * n * d, n * d, d, 1];
        Self {
            data: noise(KV_HEADS * n * d, seed)
                .iter()
                .map(|v| 6.0 * v)
                .collect(),
            shape: [1, KV_HEADS, n, d].map(|n| i32::try_from(n).unwrap()),
            strides: strides.map(|n| i64::try_from(n).unwrap()),
        }
    }

    fn input(&self) -> Input {
        let data = self.data.as_ptr();
        // SAFETY: shape and strides describe the elements, which exist while the input is used.
        unsafe { Input::strided(data, self.data.len(), &self.shape, &self.strides) }
    }
}

/// Runs the attention of these positions. Each has a row of `packed`.
fn run(isa: Isa, case: Case, packed: &[f32], positions: &[i32], caches: [&Cache; 2]) -> Vec<u32> {
    let width = HEADS * case.d;
    let work = Attention {
        heads: HEADS,
        queries_per_kv: HEADS / KV_HEADS,
        head_dim: case.d,
        width,
        scale: 1.0 / (case.d as f32).sqrt(),
        softcap: case.softcap,
        eps: None,
        sinks: case.sinks,
        slopes: match case.slopes {
            true => noise(HEADS, 5),
            false => Vec::new(),
        },
        rotation: None,
        queries: positions
            .iter()
            .enumerate()
            .map(|(row, position)| Query {
                sequence: 0,
                row,
                position: *position,
            })
            .collect(),
        plans: vec![case.mask],
        isa,
    };
    let sinks = noise(HEADS, 9);
    let mut inputs = vec![Input::from_slice(packed)];
    inputs.extend(case.sinks.then(|| Input::from_slice(&sinks)));
    inputs.extend(caches.map(Cache::input));
    let mut out = vec![f32::NAN; work.outputs()];
    // SAFETY: these are the documented inputs of the work.
    unsafe { work.run(&inputs, &mut out) };
    out.into_iter().map(f32::to_bits).collect()
}

#[test]
fn a_query_has_the_same_result_alone_and_among_others() {
    const KEYS: usize = 333;
    let causal = AttentionMask {
        len: KEYS,
        order: Some((0, 0)),
        window: None,
        around: None,
    };
    let windowed = AttentionMask {
        order: Some((5, 5)),
        window: Some(90),
        ..causal
    };
    let around = AttentionMask {
        around: Some(Around {
            first: 0,
            reach: Some(70),
        }),
        ..causal
    };
    let of = |d, mask, softcap, sinks| Case {
        d,
        mask,
        softcap,
        sinks,
        slopes: false,
    };
    for case in [
        of(64, causal, None, false),
        of(128, causal, None, true),
        of(80, windowed, Some(20.0), false),
        of(256, windowed, None, true),
        of(48, around, None, false),
        Case {
            slopes: true,
            ..of(64, around, None, false)
        },
        Case {
            slopes: true,
            ..of(64, windowed, Some(20.0), true)
        },
    ] {
        let caches = [Cache::new(KEYS, case.d, 1), Cache::new(KEYS, case.d, 2)];
        let caches = [&caches[0], &caches[1]];
        let width = HEADS * case.d;
        // Positions from the start, from the middle, and to the end.
        let positions: Vec<i32> = (0..21).chain(60..75).chain(300..333).collect();
        let packed: Vec<f32> = noise(positions.len() * width, 3)
            .iter()
            .map(|v| 4.0 * v)
            .collect();
        with_each(|isa| {
            if !matches!(isa, Isa::Avx2 | Isa::Avx512 | Isa::Amx) {
                return;
            }
            let all = run(isa, case, &packed, &positions, caches);
            for count in [1, 2, 5, 16] {
                for (i, some) in positions.chunks(count).enumerate() {
                    let rows = &packed[i * count * width..][..some.len() * width];
                    let alone = run(isa, case, rows, some, caches);
                    let wanted = &all[i * count * width..][..some.len() * width];
                    assert!(
                        alone == wanted,
                        "{case:?}, {isa:?}: {count} from {}",
                        i * count
                    );
                }
            }
        });
    }
}

/// The instruction sets of x86-64 add in the same order.
#[test]
fn a_query_has_the_same_result_with_every_instruction_set() {
    let mask = AttentionMask {
        len: 200,
        order: Some((0, 0)),
        window: None,
        around: None,
    };
    let case = Case {
        d: 64,
        mask,
        softcap: None,
        sinks: false,
        slopes: false,
    };
    let caches = [Cache::new(200, case.d, 1), Cache::new(200, case.d, 2)];
    let positions: Vec<i32> = (150..189).collect();
    let packed = noise(positions.len() * HEADS * case.d, 3);
    let wanted = std::cell::OnceCell::new();
    with_each(|isa| {
        if matches!(isa, Isa::Avx2 | Isa::Avx512 | Isa::Amx) {
            let out = run(isa, case, &packed, &positions, [&caches[0], &caches[1]]);
            assert!(*wanted.get_or_init(|| out.clone()) == out, "{isa:?}");
        }
    });
}
