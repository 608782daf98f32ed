//! Grammars of the mock: plain alternatives. A logits processor enforces them byte by byte.

use inference::{Grammar, LogitsProcessorFactory};

/// The token that ends a text.
const END: usize = 256;

/// The alternatives of a grammar: those of a regular expression that has only alternatives, or the
/// values of an `enum`.
fn alternatives(grammar: &Grammar) -> Vec<String> {
    match grammar {
        Grammar::Regex(text) => text.split('|').map(String::from).collect(),
        Grammar::JsonSchema(schema) => {
            let values = schema["enum"].as_array().unwrap();
            values.iter().map(ToString::to_string).collect()
        }
        _ => panic!("not for the mock: {grammar:?}"),
    }
}

pub fn is_broken(grammar: &Grammar) -> bool {
    *grammar == Grammar::Regex("(".into()) || grammar.validate().is_err()
}

/// A processor that allows only tokens that lead to one of the alternatives.
pub fn follow(grammar: &Grammar) -> LogitsProcessorFactory {
    let alternatives = alternatives(grammar);
    LogitsProcessorFactory::new(move || {
        let alternatives = alternatives.clone();
        move |_: &[u32], reply: &[u32], logits: &mut [f32]| {
            let said: Vec<u8> = reply.iter().map(|id| u8::try_from(*id).unwrap()).collect();
            let next = |a: &String| match a.as_bytes().strip_prefix(&said[..]) {
                Some([byte, ..]) => Some(usize::from(*byte)),
                Some([]) => Some(END),
                None => None,
            };
            let allowed: Vec<usize> = alternatives.iter().filter_map(next).collect();
            for (id, logit) in logits.iter_mut().enumerate() {
                if !allowed.contains(&id) {
                    *logit = f32::NEG_INFINITY;
                }
            }
            Ok(())
        }
    })
}
