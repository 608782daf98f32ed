//! Writes shards. The plan determines the headers of all shards, so tensors are written directly to
//! their final positions.

use std::fs::File;
use std::path::Path;

use inference::Result;
use serde_json::{Map, Value, json};

use super::execute;
use super::faults::failed;
use super::given::Given;
use super::options::ConvertOptions;
use super::plan::{Item, Out, Plan};
use super::source::Source;

/// The header is padded to a multiple of this number of bytes, so that tensors are aligned.
const ALIGN: usize = 8;

/// The items of one file, and the positions of their outputs.
struct Shard<'a> {
    items: Vec<&'a Item>,
    /// The JSON header with padding.
    header: Vec<u8>,
    /// The position of each output in the file, by item.
    places: Vec<Vec<u64>>,
    length: u64,
}

impl<'a> Shard<'a> {
    fn new(items: Vec<&'a Item>) -> Result<Self> {
        let mut outs: Vec<(usize, usize, &Out)> = Vec::new();
        for (i, item) in items.iter().enumerate() {
            outs.extend(item.outs.iter().enumerate().map(|(o, out)| (i, o, out)));
        }
        // Types with wide elements come first, so that each tensor is aligned to its element size.
        outs.sort_by_key(|(i, o, out)| (std::cmp::Reverse(out.dtype.bitsize()), *i, *o));
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "mlx"}));
        let mut offset = 0u64;
        let mut places: Vec<Vec<u64>> = items.iter().map(|i| vec![0; i.outs.len()]).collect();
        for (i, o, out) in outs {
            let end = offset + out.nbytes();
            let dtype = serde_json::to_value(out.dtype).unwrap_or_default();
            header.insert(
                out.name.clone(),
                json!({"dtype": dtype, "shape": out.shape, "data_offsets": [offset, end]}),
            );
            if let Some(place) = places.get_mut(i).and_then(|p| p.get_mut(o)) {
                *place = offset;
            }
            offset = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(ALIGN), b' ');
        let start = 8 + header.len() as u64;
        places
            .iter_mut()
            .flatten()
            .for_each(|place| *place += start);
        Ok(Self {
            items,
            header,
            places,
            length: start + offset,
        })
    }

    fn write(
        &self,
        (source, given): (&Source, &Given),
        path: &Path,
        written: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let cannot = |e| failed("cannot write", path, e);
        let file = File::create_new(path).map_err(cannot)?;
        file.set_len(self.length).map_err(cannot)?;
        write_at(&file, &(self.header.len() as u64).to_le_bytes(), 0).map_err(cannot)?;
        write_at(&file, &self.header, 8).map_err(cannot)?;
        for (item, places) in self.items.iter().zip(&self.places) {
            let mut counts = vec![0u64; places.len()];
            execute::run((source, given), item, &mut |out, at, bytes| {
                let place = places.get(out).copied().unwrap_or(u64::MAX);
                let most = item.outs.get(out).map_or(0, Out::nbytes);
                if at + bytes.len() as u64 > most {
                    return Err(inference::Error::new(
                        inference::ErrorKind::Engine,
                        "a tensor has more bytes than planned",
                    ));
                }
                write_at(&file, bytes, place + at).map_err(cannot)?;
                counts[out] += bytes.len() as u64;
                written(bytes.len() as u64);
                Ok(())
            })?;
            for (out, count) in item.outs.iter().zip(&counts) {
                if out.nbytes() != *count {
                    return Err(inference::Error::new(
                        inference::ErrorKind::Engine,
                        format!(
                            "tensor `{}` has {count} bytes, {} were planned",
                            out.name,
                            out.nbytes()
                        ),
                    ));
                }
            }
        }
        file.sync_all().map_err(cannot)
    }
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], at: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at)
}

#[cfg(not(unix))]
fn write_at(mut file: &File, bytes: &[u8], at: u64) -> std::io::Result<()> {
    use std::io::{Seek, SeekFrom, Write};
    file.seek(SeekFrom::Start(at))?;
    file.write_all(bytes)
}

/// Writes all tensors and their index to `dir`. Returns the number of files.
pub(super) fn weights(
    inputs: (&Source, &Given),
    plan: &Plan,
    dir: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<usize> {
    let shards = divide(&plan.items, options.max_shard_bytes);
    let total = plan.bytes();
    let count = shards.len();
    let mut done = 0;
    let mut map: Vec<(String, Value)> = Vec::new();
    for (n, items) in shards.into_iter().enumerate() {
        let name = match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", n + 1),
        };
        let shard = Shard::new(items)?;
        shard.write(inputs, &dir.join(&name), &mut |bytes| {
            done += bytes;
            progress(done, total);
        })?;
        let outs = shard.items.iter().flat_map(|i| &i.outs);
        map.extend(outs.map(|out| (out.name.clone(), Value::from(name.as_str()))));
    }
    map.sort_by(|a, b| a.0.cmp(&b.0));
    let index = json!({
        "metadata": {"total_size": total, "total_parameters": plan.parameters},
        "weight_map": Map::from_iter(map),
    });
    super::config::write_json(&dir.join("model.safetensors.index.json"), &index)?;
    Ok(count)
}

/// Divides items into files of at most `most` bytes. A larger item gets its own file.
fn divide(items: &[Item], most: u64) -> Vec<Vec<&Item>> {
    let mut shards: Vec<Vec<&Item>> = vec![Vec::new()];
    let mut size = 0u64;
    for item in items {
        let bytes: u64 = item.outs.iter().map(Out::nbytes).sum();
        if size > 0 && size.saturating_add(bytes) > most {
            shards.push(Vec::new());
            size = 0;
        }
        if let Some(shard) = shards.last_mut() {
            shard.push(item);
        }
        size = size.saturating_add(bytes);
    }
    shards
}
