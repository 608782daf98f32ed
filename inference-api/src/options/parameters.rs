//! The list of all parameters, and sets of values for some parameters.

use std::collections::BTreeMap;

use inference_formats::SamplingDefaults;

use super::parameter::{Parameter, ParameterValue};
use super::{GenerateOptions, PenaltyOptions, SamplingOptions, invalid};
use crate::error::Result;

impl Parameter {
    /// All parameters in the order of their declaration: sampling, then penalties.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        [SamplingOptions::PARAMETERS, PenaltyOptions::PARAMETERS]
            .into_iter()
            .flatten()
            .flatten()
    }

    /// The parameter of this name or alias. Case is ignored, and `-` equals `_`.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        let name = name.to_ascii_lowercase().replace('-', "_");
        Self::all().find(|p| p.names().any(|alias| alias == name))
    }
}

/// Values of some parameters. Applying them does not change other parameters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParameterValues(BTreeMap<&'static str, ParameterValue>);

impl ParameterValues {
    /// Creates an empty set of values.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the set of values that a model's files recommend.
    #[must_use]
    pub fn recommended(model: &SamplingDefaults) -> Self {
        let real = |value: Option<f32>| value.map(ParameterValue::Real);
        let values = [
            ("temperature", real(model.temperature)),
            ("top_k", model.top_k.map(ParameterValue::Count)),
            ("top_p", real(model.top_p)),
            ("min_p", real(model.min_p)),
            ("repeat_penalty", real(model.repeat_penalty)),
        ];
        let set = values.into_iter().filter_map(|(n, v)| Some((n, v?)));
        Self(set.collect())
    }

    /// Sets a value, and replaces an earlier one. [`ParameterValues::apply`] checks the value.
    pub fn put(&mut self, parameter: &Parameter, value: ParameterValue) {
        self.0.insert(parameter.name, value);
    }

    /// Sets a checked value for the parameter with this name or alias.
    ///
    /// # Errors
    /// For an unknown name, and as [`Parameter::check`].
    pub fn insert(&mut self, name: &str, value: f64) -> Result<()> {
        let Some(parameter) = Parameter::named(name) else {
            let names: Vec<&str> = Parameter::all().map(Parameter::name).collect();
            return invalid(format!(
                "there is no parameter {name:?}; there are {}",
                names.join(", ")
            ));
        };
        let is_integer = value.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&value);
        let value = match parameter.is_count() && is_integer {
            true => ParameterValue::Count(value as usize),
            false => ParameterValue::Real(value as f32),
        };
        parameter.check(value)?;
        self.put(parameter, value);
        Ok(())
    }

    /// The value of the parameter `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<ParameterValue> {
        self.0.get(name).copied()
    }

    /// The parameters that have a value, in the order of [`Parameter::all`].
    pub fn iter(&self) -> impl Iterator<Item = (&'static Parameter, ParameterValue)> + '_ {
        Parameter::all().filter_map(|p| Some((p, self.get(p.name)?)))
    }

    /// Sets these values in `options`.
    ///
    /// # Errors
    /// As [`Parameter::check`], for the first refused value.
    pub fn apply(&self, options: &mut GenerateOptions) -> Result<()> {
        self.iter()
            .try_for_each(|(parameter, value)| parameter.set(options, value))
    }
}

#[cfg(test)]
mod tests {
    use super::super::ParameterRange;
    use super::*;

    #[test]
    fn names_are_unique_and_lead_to_their_own_field() {
        let mut seen = std::collections::BTreeSet::new();
        for parameter in Parameter::all() {
            for name in parameter.names() {
                assert!(seen.insert(name), "{name} is declared twice");
                assert_eq!(Parameter::named(name), Some(parameter));
            }
            assert!(parameter.check(parameter.default_value()).is_ok());
            assert!(!parameter.documentation().is_empty());
            // The value that was set must be read back, and no other parameter may change.
            let value = match parameter.is_count() {
                true => ParameterValue::Count(7),
                false => ParameterValue::Real(0.25),
            };
            let mut options = GenerateOptions::default();
            parameter.set(&mut options, value).unwrap();
            assert_eq!(parameter.of(&options), value);
            for other in Parameter::all().filter(|other| *other != parameter) {
                assert_eq!(other.of(&options), other.default_value(), "{other:?}");
            }
        }
        assert_eq!(Parameter::named("Top-K").unwrap().name(), "top_k");
        assert!(Parameter::named("seed").is_none());
    }

    #[test]
    fn values_of_another_type_or_out_of_range_change_nothing() {
        let mut options = GenerateOptions::default();
        for (name, text) in [
            ("temperature", "-1"),
            ("temperature", "nan"),
            ("temperature", "inf"),
            ("temperature", "hot"),
            ("top_p", "0"),
            ("top_p", "1.5"),
            ("top_k", "-1"),
            ("top_k", "0.5"),
            ("min_p", "1.1"),
            ("xtc_threshold", "0.6"),
            ("repeat_penalty", "0"),
            ("presence_penalty", "inf"),
        ] {
            let error = Parameter::named(name).unwrap().parse(text).unwrap_err();
            assert!(error.message().starts_with(name), "{error}");
        }
        let top_k = Parameter::named("top_k").unwrap();
        assert!(top_k.set(&mut options, ParameterValue::Real(0.5)).is_err());
        let top_p = Parameter::named("top_p").unwrap();
        assert!(top_p.set(&mut options, ParameterValue::Count(1)).is_err());
        assert_eq!(options.sampling, SamplingOptions::default());
    }

    #[test]
    fn ranges_read_as_sentences() {
        for (range, text) in [
            (ParameterRange::ANY, "a finite number"),
            (
                ParameterRange::between(0.0, f32::MAX),
                "a finite number of at least 0",
            ),
            (
                ParameterRange::above(0.0, f32::MAX),
                "a finite number above 0",
            ),
            (
                ParameterRange::between(0.0, 1.0),
                "a number between 0 and 1",
            ),
            (
                ParameterRange::above(0.0, 1.0),
                "a number above 0 and at most 1",
            ),
        ] {
            assert_eq!(range.to_string(), text);
            assert!(!range.contains(f32::NAN) && !range.contains(f32::INFINITY));
        }
    }

    #[test]
    fn recommended_values_apply_and_the_rest_stays() {
        let mut model = SamplingDefaults::default();
        (model.temperature, model.top_k) = (Some(0.6), Some(20));
        let values = ParameterValues::recommended(&model);
        let mut options = GenerateOptions::new().with_top_p(0.5);
        values.apply(&mut options).unwrap();
        let sampling = &options.sampling;
        assert_eq!((sampling.temperature, sampling.top_k), (0.6, 20));
        assert_eq!(sampling.top_p, 0.5);
        assert_eq!(values.iter().count(), 2);
        let mut values = ParameterValues::new();
        values.insert("repetition_penalty", 1.5).unwrap();
        values.insert("top-k", 5.0).unwrap();
        assert_eq!(values.get("top_k"), Some(ParameterValue::Count(5)));
        for (name, value) in [
            ("top_k", 0.5),
            ("top_k", -1.0),
            ("top_p", 2.0),
            ("heat", 1.0),
        ] {
            assert!(values.insert(name, value).is_err(), "{name} {value}");
        }
        assert_eq!(values.iter().count(), 2);
        assert_eq!(ParameterValue::Real(0.1).as_f64(), 0.1);
    }
}
