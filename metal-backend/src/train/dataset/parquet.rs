//! Reads rows of Parquet files as JSON objects. Columns become fields.
//!
//! Nulls become missing fields, at every level. Columns whose type has no counterpart in JSON, such
//! as bytes, maps and times, are dropped. `footer` limits the nesting, because the crate `parquet`
//! reads the schema by recursion.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use inference::Result;
use parquet::basic::{ConvertedType, LogicalType, Repetition, Type as Physical};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Number, Value as Json};

use super::footer;
use super::limits::{DataLimits, bad, io};

/// Calls `each` with every row of a file, or with the reason why the row is unusable.
///
/// # Errors
/// If the file cannot be read, is damaged or is beyond a limit; and the errors of `each`.
pub(super) fn read_rows(
    path: &Path,
    limits: &DataLimits,
    each: &mut dyn FnMut(Result<Map<String, Json>, String>) -> Result<()>,
) -> Result<()> {
    let mut file = File::open(path).map_err(|e| io("open the file", e))?;
    footer::check(&mut file)?;
    let opened = guarded(|| {
        let reader = SerializedFileReader::new(file)?;
        let schema = reader.metadata().file_metadata().schema();
        let (wanted, left_out) = projection(schema)?;
        let rows = RowIter::from_file_into(Box::new(reader)).project(Some(wanted))?;
        Ok((rows, left_out))
    });
    let (mut rows, left_out) = opened.map_err(damaged)?;
    let mut row = || guarded(|| rows.next().transpose());
    while let Some(row) = row().map_err(damaged)? {
        let size = bytes_of(&row);
        let row = match size <= limits.line_bytes {
            true => object(row),
            false => Err(format!("the row has more than {} bytes", limits.line_bytes)),
        };
        // If a required field is missing, its column may have been dropped, so the error lists
        // dropped columns.
        each(row).map_err(|e| match left_out.is_empty() {
            true => e,
            false => e.context(format!(
                "columns without a type of JSON: {}",
                left_out.join(", ")
            )),
        })?;
    }
    Ok(())
}

fn damaged(why: String) -> inference::Error {
    bad(format!("the file cannot be read as Parquet: {why}"))
}

/// Runs a function of the crate `parquet`. Converts its panics to errors, because some damaged
/// files make it panic.
fn guarded<T>(f: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err(String::from("its parts contradict each other")),
    }
}

/// Returns the schema of the readable columns, and the names of the other columns.
fn projection(schema: &Type) -> Result<(Type, Vec<String>), ParquetError> {
    let (wanted, others): (Vec<_>, Vec<_>) =
        schema.get_fields().iter().cloned().partition(is_readable);
    let left_out = others.iter().map(|field| field.name().to_owned()).collect();
    if wanted.is_empty() {
        return Err(ParquetError::General(String::from(
            "no column has a type of JSON",
        )));
    }
    let schema = Type::group_type_builder(schema.name())
        .with_fields(wanted)
        .build()?;
    Ok((schema, left_out))
}

/// Whether a column is a number, text, a Boolean, or a list or struct of these. For lists, only the
/// standard three-level form is readable, because the crate panics for other forms.
fn is_readable(field: &Arc<Type>) -> bool {
    let info = field.get_basic_info();
    if !info.has_repetition() || info.repetition() == Repetition::REPEATED {
        return false;
    }
    let converted = info.converted_type();
    if field.is_primitive() {
        let is_text = matches!(
            converted,
            ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON
        );
        let is_text = is_text || is_logical_text(field);
        let is_number = matches!(
            converted,
            ConvertedType::NONE
                | ConvertedType::INT_8
                | ConvertedType::INT_16
                | ConvertedType::INT_32
                | ConvertedType::INT_64
                | ConvertedType::UINT_8
                | ConvertedType::UINT_16
                | ConvertedType::UINT_32
                | ConvertedType::UINT_64
        );
        return match field.get_physical_type() {
            Physical::BYTE_ARRAY => is_text,
            Physical::BOOLEAN | Physical::FLOAT | Physical::DOUBLE => true,
            Physical::INT32 | Physical::INT64 => is_number && !is_time(field),
            Physical::INT96 | Physical::FIXED_LEN_BYTE_ARRAY => false,
        };
    }
    let fields = field.get_fields();
    match converted {
        ConvertedType::NONE => !fields.is_empty() && fields.iter().all(is_readable),
        // The format requires three levels: list, repeated group, element.
        ConvertedType::LIST => match fields {
            [middle] => {
                let info = middle.get_basic_info();
                let is_middle = info.has_repetition()
                    && info.repetition() == Repetition::REPEATED
                    && middle.is_group();
                is_middle && matches!(middle.get_fields(), [one] if is_readable(one))
            }
            _ => false,
        },
        _ => false,
    }
}

fn is_logical_text(field: &Type) -> bool {
    let logical = field.get_basic_info().logical_type_ref();
    matches!(
        logical,
        Some(LogicalType::String | LogicalType::Json | LogicalType::Enum)
    )
}

fn is_time(field: &Type) -> bool {
    let logical = field.get_basic_info().logical_type_ref();
    logical.is_some_and(|logical| !matches!(logical, LogicalType::Integer { .. }))
}

/// Returns the size of a row: the bytes of its texts, and 8 per other value.
fn bytes_of(row: &Row) -> usize {
    fn of(field: &Field) -> usize {
        match field {
            Field::Str(text) => text.len(),
            Field::Bytes(bytes) => bytes.len(),
            Field::Group(row) => bytes_of(row),
            Field::ListInternal(list) => list.elements().iter().map(of).sum(),
            _ => 8,
        }
    }
    row.get_column_iter()
        .map(|(name, field)| name.len() + of(field))
        .sum()
}

fn object(row: Row) -> Result<Map<String, Json>, String> {
    let mut fields = Map::new();
    for (name, field) in row.into_columns() {
        if let Some(value) = value(&name, field)? {
            fields.insert(name, value);
        }
    }
    Ok(fields)
}

/// Converts a value to JSON; `None` for a null.
fn value(name: &str, field: Field) -> Result<Option<Json>, String> {
    let number = |x: f64| {
        let number = Number::from_f64(x).map(Json::Number);
        number.ok_or_else(|| format!("{name:?} has the value {x}, which JSON does not have"))
    };
    Ok(Some(match field {
        Field::Null => return Ok(None),
        Field::Bool(yes) => Json::Bool(yes),
        Field::Byte(n) => n.into(),
        Field::Short(n) => n.into(),
        Field::Int(n) => n.into(),
        Field::Long(n) => n.into(),
        Field::UByte(n) => n.into(),
        Field::UShort(n) => n.into(),
        Field::UInt(n) => n.into(),
        Field::ULong(n) => n.into(),
        Field::Float(x) => number(f64::from(x))?,
        Field::Double(x) => number(x)?,
        Field::Str(text) => Json::String(text),
        Field::Bytes(bytes) => match bytes.as_utf8() {
            Ok(text) => Json::String(text.to_owned()),
            Err(_) => return Err(format!("{name:?} is not UTF-8")),
        },
        Field::Group(row) => Json::Object(object(row)?),
        Field::ListInternal(list) => {
            let elements = list.elements().iter().cloned();
            let values = elements.map(|one| value(name, one).map(|one| one.unwrap_or(Json::Null)));
            Json::Array(values.collect::<Result<_, _>>()?)
        }
        // `is_readable` excludes the other types.
        _ => return Err(format!("{name:?} has no type of JSON")),
    }))
}

#[cfg(test)]
#[path = "parquet_tests.rs"]
mod tests;
