//! Optional abilities through `dyn TextModel`: ids and logits, training, attention. The model is a
//! table: token `n` is followed by token `n + 1`.

use std::path::Path;

use inference::{
    Adapter, AttentionInspector, AttentionSnapshot, BatchResult, ClassifyResult, Error, ErrorKind,
    FinishReason, GenerateMetrics, GenerateOptions, Interrupt, LogitsOutput, LoraConfig, Message,
    ModelInfo, Prompt, Result, TextModel, Token, TokenModel, TokenSource, TokenStream,
    TrainableModel,
};

const VOCAB: u32 = 26;

struct Alphabet;

fn row(after: u32) -> Vec<f32> {
    let next = (after + 1) % VOCAB;
    (0..VOCAB)
        .map(|i| if i == next { 1.0 } else { 0.0 })
        .collect()
}

struct Letters {
    last: u32,
    left: usize,
}

impl Iterator for Letters {
    type Item = Result<Token>;
    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        self.last = (self.last + 1) % VOCAB;
        let text = Alphabet.decode_ids(&[self.last]);
        Some(text.map(|t| Token::new(self.last, t)))
    }
}

impl TokenSource for Letters {
    fn finish_reason(&self) -> Option<FinishReason> {
        (self.left == 0).then_some(FinishReason::Length)
    }
    fn metrics(&self) -> GenerateMetrics {
        GenerateMetrics::default()
    }
}

impl Alphabet {
    fn ids(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        let ids = match prompt {
            Prompt::Text(text) => text
                .bytes()
                .map(|b| u32::from(b).wrapping_sub(97))
                .collect(),
            Prompt::Tokens(ids) => ids.clone(),
            _ => Vec::new(),
        };
        match ids.iter().find(|id| **id >= VOCAB) {
            _ if ids.is_empty() => Err(Error::new(ErrorKind::InvalidOption, "an empty prompt")),
            Some(id) => Err(Error::new(
                ErrorKind::InvalidOption,
                format!("no token {id}"),
            )),
            None => Ok(ids),
        }
    }

    fn decode_ids(&self, ids: &[u32]) -> Result<String> {
        let letter = |id: &u32| {
            let id = u8::try_from(*id).ok().filter(|id| u32::from(*id) < VOCAB);
            id.map(|id| char::from(97 + id))
                .ok_or_else(|| Error::new(ErrorKind::InvalidOption, "no such token"))
        };
        ids.iter().map(letter).collect()
    }
}

impl TextModel for Alphabet {
    fn generate(&self, prompt: &Prompt, options: &GenerateOptions) -> Result<TokenStream> {
        options.validate()?;
        let last = *self.ids(prompt)?.last().unwrap();
        Ok(TokenStream::new(Letters {
            last,
            left: options.max_tokens,
        }))
    }
    fn chat(&self, messages: &[Message], options: &GenerateOptions) -> Result<TokenStream> {
        self.generate(&self.render_chat(messages, true)?.into(), options)
    }
    fn classify(
        &self,
        prompts: &[Prompt],
        _: &GenerateOptions,
        return_logits: bool,
    ) -> Result<Vec<ClassifyResult>> {
        let one = |p: &Prompt| {
            let last = *self.ids(p)?.last().unwrap();
            let id = (last + 1) % VOCAB;
            let token = Token::new(id, self.decode_ids(&[id])?);
            Ok(ClassifyResult::new(token, return_logits.then(|| row(last))))
        };
        prompts.iter().map(one).collect()
    }
    fn batch_generate(&self, p: &[Prompt], o: &GenerateOptions) -> Result<Vec<BatchResult>> {
        let one = |p| match self.generate(p, o) {
            Ok(s) => BatchResult::new(s.flatten().collect(), Some(FinishReason::Length)),
            Err(e) => BatchResult::failed(Vec::new(), e),
        };
        Ok(p.iter().map(one).collect())
    }
    fn model_type(&self) -> &str {
        "alphabet"
    }
    fn info(&self) -> ModelInfo {
        let mut info = ModelInfo::default();
        info.architecture = String::from("alphabet");
        info.vocab_size = VOCAB as usize;
        info
    }
    fn metrics(&self) -> GenerateMetrics {
        GenerateMetrics::default()
    }
    fn close(&self) -> Result<()> {
        Ok(())
    }
    fn as_trainable(&self) -> Option<&dyn TrainableModel> {
        Some(self)
    }
    fn as_attention_inspector(&self) -> Option<&dyn AttentionInspector> {
        Some(self)
    }
    fn as_token_model(&self) -> Option<&dyn TokenModel> {
        Some(self)
    }
}

