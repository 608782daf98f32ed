//! Splits tensors in which transformers joins several experts into the tensors that mlx-lm uses.

use std::path::Path;

use inference::Result;

use super::faults::wrong;
use super::slice::Slice;
use super::tensor::{Stored, Tensor};
use crate::checkpoint::family::JoinedExperts;

/// Replaces each tensor that joins the matrices of several experts by slices of it. `width` is the
/// width of an expert, for a family whose shapes do not show it.
///
/// # Errors
/// If the shapes of such tensors do not match each other.
pub(super) fn separate(
    tensors: Vec<Tensor>,
    joined: JoinedExperts,
    width: Option<usize>,
    path: &Path,
) -> Result<Vec<Tensor>> {
    let shapes = Shapes {
        tensors: &tensors,
        path,
    };
    let mut parts = Vec::with_capacity(tensors.len());
    for tensor in &tensors {
        let replaced = match joined {
            JoinedExperts::Stacks {
                gate_up,
                down,
                prefix,
                alternating,
            } => shapes.of_stack(tensor, [gate_up, down], (prefix, alternating))?,
            JoinedExperts::Rows {
                at,
                parts: names,
                prefix,
            } => shapes.of_rows(tensor, (at, prefix), names, width)?,
        };
        match replaced {
            Some(replaced) => parts.extend(replaced),
            None => parts.push(tensor.clone()),
        }
    }
    Ok(parts)
}

struct Shapes<'a> {
    tensors: &'a [Tensor],
    path: &'a Path,
}

