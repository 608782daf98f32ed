//! Writes float32 arrays in the `.npy` format, as numpy's `numpy.lib.format` documents it.
//! `inference_formats::npy` reads it.

use std::path::Path;

use crate::error::{Error, Result};
use crate::files::write_whole;

pub(crate) use inference_formats::npy::parse;

const MAGIC: &[u8] = b"\x93NUMPY";

/// Writes `values`, which are row-major and have this shape, completely or not at all.
///
/// # Errors
/// [`Error::Data`] when the shape has a different number of elements, and [`Error::Io`].
pub fn write(path: &Path, shape: &[usize], values: &[f32]) -> Result<()> {
    if shape.iter().product::<usize>() != values.len() {
        return Err(Error::data(format!(
            "{} numbers do not fill an array of shape {shape:?}",
            values.len()
        )));
    }
    let mut file = header(shape);
    file.extend(bytes(values).flatten());
    write_whole(path, &file)
}

/// The header of little-endian float32 in C order.
pub(crate) fn header(shape: &[usize]) -> Vec<u8> {
    let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let comma = if shape.len() == 1 { "," } else { "" };
    let mut text = format!(
        "{{'descr': '<f4', 'fortran_order': False, 'shape': ({}{comma}), }}",
        dims.join(", ")
    );
    // The numbers begin at a multiple of 64 bytes; a newline ends the header.
    let before = MAGIC.len() + 4;
    let padding = (64 - (before + text.len() + 1) % 64) % 64;
    text.push_str(&" ".repeat(padding));
    text.push('\n');
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.bytes());
    bytes
}

/// The numbers of `values`, one by one.
pub(crate) fn bytes(values: &[f32]) -> impl Iterator<Item = [u8; 4]> + '_ {
    values.iter().map(|v| v.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_again_and_aligned() {
        for shape in [vec![3], vec![2, 1], vec![1, 2, 3], vec![100_000, 0]] {
            let mut file = header(&shape);
            assert_eq!(file.len() % 64, 0);
            let count = shape.iter().product();
            file.extend(bytes(&vec![0.5; count]).flatten());
            assert_eq!(parse(&file).unwrap(), (shape, vec![0.5; count]));
        }
    }
}
