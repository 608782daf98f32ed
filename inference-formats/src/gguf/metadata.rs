//! GGUF metadata: values by key, converted to the caller's type. An error names the key and the
//! type of its value in the file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

use crate::files::invalid;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// Unsigned, 8 bits.
    U8(u8),
    /// Signed, 8 bits.
    I8(i8),
    /// Unsigned, 16 bits.
    U16(u16),
    /// Signed, 16 bits.
    I16(i16),
    /// Unsigned, 32 bits.
    U32(u32),
    /// Signed, 32 bits.
    I32(i32),
    /// Single precision.
    F32(f32),
    /// True or false.
    Bool(bool),
    /// Text.
    String(String),
    /// Values of one type.
    Array(GgufArray),
    /// Unsigned, 64 bits.
    U64(u64),
    /// Signed, 64 bits.
    I64(i64),
    /// Double precision.
    F64(f64),
}

/// A metadata array.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufArray {
    /// Unsigned, 8 bits.
    U8(Vec<u8>),
    /// Signed, 8 bits.
    I8(Vec<i8>),
    /// Unsigned, 16 bits.
    U16(Vec<u16>),
    /// Signed, 16 bits.
    I16(Vec<i16>),
    /// Unsigned, 32 bits.
    U32(Vec<u32>),
    /// Signed, 32 bits.
    I32(Vec<i32>),
    /// Single precision.
    F32(Vec<f32>),
    /// True or false.
    Bool(Vec<bool>),
    /// Texts.
    String(Vec<String>),
    /// Arrays.
    Array(Vec<GgufArray>),
    /// Unsigned, 64 bits.
    U64(Vec<u64>),
    /// Signed, 64 bits.
    I64(Vec<i64>),
    /// Double precision.
    F64(Vec<f64>),
}

impl GgufArray {
    /// The elements; `None` unless they are integers.
    fn integers(&self) -> Option<Vec<i128>> {
        Some(match self {
            Self::U8(a) => a.iter().map(|&v| v.into()).collect(),
            Self::I8(a) => a.iter().map(|&v| v.into()).collect(),
            Self::U16(a) => a.iter().map(|&v| v.into()).collect(),
            Self::I16(a) => a.iter().map(|&v| v.into()).collect(),
            Self::U32(a) => a.iter().map(|&v| v.into()).collect(),
            Self::I32(a) => a.iter().map(|&v| v.into()).collect(),
            Self::U64(a) => a.iter().map(|&v| v.into()).collect(),
            Self::I64(a) => a.iter().map(|&v| v.into()).collect(),
            _ => return None,
        })
    }

    fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "array of u8",
            Self::I8(_) => "array of i8",
            Self::U16(_) => "array of u16",
            Self::I16(_) => "array of i16",
            Self::U32(_) => "array of u32",
            Self::I32(_) => "array of i32",
            Self::F32(_) => "array of f32",
            Self::Bool(_) => "array of bool",
            Self::String(_) => "array of strings",
            Self::Array(_) => "array of arrays",
            Self::U64(_) => "array of u64",
            Self::I64(_) => "array of i64",
            Self::F64(_) => "array of f64",
        }
    }
}

impl GgufValue {
    /// The name of its type, for messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::F32(_) => "f32",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
            Self::Array(a) => a.type_name(),
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F64(_) => "f64",
        }
    }

    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }
}

/// The metadata of a GGUF file.
#[derive(Debug, Clone)]
pub struct GgufMetadata {
    path: PathBuf,
    values: HashMap<String, GgufValue>,
}

impl GgufMetadata {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            values: HashMap::new(),
        }
    }

    /// Adds a value. Returns false if the key was already present.
    pub(super) fn insert(&mut self, key: String, value: GgufValue) -> bool {
        self.values.insert(key, value).is_none()
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.values.get(key)
    }

    /// Whether `key` is present.
    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    fn wrong(&self, key: &str, value: &GgufValue, wanted: &str) -> Error {
        let actual = value.type_name();
        invalid(
            &self.path,
            format!("the metadata key {key} is of type {actual}, not {wanted}"),
        )
    }

    /// The error for a required key that is missing.
    pub(crate) fn missing(&self, key: &str) -> Error {
        invalid(&self.path, format!("the metadata key {key} is missing"))
    }

    /// The text of `key`.
    ///
    /// # Errors
    /// When it has another type.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.wrong(key, other, "a string")),
        }
    }

    /// The integer of `key`. `None` if the key is missing; this also applies to the methods below.
    ///
    /// # Errors
    /// If the value is not an integer or does not fit.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        self.integer(key, "an unsigned number of 32 bits")
    }

    /// The integer of `key`.
    ///
    /// # Errors
    /// If the value is not an integer or does not fit.
    pub fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.integer(key, "an unsigned number")
    }

    fn integer<T: TryFrom<i128>>(&self, key: &str, wanted: &str) -> Result<Option<T>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let Some(number) = value.integer() else {
            return Err(self.wrong(key, value, wanted));
        };
        T::try_from(number).map(Some).map_err(|_| {
            invalid(
                &self.path,
                format!("the metadata key {key} is {number}, not {wanted}"),
            )
        })
    }

    /// The number of `key`, a float or an integer.
    ///
    /// # Errors
    /// If the value is not a number.
    pub fn f32(&self, key: &str) -> Result<Option<f32>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::F32(v)) => Ok(Some(*v)),
            Some(GgufValue::F64(v)) => Ok(Some(*v as f32)),
            Some(other) => match other.integer() {
                Some(v) => Ok(Some(v as f32)),
                None => Err(self.wrong(key, other, "a number")),
            },
        }
    }

    /// The bool of `key`.
    ///
    /// # Errors
    /// When it has another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Bool(b)) => Ok(Some(*b)),
            Some(other) => Err(self.wrong(key, other, "a bool")),
        }
    }

    /// The strings of `key`.
    ///
    /// # Errors
    /// When it has another type.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(GgufArray::String(a))) => Ok(Some(a)),
            Some(other) => Err(self.wrong(key, other, "an array of strings")),
        }
    }

    /// The numbers of `key`.
    ///
    /// # Errors
    /// When it has another type.
    pub fn f32s(&self, key: &str) -> Result<Option<&[f32]>> {
        match self.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(GgufArray::F32(a))) => Ok(Some(a)),
            Some(other) => Err(self.wrong(key, other, "an array of f32")),
        }
    }

    /// The integers of `key`, an array of any integer type. A single integer is returned as an
    /// array with one element.
    ///
    /// # Errors
    /// If the value has another type, or an integer does not fit.
    pub fn i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let numbers = match value {
            GgufValue::Array(a) => a.integers(),
            one => one.integer().map(|v| vec![v]),
        };
        let wanted = "an array of 32-bit integers";
        let Some(numbers) = numbers else {
            return Err(self.wrong(key, value, wanted));
        };
        numbers
            .into_iter()
            .map(i32::try_from)
            .collect::<Result<_, _>>()
            .map(Some)
            .map_err(|_| {
                invalid(
                    &self.path,
                    format!("the metadata key {key} holds a number that is too large"),
                )
            })
    }
}
