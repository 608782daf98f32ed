//! Tests of the sampler: the draws of requests alone and in a batch.

use super::*;
use inference::LogitsProcessorFactory;

const NO: f32 = f32::NEG_INFINITY;

fn options() -> GenerateOptions {
    GenerateOptions::default()
}

fn context(vocabulary: usize) -> Context<'static> {
    Context {
        vocabulary,
        eos: &[],
        newline: &[],
        grammars: None,
        on_cpu: false,
    }
}

fn sampler(options: &GenerateOptions, prompt: &[u32], vocabulary: usize) -> Sampler {
    Sampler::new(options, prompt, &context(vocabulary)).unwrap()
}

fn logits(values: &[f32]) -> Array {
    Array::from_slice(values, &[1, values.len() as i32]).unwrap()
}

fn draw(sampler: &mut Sampler, values: &[f32]) -> u32 {
    let drawn = sample(&mut [sampler], &logits(values)).unwrap();
    drawn.tokens.to_vec::<u32>().unwrap()[0]
}

fn draws(sampler: &mut Sampler, values: &[f32], n: usize) -> Vec<u32> {
    (0..n).map(|_| draw(sampler, values)).collect()
}

#[test]
fn greedy_takes_the_greatest_and_the_first_of_equals() {
    let mut s = sampler(&options(), &[], 3);
    assert_eq!(draw(&mut s, &[0.0, 3.0, 1.0]), 1);
    assert_eq!(draw(&mut s, &[2.0, 0.0, 2.0]), 0);
}

#[test]
fn the_same_seed_draws_the_same_tokens() {
    let values: Vec<f32> = (0..50).map(|i| (i % 7) as f32 * 0.3).collect();
    let run = |seed| {
        let o = options().with_temperature(1.0).with_seed(seed);
        draws(&mut sampler(&o, &[], 50), &values, 20)
    };
    assert_eq!(run(Some(7)), run(Some(7)));
    assert_ne!(run(Some(7)), run(Some(8)));
    assert_ne!(run(None), run(None));
}

#[test]
fn draws_follow_the_distribution_that_the_filters_leave() {
    // The probabilities are 0.05, 0.15, 0.2, 0.6.
    let p = [0.05f32, 0.15, 0.2, 0.6];
    let values = p.map(f32::ln);
    let o = || options().with_temperature(1.0).with_seed(1);
    let share = |weights: [f32; 4]| {
        let sum: f32 = weights.iter().sum();
        weights.map(|k| k / sum)
    };
    let warm = p.map(f32::sqrt);
    for (o, expected) in [
        (o(), p),
        (o().with_top_k(2), share([0.0, 0.0, 0.2, 0.6])),
        (o().with_top_k(4), p),
        (o().with_top_p(0.9), share([0.0, 0.15, 0.2, 0.6])),
        (
            o().with_top_p(0.9).with_top_k(3),
            share([0.0, 0.15, 0.2, 0.6]),
        ),
        (
            o().with_top_p(0.7).with_top_k(3),
            share([0.0, 0.0, 0.2, 0.6]),
        ),
        (o().with_min_p(0.3), share([0.0, 0.0, 0.2, 0.6])),
        (
            o().with_min_p(0.3).with_top_k(3),
            share([0.0, 0.0, 0.2, 0.6]),
        ),
        (o().with_temperature(2.0), share(warm)),
        (
            o().with_xtc_probability(1.0).with_xtc_threshold(0.1),
            share([0.05, 0.15, 0.0, 0.0]),
        ),
        (
            o().with_xtc_probability(1.0)
                .with_xtc_threshold(0.1)
                .with_top_k(1),
            [0.0, 1.0, 0.0, 0.0],
        ),
    ] {
        for on_cpu in [false, true] {
            let n = 1500usize;
            // Many rows in one batch, each with its own seed.
            let c = Context {
                on_cpu,
                ..context(4)
            };
            let mut samplers: Vec<Sampler> = (0..n)
                .map(|i| Sampler::new(&o.clone().with_seed(i as u64), &[], &c).unwrap())
                .collect();
            let mut rows: Vec<&mut Sampler> = samplers.iter_mut().collect();
            let x = logits(&values).broadcast_to(&[n as i32, 4]).unwrap();
            let cpu = mlx_rs_core::Stream::default_of(mlx_rs_core::Device::cpu()).unwrap();
            let tokens = cpu.scope(|| sample(&mut rows, &x)).unwrap().tokens;
            let mut counts = [0.0f32; 4];
            for t in tokens.to_vec::<u32>().unwrap() {
                counts[t as usize] += 1.0;
            }
            for (count, p) in counts.iter().zip(expected) {
                let mean = n as f32 * p;
                let deviation = (n as f32 * p * (1.0 - p)).sqrt();
                assert!(
                    (count - mean).abs() <= 5.0 * deviation,
                    "{counts:?} for {expected:?}, {o:?}"
                );
            }
        }
    }
}

