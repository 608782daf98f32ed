//! Flags of other programs that this program does not have. The error message contains the
//! replacement from docs/compat.md.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The tables of flags, which `compat_tests` compares with the program.
const TABLES: &str = include_str!("../../../docs/compat.md");

/// The replacement for the command line's unknown flag, if a table has the flag.
pub fn advice(error: &clap::Error, given: &[OsString]) -> Option<String> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(unknown)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let words = || given.iter().filter_map(|word| word.to_str());
    let command = words().nth(1).unwrap_or_default();
    // For `-dev`, clap reports only the first letter, so the whole word is searched.
    let flag = |word: &str| word.split('=').next().unwrap_or(word).to_owned();
    let long = words()
        .map(flag)
        .filter(|word| !unknown.starts_with("--") && word.starts_with(unknown.as_str()));
    let (name, (theirs, note)) = std::iter::once(flag(unknown))
        .chain(long)
        .find_map(|name| Some((name.clone(), row(&name, command)?)))?;
    Some(format!(
        "{name} of {theirs} is not here: {}\n\nFor more information, try '--help'.",
        note.replace('`', "'")
    ))
}

/// The program that has the flag, and the flag's replacement. A heading that names `command` is
/// preferred, otherwise the first heading with the flag.
fn row(flag: &str, command: &str) -> Option<(&'static str, &'static str)> {
    let ours = format!("`mlx {command}`");
    let mut heading = "";
    let mut best = None;
    for line in TABLES.lines() {
        if let Some(text) = line.strip_prefix("## ") {
            heading = text;
        }
        let Some(line) = line.strip_prefix("| `") else {
            continue;
        };
        let mut cells = line.splitn(3, " | ");
        let (names, here, note) = (cells.next()?, cells.next()?, cells.next()?);
        let mut names = names.split('`').step_by(2);
        let told = matches!(here, "not here" | "other name") && names.any(|name| name == flag);
        if told && (best.is_none() || heading.contains(&ours)) {
            let theirs = heading.split('`').nth(1).unwrap_or("another program");
            best = Some((theirs, note.trim_end_matches('|').trim()));
            if heading.contains(&ours) {
                break;
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &str) -> Option<String> {
        let given: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let error = crate::cli::command()
            .try_get_matches_from(&given)
            .unwrap_err();
        advice(&error, &given)
    }

    #[test]
    fn flags_of_other_programs_name_what_is_here() {
        for (line, says) in [
            (
                "mlx generate a --mirostat 2",
                "--mirostat of llama-cli is not here: no such sampler",
            ),
            ("mlx generate a --mirostat=2", "'--top-p'"),
            ("mlx chat --dry-multiplier 0.8", "'--repeat-penalty'"),
            (
                "mlx generate a -dev x",
                "-dev of llama-cli is not here: '--backend'",
            ),
            (
                "mlx run m --hidethinking",
                "--hidethinking of ollama run is not here",
            ),
        ] {
            let said = said(line).unwrap_or_default();
            assert!(said.contains(says), "{line}: {said}");
        }
        for line in ["mlx generate a --nonsense", "mlx generate a -n x"] {
            assert_eq!(said(line), None, "{line}");
        }
    }
}
