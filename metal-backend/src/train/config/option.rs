//! The options of a training run as data. [`TrainConfig`] declares each option once; config files
//! and command-line flags derive from these declarations.

use std::ffi::OsStr;
use std::path::PathBuf;

use inference::{ComputeType, Result};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error as Unknown;

use super::{TrainConfig, bad};
use crate::train::report::Report;

/// The headings under which help lists options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the headings")]
pub enum OptionGroup {
    General,
    Files,
    Adapter,
    Steps,
    Data,
    Reports,
}

impl OptionGroup {
    /// The text of the heading; `General` has none.
    #[must_use]
    pub fn heading(self) -> Option<&'static str> {
        match self {
            Self::General => None,
            Self::Files => Some("Files"),
            Self::Adapter => Some("Adapter"),
            Self::Steps => Some("Steps"),
            Self::Data => Some("Data"),
            Self::Reports => Some("Reports"),
        }
    }
}

/// An option of [`TrainConfig`]: its name, its documentation, and how to set its value from text.
///
/// ```
/// use metal_backend::train::config::{TrainConfig, TrainOption};
///
/// let iters = TrainOption::all().find(|o| o.name() == "iters").unwrap();
/// let mut config = TrainConfig::default();
/// iters.set(&mut config, "7".as_ref())?;
/// assert_eq!((iters.default_text().as_deref(), config.iters), (Some("1000"), 7));
/// assert!(iters.set(&mut config, "many".as_ref()).is_err());
/// # Ok::<(), inference::Error>(())
/// ```
#[derive(Debug)]
pub struct TrainOption {
    pub(super) name: &'static str,
    pub(super) documentation: &'static str,
    pub(super) flag: Flag,
    pub(super) choices: &'static [&'static str],
    pub(super) is_list: bool,
    pub(super) is_switch: bool,
    pub(super) default: fn() -> Option<String>,
    pub(super) put: fn(&mut TrainConfig, &OsStr) -> std::result::Result<(), String>,
}

impl TrainOption {
    /// Returns all options that have a flag, in the order of their declaration. Options of the
    /// adapter's shape are last.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        [TrainConfig::OPTIONS, super::LoraParameters::OPTIONS]
            .into_iter()
            .flatten()
            .flatten()
    }

    /// The field's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The documentation of the option: whole sentences on one line.
    #[must_use]
    pub fn documentation(&self) -> &'static str {
        self.documentation.trim()
    }

    /// The heading under which the help lists the option.
    #[must_use]
    pub fn group(&self) -> OptionGroup {
        self.flag.group
    }

    /// The flag's letter, if it has one.
    #[must_use]
    pub fn short(&self) -> Option<char> {
        self.flag.short
    }

    /// The word for the value in usage texts, such as `N`.
    #[must_use]
    pub fn placeholder(&self) -> &'static str {
        self.flag.placeholder
    }

    /// The options that must not be given together with this option.
    #[must_use]
    pub fn conflicts(&self) -> &'static [&'static str] {
        self.flag.conflicts
    }

    /// The allowed values, if the option has a fixed set of values.
    #[must_use]
    pub fn choices(&self) -> &'static [&'static str] {
        self.choices
    }

    /// Whether the value is a comma-separated list.
    #[must_use]
    pub fn is_list(&self) -> bool {
        self.is_list
    }

    /// Whether the option is a switch: its flag has no value and turns it on.
    #[must_use]
    pub fn is_switch(&self) -> bool {
        self.is_switch
    }

    /// The default as text. `None` if the option is unset or off in [`TrainConfig::default`].
    #[must_use]
    pub fn default_text(&self) -> Option<String> {
        (self.default)()
    }

    /// Sets the option from text, and records that the option was given. A switch ignores the text.
    /// [`TrainConfig::validate`] checks the range.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidOption`](inference::ErrorKind::InvalidOption), with the option's name,
    /// for text that is not of the option's type.
    pub fn set(&self, config: &mut TrainConfig, text: &OsStr) -> Result<()> {
        let name = self.name;
        (self.put)(config, text)
            .map_err(|must| bad(format!("{name} is {text:?}; it must be {must}")))?;
        config.given.mark(name);
        Ok(())
    }
}

/// How the command line shows an option.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flag {
    group: OptionGroup,
    placeholder: &'static str,
    short: Option<char>,
    conflicts: &'static [&'static str],
}

impl Flag {
    pub const fn new(group: OptionGroup, placeholder: &'static str) -> Self {
        Self {
            group,
            placeholder,
            short: None,
            conflicts: &[],
        }
    }

    pub const fn short(mut self, letter: char) -> Self {
        self.short = Some(letter);
        self
    }

    pub const fn conflicts(mut self, names: &'static [&'static str]) -> Self {
        self.conflicts = names;
        self
    }
}

/// A type of option values, which can be converted from and to text.
pub(super) trait OptionValue: Sized {
    const CHOICES: &'static [&'static str] = &[];
    const IS_LIST: bool = false;
    const IS_SWITCH: bool = false;

    /// Parses a value. The error completes the phrase "it must be ".
    fn parse(text: &OsStr) -> std::result::Result<Self, String>;

    /// Returns the value as text; `None` if the value means unset or off.
    fn text(&self) -> Option<String>;
}

