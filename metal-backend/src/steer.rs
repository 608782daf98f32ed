//! Edits activations during forward passes. One hook changes states; another hook captures the
//! states of another prompt.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use inference::{
    Edit, EditOperation, EditPositions, Error, ErrorKind, Hook, Interrupt, Numbers, Result,
    Steering, SteeringShape,
};
use mlx_rs_core::{Array, Dtype, concatenate, eval, where_};

use crate::arch::Decoder;
use crate::cache::{CacheOptions, Caches, Row};
use crate::engine::Engine;
use crate::engine::forward::ids;
use crate::error::engine as engine_error;
use crate::nn::attention::Positions;
use crate::nn::hooks::{Place, StateHook, Watch};

/// Where a hook is called: a layer, and the hook's point in the layer.
type Site = (usize, Hook);

/// Returns the layers and hooks at which the model's states can be edited.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a model without hooks.
pub fn shape(engine: &Engine, decoder: &dyn Decoder) -> Result<SteeringShape> {
    let unsupported = |why: &str| {
        let name = &engine.info().architecture;
        let message = format!("{name} cannot be edited: {why}; leave steering out");
        Error::new(ErrorKind::Unsupported, message)
    };
    if engine.is_part() {
        return Err(unsupported("this process has a part of the model only"));
    }
    let layers = decoder.hooks();
    let layers = layers.ok_or_else(|| unsupported("its blocks show no states"))?;
    Ok(SteeringShape::new(engine.info().hidden_size, layers))
}

/// The edits of one request.
#[derive(Debug, Clone)]
pub struct RequestEdits {
    edits: Arc<[Prepared]>,
    sites: Arc<BTreeSet<Site>>,
    /// The number of tokens in the request's prompt.
    prompt: usize,
}

/// An edit, with the captured states of its source prompt.
#[derive(Debug)]
struct Prepared {
    edit: Edit,
    /// For each layer, `[1, positions of the source, width]`. Empty if the edit is not a patch.
    states: BTreeMap<usize, Array>,
    /// For each layer, the width of one unit, if the edit selects units.
    unit_width: BTreeMap<usize, usize>,
}

impl RequestEdits {
    /// Prepares `steering` for a prompt of `prompt` tokens: checks it against the model, and
    /// captures the states of source prompts. Call this function in the engine's scope.
    ///
    /// # Errors
    /// Errors of [`shape`] and [`Steering::check`], an invalid source prompt, lack of memory, or an
    /// interrupt.
    pub fn new(
        (engine, decoder): (&Engine, &dyn Decoder),
        steering: &Steering,
        prompt: usize,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let shape = shape(engine, decoder)?;
        steering.check(&shape)?;
        let mut edits = Vec::with_capacity(steering.edits().len());
        let mut sites = BTreeSet::new();
        let mut captured = 0usize;
        for (at, edit) in steering.edits().iter().enumerate() {
            let layers = (0..shape.layers.len()).filter(|&layer| edit.layers.has(layer));
            let edit_sites: BTreeSet<Site> = layers.map(|layer| (layer, edit.hook)).collect();
            let mut states = BTreeMap::new();
            if let EditOperation::Patch {
                prompt: source,
                from,
            } = &edit.operation
            {
                let tokens = engine.encode_prompt(source)?;
                engine.check_prompt(&tokens)?;
                check_source(at, edit, from.as_deref(), tokens.len())?;
                let by_site = capture((engine, decoder), &tokens, edit_sites.clone(), interrupt)?;
                for ((layer, _), x) in by_site {
                    captured = captured.saturating_add(x.size());
                    states.insert(layer, x);
                }
                if captured > Steering::MOST_NUMBERS {
                    return Err(Error::new(
                        ErrorKind::InvalidOption,
                        format!(
                            "edits[{at}] patches in {captured} numbers with those before it; at \
                             most {} are allowed: shorten the prompt or name fewer layers",
                            Steering::MOST_NUMBERS
                        ),
                    ));
                }
            }
            let unit_width = edit_sites.iter().filter_map(|&(layer, hook)| {
                let width = match hook {
                    Hook::Heads => shape.layers.get(layer)?.heads?.1,
                    _ => 1,
                };
                Some((layer, width))
            });
            let unit_width = unit_width.collect();
            sites.extend(edit_sites);
            edits.push(Prepared {
                edit: edit.clone(),
                states,
                unit_width,
            });
        }
        Ok(Self {
            edits: edits.into(),
            sites: Arc::new(sites),
            prompt,
        })
    }
}

/// Returns an error if a source position is beyond the end of the source prompt.
fn check_source(at: usize, edit: &Edit, from: Option<&[usize]>, length: usize) -> Result<()> {
    let named = match (from, &edit.positions) {
        (Some(from), _) => from,
        (None, EditPositions::At(Numbers::List(list))) => list,
        _ => return Ok(()),
    };
    match named.iter().find(|&&n| n >= length) {
        None => Ok(()),
        Some(n) => Err(Error::new(
            ErrorKind::InvalidOption,
            format!(
                "edits[{at}] patches in position {n} of its prompt, which has positions 0 to {}",
                length - 1
            ),
        )),
    }
}

