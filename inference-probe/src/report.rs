//! Combines a folder of results into one `summary.json`, SVG charts, and an HTML page without
//! external files.
//!
//! A result is a JSON object with a field `kind`, as the subcommands of `mlx probe` write it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::activations::sha256_of;
use crate::chart::{Curve, escaped, heat_map, lines, noted_lines};
use crate::error::{Error, Result};
use crate::files::{MAX_TEXT, read_text, write_whole};
use crate::linear::{ProbeResult, doubts};

/// A result of one kind of analysis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Analysis {
    /// Linear probes.
    Linear {
        /// The input files.
        inputs: Inputs,
        /// The field of the stimuli.
        label: String,
        /// The values.
        classes: Vec<String>,
        /// The division of the rows.
        split: String,
        /// One result for each layer.
        layers: Vec<ProbeResult>,
        /// Number of different states in the layer with the fewest different ones; 0 if unknown.
        #[serde(default)]
        distinct: usize,
    },
    /// Canonical correlations.
    Cca {
        /// The input files.
        inputs: Inputs,
        /// Correlations of each layer with labels, the largest first; empty without a label.
        label_correlations: Vec<Vec<f64>>,
        /// The field of the stimuli.
        label: Option<String>,
        /// `[layer, layer]`: mean correlation of held-out rows.
        matrix: Vec<Vec<f64>>,
    },
    /// Representational similarity.
    Rsa {
        /// The input files.
        inputs: Inputs,
        /// How similarities were computed.
        metric: crate::rsa::Metric,
        /// `[layer, layer]`: the correlation of similarities.
        matrix: Vec<Vec<f64>>,
    },
    /// Divergences of predictions and of means.
    Divergence {
        /// The input files.
        inputs: Inputs,
        /// Mean divergence of each layer's prediction from the next layer's, in nats.
        consecutive: Vec<f64>,
        /// Mean divergence of each layer's prediction from the last layer's, in nats.
        from_last: Vec<f64>,
        /// Divergence of the mean predictions of two groups at each layer; empty without groups.
        groups: Vec<f64>,
        /// Distances of the means of two groups at each layer; empty without groups.
        means: Vec<crate::divergence::MeanDistance>,
        /// The field that defines the groups.
        group: Option<String>,
    },
}

/// The files from which a result was computed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// The file of activations; two files for a comparison.
    pub activations: Vec<PathBuf>,
    /// The SHA-256 of each file of activations.
    pub activations_sha256: Vec<String>,
    /// SHA-256 of the stimuli's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stimuli_sha256: Option<String>,
    /// `[stimuli, layers, width]`.
    pub shape: [usize; 3],
    /// The program's version.
    pub version: String,
}

/// The output of a report.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The written files.
    pub files: Vec<PathBuf>,
    /// The number of results in the report.
    pub results: usize,
}

/// The charts of a result: name, SVG.
fn charts(name: &str, analysis: &Analysis) -> Vec<(String, String)> {
    let curve = |name: &str, values: Vec<f64>| Curve::new(name, values);
    match analysis {
        Analysis::Linear {
            label,
            layers,
            split,
            distinct,
            inputs,
            ..
        } => {
            let doubts = doubts(layers, inputs.shape[0], *distinct).join("; ");
            let of = |f: fn(&ProbeResult) -> f64| layers.iter().map(f).collect::<Vec<_>>();
            vec![(
                name.to_owned(),
                noted_lines(
                    &format!("Linear probe of {label} ({split} folds)"),
                    &doubts,
                    "share of test rows",
                    &[
                        curve("accuracy", of(|l| l.accuracy)),
                        curve("control", of(|l| l.control)),
                        curve("selectivity", of(|l| l.selectivity)),
                        curve("majority", of(|l| l.majority)),
                    ],
                ),
            )]
        }
        Analysis::Cca {
            matrix,
            label,
            label_correlations,
            ..
        } => {
            let mut charts = vec![(
                name.to_owned(),
                heat_map("CCA of layers, held-out rows", matrix, 0.0, 1.0),
            )];
            if let Some(label) = label {
                let mean = |v: &Vec<f64>| v.iter().sum::<f64>() / v.len().max(1) as f64;
                let largest = |v: &Vec<f64>| v.first().copied().unwrap_or(f64::NAN);
                charts.push((
                    format!("{name}-label"),
                    lines(
                        &format!("CCA of layers with {label}"),
                        "correlation",
                        &[
                            curve("largest", label_correlations.iter().map(largest).collect()),
                            curve("mean", label_correlations.iter().map(mean).collect()),
                        ],
                    ),
                ));
            }
            charts
        }
        Analysis::Rsa { matrix, .. } => vec![(
            name.to_owned(),
            heat_map(
                "RSA: layers that find the same stimuli similar",
                matrix,
                0.0,
                1.0,
            ),
        )],
        Analysis::Divergence {
            consecutive,
            from_last,
            groups,
            means,
            group,
            ..
        } => {
            let mut charts = vec![(
                name.to_owned(),
                lines(
                    "Divergence of predictions (logit lens)",
                    "nats",
                    &[
                        curve("from the next layer", consecutive.clone()),
                        curve("from the last layer", from_last.clone()),
                    ],
                ),
            )];
            if let Some(group) = group {
                if !groups.is_empty() {
                    charts.push((
                        format!("{name}-groups"),
                        lines(
                            &format!("Divergence between groups by {group}"),
                            "nats",
                            &[curve("mean predictions", groups.clone())],
                        ),
                    ));
                }
                charts.push((
                    format!("{name}-means"),
                    lines(
                        &format!("Distance of group means by {group}"),
                        "distance",
                        &[curve(
                            "1 - cosine",
                            means.iter().map(|m| m.cosine).collect(),
                        )],
                    ),
                ));
            }
            charts
        }
    }
}

