//! Stores caches of computed prompts on disk (`cache/tier/`).

use std::path::Path;

use inference::Result;

use super::Engine;
use super::forward::forward_prompt;
use crate::adapter::hash_of_files;
use crate::arch::Decoder;
use crate::cache::tier::{Computation, Directory, Of, Tier};
use crate::cache::{self, CacheOptions, Caches};
use crate::error::engine as engine_error;

impl Engine {
    /// Whether caches of computed prompts are stored on disk.
    pub fn has_tier(&self) -> bool {
        self.tier.is_some()
    }

    /// Stores caches of computed prompts in `dir`. `variant` names the settings that change the
    /// computed values, apart from the model and the adapter.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn with_tier(mut self, dir: Directory, variant: String) -> Result<Self> {
        let computation = Computation {
            model: self.identity.clone(),
            variant,
            source: self.source.to_string_lossy().into_owned(),
            device: self.stream.device(),
        };
        self.tier = Some(Tier::new(dir, computation)?);
        Ok(self)
    }

    /// Returns the hash of an adapter's files, if prompts are stored on disk. Returns `None` if the
    /// files cannot be read; then prompts with this adapter are not stored.
    pub(super) fn hash_of_adapter(&self, dir: &Path) -> Option<String> {
        self.tier.as_ref()?;
        hash_of_files(dir)
            .inspect_err(|e| tracing::warn!("prompts with this adapter are not kept: {e}"))
            .ok()
    }

    /// Returns the disk tier and the hash of the adapter's files, if caches of `epoch` may be
    /// stored. Returns `None` for an adapter that is not from files, because it has no name.
    fn tier_in(&self, epoch: u64) -> Option<(&Tier, Option<String>)> {
        let tier = self.tier.as_ref()?;
        // Holds the lock so that the adapter cannot change between the reads.
        let adapter = self.adapter.lock();
        if self.prefixes.epoch() != epoch {
            return None;
        }
        match &*adapter {
            None => Some((tier, None)),
            Some(_) => match &*self.adapter_files.lock() {
                Some((since, hash)) if *since == epoch => Some((tier, Some(hash.clone()))),
                _ => None,
            },
        }
    }

    /// Stores the caches of `tokens`, computed in `epoch`, on disk, if the engine has a disk tier.
    pub fn keep_on_disk(
        &self,
        (epoch, salt): (u64, Option<&str>),
        tokens: &[u32],
        caches: &Caches,
    ) {
        if let Some((tier, adapter)) = self.tier_in(epoch) {
            let adapter = adapter.as_deref();
            self.scope(|| tier.put(Of { adapter, salt }, tokens, caches));
        }
    }

    /// Returns caches from disk for a prompt and the number of tokens in them, if they contain
    /// sufficiently more tokens than the caches in memory. `like` are empty caches for the prompt,
    /// with these options.
    pub fn take_from_disk(
        &self,
        (decoder, options): (&dyn Decoder, &CacheOptions),
        (epoch, salt): (u64, Option<&str>),
        prompt: &[u32],
        like: &Caches,
    ) -> Option<(Caches, usize)> {
        let (tier, adapter) = self.tier_in(epoch)?;
        let have = self.prefixes.reach_salted((epoch, salt), prompt, like);
        let adapter = adapter.as_deref();
        let empty = || decoder.new_caches(options);
        let mut one = || {
            let mut caches = empty();
            forward_prompt(decoder, &[0], (&mut caches, None), 1, &mut |_| Ok(()))?;
            cache::eval_caches(&caches).map_err(engine_error("prompt cache"))?;
            Ok(caches)
        };
        let (like, make) = ((like, have), (&empty as &dyn Fn() -> Caches));
        self.scope(|| tier.take(Of { adapter, salt }, prompt, like, (make, &mut one)))
    }
}
