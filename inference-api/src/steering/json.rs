//! Edits in JSON, and the files with their vectors.

use std::path::Path;
use std::sync::Arc;

use inference_formats::files::{read_capped, read_text};
use inference_formats::safetensors::{Dtype, SafetensorsCheckpoint};
use serde::{Deserialize, Serialize};

use super::{Edit, EditOperation, EditPositions, Hook, Numbers, Steering, invalid};
use crate::error::{Error, ErrorKind, Result};
use crate::message::Prompt;

/// The maximum size of a JSON file or a numpy array, in bytes.
const MOST_BYTES: u64 = 256 << 20;

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    edits: Vec<Raw>,
}

/// An edit in JSON, with the fields of all operations.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    layers: Which,
    hook: Hook,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    positions: Option<Which>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    heads: Option<Vec<usize>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    neurons: Option<Vec<usize>>,
    op: Op,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vector: Option<Vector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    coefficient: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    factor: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prompt: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tokens: Option<Vec<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<Vec<usize>>,
}

#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Op {
    Add,
    Scale,
    Zero,
    Replace,
    Patch,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Op::Add => "add",
            Op::Scale => "scale",
            Op::Zero => "zero",
            Op::Replace => "replace",
            Op::Patch => "patch",
        }
    }
}

/// A number, a list of numbers, or a word.
#[derive(Clone, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "a number, a list of numbers, or a text such as \"all\" or \"4-6\" was expected"
)]
enum Which {
    One(usize),
    List(Vec<usize>),
    Text(String),
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "a list of numbers, or {\"file\": NAME} with \"tensor\" and \"row\", was expected"
)]
enum Vector {
    Numbers(Vec<f32>),
    File(Reference),
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reference {
    file: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tensor: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    row: Option<usize>,
}

impl Serialize for Hook {
    fn serialize<S: serde::Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Hook {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        let name = String::deserialize(d)?;
        let hook = Hook::ALL.into_iter().find(|hook| hook.name() == name);
        hook.ok_or_else(|| {
            let all: Vec<_> = Hook::ALL.iter().map(|hook| hook.name()).collect();
            serde::de::Error::custom(format!("hook `{name}` is not one of {}", all.join(", ")))
        })
    }
}

impl Which {
    /// The numbers. If the value is an unknown word, the error is that word.
    fn numbers(self) -> std::result::Result<Numbers, String> {
        match self {
            Which::One(n) => Ok(Numbers::List(vec![n])),
            Which::List(list) => Ok(Numbers::List(list)),
            Which::Text(text) if text == "all" => Ok(Numbers::All),
            Which::Text(text) => {
                let Some((first, last)) = text.split_once('-') else {
                    let one = text.parse().map(|n| Numbers::List(vec![n]));
                    return one.map_err(|_| text);
                };
                match (first.parse(), last.is_empty(), last.parse()) {
                    (Ok(first), true, _) => Ok(Numbers::Range(first, None)),
                    (Ok(first), false, Ok(last)) => Ok(Numbers::Range(first, Some(last))),
                    _ => Err(text),
                }
            }
        }
    }
}

impl From<Numbers> for Which {
    fn from(numbers: Numbers) -> Self {
        match numbers {
            Numbers::All => Which::Text(String::from("all")),
            Numbers::List(list) => Which::List(list),
            Numbers::Range(first, last) => {
                let last = last.map(|last| last.to_string()).unwrap_or_default();
                Which::Text(format!("{first}-{last}"))
            }
        }
    }
}

impl Raw {
    fn positions(which: Option<Which>, at: usize) -> Result<EditPositions> {
        let Some(which) = which else {
            return Ok(EditPositions::At(Numbers::All));
        };
        match which.numbers() {
            Ok(numbers) => Ok(EditPositions::At(numbers)),
            Err(word) => match word.as_str() {
                "prompt" => Ok(EditPositions::Prompt),
                "last" => Ok(EditPositions::Last),
                "reply" => Ok(EditPositions::Reply),
                _ => invalid(format!(
                    "edits[{at}].positions is `{word}`; it must be all, last, prompt, reply, a \
                     number, a list, or a range such as 2-5 or 2-"
                )),
            },
        }
    }

