//! Numeric generation options as data. The groups declare each option once. Command-line flags,
//! `/set`, request fields of HTTP APIs and validation follow from the declaration.

use std::fmt;

use super::{GenerateOptions, invalid};
use crate::error::Result;

/// The value of a [`Parameter`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ParameterValue {
    /// A nonnegative integer.
    Count(usize),
    /// A real number.
    Real(f32),
}

impl ParameterValue {
    /// The value as a float64.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Count(n) => n as f64,
            // Converts by the shortest decimal form, so that the float32 0.1 becomes the float64
            // 0.1.
            Self::Real(x) => x.to_string().parse().unwrap_or_else(|_| f64::from(x)),
        }
    }
}

impl fmt::Display for ParameterValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(n) => n.fmt(f),
            Self::Real(x) => x.fmt(f),
        }
    }
}

/// The numeric type of an option's field.
pub(super) trait Number: Copy {
    fn value(self) -> ParameterValue;
    /// Converts `value`; `None` if it has another type.
    fn from_value(value: ParameterValue) -> Option<Self>;
}

impl Number for usize {
    fn value(self) -> ParameterValue {
        ParameterValue::Count(self)
    }

    fn from_value(value: ParameterValue) -> Option<Self> {
        match value {
            ParameterValue::Count(n) => Some(n),
            ParameterValue::Real(_) => None,
        }
    }
}

impl Number for f32 {
    fn value(self) -> ParameterValue {
        ParameterValue::Real(self)
    }

    fn from_value(value: ParameterValue) -> Option<Self> {
        match value {
            ParameterValue::Real(x) => Some(x),
            ParameterValue::Count(_) => None,
        }
    }
}

/// The allowed range of an option.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ParameterRange {
    least: f32,
    /// Whether `least` itself is allowed.
    closed: bool,
    most: f32,
}

impl ParameterRange {
    /// Every finite number.
    pub const ANY: Self = Self {
        least: f32::MIN,
        closed: true,
        most: f32::MAX,
    };

    /// Creates the range from `least` to `most`, both included.
    #[must_use]
    pub const fn between(least: f32, most: f32) -> Self {
        Self {
            least,
            closed: true,
            most,
        }
    }

    /// Creates the range of values above `least`, up to and including `most`.
    #[must_use]
    pub const fn above(least: f32, most: f32) -> Self {
        Self {
            least,
            closed: false,
            most,
        }
    }

    /// Whether `value` is in the range. NaN and infinities never are.
    #[must_use]
    pub fn contains(self, value: f32) -> bool {
        let low = value > self.least || (self.closed && value == self.least);
        low && value <= self.most
    }
}

impl fmt::Display for ParameterRange {
    /// Formats the range so that it completes "must be".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            least,
            closed,
            most,
        } = *self;
        match (least == f32::MIN, closed, most == f32::MAX) {
            (true, _, true) => f.write_str("a finite number"),
            (true, _, false) => write!(f, "a number of at most {most}"),
            (false, true, true) => write!(f, "a finite number of at least {least}"),
            (false, false, true) => write!(f, "a finite number above {least}"),
            (false, true, false) => write!(f, "a number between {least} and {most}"),
            (false, false, false) => write!(f, "a number above {least} and at most {most}"),
        }
    }
}

/// A numeric option of [`GenerateOptions`]: its names, its range, and how to read and set it.
///
/// ```
/// use inference::{GenerateOptions, Parameter};
///
/// let top_k = Parameter::named("top-k").unwrap();
/// let mut options = GenerateOptions::new();
/// top_k.set(&mut options, top_k.parse("40")?)?;
/// assert_eq!(options.sampling.top_k, 40);
/// assert!(top_k.parse("-1").is_err());
/// # Ok::<(), inference::Error>(())
/// ```
pub struct Parameter {
    pub(super) name: &'static str,
    pub(super) aliases: &'static [&'static str],
    pub(super) placeholder: &'static str,
    pub(super) documentation: &'static str,
    pub(super) range: ParameterRange,
    pub(super) get: fn(&GenerateOptions) -> ParameterValue,
    /// Sets the field. Does nothing if the value has another type.
    pub(super) put: fn(&mut GenerateOptions, ParameterValue),
}

impl fmt::Debug for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Parameter").field(&self.name).finish()
    }
}

impl PartialEq for Parameter {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Parameter {
    /// The field's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Names of this parameter in other tools.
    #[must_use]
    pub fn aliases(&self) -> &'static [&'static str] {
        self.aliases
    }

    /// The name and the aliases.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.name).chain(self.aliases.iter().copied())
    }

    /// A letter for the value in usage texts.
    #[must_use]
    pub fn placeholder(&self) -> &'static str {
        self.placeholder
    }

    /// The description of the parameter: whole sentences on one line.
    #[must_use]
    pub fn documentation(&self) -> &'static str {
        self.documentation.trim()
    }

    /// The range of allowed values.
    #[must_use]
    pub fn range(&self) -> ParameterRange {
        self.range
    }

    /// Whether the values are nonnegative integers.
    #[must_use]
    pub fn is_count(&self) -> bool {
        matches!(self.default_value(), ParameterValue::Count(_))
    }

    /// The value in [`GenerateOptions::default`].
    #[must_use]
    pub fn default_value(&self) -> ParameterValue {
        self.of(&GenerateOptions::default())
    }

    /// The value in `options`.
    #[must_use]
    pub fn of(&self, options: &GenerateOptions) -> ParameterValue {
        (self.get)(options)
    }

    /// Sets the parameter in `options`.
    ///
    /// # Errors
    /// As [`Parameter::check`]. After an error, `options` is unchanged.
    pub fn set(&self, options: &mut GenerateOptions, value: ParameterValue) -> Result<()> {
        self.check(value)?;
        (self.put)(options, value);
        Ok(())
    }

    /// Checks the type and the range of a value.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`](crate::ErrorKind::InvalidOption) that names the parameter, its
    /// value and the allowed range.
    pub fn check(&self, value: ParameterValue) -> Result<()> {
        let name = self.name;
        match (value, self.is_count()) {
            (ParameterValue::Count(_), true) => Ok(()),
            (ParameterValue::Real(x), false) if self.range.contains(x) => Ok(()),
            (_, true) => invalid(format!(
                "{name} is {value}; it must be a whole number from 0"
            )),
            (_, false) => invalid(format!("{name} is {value}; it must be {}", self.range)),
        }
    }

    /// Parses and checks a value.
    ///
    /// # Errors
    /// As [`Parameter::check`], and for a text that is not a number.
    pub fn parse(&self, text: &str) -> Result<ParameterValue> {
        let name = self.name;
        let value = match self.is_count() {
            true => text.parse().ok().map(ParameterValue::Count),
            false => text.parse().ok().map(ParameterValue::Real),
        };
        match (value, self.is_count()) {
            (Some(value), _) => self.check(value).map(|()| value),
            (None, true) => invalid(format!(
                "{name} is {text:?}; it must be a whole number from 0"
            )),
            (None, false) => invalid(format!("{name} is {text:?}; it must be {}", self.range)),
        }
    }
}
