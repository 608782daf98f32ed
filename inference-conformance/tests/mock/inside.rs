//! The mock's vectors, hidden states, saved prompts and edits. All are computed from ids.

use std::path::Path;

use inference::{
    EmbedOptions, EmbeddingInfo, EmbeddingModel, Error, ErrorKind, HiddenStates, Hook, HookStates,
    Interrupt, LayerHooks, LogitsOutput, Prompt, PromptCacheModel, Ranking, RerankModel,
    RerankOptions, Result, SteerableModel, Steering, SteeringShape,
};

use super::Fault;
use super::model::{Model, error};

/// The elements of a vector.
const DIMENSIONS: usize = 4;
/// The elements of a hidden state.
const HIDDEN: usize = 3;
const BLOCKS: usize = 2;

fn normalized(mut vector: Vec<f32>) -> Vec<f32> {
    let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    vector.iter_mut().for_each(|x| *x /= norm);
    vector
}

fn vector(ids: &[u32], options: &EmbedOptions) -> Vec<f32> {
    let at = |i: usize| ids.get(i).map_or(0.0, |id| *id as f32);
    let sum: u32 = ids.iter().sum();
    let mut vector = vec![ids.len() as f32, sum as f32 / 8.0, at(0), at(ids.len() - 1)];
    vector.truncate(options.dimensions.unwrap_or(DIMENSIONS));
    match options.normalize {
        Some(true) => normalized(vector),
        _ => vector,
    }
}

impl EmbeddingModel for Model {
    fn embedding_info(&self) -> EmbeddingInfo {
        let mut info = EmbeddingInfo::default();
        info.dimensions = DIMENSIONS;
        info
    }

    fn embedding_tokens(&self, prompt: &Prompt, options: &EmbedOptions) -> Result<Vec<u32>> {
        options.validate(&self.embedding_info())?;
        let mut ids = self.checked(prompt, &Interrupt::new())?;
        let most = options.max_length.unwrap_or(usize::MAX);
        if ids.len() > most && !options.truncate && self.fault != Fault::EmbedLongPasses {
            return error(ErrorKind::InvalidOption, "the text is too long");
        }
        ids.truncate(most);
        Ok(ids)
    }

    fn embed(
        &self,
        prompts: &[Prompt],
        options: &EmbedOptions,
        interrupt: &Interrupt,
    ) -> Result<Vec<Vec<f32>>> {
        interrupt.check()?;
        if self.fault != Fault::ClosedEmbeds {
            self.check_open()?;
        }
        let one = |prompt: &Prompt| match self.embedding_tokens(prompt, options) {
            Err(e) if self.fault == Fault::ClosedEmbeds && e.kind() == ErrorKind::Closed => {
                Ok(vec![1.0])
            }
            ids => Ok(vector(&ids?, options)),
        };
        let mut vectors: Vec<_> = prompts.iter().map(one).collect::<Result<_>>()?;
        if self.fault == Fault::EmbedOutOfOrder {
            vectors.reverse();
        }
        Ok(vectors)
    }
}

impl RerankModel for Model {
    fn rerank(
        &self,
        query: &str,
        documents: &[String],
        options: &RerankOptions,
        interrupt: &Interrupt,
    ) -> Result<Ranking> {
        interrupt.check()?;
        if options.max_length == Some(0) {
            return error(ErrorKind::InvalidOption, "max_length is 0");
        }
        let query = self.checked(&query.into(), interrupt)?;
        let mut scores = Vec::new();
        for document in documents {
            let ids = self.checked(&document.into(), interrupt)?;
            scores.push(ids.len() as f32 / 100.0);
        }
        if self.fault == Fault::RerankOutOfOrder {
            scores.reverse();
        }
        Ok(Ranking::new(scores, query.len()))
    }
}

impl Model {
    /// The ids of a prompt, checked as for logits.
    pub fn checked(&self, prompt: &Prompt, interrupt: &Interrupt) -> Result<Vec<u32>> {
        self.check_open()?;
        Ok(self.tokens().logits(prompt, false, interrupt)?.tokens)
    }

    /// The states of a prompt at `positions`.
    pub fn states(
        &self,
        prompt: &Prompt,
        positions: &[usize],
        interrupt: &Interrupt,
    ) -> Result<HiddenStates> {
        let tokens = self.checked(prompt, interrupt)?;
        if positions.iter().any(|p| *p >= tokens.len()) && self.fault != Fault::StatesBeyondPass {
            return error(ErrorKind::InvalidOption, "there is no such position");
        }
        let mut rows = positions.to_vec();
        if self.fault == Fault::StatesSorted {
            rows.sort_unstable();
        }
        let block = |block: usize| {
            let row = |p: &usize| {
                let id = tokens.get(*p).copied().unwrap_or_default();
                let before: u32 = tokens.iter().take(p + 1).sum();
                [(id as usize + block) as f32, *p as f32, before as f32]
            };
            rows.iter().flat_map(row).collect::<Vec<f32>>()
        };
        let mut states = HiddenStates::default();
        states.blocks = (1..=BLOCKS).map(block).collect();
        states.embedding = block(0);
        states.hidden_size = HIDDEN;
        states.positions = positions.to_vec();
        states.tokens = tokens;
        Ok(states)
    }
}

/// The first bytes of a saved prompt.
const MAGIC: &[u8] = b"mock";

impl PromptCacheModel for Model {
    fn save_prompt_cache(
        &self,
        prompt: &Prompt,
        path: &Path,
        interrupt: &Interrupt,
    ) -> Result<usize> {
        let ids = self.checked(prompt, &Interrupt::new())?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend((ids.len() as u32).to_le_bytes());
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        if self.fault != Fault::CacheOfCancelled {
            interrupt.check()?;
        }
        std::fs::write(path, bytes)
            .map_err(|e| Error::new(ErrorKind::Io, e.to_string()).with_path(path))?;
        interrupt.check()?;
        Ok(ids.len())
    }

    fn load_prompt_cache(&self, path: &Path) -> Result<Vec<u32>> {
        self.check_open()?;
        let bytes = std::fs::read(path)
            .map_err(|e| Error::new(ErrorKind::Io, e.to_string()).with_path(path))?;
        let words = bytes.strip_prefix(MAGIC).unwrap_or_default();
        let words = words.as_chunks::<4>().0;
        let mut ids: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let count = ids.first().copied().unwrap_or_default() as usize;
        if ids.len() != count + 1 && self.fault != Fault::CacheDamagedLoads {
            return error(ErrorKind::InvalidModel, "the file is damaged");
        }
        ids.remove(0);
        if self.fault == Fault::CacheChanged {
            ids.reverse();
        }
        Ok(ids)
    }
}

impl SteerableModel for Model {
    fn steering_shape(&self) -> Result<SteeringShape> {
        Ok(SteeringShape::new(
            HIDDEN,
            vec![LayerHooks::default(); BLOCKS],
        ))
    }

    fn steered_logits(
        &self,
        _: &Prompt,
        _: bool,
        _: &Steering,
        _: &Interrupt,
    ) -> Result<LogitsOutput> {
        error(ErrorKind::Unsupported, "the mock edits replies only")
    }

    fn steered_logprobs(&self, _: &Prompt, _: &Steering, _: &Interrupt) -> Result<Vec<f32>> {
        error(ErrorKind::Unsupported, "the mock edits replies only")
    }

    fn hook_states(
        &self,
        _: &Prompt,
        _: &[(usize, Hook)],
        _: &Interrupt,
    ) -> Result<Vec<HookStates>> {
        error(ErrorKind::Unsupported, "the mock edits replies only")
    }
}