impl Prepared {
    /// Returns the source position for `position`; `None` if the source has no such position.
    fn source(&self, position: usize, length: usize) -> Option<usize> {
        let EditOperation::Patch { from, .. } = &self.edit.operation else {
            return None;
        };
        let source = match (&self.edit.positions, from) {
            (EditPositions::At(Numbers::List(list)), Some(from)) => {
                let at = list.iter().position(|&n| n == position)?;
                *from.get(at)?
            }
            (EditPositions::Last, Some(from)) => *from.first()?,
            (EditPositions::Last, None) => length.checked_sub(1)?,
            _ => position,
        };
        (source < length).then_some(source)
    }

    /// Applies this edit to `x` `[1, N, W]`. `positions` are positions in this edit's sequence;
    /// `None` marks positions of other sequences.
    fn apply(
        &self,
        layer: usize,
        x: &Array,
        positions: &[Option<usize>],
        prompt: usize,
    ) -> mlx_rs_core::Result<Array> {
        let states = self.states.get(&layer);
        let length = match states {
            Some(states) => usize::try_from(states.dim(1)?).unwrap_or(0),
            None => 0,
        };
        let patches = matches!(self.edit.operation, EditOperation::Patch { .. });
        // For each position: its source position, and whether it is edited.
        let mut sources: Vec<u32> = vec![0; positions.len()];
        let mut chosen: Vec<bool> = Vec::with_capacity(positions.len());
        for (position, source) in positions.iter().zip(&mut sources) {
            let mut edited = position.is_some_and(|n| self.edit.positions.has(n, prompt));
            if let (true, true, Some(n)) = (edited, patches, *position) {
                let source_row = self.source(n, length);
                *source = source_row.and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
                edited = source_row.is_some();
            }
            chosen.push(edited);
        }
        if !chosen.contains(&true) {
            return Ok(x.clone());
        }
        let width = x.dim(-1)?;
        let new = match &self.edit.operation {
            EditOperation::Add {
                vector,
                coefficient,
            } => {
                let vector: Vec<f32> = vector.iter().map(|v| v * coefficient).collect();
                x.add(&self.spread(&vector, layer, width)?.astype(x.dtype())?)?
            }
            EditOperation::Scale(factor) => {
                x.multiply(&Array::scalar(*factor)?.astype(x.dtype())?)?
            }
            EditOperation::Replace(vector) => self
                .spread(vector, layer, width)?
                .astype(x.dtype())?
                .broadcast_to(x.shape())?,
            EditOperation::Patch { .. } => match states {
                Some(states) => states.take_ids(&sources, 1)?.astype(x.dtype())?,
                None => return Ok(x.clone()),
            },
        };
        let n = i32::try_from(chosen.len()).unwrap_or(i32::MAX);
        let mut mask = Array::from_slice(&chosen, &[1, n, 1])?;
        if self.edit.units.is_some() {
            let units = self.unit_mask(layer, width);
            mask = mask.logical_and(&Array::from_slice(&units, &[1, 1, width])?)?;
        }
        where_(&mask, &new, x)
    }

    /// Returns a vector of `width` elements: values of `vector` at the edited units, zeros
    /// elsewhere.
    fn spread(&self, vector: &[f32], layer: usize, width: i32) -> mlx_rs_core::Result<Array> {
        let Some(units) = &self.edit.units else {
            return Array::from_slice(vector, &[1, 1, width]);
        };
        let unit = self.unit(layer);
        let mut all = vec![0.0f32; usize::try_from(width).unwrap_or(0)];
        for (numbers, &n) in vector.chunks(unit).zip(units) {
            if let Some(values) = all.get_mut(n * unit..(n + 1) * unit) {
                values.copy_from_slice(numbers);
            }
        }
        Array::from_slice(&all, &[1, 1, width])
    }

    /// Returns, for each of `width` elements, whether it belongs to an edited unit.
    fn unit_mask(&self, layer: usize, width: i32) -> Vec<bool> {
        let units = self.edit.units.as_deref().unwrap_or_default();
        let unit = self.unit(layer);
        let width = usize::try_from(width).unwrap_or(0);
        (0..width).map(|i| units.contains(&(i / unit))).collect()
    }

    /// Returns the width of one unit (head or neuron).
    fn unit(&self, layer: usize) -> usize {
        self.unit_width.get(&layer).copied().unwrap_or(1).max(1)
    }
}

/// The edits of each row in a forward pass; `None` for rows without edits.
pub struct Edits(Vec<Option<RequestEdits>>);

impl Edits {
    /// Combines the edits of rows; `None` if no row has edits.
    pub fn new(rows: Vec<Option<RequestEdits>>) -> Option<Self> {
        rows.iter().any(Option::is_some).then_some(Self(rows))
    }
}

