//! `mlx vindex edges`, `circuits` and `extract`: connections in a model's weights, found without a
//! forward pass. The arithmetic is in `inference_probe::walkers`.

use std::path::{Path, PathBuf};

use inference::{
    AttentionInspector, CancelToken, FeedForwardWeights, Interrupt, TextModel, TokenModel,
};
use inference_probe::walkers::circuits::Head;
use inference_probe::walkers::edges::{EdgeStats, edges};
use inference_probe::walkers::vectors::{Extraction, Header, Line, Named, VERSION};
use inference_probe::walkers::{Lines, Scored, round, top_k};
use serde::Serialize;

use crate::cli::measure::probe::{failed, identity};
use crate::cli::measure::trace::Layers;
use crate::cli::options::load::{LoadArgs, Loaded, ModelArgs, at_least_one, load};
use crate::cli::terminal::console::{Console, table};
use crate::cli::terminal::failure::Failure;
use crate::cli::terminal::interrupt::cancel_on_interrupt;

/// The number of decimals of scores in files.
const DIGITS: u32 = 6;

/// The number of vectors whose products with all embeddings are in memory at once.
const TOGETHER: usize = 64;

#[derive(Debug, Clone, clap::Subcommand)]
pub enum Command {
    Edges(Box<EdgesArgs>),
    Circuits(Box<CircuitsArgs>),
    Extract(Box<ExtractArgs>),
}

/// The model and the layers to analyze.
#[derive(Debug, Clone, clap::Args)]
struct Of {
    #[command(flatten)]
    model: ModelArgs,
    /// Layers, such as `0-5,11` [default: all]
    #[arg(long, value_name = "LIST")]
    layers: Option<Layers>,
    #[command(flatten)]
    load: LoadArgs,
}

/// Write which tokens the features of feed-forward parts connect, as lines of JSON
#[derive(Debug, Clone, clap::Args)]
pub struct EdgesArgs {
    #[command(flatten)]
    of: Of,
    /// The file to write; an existing file is replaced when the new one is complete
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Number of input tokens and of output tokens for each feature
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    top_k: usize,
    /// Omit tokens with smaller products
    #[arg(long, value_name = "X", default_value_t = 0.02)]
    min_score: f32,
    /// Print statistics of the layers as one JSON array
    #[arg(long)]
    json: bool,
}

/// Write what attention heads add for the tokens that they attend to (OV circuits), as lines of
/// JSON
#[derive(Debug, Clone, clap::Args)]
pub struct CircuitsArgs {
    #[command(flatten)]
    of: Of,
    /// The file to write; an existing file is replaced when the new one is complete
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Number of input tokens for each head: those for which it adds most
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = at_least_one)]
    inputs: usize,
    /// Number of output tokens for each of these: those that it makes more likely
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    top_k: usize,
}

/// Write a model's vectors with the tokens that are most similar to them, as lines of JSON
#[derive(Debug, Clone, clap::Args)]
pub struct ExtractArgs {
    #[command(flatten)]
    of: Of,
    /// The directory; it gets a file for each component
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// The vectors to write
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true)]
    component: Vec<Component>,
    /// Number of tokens to list with each vector
    #[arg(long, value_name = "N", default_value_t = 10)]
    top_k: usize,
    /// Continue existing files after their last complete layer
    #[arg(long)]
    resume: bool,
}

/// Vectors of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Component {
    /// The rows of gates
    #[value(name = "ffn_gate")]
    FfnGate,
    /// The rows of up matrices
    #[value(name = "ffn_up")]
    FfnUp,
    /// The columns of down matrices
    #[value(name = "ffn_down")]
    FfnDown,
    /// For each element of a head's values: the column of the output matrix, and the row of the
    /// value matrix
    #[value(name = "attn_ov")]
    AttnOv,
    /// For each element of a head's queries: the row of the query matrix, and the row of the key
    /// matrix
    #[value(name = "attn_qk")]
    AttnQk,
    /// The embeddings of tokens
    #[value(name = "embeddings")]
    Embeddings,
}

impl Component {
    fn name(self) -> &'static str {
        match self {
            Component::FfnGate => "ffn_gate",
            Component::FfnUp => "ffn_up",
            Component::FfnDown => "ffn_down",
            Component::AttnOv => "attn_ov",
            Component::AttnQk => "attn_qk",
            Component::Embeddings => "embeddings",
        }
    }
}

