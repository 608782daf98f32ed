//! Tests optional abilities through `dyn TextModel`: ids and logits, training, attention. The model
//! is a table in which each letter has a fixed next letter.

use std::path::Path;

use inference::{
    AttentionSnapshot, ErrorKind, FinishReason, GenerateOptions, Interrupt, LogitsOutput,
    LoraConfig, ModelInfo, Prompt, TextModel,
};
use inference_conformance::scripted::{END, Scripted};

const VOCAB: usize = END as usize + 1;

fn alphabet() -> Scripted {
    let next = |ids: &[u32]| match ids.last() {
        Some(&last) if last != u32::from(b'z') => (last + 1) % VOCAB as u32,
        _ => u32::from(b'a'),
    };
    Scripted::predicting(next).with_training().with_attention()
}

fn model() -> Box<dyn TextModel> {
    Box::new(alphabet())
}

#[test]
fn ids_and_logits() {
    let model = model();
    let tokens = model.as_token_model().unwrap();
    assert_eq!(tokens.encode("abc", true).unwrap(), [97, 98, 99]);
    assert_eq!(tokens.decode(&[122, 97]).unwrap(), "za");
    assert_eq!(
        tokens.decode(&[257]).unwrap_err().kind(),
        ErrorKind::InvalidOption
    );
    let last = tokens
        .logits(&[97, 98].into(), false, &Interrupt::new())
        .unwrap();
    assert_eq!(last.shape, [1, VOCAB]);
    let all = tokens
        .logits(&"ab".into(), true, &Interrupt::new())
        .unwrap();
    assert_eq!((all.shape[0], all.logits.len()), (2, 2 * VOCAB));
    assert_eq!(all.logits[VOCAB..], last.logits);
    let json = serde_json::to_value(&last).unwrap();
    assert_eq!(json["tokens"], serde_json::json!([97, 98]));
    assert_eq!(json["logits"][99], 1.0);
    assert_eq!(serde_json::from_value::<LogitsOutput>(json).unwrap(), last);
    // The optional trait also gives access to the base traits.
    let text = tokens.generate(&"x".into(), &GenerateOptions::new().with_max_tokens(3));
    assert_eq!(text.unwrap().text().unwrap(), "yza");
    assert_eq!(tokens.eos_tokens(), [END]);
}

#[test]
fn training() {
    let model = model();
    let trainable = model.as_trainable().unwrap();
    let adapter = trainable
        .apply_lora(&LoraConfig::new().with_rank(4))
        .unwrap();
    assert_eq!(adapter.parameter_names(), ["q_proj", "v_proj"]);
    assert_eq!(adapter.num_parameters(), 8);
    let e = trainable
        .apply_lora(&LoraConfig::new().with_rank(0))
        .err()
        .unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidOption);
    let e = adapter.save(Path::new("/no/such/directory/a")).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Io);
    assert!(std::error::Error::source(&e).is_some());
}

#[test]
fn attention() {
    let model = model();
    let inspector = model.as_attention_inspector().unwrap();
    let s = inspector
        .inspect_attention(&"abc".into(), &Interrupt::new())
        .unwrap();
    assert_eq!((s.seq_len, s.keys[0][0].len()), (3, 3 * s.head_dim));
    let json = serde_json::to_string(&s).unwrap();
    assert_eq!(serde_json::from_str::<AttentionSnapshot>(&json).unwrap(), s);
}

#[test]
fn many_prompts() {
    let model = model();
    let prompts = [Prompt::from("a"), Prompt::from("y")];
    let results = model
        .classify(&prompts, &GenerateOptions::new(), true)
        .unwrap();
    assert_eq!(results[1].token.text, "z");
    assert_eq!(results[1].logits.as_ref().unwrap().len(), VOCAB);
    let prompts = ["a".into(), [999].into()];
    let options = GenerateOptions::new().with_max_tokens(2);
    let results = model.batch_generate(&prompts, &options).unwrap();
    assert_eq!(results[0].text(), "bc");
    assert!(results[0].error.is_none());
    assert_eq!(results[1].finish_reason, Some(FinishReason::Error));
    let json = serde_json::to_string(&model.info()).unwrap();
    assert_eq!(
        serde_json::from_str::<ModelInfo>(&json).unwrap(),
        model.info()
    );
}
