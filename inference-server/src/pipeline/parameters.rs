//! The numeric generation options in a request's fields. The contract declares the options. A
//! [`Dialect`] adds an HTTP API's defaults, limits and field names.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::sync::LazyLock;

use inference::{
    GenerateOptions, Parameter, ParameterRange, ParameterValue, ParameterValues, SamplingDefaults,
};
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::openapi::{RefOr, schema::SchemaType};
use utoipa::{PartialSchema, ToSchema};

use crate::error::ApiError;
use crate::state::App;

/// How an HTTP API uses the parameters.
pub(crate) trait Dialect {
    /// The prefix of field names in error messages, such as the enclosing object.
    const PREFIX: &'static str = "";
    /// Greatest temperature that a request may set. If the operator's default is greater, it is the
    /// limit.
    const MOST_TEMPERATURE: f32 = 10.0;
    /// Whether the API reads a negative number as 0, for counts and for filters that 0 disables.
    const NEGATIVE_IS_ZERO: bool = false;
    /// The API's name in the schema of a request.
    const NAME: &'static str;

    /// The API's default value, if it differs from the contract's.
    fn default_of(_parameter: &Parameter) -> Option<ParameterValue> {
        None
    }

    /// Whether requests have a field for the parameter.
    fn takes(_parameter: &Parameter) -> bool {
        true
    }
}

/// The parameters of a request.
pub(crate) struct Parameters<D> {
    /// The value of each field. `Err` has the JSON text of a value that is not a number.
    values: Vec<(&'static Parameter, Result<f64, String>)>,
    dialect: PhantomData<D>,
}

impl<D> Default for Parameters<D> {
    fn default() -> Self {
        Self {
            values: Vec::new(),
            dialect: PhantomData,
        }
    }
}

impl<D> fmt::Debug for Parameters<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.values.iter().map(|(p, value)| (p.name(), value));
        f.debug_map().entries(values).finish()
    }
}

/// The range of values that a request may set.
fn bounds<D: Dialect>(parameter: &Parameter, base: ParameterValue) -> ParameterRange {
    match (parameter.name(), base) {
        ("temperature", ParameterValue::Real(base)) => {
            ParameterRange::between(0.0, base.max(D::MOST_TEMPERATURE))
        }
        // 0 is allowed for `top_p`: it means greedy sampling, like every very small value.
        ("top_p", _) => ParameterRange::between(0.0, 1.0),
        ("repeat_penalty", _) => ParameterRange::between(0.01, 10.0),
        ("presence_penalty" | "frequency_penalty", _) => ParameterRange::between(-2.0, 2.0),
        _ => parameter.range(),
    }
}

/// The options before a request's fields apply. The operator's defaults override the model's
/// recommendations, which override the API's defaults.
pub(crate) fn base<D: Dialect>(
    app: &App,
    recommended: &SamplingDefaults,
) -> Result<GenerateOptions, ApiError> {
    let mut options = GenerateOptions::new();
    let mut values = ParameterValues::new();
    for parameter in Parameter::all() {
        if let Some(value) = D::default_of(parameter) {
            values.put(parameter, value);
        }
    }
    for values in [
        &values,
        &ParameterValues::recommended(recommended),
        &app.defaults.parameters,
    ] {
        values
            .apply(&mut options)
            .map_err(|e| ApiError::of_engine(&e))?;
    }
    Ok(options)
}

impl<D: Dialect> Parameters<D> {
    /// The request's value for `name`.
    pub(crate) fn get(&self, name: &str) -> Option<f64> {
        let mut all = self.values.iter();
        all.find(|(p, _)| p.name() == name)
            .and_then(|(_, value)| value.clone().ok())
    }

    /// The values, if each is a number of its parameter's type.
    pub(crate) fn numbers(&self) -> Result<Vec<(&'static Parameter, f64)>, ApiError> {
        let number = |(parameter, value): &(&'static Parameter, Result<f64, String>)| {
            let (shown, kind) = match value {
                Ok(value) if !parameter.is_count() || value.fract() == 0.0 => {
                    return Ok((*parameter, *value));
                }
                Ok(value) => (value.to_string(), "whole number from 0"),
                Err(shown) => (shown.clone(), "number"),
            };
            let name = format!("{}{}", D::PREFIX, parameter.name());
            let message = format!("{name} is {shown}; it must be a {kind}");
            Err(ApiError::field(name, message))
        };
        self.values.iter().map(number).collect()
    }