pub fn run(command: &Command, console: &mut Console<'_>) -> Result<(), Failure> {
    match command {
        Command::Edges(args) => write_edges(args, console),
        Command::Circuits(args) => write_circuits(args, console),
        Command::Extract(args) => extract(args, console),
    }
}

/// The model whose weights are analyzed.
struct Walked<'a> {
    inspector: &'a dyn AttentionInspector,
    tokens: &'a dyn TokenModel,
    layers: Vec<usize>,
    interrupt: Interrupt,
}

impl<'a> Walked<'a> {
    fn new(loaded: &'a Loaded, of: &Of, cancel: CancelToken) -> Result<Self, Failure> {
        let model: &dyn TextModel = loaded.model.as_ref();
        let both = (model.as_attention_inspector(), model.as_token_model());
        let (Some(inspector), Some(tokens)) = both else {
            return Err(Failure::failed(
                "this backend does not look inside models; `mlx backends` shows which do",
            ));
        };
        let count = model.info().num_layers;
        let layers = match &of.layers {
            None => (0..count).collect(),
            Some(layers) => {
                layers.check("--layers", count)?;
                (0..count).filter(|layer| layers.has(*layer)).collect()
            }
        };
        Ok(Self {
            inspector,
            tokens,
            layers,
            interrupt: Interrupt::new().with_cancel(cancel),
        })
    }

    /// The tokens whose embeddings have the greatest products with each vector.
    fn nearest(
        &self,
        vectors: &[f32],
        hidden: usize,
        (k, least): (usize, f32),
    ) -> Result<Vec<Vec<Scored>>, Failure> {
        let mut all = Vec::new();
        if k == 0 {
            let count = vectors.len().checked_div(hidden).unwrap_or(0);
            return Ok(vec![Vec::new(); count]);
        }
        for part in vectors.chunks(TOGETHER * hidden.max(1)) {
            self.interrupt.check()?;
            let scores = self.inspector.token_scores(part)?;
            all.extend(scores.iter().map(|scores| top_k(scores, k, least)));
        }
        Ok(all)
    }

    fn text(&self, id: u32) -> Result<String, Failure> {
        // The tokenizer may have no token for a row of the table.
        Ok(self.tokens.decode(&[id]).unwrap_or_default())
    }
}

/// A line of edges or circuits.
#[derive(Debug, Serialize)]
struct Relation {
    layer: usize,
    relation: String,
    input: u32,
    input_text: String,
    output: u32,
    output_text: String,
    c_in: f64,
    c_out: f64,
    c: f64,
    selectivity: f64,
}

fn write_edges(args: &EdgesArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    let loaded = load(&args.of.model, &args.of.load, console)?;
    let cancel = CancelToken::new();
    let _caught = cancel_on_interrupt(&cancel);
    let walked = Walked::new(&loaded, &args.of, cancel)?;
    let mut lines = Lines::create(&args.output).map_err(failed)?;
    let mut all: Vec<EdgeStats> = Vec::with_capacity(walked.layers.len());
    for &layer in &walked.layers {
        let weights = walked.inspector.feed_forward_weights(layer)?;
        let hidden = weights.hidden_size;
        let limits = (args.top_k, args.min_score);
        let inputs = walked.nearest(&weights.gate, hidden, limits)?;
        let outputs = walked.nearest(&weights.down, hidden, limits)?;
        let (edges, stats) = edges(layer, &inputs, &outputs);
        for edge in edges {
            let line = Relation {
                layer,
                relation: format!("L{layer}-F{}", edge.feature),
                input: edge.input,
                input_text: walked.text(edge.input)?,
                output: edge.output,
                output_text: walked.text(edge.output)?,
                c_in: round(edge.c_in, DIGITS),
                c_out: round(edge.c_out, DIGITS),
                c: round(edge.c, DIGITS),
                selectivity: round(edge.selectivity, DIGITS),
            };
            lines.line(&line).map_err(failed)?;
        }
        console.note(&format!("layer {layer}: {} edges", stats.edges));
        all.push(stats);
    }
    lines.finish().map_err(failed)?;
    if args.json {
        return console.json(&all);
    }
    let mut rows = vec![["LAYER", "FEATURES", "CONNECTED", "EDGES", "MEAN C"].map(String::from)];
    rows.extend(all.iter().map(|stats| {
        [
            stats.layer.to_string(),
            stats.features.to_string(),
            stats.connected.to_string(),
            stats.edges.to_string(),
            format!("{:.4}", stats.mean_c),
        ]
    }));
    let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
    table(&rows).iter().try_for_each(|line| console.line(line))
}

