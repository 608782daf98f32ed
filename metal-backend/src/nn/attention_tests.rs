//! Tests attention over every kind of cache against its definition: loops in float64 over all keys
//! and values. Sequences far exceed the capacity of bounded caches. Each test runs with and without
//! our kernels.

use inference::AttentionSums;
use mlx_rs_core::{Array, Device, QuantMode, Quantized, Stream};

use super::*;
use crate::cache::{
    Caches, InPlaceCache, KvCache, LayerState, Packing, QuantizedCache, RotatingCache,
    WindowedCache,
};
use crate::exec::Weight;
use crate::nn::hooks::Watch;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// Pseudo-random numbers in `-1..1`.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Returns a projection that selects `n` of `of` elements, starting at `from`.
fn selection(from: usize, n: usize, of: usize, on_cpu: bool) -> Linear {
    let mut weight = vec![0f32; n * of];
    for i in 0..n {
        weight[i * of + from + i] = 1.0;
    }
    let weight = Array::from_slice(&weight, &[n as i32, of as i32]).unwrap();
    Linear::new(Weight::Dense(weight), None, on_cpu).unwrap()
}

/// Returns a layer whose input is the concatenation of queries, keys and values. Its output is the
/// output of attention, without a projection.
fn layer(d: usize, on_cpu: bool) -> Attention {
    let (q, kv) = (HEADS * d, KV_HEADS * d);
    let all = q + 2 * kv;
    Attention {
        q_proj: selection(0, q, all, on_cpu),
        k_proj: Some(selection(q, kv, all, on_cpu)),
        v_proj: Some(selection(q + kv, kv, all, on_cpu)),
        o_proj: selection(0, q, q, on_cpu),
        norms: HeadNorms::default(),
        rope: None,
        n_heads: HEADS as i32,
        n_kv_heads: KV_HEADS as i32,
        head_dim: d as i32,
        scale: 1.0 / (d as f32).sqrt(),
        window: None,
        softcap: None,
        growth: None,
        clip: None,
        chunk: None,
        sinks: None,
        sums: AttentionSums::Native,
    }
}

/// Computes the attention output `[H * D]` by definition, for the query in `rows[at]` over the keys
/// for which `sees` is true.
fn reference(rows: &[Vec<f32>], at: usize, d: usize, sees: &dyn Fn(usize) -> bool) -> Vec<f64> {
    let (q, kv) = (HEADS * d, KV_HEADS * d);
    let seen: Vec<usize> = (0..=at).filter(|&k| sees(k)).collect();
    let mut out = Vec::with_capacity(q);
    for head in 0..HEADS {
        let kv_head = head / (HEADS / KV_HEADS) * d;
        let query = &rows[at][head * d..(head + 1) * d];
        let scores: Vec<f64> = seen
            .iter()
            .map(|&k| {
                let key = &rows[k][q + kv_head..q + kv_head + d];
                let dot: f64 = query.iter().zip(key).map(|(a, b)| f64::from(a * b)).sum();
                (dot / (d as f64).sqrt()).exp()
            })
            .collect();
        let total: f64 = scores.iter().sum();
        for e in 0..d {
            let value = |k: usize| f64::from(rows[k][q + kv + kv_head + e]);
            let sum: f64 = seen.iter().zip(&scores).map(|(&k, s)| s * value(k)).sum();
            out.push(sum / total);
        }
    }
    out
}

/// Returns the greatest difference between two results: a layer with `cache` over `inputs`, and the
/// definition over `rows`. The layer receives `inputs` in steps with the lengths in `steps`,
/// repeated.
fn distance(
    (inputs, rows): (&[Vec<f32>], &[Vec<f32>]),
    d: usize,
    cache: Box<dyn LayerState>,
    steps: &[usize],
    sees: &dyn Fn(usize, usize) -> bool,
    on_cpu: bool,
) -> f64 {
    let layer = layer(d, on_cpu);
    let mut caches = Caches::from(cache);
    let (mut at, mut worst) = (0, 0f64);
    for &n in steps.iter().cycle() {
        if at >= inputs.len() {
            break;
        }
        let n = n.min(inputs.len() - at);
        let x = inputs[at..at + n].concat();
        let x = Array::from_slice(&x, &[1, n as i32, inputs[0].len() as i32]).unwrap();
        let mut step = [Row {
            length: n as i32,
            caches: &mut caches,
        }];
        let watch = &mut Watch::nothing();
        let out = layer.forward((&x, None, false), &mut step, 0, Positions::All, watch);
        let out = out.unwrap().to_vec::<f32>().unwrap();
        for (query, out) in (at..at + n).zip(out.chunks_exact(HEADS * d)) {
            let expected = reference(rows, query, d, &|k| sees(query, k));
            for (a, b) in out.iter().zip(&expected) {
                worst = worst.max((f64::from(*a) - b).abs());
            }
        }
        at += n;
    }
    worst
}