/// Prepares the edits of a prompt with `prompt` tokens; `None` without steering.
///
/// # Errors
/// The errors of [`RequestEdits::new`].
pub fn edits_of(
    of: (&Engine, &dyn Decoder),
    steering: Option<&Steering>,
    prompt: usize,
    interrupt: &Interrupt,
) -> Result<Option<Edits>> {
    let edits = steering.map(|steering| RequestEdits::new(of, steering, prompt, interrupt));
    Ok(Edits::new(vec![edits.transpose()?]))
}

/// Returns `edits` as a hook for a forward pass, if there are any.
pub fn hook(edits: &mut Option<Edits>) -> Option<&mut dyn StateHook> {
    match edits {
        Some(edits) => Some(edits),
        None => None,
    }
}

/// Returns a [`Watch`] that applies `edits` during a forward pass. Without edits, it does nothing.
pub fn watch(edits: &mut Option<Edits>) -> Watch<'_> {
    match hook(edits) {
        Some(hook) => Watch::hooked(hook),
        None => Watch::nothing(),
    }
}

impl StateHook for Edits {
    fn wants(&self, layer: usize, hook: Hook) -> bool {
        let mut rows = self.0.iter().flatten();
        rows.any(|row| row.sites.contains(&(layer, hook)))
    }

    fn at(
        &mut self,
        layer: usize,
        hook: Hook,
        x: &Array,
        places: &[Place],
    ) -> mlx_rs_core::Result<Array> {
        let count = usize::try_from(x.dim(1)?).unwrap_or(0);
        let all: usize = places.iter().map(|place| place.length).sum();
        let last = count != all;
        let mut x = x.clone();
        let mut from = 0;
        for (row, place) in self.0.iter().zip(places) {
            let n = if last { 1 } else { place.length };
            let first = place.offset + place.length - n;
            if let Some(row) = row
                .as_ref()
                .filter(|row| row.sites.contains(&(layer, hook)))
            {
                let mut positions = vec![None; count];
                for (i, position) in positions.iter_mut().skip(from).take(n).enumerate() {
                    *position = Some(first + i);
                }
                for prepared in row.edits.iter() {
                    if prepared.edit.hook == hook && prepared.edit.layers.has(layer) {
                        x = prepared.apply(layer, &x, &positions, row.prompt)?;
                    }
                }
            }
            from += n;
        }
        Ok(x)
    }
}

/// A hook that stores the states of selected sites.
struct Capture {
    sites: BTreeSet<Site>,
    captured: BTreeMap<Site, Vec<Array>>,
}

impl StateHook for Capture {
    fn wants(&self, layer: usize, hook: Hook) -> bool {
        self.sites.contains(&(layer, hook))
    }

    fn at(
        &mut self,
        layer: usize,
        hook: Hook,
        x: &Array,
        _: &[Place],
    ) -> mlx_rs_core::Result<Array> {
        self.captured
            .entry((layer, hook))
            .or_default()
            .push(x.clone());
        Ok(x.clone())
    }
}

/// Runs the unedited model on `tokens` and returns the states `[1, tokens, width]` at `sites`, in
/// float32.
///
/// # Errors
/// If memory runs out, the model is closed, or `interrupt` ends the run.
pub fn capture(
    (engine, decoder): (&Engine, &dyn Decoder),
    tokens: &[u32],
    sites: BTreeSet<Site>,
    interrupt: &Interrupt,
) -> Result<BTreeMap<Site, Array>> {
    let fault = engine_error("steering");
    let mut caches = decoder
        .new_caches(&complete_caches())
        .for_sequence(tokens.len());
    let mut capture = Capture {
        sites,
        captured: BTreeMap::new(),
    };
    for part in tokens.chunks(STEP) {
        engine.check_open()?;
        interrupt.check()?;
        run(decoder, part, &mut caches, &mut capture)
            .and_then(|out| {
                let last = capture.captured.values().filter_map(|parts| parts.last());
                eval(last.chain([&out]))
            })
            .map_err(&fault)?;
    }
    let joined = |(site, parts): (Site, Vec<Array>)| {
        let x = concatenate(&parts.iter().collect::<Vec<_>>(), 1)?.astype(Dtype::Float32)?;
        eval([&x])?;
        Ok((site, x))
    };
    let captured: mlx_rs_core::Result<_> = capture.captured.into_iter().map(joined).collect();
    captured.map_err(fault)
}

/// The number of positions per forward pass of a capture.
const STEP: usize = 512;

/// Options for caches that keep all positions unquantized, so that memory options do not change
/// captures.
fn complete_caches() -> CacheOptions {
    CacheOptions {
        bound: None,
        packing: None,
        half: false,
        trimmable: Some(CacheOptions::ALL),
    }
}

fn run(
    decoder: &dyn Decoder,
    part: &[u32],
    caches: &mut Caches,
    capture: &mut Capture,
) -> mlx_rs_core::Result<Array> {
    let ids = ids(part)?;
    let mut rows = [Row {
        length: ids.dim(1)?,
        caches,
    }];
    let watch = &mut Watch::hooked(capture).instead_of_logits();
    decoder.forward(&ids, &mut rows, Positions::All, watch)
}