/// Reads all results in `dir`. Writes `summary.json`, one SVG per chart, and `index.html` to `dir`.
///
/// # Errors
/// [`Error::Io`], [`Error::File`] for a result of an unknown kind, and [`Error::Data`] if there is
/// no result.
pub fn write(dir: &Path) -> Result<Report> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)
        .and_then(|entries| entries.map(|e| e.map(|e| e.path())).collect())
        .map_err(|e| Error::io(dir, e))?;
    paths.retain(|path| path.extension().is_some_and(|e| e == "json"));
    paths.sort();
    let mut summary = Vec::new();
    let mut page = String::new();
    let mut files = Vec::new();
    for path in paths {
        let bytes = read_text(&path, MAX_TEXT)?;
        let value: Value =
            serde_json::from_slice(&bytes).map_err(|e| Error::file(&path, e.to_string()))?;
        // Metadata of activations and earlier summaries have no `kind`, and are skipped.
        if value.get("kind").is_none() {
            continue;
        }
        let analysis: Analysis = serde_json::from_value(value.clone())
            .map_err(|e| Error::file(&path, format!("this is no result of an analysis: {e}")))?;
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        page.push_str(&format!("<section><h2>{}</h2>\n", escaped(&name)));
        let mut drawn = Vec::new();
        for (chart, svg) in charts(&name, &analysis) {
            let file = dir.join(format!("{chart}.svg"));
            write_whole(&file, svg.as_bytes())?;
            page.push_str(&svg);
            drawn.push(format!("{chart}.svg"));
            files.push(file);
        }
        page.push_str("</section>\n");
        summary.push(json!({
            "file": path.file_name().unwrap_or_default().to_string_lossy(),
            "sha256": sha256_of(&path)?,
            "charts": drawn,
            "result": value,
        }));
    }
    if summary.is_empty() {
        return Err(Error::data(format!(
            "{} holds no result: write some there with `mlx probe train|cca|rsa|divergence`",
            dir.display()
        )));
    }
    let results = summary.len();
    let text = serde_json::to_string_pretty(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "results": summary,
    }))
    .map_err(|e| Error::file(dir, e.to_string()))?;
    let path = dir.join("summary.json");
    write_whole(&path, (text + "\n").as_bytes())?;
    files.push(path);
    let path = dir.join("index.html");
    write_whole(&path, html(&page).as_bytes())?;
    files.push(path);
    Ok(Report { files, results })
}

fn html(body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>Probes</title>\n\
         <style>body{{font-family:sans-serif;max-width:760px;margin:2em auto;padding:0 1em}}\
         svg{{width:100%;height:auto}}</style></head>\n<body><h1>Probes</h1>\n{body}</body></html>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_become_a_summary_charts_and_a_page() {
        let dir = tempfile::tempdir().unwrap();
        assert!(
            write(dir.path())
                .unwrap_err()
                .to_string()
                .contains("no result")
        );
        let rsa = Analysis::Rsa {
            inputs: Inputs::default(),
            metric: crate::rsa::Metric::Cosine,
            matrix: vec![vec![1.0, 0.5], vec![0.5, 1.0]],
        };
        let text = serde_json::to_string(&rsa).unwrap();
        std::fs::write(dir.path().join("rsa.json"), text).unwrap();
        std::fs::write(dir.path().join("a_metadata.json"), "{}").unwrap();
        let report = write(dir.path()).unwrap();
        assert_eq!((report.results, report.files.len()), (1, 3));
        let summary: Value =
            serde_json::from_slice(&std::fs::read(dir.path().join("summary.json")).unwrap())
                .unwrap();
        assert_eq!(summary["results"][0]["result"]["metric"], "cosine");
        let page = std::fs::read_to_string(dir.path().join("index.html")).unwrap();
        assert!(page.contains("<svg") && !page.contains("src="));
        // A second run finds the first summary in the folder, and must ignore it.
        assert_eq!(write(dir.path()).unwrap(), report);

        std::fs::write(dir.path().join("x.json"), r#"{"kind": "other"}"#).unwrap();
        assert!(
            write(dir.path())
                .unwrap_err()
                .to_string()
                .contains("x.json")
        );
    }
}
