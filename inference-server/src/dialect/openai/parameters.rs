//! The sampling parameters of OpenAI's API.

use inference::{Parameter, ParameterValue};

use crate::pipeline::parameters::{Dialect, Parameters};

/// OpenAI's fields, and those that other servers added to its API.
#[derive(Debug)]
pub(crate) struct OpenAi;

/// An alias without generic parameters, because the derived OpenAPI schemas require one.
pub(crate) type OpenAiParameters = Parameters<OpenAi>;

impl Dialect for OpenAi {
    const NAME: &'static str = "openai";
    const MOST_TEMPERATURE: f32 = 2.0;

    fn default_of(parameter: &Parameter) -> Option<ParameterValue> {
        (parameter.name() == "temperature").then_some(ParameterValue::Real(1.0))
    }
}