#[test]
fn xtc_happens_as_often_as_asked_and_spares_ends_of_lines() {
    let values = [0.1f32, 0.3, 0.6].map(f32::ln);
    let o = options()
        .with_temperature(1e-3)
        .with_xtc_probability(0.25)
        .with_seed(3);
    let left_out = |newline: &'static [u32]| {
        let c = Context {
            newline,
            ..context(3)
        };
        let mut s = Sampler::new(&o, &[], &c).unwrap();
        let drawn = draws(&mut s, &values, 400);
        drawn.iter().filter(|&&t| t != 2).count()
    };
    // Five standard deviations of 400 draws at 0.25 are 43.
    let n = left_out(&[]);
    assert!((57..143).contains(&n), "{n}");
    assert_eq!(left_out(&[2]), 0);
}

#[test]
fn the_penalty_forgets_what_left_its_window() {
    let o = options().with_repeat_penalty(100.0).with_repeat_window(2);
    let mut s = sampler(&o, &[], 4);
    assert_eq!(draws(&mut s, &[4.0, 3.0, 2.0, 1.0], 6), [0, 1, 2, 0, 1, 2]);
}

#[test]
fn the_prompt_counts_for_repetition_and_not_for_presence() {
    let o = options().with_repeat_penalty(100.0);
    assert_eq!(draw(&mut sampler(&o, &[0], 2), &[4.0, 3.0]), 1);
    let o = options().with_presence_penalty(1.5);
    let mut s = sampler(&o, &[0], 3);
    assert_eq!(draws(&mut s, &[4.0, 3.0, 0.0], 4), [0, 1, 0, 0]);
    let o = options().with_frequency_penalty(0.4);
    let mut s = sampler(&o, &[], 2);
    assert_eq!(draws(&mut s, &[4.0, 3.0], 5), [0, 0, 0, 1, 0]);
}

#[test]
fn biases_bans_and_forced_tokens() {
    let values = [4.0, 3.0, 2.0, 1.0];
    let o = options().with_logit_bias([(3, 10.0), (0, -1.0)]);
    assert_eq!(draw(&mut sampler(&o, &[], 4), &values), 3);
    let o = options().with_banned_tokens([0, 2]);
    assert_eq!(draws(&mut sampler(&o, &[], 4), &values, 2), [1, 1]);
    let o = o.with_forced_tokens([2, 3]).with_logprobs(0);
    assert_eq!(draws(&mut sampler(&o, &[], 4), &values, 3), [2, 3, 1]);
    for bad in [
        options().with_banned_tokens([4]),
        options().with_forced_tokens([9]),
        options().with_logit_bias([(4, 1.0)]),
        options().with_banned_tokens([0, 1, 2, 3, 3]),
    ] {
        let e = Sampler::new(&bad, &[], &context(4)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidOption);
    }
}

#[test]
fn a_reply_does_not_end_before_its_minimal_length() {
    let c = Context {
        eos: &[0],
        ..context(3)
    };
    let o = options().with_min_tokens(2).with_stop_tokens([1]);
    let mut s = Sampler::new(&o, &[], &c).unwrap();
    assert_eq!(draws(&mut s, &[4.0, 3.0, 1.0], 3), [2, 2, 0]);
}

