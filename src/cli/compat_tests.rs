//! Tests the tables of docs/compat.md. The program must know each flag or command that a row marks
//! *same* or *alias*.

use clap::Command;

const TABLES: &str = include_str!("../../docs/compat.md");

/// A row: its heading, the names in its first column, its verdict, and its note.
struct Row {
    heading: String,
    names: Vec<String>,
    here: String,
    note: String,
}

/// The texts in backquotes.
fn quoted(text: &str) -> Vec<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

fn rows() -> Vec<Row> {
    let mut heading = String::new();
    let mut rows = Vec::new();
    for line in TABLES.lines() {
        if let Some(text) = line.strip_prefix("## ") {
            heading = text.to_owned();
        }
        let Some(line) = line.strip_prefix("| `") else {
            continue;
        };
        let cells: Vec<&str> = line.splitn(3, " | ").collect();
        let [names, here, note] = cells[..] else {
            panic!("{line:?} has not three columns");
        };
        rows.push(Row {
            heading: heading.clone(),
            names: quoted(&format!("`{names}")),
            here: here.to_owned(),
            note: note.trim_end_matches('|').trim().to_owned(),
        });
    }
    rows
}

/// Whether the command has this flag, either as a name or as an alias.
fn knows(command: &Command, flag: &str) -> bool {
    command.get_arguments().any(|arg| {
        if let Some(long) = flag.strip_prefix("--") {
            let aliases = arg.get_all_aliases().unwrap_or_default();
            return arg.get_long() == Some(long) || aliases.contains(&long);
        }
        let mut letters = flag.strip_prefix('-').unwrap_or_default().chars();
        let (Some(letter), None) = (letters.next(), letters.next()) else {
            return false;
        };
        let aliases = arg.get_all_short_aliases().unwrap_or_default();
        arg.get_short() == Some(letter) || aliases.contains(&letter)
    })
}

/// The program's command line, with the flags that clap adds when it builds the command.
fn program() -> Command {
    let mut program = super::command();
    program.build();
    program
}

/// The commands of this program that a heading names, such as `mlx generate`. A plain `mlx` means
/// the program itself.
fn commands<'a>(program: &'a Command, heading: &str) -> Vec<&'a Command> {
    let ours = quoted(heading);
    let ours = ours
        .iter()
        .filter_map(|name| match name.strip_prefix("mlx") {
            Some("") => Some(program),
            Some(name) => program.find_subcommand(name.strip_prefix(' ')?),
            None => None,
        });
    ours.collect()
}

#[test]
fn what_is_called_the_same_is_known() {
    let program = program();
    let mut checked = 0;
    for row in rows().into_iter().filter(|row| !is_absent(row)) {
        let there = matches!(row.here.as_str(), "same" | "alias");
        assert!(
            there || matches!(row.here.as_str(), "other name" | "not here"),
            "{}: {:?}",
            row.heading,
            row.here
        );
        assert!(
            there || !row.note.is_empty(),
            "{}: {:?} without a word why",
            row.heading,
            row.names
        );
        if !there {
            continue;
        }
        for name in &row.names {
            checked += 1;
            let known = if name.starts_with('/') {
                crate::cli::talk::chat_commands::words().iter().any(|word| {
                    let first = name.split(' ').next().unwrap_or(name);
                    word.trim() == name || name == "/?" || word.trim() == first
                })
            } else if let Some(theirs) = name.strip_prefix("mlx_lm.") {
                let line = ["mlx", &format!("mlx_lm.{theirs}")].map(std::ffi::OsString::from);
                let line = crate::cli::options::names::translate(line).unwrap();
                let ours = line[1].to_str().unwrap();
                assert_eq!(row.note, format!("`mlx {ours}`"));
                program.find_subcommand(ours).is_some()
            } else if name.starts_with('-') {
                let commands = commands(&program, &row.heading);
                assert!(!commands.is_empty(), "{:?} names no command", row.heading);
                commands.iter().any(|command| knows(command, name))
            } else {
                program.find_subcommand(name).is_some()
            };
            assert!(known, "{}: {name} is not known", row.heading);
        }
    }
    assert!(checked > 150, "{checked} names were found in the tables");
}

/// Whether the row is about the server and this build has no server.
fn is_absent(row: &Row) -> bool {
    let serves = |text: &str| text.contains("mlx serve") || text.contains("-- serve");
    cfg!(not(feature = "serve")) && (serves(&row.heading) || serves(&row.note))
}

/// The error of a command line in a note, such as `mlx launch --pipeline -- serve MODEL`; `None` if
/// it is valid.
fn fault(program: &Command, line: &str) -> Option<String> {
    let mut words = line.split_whitespace().skip(1);
    let name = words.next()?;
    let Some(command) = program.find_subcommand(name) else {
        return Some(format!("there is no command {name}"));
    };
    while let Some(word) = words.next() {
        if word == "--" {
            let inner = words.next().unwrap_or_default();
            let known = program.find_subcommand(inner).is_some();
            return (!known).then(|| format!("there is no command {inner}"));
        }
        let flag = word.split('=').next().unwrap_or(word);
        if flag.starts_with('-') && !knows(command, flag) {
            return Some(format!("{name} has no {flag}"));
        }
    }
    None
}

/// Each flag or command that a note recommends must exist.
#[test]
fn notes_name_flags_and_commands_that_exist() {
    let program = program();
    let (mut flags, mut lines) = (0, 0);
    for row in rows().iter().filter(|row| !is_absent(row)) {
        for name in quoted(&row.note) {
            let what = format!("{}: {:?}: {name}", row.heading, row.names);
            if name == "mlx" || name.starts_with("mlx ") {
                for line in name.split("; ") {
                    let wrong = fault(&program, line);
                    assert!(wrong.is_none(), "{what}: {wrong:?}");
                    lines += 1;
                }
                continue;
            }
            // These are flags of the other program.
            let theirs = ["--scan", "--delete", "--pattern"];
            if row.here == "same" || !name.starts_with("--") || theirs.contains(&&*name) {
                continue;
            }
            let flag = name.split([' ', '=']).next().unwrap_or(&name);
            let named = commands(&program, &row.heading);
            // The flags in a note may belong to any of our commands. A note about the server must
            // name flags of the server.
            let known = match named.iter().any(|c| c.get_name() == "serve") {
                true => named.iter().any(|c| knows(c, flag)),
                false => (program.get_subcommands().chain([&program])).any(|c| knows(c, flag)),
            };
            assert!(known, "{what}");
            flags += 1;
        }
    }
    assert!(flags > 60 && lines > 30, "{flags} flags, {lines} commands");
}

/// The check of notes must detect these wrong command lines.
#[test]
fn wrong_notes_are_found() {
    let program = program();
    for (line, wrong) in [
        ("mlx launch --pipeline -- bench", false),
        ("mlx push owner/name --path DIR", false),
        ("mlx absent", true),
        ("mlx bench --pipeline", true),
        ("mlx launch -- absent", true),
    ] {
        assert_eq!(fault(&program, line).is_some(), wrong, "{line}");
    }
}

/// The check must report a flag that no table contains.
#[test]
fn unknown_flags_are_not_known() {
    let program = program();
    let generate = program.find_subcommand("generate").unwrap();
    for (flag, known) in [
        ("--temp", true),
        ("--temperature", true),
        ("-n", true),
        ("--quiet", true),
        ("--help", true),
        ("--mirostat", false),
        ("-hf", false),
        ("-z", false),
    ] {
        assert_eq!(knows(generate, flag), known, "{flag}");
    }
}
