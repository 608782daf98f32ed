//! Inserts checks into a chat template, so that running it takes limited memory and time.
//!
//! The template engine counts instructions, but a single instruction can double a string. Therefore
//! a filter measures each assigned value. Loops, macros and blocks with their own variables call a
//! function in each iteration. Tags with too many operators are rejected. The template's output and
//! line numbers do not change. The module `template_env` implements the checks.

use inference::{Error, ErrorKind, Result};

use super::limits::TextLimits;

/// The filter for values that are assigned to variables.
pub(crate) const BOUND: &str = "__bound";
/// The filter for values that are assigned to attributes of namespaces.
pub(crate) const BOUND_ATTRIBUTE: &str = "__bound_attribute";
/// The function that each iteration calls, with the length of the iteration's plain text, and with
/// its variables.
pub(crate) const TICK: &str = "__tick";

/// One part of the guarded template.
enum Part {
    Source(String),
    /// A check: its arguments, the end marker of the preceding tag, and the number of text bytes in
    /// its block.
    Tick(String, &'static str, usize),
}

/// The template with its checks.
///
/// # Errors
/// `Unsupported` for tags that use other templates or have too many operators. `InvalidModel` for a
/// tag without an end. Both errors contain the line.
pub(crate) fn guard(source: &str, limits: &TextLimits) -> Result<String> {
    let mut parts: Vec<Part> = Vec::new();
    // The open blocks. Each entry has the keyword that ends the block, and the index of its check.
    let mut open: Vec<(&'static str, usize)> = Vec::new();
    let mut rest = source;
    while let Some(at) = next_tag(rest) {
        let line = source[..source.len() - rest.len() + at]
            .matches('\n')
            .count()
            + 1;
        text(&mut parts, &mut open, &rest[..at]);
        let tag = &rest[at..];
        let end = match tag.get(..2) {
            Some("{#") => tag.find("#}").map(|n| n + 2),
            Some("{{") => close(tag, "}}"),
            _ => close(tag, "%}"),
        };
        let Some(end) = end else {
            return Err(Error::new(
                ErrorKind::InvalidModel,
                format!("line {line}: the tag is not closed"),
            ));
        };
        let (tag, after) = tag.split_at(end);
        rest = after;
        if tag.starts_with("{#") {
            parts.push(Part::Source(tag.to_owned()));
            continue;
        }
        let operators = operators(tag);
        if operators > limits.template_operators {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "line {line}: one tag has {operators} joins and additions; at most {} are run",
                    limits.template_operators
                ),
            ));
        }
        if tag.starts_with("{{") {
            parts.push(Part::Source(tag.to_owned()));
            continue;
        }
        if keyword(tag) == "raw" {
            let end = end_of_raw(rest).ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidModel,
                    format!("line {line}: the raw block is not closed"),
                )
            })?;
            parts.push(Part::Source(tag.to_owned()));
            text(&mut parts, &mut open, &rest[..end]);
            rest = &rest[end..];
            continue;
        }
        block(tag, &mut parts, &mut open).map_err(|what| {
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "line {line}: the tag {what:?} is not run; a chat template stands for itself"
                ),
            )
        })?;
    }
    text(&mut parts, &mut open, rest);
    let mut out = String::with_capacity(source.len() * 2);
    for part in parts {
        match part {
            Part::Source(text) => out.push_str(&text),
            Part::Tick(names, end, bytes) => {
                out.push_str(&format!("{{% set __guard = {TICK}({bytes}{names}) {end}"));
            }
        }
    }
    Ok(out)
}