#[test]
fn processors_see_prompt_and_reply_and_have_the_last_word_but_bans() {
    let never_twice = LogitsProcessorFactory::new(|| {
        |prompt: &[u32], reply: &[u32], logits: &mut [f32]| {
            assert_eq!(prompt, [7, 7]);
            for &id in reply {
                logits[id as usize] = NO;
            }
            logits[2] = 100.0;
            Ok(())
        }
    });
    let o = options()
        .with_logits_processors([never_twice])
        .with_banned_tokens([2]);
    let mut s = sampler(&o, &[7, 7], 8);
    let values = [5.0, 4.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0];
    assert_eq!(draws(&mut s, &values, 3), [0, 1, 3]);

    let nothing = LogitsProcessorFactory::new(|| {
        |_: &[u32], _: &[u32], logits: &mut [f32]| {
            logits.fill(NO);
            Ok(())
        }
    });
    let o = options().with_logits_processors([nothing]);
    let e = sample(&mut [&mut sampler(&o, &[], 2)], &logits(&[1.0, 2.0])).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidOption);
}

#[test]
fn logits_that_leave_one_token_give_it() {
    let only = [NO, NO, -3.0, NO];
    for o in [
        options(),
        options().with_temperature(1.0),
        options().with_temperature(1e-38).with_top_p(0.1),
        options()
            .with_temperature(50.0)
            .with_min_p(0.5)
            .with_top_k(3),
        options()
            .with_temperature(1.0)
            .with_xtc_probability(1.0)
            .with_xtc_threshold(0.0),
        options()
            .with_temperature(1.0)
            .with_top_k(4)
            .with_top_p(0.5),
        options()
            .with_temperature(1.0)
            .with_repeat_penalty(2.0)
            .with_frequency_penalty(5.0),
    ] {
        assert_eq!(
            draws(&mut sampler(&o, &[], 4), &only, 3),
            [2, 2, 2],
            "{o:?}"
        );
        // A token with an infinite logit must always be drawn.
        let certain = [1.0, 0.0, f32::INFINITY, NO];
        assert_eq!(draw(&mut sampler(&o, &[], 4), &certain), 2, "{o:?}");
    }
}

#[test]
fn a_row_draws_the_same_alone_and_in_any_batch() {
    same_alone_and_together(false);
}

#[test]
fn a_row_draws_the_same_alone_and_in_any_batch_on_the_cpu() {
    let cpu = mlx_rs_core::Stream::default_of(mlx_rs_core::Device::cpu()).unwrap();
    cpu.scope(|| same_alone_and_together(true));
}

fn same_alone_and_together(on_cpu: bool) {
    let vocabulary = 300usize;
    let sampler = |o: &GenerateOptions, prompt: &[u32], vocabulary| {
        let c = Context {
            on_cpu,
            ..context(vocabulary)
        };
        Sampler::new(o, prompt, &c).unwrap()
    };
    let base = || options().with_seed(11);
    let all = [
        base(),
        base().with_temperature(0.8),
        base().with_temperature(1.2).with_seed(5),
        base().with_temperature(0.8).with_top_p(0.9),
        base()
            .with_temperature(1.1)
            .with_top_p(0.7)
            .with_min_p(0.01),
        base().with_temperature(0.9).with_top_k(20).with_top_p(0.95),
        base().with_temperature(0.9).with_top_k(20).with_top_p(0.8),
        base().with_temperature(1.0).with_xtc_probability(0.5),
        base()
            .with_temperature(1.0)
            .with_repeat_penalty(1.3)
            .with_presence_penalty(0.5)
            .with_frequency_penalty(0.3),
        base().with_forced_tokens([3, 4]).with_temperature(1.0),
        base()
            .with_logit_bias([(5, 4.0)])
            .with_banned_tokens([6, 7])
            .with_temperature(1.0),
        base()
            .with_temperature(1.0)
            .with_logits_processors([LogitsProcessorFactory::new(|| {
                |_: &[u32], reply: &[u32], logits: &mut [f32]| {
                    logits[reply.len()] += 2.0;
                    Ok(())
                }
            })]),
    ];
    let at = |row: usize, step: usize| -> Vec<f32> {
        (0..vocabulary)
            .map(|v| (((v * 37 + row * 11 + step * 101) % 97) as f32).sin() * 4.0)
            .collect()
    };
    let steps = 6;
    let alone: Vec<Vec<u32>> = all
        .iter()
        .enumerate()
        .map(|(row, o)| {
            let mut s = sampler(o, &[1, 2, 3], vocabulary);
            (0..steps)
                .map(|step| draw(&mut s, &at(row, step)))
                .collect()
        })
        .collect();
    // Rows join at different steps, and leave when their reply has ended.
    let mut samplers: Vec<Sampler> = all
        .iter()
        .map(|o| sampler(o, &[1, 2, 3], vocabulary))
        .collect();
    let mut got = vec![Vec::new(); all.len()];
    for time in 0..steps + 4 {
        let mut present = Vec::new();
        let mut rows = Vec::new();
        let mut values = Vec::new();
        for (row, s) in samplers.iter_mut().enumerate() {
            let start = row % 5;
            if (start..start + steps).contains(&time) {
                values.extend(at(row, time - start));
                present.push(row);
                rows.push(s);
            }
        }
        let x = Array::from_slice(&values, &[rows.len() as i32, vocabulary as i32]).unwrap();
        let tokens = sample(&mut rows, &x).unwrap().tokens;
        for (row, token) in present.iter().zip(tokens.to_vec::<u32>().unwrap()) {
            got[*row].push(token);
        }
    }
    assert_eq!(got, alone);
}

