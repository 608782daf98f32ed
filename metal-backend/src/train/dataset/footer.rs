//! Limits the nesting of a Parquet file's schema, because the crate `parquet` reads it by
//! recursion. A deep schema would overflow the stack and end the program.
//!
//! The footer is in Thrift's compact protocol
//! (<https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md>). Its
//! fields are those of `FileMetaData` in Parquet's `parquet.thrift`.

use std::io::{Read, Seek, SeekFrom};

use inference::Result;

use super::limits::{bad, io};

/// The maximum nesting of a schema. Training data needs fewer levels.
const MAX_DEPTH: usize = 64;
/// The maximum size of a footer in bytes. A footer has a few hundred bytes per column and row
/// group.
const MAX_FOOTER: u64 = 256 << 20;
/// The number of last bytes of a file: the length of the footer (4), and the mark `PAR1` (4).
const TAIL: u64 = 8;

/// Checks the footer, and seeks to the start of the file.
///
/// # Errors
/// `InvalidOption` if it is not a Parquet file, or its schema is too deep; `Io` if it cannot be
/// read.
pub(super) fn check(file: &mut (impl Read + Seek)) -> Result<()> {
    let failed = |e| io("read the file", e);
    let end = file.seek(SeekFrom::End(0)).map_err(failed)?;
    let no_parquet = || bad("it is not a Parquet file, or it is cut off");
    let start = end.checked_sub(TAIL).ok_or_else(no_parquet)?;
    file.seek(SeekFrom::Start(start)).map_err(failed)?;
    let mut tail = [0; TAIL as usize];
    file.read_exact(&mut tail).map_err(failed)?;
    let [a, b, c, d, mark @ ..] = tail;
    if &mark != b"PAR1" {
        return Err(no_parquet());
    }
    let length = u64::from(u32::from_le_bytes([a, b, c, d]));
    if length > MAX_FOOTER {
        return Err(bad(format!(
            "its footer has {length} bytes; at most {MAX_FOOTER} are read"
        )));
    }
    let start = start.checked_sub(length).ok_or_else(no_parquet)?;
    file.seek(SeekFrom::Start(start)).map_err(failed)?;
    let mut footer = Vec::new();
    let read = file.take(length).read_to_end(&mut footer);
    read.map_err(failed)?;
    let depth = Cursor(&footer)
        .schema_depth()
        .ok_or_else(|| bad("the footer of this Parquet file is damaged"))?;
    if depth > MAX_DEPTH {
        return Err(bad(format!(
            "its columns are nested more than {MAX_DEPTH} levels deep"
        )));
    }
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    Ok(())
}

const I32: u8 = 5;
const LIST: u8 = 9;
const STRUCT: u8 = 12;
/// The id of the field of `FileMetaData` that contains the schema.
const SCHEMA: i64 = 2;
/// The id of the field of `SchemaElement` that contains the number of children.
const CHILDREN: i64 = 5;
/// The maximum nesting of skipped values.
const MAX_SKIPPED: usize = 16;

