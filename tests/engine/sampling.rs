//! Tests of sampling and structured output through the contract, on tiny checkpoints. Whole replies
//! must obey the options. `metal-backend/tests/engine/samplers.rs` tests each filter.

use crate::common::{greedy, tiny};
use inference::{
    ErrorKind, FinishReason, GenerateOptions, Grammar, LogitsProcessorFactory, Output, Prompt,
    TextModel,
};
use inference_text::reply::{Family, Format, ParserOptions, Piece, Reply, Tools};
use serde_json::Value;

fn prompt() -> Prompt {
    Prompt::Tokens((40..60).collect())
}

fn reply(model: &dyn TextModel, options: &GenerateOptions) -> Output {
    let stream = model.generate(&prompt(), options).unwrap();
    stream.collect_output().unwrap()
}

fn hot(seed: u64) -> GenerateOptions {
    GenerateOptions::new()
        .with_max_tokens(400)
        .with_temperature(1.0)
        .with_seed(seed)
}

#[test]
fn logprobs_are_those_of_the_logits() {
    let model = tiny("llama");
    let options = greedy(8).with_logits(true).with_logprobs(5);
    // Options that change which token is sampled must not change the log-probabilities.
    for options in [
        options.clone(),
        options.with_banned_tokens([5, 6]).with_temperature(0.7),
    ] {
        let mut n = 0;
        for token in model.generate(&prompt(), &options).unwrap() {
            let token = token.unwrap();
            let (logits, logprobs) = (token.logits.unwrap(), token.logprobs.unwrap());
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let total: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
            let expected = |id: u32| f64::from(logits[id as usize] - max) - total.ln();
            assert!((f64::from(logprobs.logprob) - expected(token.id)).abs() < 1e-4);
            assert_eq!(logprobs.top.len(), 5);
            assert!(logprobs.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
            for top in &logprobs.top {
                assert!((f64::from(top.logprob) - expected(top.id)).abs() < 1e-4);
            }
            let best = logits.iter().position(|&l| l == max).unwrap();
            assert_eq!(logprobs.top[0].id as usize, best);
            n += 1;
        }
        assert_eq!(n, 8);
    }
    let none = reply(model.as_ref(), &greedy(4));
    let some = reply(model.as_ref(), &greedy(4).with_logprobs(0));
    assert_eq!(none.tokens, some.tokens);
}

#[test]
fn logprobs_stay_with_their_tokens_while_text_is_held_back() {
    let model = tiny("llama");
    // Both runs disable the prefix cache, because a cached prefix would change the last digits.
    let request = greedy(24).with_logprobs(1).with_cache_prompt(false);
    let plain: Vec<_> = model
        .generate(&prompt(), &request)
        .unwrap()
        .map(Result::unwrap)
        .collect();
    // Each time the stop string begins, tokens are withheld. The stop string never completes, so
    // they must follow later.
    let first: String = plain[3].text.chars().take(1).collect();
    let stops = vec![format!("{first}\u{1}\u{2}"), String::from(" \u{1}")];
    let delayed: Vec<_> = model
        .generate(&prompt(), &request.clone().with_stop(stops))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(delayed, plain);
}

#[test]
fn every_json_reply_fits_its_schema() {
    let grammar = Grammar::from_json_schema(
        r#"{"type": "object", "additionalProperties": false, "required": ["city", "people", "rivers"],
            "properties": {"city": {"type": "string", "maxLength": 10},
                           "people": {"type": "integer", "minimum": 1, "maximum": 99999999},
                           "rivers": {"type": "array", "maxItems": 3,
                                      "items": {"enum": ["Seine", "Spree", "Limmat"]}}}}"#,
    )
    .unwrap();
    for name in ["llama", "qwen2", "gemma"] {
        let model = tiny(name);
        for seed in 0..4 {
            let mut options = hot(seed).with_grammar(grammar.clone());
            if seed == 0 {
                options = options.with_temperature(0.0);
            }
            let out = reply(model.as_ref(), &options);
            assert_eq!(out.finish_reason, Some(FinishReason::Stop), "{}", out.text);
            let value: Value = serde_json::from_str(&out.text)
                .unwrap_or_else(|e| panic!("{name}, seed {seed}: {e}: {}", out.text));
            assert!(value["city"].as_str().unwrap().chars().count() <= 10);
            assert!((1..=99_999_999).contains(&value["people"].as_i64().unwrap()));
            assert!(value["rivers"].as_array().unwrap().len() <= 3);
        }
    }
}

