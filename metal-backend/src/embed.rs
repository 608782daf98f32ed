//! Embeds texts and scores documents. Token sequences pass through the network in packs of similar
//! lengths. `sentence.rs` has the steps before and after the network.

use inference::{
    EmbedOptions, Error, ErrorKind, GenerateOptions, Interrupt, Pooling, Prompt, Ranking,
    RerankOptions, Result,
};
use mlx_rs_core::{Array, Dtype};
use serde_json::json;

use crate::arch::Decoder;
use crate::arch::EncoderInput;
use crate::engine::Engine;
use crate::engine::forward::forward_prompt;
use crate::error::engine as engine_error;
use crate::inspect::pooled_states;
use crate::sentence::{Scorer, pooled};
use crate::text::ChatOptions;

/// The maximum number of tokens per encoder pass; a longer text gets its own pass. With this limit,
/// the intermediate results of a block fit the processor's caches.
const PACK: usize = 1024;

/// The token ids of a text or of a text pair, and their segment types.
struct Text {
    ids: Vec<u32>,
    types: Vec<u32>,
}

/// Returns the token ids of a prompt.
///
/// # Errors
/// The errors of [`inference::EmbeddingModel::embedding_tokens`].
pub fn tokens(engine: &Engine, prompt: &Prompt, options: &EmbedOptions) -> Result<Vec<u32>> {
    let ids = engine.sentence().tokens(engine.text(), prompt, options)?;
    engine.check_prompt(&ids)?;
    Ok(ids)
}

/// Computes one vector per prompt.
///
/// # Errors
/// The errors of [`inference::EmbeddingModel::embed`].
pub fn embed(
    engine: &Engine,
    prompts: &[Prompt],
    options: &EmbedOptions,
    interrupt: &Interrupt,
) -> Result<Vec<Vec<f32>>> {
    engine.check_open()?;
    let sentence = engine.sentence();
    options.validate(sentence.info())?;
    let pooling = sentence.pooling(options);
    let tokens = prompts
        .iter()
        .enumerate()
        .map(|(i, prompt)| {
            tokens(engine, prompt, options).map_err(|e| e.context(format!("prompt {i}")))
        })
        .collect::<Result<Vec<_>>>()?;
    let decoder = engine.decoder()?;
    let vectors = match decoder.encoder() {
        None => pooled_states(engine, &tokens, pooling, interrupt)?,
        Some(_) => {
            let texts: Vec<Text> = tokens
                .into_iter()
                .map(|ids| Text {
                    types: vec![0; ids.len()],
                    ids,
                })
                .collect();
            let hidden = engine.info().hidden_size;
            let mut vectors = vec![Vec::new(); texts.len()];
            let run = Run {
                engine,
                decoder: decoder.as_ref(),
                interrupt,
            };
            run.packs(&texts, &mut |members, states, _| {
                let states = states.astype(Dtype::Float32)?.to_vec::<f32>()?;
                let mut from = 0;
                for &i in members {
                    let to = from + texts[i].ids.len() * hidden;
                    let vector = states.get(from..to).unwrap_or_default();
                    vectors[i] = pooled(vector, hidden, pooling);
                    from = to;
                }
                Ok(())
            })?;
            vectors
        }
    };
    engine.scope(|| sentence.finish(vectors, options))
}

/// Computes one score per document.
///
/// # Errors
/// The errors of [`inference::RerankModel::rerank`].
pub fn rerank(
    engine: &Engine,
    (query, documents): (&str, &[String]),
    options: &RerankOptions,
    interrupt: &Interrupt,
) -> Result<Ranking> {
    let bad = |message: &str| Err(Error::new(ErrorKind::InvalidOption, message));
    engine.check_open()?;
    if options.max_length == Some(0) {
        return bad("max_length is 0; it must be at least 1");
    }
    let ranking = match engine.sentence().scorer() {
        Some(scorer) => judged(engine, scorer, (query, documents), options, interrupt)?,
        None if options.instruction.is_some() => {
            return bad("instruction: this model reads a query and a document only");
        }
        None => classified(engine, (query, documents), options, interrupt)?,
    };
    let Ranking {
        mut scores, tokens, ..
    } = ranking;
    if !options.raw_scores {
        for score in &mut scores {
            *score = (1.0 / (1.0 + (-f64::from(*score)).exp())) as f32;
        }
    }
    Ok(Ranking::new(scores, tokens))
}

