//! Flags of the numeric generation options, generated from the contract's declarations.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::LazyLock;

use clap::{Arg, ArgMatches, Command};
use inference::{Parameter, ParameterValues};

/// The note about the default of an option whose flag is not given.
pub trait Otherwise {
    /// The note about the default at the end of a flag's help.
    fn note(parameter: &Parameter) -> String;
}

/// A flag for each [`Parameter`], and the given values.
#[derive(Debug)]
pub struct ParameterFlags<O> {
    pub values: ParameterValues,
    otherwise: PhantomData<O>,
}

impl<O> Clone for ParameterFlags<O> {
    fn clone(&self) -> Self {
        Self {
            values: self.values.clone(),
            otherwise: PhantomData,
        }
    }
}

/// The flags that `-h` shows; `--help` shows all.
const USUAL: [&str; 5] = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty"];

/// Flag names by field name: `top-k` for `top_k`.
static FLAGS: LazyLock<BTreeMap<&'static str, String>> = LazyLock::new(|| {
    Parameter::all()
        .flat_map(Parameter::names)
        .map(|name| (name, name.replace('_', "-")))
        .collect()
});

/// The flag of a name or an alias, without dashes.
pub fn flag(name: &'static str) -> &'static str {
    FLAGS.get(name).map_or(name, String::as_str)
}

fn argument<O: Otherwise>(parameter: &'static Parameter) -> Arg {
    let help = format!(
        "{} {}",
        parameter.documentation().trim_end_matches('.'),
        O::note(parameter)
    );
    Arg::new(parameter.name())
        .long(flag(parameter.name()))
        .visible_aliases(parameter.aliases().iter().map(|alias| flag(alias)))
        .value_name(parameter.placeholder())
        .help(help)
        .hide_short_help(!USUAL.contains(&parameter.name()))
        .allow_negative_numbers(true)
        .value_parser(move |text: &str| match parameter.is_count() {
            true => crate::cli::options::load::count(text).map(inference::ParameterValue::Count),
            false => parameter.parse(text).map_err(|e| e.message().to_owned()),
        })
}

impl<O: Otherwise> clap::Args for ParameterFlags<O> {
    fn augment_args(command: Command) -> Command {
        command.args(Parameter::all().map(argument::<O>))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<O: Otherwise> clap::FromArgMatches for ParameterFlags<O> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self {
            values: ParameterValues::new(),
            otherwise: PhantomData,
        };
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for parameter in Parameter::all() {
            if let Some(value) = matches.get_one(parameter.name()) {
                self.values.put(parameter, *value);
            }
        }
        Ok(())
    }
}
