//! Progress on standard error: bars on a terminal, plain lines otherwise, and nothing with
//! `--quiet`.

use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use inference::GenerateOptions;
use parking_lot::Mutex;
use rust_mlx::hub::{Progress, Stage};

use crate::cli::terminal::console::{Console, bytes};

// The message fills the rest of the line and is truncated there. Otherwise the bar would wrap, and
// each update would fill another line.
const BYTES_BAR: &str = "{wide_msg} [{bar:16}] {bytes}/{total_bytes}{speed}{left}";
const TOKEN_BAR: &str = "{wide_msg} [{bar:16}] {pos}/{len} tokens{left}";
const COUNT_BAR: &str = "{wide_msg} [{bar:16}] {pos}/{len}{left}";
/// How long a prefill must take before it gets a bar.
const PATIENCE: Duration = Duration::from_secs(2);
/// Interval of plain progress lines during a download.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The style of a bar. `{speed}` and `{left}` are shown once they can be computed.
pub fn style(template: &str) -> ProgressStyle {
    // The template is a constant. If it were invalid, the default style would be used.
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
        .with_key(
            "speed",
            |state: &ProgressState, line: &mut dyn fmt::Write| {
                if state.per_sec() >= 1.0 {
                    // Writing into memory cannot fail.
                    let _ = write!(line, " {}/s", bytes(state.per_sec() as u64));
                }
            },
        )
        .with_key(
            "left",
            |state: &ProgressState, line: &mut dyn fmt::Write| {
                if state.pos() > 0 && state.per_sec() > 0.0 {
                    let _ = write!(line, ", {:#} left", HumanDuration(state.eta()));
                }
            },
        )
}

fn bar(total: u64, template: &str, message: String) -> ProgressBar {
    ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr())
        .with_style(style(template))
        .with_message(message)
}

/// A progress bar for a slow prefill, until the first token. Dropping it removes the bar.
pub struct PrefillBar(Option<Arc<Mutex<ProgressBar>>>);

impl PrefillBar {
    /// Makes `options` report the prefill progress, if standard error is a terminal.
    pub fn start(options: &mut GenerateOptions, console: &Console<'_>) -> Self {
        if console.quiet || !console.err_is_terminal {
            return Self(None);
        }
        let hidden = bar(0, TOKEN_BAR, String::from("reading the prompt"));
        hidden.set_draw_target(ProgressDrawTarget::hidden());
        let bar = Arc::new(Mutex::new(hidden));
        let (shown, started) = (Arc::clone(&bar), Instant::now());
        options.prefill.progress = Some(inference::Progress::new(move |done, total| {
            let bar = shown.lock();
            if bar.is_finished() {
                return;
            }
            if done >= total {
                bar.finish_and_clear();
            } else if started.elapsed() >= PATIENCE {
                if bar.is_hidden() {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                }
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            }
        }));
        Self(Some(bar))
    }
}

impl Drop for PrefillBar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.lock().finish_and_clear();
        }
    }
}

/// Shows the progress of a download.
pub struct HubProgress<'c> {
    err: &'c mut dyn Write,
    terminal: bool,
    quiet: bool,
    bar: Option<ProgressBar>,
    what: String,
    total: u64,
    started: Instant,
    last_line: Instant,
}

impl<'c> HubProgress<'c> {
    /// A progress display on `console`'s standard error.
    pub fn new(console: &'c mut Console<'_>) -> Self {
        Self {
            terminal: console.err_is_terminal,
            quiet: console.quiet,
            err: &mut *console.err,
            bar: None,
            what: String::new(),
            total: 0,
            started: Instant::now(),
            last_line: Instant::now(),
        }
    }

    fn line(&mut self, text: &str) {
        // Errors are ignored, because a failed display must not stop the command.
        let _ = writeln!(self.err, "{text}");
    }
}

impl Progress for HubProgress<'_> {
    fn begin(&mut self, stage: Stage, what: &str, total: u64) {
        (self.started, self.last_line) = (Instant::now(), Instant::now());
        self.what = format!("{} {what}", stage.as_str());
        self.total = total;
        if self.quiet {
            return;
        }
        if self.terminal && total > 0 {
            self.bar = Some(bar(total, BYTES_BAR, self.what.clone()));
        } else if total > 0 {
            let line = format!("{} ({})", self.what, bytes(total));
            self.line(&line);
        } else {
            let line = self.what.clone();
            self.line(&line);
        }
    }

    fn advance(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        } else if !self.quiet && !self.terminal && self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            let rate = done as f64 / self.started.elapsed().as_secs_f64().max(1e-3);
            let left = if rate >= 1.0 {
                format!(
                    ", {:.0} s left",
                    self.total.saturating_sub(done) as f64 / rate
                )
            } else {
                String::new()
            };
            let (done, total) = (bytes(done), bytes(self.total));
            let line = format!(
                "{}: {done} of {total}, {}/s{left}",
                self.what,
                bytes(rate as u64)
            );
            self.line(&line);
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// A spinner for a step of unknown length. Dropping it removes the spinner.
pub struct Spinner(Option<ProgressBar>);