    /// Converts to an edit. `load` reads the vector from its file.
    fn edit(mut self, at: usize, load: &dyn Fn(&Reference) -> Result<Vec<f32>>) -> Result<Edit> {
        let layers = self.layers.clone().numbers().or_else(|word| {
            invalid(format!(
                "edits[{at}].layers is `{word}`; it must be all, a number, a list, or a range such \
                 as 4-6 or 4-"
            ))
        })?;
        let positions = Self::positions(self.positions.take(), at)?;
        let units = match (self.hook, self.heads.take(), self.neurons.take()) {
            (_, None, None) => None,
            (Hook::Heads, heads, None) => heads,
            (Hook::Neurons, None, neurons) => neurons,
            (hook, heads, _) => {
                let (field, wanted) = match heads {
                    Some(_) => ("heads", Hook::Heads),
                    None => ("neurons", Hook::Neurons),
                };
                return invalid(format!(
                    "edits[{at}].{field} does not go with hook {hook}, only with {wanted}"
                ));
            }
        };
        let op = self.op;
        let missing = |field: &str| {
            Error::new(
                ErrorKind::InvalidOption,
                format!("edits[{at}] has no {field}, which op {} needs", op.name()),
            )
        };
        let mut vector = || match self.vector.take() {
            Some(Vector::Numbers(numbers)) => Ok(numbers.into()),
            Some(Vector::File(reference)) => {
                let loaded = load(&reference);
                let loaded = loaded.map_err(|e| e.context(format!("edits[{at}].vector")));
                loaded.map(Arc::from)
            }
            None => Err(missing("vector")),
        };
        let operation = match op {
            Op::Add => EditOperation::Add {
                vector: vector()?,
                coefficient: self.coefficient.take().unwrap_or(1.0),
            },
            Op::Scale => EditOperation::Scale(self.factor.take().ok_or_else(|| missing("factor"))?),
            Op::Zero => EditOperation::Scale(0.0),
            Op::Replace => EditOperation::Replace(vector()?),
            Op::Patch => EditOperation::Patch {
                prompt: match (self.prompt.take(), self.tokens.take()) {
                    (Some(text), None) => Prompt::Text(text),
                    (None, Some(tokens)) => Prompt::Tokens(tokens),
                    (None, None) => return Err(missing("prompt or tokens")),
                    (Some(_), Some(_)) => {
                        return invalid(format!(
                            "edits[{at}] has both prompt and tokens; leave one of them out"
                        ));
                    }
                },
                from: self.from.take(),
            },
        };
        // A field that the operation does not use must be absent.
        let left = [
            ("vector", self.vector.is_some()),
            ("coefficient", self.coefficient.is_some()),
            ("factor", self.factor.is_some()),
            ("prompt", self.prompt.is_some()),
            ("tokens", self.tokens.is_some()),
            ("from", self.from.is_some()),
        ];
        if let Some((field, _)) = left.into_iter().find(|(_, left)| *left) {
            return invalid(format!(
                "edits[{at}].{field} does not go with op {}; leave it out",
                op.name()
            ));
        }
        Ok(Edit {
            layers,
            hook: self.hook,
            positions,
            units,
            operation,
        })
    }
}

fn steering(file: File, load: &dyn Fn(&Reference) -> Result<Vec<f32>>) -> Result<Steering> {
    let edits = file.edits.into_iter().enumerate();
    let edits = edits.map(|(at, raw)| raw.edit(at, load));
    Steering::new(edits.collect::<Result<Vec<_>>>()?)
}

impl TryFrom<File> for Steering {
    type Error = Error;