impl TokenModel for Alphabet {
    fn encode(&self, text: &str, _: bool) -> Result<Vec<u32>> {
        self.ids(&text.into())
    }
    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_ids(ids)
    }
    fn render_chat(&self, messages: &[Message], _: bool) -> Result<String> {
        Ok(messages.iter().map(|m| m.content.as_str()).collect())
    }
    fn logits(&self, prompt: &Prompt, all: bool) -> Result<LogitsOutput> {
        let tokens = self.ids(prompt)?;
        let from = if all { 0 } else { tokens.len() - 1 };
        let logits: Vec<f32> = tokens[from..].iter().flat_map(|id| row(*id)).collect();
        let shape = vec![tokens.len() - from, VOCAB as usize];
        Ok(LogitsOutput::new(tokens, shape, logits))
    }
    fn eos_tokens(&self) -> Vec<u32> {
        vec![25]
    }
}

struct Weights(LoraConfig);

impl Adapter for Weights {
    fn parameter_names(&self) -> Vec<String> {
        let mut names = self.0.targets.clone();
        names.sort();
        names
    }
    fn num_parameters(&self) -> usize {
        self.0.rank * self.0.targets.len()
    }
    fn save(&self, path: &Path) -> Result<()> {
        std::fs::write(path, "a").map_err(|e| {
            Error::new(ErrorKind::Io, "cannot save")
                .with_path(path)
                .with_source(e)
        })
    }
}

impl TrainableModel for Alphabet {
    fn apply_lora(&self, config: &LoraConfig) -> Result<Box<dyn Adapter>> {
        config.validate()?;
        Ok(Box::new(Weights(config.clone())))
    }
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        TokenModel::encode(self, text, false)
    }
    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_ids(ids)
    }
    fn num_layers(&self) -> usize {
        1
    }
}

impl AttentionInspector for Alphabet {
    fn inspect_attention(&self, prompt: &Prompt) -> Result<AttentionSnapshot> {
        let ids = self.ids(prompt)?;
        let mut s = AttentionSnapshot::default();
        (s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim) = (1, 1, 1, 1);
        s.seq_len = ids.len();
        s.keys = vec![vec![ids.iter().map(|id| *id as f32).collect()]];
        Ok(s)
    }
}

fn model() -> Box<dyn TextModel> {
    Box::new(Alphabet)
}

#[test]
fn ids_and_logits() {
    let model = model();
    let tokens = model.as_token_model().unwrap();
    assert_eq!(tokens.encode("abc", true).unwrap(), [0, 1, 2]);
    assert_eq!(tokens.decode(&[25, 0]).unwrap(), "za");
    assert_eq!(
        tokens.decode(&[26]).unwrap_err().kind(),
        ErrorKind::InvalidOption
    );
    let last = tokens
        .logits(&[0, 1].into(), false, &Interrupt::new())
        .unwrap();
    assert_eq!(last.shape, [1, 26]);
    let all = tokens
        .logits(&"ab".into(), true, &Interrupt::new())
        .unwrap();
    assert_eq!((all.shape[0], all.logits.len()), (2, 52));
    assert_eq!(all.logits[26..], last.logits);
    let json = serde_json::to_value(&last).unwrap();
    assert_eq!(json["tokens"], serde_json::json!([0, 1]));
    assert_eq!(json["logits"][2], 1.0);
    assert_eq!(serde_json::from_value::<LogitsOutput>(json).unwrap(), last);
    // The optional trait also gives access to the base traits.
    let text = tokens.generate(&"x".into(), &GenerateOptions::new().with_max_tokens(3));
    assert_eq!(text.unwrap().text().unwrap(), "yza");
    assert_eq!(tokens.eos_tokens(), [25]);
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
    assert_eq!(results[1].logits.as_ref().unwrap().len(), 26);
    let prompts = ["a".into(), [99].into()];
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
