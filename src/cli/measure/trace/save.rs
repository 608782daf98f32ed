//! Files of `mlx trace --save`: the vectors of each position, or of the last position of each
//! window.

use std::path::PathBuf;

use inference::{LayerTrace, ResidualTrace};
use inference_probe::trace_store::TraceStore;
use inference_probe::window_store::{MAX_LAYERS, Tier, WindowStore};

use crate::cli::measure::trace::Layers;
use crate::cli::terminal::failure::Failure;

/// Flags for files of vectors.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Files of vectors")]
pub struct SaveArgs {
    /// Write the vectors of every position to a file (docs/probe.md has its format)
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Save only the residual vector after the last layer, at the last position of each N tokens
    #[arg(
        long = "window",
        value_name = "N",
        requires = "save",
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..)
    )]
    save_window: Option<usize>,
    /// Save the residual vector before the first of these layers instead, and the contribution of
    /// each of them; at most 8 layers, such as `20-25`
    #[arg(long, value_name = "LIST", requires = "save_window")]
    save_layers: Option<Layers>,
    /// Which parts of --save-layers to save: 1 none, 2 feed-forward, 3 also attention
    #[arg(
        long = "tier",
        value_name = "1-3",
        requires = "save_layers",
        default_value_t = 3,
        value_parser = clap::value_parser!(u8).range(1..=3)
    )]
    save_tier: u8,
}

/// The vectors of one layer at one traced position: residual, mixer, feed-forward.
fn vectors(layer: &LayerTrace, position: usize, width: usize) -> [&[f32]; 3] {
    [&layer.residual, &layer.mixer, &layer.feed_forward].map(|all| row(all, position, width))
}

fn row(all: &[f32], position: usize, width: usize) -> &[f32] {
    all.get(position * width..(position + 1) * width)
        .unwrap_or(&[])
}

impl SaveArgs {
    /// The positions to trace in a prompt of `length` tokens. The last one is always among them.
    pub fn positions(&self, length: usize) -> Vec<usize> {
        let last = length.saturating_sub(1);
        match (&self.save, self.save_window) {
            (None, _) => (last..length).collect(),
            (Some(_), None) => (0..length).collect(),
            (Some(_), Some(window)) => (0..length)
                .step_by(window)
                .map(|start| last.min(start.saturating_add(window - 1)))
                .collect(),
        }
    }

    /// The layers whose parts are saved. `count` is the model's number of layers.
    ///
    /// # Errors
    /// For layers that the model does not have or the file format does not allow.
    pub fn layers(&self, count: usize) -> Result<Option<Vec<usize>>, Failure> {
        let Some(layers) = &self.save_layers else {
            return Ok(None);
        };
        layers.check("--save-layers", count)?;
        let chosen: Vec<usize> = (0..count).filter(|l| layers.has(*l)).collect();
        if layers.embedding || chosen.is_empty() || chosen.len() > MAX_LAYERS {
            return Err(Failure::usage(format!(
                "--save-layers must name 1 to {MAX_LAYERS} layers, and not the embedding"
            )));
        }
        Ok(Some(chosen))
    }

    /// Writes the file, if the user requested one. `layers` is the result of [`Self::layers`].
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, trace: &ResidualTrace, layers: Option<&[usize]>) -> Result<(), Failure> {
        let Some(path) = &self.save else {
            return Ok(());
        };
        let written = match self.save_window {
            None => every_position(trace).and_then(|store| store.write(path)),
            Some(window) => self
                .windows(trace, window, layers)
                .and_then(|store| store.write(path)),
        };
        written.map_err(|e| Failure::failed(e.to_string()))
    }

    fn windows(
        &self,
        trace: &ResidualTrace,
        window: usize,
        layers: Option<&[usize]>,
    ) -> inference_probe::Result<WindowStore> {
        let (width, blocks) = (trace.hidden_size, trace.layers.len());
        let chosen = layers.unwrap_or(&[]);
        let tier = match self.save_tier {
            1 => Tier::Residual,
            2 => Tier::FeedForward,
            _ => Tier::Full,
        };
        let mut store = match layers {
            None => WindowStore::boundaries(width, window)?,
            Some(layers) => WindowStore::context(width, window, blocks, tier, layers)?,
        };
        // A boundary store has the states after all layers. A context store has the states before
        // the chosen layers.
        let before = chosen.first().copied().unwrap_or(blocks);
        let states = match before.checked_sub(1).and_then(|l| trace.layers.get(l)) {
            None => &trace.embedding,
            Some(layer) => &layer.residual,
        };
        let mut start = 0;
        for (i, position) in trace.positions.iter().enumerate() {
            let parts = |part: usize| -> Vec<&[f32]> {
                let layers = chosen.iter().filter_map(|l| trace.layers.get(*l));
                layers.map(|l| vectors(l, i, width)[part]).collect()
            };
            let of = |from: Tier, part: usize| match layers {
                Some(_) if tier >= from => parts(part),
                _ => Vec::new(),
            };
            let (mixers, feed_forwards) = (of(Tier::Full, 1), of(Tier::FeedForward, 2));
            let end = position + 1;
            store.push(end - start, row(states, i, width), &feed_forwards, &mixers)?;
            start = end;
        }
        Ok(store)
    }
}

/// The vectors of all positions.
fn every_position(trace: &ResidualTrace) -> inference_probe::Result<TraceStore> {
    let width = trace.hidden_size;
    let mut store = TraceStore::new(width, trace.layers.len())?;
    for i in 0..trace.positions.len() {
        let blocks: Vec<[&[f32]; 3]> = (trace.layers.iter())
            .map(|layer| vectors(layer, i, width))
            .collect();
        store.push(row(&trace.embedding, i, width), &blocks)?;
    }
    Ok(store)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(save: bool, window: Option<usize>) -> SaveArgs {
        SaveArgs {
            save: save.then(|| "t".into()),
            save_window: window,
            save_layers: None,
            save_tier: 3,
        }
    }

    #[test]
    fn a_window_ends_at_its_last_token() {
        assert_eq!(args(false, None).positions(5), [4]);
        assert_eq!(args(true, None).positions(3), [0, 1, 2]);
        assert_eq!(args(true, Some(2)).positions(5), [1, 3, 4]);
        assert_eq!(args(true, Some(2)).positions(4), [1, 3]);
        assert_eq!(args(true, Some(usize::MAX)).positions(4), [3]);
        assert_eq!(args(true, Some(1)).positions(3), [0, 1, 2]);
        assert!(args(true, Some(3)).positions(0).is_empty());
    }

    #[test]
    fn files_have_one_to_eight_layers() {
        let of = |list: &str, count: usize| {
            let save_layers = Some(list.parse().unwrap());
            let args = SaveArgs {
                save_layers,
                ..args(true, Some(4))
            };
            args.layers(count).map_err(|e| e.report().unwrap())
        };
        assert_eq!(of("3,1-2", 9).unwrap(), Some(vec![1, 2, 3]));
        assert!(of("0-8", 9).unwrap_err().contains("1 to 8 layers"));
        assert!(of("e", 9).unwrap_err().contains("not the embedding"));
        let beyond = of("9", 9).unwrap_err();
        assert!(beyond.contains("--save-layers names layer 9"), "{beyond}");
        assert_eq!(args(true, None).layers(9).unwrap(), None);
    }
}
