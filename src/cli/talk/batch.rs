//! `mlx batch`: runs many prompts together, and writes one line of JSON per prompt.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;

use inference::{BatchEvent, CancelToken, Error, ErrorKind, FinishReason, RequestId, TextModel};
use serde_json::{Value, json};

use crate::cli::options::engine::{DraftArgs, EngineArgs};
use crate::cli::options::load::{LoadArgs, ModelArgs, at_least_one, load_drafted};
use crate::cli::options::records::{InputArgs, Record};
use crate::cli::options::sampling::SamplingArgs;
use crate::cli::options::steer::SteerArgs;
use crate::cli::terminal::console::Console;
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;
use crate::cli::terminal::progress::CountBar;

/// Maximum length of a results line that is read again, far above any reply.
const MAX_LINE: u64 = 64 << 20;

/// Generate replies to many prompts together; reads and writes JSON lines
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    input: InputArgs,
    /// Append the results to this file instead of printing them; prompts that already have results
    /// in the file are skipped, so an interrupted run continues
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Number of prompts that run together
    #[arg(long, visible_alias = "parallel", value_name = "N", default_value = "8", value_parser = at_least_one)]
    batch_size: usize,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    draft: DraftArgs,
    #[command(flatten)]
    steer: SteerArgs,
    #[command(flatten)]
    load: LoadArgs,
}

pub fn run(args: &Args, console: &mut Console<'_>) -> Result<(), Failure> {
    let mut options = args.sampling.options()?;
    args.engine.apply(&mut options)?;
    args.draft.apply(&mut options)?;
    options.steering = args.steer.read()?;
    let mut records = args.input.read(console)?;
    if let Some(path) = &args.output {
        let done = finished(path)?;
        records.retain(|record| !done.contains(&record.index));
    }
    let draft = args.draft.draft_model.as_deref();
    let loaded = load_drafted(&args.model, &args.load, draft, console)?;
    let cancel = CancelToken::new();
    options.interrupt.cancel = Some(cancel.clone());
    options.interrupt.deadline = args.sampling.start();
    let guard = console
        .catches_interrupts
        .then(|| cancel_on_interrupt(&cancel));
    let ran = args.answer(loaded.model.as_ref(), records, &options, console);
    drop(guard);
    ran
}