    /// Sets the request's values in `options`.
    pub(crate) fn apply(&self, options: &mut GenerateOptions) -> Result<(), ApiError> {
        for (parameter, value) in self.numbers()? {
            let base = parameter.of(options);
            let name = || format!("{}{}", D::PREFIX, parameter.name());
            let off = parameter.is_count()
                || (parameter.default_value() == ParameterValue::Real(0.0)
                    && !parameter.range().contains(-1.0));
            let value = match off && D::NEGATIVE_IS_ZERO {
                true => value.max(0.0),
                false => value,
            };
            let refused = |allowed: &dyn fmt::Display| {
                let name = name();
                let message = format!("{name} is {value}; it must be {allowed}");
                ApiError::field(name, message)
            };
            if parameter.is_count() {
                if !(0.0..=u32::MAX.into()).contains(&value) {
                    return Err(refused(&"a whole number from 0"));
                }
                let value = ParameterValue::Count(value as usize);
                parameter
                    .set(options, value)
                    .map_err(|e| ApiError::of_engine(&e).with_param(name()))?;
                continue;
            }
            let range = bounds::<D>(parameter, base);
            if !range.contains(value as f32) {
                return Err(refused(&range));
            }
            if parameter.name() == "top_p" && value == 0.0 {
                options.sampling.temperature = 0.0;
                continue;
            }
            parameter
                .set(options, ParameterValue::Real(value as f32))
                .map_err(|e| ApiError::of_engine(&e).with_param(name()))?;
        }
        Ok(())
    }
}

/// All parameters of `options` by name.
pub(crate) fn as_json(options: &GenerateOptions) -> Map<String, Value> {
    Parameter::all()
        .map(|p| {
            let value = match p.of(options) {
                ParameterValue::Count(n) => n.into(),
                value @ ParameterValue::Real(_) => value.as_f64().into(),
            };
            (p.name().to_owned(), value)
        })
        .collect()
}

/// The names of all fields.
static NAMES: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| Parameter::all().flat_map(Parameter::names).collect());

impl<'de, D: Dialect> Deserialize<'de> for Parameters<D> {
    /// Deserializes a flattened field. It reads the parameters among the fields, and ignores the
    /// other fields.
    fn deserialize<R: Deserializer<'de>>(deserializer: R) -> Result<Self, R::Error> {
        struct Fields<D>(PhantomData<D>);

        impl<'de, D: Dialect> Visitor<'de> for Fields<D> {
            type Value = Parameters<D>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut values: Vec<(&'static Parameter, Result<f64, String>)> = Vec::new();
                while let Some(name) = map.next_key::<Cow<'de, str>>()? {
                    let parameter = Parameter::named(&name).filter(|p| D::takes(p));
                    let Some(parameter) = parameter else {
                        map.next_value::<de::IgnoredAny>()?;
                        continue;
                    };
                    let value = match map.next_value::<Value>()? {
                        Value::Null => continue,
                        Value::Number(n) if n.as_f64().is_some() => Ok(n.as_f64().unwrap_or(0.0)),
                        other => Err(other.to_string().chars().take(40).collect()),
                    };
                    if values.iter().any(|(other, _)| *other == parameter) {
                        let name = parameter.name();
                        return Err(de::Error::custom(format!(
                            "duplicate field `{}{name}`",
                            D::PREFIX
                        )));
                    }
                    values.push((parameter, value));
                }
                // Sorts by the order of the declarations, so the order of the request's fields has
                // no effect.
                let place = |parameter: &Parameter| Parameter::all().position(|p| p == parameter);
                values.sort_by_key(|(parameter, _)| place(parameter));
                Ok(Parameters {
                    values,
                    dialect: PhantomData,
                })
            }
        }

        // `deserialize_struct` receives only the named fields. `deserialize_map` would also receive
        // the fields of other flattened structs.
        deserializer.deserialize_struct("Parameters", &NAMES, Fields(PhantomData))
    }
}

impl<D: Dialect> PartialSchema for Parameters<D> {
    fn schema() -> RefOr<Schema> {
        let mut object = ObjectBuilder::new();
        for parameter in Parameter::all().filter(|p| D::takes(p)) {
            let kind = match parameter.is_count() {
                true => Type::Integer,
                false => Type::Number,
            };
            let schema = ObjectBuilder::new()
                .schema_type(SchemaType::from_iter([kind, Type::Null]))
                .description(Some(parameter.documentation()));
            object = object.property(parameter.name(), schema);
        }
        object.into()
    }
}