/// Scores documents with an encoder's classifier.
fn classified(
    engine: &Engine,
    (query, documents): (&str, &[String]),
    options: &RerankOptions,
    interrupt: &Interrupt,
) -> Result<Ranking> {
    let most = engine.sentence().most(options.max_length);
    let mut texts = Vec::with_capacity(documents.len());
    for (i, document) in documents.iter().enumerate() {
        let tokenizer = engine.text().tokenizer();
        let pair = tokenizer.encode_bounded(query, Some(document), most, options.truncate);
        let pair = pair.map_err(|e| e.context(format!("document {i}")))?;
        engine.check_prompt(&pair.ids)?;
        texts.push(Text {
            ids: pair.ids,
            types: pair.types,
        });
    }
    let decoder = engine.decoder()?;
    let Some(encoder) = decoder.encoder() else {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the network is not an encoder",
        ));
    };
    let mut scores = vec![0.0f32; texts.len()];
    let run = Run {
        engine,
        decoder: decoder.as_ref(),
        interrupt,
    };
    run.packs(&texts, &mut |members, states, lengths| {
        let classes = encoder.classify(states, lengths)?;
        let classes = classes.astype(Dtype::Float32)?.to_vec::<f32>()?;
        for (&i, score) in members.iter().zip(classes) {
            scores[i] = score;
        }
        Ok(())
    })?;
    let tokens = texts.iter().map(|text| text.ids.len()).sum();
    Ok(Ranking::new(scores, tokens))
}

/// Scores documents with a decoder that reads the query and the document in one prompt. If the chat
/// template has the roles `query` and `document`, it builds the prompt. Otherwise both texts are
/// concatenated.
fn judged(
    engine: &Engine,
    scorer: &Scorer,
    (query, documents): (&str, &[String]),
    options: &RerankOptions,
    interrupt: &Interrupt,
) -> Result<Ranking> {
    let mut texts = Vec::with_capacity(documents.len());
    for (i, document) in documents.iter().enumerate() {
        let ids = question(engine, scorer, (query, document), options);
        let ids = ids.map_err(|e| e.context(format!("document {i}")))?;
        engine.check_prompt(&ids)?;
        texts.push(ids);
    }
    let tokens = texts.iter().map(Vec::len).sum();
    let scores = match scorer {
        Scorer::Head(layer) => {
            let states = pooled_states(engine, &texts, Pooling::Last, interrupt)?;
            let int = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
            let shape = [int(states.len()), int(engine.info().hidden_size)];
            let score = || {
                let states = Array::from_slice(&states.concat(), &shape)?;
                layer.forward(&states)?.to_f32_vec()
            };
            match texts.is_empty() {
                true => Vec::new(),
                false => engine.scope(score).map_err(engine_error("score"))?,
            }
        }
        Scorer::Words(words) => {
            let logits = last_logits(engine, &texts, interrupt)?;
            let of = |logits: &[f32], id: u32| {
                let logit = usize::try_from(id).ok().and_then(|id| logits.get(id));
                logit.copied().ok_or_else(|| {
                    let message =
                        format!("LogitScore names the token {id}, which is not in the vocabulary");
                    Error::new(ErrorKind::InvalidModel, message)
                })
            };
            let score = |logits: &Vec<f32>| -> Result<f32> {
                let no = words.no.map_or(Ok(0.0), |no| of(logits, no))?;
                Ok(of(logits, words.yes)? - no)
            };
            logits.iter().map(score).collect::<Result<_>>()?
        }
    };
    Ok(Ranking::new(scores, tokens))
}