/// Parses Unicode text. The error is `kind`, which completes the phrase "it must be ".
fn parse<T: std::str::FromStr>(text: &OsStr, kind: &str) -> std::result::Result<T, String> {
    text.to_str()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| kind.to_owned())
}

/// Parses a value of an enum by its name in serde. The error lists `names`.
pub(super) fn named<T: for<'de> Deserialize<'de>>(
    text: &OsStr,
    names: &[&str],
) -> std::result::Result<T, String> {
    text.to_str()
        .and_then(|text| {
            let names = IntoDeserializer::<Unknown>::into_deserializer(text);
            T::deserialize(names).ok()
        })
        .ok_or_else(|| format!("one of {}", names.join(", ")))
}

macro_rules! numbers {
    ($($type:ty: $kind:literal;)+) => {
        $(impl OptionValue for $type {
            fn parse(text: &OsStr) -> std::result::Result<Self, String> {
                parse(text, $kind)
            }

            fn text(&self) -> Option<String> {
                // Debug formatting writes the fewest digits that identify the value, and an
                // exponent if that is shorter.
                let text = format!("{self:?}");
                Some(text.strip_suffix(".0").unwrap_or(&text).to_owned())
            }
        })+
    };
}

numbers! {
    usize: "a whole number from 0";
    u64: "a whole number from 0";
    u32: "a whole number from 0 to 4294967295";
    i64: "a whole number";
    f32: "a number";
    f64: "a number";
}

impl OptionValue for bool {
    const IS_SWITCH: bool = true;

    fn parse(_: &OsStr) -> std::result::Result<Self, String> {
        Ok(true)
    }

    fn text(&self) -> Option<String> {
        self.then(|| String::from("on"))
    }
}

impl OptionValue for String {
    fn parse(text: &OsStr) -> std::result::Result<Self, String> {
        parse(text, "Unicode text")
    }

    fn text(&self) -> Option<String> {
        (!self.is_empty()).then(|| self.clone())
    }
}

impl OptionValue for PathBuf {
    fn parse(text: &OsStr) -> std::result::Result<Self, String> {
        Ok(text.into())
    }

    fn text(&self) -> Option<String> {
        Some(self.display().to_string())
    }
}

impl OptionValue for ComputeType {
    fn parse(text: &OsStr) -> std::result::Result<Self, String> {
        parse(text, "float32, float16 or bfloat16")
    }

    fn text(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl<T: OptionValue> OptionValue for Option<T> {
    const CHOICES: &'static [&'static str] = T::CHOICES;
    const IS_LIST: bool = T::IS_LIST;

    fn parse(text: &OsStr) -> std::result::Result<Self, String> {
        if text.is_empty() && !T::IS_LIST {
            return Err(String::from("something, or be left out"));
        }
        T::parse(text).map(Some)
    }

    fn text(&self) -> Option<String> {
        self.as_ref().and_then(T::text)
    }
}

impl OptionValue for Vec<String> {
    const IS_LIST: bool = true;

    fn parse(text: &OsStr) -> std::result::Result<Self, String> {
        let text: String = parse(text, "names in Unicode with commas between them")?;
        Ok(text.split(',').map(str::to_owned).collect())
    }

    fn text(&self) -> Option<String> {
        (!self.is_empty()).then(|| self.join(","))
    }
}

impl OptionValue for Vec<Report> {
    const IS_LIST: bool = true;

    fn parse(text: &OsStr) -> std::result::Result<Self, String> {
        let names = Vec::<String>::parse(text)?;
        let reports = names.iter().map(|name| name.parse());
        reports
            .collect::<std::result::Result<_, String>>()
            .map_err(|_| String::from("jsonl, tensorboard, or both with a comma"))
    }

    fn text(&self) -> Option<String> {
        None
    }
}

/// Declares a struct of options with defaults. Each field with a flag becomes a [`TrainOption`].
macro_rules! options {
    (
        $(#[$meta:meta])*
        $group:ident, at $place:tt {
            $(
                $(#[doc = $doc:literal])+
                $(#[serde($serde:meta)])?
                $field:ident: $type:ty = $default:expr $(, $flag:expr)?;
            )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $group {
            $($(#[doc = $doc])+ $(#[serde($serde)])? pub $field: $type,)*
        }

        impl Default for $group {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $group {
            pub(super) const OPTIONS: &[Option<TrainOption>] =
                &[$(option!($group $place $field: $type, [$($doc)+] $($flag)?),)*];
        }
    };
}

macro_rules! option {
    ($group:ident $place:tt $field:ident: $type:ty, [$($doc:literal)+]) => { None };
    (
        $group:ident ($config:ident $(. $place:ident)*) $field:ident: $type:ty,
        [$($doc:literal)+] $flag:expr
    ) => {
        Some(TrainOption {
            name: stringify!($field),
            documentation: concat!($($doc),+),
            flag: $flag,
            choices: <$type as OptionValue>::CHOICES,
            is_list: <$type as OptionValue>::IS_LIST,
            is_switch: <$type as OptionValue>::IS_SWITCH,
            default: || OptionValue::text(&$group::default().$field),
            put: |$config, text| {
                $config$(.$place)*.$field = OptionValue::parse(text)?;
                Ok(())
            },
        })
    };
}

pub(super) use {option, options};