impl<D: Dialect> ToSchema for Parameters<D> {
    fn name() -> Cow<'static, str> {
        format!("{}.Parameters", D::NAME).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Plain;

    impl Dialect for Plain {
        const NAME: &'static str = "plain";
        const MOST_TEMPERATURE: f32 = 2.0;
    }

    #[derive(Debug, Default)]
    struct Narrow;

    impl Dialect for Narrow {
        const NAME: &'static str = "narrow";
        const PREFIX: &'static str = "options.";
        const NEGATIVE_IS_ZERO: bool = true;

        fn takes(parameter: &Parameter) -> bool {
            ["temperature", "top_k"].contains(&parameter.name())
        }
    }

    #[derive(serde::Deserialize)]
    #[serde(bound = "")]
    struct Request<D: Dialect> {
        model: Option<String>,
        #[serde(flatten)]
        parameters: Parameters<D>,
        #[serde(flatten)]
        more: Map<String, Value>,
    }

    fn read<D: Dialect>(json: &str) -> Result<Request<D>, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    fn applied<D: Dialect>(json: &str) -> Result<GenerateOptions, String> {
        let mut options = GenerateOptions::new();
        let request = read::<D>(json)?;
        let done = request.parameters.apply(&mut options);
        done.map(|()| options).map_err(|e| e.message.clone())
    }

    #[test]
    fn a_request_gives_its_parameters_and_keeps_its_other_fields() {
        let json = r#"{"model": "m", "top_k": 40, "repetition_penalty": 1.5, "temp": 0.5,
                       "min_p": null, "other": [1]}"#;
        let request = read::<Plain>(json).unwrap();
        assert_eq!(request.model.as_deref(), Some("m"));
        assert_eq!(request.more.keys().collect::<Vec<_>>(), ["other"]);
        assert_eq!(request.parameters.get("top_k"), Some(40.0));
        assert_eq!(request.parameters.get("min_p"), None);
        let options = applied::<Plain>(json).unwrap();
        assert_eq!(options.sampling.temperature, 0.5);
        assert_eq!(options.penalties.repeat_penalty, 1.5);
        let json = as_json(&options);
        assert_eq!(
            (&json["top_k"], &json["xtc_threshold"]),
            (&40.into(), &0.1.into())
        );
    }

    #[test]
    fn bounds_are_the_dialects() {
        for (json, part) in [
            (
                r#"{"temperature": 2.5}"#,
                "temperature is 2.5; it must be a number between 0 and 2",
            ),
            (
                r#"{"top_k": -1}"#,
                "top_k is -1; it must be a whole number from 0",
            ),
            (r#"{"top_k": 1.5}"#, "whole number"),
            (r#"{"top_p": 1.5}"#, "top_p"),
            (r#"{"presence_penalty": 3}"#, "presence_penalty"),
            (r#"{"repeat_penalty": 0}"#, "repeat_penalty"),
            (
                r#"{"min_p": "much"}"#,
                "min_p is \"much\"; it must be a number",
            ),
            (r#"{"top_k": 1, "top_k": 2}"#, "duplicate"),
            (r#"{"temp": 1, "temperature": 1}"#, "duplicate"),
        ] {
            let message = applied::<Plain>(json).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
        let greedy = applied::<Plain>(r#"{"top_p": 0, "temperature": 1}"#).unwrap();
        assert_eq!(
            (greedy.sampling.temperature, greedy.sampling.top_p),
            (0.0, 1.0)
        );
        let message = applied::<Narrow>(r#"{"temperature": 11}"#).unwrap_err();
        assert!(message.starts_with("options.temperature"), "{message}");
        let options = applied::<Narrow>(r#"{"temperature": -1, "top_k": -1, "top_p": 7}"#).unwrap();
        assert_eq!(options.sampling, GenerateOptions::new().sampling);
    }

    #[test]
    fn a_schema_has_the_fields_that_the_dialect_takes() {
        let schema = serde_json::to_value(Narrow::schema_of()).unwrap();
        let fields = schema["properties"].as_object().unwrap();
        assert_eq!(fields.keys().collect::<Vec<_>>(), ["temperature", "top_k"]);
        assert_eq!(
            fields["top_k"]["type"],
            serde_json::json!(["integer", "null"])
        );
    }

    impl Narrow {
        fn schema_of() -> RefOr<Schema> {
            Parameters::<Self>::schema()
        }
    }
}