fn inputs(n: usize, d: usize) -> Vec<Vec<f32>> {
    let width = (HEADS + 2 * KV_HEADS) * d;
    // Long query vectors make attention uneven, so that a wrong key changes the result.
    let mut rows: Vec<Vec<f32>> = (0..n).map(|i| numbers(width, i as u64 + 1)).collect();
    for row in &mut rows {
        row[..HEADS * d].iter_mut().for_each(|q| *q *= 3.0);
    }
    rows
}

#[test]
fn bounded_caches_find_what_full_precision_finds_after_many_rounds() {
    let d = 16;
    let rows = inputs(130, d);
    let cpu = Stream::default_of(Device::cpu()).unwrap();
    cpu.scope(|| {
        // The sequence wraps around the three ring buffers about sixteen, ten and five times.
        for (size, keep) in [(8, 0), (16, 4), (24, 0), (7, 6)] {
            let sees = |query: usize, k: usize| k < keep || k + (size - keep) > query;
            let (size, keep) = (size as i32, keep as i32);
            for steps in [&[1][..], &[40, 1, 1, 1], &[5, 1, 9], &[3]] {
                let kinds: [Box<dyn KvCache>; 2] = [
                    Box::new(RotatingCache::new(size, keep)),
                    Box::new(WindowedCache::new(size, keep, 3)),
                ];
                for cache in kinds {
                    for on_cpu in [false, true] {
                        let what = format!("{} {steps:?} {on_cpu}", cache.kind());
                        let off = distance(
                            (&rows, &rows),
                            d,
                            cache.copy().unwrap(),
                            steps,
                            &sees,
                            on_cpu,
                        );
                        assert!(off < 2e-5, "{what}: {off}");
                    }
                }
            }
        }
    });
}

#[test]
fn packed_caches_find_what_full_precision_finds_of_what_was_packed() {
    let all = |_: usize, _: usize| true;
    let cpu = Stream::default_of(Device::cpu()).unwrap();
    cpu.scope(|| {
        for group in [32, 64, 128] {
            let d = group as usize;
            // For head size 32, the sequence exceeds the first chunk of 256 positions, so packed
            // buffers must grow.
            let rows = inputs(if d == 32 { 300 } else { 60 }, d);
            let mut before = f64::INFINITY;
            for bits in [2, 3, 4, 5, 6, 8] {
                let packing = |start| Packing {
                    bits,
                    group_size: group,
                    start,
                };
                let what = format!("{bits} bits, groups of {group}");
                // Only keys and values lose precision by packing.
                let mut packed = rows.clone();
                for row in &mut packed {
                    let keys_and_values = &mut row[HEADS * d..];
                    let array =
                        Array::from_slice(keys_and_values, &[2 * KV_HEADS as i32, group]).unwrap();
                    let q = Quantized::quantize(&array, group, bits, QuantMode::Affine).unwrap();
                    let values = q
                        .dequantize(array.dtype())
                        .unwrap()
                        .to_vec::<f32>()
                        .unwrap();
                    // A quantization step is the range of a group, at most 2, divided by the number
                    // of steps. Rounding costs at most half a step. MLX also shifts the range so
                    // that one end is exact, so the limit is one step.
                    let step = 2.0 / (f32::from(1u16 << bits) - 1.0);
                    for (a, b) in keys_and_values.iter().zip(&values) {
                        assert!((a - b).abs() <= step, "{what}: {a} became {b}");
                    }
                    keys_and_values.copy_from_slice(&values);
                }
                // MLX's operations use the first cache, our kernels the second.
                let caches = |start| -> [Box<dyn KvCache>; 2] {
                    let of_kernels = InPlaceCache::with_packing(packing(start)).unwrap();
                    let of_mlx = QuantizedCache::new(packing(start));
                    [Box::new(of_mlx), Box::new(of_kernels)]
                };
                for steps in [&[37, 1, 1, 2][..], &[250, 1]] {
                    for cache in caches(0) {
                        let off = distance((&rows, &packed), d, cache, steps, &all, true);
                        assert!(off < 5e-5, "{what}: {off}");
                    }
                }
                // Fewer bits must cause a greater error.
                let [_, cache] = caches(0);
                let lost = distance((&rows, &rows), d, cache, &[1], &all, true);
                assert!(
                    lost < before * 1.1 && lost < 4.0 / f64::from(1u16 << bits),
                    "{what}: {lost}"
                );
                before = lost;
                // No position is packed before `start`, so there is no quantization error.
                for cache in caches(1000) {
                    let off = distance((&rows, &rows), d, cache, &[29, 1], &all, true);
                    assert!(off < 2e-5, "{what}: {off}");
                }
            }
        }
    });
}

