//! The attention of a query must not depend on the other queries of the operation.

use half::f16;

use crate::attention::attend::{Around, Attention, AttentionMask, Query};
use crate::attention::kv_packing::KvPacking;
use crate::attention::kv_type::KvType;
use crate::isa::Isa;
use crate::layout::tile::LANES;
use crate::pool;
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

impl Case {
    fn with(mut self, kv_type: KvType) -> Self {
        self.mask.kv_type = kv_type;
        self
    }
}

/// An array `[1, KV_HEADS, n, d]`.
struct Cache {
    data: Vec<f32>,
    /// The bits of the elements as float16.
    half: Vec<u16>,
    /// The words of packed heads, `[1, KV_HEADS, n, words]`, if the cache was packed.
    words: Vec<u32>,
    shape: [i32; 4],
    strides: [i64; 4],
    word_strides: [i64; 4],
}

impl Cache {
    /// Elements that are exact in float16.
    fn new(n: usize, d: usize, seed: u32) -> Self {
        let strides = [KV_HEADS * n * d, n * d, d, 1];
        let noise = noise(KV_HEADS * n * d, seed);
        let half: Vec<f16> = noise.iter().map(|v| f16::from_f32(6.0 * v)).collect();
        Self {
            data: half.iter().map(|v| v.to_f32()).collect(),
            half: half.iter().map(|v| v.to_bits()).collect(),
            words: Vec::new(),
            shape: [1, KV_HEADS, n, d].map(|n| i32::try_from(n).unwrap()),
            strides: strides.map(|n| i64::try_from(n).unwrap()),
            word_strides: [0; 4],
        }
    }

    /// Packs the heads, and replaces the float32 elements by those of the packed heads.
    fn packed(mut self, packing: KvPacking) -> Self {
        let [_, _, n, d] = self.shape.map(|n| usize::try_from(n).unwrap());
        let each = packing.words(d);
        self.words = vec![0; KV_HEADS * n * each];
        for (head, words) in self
            .data
            .chunks_exact(d)
            .zip(self.words.chunks_exact_mut(each))
        {
            packing.pack(head, words);
        }
        let rows = (self.words.as_slice(), each);
        let mut wide = Vec::new();
        packing.unpack_rows(Isa::Portable, rows, (KV_HEADS * n, d), &mut wide);
        self.data = wide;
        let strides = [KV_HEADS * n * each, n * each, each, 1];
        self.word_strides = strides.map(|n| i64::try_from(n).unwrap());
        self
    }

    fn input(&self, kv_type: KvType) -> Input {
        let (n, shape, strides) = (self.data.len(), &self.shape, &self.strides);
        // SAFETY: shape and strides describe the elements, which exist while the input is used.
        unsafe {
            match kv_type {
                KvType::Float32 => Input::strided(self.data.as_ptr(), n, shape, strides),
                KvType::Float16 => Input::strided(self.half.as_ptr(), n, shape, strides),
                KvType::Packed(_) => {
                    let words = &self.words;
                    Input::strided(words.as_ptr(), words.len(), shape, &self.word_strides)
                }
            }
        }
    }
}

/// Whether this instruction set sums the terms of a query in one order for any number of queries.
fn has_one_order(isa: Isa) -> bool {
    cfg!(target_arch = "x86_64") && !matches!(isa, Isa::Portable | Isa::Neon | Isa::Dot)
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
    inputs.extend(caches.map(|cache| cache.input(case.mask.kv_type)));
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
        kv_type: KvType::Float32,
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
            if !has_one_order(isa) {
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
                    // The elements are exact in float16, so the sums are the same.
                    let half = case.with(KvType::Float16);
                    let alone = run(isa, half, rows, some, caches);
                    assert!(
                        alone == wanted,
                        "{half:?}, {isa:?}: {count} from {}",
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
        kv_type: KvType::Float32,
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
        if has_one_order(isa) {
            let out = run(isa, case, &packed, &positions, [&caches[0], &caches[1]]);
            assert!(*wanted.get_or_init(|| out.clone()) == out, "{isa:?}");
        }
    });
}

/// Without AVX2, single queries and panels may round differently, but float16 caches must not.
#[test]
fn float16_caches_equal_float32_caches_with_the_same_elements() {
    for d in [16, 64, 72, 80, 100] {
        let mask = AttentionMask {
            len: 150,
            kv_type: KvType::Float32,
            order: Some((0, 0)),
            window: Some(140),
            around: None,
        };
        let case = Case {
            d,
            mask,
            softcap: None,
            sinks: true,
            slopes: false,
        };
        let caches = [Cache::new(150, d, 1), Cache::new(150, d, 2)];
        let caches = [&caches[0], &caches[1]];
        for positions in [vec![149], (120..150).collect::<Vec<i32>>()] {
            let packed = noise(positions.len() * HEADS * d, 3);
            with_each(|isa| {
                let wide = run(isa, case, &packed, &positions, caches);
                let half = run(isa, case.with(KvType::Float16), &packed, &positions, caches);
                assert!(wide == half, "{d}, {isa:?}");
            });
        }
    }
}