/// Returns the token ids of a query and a document in one prompt.
fn question(
    engine: &Engine,
    scorer: &Scorer,
    (query, document): (&str, &str),
    options: &RerankOptions,
) -> Result<Vec<u32>> {
    let (sentence, text) = (engine.sentence(), engine.text());
    let most = sentence.most(options.max_length);
    let has_roles = (text.template()).is_some_and(|template| {
        let source = template.source();
        source.contains("query") && source.contains("document")
    });
    if !has_roles {
        let unsupported = |message: &str| Err(Error::new(ErrorKind::Unsupported, message));
        if matches!(scorer, Scorer::Words(_)) {
            return unsupported("the chat template has no roles `query` and `document`");
        }
        if options.instruction.is_some() {
            return unsupported("instruction: the chat template has no place for one");
        }
        let tokenizer = text.tokenizer();
        let pair = tokenizer.encode_bounded(query, Some(document), most, options.truncate)?;
        return Ok(pair.ids);
    }
    let info = sentence.info();
    let default_instruction = info
        .default_prompt
        .as_ref()
        .and_then(|name| info.prompts.get(name));
    let system = options.instruction.as_ref().or(default_instruction);
    let encoded = |document: &str| {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let mut messages: Vec<_> = system.map(|s| message("system", s)).into_iter().collect();
        messages.extend([message("query", query), message("document", document)]);
        let prepared = text.prepare_values(messages, &ChatOptions::default())?;
        Ok::<_, inference::Error>(prepared.ids)
    };
    let ids = encoded(document)?;
    let Some(most) = most.filter(|most| ids.len() > *most) else {
        return Ok(ids);
    };
    let bad = |message: String| Err(Error::new(ErrorKind::InvalidOption, message));
    if !options.truncate {
        return bad(format!(
            "the text has {} tokens; at most {most} are read, and truncate cuts the rest",
            ids.len()
        ));
    }
    // Truncates only the document, so that the template's tokens around it remain.
    let mut document_ids = text.tokenizer().encode_plain(document)?;
    let mut over = ids.len() - most;
    while document_ids.len() > over {
        document_ids.truncate(document_ids.len() - over);
        let ids = encoded(&text.tokenizer().decode(&document_ids)?)?;
        match ids.len().checked_sub(most) {
            None | Some(0) => return Ok(ids),
            Some(more) => over = more,
        }
    }
    bad(format!(
        "the query alone has too many tokens; the model reads at most {most}"
    ))
}

/// Computes the logits after the last token of each prompt.
fn last_logits(
    engine: &Engine,
    prompts: &[Vec<u32>],
    interrupt: &Interrupt,
) -> Result<Vec<Vec<f32>>> {
    let decoder = engine.decoder()?;
    let step = GenerateOptions::default().prefill.prefill_step_size;
    let check = || engine.check_open().and_then(|()| interrupt.check());
    engine.scope(|| {
        let one = |ids: &Vec<u32>| {
            check()?;
            let caches = decoder.new_caches(engine.cache_options());
            let mut caches = caches.for_sequence(ids.len());
            let caches = (&mut caches, None);
            let logits = forward_prompt(decoder.as_ref(), ids, caches, step, &mut |_| check())?;
            logits.to_f32_vec().map_err(engine_error("score"))
        };
        prompts.iter().map(one).collect()
    })
}

/// The engine of a run, and the caller's handle for cancellation.
struct Run<'a> {
    engine: &'a Engine,
    decoder: &'a dyn Decoder,
    interrupt: &'a Interrupt,
}

/// A callback with the indices of texts, their hidden states `[1, T, hidden]`, and their lengths.
type Pack<'a> = dyn FnMut(&[usize], &Array, &[i32]) -> mlx_rs_core::Result<()> + 'a;

impl Run<'_> {
    /// Runs the texts through the encoder in packs.
    fn packs(&self, texts: &[Text], f: &mut Pack<'_>) -> Result<()> {
        // Texts of similar length are packed together.
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|i| texts[*i].ids.len());
        let Some(encoder) = self.decoder.encoder() else {
            return Ok(());
        };
        self.engine.scope(|| {
            let mut rest = order.as_slice();
            while !rest.is_empty() {
                self.engine.check_open()?;
                self.interrupt.check()?;
                let mut total = 0;
                let fitting = rest.iter().take_while(|i| {
                    total += texts[**i].ids.len();
                    total <= PACK
                });
                let (now, later) = rest.split_at(fitting.count().max(1));
                let part = |f: fn(&Text) -> &[u32]| -> Vec<u32> {
                    now.iter()
                        .flat_map(|i| f(&texts[*i]).iter().copied())
                        .collect()
                };
                let (ids, types) = (part(|t| &t.ids), part(|t| &t.types));
                let length = |i: &usize| i32::try_from(texts[*i].ids.len()).unwrap_or(i32::MAX);
                let lengths: Vec<i32> = now.iter().map(length).collect();
                let input = EncoderInput {
                    ids: &ids,
                    types: &types,
                    lengths: &lengths,
                };
                encoder
                    .encode(&input)
                    .and_then(|states| f(now, &states, &lengths))
                    .map_err(engine_error("encode"))?;
                rest = later;
            }
            Ok(())
        })
    }
}

/// Whether the network can score pairs of a query and a document.
pub fn reranks(engine: &Engine) -> bool {
    let decoder = engine.decoder();
    engine.sentence().scorer().is_some()
        || decoder.is_ok_and(|decoder| decoder.encoder().is_some_and(|e| e.labels() == Some(1)))
}
