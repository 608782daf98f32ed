//! The image of `mlx trace --plot`: the answer's logit, and its change by each part of a layer.

use std::path::Path;

use inference_probe::chart::{self, Curve};
use inference_probe::files::write_whole;

use super::{Report, Step};
use crate::cli::terminal::failure::Failure;

/// Draws the layers of a report. The axis has layers only, so the embedding is omitted.
fn draw(report: &Report) -> String {
    let curve = |name: &str, value: fn(&Step) -> f32| Curve {
        name: name.into(),
        points: (report.steps.iter())
            .filter_map(|step| Some((f64::from(u32::try_from(step.layer?).ok()?), step)))
            .map(|(layer, step)| (layer, f64::from(value(step))))
            .collect(),
    };
    let title = format!("{:?}, by layer", report.answer.text);
    let curves = [
        curve("logit", |step| step.logit),
        curve("added: mixer", |step| step.mixer_logit),
        curve("added: mlp", |step| step.feed_forward_logit),
    ];
    chart::lines(&title, "logit of the answer", &curves)
}

/// Writes the image.
pub fn write(path: &Path, report: &Report) -> Result<(), Failure> {
    write_whole(path, draw(report).as_bytes()).map_err(|e| Failure::failed(e.to_string()))
}
