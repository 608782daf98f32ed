//! Converts between ollama's Modelfiles and presets. It parses the syntax only; `create` checks the
//! values.

use inference::Message;

use crate::cli::options::preset::Preset;

/// Maximum size of a Modelfile in bytes.
pub const MAX_BYTES: u64 = 4 << 20;

const QUOTES: &str = "\"\"\"";
const KNOWN: &str = "FROM, SYSTEM, PARAMETER, TEMPLATE, ADAPTER, LICENSE and MESSAGE";

/// A preset with the line numbers of its parameters.
#[derive(Debug, PartialEq)]
pub struct Modelfile {
    /// The preset. Paths are as written in the file.
    pub preset: Preset,
    /// The line number of each parameter, from 1.
    pub lines: Vec<usize>,
}

/// Reads a Modelfile.
///
/// # Errors
/// The fault, with its line number.
pub fn parse(text: &str) -> Result<Modelfile, String> {
    let mut modelfile = Modelfile {
        preset: Preset::default(),
        lines: Vec::new(),
    };
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let at = at + 1;
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let mut rest = rest.trim().to_owned();
        // In a MESSAGE line, the role precedes the text.
        let start = rest
            .find(QUOTES)
            .filter(|&n| n == 0 || word.eq_ignore_ascii_case("MESSAGE"));
        if let Some(start) = start {
            let (before, open) = (
                rest[..start].to_owned(),
                rest[start + QUOTES.len()..].to_owned(),
            );
            let body = quoted(open, &mut lines)
                .ok_or_else(|| format!("line {at}: the {QUOTES} are not closed"))?;
            rest = before + &body;
        } else if let Some(inner) = rest.strip_prefix('"').and_then(|r| r.strip_suffix('"')) {
            rest = inner.to_owned();
        }
        modelfile.put(word, rest, at)?;
    }
    if modelfile.preset.from.is_empty() {
        return Err(String::from("FROM is missing: the model to begin with"));
    }
    Ok(modelfile)
}

/// The text up to the closing quotes, which may be on a later line.
fn quoted<'a>(
    mut text: String,
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
) -> Option<String> {
    loop {
        if let Some(end) = text.find(QUOTES) {
            text.truncate(end);
            return Some(text.strip_prefix('\n').map(str::to_owned).unwrap_or(text));
        }
        text.push('\n');
        text.push_str(lines.next()?.1);
    }
}

impl Modelfile {
    fn put(&mut self, word: &str, value: String, at: usize) -> Result<(), String> {
        let word = word.to_ascii_uppercase();
        let preset = &mut self.preset;
        if value.trim().is_empty() {
            return Err(format!("line {at}: {word} has no value"));
        }
        let once = |place: &mut Option<String>, value: String| match place.replace(value) {
            None => Ok(()),
            Some(_) => Err(format!("line {at}: {word} is given twice")),
        };
        match word.as_str() {
            "FROM" if preset.from.is_empty() => preset.from = value,
            "FROM" => return Err(format!("line {at}: FROM is given twice")),
            "SYSTEM" => once(&mut preset.system, value)?,
            "TEMPLATE" => once(&mut preset.template, value)?,
            "ADAPTER" => once(&mut preset.adapter, value)?,
            "LICENSE" => preset.license.push(value),
            "PARAMETER" => {
                let (name, value) = value
                    .split_once(char::is_whitespace)
                    .ok_or_else(|| format!("line {at}: PARAMETER needs a name and a value"))?;
                let value = value.trim();
                let inner = value.strip_prefix('"').and_then(|v| v.strip_suffix('"'));
                let value = inner.unwrap_or(value);
                preset
                    .parameters
                    .push((name.to_ascii_lowercase(), value.to_owned()));
                self.lines.push(at);
            }
            "MESSAGE" => {
                let (role, text) = value
                    .split_once(char::is_whitespace)
                    .filter(|(role, _)| matches!(*role, "system" | "user" | "assistant"))
                    .ok_or_else(|| {
                        format!("line {at}: MESSAGE needs system, user or assistant, and a text")
                    })?;
                preset.messages.push(Message::new(role, text));
            }
            _ => {
                return Err(format!(
                    "line {at}: unknown instruction {word}; there are {KNOWN}"
                ));
            }
        }
        Ok(())
    }
}