/// Filters and draw, computed from their definitions with full sorts and float64 sums.
struct Reference {
    logits: Vec<f32>,
    /// The inverse of the temperature.
    scale: f64,
    /// The fraction of the total weight at which the cumulative sum stops.
    uniform: f64,
    /// The total probability that top-p must reach.
    p: f64,
}

impl Reference {
    /// Returns all tokens in ascending order of logits. Tokens with equal logits are in order of
    /// ids.
    fn ascending(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = (0..self.logits.len() as u32).collect();
        ids.sort_by(|&a, &b| {
            let (x, y) = (self.logits[a as usize], self.logits[b as usize]);
            x.partial_cmp(&y).unwrap().then(a.cmp(&b))
        });
        ids
    }

    fn max(&self, of: &[u32]) -> f64 {
        let logits = of.iter().map(|&id| f64::from(self.logits[id as usize]));
        logits.fold(f64::NEG_INFINITY, f64::max)
    }

    /// Returns the weights of tokens under `softmax(logits * scale)`, relative to the greatest
    /// weight.
    fn weights(&self, of: &[u32], scale: f64) -> Vec<f64> {
        let max = self.max(of);
        let weight = |&id: &u32| match f64::from(self.logits[id as usize]) {
            x if x == max => 1.0,
            f64::NEG_INFINITY => 0.0,
            x => ((x - max) * scale).exp(),
        };
        of.iter().map(weight).collect()
    }

    /// Applies top-p: removes a token if the more probable tokens already reach the fraction `p` of
    /// `total`.
    fn nucleus(&self, left: &mut Vec<u32>, total: f64) {
        let weights = self.weights(left, 1.0);
        let mut more_probable = 0.0;
        let smallest = weights.iter().rev().take_while(|&w| {
            let keeps = more_probable < self.p * total;
            more_probable += w;
            keeps
        });
        left.drain(..weights.len() - smallest.count().max(1));
    }

    /// Applies min-p.
    fn at_least(&self, min_p: f32, left: &mut Vec<u32>) {
        // Infinite logits have the difference NaN, so `min_p` 0 must not compute a difference.
        let least = match min_p {
            0.0 => f64::NEG_INFINITY,
            p => self.max(left) + f64::from(p).ln(),
        };
        left.retain(|&id| f64::from(self.logits[id as usize]) >= least);
    }

    /// Applies XTC.
    fn exclude_top(&self, threshold: f32, spared: &[u32], left: &mut Vec<u32>) {
        let weights = self.weights(left, 1.0);
        let total: f64 = weights.iter().sum();
        // Equal logits have equal probabilities.
        let above = weights.iter().map(|w| w / total);
        let least = above
            .filter(|&p| p > f64::from(threshold))
            .fold(f64::INFINITY, f64::min);
        let mut weights = weights.iter();
        left.retain(|id| weights.next().unwrap() / total <= least || spared.contains(id));
    }

    /// Returns the token at which the cumulative weight passes `uniform * total`.
    fn draw(&self, left: &[u32]) -> u32 {
        let weights = self.weights(left, self.scale);
        let target = self.uniform * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let mut drawn = left[0];
        for (&id, w) in left.iter().zip(weights) {
            if w > 0.0 {
                drawn = id;
                sum += w;
                if sum > target {
                    break;
                }
            }
        }
        drawn
    }
}