/// Returns the layer's outputs `[H * D]` for all positions of `rows`, computed in steps of 512
/// positions.
fn outputs(layer: &Attention, rows: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let mut caches = Caches::from(Box::new(InPlaceCache::new()) as Box<dyn LayerState>);
    let mut all = Vec::new();
    for step in rows.chunks(512) {
        let shape = [1, step.len() as i32, rows[0].len() as i32];
        let x = Array::from_slice(&step.concat(), &shape).unwrap();
        let mut rows_of_step = [Row {
            length: step.len() as i32,
            caches: &mut caches,
        }];
        let watch = &mut Watch::nothing();
        let out = layer.forward(
            (&x, None, false),
            &mut rows_of_step,
            0,
            Positions::All,
            watch,
        );
        let out = out.unwrap().to_vec::<f32>().unwrap();
        let width = out.len() / step.len();
        all.extend(out.chunks_exact(width).map(<[f32]>::to_vec));
    }
    all
}

/// Compares with numpy in float64 (`tools/golden/attention.py`), with long queries over 2,048 keys.
/// In double precision, a result is within half a unit in the last place of numpy's result.
#[test]
fn double_precision_finds_what_numpy_finds_and_the_kernels_come_near() {
    let d = 64;
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/attention.json");
    let golden = std::fs::read_to_string(golden).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&golden).unwrap();
    let length = golden["length"].as_u64().unwrap() as usize;
    let width = (HEADS + 2 * KV_HEADS) * d;
    let mut rows: Vec<Vec<f32>> = (0..length).map(|i| numbers(width, i as u64 + 1)).collect();
    for row in &mut rows {
        row[..HEADS * d].iter_mut().for_each(|q| *q *= 24.0);
    }
    let cpu = Stream::default_of(Device::cpu()).unwrap();
    cpu.scope(|| {
        let [kernels, mlx, wide] = [
            (true, AttentionSums::Native),
            (false, AttentionSums::Native),
            (true, AttentionSums::Float64),
        ]
        .map(|(on_cpu, sums)| {
            let layer = Attention {
                sums,
                ..layer(d, on_cpu)
            };
            let actual = outputs(&layer, &rows);
            let mut worst = (0f64, 0f64);
            for case in golden["found"].as_array().unwrap() {
                let at = |name: &str| case[name].as_u64().unwrap() as usize;
                let from = at("head") * d;
                let actual_head = &actual[at("position")][from..from + d];
                let expected = case["outputs"].as_array().unwrap();
                assert_eq!(expected.len(), d);
                for (a, b) in actual_head.iter().zip(expected) {
                    let b = b.as_f64().unwrap();
                    let off = (f64::from(*a) - b).abs();
                    worst = (worst.0.max(off), worst.1.max(off / b.abs()));
                }
            }
            worst
        });
        // The bound is half a unit in the last place, plus the rounding of float64.
        assert!(wide.1 < 6.1e-8, "{wide:?}");
        for native in [kernels, mlx] {
            assert!(native.0 < 1e-5, "{native:?}");
            assert!(native.0 > 8.0 * wide.0, "{native:?} beside {wide:?}");
        }
    });
}