/// A preset in the form of a Modelfile.
pub fn write(preset: &Preset) -> String {
    let mut text = format!("FROM {}\n", preset.from);
    let mut put = |word: &str, value: &str| {
        let quoted = value.contains('\n') || value.starts_with('"') || value.trim() != value;
        text.push_str(word);
        text.push(' ');
        if quoted {
            text.push_str(&format!("{QUOTES}{value}{QUOTES}\n"));
        } else {
            text.push_str(&format!("{value}\n"));
        }
    };
    if let Some(adapter) = &preset.adapter {
        put("ADAPTER", adapter);
    }
    if let Some(template) = &preset.template {
        put("TEMPLATE", template);
    }
    if let Some(system) = &preset.system {
        put("SYSTEM", system);
    }
    for (name, value) in &preset.parameters {
        let quote = if value.trim() == value { "" } else { "\"" };
        put("PARAMETER", &format!("{name} {quote}{value}{quote}"));
    }
    for license in &preset.license {
        put("LICENSE", license);
    }
    for message in &preset.messages {
        // The role precedes the quotes.
        let (role, said) = (&message.role, &message.content);
        text.push_str(&format!("MESSAGE {role} {QUOTES}{said}{QUOTES}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"# A comment
from ./model

SYSTEM """
You are a pirate.
Say "Ahoy".
"""
parameter temperature 0.7
PARAMETER stop "<|im_end|>"
PARAMETER stop END
TEMPLATE """{{ messages }}"""
ADAPTER "./adapters"
MESSAGE user Hello there
MESSAGE assistant """Ahoy,
you"""
LICENSE MIT
"#;

    #[test]
    fn every_instruction_is_read() {
        let Modelfile { preset, lines } = parse(FILE).unwrap();
        assert_eq!(preset.from, "./model");
        assert_eq!(
            preset.system.as_deref(),
            Some("You are a pirate.\nSay \"Ahoy\".\n")
        );
        let parameters: Vec<_> = preset
            .parameters
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(
            parameters,
            [
                ("temperature", "0.7"),
                ("stop", "<|im_end|>"),
                ("stop", "END")
            ]
        );
        assert_eq!(lines, [8, 9, 10]);
        assert_eq!(preset.template.as_deref(), Some("{{ messages }}"));
        assert_eq!(preset.adapter.as_deref(), Some("./adapters"));
        assert_eq!(preset.license, ["MIT"]);
        let said: Vec<_> = preset.messages.iter().map(|m| m.content.as_str()).collect();
        assert_eq!(said, ["Hello there", "Ahoy,\nyou"]);
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let preset = parse(FILE).unwrap().preset;
        let again = write(&preset);
        assert_eq!(parse(&again).unwrap().preset, preset, "{again}");
    }

    #[test]
    fn mistakes_name_the_line() {
        for (text, says) in [
            ("", "FROM is missing"),
            ("SYSTEM x", "FROM is missing"),
            ("FROM a\n\nRUN x", "line 3: unknown instruction RUN"),
            (
                "FROM a\nREQUIRES 0.5",
                "line 2: unknown instruction REQUIRES",
            ),
            ("FROM a\nFROM b", "line 2: FROM is given twice"),
            ("FROM a\nSYSTEM", "line 2: SYSTEM has no value"),
            (
                "FROM a\nSYSTEM b\nSYSTEM c",
                "line 3: SYSTEM is given twice",
            ),
            ("FROM a\nPARAMETER temperature", "line 2: PARAMETER needs"),
            ("FROM a\nMESSAGE cat meow", "line 2: MESSAGE needs"),
            (
                "FROM a\nSYSTEM \"\"\"b\nc",
                "line 2: the \"\"\" are not closed",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }
}