/// The unread bytes of the footer. Methods return `None` at the end of the bytes and for unknown
/// types.
struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    /// Returns the maximum nesting of groups. Stops counting just above [`MAX_DEPTH`].
    fn schema_depth(&mut self) -> Option<usize> {
        let mut id = 0;
        loop {
            let kind = self.field(&mut id)?;
            if kind == LIST && id == SCHEMA {
                break;
            }
            if kind == 0 || id > SCHEMA {
                return None;
            }
            self.skip(kind, 0)?;
        }
        let (count, kind) = self.list()?;
        if kind != STRUCT {
            return None;
        }
        // For each open group, the number of children that are not read yet.
        let mut open: Vec<u64> = Vec::new();
        let mut deepest = 0;
        for _ in 0..count {
            while open.last() == Some(&0) {
                open.pop();
            }
            if let Some(left) = open.last_mut() {
                *left -= 1;
            }
            let children = self.children()?;
            if children > 0 {
                open.push(children);
            }
            deepest = deepest.max(open.len());
            if deepest > MAX_DEPTH {
                break;
            }
        }
        Some(deepest)
    }

    /// Reads a `SchemaElement`, and returns its number of children.
    fn children(&mut self) -> Option<u64> {
        let (mut id, mut children) = (0, 0);
        loop {
            match self.field(&mut id)? {
                0 => return Some(children),
                I32 if id == CHILDREN => children = u64::try_from(self.zigzag()?).ok()?,
                kind => self.skip(kind, 0)?,
            }
        }
    }

    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn zigzag(&mut self) -> Option<i64> {
        let value = self.varint()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// Returns the type of the next field, or 0 at the end of a struct. Sets `id` to the field's
    /// id.
    fn field(&mut self, id: &mut i64) -> Option<u8> {
        let byte = self.byte()?;
        let (delta, kind) = (byte >> 4, byte & 15);
        if kind != 0 {
            *id = match delta {
                0 => self.zigzag()?,
                _ => id.checked_add(i64::from(delta))?,
            };
        }
        Some(kind)
    }

    /// Reads the header of a list: the number and the type of its elements.
    fn list(&mut self) -> Option<(u64, u8)> {
        let byte = self.byte()?;
        let count = match byte >> 4 {
            15 => self.varint()?,
            count => u64::from(count),
        };
        Some((count, byte & 15))
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        if depth > MAX_SKIPPED {
            return None;
        }
        match kind {
            // The type of a Boolean field includes its value, so no bytes follow.
            1 | 2 => {}
            3 => drop(self.byte()?),
            4..=6 => drop(self.varint()?),
            7 => self.0 = self.0.get(8..)?,
            8 => {
                let length = usize::try_from(self.varint()?).ok()?;
                self.0 = self.0.get(length..)?;
            }
            LIST | 10 => {
                let (count, kind) = self.list()?;
                for _ in 0..count {
                    // A Boolean in a list is one byte.
                    let kind = if kind <= 2 { 3 } else { kind };
                    self.skip(kind, depth + 1)?;
                }
            }
            STRUCT => {
                let mut id = 0;
                loop {
                    match self.field(&mut id)? {
                        0 => break,
                        kind => self.skip(kind, depth + 1)?,
                    }
                }
            }
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor as File;

    use super::*;

    /// Returns a file whose schema is a chain of `groups` groups around one column.
    fn chain(groups: usize) -> Vec<u8> {
        let mut footer = vec![0x15, 0x02, 0x19, 0xfc];
        let mut count = groups + 1;
        while count >= 0x80 {
            footer.push(count as u8 | 0x80);
            count >>= 7;
        }
        footer.push(count as u8);
        for _ in 0..groups {
            // Field 4 is a name of one byte; field 5 says that there is one child.
            footer.extend([0x48, 1, b'g', 0x15, 2, 0]);
        }
        footer.extend([0x15, 2, 0x38, 1, b'x', 0, 0]);
        let mut file = b"PAR1".to_vec();
        file.extend(&footer);
        file.extend((footer.len() as u32).to_le_bytes());
        file.extend(b"PAR1");
        file
    }

    #[test]
    fn deep_schemas_are_refused() {
        check(&mut File::new(chain(1))).unwrap();
        check(&mut File::new(chain(MAX_DEPTH))).unwrap();
        for groups in [MAX_DEPTH + 1, 1_000_000] {
            let error = check(&mut File::new(chain(groups))).unwrap_err();
            assert!(error.to_string().contains("levels deep"), "{error}");
        }
        for cut in 0..40 {
            let mut file = chain(3);
            file.drain(4..4 + cut.min(file.len() - 12));
            let error = check(&mut File::new(file));
            assert!(cut == 0 || error.is_err(), "{cut}");
        }
        assert!(check(&mut File::new(b"PAR1".to_vec())).is_err());
    }
}