/// Small shifts of the thresholds of the draw and of top-p, because rounding may cross a threshold.
#[derive(Clone, Copy)]
struct Nudge {
    uniform: f64,
    p: f64,
}

impl Nudge {
    const NONE: Nudge = Nudge {
        uniform: 0.0,
        p: 0.0,
    };

    /// Shifts by a few units in the last place of float32, which is the kernel's precision.
    const ALL: [Nudge; 4] = {
        const E: f64 = 1e-6;
        [
            Nudge { uniform: E, p: E },
            Nudge { uniform: E, p: -E },
            Nudge { uniform: -E, p: E },
            Nudge { uniform: -E, p: -E },
        ]
    };
}

/// Draws from the definitions of the stages. The CPU kernel is compared with this reference.
fn by_stages(
    o: &GenerateOptions,
    prompt: &[u32],
    reply: &[u32],
    x: &Array,
    c: &Context<'_>,
    nudge: Nudge,
) -> mlx_rs_core::Result<u32> {
    let step = reply.len() as u64;
    let mut x = x.clone();
    let mut history = [prompt, reply].concat();
    if o.penalties.repeat_window > 0 {
        history.drain(..history.len().saturating_sub(o.penalties.repeat_window));
    }
    if let (true, Some(history)) = (o.penalties.repeat_penalty != 1.0, ids(&history)?) {
        x = repeat_penalty(&x, &history, o.penalties.repeat_penalty)?;
    }
    let mut counts = zeros(x.shape(), Dtype::Float32)?;
    for &token in reply {
        counts = count(&counts, &Array::vector(&[token])?)?;
    }
    x = count_penalty(
        &x,
        &counts,
        o.penalties.presence_penalty,
        o.penalties.frequency_penalty,
    )?;
    let (tokens, biases): (Vec<u32>, Vec<f32>) = o.constraints.logit_bias.iter().unzip();
    if let Some(tokens) = ids(&tokens)? {
        x = add_bias(&x, &tokens, &Array::vector(&biases)?.expand_dims(0)?)?;
    }
    let mut never = o.constraints.banned_tokens.clone();
    if reply.len() < o.stop.min_tokens {
        never.extend(c.eos.iter().chain(&o.stop.stop_tokens));
    }
    if let Some(never) = ids(&never)? {
        x = forbid(&x, &never)?;
    }
    if let Some(&forced) = o.constraints.forced_tokens.get(reply.len()) {
        return Ok(forced);
    }
    if o.sampling.temperature == 0.0 {
        return x.argmax(-1, false)?.item();
    }
    let seed = Seed::new(o.sampling.seed);
    let excludes = seed.coin(step) < o.sampling.xtc_probability;
    let reference = Reference {
        scale: f64::from(filters::inverse(o.sampling.temperature)),
        uniform: seed.uniform(step) + nudge.uniform,
        p: f64::from(o.sampling.top_p) + nudge.p,
        logits: x.to_vec::<f32>()?,
    };
    let by_rank = o.sampling.top_k > 0
        && o.sampling.top_k < c.vocabulary
        && o.sampling.top_k <= 1024
        && !excludes;
    if by_rank {
        // Probabilities are relative to the whole row. The draw begins with the least probable
        // token.
        let mut left = reference.ascending();
        let total = reference.weights(&left, 1.0).iter().sum();
        left.drain(..left.len() - o.sampling.top_k);
        if o.sampling.top_p < 1.0 {
            reference.nucleus(&mut left, total);
        }
        reference.at_least(o.sampling.min_p, &mut left);
        return Ok(reference.draw(&left));
    }
    let mut left = reference.ascending();
    if o.sampling.top_p < 1.0 {
        let total = reference.weights(&left, 1.0).iter().sum();
        reference.nucleus(&mut left, total);
    }
    reference.at_least(o.sampling.min_p, &mut left);
    if excludes {
        let spared: Vec<u32> = c.eos.iter().chain(c.newline).copied().collect();
        reference.exclude_top(o.sampling.xtc_threshold, &spared, &mut left);
    }
    if o.sampling.top_k > 0 {
        left.drain(..left.len().saturating_sub(o.sampling.top_k));
    }
    left.sort_unstable();
    Ok(reference.draw(&left))
}