/// In formats whose arguments are not JSON, the parser must read a forced call whose arguments fit
/// the schema.
#[test]
fn every_forced_call_fits_its_schema() {
    let tools = Tools::from_json(&serde_json::json!([{"name": "weather", "parameters": {
        "type": "object", "additionalProperties": false, "required": ["city", "days", "units"],
        "properties": {"city": {"type": "string", "maxLength": 10},
                       "days": {"type": "integer", "minimum": 1, "maximum": 9},
                       "units": {"type": "array", "minItems": 1, "maxItems": 3,
                                 "items": {"enum": ["C", "mm", "km/h"]}},
                       "brief": {"type": "boolean"}}}}]));
    let model = tiny("llama");
    for family in [
        Family::Qwen3Coder,
        Family::Glm4Moe,
        Family::MiniMax,
        Family::Pythonic,
        Family::Lfm2,
        Family::Olmo3,
        Family::FunctionGemma,
        Family::Gemma4,
    ] {
        let calls = family.call_grammar(&tools, Some("weather"), 0, &mut String::new);
        let grammar = Grammar::Lark(calls.unwrap().lark("", true));
        for seed in 0..2 {
            let out = reply(model.as_ref(), &hot(seed).with_grammar(grammar.clone()));
            let text = &out.text;
            assert_eq!(
                out.finish_reason,
                Some(FinishReason::Stop),
                "{family}: {text}"
            );
            let options = ParserOptions::default().with_tools(tools.clone());
            let mut parser = Format::for_family(family).parser(options);
            let mut events = parser.feed(Piece::text(text));
            events.extend(parser.finish());
            let read = Reply::collect(events);
            let [call] = read.calls.as_slice() else {
                panic!("{family}: {text}")
            };
            assert_eq!((call.name.as_str(), read.content.as_str()), ("weather", ""));
            let value: Value = serde_json::from_str(&call.arguments).unwrap();
            let city = value["city"].as_str().expect(text);
            assert!(city.chars().count() <= 10, "{family}: {text}");
            assert!((1..=9).contains(&value["days"].as_i64().expect(text)));
            let units = value["units"].as_array().expect(text);
            assert!((1..=3).contains(&units.len()), "{family}: {text}");
            assert!(
                units
                    .iter()
                    .all(|unit| ["C", "mm", "km/h"].contains(&unit.as_str().unwrap()))
            );
            assert!(
                value.get("brief").is_none_or(Value::is_boolean),
                "{family}: {text}"
            );
        }
    }
}

#[test]
fn expressions_and_grammars_hold_with_everything_else_on() {
    let model = tiny("llama-q4");
    let busy = |seed| {
        hot(seed)
            .with_top_k(5)
            .with_top_p(0.9)
            .with_min_p(0.05)
            .with_xtc_probability(0.5)
            .with_repeat_penalty(1.3)
            .with_presence_penalty(0.5)
            .with_frequency_penalty(0.5)
            .with_logit_bias([(20, 5.0)])
            .with_logprobs(2)
    };
    for seed in 0..6 {
        let regex = Grammar::Regex("(cat|dog|bird)( and (cat|dog|bird)){1,3}\\.".into());
        let out = reply(model.as_ref(), &busy(seed).with_grammar(regex));
        let text = out.text.strip_suffix('.').expect(&out.text);
        let words: Vec<&str> = text.split(" and ").collect();
        assert!((2..=4).contains(&words.len()), "{text}");
        assert!(
            words.iter().all(|w| ["cat", "dog", "bird"].contains(w)),
            "{text}"
        );

        let lark = Grammar::Lark("start: \"[\" (\"x\" | \"y\")~2..5 \"]\"".into());
        let out = reply(model.as_ref(), &busy(seed).with_grammar(lark));
        let inside = out.text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
        let inside = inside.expect(&out.text);
        assert!((2..=5).contains(&inside.len()), "{}", out.text);
        assert!(inside.chars().all(|c| "xy".contains(c)), "{}", out.text);
    }
}