fn write_circuits(args: &CircuitsArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    let loaded = load(&args.of.model, &args.of.load, console)?;
    let cancel = CancelToken::new();
    let _caught = cancel_on_interrupt(&cancel);
    let walked = Walked::new(&loaded, &args.of, cancel)?;
    let mut lines = Lines::create(&args.output).map_err(failed)?;
    let mut count = 0usize;
    for &layer in &walked.layers {
        let projections = walked.inspector.attention_projections(layer)?;
        let hidden = projections.hidden_size;
        let size = projections.head_dim * hidden;
        let group = projections.num_heads / projections.num_kv_heads.max(1);
        for (number, outputs) in projections.outputs.chunks_exact(size.max(1)).enumerate() {
            let from = number / group.max(1) * size;
            let head = Head {
                values: projections.values.get(from..from + size).unwrap_or(&[]),
                outputs,
                hidden,
            };
            let of_this_head = of_head(&walked, (layer, number), &head, args)?;
            count += of_this_head.len();
            for line in of_this_head {
                lines.line(&line).map_err(failed)?;
            }
        }
        console.note(&format!("layer {layer} of {}", walked.layers.len()));
    }
    lines.finish().map_err(failed)?;
    console.line(&format!("{count} relations"))
}

/// The output of one head for the tokens to which it adds most.
fn of_head(
    walked: &Walked<'_>,
    (layer, number): (usize, usize),
    head: &Head<'_>,
    args: &CircuitsArgs,
) -> Result<Vec<Relation>, Failure> {
    // [head_dim][tokens]
    let scores = walked.inspector.token_scores(head.values)?;
    let lengths = head.lengths(&scores).map_err(failed)?;
    let inputs = top_k(&lengths, args.inputs, f32::MIN_POSITIVE);
    let greatest = inputs.first().map_or(1.0, |first| f64::from(first.score));
    let mut relations = Vec::new();
    for inputs in inputs.chunks(TOGETHER) {
        let value = |token: u32| -> Vec<f32> {
            let at = token as usize;
            scores.iter().map(|row| row[at]).collect()
        };
        let added: Vec<f32> = (inputs.iter())
            .flat_map(|input| head.added(&value(input.id)))
            .collect();
        let limits = (args.top_k, f32::MIN_POSITIVE);
        let outputs = walked.nearest(&added, head.hidden, limits)?;
        for (input, outputs) in inputs.iter().zip(outputs) {
            for output in outputs {
                let (c_in, c_out) = (f64::from(input.score), f64::from(output.score));
                relations.push(Relation {
                    layer,
                    relation: format!("L{layer}-H{number}"),
                    input: input.id,
                    input_text: walked.text(input.id)?,
                    output: output.id,
                    output_text: walked.text(output.id)?,
                    c_in,
                    c_out,
                    c: c_in * c_out,
                    selectivity: c_in / greatest,
                });
            }
        }
    }
    // Scores are relative to the head's greatest product, as edges are to their layer's.
    let most = relations.iter().map(|r| r.c).fold(0.0, f64::max);
    for relation in &mut relations {
        relation.c = round(relation.c / most, DIGITS);
        relation.c_in = round(relation.c_in, DIGITS);
        relation.c_out = round(relation.c_out, DIGITS);
        relation.selectivity = round(relation.selectivity, DIGITS);
    }
    Ok(relations)
}

/// The vectors of one layer; for heads also the matching vector of each.
type Vectors = (Vec<f32>, Option<Vec<f32>>);

