//! The Jinja environment of chat templates. It has the features that Hugging Face provides, with
//! limits.
//!
//! It has Hugging Face's whitespace rules, `raise_exception`, `strftime_now`, `tojson`, and the
//! methods and text forms of Python's values. It cannot access files or other templates. The module
//! `chat_template` finds and loads templates.

use std::fmt::{self, Write as _};
use std::time::{Duration, Instant, SystemTime};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

use super::limits::TextLimits;
use super::template_guard::{BOUND, BOUND_ATTRIBUTE, TICK};
use super::template_python::{self as python, Bounded, Json};
use super::template_time::strftime;

/// Removed filters. They can make a text much longer, and no chat template needs them.
const REMOVED: [&str; 7] = [
    "batch",
    "slice",
    "format",
    "pprint",
    "urlencode",
    "zip",
    "chain",
];

/// The error of `raise_exception(...)`: the template rejects the conversation.
#[derive(Debug)]
pub(crate) struct Raised(pub(crate) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for Raised {}

/// The remaining budget of one rendering.
struct Budget {
    /// Remaining number of bytes that may be written to the result or to variables.
    bytes: usize,
    end: Instant,
}

/// The maximum time of one rendering.
const TIME: Duration = Duration::from_secs(10);

fn too_large(what: &str, most: usize) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("{what} grows beyond {most} bytes, the most that a template may build"),
    )
}

/// Subtracts `bytes` from the budget of the rendering.
fn spend(state: &mut State<'_, '_>, bytes: usize, most: usize) -> Result<(), Error> {
    let budget = state.get_or_insert_extension_with(|| Budget {
        bytes: most.saturating_mul(4),
        end: Instant::now() + TIME,
    });
    budget.bytes = budget
        .bytes
        .checked_sub(bytes)
        .ok_or_else(|| too_large("the text", most))?;
    if Instant::now() > budget.end {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("the template runs longer than {} seconds", TIME.as_secs()),
        ));
    }
    Ok(())
}

/// The environment, without a template.
pub(crate) fn environment(limits: &TextLimits) -> Result<Environment<'static>, Error> {
    let most = limits.text_bytes;
    let mut env = Environment::new();
    env.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?,
    );
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_fuel(Some(limits.template_fuel));
    env.set_recursion_limit(limits.template_recursion);
    env.set_debug(false);
    env.set_formatter(move |out, state, value| write_value(out, state, value, most));
    for name in REMOVED {
        env.remove_filter(name);
    }
    env.remove_global("debug");
    env.add_filter(BOUND, move |value: &Value| keep(value, false, most));
    env.add_filter(BOUND_ATTRIBUTE, move |value: &Value| {
        keep(value, true, most)
    });
    env.add_function(
        TICK,
        move |state: &mut State<'_, '_>, bytes: usize, names: Rest<Value>| {
            names
                .iter()
                .try_for_each(|value| check_size(value, false, most))?;
            spend(state, bytes, most)
        },
    );
    env.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.clone())
                .with_source(Raised(message)))
        },
    );
    env.add_function(
        "strftime_now",
        |state: &State<'_, '_>, format: &str| -> Result<String, Error> {
            let now = state.lookup(NOW).and_then(|v| u64::try_from(v).ok());
            let seconds = now.unwrap_or_else(|| {
                SystemTime::now()
                    .duration_since(SystemTime::UNIX_EPOCH)
                    .map_or(0, |d| d.as_secs())
            });
            strftime(seconds, format).map_err(|what| Error::new(ErrorKind::InvalidOperation, what))
        },
    );
    // As in Python, a sequence is a value with a length and an index.
    env.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Map
        )
    });
    env.add_filter(
        "tojson",
        move |value: &Value, indent: Option<usize>, options: Kwargs| {
            to_json(value, indent, &options, most)
        },
    );
    env.add_filter(
        "join",
        move |value: &Value, by: Option<&str>, attribute: Option<&str>| {
            join(value, by.unwrap_or_default(), attribute, most)
        },
    );
    env.add_filter("replace", move |text: &Value, from: &Value, to: &Value| {
        let (from, to) = (bounded(from, most)?, bounded(to, most)?);
        replace(&bounded(text, most)?, &from, &to, None, most)
    });
    env.add_filter(
        "indent",
        move |text: &str, width: Option<usize>, first: Option<bool>, options: Kwargs| {
            let width = width.or(options.get("width")?).unwrap_or(4);
            let first = first.or(options.get("first")?).unwrap_or(false);
            let blank = options.get::<Option<bool>>("blank")?.unwrap_or(false);
            options.assert_all_used()?;
            indent(text, width, first, blank, most)
        },
    );
    env.set_unknown_method_callback(move |state, value, method, args| {
        match (value.as_str(), method) {
            (Some(text), "replace") => {
                let (from, to, count): (&str, &str, Option<i64>) =
                    minijinja::value::from_args(args)?;
                let count = count.and_then(|n| usize::try_from(n).ok());
                replace(text, from, to, count, most).map(Value::from)
            }
            (Some(by), "join") => {
                let (items,): (&Value,) = minijinja::value::from_args(args)?;
                join(items, by, None, most).map(Value::from)
            }
            (Some(text), method) if python::has_method(method) => {
                python::call_method(text, method, args)
            }
            (Some(_), "format") => Err(Error::new(
                ErrorKind::UnknownMethod,
                "str.format is not run in chat templates; use ~ or +",
            )),
            _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
        }
    });
    Ok(env)
}