#[test]
fn a_cut_reply_is_the_beginning_of_one_that_fits() {
    let model = tiny("llama");
    let options = hot(3)
        .with_max_tokens(6)
        .with_grammar(Grammar::Regex("[ab]{20}".into()));
    let out = reply(model.as_ref(), &options);
    assert_eq!(out.finish_reason, Some(FinishReason::Length));
    assert!(!out.text.is_empty() && out.text.chars().all(|c| "ab".contains(c)));
    // If the grammar requires the end, the reply may be shorter than the minimal length.
    let options = hot(3)
        .with_min_tokens(300)
        .with_grammar(Grammar::Regex("[ab]{3}".into()));
    let out = reply(model.as_ref(), &options);
    assert_eq!(
        (out.text.len(), out.finish_reason),
        (3, Some(FinishReason::Stop))
    );
}

#[test]
fn bad_grammars_are_errors_before_anything_runs() {
    let model = tiny("llama");
    for grammar in [
        Grammar::JsonSchema(serde_json::json!({"type": "thing"})),
        Grammar::JsonSchema(serde_json::json!(["object"])),
        Grammar::Regex("[".into()),
        Grammar::Lark("nothing".into()),
    ] {
        let options = greedy(4).with_ignore_eos(false).with_grammar(grammar);
        let e = model.generate(&prompt(), &options).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidOption, "{e}");
    }
    // If a forced token does not match the grammar, the request fails at that token's step.
    let options = hot(1)
        .with_forced_tokens([50, 51, 52])
        .with_grammar(Grammar::Regex("yes|no".into()));
    let result = model.generate(&prompt(), &options).unwrap();
    let e = result.collect_output().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidOption, "{e}");
}

#[test]
fn bans_forced_tokens_and_minimal_length_hold() {
    let model = tiny("llama");
    let plain = reply(model.as_ref(), &greedy(12)).tokens;
    let banned = reply(
        model.as_ref(),
        &greedy(12).with_banned_tokens(plain.clone()),
    )
    .tokens;
    assert!(banned.iter().all(|id| !plain.contains(id)));
    let forced = reply(model.as_ref(), &greedy(12).with_forced_tokens([70, 71])).tokens;
    assert_eq!(forced[..2], [70, 71]);
    // After forced tokens, the reply equals the reply to a prompt that ends with the same tokens.
    let longer = Prompt::Tokens((40..60).chain([70, 71]).collect());
    let after = model.generate(&longer, &greedy(10)).unwrap();
    assert_eq!(after.collect_output().unwrap().tokens, forced[2..]);
    // `plain[0]` would end the reply, so it must not appear before the minimal length.
    let stop = plain[0];
    let options = greedy(12).with_stop_tokens([stop]);
    assert_eq!(reply(model.as_ref(), &options).tokens.len(), 0);
    let options = options.with_min_tokens(5);
    assert!(reply(model.as_ref(), &options).tokens.len() >= 5);
    let e = model
        .generate(&prompt(), &greedy(4).with_banned_tokens([1_000_000]))
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidOption);
}