impl Shapes<'_> {
    fn shape(&self, name: &str) -> Option<&[usize]> {
        let tensor = self.tensors.iter().find(|t| t.name == name)?;
        Some(&tensor.shape)
    }

    /// Returns the slices of a stack, or of its biases. `None` for another tensor.
    fn of_stack(
        &self,
        tensor: &Tensor,
        [gate_up, down]: [&str; 2],
        (prefix, alternating): (&str, bool),
    ) -> Result<Option<Vec<Tensor>>> {
        let name = &tensor.name;
        let (name, is_bias) = match name.strip_suffix("_bias") {
            Some(name) => (name, true),
            None => (name.as_str(), false),
        };
        let (stem, is_down) = match (name.strip_suffix(gate_up), name.strip_suffix(down)) {
            (Some(stem), _) => (stem, false),
            (_, Some(stem)) => (stem, true),
            _ => return Ok(None),
        };
        let (both, down) = (format!("{stem}{gate_up}"), format!("{stem}{down}"));
        // A quantized stack has other tensor names, and is not split.
        let (Some(&[experts, a, b]), Some(&[also, c, d])) = (self.shape(&both), self.shape(&down))
        else {
            return Ok(None);
        };
        let (transposed, width, hidden) = if (a, b) == (2 * d, c) {
            (false, d, c)
        } else if (a, b) == (d, 2 * c) {
            (true, c, d)
        } else {
            let message = format!(
                "its shape [{experts}, {a}, {b}] does not match [{also}, {c}, {d}] of {down}"
            );
            return Err(wrong(self.path, &both, message));
        };
        let bad = || {
            let message = format!("its shape {:?} does not match {both}", tensor.shape);
            wrong(self.path, &tensor.name, message)
        };
        if experts != also {
            return Err(bad());
        }
        let (outputs, inputs) = if is_down {
            (hidden, width)
        } else {
            (2 * width, hidden)
        };
        let stored = match (is_bias, transposed) {
            // Each element of a bias is a row.
            (true, _) if tensor.shape == [experts, outputs] => (outputs, 1),
            (true, _) => return Err(bad()),
            (false, true) => (inputs, outputs),
            (false, false) => (outputs, inputs),
        };
        let all = Slice {
            transposed: transposed && !is_bias,
            count: outputs,
            ..Slice::all(stored.0, stored.1)
        };
        let slices = if is_down {
            vec![("down_proj", all)]
        } else {
            let half = |part, index: usize| {
                let (first, step) = match alternating {
                    true => (index, 2),
                    false => (index * width, 1),
                };
                let slice = Slice {
                    first,
                    step,
                    count: width,
                    ..all
                };
                (part, slice)
            };
            vec![half("gate_proj", 0), half("up_proj", 1)]
        };
        let kind = if is_bias { "bias" } else { "weight" };
        let part = |(part, slice): (&str, Slice)| Tensor {
            name: format!("{stem}{prefix}.{part}.{kind}"),
            dtype: tensor.dtype,
            shape: match is_bias {
                true => vec![experts, slice.count],
                false => vec![experts, slice.count, inputs],
            },
            stored: Stored::Slice {
                name: tensor.name.clone(),
                slice,
            },
        };
        Ok(Some(slices.into_iter().map(part).collect()))
    }

    /// Returns a matrix for each expert, from a tensor with the rows of all experts. `None` for
    /// another tensor.
    fn of_rows(
        &self,
        tensor: &Tensor,
        (at, prefix): (&str, &str),
        [gate, up, down]: [&str; 3],
        width: Option<usize>,
    ) -> Result<Option<Vec<Tensor>>> {
        let Some((stem, part)) = tensor.name.rsplit_once('.') else {
            return Ok(None);
        };
        let Some(stem) = stem
            .strip_suffix(at)
            .filter(|_| [gate, up, down].contains(&part))
        else {
            return Ok(None);
        };
        let width = width.unwrap_or(0);
        let &[rows, hidden] = tensor.shape.as_slice() else {
            return Ok(None);
        };
        if width == 0 || !rows.is_multiple_of(width) {
            let message = format!("its {rows} rows do not divide into experts of width {width}");
            return Err(wrong(self.path, &tensor.name, message));
        }
        let transposed = part == down;
        let expert = |expert: usize| {
            let slice = Slice {
                first_matrix: expert,
                transposed,
                count: if transposed { hidden } else { width },
                ..Slice::all(width, hidden)
            };
            Tensor {
                name: format!("{stem}{prefix}.{expert}.{part}.weight"),
                dtype: tensor.dtype,
                shape: vec![slice.count, slice.width()],
                stored: Stored::Slice {
                    name: tensor.name.clone(),
                    slice,
                },
            }
        };
        Ok(Some((0..rows / width).map(expert).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::Dtype;

    const USUAL: JoinedExperts = JoinedExperts::Stacks {
        gate_up: ".experts.gate_up_proj",
        down: ".experts.down_proj",
        prefix: ".switch_mlp",
        alternating: false,
    };

    fn parts(of: &[(&str, &[usize])], joined: JoinedExperts) -> Result<Vec<(String, Vec<usize>)>> {
        let tensor = |(name, shape): &(&str, &[usize])| Tensor {
            name: (*name).to_owned(),
            dtype: Dtype::BF16,
            shape: shape.to_vec(),
            stored: Stored::Safetensors,
        };
        let tensors = of.iter().map(tensor).collect();
        let parts = separate(tensors, joined, Some(3), Path::new("model"))?;
        Ok(parts.into_iter().map(|t| (t.name, t.shape)).collect())
    }

    #[test]
    fn both_orientations_become_the_same_stacks() {
        let expected = [
            ("m.switch_mlp.gate_proj.weight", vec![2, 4, 8]),
            ("m.switch_mlp.up_proj.weight", vec![2, 4, 8]),
            ("m.switch_mlp.down_proj.weight", vec![2, 8, 4]),
        ]
        .map(|(name, shape)| (name.to_owned(), shape));
        // The gate and up matrix is square, so only the down matrix shows the orientation.
        for down in [[2, 8, 4], [2, 4, 8]] {
            let stored: [(&str, &[usize]); 2] = [
                ("m.experts.gate_up_proj", &[2, 8, 8]),
                ("m.experts.down_proj", &down),
            ];
            assert_eq!(parts(&stored, USUAL).unwrap(), expected);
        }
    }

    #[test]
    fn other_tensors_stay_and_shapes_must_match() {
        let stored: [(&str, &[usize]); 2] = [
            ("m.experts.gate_up_proj_blocks", &[2, 8, 1, 16]),
            ("m.experts.gate_up_proj_bias", &[2, 8]),
        ];
        let kept = parts(&stored, USUAL).unwrap();
        assert_eq!(kept.len(), 2);
        assert_eq!(kept[0].0, stored[0].0);
        for (bias, down) in [
            ([2, 8], [2, 8, 5]),
            ([2, 7], [2, 8, 4]),
            ([2, 8], [3, 8, 4]),
        ] {
            let stored: [(&str, &[usize]); 3] = [
                ("m.experts.gate_up_proj", &[2, 8, 8]),
                ("m.experts.gate_up_proj_bias", &bias),
                ("m.experts.down_proj", &down),
            ];
            let error = parts(&stored, USUAL).unwrap_err().to_string();
            assert!(error.contains("does not match"), "{error}");
        }
    }

    #[test]
    fn rows_of_all_experts_become_matrices() {
        let joined = JoinedExperts::Rows {
            at: ".experts.mlp",
            parts: ["w1", "v1", "w2"],
            prefix: ".experts",
        };
        let stored: [(&str, &[usize]); 2] =
            [("m.experts.mlp.v1", &[6, 5]), ("m.experts.mlp.w2", &[6, 5])];
        let expected = [
            ("m.experts.0.v1.weight", vec![3, 5]),
            ("m.experts.1.v1.weight", vec![3, 5]),
            ("m.experts.0.w2.weight", vec![5, 3]),
            ("m.experts.1.w2.weight", vec![5, 3]),
        ]
        .map(|(name, shape)| (name.to_owned(), shape));
        assert_eq!(parts(&stored, joined).unwrap(), expected);
        let uneven: [(&str, &[usize]); 1] = [("m.experts.mlp.v1", &[7, 5])];
        assert!(parts(&uneven, joined).is_err());
    }
}
