//! The logits of a position must not depend on what is computed beside it, to the bit. Then a reply
//! is the same with any steps of prefill, in any batch, and after any cached prefix.

use crate::common::{fixture, greedy, tiny_names};
use inference::{Interrupt, LoadOptions, Prompt, TextModel, Token};

/// Longer than two blocks of keys.
const PROMPT: u32 = 140;

/// Models that compute a recurrence in chunks if there are many positions, which rounds
/// differently.
const RECURRENT: &[&str] = &[
    "falcon-h1",
    "falcon-h1-norm",
    "granitemoehybrid",
    "granitemoehybrid-dense",
    "mamba2",
    "nemotron-h",
    "nemotron-h-moe",
    "qwen3-5",
    "qwen3-5-moe",
    "qwen3-next",
    "xlstm",
    "xlstm-q4",
    "xlstm-slstm",
];

/// Models whose angles depend on the length of the sequence.
const LENGTH_DEPENDENT: &[&str] = &["internlm2", "internlm3", "phi3"];

/// Models with parts that MLX's operations compute: attention in chunks, or a selection of keys.
/// `llama-modes` has MXFP8 matrices, whose inputs stay floats.
const WITHOUT_KERNELS: &[&str] = &[
    "deepseek-v32",
    "glm-moe-dsa",
    "llama-modes",
    "llama4",
    "llama4-text",
];

/// The names of tiny models that are in none of these lists.
fn names(except: &[&[&str]]) -> Vec<String> {
    let listed = |name: &String| except.iter().any(|list| list.contains(&name.as_str()));
    tiny_names()
        .into_iter()
        .filter(|name| !listed(name))
        .collect()
}

/// The types of KV caches: the default, float16, and packed in 8 and 4 bits.
const CACHES: [Option<u32>; 4] = [None, Some(16), Some(8), Some(4)];

/// Models whose heads can be packed.
const PACKED: &[&str] = &["qwen3-q4", "qwen3-q8"];

/// Models without keys and values.
const WITHOUT_KEYS: &[&str] = &["falcon-mamba", "mamba", "rwkv7"];

/// The names of models, each with each type of caches.
fn cases(except: &[&[&str]]) -> Vec<(String, Option<u32>)> {
    let names = names(except).into_iter();
    names
        .flat_map(|name| CACHES.map(|kv_bits| (name.clone(), kv_bits)))
        .filter(|(name, kv_bits)| match kv_bits {
            None => true,
            Some(16..) => !WITHOUT_KEYS.contains(&name.as_str()),
            Some(_) => PACKED.contains(&name.as_str()),
        })
        .collect()
}

/// A model with the precision that models have by default.
fn load((name, kv_bits): &(String, Option<u32>)) -> Box<dyn TextModel> {
    let options = LoadOptions::new()
        .with_backend("cpu")
        .with_kv_bits(*kv_bits)
        .with_kv_group_size(32);
    inference::load_model(fixture("tiny").join(name), &options).unwrap()
}

fn logits(model: &dyn TextModel, count: usize, all: bool) -> Vec<u32> {
    let vocab = u32::try_from(model.info().vocab_size).unwrap();
    let ids = (0..PROMPT).map(|i| (i * i * 7 + i * 13 + 5) % vocab.min(276));
    let prompt = Prompt::Tokens(ids.take(count).collect());
    let tokens = model.as_token_model().unwrap();
    let output = tokens.logits(&prompt, all, &Interrupt::new()).unwrap();
    output.logits.into_iter().map(f32::to_bits).collect()
}

#[test]
fn logits_of_a_prefix_are_those_of_the_whole_prompt_to_the_bit() {
    if crate::alone::ran_elsewhere(
        "same_bits::logits_of_a_prefix_are_those_of_the_whole_prompt_to_the_bit",
    ) {
        return;
    }
    if !has_one_order() {
        return;
    }
    let mut different = Vec::new();
    for case in cases(&[RECURRENT, LENGTH_DEPENDENT, WITHOUT_KERNELS]) {
        let model = load(&case);
        let all = logits(model.as_ref(), PROMPT as usize, true);
        let width = model.info().vocab_size;
        for n in [1, 2, 7, 17, 64, 65, 127, 129] {
            let last = logits(model.as_ref(), n, false);
            if last != all[(n - 1) * width..n * width] {
                different.push(format!("{case:?} {n}"));
                break;
            }
        }
    }
    assert_eq!(different, Vec::<String>::new());
}

/// Whether the kernels in use add in the same order for any number of rows.
fn has_one_order() -> bool {
    let off = std::env::var("MLX_CPU_KERNELS").is_ok_and(|kernels| kernels == "off");
    !off && ["avx2", "avx512"].contains(&rust_mlx::mlx::cpu::instruction_set())
}

/// The log-probabilities of a reply, in bits.
fn bits(tokens: &[Token]) -> Vec<(u32, u32)> {
    let of = |token: &Token| {
        let logprobs = token.logprobs.as_ref().expect("they were asked for");
        (token.id, logprobs.logprob.to_bits())
    };
    tokens.iter().map(of).collect()
}

/// Expects equal replies in steps and in batches, for all models with caches of this type.
fn replies_are_the_same_in_steps_and_in_batches(kv_bits: Option<u32>) {
    if !has_one_order() {
        return;
    }
    let mut different = Vec::new();
    let without_keys = kv_bits.map_or(&[][..], |_| WITHOUT_KEYS);
    let except = [RECURRENT, LENGTH_DEPENDENT, WITHOUT_KERNELS, without_keys];
    for name in names(&except) {
        let case = (name, kv_bits);
        let model = load(&case);
        let prompts: Vec<Prompt> = [40u32, 3, 21, 80]
            .iter()
            .map(|n| Prompt::Tokens((0..*n).map(|i| (i * 37 + n * 61) % 260 + 16).collect()))
            .collect();
        let options = greedy(12).with_cache_prompt(false).with_logprobs(2);
        let alone = |prompt: &Prompt, step: usize| {
            let options = options.clone().with_prefill_step_size(step);
            let reply = model.generate(prompt, &options).unwrap();
            bits(&reply.collect::<Result<Vec<_>, _>>().unwrap())
        };
        let wanted: Vec<_> = prompts.iter().map(|prompt| alone(prompt, 512)).collect();
        for step in [1, 7, 33] {
            for (prompt, wanted) in prompts.iter().zip(&wanted) {
                if alone(prompt, step) != *wanted {
                    different.push(format!("{case:?}: steps of {step}"));
                    break;
                }
            }
        }
        let together = model.batch_generate(&prompts, &options).unwrap();
        for (result, wanted) in together.iter().zip(&wanted) {
            if bits(&result.tokens) != *wanted {
                different.push(format!("{case:?}: a batch"));
                break;
            }
        }
    }
    assert_eq!(different, Vec::<String>::new());
}

#[test]
fn replies_are_the_same_in_steps_and_in_batches_to_the_bit() {
    if !crate::alone::ran_elsewhere(
        "same_bits::replies_are_the_same_in_steps_and_in_batches_to_the_bit",
    ) {
        replies_are_the_same_in_steps_and_in_batches(CACHES[0]);
    }
}

#[test]
fn replies_with_float16_caches_are_the_same_in_steps_and_in_batches_to_the_bit() {
    if !crate::alone::ran_elsewhere(
        "same_bits::replies_with_float16_caches_are_the_same_in_steps_and_in_batches_to_the_bit",
    ) {
        replies_are_the_same_in_steps_and_in_batches(CACHES[1]);
    }
}
