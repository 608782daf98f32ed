//! The pre-tokenizers that GGUF files name: how a text is split into words before the merge rules
//! apply. The expressions are those of the families' `tokenizer.json` files.

use inference::{Error, ErrorKind, Result};
use tokenizers::SplitDelimiterBehavior;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use super::tokenizer::guarded;

// The expressions that split text into words.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
/// Kimi K2 separates Chinese characters from other letters.
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expressions of DeepSeek V3. Each splits the pieces of the preceding one further.
const DEEPSEEK3: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
/// The expressions of DeepSeek V2. The published second expression lists all cased letters; here
/// Unicode classes replace the list.
const DEEPSEEK: [&str; 5] = [
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
];
const DEEPSEEK_CODER: [&str; 4] = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+"];
const YOUTU: [&str; 2] = [
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
/// Cohere's newer models group digits from the end of a number.
const COHERE: [&str; 2] = [r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O];
/// Arcee's models group digits from the end of a number, and separate Asian scripts: Chinese,
/// Japanese, Korean, Thai, Lao, Khmer and Burmese.
const AFMOE: [&str; 3] = [
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}\x{e40}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+",
    DEEPSEEK3[2],
];
/// Laguna separates lines first.
const LAGUNA: [&str; 2] = [r"[^\n]+|[\n]+", QWEN2];
/// The pre-tokenizer that GGUF readers use if a file names none. Each expression splits the pieces
/// of the preceding one further.
const DEFAULT: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"];

/// Names in `tokenizer.ggml.pre` that [`words`] knows.
pub(super) const KNOWN: [&str; 47] = [
    "default",
    "gpt-2",
    "phi-2",
    "exaone4",
    "jina-es",
    "jina-de",
    "jina-v2-es",
    "jina-v2-de",
    "jina-v2-code",
    "olmo",
    "smollm",
    "starcoder",
    "refact",
    "exaone",
    "command-r",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "lfm2",
    "dbrx",
    "glm4",
    "chatglm-bpe",
    "qwen2",
    "deepseek-r1-qwen",
    "stablelm2",
    "hunyuan",
    "solar-open",
    "qwen35",
    "gpt-4o",
    "llama4",
    "minimax-m2",
    "tekken",
    "deepseek-v3",
    "hunyuan-dense",
    "joyai-llm",
    "deepseek-llm",
    "deepseek-coder",
    "kimi-k2",
    "youtu",
    "seed-coder",
    "bailingmoe",
    "bailingmoe2",
    "tiny_aya",
    "cohere2moe",
    "exaone-moe",
    "laguna",
    "afmoe",
];

/// How a named pre-tokenizer splits text.
#[derive(Default)]
pub(super) struct Words {
    pub splits: Vec<PreTokenizerWrapper>,
    /// Whether GPT-2's own expression is applied last.
    pub gpt2: bool,
    /// Whether text is normalized to composed characters (Unicode NFC) first.
    pub nfc: bool,
    /// Whether a word that is a token becomes this token, whatever the merge rules.
    pub known_words: bool,
    /// Whether a text starts with the bos token, if the file does not specify it.
    pub bos: bool,
}

impl Words {
    /// Words that these expressions split, one after another.
    fn split_by(expressions: &[&str]) -> Result<Self> {
        let split = |expression: &&str| {
            guarded("split", || {
                Split::new(
                    SplitPattern::Regex((*expression).to_owned()),
                    SplitDelimiterBehavior::Isolated,
                    false,
                )
            })
            .map(PreTokenizerWrapper::from)
        };
        Ok(Self {
            splits: expressions.iter().map(split).collect::<Result<_>>()?,
            ..Self::default()
        })
    }

    /// Makes each digit a word of its own.
    fn single_digits(mut self) -> Self {
        self.splits.push(Digits::new(true).into());
        self
    }

    /// Splits these words further by GPT-2's expression.
    fn then_gpt2(self) -> Self {
        Self { gpt2: true, ..self }
    }

    /// Normalizes text to composed characters first.
    fn composed(self) -> Self {
        Self { nfc: true, ..self }
    }

    /// Keeps words that are tokens whole, and starts texts with a bos token.
    fn whole(self) -> Self {
        Self {
            known_words: true,
            bos: true,
            ..self
        }
    }
}

/// The pre-tokenizer with a name in `tokenizer.ggml.pre`.
///
/// # Errors
/// `Unsupported` for an unknown name; the message lists the known names.
pub(super) fn words(pre: Option<&str>) -> Result<Words> {
    let by = |expression: &str| Words::split_by(&[expression]);
    let digits = || Words::default().single_digits().then_gpt2();
    Ok(match pre.unwrap_or("default") {
        // llama.cpp splits text for `exaone4` as for GPT-2.
        "gpt-2" | "phi-2" | "exaone4" => Words::default().then_gpt2(),
        "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" | "jina-v2-code" => {
            Words::default().then_gpt2()
        }
        "olmo" => Words::default().then_gpt2().composed(),
        "smollm" | "starcoder" | "refact" | "exaone" => digits(),
        "command-r" => digits().composed(),
        "llama-bpe" | "llama3" | "llama-v3" | "lfm2" => by(LLAMA3)?.whole(),
        // `dbrx` is the pre-tokenizer of OLMo 2 and 3.
        "dbrx" | "glm4" | "chatglm-bpe" => by(LLAMA3)?,
        "qwen2" | "deepseek-r1-qwen" => by(QWEN2)?.composed(),
        "stablelm2" | "hunyuan" | "solar-open" => by(QWEN2)?,
        "qwen35" => by(QWEN35)?.composed(),
        "gpt-4o" | "llama4" | "minimax-m2" => by(GPT4O)?,
        "tekken" => by(TEKKEN)?.whole(),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => Words::split_by(&DEEPSEEK3)?,
        "deepseek-llm" => Words::split_by(&DEEPSEEK)?.single_digits(),
        "deepseek-coder" => Words::split_by(&DEEPSEEK_CODER)?.single_digits(),
        "kimi-k2" => by(KIMI)?,
        "youtu" => Words::split_by(&YOUTU)?,
        "seed-coder" => by(SEED)?,
        "bailingmoe" | "bailingmoe2" => by(BAILING)?,
        "tiny_aya" | "cohere2moe" => Words::split_by(&COHERE)?,
        "exaone-moe" => by(EXAONE_MOE)?,
        "laguna" => Words::split_by(&LAGUNA)?,
        "afmoe" => Words::split_by(&AFMOE)?,
        "default" => Words::split_by(&DEFAULT)?,
        other => {
            let known = KNOWN.join(", ");
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("pre-tokenizer {other:?} in tokenizer.ggml.pre; supported are {known}"),
            ));
        }
    })
}