/// Copies plain text and counts it for every open block.
fn text(parts: &mut Vec<Part>, open: &mut [(&'static str, usize)], text: &str) {
    for (_, tick) in open {
        if let Some(Part::Tick(_, _, bytes)) = parts.get_mut(*tick) {
            *bytes += text.len();
        }
    }
    parts.push(Part::Source(text.to_owned()));
}

fn block(
    tag: &str,
    parts: &mut Vec<Part>,
    open: &mut Vec<(&'static str, usize)>,
) -> Result<(), String> {
    let word = keyword(tag);
    let (head, body, tail) = split(tag);
    let mut tick = |parts: &mut Vec<Part>, names: Vec<&str>, ends: &'static str| {
        parts.push(Part::Source(tag.to_owned()));
        open.push((ends, parts.len()));
        let names: String = names.iter().map(|n| format!(", {n}")).collect();
        parts.push(Part::Tick(names, end_marker(tag), 0));
    };
    match word {
        "include" | "import" | "from" | "extends" | "block" => return Err(word.to_owned()),
        // Hugging Face marks the assistant's text with these tags for training. They output
        // nothing.
        "generation" => parts.push(Part::Source(format!("{head} if true {tail}"))),
        "endgeneration" => parts.push(Part::Source(format!("{head} endif {tail}"))),
        "set" => match top_level(body, "=") {
            Some(at) => {
                let (target, value) = body.split_at(at);
                let filter = if target.contains('.') {
                    BOUND_ATTRIBUTE
                } else {
                    BOUND
                };
                // The newlines around the value stay, so that line numbers are correct.
                let value = &value[1..];
                parts.push(Part::Source(format!(
                    "{head}{target}= ({value})|{filter} {tail}"
                )));
            }
            None => parts.push(Part::Source(tag.to_owned())),
        },
        "for" => {
            let names = after_word(body, "for");
            let names = top_level(names, " in ").map_or("", |at| &names[..at]);
            tick(parts, identifiers(names), "endfor");
        }
        "with" => tick(parts, parameters(after_word(body, "with")), "endwith"),
        "macro" => tick(parts, parameters(parenthesized(body)), "endmacro"),
        "call" => {
            let rest = after_word(body, "call");
            let names = if rest.trim_start().starts_with('(') {
                parameters(parenthesized(rest))
            } else {
                Vec::new()
            };
            tick(parts, names, "endcall");
        }
        word => {
            if let Some(at) = open.iter().rposition(|(ends, _)| *ends == word) {
                open.truncate(at);
            }
            parts.push(Part::Source(tag.to_owned()));
        }
    }
    Ok(())
}

fn next_tag(text: &str) -> Option<usize> {
    text.match_indices('{')
        .map(|(at, _)| at)
        .find(|at| matches!(text.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')))
}

/// Calls `see` with each byte of `text` outside strings and its bracket depth, until `see` returns
/// true.
fn walk(text: &str, mut see: impl FnMut(usize, u8, usize) -> bool) -> Option<usize> {
    let bytes = text.as_bytes();
    let (mut at, mut depth) = (0, 0usize);
    while let Some(byte) = bytes.get(at).copied() {
        match byte {
            b'"' | b'\'' => {
                at += 1;
                while bytes.get(at).is_some_and(|b| *b != byte) {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
            }
            _ => {
                if see(at, byte, depth) {
                    return Some(at);
                }
                match byte {
                    b'(' | b'[' | b'{' => depth += 1,
                    b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
        }
        at += 1;
    }
    None
}

/// The end of the tag at the beginning of `text`.
fn close(text: &str, end: &str) -> Option<usize> {
    let inner = text.get(2..)?;
    walk(inner, |at, _, depth| {
        depth == 0 && inner.as_bytes()[at..].starts_with(end.as_bytes())
    })
    .map(|at| at + 2 + end.len())
}

/// Opening marker, body and closing marker of a block tag.
fn split(tag: &str) -> (&str, &str, &str) {
    let head = if matches!(tag.as_bytes().get(2), Some(b'-' | b'+')) {
        3
    } else {
        2
    };
    let end = tag.len().saturating_sub(2);
    let tail = if end > head && matches!(tag.as_bytes().get(end - 1), Some(b'-' | b'+')) {
        end - 1
    } else {
        end
    };
    (
        &tag[..head],
        &tag[head..tail.max(head)],
        &tag[tail.max(head)..],
    )
}

fn end_marker(tag: &str) -> &'static str {
    match split(tag).2 {
        "-%}" => "-%}",
        "+%}" => "+%}",
        _ => "%}",
    }
}

fn keyword(tag: &str) -> &str {
    let body = split(tag).1.trim_start();
    let end = body
        .find(|c: char| !c.is_alphanumeric() && c != '_')
        .unwrap_or(body.len());
    &body[..end]
}

fn after_word<'a>(body: &'a str, word: &str) -> &'a str {
    body.trim_start().strip_prefix(word).unwrap_or_default()
}

fn end_of_raw(text: &str) -> Option<usize> {
    text.match_indices("{%").map(|(at, _)| at).find(|at| {
        keyword(&format!(
            "{} %}}",
            &text[*at..].split("%}").next().unwrap_or_default()
        )) == "endraw"
    })
}

/// The first position of `what` outside of strings and brackets. `==` does not match `=`.
fn top_level(text: &str, what: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    walk(text, |at, _, depth| {
        let here = depth == 0 && spaced(&bytes[at..], what.as_bytes());
        here && (what != "="
            || (bytes.get(at + 1) != Some(&b'=')
                && !matches!(
                    at.checked_sub(1).and_then(|n| bytes.get(n)),
                    Some(b'=' | b'!' | b'<' | b'>')
                )))
    })
}

/// Whether `text` starts with `what`. A space in `what` matches any white space.
fn spaced(text: &[u8], what: &[u8]) -> bool {
    text.len() >= what.len()
        && what
            .iter()
            .zip(text)
            .all(|(w, t)| w == t || (*w == b' ' && t.is_ascii_whitespace()))
}

/// The text between the first parenthesis and its matching one.
fn parenthesized(text: &str) -> &str {
    let Some(open) = text.find('(') else {
        return "";
    };
    let inner = &text[open + 1..];
    let end = walk(inner, |_, byte, depth| depth == 0 && byte == b')').unwrap_or(inner.len());
    &inner[..end]
}

/// The names in `a, b=1, c`.
fn parameters(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut rest = text;
    loop {
        let end = top_level(rest, ",").unwrap_or(rest.len());
        let one = &rest[..end];
        names.extend(identifiers(&one[..top_level(one, "=").unwrap_or(one.len())]).first());
        match rest.get(end + 1..) {
            Some(more) => rest = more,
            None => return names,
        }
    }
}

fn identifiers(text: &str) -> Vec<&str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|name| name.starts_with(|c: char| c.is_alphabetic() || c == '_'))
        .collect()
}

/// Number of operators in a tag that can make values longer. A repetition counts as eight.
fn operators(tag: &str) -> usize {
    let (_, body, _) = split(tag);
    let mut count = 0;
    walk(body, |_, byte, _| {
        count += match byte {
            b'~' | b'+' => 1,
            b'*' => 8,
            _ => 0,
        };
        false
    });
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guarded(source: &str) -> String {
        guard(source, &TextLimits::default()).unwrap()
    }

    #[test]
    fn assignments_are_weighed() {
        assert_eq!(
            guarded("{% set a = b ~ '=%}' -%}\n"),
            "{% set a = ( b ~ '=%}' )|__bound -%}\n"
        );
        assert_eq!(
            guarded("{%- set ns.x = a == b %}"),
            "{%- set ns.x = ( a == b )|__bound_attribute %}"
        );
        assert_eq!(
            guarded("{% set x %}text{% endset %}"),
            "{% set x %}text{% endset %}"
        );
    }

    #[test]
    fn rounds_are_reported_with_names_and_text() {
        assert_eq!(
            guarded("{% for k, v in d.items() -%} ab{% if k %}c{% endif %}{% endfor %}tail"),
            "{% for k, v in d.items() -%}{% set __guard = __tick(4, k, v) -%} ab{% if k %}c{% endif %}{% endfor %}tail"
        );
        assert_eq!(
            guarded("{% macro f(a, b=g(1, 2), c='x,y') %}xy{% endmacro %}"),
            "{% macro f(a, b=g(1, 2), c='x,y') %}{% set __guard = __tick(2, a, b, c) %}xy{% endmacro %}"
        );
        assert_eq!(
            guarded("{% with a = [1, 2], b = 2 %}{% endwith %}"),
            "{% with a = [1, 2], b = 2 %}{% set __guard = __tick(0, a, b) %}{% endwith %}"
        );
        assert!(guarded("{%\n for x\nin y %}{% endfor %}").contains("__tick(0, x)"));
    }

    #[test]
    fn text_comments_and_raw_blocks_are_left_alone() {
        for same in [
            "plain { text } }}",
            "{# {% set a = 1 %} #}",
            "{% raw %}{% set a = 1 %}{{ {% endraw %}",
            "{{ {'a': {'b': '}}'}}['a'] }}",
            "{{ '{% set a = 1 %}' }}",
        ] {
            assert_eq!(guarded(same), same);
        }
    }

    #[test]
    fn what_leaves_the_template_is_refused_with_its_line() {
        let error = guard("a\nb{% include 'x' %}", &TextLimits::default()).unwrap_err();
        assert!(
            error.to_string().contains("line 2") && error.to_string().contains("include"),
            "{error}"
        );
        let many = format!("\n\n{{{{ a{} }}}}", " ~ a".repeat(60));
        let error = guard(&many, &TextLimits::default()).unwrap_err();
        assert!(
            error.to_string().contains("line 3: one tag has 60"),
            "{error}"
        );
        let error = guard("x\n{{ 'open", &TextLimits::default()).unwrap_err();
        assert!(error.to_string().contains("line 2"), "{error}");
    }
}
