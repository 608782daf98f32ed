//! The chat's `/set`: sets generation options by name. It accepts names of other tools, too.

use std::str::FromStr;

use inference::{GenerateOptions, Parameter, SamplerOrder};

/// Options that are not a [`Parameter`].
const OTHERS: [&str; 5] = ["sampler_order", "max_tokens", "min_tokens", "seed", "stop"];

pub fn names() -> impl Iterator<Item = &'static str> {
    Parameter::all().map(Parameter::name).chain(OTHERS)
}

/// Sets the option `name` to `value`. After an error, `options` is unchanged.
pub fn set(options: &mut GenerateOptions, name: &str, value: &str) -> Result<(), String> {
    let mut changed = options.clone();
    let value = value.trim();
    if let Some(parameter) = Parameter::named(name) {
        let value = parameter.parse(value).map_err(|e| e.to_string())?;
        return parameter.set(options, value).map_err(|e| e.to_string());
    }
    match name.to_ascii_lowercase().replace('-', "_").as_str() {
        "sampler_order" => {
            let order = ORDERS.iter().find(|(order_name, _)| *order_name == value);
            let (_, order) = order.ok_or_else(|| {
                format!("{value:?} is no value for {name}: nucleus_first or temperature_first")
            })?;
            changed.sampling.sampler_order = *order;
        }
        "min_tokens" => changed.stop.min_tokens = parse(name, value)?,
        "max_tokens" | "num_predict" | "n_predict" => changed.max_tokens = parse(name, value)?,
        "seed" if value == "random" => changed.sampling.seed = None,
        "seed" => changed.sampling.seed = Some(parse(name, value)?),
        "stop" if value == "none" => changed.stop.stop_strings.clear(),
        "stop" => changed.stop.stop_strings.push(value.to_owned()),
        _ => {
            let names: Vec<&str> = names().collect();
            return Err(format!(
                "no parameter {name:?}; there are {}",
                names.join(", ")
            ));
        }
    }
    changed.validate().map_err(|e| e.to_string())?;
    *options = changed;
    Ok(())
}

/// The options that differ from the defaults or from `base`, in the form that [`set`] accepts. An
/// explicit 0 is included if `base` differs, so that a program that starts with `base` restores it.
pub fn changed(options: &GenerateOptions, base: &GenerateOptions) -> Vec<(String, String)> {
    let usual = GenerateOptions::default();
    let mut changes = Vec::new();
    let mut put = |name: &str, value: String, is_usual: bool| {
        if !is_usual {
            changes.push((name.to_owned(), value));
        }
    };
    for parameter in Parameter::all() {
        let value = parameter.of(options);
        let unchanged = [&usual, base].iter().all(|of| parameter.of(of) == value);
        put(parameter.name(), value.to_string(), unchanged);
    }
    let least = options.stop.min_tokens;
    let unchanged = [&usual, base].iter().all(|of| of.stop.min_tokens == least);
    put("min_tokens", least.to_string(), unchanged);
    let order = options.sampling.sampler_order;
    let usual_order = order == usual.sampling.sampler_order;
    put("sampler_order", order_name(order).into(), usual_order);
    // In a conversation, no value means no limit.
    let most = options.max_tokens;
    put("max_tokens", most.to_string(), most == usize::MAX);
    if let Some(seed) = options.sampling.seed {
        put("seed", seed.to_string(), false);
    }
    for stop in &options.stop.stop_strings {
        put("stop", stop.clone(), false);
    }
    changes
}

/// The orders of filters and temperature, by name.
const ORDERS: [(&str, SamplerOrder); 2] = [
    ("nucleus_first", SamplerOrder::NucleusFirst),
    ("temperature_first", SamplerOrder::TemperatureFirst),
];

fn order_name(order: SamplerOrder) -> &'static str {
    let entry = ORDERS.iter().find(|(_, other)| *other == order);
    entry.map_or("unknown", |(name, _)| name)
}

