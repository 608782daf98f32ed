//! Checks of prompt caches in files: saved, loaded and continued.

use std::path::Path;

use inference::{CancelToken, ErrorKind, Interrupt, Prompt};

use super::load::Scratch;
use crate::context::{Context, Verdict, ensure, fail, skip};
use crate::probe::{N, greedy, read, refused, reply, same};

/// Number of ids with which a file is continued.
const MORE: usize = 4;

pub(crate) fn prompt_cache(context: &Context) -> Verdict {
    let model = context.model()?;
    let Some(cache) = model.as_prompt_cache() else {
        return skip("the model saves no prompts");
    };
    let scratch = Scratch::new("prompt")?;
    let path = scratch.0.join("prompt.safetensors");
    interrupted(context, &path)?;
    let count = match cache.save_prompt_cache(&context.prompt(), &path, &Interrupt::new()) {
        Ok(count) => count,
        Err(e) => return fail(format!("save_prompt_cache: {e}")),
    };
    ensure!(path.is_file(), "save_prompt_cache wrote no file");

    // This model has not computed the prompt yet.
    let fresh = context.own_model()?;
    let Some(cache) = fresh.as_prompt_cache() else {
        return fail("the model loaded again saves no prompts");
    };
    let tokens = match cache.load_prompt_cache(&path) {
        Ok(tokens) => tokens,
        Err(e) => return fail(format!("load_prompt_cache of a saved file: {e}")),
    };
    let counted = cache.prompt_cache_len(&path);
    ensure!(
        tokens.len() == count && counted.as_ref().is_ok_and(|n| *n == count) && count > 0,
        "{count} tokens were saved, {} were loaded, and prompt_cache_len says {counted:?}",
        tokens.len()
    );
    if let (true, Some(model)) = (context.capabilities.logits, model.as_token_model()) {
        let ids = model.encode(&context.prompts[0], true);
        ensure!(
            ids.as_ref().is_ok_and(|ids| *ids == tokens),
            "the file has the tokens {tokens:?}, and the prompt {ids:?}"
        );
    }
    // The contract offers no other source of ids that each model knows.
    let more = tokens[..tokens.len().min(MORE)].to_vec();
    let all = Prompt::Tokens([&tokens[..], &more].concat());
    let expected = reply(model.as_ref(), &all, &greedy(N))?;
    let loaded = reply(fresh.as_ref(), &all, &greedy(N))?;
    same("the reply after load_prompt_cache", &loaded, &expected)?;
    let other = context.own_model()?;
    let Some(cache) = other.as_prompt_cache() else {
        return fail("the model loaded again saves no prompts");
    };
    let stream = cache.continue_prompt_cache(&path, &Prompt::Tokens(more), &greedy(N));
    let stream = stream.or_else(|e| fail(format!("continue_prompt_cache: {e}")))?;
    same("the continuation of the file", &read(stream)?.0, &expected)?;

    let Ok(bytes) = std::fs::read(&path) else {
        return skip("the saved file cannot be read");
    };
    let damaged = scratch.0.join("damaged.safetensors");
    if let Err(e) = std::fs::write(&damaged, &bytes[..bytes.len() / 2]) {
        return skip(format!("{} cannot be written: {e}", damaged.display()));
    }
    let answer = cache.load_prompt_cache(&damaged);
    refused("half of a saved file", answer, &[ErrorKind::InvalidModel])?;
    let absent = cache.load_prompt_cache(&scratch.0.join("absent"));
    ensure!(absent.is_err(), "a file that does not exist was loaded");
    Ok(())
}

/// Checks that an interrupted call fails and writes no file.
fn interrupted(context: &Context, path: &Path) -> Verdict {
    let model = context.model()?;
    let Some(cache) = model.as_prompt_cache() else {
        return skip("the model saves no prompts");
    };
    let cancel = CancelToken::new();
    cancel.cancel();
    let interrupt = Interrupt::new().with_cancel(cancel);
    let answer = cache.save_prompt_cache(&context.prompt(), path, &interrupt);
    refused(
        "save_prompt_cache, cancelled,",
        answer,
        &[ErrorKind::Cancelled],
    )?;
    ensure!(
        !path.exists(),
        "save_prompt_cache wrote a file although it was cancelled"
    );
    Ok(())
}
