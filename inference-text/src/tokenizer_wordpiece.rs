//! WordPiece tokenizers from GGUF metadata (BERT). In llama.cpp's files, a piece that starts a word
//! has a space marker in front. A piece that continues a word has no mark.

use inference::{Error, ErrorKind, Result};
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, decoders};

use super::limits::TextLimits;
use super::tokenizer::{Engine, Facts, Tokenizer, guarded};
use inference_formats::GgufTokenizerParts;

/// GGUF's prefix of a piece that starts a word.
const WORD: char = '▁';

/// The usual prefix of a piece that continues a word.
const GOES_ON: &str = "##";

/// The types of special tokens in `tokenizer.ggml.token_type`.
const SPECIAL: [i32; 2] = [2, 3];

fn bad(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidModel, what)
}

/// Builds the tokenizer. It converts texts to lower case without accents, as llama.cpp always does.
///
/// # Errors
/// `InvalidModel` if the metadata contradict themselves.
pub(crate) fn build(parts: &GgufTokenizerParts, limits: &TextLimits) -> Result<Tokenizer> {
    let text = |name: &str, id: Option<u32>| -> Result<&str> {
        let id = id.ok_or_else(|| bad(format!("tokenizer.ggml.{name} is missing")))?;
        let token = usize::try_from(id).ok().and_then(|id| parts.tokens.get(id));
        token.map(String::as_str).ok_or_else(|| {
            bad(format!(
                "tokenizer.ggml.{name} is {id}, outside the vocabulary"
            ))
        })
    };
    let (cls_id, sep_id) = (parts.cls_id.or(parts.bos_id), parts.sep_id.or(parts.eos_id));
    let (cls, sep) = (
        text("cls_token_id", cls_id)?,
        text("seperator_token_id", sep_id)?,
    );
    let unknown = match parts.unk_id {
        Some(id) => text("unknown_token_id", Some(id))?,
        None => "[UNK]",
    };
    let types = parts.token_types.as_deref().unwrap_or_default();
    let is_special = |id: usize, token: &str| {
        types.get(id).is_some_and(|kind| SPECIAL.contains(kind))
            || (token.starts_with('[') && token.ends_with(']'))
    };
    let mut vocab = Vocab::default();
    let mut special = Vec::new();
    for (id, token) in parts.tokens.iter().enumerate() {
        let name = match token.strip_prefix(WORD) {
            _ if is_special(id, token) => {
                special.push(AddedToken::from(token.as_str(), true).normalized(false));
                token.clone()
            }
            Some(word) => word.to_owned(),
            None => format!("{GOES_ON}{token}"),
        };
        let id = u32::try_from(id).unwrap_or(u32::MAX);
        // If several ids have one name, the first id is used.
        vocab.entry(name).or_insert(id);
    }
    if !vocab.contains_key(unknown) {
        return Err(bad(format!(
            "the vocabulary lacks the unknown token {unknown:?}"
        )));
    }
    let model = guarded("build the tokenizer", || {
        WordPiece::builder()
            .vocab(vocab)
            .unk_token(unknown.to_owned())
            .continuing_subword_prefix(GOES_ON.to_owned())
            .build()
    })?;
    let mut engine = Engine::new(model);
    guarded("normalize", || {
        let lower = BertNormalizer::new(true, true, None, true);
        engine.with_normalizer(Some(lower)).map(|_| ())
    })?;
    engine.with_pre_tokenizer(Some(BertPreTokenizer));
    engine.with_decoder(Some(decoders::wordpiece::WordPiece::new(
        GOES_ON.to_owned(),
        true,
    )));
    guarded("add the control tokens", || engine.add_tokens(special))?;
    let around = |form: &str| form.replace("CLS", cls).replace("SEP", sep);
    let processor = guarded("build the tokenizer", || {
        let ids = [(cls, cls_id), (sep, sep_id)];
        let ids: Vec<(String, u32)> = ids
            .into_iter()
            .filter_map(|(token, id)| Some((token.to_owned(), id?)))
            .collect();
        TemplateProcessing::builder()
            .try_single(around("CLS:0 $A:0 SEP:0"))?
            .try_pair(around("CLS:0 $A:0 SEP:0 $B:1 SEP:1"))?
            .special_tokens(ids)
            .build()
            .map_err(Into::into)
    })?;
    engine.with_post_processor(Some(processor));
    let facts = Facts {
        unk: parts.unk_id,
        pad: parts.pad_id,
        vocab_size: Some(parts.tokens.len()),
        ..Facts::default()
    };
    Tokenizer::from_engine(engine, facts, limits.clone())
}