/// All options and their values, one per line.
pub fn list(options: &GenerateOptions) -> String {
    let seed = options
        .sampling
        .seed
        .map_or("random".into(), |seed| seed.to_string());
    let most = match options.max_tokens {
        usize::MAX => String::from("(to the end of the context)"),
        n => n.to_string(),
    };
    let mut lines: Vec<String> = Parameter::all()
        .map(|parameter| format!("{} {}", parameter.name(), parameter.of(options)))
        .collect();
    lines.extend([
        format!(
            "sampler_order {}",
            order_name(options.sampling.sampler_order)
        ),
        format!("max_tokens {most}"),
        format!("min_tokens {}", options.stop.min_tokens),
        format!("seed {seed}"),
        format!("stop {:?}", options.stop.stop_strings),
    ]);
    lines.join("\n")
}

fn parse<T: FromStr>(name: &str, value: &str) -> Result<T, String>
where
    T::Err: std::fmt::Display,
{
    value
        .parse()
        .map_err(|e| format!("{value:?} is no value for {name}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_sets_its_own_option() {
        let mut o = GenerateOptions::default();
        for (name, value) in [
            ("temperature", "0.5"),
            ("top_p", "0.9"),
            ("top-k", "40"),
            ("MIN_P", "0.1"),
            ("repetition_penalty", "1.5"),
            ("repeat_last_n", "32"),
            ("presence_penalty", "0.5"),
            ("frequency_penalty", "-0.5"),
            ("xtc_probability", "0.25"),
            ("xtc_threshold", "0.2"),
            ("sampler_order", "temperature_first"),
            ("min_tokens", "2"),
            ("num_predict", "9"),
            ("seed", "3"),
            ("stop", "END"),
        ] {
            set(&mut o, name, value).unwrap();
        }
        let text = list(&o);
        for line in [
            "temperature 0.5",
            "top_k 40",
            "top_p 0.9",
            "min_p 0.1",
            "xtc_probability 0.25",
            "xtc_threshold 0.2",
            "repeat_penalty 1.5",
            "repeat_window 32",
            "presence_penalty 0.5",
            "frequency_penalty -0.5",
            "sampler_order temperature_first",
            "max_tokens 9",
            "min_tokens 2",
            "seed 3",
            "stop [\"END\"]",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}:\n{text}");
        }
        assert_eq!(text.lines().count(), names().count());
        // If `set` receives the changed settings, the resulting options must be equal.
        let mut again = GenerateOptions::default();
        for (name, value) in changed(&o, &GenerateOptions::default()) {
            set(&mut again, &name, &value).unwrap();
        }
        assert_eq!(list(&again), text);
        let mut unbounded = GenerateOptions::default();
        unbounded.max_tokens = usize::MAX;
        let base = unbounded.clone();
        assert!(changed(&unbounded, &base).is_empty());
        let warm = base.clone().with_temperature(0.8);
        let pair = |value: &str| vec![("temperature".to_owned(), value.to_owned())];
        assert_eq!(changed(&base, &warm), pair("0"));
        assert_eq!(changed(&warm, &warm), pair("0.8"));
        set(&mut o, "seed", "random").unwrap();
        set(&mut o, "stop", "none").unwrap();
        assert!(o.sampling.seed.is_none() && o.stop.stop_strings.is_empty());
    }

    #[test]
    fn a_refused_value_changes_nothing() {
        let mut o = GenerateOptions::default();
        let before = list(&o);
        for (name, value) in [
            ("temperature", "-1"),
            ("temperature", "hot"),
            ("top_p", "2"),
            ("top_k", "-1"),
            ("sampler_order", "1"),
            ("max_tokens", ""),
            ("stop", ""),
            ("nonsense", "1"),
        ] {
            assert!(set(&mut o, name, value).is_err(), "{name} {value}");
        }
        assert_eq!(list(&o), before);
        assert!(set(&mut o, "nonsense", "1").unwrap_err().contains("top_p"));
    }
}
