//! Helpers that the commands of this folder share.

use std::path::PathBuf;

use metal_backend::train::train_log::Score;

/// A score as text.
pub fn told(score: &Score) -> String {
    if let Some(pairs) = score.pairs {
        let right = 100.0 * score.accuracy;
        return format!(
            "loss {:.4}, {right:.1} % of {pairs} pairs told right",
            score.loss
        );
    }
    let perplexity = score
        .perplexity
        .map_or_else(|| String::from("beyond numbers"), |p| format!("{p:.3}"));
    format!(
        "loss {:.4}, perplexity {perplexity}, accuracy {:.1} % of {} tokens",
        score.loss,
        100.0 * score.accuracy,
        score.tokens
    )
}

/// Parses a directory that must not be empty.
pub fn directory(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err("must name a directory".into());
    }
    Ok(PathBuf::from(text))
}
