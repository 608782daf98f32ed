//! Shows the progress of a training run: a bar and lines on a terminal, only lines without a
//! terminal, and nothing with `--quiet`.

use std::io::Write;

use indicatif::{ProgressBar, ProgressDrawTarget};
use metal_backend::train::run::Event;
use metal_backend::train::train_log::TrainReport;

use crate::cli::learn::common::told;
use crate::cli::terminal::console::{Console, bytes};
use crate::cli::terminal::progress::style;

/// The rewards of the last batch of preferences or generated replies.
fn rewards(report: &TrainReport) -> String {
    if let Some(policy) = &report.policy {
        return format!(
            ", reward {:.3} \u{b1} {:.3}, {:.0} tokens a reply",
            policy.reward, policy.reward_std, policy.completion_length
        );
    }
    report.rewards.map_or_else(String::new, |r| {
        format!(", rewards {:.3} and {:.3}", r.chosen, r.rejected)
    })
}

const BAR: &str = "[{bar:16}] {pos}/{len} {wide_msg}{left}";

/// Shows a run on standard error.
pub struct Show<'c> {
    err: &'c mut dyn Write,
    bar: ProgressBar,
    quiet: bool,
    last: String,
}

impl<'c> Show<'c> {
    /// Starts the display of a run of `iters` steps. `done` steps are already complete.
    pub fn start(iters: u64, done: u64, console: &'c mut Console<'_>) -> Self {
        let shown = console.err_is_terminal && !console.quiet;
        let target = if shown {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(iters), target)
            .with_style(style(BAR))
            .with_position(done);
        // Steps of an earlier run must not affect the estimated remaining time.
        bar.reset_eta();
        Self {
            err: &mut *console.err,
            bar,
            quiet: console.quiet,
            last: String::new(),
        }
    }

    fn line(&mut self, text: &str) {
        if self.quiet {
            return;
        }
        // Errors are ignored, because a failed display must not stop the training.
        let err = &mut self.err;
        self.bar.suspend(|| {
            let _ = writeln!(err, "{text}");
        });
    }

    /// Shows an event.
    pub fn event(&mut self, event: &Event<'_>) {
        match event {
            Event::Step {
                step,
                report,
                tokens_per_second,
                memory,
                ..
            } => {
                tracing::trace!(step, loss = report.loss, tokens = report.tokens, "a step");
                self.last = format!(
                    "loss {:.3}, {tokens_per_second:.0} tok/s, {}",
                    report.loss,
                    bytes(*memory)
                );
                self.bar.set_message(self.last.clone());
                self.bar.set_position(*step);
            }
            Event::Train(r) => self.line(&format!(
                "step {}: loss {:.4}{}, learning rate {:.3e}, {:.3} steps/s, {:.1} tok/s, {} tokens, {} at most",
                r.step,
                r.loss,
                rewards(r),
                r.learning_rate,
                r.steps_per_second,
                r.tokens_per_second,
                r.trained_tokens,
                bytes(r.peak_memory_bytes)
            )),
            Event::Judging { done, total } => {
                self.bar.set_message(format!("validating {done}/{total}"));
                if done == total {
                    self.bar.set_message(self.last.clone());
                }
            }
            Event::Validation(score) => {
                self.line(&format!("step {}: validation {}", score.step, told(score)));
            }
            Event::Test(score) => {
                self.line(&format!("step {}: test {}", score.step, told(score)));
            }
            Event::Best { step, dir } => {
                self.line(&format!("step {step}: best so far, kept in {}", dir.display()));
            }
            Event::StoppedEarly { step } => self.line(&format!(
                "step {step}: the loss of validations does not fall any more; the run ends early"
            )),
            Event::Saved { step, dir } => {
                self.line(&format!("step {step}: saved in {}", dir.display()));
            }
        }
    }

    /// Removes the bar.
    pub fn end(self) {
        self.bar.finish_and_clear();
    }
}