    fn try_from(file: File) -> Result<Self> {
        steering(file, &|reference| {
            invalid(format!(
                "file `{}` cannot be read here; give the numbers",
                reference.file
            ))
        })
    }
}

impl From<Steering> for File {
    fn from(steering: Steering) -> Self {
        let numbers = |values: &Arc<[f32]>| Some(Vector::Numbers(values.to_vec()));
        let edits = (steering.edits().iter()).map(|edit| {
            let (heads, neurons) = match edit.hook {
                Hook::Heads => (edit.units.clone(), None),
                _ => (None, edit.units.clone()),
            };
            let word = |word: &str| Some(Which::Text(word.to_owned()));
            let mut raw = Raw {
                layers: edit.layers.clone().into(),
                hook: edit.hook,
                positions: match &edit.positions {
                    EditPositions::At(numbers) => Some(numbers.clone().into()),
                    EditPositions::Prompt => word("prompt"),
                    EditPositions::Last => word("last"),
                    EditPositions::Reply => word("reply"),
                },
                heads,
                neurons,
                op: Op::Zero,
                vector: None,
                coefficient: None,
                factor: None,
                prompt: None,
                tokens: None,
                from: None,
            };
            match &edit.operation {
                EditOperation::Add {
                    vector,
                    coefficient,
                } => {
                    raw.op = Op::Add;
                    (raw.vector, raw.coefficient) = (numbers(vector), Some(*coefficient));
                }
                EditOperation::Scale(factor) => {
                    (raw.op, raw.factor) = (Op::Scale, Some(*factor));
                }
                EditOperation::Replace(vector) => {
                    (raw.op, raw.vector) = (Op::Replace, numbers(vector));
                }
                EditOperation::Patch { prompt, from } => {
                    raw.op = Op::Patch;
                    match prompt {
                        Prompt::Text(text) => raw.prompt = Some(text.clone()),
                        Prompt::Tokens(tokens) => raw.tokens = Some(tokens.clone()),
                    }
                    raw.from.clone_from(from);
                }
            }
            raw
        });
        File {
            edits: edits.collect(),
        }
    }
}

/// Reads a file of edits and the vector files that it refers to.
pub fn read(path: &Path) -> Result<Steering> {
    let text = read_text(path, MOST_BYTES)?;
    let file: File = serde_json::from_str(&text).map_err(|e| {
        Error::new(ErrorKind::InvalidOption, format!("the edits: {e}")).with_path(path)
    })?;
    let beside = path.parent().unwrap_or(Path::new(""));
    let load = |reference: &Reference| vector(&beside.join(&reference.file), reference);
    steering(file, &load).map_err(|e| e.with_path(path))
}

fn vector(path: &Path, reference: &Reference) -> Result<Vec<f32>> {
    let fault = |message: String| Error::new(ErrorKind::InvalidOption, message).with_path(path);
    let (shape, values) = match path.extension().and_then(|e| e.to_str()) {
        Some("npy") => {
            if reference.tensor.is_some() {
                let message = "an .npy file has one array; leave tensor out";
                return Err(fault(String::from(message)));
            }
            inference_formats::npy::parse(&read_capped(path, MOST_BYTES)?).map_err(fault)?
        }
        Some("safetensors") => {
            let file = SafetensorsCheckpoint::open_file(path)?;
            let names: Vec<&str> = file.names().collect();
            let name = match (&reference.tensor, names.as_slice()) {
                (Some(name), _) => name.as_str(),
                (None, [only]) => only,
                (None, _) => {
                    let message = format!("tensor must name one of {}", names.join(", "));
                    return Err(fault(message));
                }
            };
            let info = file.info(name).ok_or_else(|| {
                let all = names.join(", ");
                fault(format!("there is no tensor `{name}`; there are {all}"))
            })?;
            if info.dtype != Dtype::F32 {
                return Err(fault(format!(
                    "tensor `{name}` is of type {}; save it as F32",
                    info.dtype
                )));
            }
            (info.shape.clone(), file.read::<f32>(info)?)
        }
        _ => {
            let message = "vectors stand in files that end in .npy or .safetensors";
            return Err(fault(String::from(message)));
        }
    };
    match (shape.as_slice(), reference.row) {
        ([_] | [1, _], None) => Ok(values),
        ([rows, width], Some(row)) if row < *rows => {
            Ok(values[row * width..(row + 1) * width].to_vec())
        }
        (_, row) => Err(fault(format!(
            "an array of shape {shape:?} with {}; it must be one vector, or rows of which row \
             names one",
            row.map_or(String::from("no row"), |row| format!("row {row}"))
        ))),
    }
}