#[test]
fn the_kernel_draws_as_the_stages_do() {
    let vocabulary = 700usize;
    let c = Context {
        eos: &[3, 690],
        newline: &[5],
        on_cpu: true,
        ..context(vocabulary)
    };
    let base = || options().with_temperature(0.8);
    let all = [
        options(),
        options().with_repeat_penalty(3.0).with_repeat_window(2),
        base(),
        base().with_temperature(3.0).with_min_p(0.1),
        base().with_top_p(0.9),
        base().with_top_p(0.3).with_min_p(0.2),
        base().with_top_k(40),
        base().with_top_k(40).with_top_p(0.8).with_min_p(0.05),
        base().with_top_k(1).with_top_p(0.1),
        base().with_top_k(9000).with_top_p(0.99),
        base().with_xtc_probability(0.5).with_xtc_threshold(0.01),
        base()
            .with_xtc_probability(0.5)
            .with_top_p(0.95)
            .with_min_p(0.02)
            .with_top_k(40)
            .with_repeat_penalty(1.1)
            .with_presence_penalty(0.2)
            .with_frequency_penalty(0.2)
            .with_logit_bias([(5, 1.0), (6, -1.0), (8, -100.0)]),
        base()
            .with_temperature(1.3)
            .with_repeat_penalty(1.4)
            .with_repeat_window(3)
            .with_min_tokens(4)
            .with_stop_tokens([11])
            .with_banned_tokens([12, 13])
            .with_forced_tokens([20, 21]),
        base()
            .with_presence_penalty(-0.5)
            .with_frequency_penalty(0.25)
            .with_repeat_penalty(0.8)
            .with_repeat_window(0),
    ];
    let inf = f32::INFINITY;
    let row = |f: &dyn Fn(usize) -> f32| -> Vec<f32> { (0..vocabulary).map(f).collect() };
    let kinds = [
        row(&|v| ((v * 37 % 97) as f32).sin() * 5.0),
        row(&|v| ((v * 131 % 701) as f32 * 0.37).sin() * 12.0),
        // Ties, and rows in which only a few tokens are possible.
        row(&|_| 1.5),
        row(&|v| (v % 3) as f32),
        row(&|v| if v % 50 == 7 { -2.0 } else { NO }),
        row(&|v| if v == 600 { -80.0 } else { NO }),
        row(&|v| if v % 300 == 9 { inf } else { 0.1 }),
        row(&|v| if v == 30 { 200.0 } else { -200.0 }),
    ];
    let cpu = mlx_rs_core::Stream::default_of(mlx_rs_core::Device::cpu()).unwrap();
    let (mut steps, mut at_borders) = (0, 0);
    cpu.scope(|| {
        for o in &all {
            for (kind, values) in kinds.iter().enumerate() {
                for seed in 0..4 {
                    let o = o.clone().with_seed(seed);
                    let prompt = [3, 600, 9, 9];
                    let x = logits(values);
                    let mut s = Sampler::new(&o, &prompt, &c).unwrap();
                    let mut reply = Vec::new();
                    for _ in 0..6 {
                        let expected =
                            |nudge| by_stages(&o, &prompt, &reply, &x, &c, nudge).unwrap();
                        let drawn = sample(&mut [&mut s], &x).unwrap();
                        let token = drawn.tokens.item::<u32>().unwrap();
                        steps += 1;
                        if token != expected(Nudge::NONE) {
                            at_borders += 1;
                            let near = Nudge::ALL.map(expected);
                            let place = format!("{o:?} of kind {kind}, {reply:?}");
                            assert!(near.contains(&token), "{token}, not {near:?}: {place}");
                        }
                        reply.push(token);
                    }
                }
            }
        }
    });
    assert!(
        at_borders * 200 < steps,
        "{at_borders} of {steps} draws at borders"
    );
}

#[test]
fn logits_of_another_shape_are_refused() {
    let mut s = sampler(&options(), &[], 2);
    let x = Array::from_slice(&[1.0f32; 4], &[2, 2]).unwrap();
    assert!(sample(&mut [&mut s], &x).is_err());
    assert!(sample(&mut [], &x).is_err());
}