fn extract(args: &ExtractArgs, console: &mut Console<'_>) -> Result<(), Failure> {
    let loaded = load(&args.of.model, &args.of.load, console)?;
    let cancel = CancelToken::new();
    let _caught = cancel_on_interrupt(&cancel);
    let walked = Walked::new(&loaded, &args.of, cancel)?;
    let dir = &args.output;
    std::fs::create_dir_all(dir).map_err(|e| Failure::failed(format!("{}: {e}", dir.display())))?;
    let identity = identity(&loaded.path)?;
    let info = loaded.model.info();
    let name = loaded
        .path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    for component in &args.component {
        let header = Header {
            version: VERSION,
            component: component.name().into(),
            model: name.clone().into_owned(),
            identity: identity.clone(),
            hidden_size: info.hidden_size,
            top_k: args.top_k,
        };
        let path = dir.join(format!("{}.ndjson", component.name()));
        let mut file = Extraction::open(&path, &header, args.resume).map_err(failed)?;
        let layers = match component {
            // Embeddings belong to no layer, so they are one part with the number 0.
            Component::Embeddings => &[0][..],
            _ => &walked.layers,
        };
        for &layer in layers
            .iter()
            .filter(|layer| !file.has(**layer))
            .collect::<Vec<_>>()
        {
            let hidden = info.hidden_size;
            let of = (layer, hidden, info.vocab_size);
            write_layer(&walked, *component, of, (args.top_k, &mut file))?;
            file.end_layer(layer).map_err(failed)?;
            console.note(&format!("{}: layer {layer}", component.name()));
        }
        console.line(&shown(&path))?;
    }
    Ok(())
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn write_layer(
    walked: &Walked<'_>,
    component: Component,
    (layer, hidden, vocab): (usize, usize, usize),
    (k, file): (usize, &mut Extraction),
) -> Result<(), Failure> {
    if component == Component::Embeddings {
        let vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
        for from in (0..vocab).step_by(TOGETHER) {
            let ids: Vec<u32> = (from..vocab).take(TOGETHER).collect();
            let vectors = walked.inspector.token_embeddings(&ids)?;
            let all = (vectors, None);
            write_vectors(walked, (layer, from as usize, hidden), &all, (k, file))?;
        }
        return Ok(());
    }
    let vectors = vectors_of(walked, component, layer)?;
    write_vectors(walked, (layer, 0, hidden), &vectors, (k, file))
}

fn write_vectors(
    walked: &Walked<'_>,
    (layer, first, hidden): (usize, usize, usize),
    (vectors, inputs): &Vectors,
    (k, file): (usize, &mut Extraction),
) -> Result<(), Failure> {
    let nearest = walked.nearest(vectors, hidden, (k, f32::MIN))?;
    let mut inputs = inputs
        .iter()
        .flat_map(|all| all.chunks_exact(hidden.max(1)));
    let rows = vectors.chunks_exact(hidden.max(1)).zip(nearest);
    for (place, (vector, nearest)) in rows.enumerate() {
        let named = |scored: Scored| Ok(Named::new(scored, walked.text(scored.id)?));
        let line = Line {
            layer,
            index: first + place,
            vector: vector.to_vec(),
            input: inputs.next().map(<[f32]>::to_vec),
            top_k: nearest
                .into_iter()
                .map(named)
                .collect::<Result<_, Failure>>()?,
        };
        file.line(&line).map_err(failed)?;
    }
    Ok(())
}

fn vectors_of(walked: &Walked<'_>, component: Component, layer: usize) -> Result<Vectors, Failure> {
    let of_features = || -> Result<FeedForwardWeights, Failure> {
        Ok(walked.inspector.feed_forward_weights(layer)?)
    };
    Ok(match component {
        Component::FfnGate => (of_features()?.gate, None),
        Component::FfnDown => (of_features()?.down, None),
        Component::FfnUp => {
            let up = of_features()?.up.ok_or_else(|| {
                Failure::failed(format!(
                    "layer {layer} is not gated and has no ffn_up; its input matrix is ffn_gate"
                ))
            })?;
            (up, None)
        }
        Component::AttnOv | Component::AttnQk => {
            let projections = walked.inspector.attention_projections(layer)?;
            let size = projections.head_dim * projections.hidden_size;
            let group = projections.num_heads / projections.num_kv_heads.max(1);
            // Query heads of a group share keys and values.
            let repeated = |rows: &[f32]| -> Vec<f32> {
                let heads = rows.chunks_exact(size.max(1));
                heads.flat_map(|head| head.repeat(group)).collect()
            };
            match component {
                Component::AttnOv => (projections.outputs, Some(repeated(&projections.values))),
                _ => (projections.queries, Some(repeated(&projections.keys))),
            }
        }
        Component::Embeddings => (Vec::new(), None),
    })
}
