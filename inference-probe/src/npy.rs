//! Writes float32 arrays in the `.npy` format. `inference_formats::npy` reads the format and makes
//! the header.

use std::path::Path;

use crate::error::{Error, Result};
use crate::files::write_whole;

pub(crate) use inference_formats::npy::parse;

/// Writes row-major `values` of this shape. The file appears completely or not at all.
///
/// # Errors
/// [`Error::Data`] when the shape has a different number of elements, and [`Error::Io`].
pub fn write(path: &Path, shape: &[usize], values: &[f32]) -> Result<()> {
    let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    if count != Some(values.len()) {
        return Err(Error::data(format!(
            "{} numbers do not fill an array of shape {shape:?}",
            values.len()
        )));
    }
    let mut file = header(shape)?;
    file.extend(bytes(values).flatten());
    write_whole(path, &file)
}

/// The header of little-endian float32 in C order.
pub(crate) fn header(shape: &[usize]) -> Result<Vec<u8>> {
    inference_formats::npy::header("<f4", shape).map_err(|e| Error::data(e.to_string()))
}

/// The bytes of each value, one value after another.
pub(crate) fn bytes(values: &[f32]) -> impl Iterator<Item = [u8; 4]> + '_ {
    values.iter().map(|v| v.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_again_and_must_be_full() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.npy");
        for shape in [vec![3], vec![2, 1], vec![1, 2, 3], vec![100_000, 0]] {
            let values = vec![0.5; shape.iter().product()];
            write(&path, &shape, &values).unwrap();
            let file = std::fs::read(&path).unwrap();
            assert_eq!(parse(&file).unwrap(), (shape, values));
        }
        for shape in [vec![2], vec![usize::MAX, 2]] {
            let e = write(&path, &shape, &[0.5; 3]).unwrap_err().to_string();
            assert!(e.contains("3 numbers do not fill"), "{e}");
        }
    }
}
