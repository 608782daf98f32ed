//! Edges from token to token through one feature: from the tokens whose embeddings activate the
//! feature's gate, to the tokens whose embeddings are similar to its output.

use std::cmp::Ordering;

use serde::Serialize;

use super::{Scored, counts};

/// Confidences for which the number of edges is counted.
pub const THRESHOLDS: [f64; 7] = [0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9];

/// A connection between two tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Edge {
    /// The layer.
    pub layer: usize,
    /// The index of the feature in the layer.
    pub feature: usize,
    /// The token that activates the gate.
    pub input: u32,
    /// The token that is similar to the output.
    pub output: u32,
    /// The dot product of the input's embedding and the gate's row.
    pub c_in: f64,
    /// The dot product of the output's embedding and the down matrix's column.
    pub c_out: f64,
    /// `c_in c_out` divided by the greatest such product in the layer, from 0 to 1.
    pub c: f64,
    /// `c_in` divided by the greatest `c_in` in the layer, from 0 to 1.
    pub selectivity: f64,
}

/// Statistics of the edges of a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EdgeStats {
    /// The layer.
    pub layer: usize,
    /// The number of features.
    pub features: usize,
    /// The number of features with an edge.
    pub connected: usize,
    /// The number of edges.
    pub edges: usize,
    /// The greatest `c_in`.
    pub max_c_in: f64,
    /// The greatest `c_in c_out`.
    pub max_product: f64,
    /// The mean `c`.
    pub mean_c: f64,
    /// For each of [`THRESHOLDS`], the number of edges with at least this `c`.
    pub at_least: Vec<(f64, usize)>,
}

/// The edges of a layer, computed from each feature's best input and output tokens. Edges are
/// sorted by decreasing confidence; equal ones by feature, input and output. Scores must be
/// positive.
///
/// ```
/// use inference_probe::walkers::{Scored, edges::edges};
/// let scored = |id, score| vec![Scored { id, score }];
/// let (found, stats) = edges(4, &[scored(1, 2.0)], &[scored(7, 3.0)]);
/// assert_eq!((found[0].input, found[0].output, found[0].c), (1, 7, 1.0));
/// assert_eq!(stats.edges, 1);
/// ```
#[must_use]
pub fn edges(
    layer: usize,
    inputs: &[Vec<Scored>],
    outputs: &[Vec<Scored>],
) -> (Vec<Edge>, EdgeStats) {
    let mut accepted: Vec<Edge> = Vec::new();
    let mut connected = 0;
    for (feature, (inputs, outputs)) in inputs.iter().zip(outputs).enumerate() {
        let before = accepted.len();
        for input in inputs.iter().filter(|s| s.score > 0.0) {
            for output in outputs.iter().filter(|s| s.score > 0.0) {
                accepted.push(Edge {
                    layer,
                    feature,
                    input: input.id,
                    output: output.id,
                    c_in: f64::from(input.score),
                    c_out: f64::from(output.score),
                    c: f64::from(input.score) * f64::from(output.score),
                    selectivity: f64::from(input.score),
                });
            }
        }
        connected += usize::from(accepted.len() > before);
    }
    let greatest = |of: fn(&Edge) -> f64| accepted.iter().map(of).fold(0.0, f64::max);
    let (max_product, max_c_in) = (greatest(|e| e.c), greatest(|e| e.c_in));
    for edge in &mut accepted {
        edge.c /= max_product;
        edge.selectivity /= max_c_in;
    }
    accepted.sort_by(order);
    let confidences: Vec<f64> = accepted.iter().map(|e| e.c).collect();
    let at_least = counts(&confidences, &THRESHOLDS);
    let stats = EdgeStats {
        layer,
        features: inputs.len().min(outputs.len()),
        connected,
        edges: accepted.len(),
        max_c_in,
        max_product,
        mean_c: match accepted.len() {
            0 => 0.0,
            n => confidences.iter().sum::<f64>() / n as f64,
        },
        at_least: THRESHOLDS.into_iter().zip(at_least).collect(),
    };
    (accepted, stats)
}

/// The order by decreasing confidence.
fn order(a: &Edge, b: &Edge) -> Ordering {
    let place = |e: &Edge| (e.feature, e.input, e.output);
    b.c.total_cmp(&a.c).then(place(a).cmp(&place(b)))
}