#[test]
fn penalties_keep_a_reply_from_repeating_itself() {
    let model = tiny("llama");
    let distinct = |options: &GenerateOptions| {
        let tokens = reply(model.as_ref(), options).tokens;
        let n = tokens.len();
        (
            tokens
                .into_iter()
                .collect::<std::collections::HashSet<_>>()
                .len(),
            n,
        )
    };
    for options in [
        greedy(40).with_presence_penalty(1e6),
        greedy(40).with_frequency_penalty(1e6),
        greedy(40).with_logits_processors([LogitsProcessorFactory::new(|| {
            |_: &[u32], reply: &[u32], logits: &mut [f32]| {
                for &id in reply {
                    logits[id as usize] = f32::NEG_INFINITY;
                }
                Ok(())
            }
        })]),
    ] {
        assert_eq!(distinct(&options), (40, 40));
    }
}

#[test]
fn a_failing_processor_ends_its_reply_only() {
    let model = tiny("llama");
    let failing = LogitsProcessorFactory::new(|| {
        |_: &[u32], reply: &[u32], _: &mut [f32]| {
            if reply.len() == 3 {
                return Err(inference::Error::new(ErrorKind::InvalidOption, "enough"));
            }
            Ok(())
        }
    });
    let options = greedy(10).with_logits_processors([failing]);
    let stream = model.generate(&prompt(), &options).unwrap();
    let results: Vec<_> = stream.collect();
    let e = results.last().unwrap().as_ref().unwrap_err();
    assert!(e.to_string().contains("enough"), "{e}");
    assert_eq!(reply(model.as_ref(), &greedy(5)).tokens.len(), 5);
}

/// Hostile schemas are refused and large schemas compile, on a stack as small as those of server
/// threads.
#[test]
fn grammars_need_no_stack_of_the_caller() {
    let model = tiny("llama");
    let model = model.as_ref();
    let prompt = prompt();
    let with = |schema| {
        greedy(4)
            .with_ignore_eos(false)
            .with_grammar(Grammar::JsonSchema(schema))
    };
    let chain = |n: usize| {
        let refer = |i: usize| serde_json::json!({"$ref": format!("#/$defs/d{i}")});
        let mut defs: serde_json::Map<String, serde_json::Value> =
            (1..n).map(|i| (format!("d{i}"), refer(i + 1))).collect();
        defs.insert(format!("d{n}"), serde_json::json!({"type": "integer"}));
        serde_json::json!({"$defs": defs, "$ref": "#/$defs/d1"})
    };
    std::thread::scope(|scope| {
        // This thread creates and drops the deeply nested value, so it needs a large stack.
        let large = std::thread::Builder::new().stack_size(1 << 30);
        let all = || {
            let deep = (0..100_000).fold(serde_json::Value::Null, |inner, _| {
                serde_json::Value::Object([(String::from("items"), inner)].into_iter().collect())
            });
            let refused = [with(deep), with(chain(20_000))];
            let works = with(chain(1000));
            std::thread::scope(|scope| {
                let small = std::thread::Builder::new().stack_size(256 << 10);
                let calls = || {
                    let invalid = |error: inference::Error| {
                        assert_eq!(error.kind(), ErrorKind::InvalidOption);
                        assert!(
                            error.to_string().contains("JSON schema is too large"),
                            "{error}"
                        );
                    };
                    let one = std::slice::from_ref(&prompt);
                    for options in &refused {
                        invalid(model.generate(&prompt, options).err().unwrap());
                        let hello = [inference::Message::user("hello")];
                        invalid(model.chat(&hello, options).err().unwrap());
                        invalid(model.classify(one, options, false).unwrap_err());
                        invalid(model.batch_generate(one, options).unwrap_err());
                        let mut session = model.batch_session().unwrap();
                        invalid(session.add(&prompt, options).unwrap_err());
                    }
                    let text = reply(model, &works).text;
                    assert!(
                        text.trim_start_matches('-').parse::<i64>().is_ok(),
                        "{text}"
                    );
                };
                small.spawn_scoped(scope, calls).unwrap().join().unwrap();
            });
        };
        large.spawn_scoped(scope, all).unwrap().join().unwrap();
    });
}