/// The variable with the time that `strftime_now` uses, in seconds since 1970.
pub(crate) const NOW: &str = "__now";

/// Writes a value as Python would, and subtracts its length from the budget.
fn write_value(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
    most: usize,
) -> Result<(), Error> {
    let written = if let Some(text) = value.as_str() {
        spend(state, text.len(), most)?;
        out.write_str(text)
    } else {
        match value.kind() {
            ValueKind::Undefined => return Ok(()),
            ValueKind::Invalid => return minijinja::escape_formatter(out, state, value),
            _ => check_size(value, false, most)?,
        }
        let mut text = Bounded {
            text: String::new(),
            most,
        };
        python::write(&mut text, value, false).map_err(|_| too_large("a value", most))?;
        let text = text.text;
        spend(state, text.len(), most)?;
        out.write_str(&text)
    };
    written.map_err(|_| too_large("the text", most))
}

fn bounded(value: &Value, most: usize) -> Result<String, Error> {
    let mut out = Bounded {
        text: String::new(),
        most,
    };
    write!(out, "{value}").map_err(|_| too_large("a value", most))?;
    Ok(out.text)
}

/// Checks a value before its assignment. A lazy sequence becomes a list, because lazy sequences
/// could refer to each other without end.
fn keep(value: &Value, attribute: bool, most: usize) -> Result<Value, Error> {
    check_size(value, attribute, most)?;
    if value.kind() == ValueKind::Iterable {
        return Ok(Value::from(value.try_iter()?.collect::<Vec<Value>>()));
    }
    Ok(value.clone())
}

/// The maximum nesting of lists and maps.
const DEPTH: usize = 100;

/// Refuses a value with more text and items than `most`, or with deeper nesting than [`DEPTH`].
/// Inside another value, it refuses namespaces, macros and lazy sequences, because with them a
/// value could contain itself. With `attribute`, it also refuses them at the top level.
fn check_size(value: &Value, attribute: bool, most: usize) -> Result<(), Error> {
    let refuse = |what: &str| Err(Error::new(ErrorKind::InvalidOperation, what.to_owned()));
    let mut left = most;
    let mut spend = |bytes: usize| {
        left = left
            .checked_sub(bytes)
            .ok_or_else(|| too_large("a value", most))?;
        Ok::<(), Error>(())
    };
    let mut todo = vec![(value.clone(), 0)];
    while let Some((value, depth)) = todo.pop() {
        if let Some(len) = value
            .as_str()
            .map(str::len)
            .or_else(|| value.as_bytes().map(<[u8]>::len))
        {
            spend(len)?;
            continue;
        }
        spend(16)?;
        if depth > DEPTH {
            return refuse("lists and maps hold each other too deeply");
        }
        let inside = attribute || depth > 0;
        if inside
            && value
                .as_object()
                .is_some_and(|o| o.type_name().ends_with("::Namespace"))
        {
            return refuse("a namespace cannot be kept inside another value");
        }
        match value.kind() {
            ValueKind::Map => {
                for key in value.try_iter()? {
                    spend(16)?;
                    todo.push((value.get_item(&key)?, depth + 1));
                    todo.push((key, depth + 1));
                }
            }
            ValueKind::Iterable if depth > 0 => {
                return refuse("a sequence inside another value must be a list; add `| list`");
            }
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    spend(16)?;
                    todo.push((item, depth + 1));
                }
            }
            ValueKind::Plain if inside => {
                return refuse("a macro cannot be kept inside another value");
            }
            _ => {}
        }
    }
    Ok(())
}

