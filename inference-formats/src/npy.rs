//! The `.npy` format, versions 1 to 3, as numpy's `numpy.lib.format` documents it: float32 and
//! float64 in C order. The crates for it bring a parser of Python literals with a grammar compiler
//! and big numbers; the header is one dictionary of three fields.

const MAGIC: &[u8] = b"\x93NUMPY";

/// The text after `'name':` in the header's dictionary.
fn field<'a>(header: &'a str, name: &str) -> std::result::Result<&'a str, String> {
    [format!("'{name}'"), format!("\"{name}\"")]
        .iter()
        .find_map(|quoted| header.split_once(quoted.as_str()))
        .and_then(|(_, rest)| rest.trim_start().strip_prefix(':'))
        .map(str::trim_start)
        .ok_or_else(|| format!("the header has no `{name}`"))
}

/// Parses the shape and the numbers of a file.
///
/// # Errors
/// A message without the path.
pub fn parse(file: &[u8]) -> std::result::Result<(Vec<usize>, Vec<f32>), String> {
    let rest = file
        .strip_prefix(MAGIC)
        .ok_or("not an .npy file: it does not begin with \\x93NUMPY")?;
    let short = || String::from("the file ends within its header");
    let (length, rest) = match rest {
        [1, _, a, b, rest @ ..] => (u32::from_le_bytes([*a, *b, 0, 0]), rest),
        [2 | 3, _, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]), rest),
        [1..=3, ..] | [] => return Err(short()),
        [version, ..] => return Err(format!("version {version} of .npy is not known")),
    };
    let (header, data) = rest.split_at_checked(length as usize).ok_or_else(short)?;
    let header = std::str::from_utf8(header).map_err(|_| "the header is not text")?;
    let order = field(header, "fortran_order")?;
    if order.starts_with("True") {
        return Err(String::from(
            "the array is in Fortran order; save it in C order",
        ));
    }
    let shape = field(header, "shape")?
        .strip_prefix('(')
        .and_then(|rest| rest.split_once(')'))
        .ok_or("the header's shape is not a tuple")?
        .0
        .split(',')
        .map(str::trim)
        .filter(|dim| !dim.is_empty())
        .map(str::parse::<usize>)
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|_| "the header's shape must hold whole numbers")?;
    let descr = field(header, "descr")?;
    let descr = descr
        .trim_start_matches(['\'', '"'])
        .split(['\'', '"'])
        .next()
        .unwrap_or_default();
    let width = match descr {
        "<f4" => 4,
        "<f8" => 8,
        _ => {
            return Err(format!(
                "numbers of type `{descr}`; float32 (`<f4`) or float64 (`<f8`) were expected"
            ));
        }
    };
    let count = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
    if count.and_then(|n| n.checked_mul(width)) != Some(data.len()) {
        return Err(format!(
            "the numbers have {} bytes, which does not fit shape {shape:?} with {width} bytes each",
            data.len()
        ));
    }
    let values = if width == 4 {
        let (chunks, _) = data.as_chunks::<4>();
        chunks.iter().map(|c| f32::from_le_bytes(*c)).collect()
    } else {
        let (chunks, _) = data.as_chunks::<8>();
        chunks
            .iter()
            .map(|c| f64::from_le_bytes(*c) as f32)
            .collect()
    };
    Ok((shape, values))
}

/// A file of float32 numbers in C order, version 1. The product of the shape must be the number of
/// values.
///
/// ```
/// use inference_formats::npy;
/// let file = npy::write(&[2, 1], &[0.5, -1.0]);
/// assert_eq!(npy::parse(&file), Ok((vec![2, 1], vec![0.5, -1.0])));
/// ```
#[must_use]
pub fn write(shape: &[usize], values: &[f32]) -> Vec<u8> {
    let dims: String = shape.iter().map(|n| format!("{n},")).collect();
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({dims}), }}");
    // The numbers begin at a multiple of 64 bytes, after a newline.
    let before = MAGIC.len() + 4;
    let padding = 63 - (before + header.len()) % 64;
    let header = format!("{header}{}\n", " ".repeat(padding));
    let mut file = MAGIC.to_vec();
    file.extend([1, 0]);
    file.extend(
        u16::try_from(header.len())
            .unwrap_or(u16::MAX)
            .to_le_bytes(),
    );
    file.extend(header.bytes());
    file.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend([1, 0]);
        file.extend((header.len() as u16).to_le_bytes());
        file.extend(header.bytes());
        file.extend(data);
        file
    }

    #[test]
    fn float64_and_other_spacing_are_read() {
        let header = "{\"descr\":\"<f8\",\"fortran_order\":False,\"shape\":(1,)}";
        let (shape, values) = parse(&file(header, &2.5f64.to_le_bytes())).unwrap();
        assert_eq!((shape, values), (vec![1], vec![2.5]));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}";
        for (file, expected) in [
            (b"PK".to_vec(), "not an .npy"),
            (b"\x93NUMPY\x09\x00".to_vec(), "version 9"),
            (b"\x93NUMPY\x01".to_vec(), "within its header"),
            (file(&good.replace("False", "True"), &[0; 4]), "Fortran"),
            (file(&good.replace("<f4", ">f4"), &[0; 4]), "`>f4`"),
            (
                file(&good.replace("(1,)", "(-1,)"), &[0; 4]),
                "whole numbers",
            ),
            (file(&good.replace("(1,)", "1"), &[0; 4]), "tuple"),
            (file(&good.replace("shape", "form"), &[0; 4]), "`shape`"),
            (
                file(&good.replace("(1,)", "(99999999999, 99999999999)"), &[0; 4]),
                "4 bytes",
            ),
            (file(good, &[0; 3]), "3 bytes"),
        ] {
            let e = parse(&file).unwrap_err();
            assert!(e.contains(expected), "{e}");
        }
    }
}