/// The numbers of the prompts that have results in the file. A last line that a crash truncated is
/// removed.
fn finished(path: &std::path::Path) -> Result<Vec<usize>, Failure> {
    let fault = |e: std::io::Error| Failure::failed(format!("{}: {e}", path.display()));
    // The type is checked before opening, because opening a pipe would block.
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        Ok(_) => {
            return Err(Failure::failed(format!(
                "{} is not a regular file, which --output needs: it is read for results of an \
                 interrupted run; leave out --output to print the results",
                path.display()
            )));
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(fault(e)),
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(fault)?;
    let mut reader = BufReader::new(&file);
    let (mut done, mut complete_bytes, mut line) = (Vec::new(), 0u64, String::new());
    loop {
        line.clear();
        let n = (&mut reader)
            .take(MAX_LINE)
            .read_line(&mut line)
            .map_err(fault)?;
        if n == 0 {
            break;
        }
        if n as u64 == MAX_LINE && !line.ends_with('\n') {
            return Err(Failure::failed(format!(
                "{} holds a line of more than {MAX_LINE} bytes, which is no result of this \
                 command; choose another file",
                path.display()
            )));
        }
        if !line.ends_with('\n') {
            file.set_len(complete_bytes).map_err(fault)?;
            break;
        }
        complete_bytes += n as u64;
        let index = serde_json::from_str::<Value>(&line)
            .ok()
            .filter(|v| v["error"].is_null())
            .and_then(|v| v["index"].as_u64());
        match (index, serde_json::from_str::<Value>(&line).is_ok()) {
            (Some(index), _) => done.push(usize::try_from(index).unwrap_or(usize::MAX)),
            // A prompt that failed runs again.
            (None, true) => {}
            (None, false) => {
                return Err(Failure::failed(format!(
                    "{} holds a line that is no result of this command; choose another file",
                    path.display()
                )));
            }
        }
    }
    Ok(done)
}

/// The result of a prompt.
fn result(record: &Record, text: &str, tokens: &[u32], end: Result<FinishReason, &Error>) -> Value {
    let mut value = json!({"index": record.index});
    if let Some(id) = &record.id {
        value["id"] = id.clone();
    }
    value["text"] = text.into();
    value["tokens"] = tokens.into();
    match end {
        Ok(reason) => value["finish_reason"] = reason.as_str().into(),
        Err(error) => value["error"] = crate::cli::terminal::failure::chain(error).into(),
    }
    value
}

impl Args {
    fn answer(
        &self,
        model: &dyn TextModel,
        records: Vec<Record>,
        options: &inference::GenerateOptions,
        console: &mut Console<'_>,
    ) -> Result<(), Failure> {
        let bar = CountBar::start("prompts", records.len() as u64, console);
        let mut file = match &self.output {
            Some(path) => Some(
                OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(path)
                    .map_err(|e| Failure::failed(format!("{}: {e}", path.display())))?,
            ),
            None => None,
        };
        let mut write = |value: &Value, console: &mut Console<'_>| -> Result<(), Failure> {
            bar.advance(1);
            match &mut file {
                // Each line is a single write, so a crash leaves at most one incomplete line.
                Some(file) => file
                    .write_all(format!("{value}\n").as_bytes())
                    .map_err(|e| Failure::failed(format!("cannot write results: {e}"))),
                None => console.json(value),
            }
        };
        let mut session = model.batch_session()?;
        let mut running: BTreeMap<RequestId, (Record, String, Vec<u32>)> = BTreeMap::new();
        let mut waiting = records.into_iter();
        let (mut failed, mut stopped, mut total) = (0usize, None, 0usize);
        let started = std::time::Instant::now();
        let mut generated = 0usize;
        loop {
            while stopped.is_none()
                && session.len() < self.batch_size
                && let Some(record) = waiting.next()
            {
                total += 1;
                let added = record
                    .ask
                    .prompt(model)
                    .and_then(|prompt| session.add(&prompt, options));
                match added {
                    Ok(row) => {
                        running.insert(row, (record, String::new(), Vec::new()));
                    }
                    Err(error) => {
                        failed += 1;
                        write(&result(&record, "", &[], Err(&error)), console)?;
                    }
                }
            }
            if session.is_empty() {
                break;
            }
            for event in session.step()? {
                let row = event.row();
                match event {
                    BatchEvent::Token { token, .. } => {
                        if let Some((_, text, tokens)) = running.get_mut(&row) {
                            text.push_str(&token.text);
                            tokens.push(token.id);
                            generated += 1;
                        }
                    }
                    BatchEvent::Done { reason, .. } => {
                        if let Some((record, text, tokens)) = running.remove(&row) {
                            write(&result(&record, &text, &tokens, Ok(reason)), console)?;
                        }
                    }
                    BatchEvent::Failed { error, .. } => {
                        let Some((record, text, tokens)) = running.remove(&row) else {
                            continue;
                        };
                        if matches!(
                            error.kind(),
                            ErrorKind::Cancelled | ErrorKind::DeadlineExceeded
                        ) {
                            // An interrupted prompt gets no result, so the next run computes it.
                            stopped.get_or_insert(error);
                        } else {
                            failed += 1;
                            write(&result(&record, &text, &tokens, Err(&error)), console)?;
                        }
                    }
                    _ => {}
                }
            }
        }
        drop(bar);
        let seconds = started.elapsed().as_secs_f64();
        console.note(&format!(
            "{total} prompts, {failed} failed | {generated} tokens, {:.1} tok/s | {seconds:.2} s",
            generated as f64 / seconds.max(1e-9)
        ));
        if let Some(error) = stopped {
            return Err(error.into());
        }
        if failed > 0 {
            return Err(Failure::failed(format!(
                "{failed} of {total} prompts failed; their lines say why"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(unix)]
    use std::path::Path;

    #[test]
    fn finished_prompts_are_known_and_torn_lines_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.jsonl");
        assert!(finished(&path).unwrap().is_empty());
        std::fs::write(
            &path,
            "{\"index\":3,\"text\":\"a\"}\n{\"index\":1,\"error\":\"no\"}\n{\"index\":5,\"te",
        )
        .unwrap();
        assert_eq!(finished(&path).unwrap(), [3]);
        let left = std::fs::read_to_string(&path).unwrap();
        assert!(left.ends_with("\"no\"}\n"), "{left}");
        std::fs::write(&path, "my novel\n").unwrap();
        assert!(finished(&path).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_regular_file_cannot_be_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/full", &link).unwrap();
        for path in [pipe.as_path(), &link, dir.path(), Path::new("/dev/zero")] {
            let why = finished(path).unwrap_err().report().unwrap();
            assert!(why.contains("not a regular file"), "{why}");
            assert!(why.contains(&path.display().to_string()), "{why}");
        }
    }
}