fn join(items: &Value, by: &str, attribute: Option<&str>, most: usize) -> Result<String, Error> {
    let mut out = Bounded {
        text: String::new(),
        most,
    };
    for (n, item) in items.try_iter()?.enumerate() {
        let item = match attribute {
            Some(name) => item.get_attr(name)?,
            None => item,
        };
        let by = if n > 0 { by } else { "" };
        let item = item
            .as_str()
            .map_or_else(|| bounded(&item, most), |s| Ok(s.to_owned()))?;
        write!(out, "{by}{item}").map_err(|_| too_large("a value", most))?;
    }
    Ok(out.text)
}

fn replace(
    text: &str,
    from: &str,
    to: &str,
    count: Option<usize>,
    most: usize,
) -> Result<String, Error> {
    let count = count.unwrap_or(usize::MAX).min(text.matches(from).count());
    if count.saturating_mul(to.len()).saturating_add(text.len()) > most.saturating_mul(2) {
        return Err(too_large("a value", most));
    }
    Ok(text.replacen(from, to, count))
}

fn indent(
    text: &str,
    width: usize,
    first: bool,
    blank: bool,
    most: usize,
) -> Result<String, Error> {
    let lines = text.matches('\n').count() + 1;
    if lines.saturating_mul(width).saturating_add(text.len()) > most {
        return Err(too_large("a value", most));
    }
    let pad = " ".repeat(width);
    let mut out = String::with_capacity(text.len() + lines * width);
    for (n, line) in text.split('\n').enumerate() {
        if n > 0 {
            out.push('\n');
        }
        if (n > 0 || first) && (blank || !line.trim().is_empty()) {
            out.push_str(&pad);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// JSON in the form of Python's `json.dumps`: separators `", "` and `": "`, without escapes for
/// HTML.
fn to_json(
    value: &Value,
    indent: Option<usize>,
    options: &Kwargs,
    most: usize,
) -> Result<String, Error> {
    let indent = indent.or(options.get("indent")?);
    let ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    let sort = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = options
        .get::<Option<Value>>("separators")?
        .map(|pair| separators(&pair))
        .transpose()?;
    options.assert_all_used()?;
    if indent.is_some_and(|n| n > 64) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson indents by 64 at most",
        ));
    }
    check_size(value, false, most)?;
    let json = serde_json::to_value(value).map_err(|e| {
        Error::new(ErrorKind::BadSerialization, format!("tojson: {e}")).with_source(e)
    })?;
    let mut out = Bounded {
        text: String::new(),
        most,
    };
    let style = Json {
        indent,
        ascii,
        sort,
        separators,
    };
    style
        .write(&mut out, &json, 0)
        .map_err(|_| too_large("a value", most))?;
    Ok(out.text)
}

/// Parses the argument `separators=(',', ':')` of `tojson`. Returns the separator between items and
/// the separator after keys.
fn separators(pair: &Value) -> Result<(String, String), Error> {
    let texts: Vec<Value> = pair.try_iter()?.take(3).collect();
    match texts.as_slice() {
        [item, name] => match (item.as_str(), name.as_str()) {
            (Some(item), Some(name)) if item.len() <= 16 && name.len() <= 16 => {
                Ok((item.to_owned(), name.to_owned()))
            }
            _ => Err(bad_separators()),
        },
        _ => Err(bad_separators()),
    }
}

fn bad_separators() -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        "tojson takes two short texts as separators",
    )
}
