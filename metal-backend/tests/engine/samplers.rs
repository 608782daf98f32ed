//! Compares every stage of sampling with an independent reference in float64
//! (`tools/golden/samplers.py`). The logits are chosen to be difficult. Also compares the
//! frequencies of tokens drawn by complete chains of stages.

use std::collections::BTreeMap;

use inference::GenerateOptions;
use metal_backend::sample::{
    self, Context, Logprobs, Sampler, add_bias, count, count_penalty, min_p, repeat_penalty, shift,
    temperature, top_k, top_n_sigma, top_p, typical_p, xtc,
};
use mlx_rs_core::cpu::{self, DrawParams, Pick, SampleParams};
use mlx_rs_core::{Array, Device, Dtype, Stream, zeros};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Golden {
    logits: BTreeMap<String, Vec<Value>>,
    cases: Vec<Value>,
    chain_logits: Vec<f32>,
    chains: Vec<Chain>,
}

#[derive(Deserialize)]
struct Chain {
    #[serde(deserialize_with = "from_fields")]
    options: GenerateOptions,
    probabilities: Vec<f64>,
}

/// Parses options from a flat list of fields, which is not divided into groups.
fn from_fields<'de, D: serde::Deserializer<'de>>(from: D) -> Result<GenerateOptions, D::Error> {
    let fields = serde_json::Map::<String, Value>::deserialize(from)?;
    let mut groups = serde_json::Map::new();
    for (name, value) in fields {
        let group = match name.as_str() {
            "logit_bias" | "banned_tokens" => "constraints",
            _ => "sampling",
        };
        let fields = groups.entry(group).or_insert_with(|| serde_json::json!({}));
        fields[name] = value;
    }
    serde_json::from_value(Value::Object(groups)).map_err(serde::de::Error::custom)
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../fixtures/samplers.json"))
        .expect("the golden file is whole")
}

fn floats(values: &[Value]) -> Vec<f32> {
    values
        .iter()
        .map(|v| match v.as_str() {
            Some("inf") => f32::INFINITY,
            Some("-inf") => f32::NEG_INFINITY,
            Some(other) => panic!("{other}"),
            None => v.as_f64().unwrap() as f32,
        })
        .collect()
}