impl Spinner {
    /// Starts the spinner if standard error is a terminal.
    pub fn start(message: &'static str, console: &Console<'_>) -> Self {
        let shown = console.err_is_terminal && !console.quiet;
        Spinner(shown.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr())
                .with_style(ProgressStyle::default_spinner());
            bar.set_message(message);
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        }))
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// A bar that counts tokens. It is hidden with `--quiet` or if standard error is not a terminal.
pub struct TokenBar(ProgressBar);

impl TokenBar {
    /// A bar of `total` tokens.
    pub fn start(message: &'static str, total: u64, console: &Console<'_>) -> Self {
        let bar = bar(total, TOKEN_BAR, message.to_owned());
        if console.quiet || !console.err_is_terminal {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        TokenBar(bar)
    }

    pub fn advance(&self, n: u64) {
        self.0.inc(n);
    }
}

impl Drop for TokenBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A bar that counts. It is hidden with `--quiet` or if standard error is not a terminal.
pub struct CountBar(ProgressBar);

impl CountBar {
    /// A bar of `total` items.
    pub fn start(message: &'static str, total: u64, console: &Console<'_>) -> Self {
        let bar = bar(total, COUNT_BAR, message.to_owned());
        if console.quiet || !console.err_is_terminal {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        CountBar(bar)
    }

    pub fn advance(&self, n: u64) {
        self.0.inc(n);
    }
}

impl Drop for CountBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Shows the progress of a task with several stages, each with a number of steps.
#[cfg(feature = "mlx-backend")]
pub struct StepProgress<'c> {
    err: &'c mut dyn Write,
    terminal: bool,
    quiet: bool,
    bar: Option<ProgressBar>,
    stage: &'static str,
    last_line: Instant,
}

#[cfg(feature = "mlx-backend")]
impl<'c> StepProgress<'c> {
    /// A progress display on `console`'s standard error.
    pub fn new(console: &'c mut Console<'_>) -> Self {
        Self {
            terminal: console.err_is_terminal,
            quiet: console.quiet,
            err: &mut *console.err,
            bar: None,
            stage: "",
            last_line: Instant::now(),
        }
    }

    /// Shows that `done` of `total` steps of `stage` are done.
    pub fn at(&mut self, stage: &'static str, done: u64, total: u64) {
        if self.quiet {
            return;
        }
        let is_new = self.stage != stage;
        self.stage = stage;
        if self.terminal {
            if is_new {
                self.end();
                self.bar = Some(bar(total, COUNT_BAR, stage.to_owned()));
            }
            if let Some(bar) = &self.bar {
                bar.set_length(total);
                bar.set_position(done);
            }
        } else if is_new || self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            // Errors are ignored, because a failed display must not stop the command.
            let _ = match is_new {
                true => writeln!(self.err, "{stage}"),
                false => writeln!(self.err, "{stage}: {done} of {total}"),
            };
        }
    }

    /// Removes the bar.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::mock::Streams;

    #[test]
    fn without_a_terminal_stages_are_plain_lines() {
        let mut streams = Streams::new("");
        {
            let mut console = streams.console();
            let mut progress = HubProgress::new(&mut console);
            progress.begin(Stage::Downloading, "tiny", 3 << 20);
            progress.last_line = Instant::now() - 2 * LINE_EVERY;
            progress.advance(1 << 20);
            progress.advance(2 << 20);
            progress.end();
            progress.begin(Stage::Waiting, "tiny", 0);
        }
        let err = streams.err();
        let lines: Vec<&str> = err.lines().collect();
        assert_eq!(lines.len(), 3, "{err}");
        assert_eq!(lines[0], "downloading tiny (3.0 MiB)");
        assert!(
            lines[1].starts_with("downloading tiny: 1.0 MiB of 3.0 MiB, "),
            "{err}"
        );
        assert_eq!(lines[2], "waiting for another process to fetch tiny");
        assert_eq!(streams.out(), "");
    }

    #[test]
    fn quiet_is_quiet() {
        let mut streams = Streams::new("");
        let mut console = streams.console();
        console.quiet = true;
        let mut progress = HubProgress::new(&mut console);
        progress.begin(Stage::Unpacking, "tiny", 5);
        progress.last_line = Instant::now() - 2 * LINE_EVERY;
        progress.advance(5);
        progress.end();
        assert_eq!(streams.err(), "");
    }
}