/// With this number of panels, the heads of a key head share its converted keys and values.
#[test]
fn heads_that_share_converted_keys_have_the_results_of_float32_caches() {
    let packing = KvPacking::new(8, 32).unwrap();
    let mask = AttentionMask {
        len: 70,
        kv_type: KvType::Float32,
        order: Some((2, 2)),
        window: Some(40),
        around: None,
    };
    let case = Case {
        d: 32,
        mask,
        softcap: None,
        sinks: true,
        slopes: true,
    };
    let panels = 8 * pool::pool().threads();
    let positions: Vec<i32> = (0..70).cycle().take(panels * LANES).collect();
    let rows = noise(positions.len() * HEADS * case.d, 3);
    let caches = [1, 2].map(|seed| Cache::new(70, case.d, seed));
    let packed = [1, 2].map(|seed| Cache::new(70, case.d, seed).packed(packing));
    for (kv_type, [keys, values]) in [
        (KvType::Float16, &caches),
        (KvType::Packed(packing), &packed),
    ] {
        with_each(|isa| {
            let wide = run(isa, case, &rows, &positions, [keys, values]);
            let narrow = run(isa, case.with(kv_type), &rows, &positions, [keys, values]);
            assert!(wide == narrow, "{kv_type:?}, {isa:?}");
        });
    }
}

/// Packed caches give the bits of a float32 cache with the elements that they represent, for any
/// number of queries.
#[test]
fn packed_caches_equal_float32_caches_with_the_same_elements() {
    for (bits, group, d) in [
        (8, 64, 64),
        (4, 32, 96),
        (3, 64, 128),
        (6, 32, 32),
        (5, 32, 64),
        (2, 128, 256),
    ] {
        let mask = AttentionMask {
            len: 150,
            kv_type: KvType::Float32,
            order: Some((0, 0)),
            window: None,
            around: None,
        };
        let case = Case {
            d,
            mask,
            softcap: None,
            sinks: false,
            slopes: false,
        };
        let packing = KvPacking::new(bits, group).unwrap();
        let caches = [1, 2].map(|seed| Cache::new(150, d, seed).packed(packing));
        let caches = [&caches[0], &caches[1]];
        for positions in [vec![149], (110..150).collect::<Vec<i32>>()] {
            let rows = noise(positions.len() * HEADS * d, 3);
            with_each(|isa| {
                let wide = run(isa, case, &rows, &positions, caches);
                let packed = case.with(KvType::Packed(packing));
                let packed = run(isa, packed, &rows, &positions, caches);
                assert!(wide == packed, "{bits} bits, {d}, {isa:?}");
            });
        }
    }
}

/// Tests packed texts, whose keys are far apart in memory. A text is computed alone, among others,
/// and with only some of its queries. So some cases copy the keys, and others read them in place.
#[test]
fn a_text_has_the_same_result_alone_and_among_others() {
    const LENGTHS: [usize; 6] = [70, 3, 16, 150, 1, 33];
    for (d, reach, slopes) in [
        (32, None, false),
        (64, None, false),
        (64, Some(20), true),
        (48, Some(20), false),
        (128, None, true),
    ] {
        let width = (HEADS + 2 * KV_HEADS) * d;
        let total: usize = LENGTHS.iter().sum();
        let packed: Vec<f32> = noise(total * width, 3).iter().map(|v| 3.0 * v).collect();
        // The attention of the queries `skip..` of texts of these lengths, which begin at row
        // `start`.
        let run = |isa: Isa, start: usize, lengths: &[usize], skip: usize| {
            let rows: usize = lengths.iter().sum();
            let packed = &packed[start * width..(start + rows) * width];
            let (mut queries, mut plans, mut first) = (Vec::new(), Vec::new(), 0);
            for (sequence, &len) in lengths.iter().enumerate() {
                queries.extend((skip..len).map(|position| Query {
                    sequence,
                    row: first + position,
                    position: i32::try_from(position).unwrap(),
                }));
                plans.push(AttentionMask {
                    len,
                    kv_type: KvType::Float32,
                    order: None,
                    window: None,
                    around: Some(Around { first, reach }),
                });
                first += len;
            }
            let work = Attention {
                heads: HEADS,
                queries_per_kv: HEADS / KV_HEADS,
                head_dim: d,
                width,
                scale: 1.0 / (d as f32).sqrt(),
                softcap: None,
                eps: None,
                sinks: false,
                slopes: match slopes {
                    true => noise(HEADS, 5),
                    false => Vec::new(),
                },
                rotation: None,
                queries,
                plans,
                isa,
            };
            let shape = [1, KV_HEADS, rows, d].map(|n| i32::try_from(n).unwrap());
            let strides = [rows * width, d, width, 1].map(|n| i64::try_from(n).unwrap());
            let kv = |part: usize| {
                let part = &packed[(HEADS + part * KV_HEADS) * d..];
                // SAFETY: shape and strides describe elements of `packed`.
                unsafe { Input::strided(part.as_ptr(), part.len(), &shape, &strides) }
            };
            let inputs = [Input::from_slice(packed), kv(0), kv(1)];
            let mut out = vec![f32::NAN; work.outputs()];
            // SAFETY: these are the documented inputs of the work.
            unsafe { work.run(&inputs, &mut out) };
            out
        };
        with_each(|isa| {
            let all = run(isa, 0, &LENGTHS, 0);
            assert!(all.iter().all(|v| v.is_finite()), "{isa:?}");
            let (row, mut start) = (HEADS * d, 0);
            for len in LENGTHS {
                let wanted = &all[start * row..(start + len) * row];
                let alone = run(isa, start, &[len], 0);
                assert!(alone == wanted, "{isa:?}, {d}, {reach:?}: {len} alone");
                if has_one_order(isa) {
                    // There is at most one panel, which reads the keys in place.
                    let skip = len.saturating_sub(11);
                    let last = run(isa, start, &[len], skip);
                    let wanted = &wanted[skip * row..];
                    assert!(last == wanted, "{isa:?}, {d}, {reach:?}: the last of {len}");
                }
                start += len;
            }
        });
    }
}