fn f(case: &Value, name: &str) -> f32 {
    case[name]
        .as_f64()
        .unwrap_or_else(|| panic!("{name} in {case}")) as f32
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn row(values: &[f32]) -> Array {
    Array::from_slice(values, &[1, values.len() as i32]).unwrap()
}

fn id_row(values: &[u32]) -> Array {
    Array::from_slice(values, &[1, values.len() as i32]).unwrap()
}

/// Applies top-p with the sampling kernel. Returns the logits of the tokens that it can draw, and
/// minus infinity for all others.
fn kernel_top_p(x: &Array, p: f32) -> mlx_rs_core::Result<Array> {
    let n = x.dim(1)?;
    // With a scale of 0, all remaining tokens are equally probable. The uniform numbers of the
    // draws are so dense that each of these tokens is drawn. Every second row has another `p`, so
    // that the kernel must use the options of each row.
    let draws = 4 * n;
    let rows = (0..2 * draws).map(|i| {
        let draw = DrawParams {
            top_p: if i % 2 == 0 { p } else { 0.5 },
            scale: 0.0,
            uniform: (f64::from(i / 2) + 0.5) / f64::from(draws),
            ..DrawParams::new()
        };
        SampleParams::new(Pick::Draw(draw)).into()
    });
    let tokens = cpu::sample(&x.broadcast_to(&[2 * draws, n])?, rows.collect())?;
    let values = x.to_vec::<f32>()?;
    let mut left = vec![f32::NEG_INFINITY; values.len()];
    for token in tokens.to_vec::<u32>()?.into_iter().step_by(2) {
        left[token as usize] = values[token as usize];
    }
    Ok(row(&left))
}

/// Returns the result of each implementation of a stage.
fn outputs(case: &Value, x: &Array) -> Vec<mlx_rs_core::Result<Array>> {
    match case["stage"].as_str().unwrap() {
        "top_p" => {
            let p = f(case, "p");
            // A row of a batch must equal a single row, and the CPU kernel must equal the graph.
            let twice = x.broadcast_to(&[2, x.dim(1).unwrap()]).unwrap();
            let mut ways = vec![
                top_p(x, &[p]),
                top_p(&twice, &[p, 1.0]).and_then(|y| y.slice_axis(0, 0, 1)),
            ];
            // With p = 1, the kernel does not filter.
            if p < 1.0 {
                ways.push(kernel_top_p(x, p));
            }
            ways
        }
        "min_p" => vec![min_p(x, &[f(case, "p")])],
        "top_n_sigma" => vec![top_n_sigma(x, &[f(case, "n")])],
        "typical_p" => vec![typical_p(x, &[f(case, "p")])],
        "top_k" => vec![top_k(x, case["k"].as_u64().unwrap() as usize)],
        "xtc" => vec![xtc(x, &[f(case, "threshold")], &ids(&case["spared"]))],
        "temperature" => vec![temperature(x, &[f(case, "t")])],
        "repeat_penalty" => {
            let history = id_row(&ids(&case["history"]));
            vec![repeat_penalty(x, &history, f(case, "penalty"))]
        }
        "count_penalty" => {
            let mut counts = zeros(x.shape(), Dtype::Float32).unwrap();
            for id in ids(&case["tokens"]) {
                counts = count(&counts, &Array::vector(&[id]).unwrap()).unwrap();
            }
            vec![count_penalty(
                x,
                &counts,
                f(case, "presence"),
                f(case, "frequency"),
            )]
        }
        "bias" => {
            let biases: Vec<(u32, f32)> = serde_json::from_value(case["biases"].clone()).unwrap();
            let (i, b): (Vec<u32>, Vec<f32>) = biases.into_iter().unzip();
            vec![add_bias(x, &id_row(&i), &row(&b))]
        }
        "logprobs" => {
            let n = x.dim(1).unwrap();
            let by_kernel = [false, true].map(|on_cpu| {
                let all = (0..n as u32).map(|id| {
                    let token = Array::vector(&[id]).unwrap();
                    let l = Logprobs::new(x, &token, 0, on_cpu).unwrap();
                    l.row(0, 0).unwrap().0
                });
                let by_token: Vec<f32> = all.collect();
                let token = Array::vector(&[0u32]).unwrap();
                let l = Logprobs::new(x, &token, n as usize, on_cpu).unwrap();
                let mut by_rank = vec![f32::NAN; n as usize];
                let (_, top) = l.row(0, n as usize).unwrap();
                assert!(top.is_sorted_by(|a, b| a.1 >= b.1), "{top:?}");
                for (id, value) in top {
                    by_rank[id as usize] = value;
                }
                [row(&by_token), row(&by_rank)].map(Ok)
            });
            by_kernel.into_iter().flatten().collect()
        }
        other => panic!("no stage {other}"),
    }
}

fn close(got: f32, expected: f32) -> bool {
    got == expected || (got - expected).abs() <= 2e-6 * expected.abs().max(1.0)
}

#[test]
fn every_stage_equals_the_reference() {
    let golden = golden();
    let cpu = Stream::default_of(Device::cpu()).unwrap();
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for case in &golden.cases {
        let stage = case["stage"].as_str().unwrap();
        let x = row(&floats(&golden.logits[case["logits"].as_str().unwrap()]));
        let mut expected = floats(case["expected"].as_array().unwrap());
        let unordered = case["unordered"].as_bool().unwrap_or(false);
        if unordered {
            expected.sort_by(f32::total_cmp);
        }
        for (way, output) in cpu.scope(|| outputs(case, &x)).into_iter().enumerate() {
            let mut got = output.unwrap().to_vec::<f32>().unwrap();
            if unordered {
                got.sort_by(f32::total_cmp);
            }
            let equal = got.len() == expected.len()
                && got.iter().zip(&expected).all(|(&g, &e)| close(g, e));
            assert!(equal, "way {way} of {case}: {got:?}");
        }
        *seen.entry(stage.to_owned()).or_default() += 1;
    }
    assert_eq!(seen.len(), 11, "{seen:?}");
    assert!(seen.values().all(|&n| n >= 15), "{seen:?}");
}

#[test]
fn shifted_logits_have_the_same_probabilities() {
    let golden = golden();
    for (name, values) in &golden.logits {
        let values = floats(values);
        let shifted = shift(&row(&values)).unwrap().to_vec::<f32>().unwrap();
        assert!(shifted.iter().all(|v| !v.is_nan() && *v <= 0.0), "{name}");
        let nothing = values.iter().all(|&v| v == f32::NEG_INFINITY);
        assert!(nothing || shifted.contains(&0.0), "{name}");
    }
}

#[test]
fn chains_draw_what_the_reference_leaves() {
    if crate::alone::ran_elsewhere("samplers::chains_draw_what_the_reference_leaves") {
        return;
    }
    let golden = golden();
    let vocabulary = golden.chain_logits.len();
    let n = 1200usize;
    let cpu = Stream::default_of(Device::cpu()).unwrap();
    for chain in &golden.chains {
        for on_cpu in [false, true] {
            let context = Context {
                vocabulary,
                eos: &[],
                newline: &[],
                grammars: None,
                on_cpu,
            };
            // Draws all tokens as one batch, whose rows have equal options and different seeds.
            let mut samplers: Vec<Sampler> = (0..n as u64)
                .map(|seed| {
                    let options = chain.options.clone().with_seed(seed);
                    Sampler::new(&options, &[], &context).unwrap()
                })
                .collect();
            let mut rows: Vec<&mut Sampler> = samplers.iter_mut().collect();
            let tokens = cpu
                .scope(|| {
                    let x = row(&golden.chain_logits)
                        .broadcast_to(&[n as i32, vocabulary as i32])
                        .unwrap();
                    sample::sample(&mut rows, &x)
                })
                .unwrap()
                .tokens;
            let mut counts = vec![0u32; vocabulary];
            for token in tokens.to_vec::<u32>().unwrap() {
                counts[token as usize] += 1;
            }
            for (token, (&count, &p)) in counts.iter().zip(&chain.probabilities).enumerate() {
                let mean = n as f64 * p;
                let deviation = (mean * (1.0 - p)).sqrt();
                let off = (f64::from(count) - mean).abs();
                assert!(
                    off <= 5.0 * deviation + 1e-6,
                    "token {token} of {:?}: {counts:?}, expected {mean}",
                    chain.options
                );
            }
        }
    }
}
