//! Translates command lines of Python's mlx-lm, such as `mlx_lm.generate`, which can be a link to
//! this program or a subcommand. Translated lines keep mlx-lm's short flags and defaults. For long
//! flags with equal meaning, the definitions of our flags have aliases.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::cli::terminal::failure::Failure;

/// A program of mlx-lm and its counterpart here.
struct Program {
    theirs: &'static str,
    ours: &'static str,
    /// Short flags that have another meaning in this program, with their replacement.
    short: &'static [(&'static str, &'static str)],
    /// mlx-lm's defaults. Each applies if none of the listed flags is given.
    defaults: &'static [(&'static [&'static str], &'static str)],
}

const PROGRAMS: [Program; 15] = [
    Program {
        theirs: "awq",
        ours: "convert",
        short: &[],
        defaults: &[
            (&["--method"], "awq"),
            (&["--embed-bits", "--fallback-bits"], "4"),
            (&["--embed-group-size", "--fallback-group-size"], "32"),
        ],
    },
    Program {
        theirs: "benchmark",
        ours: "bench",
        short: &[
            ("-p", "--prompt-tokens"),
            ("-g", "--generate-tokens"),
            ("-b", "--batch"),
            ("-n", "--repeat"),
        ],
        defaults: &[
            (&["--generate-tokens", "--generation-tokens"], "1024"),
            (&["--repeat", "--num-trials"], "5"),
        ],
    },
    Program {
        theirs: "cache_prompt",
        ours: "cache-prompt",
        short: &[],
        defaults: &[],
    },
    Program {
        theirs: "chat",
        ours: "chat",
        short: &[("-m", "--max-tokens")],
        defaults: &[(&["--max-tokens"], "256")],
    },
    Program {
        theirs: "convert",
        ours: "convert",
        short: &[],
        defaults: &[],
    },
    Program {
        theirs: "dwq",
        ours: "convert",
        short: &[],
        defaults: &[
            (&["--method"], "dwq"),
            (&["--num-samples"], "2048"),
            (&["--max-seq-length", "--sequence-length"], "1025"),
            (&["--batch-size"], "4"),
        ],
    },
    Program {
        theirs: "dynamic_quant",
        ours: "convert",
        short: &[],
        defaults: &[
            (&["--method"], "dynamic"),
            (&["--num-samples"], "-1"),
            (&["--batch-size"], "4"),
            (&["--target-bpw"], "5"),
        ],
    },
    Program {
        theirs: "evaluate",
        ours: "evaluate",
        short: &[],
        defaults: &[(&["--output-dir"], ".")],
    },
    Program {
        theirs: "fuse",
        ours: "fuse",
        short: &[],
        defaults: &[],
    },
    Program {
        theirs: "generate",
        ours: "generate",
        short: &[("-m", "--max-tokens")],
        defaults: &[(&["--max-tokens"], "100")],
    },
    Program {
        theirs: "gptq",
        ours: "convert",
        short: &[],
        defaults: &[
            (&["--method"], "gptq"),
            (&["--fallback-bits"], "6"),
            (&["--fallback-group-size"], "64"),
            (&["--num-samples"], "-1"),
        ],
    },
    Program {
        theirs: "lora",
        ours: "train",
        short: &[],
        defaults: &[],
    },
    Program {
        theirs: "perplexity",
        ours: "perplexity",
        short: &[],
        defaults: &[],
    },
    Program {
        theirs: "server",
        ours: "serve",
        short: &[],
        defaults: &[],
    },
    Program {
        theirs: "upload",
        ours: "push",
        short: &[],
        defaults: &[],
    },
];

/// Programs of mlx-lm without a counterpart that has equal flags.
const OTHERS: [(&str, &str); 1] = [(
    "manage",
    "`mlx ls` lists the cached models and `mlx rm` removes them",
)];

/// The equivalent command line of this program.
///
/// # Errors
/// [`Failure::Usage`] for a program of mlx-lm without a counterpart.
pub fn translate(args: impl IntoIterator<Item = OsString>) -> Result<Vec<OsString>, Failure> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let called = args
        .first()
        .map(|name| program_name(name))
        .unwrap_or_default();
    let first = args.get(1).and_then(|arg| arg.to_str()).unwrap_or_default();
    let theirs = if let Some(name) = called.strip_prefix("mlx_lm.") {
        let name = name.to_owned();
        args.insert(1, OsString::new());
        Some(name)
    } else if called == "mlx_lm" && !first.starts_with('-') && !first.is_empty() {
        Some(first.to_owned())
    } else {
        first.strip_prefix("mlx_lm.").map(str::to_owned)
    };
    if let Some(theirs) = theirs {
        let program = find(&theirs)?;
        args[1] = program.ours.into();
        program.translate(&mut args);
    }
    if args.get(1).is_some_and(|name| name == "generate") {
        verbose(&mut args);
    }
    gpu_layers(&mut args);
    Ok(args)
}

/// The name under which the program was started, without directory and `.exe`.
fn program_name(path: &OsStr) -> String {
    let name = Path::new(path)
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    name.strip_suffix(".exe").unwrap_or(&name).to_owned()
}

fn find(theirs: &str) -> Result<&'static Program, Failure> {
    if let Some(program) = PROGRAMS.iter().find(|program| program.theirs == theirs) {
        return Ok(program);
    }
    if let Some((name, why)) = OTHERS.iter().find(|(name, _)| *name == theirs) {
        return Err(Failure::usage(format!("mlx_lm.{name} is not here: {why}")));
    }
    let names: Vec<&str> = PROGRAMS.iter().map(|program| program.theirs).collect();
    Err(Failure::usage(format!(
        "mlx-lm has no program {theirs:?}; here are mlx_lm.{}",
        names.join(", mlx_lm.")
    )))
}

impl Program {
    fn translate(&self, args: &mut Vec<OsString>) {
        for arg in args.iter_mut().skip(2) {
            let Some(text) = arg.to_str() else { continue };
            let Some((short, long)) = self.short.iter().find(|(short, _)| text.starts_with(short))
            else {
                continue;
            };
            // `-m100` is short for `-m 100`.
            match &text[short.len()..] {
                "" => *arg = (*long).into(),
                value if value.starts_with(|c: char| c.is_ascii_digit()) => {
                    *arg = format!("{long}={value}").into();
                }
                _ => {}
            }
        }
        for (flags, value) in self.defaults {
            let given = |arg: &OsString| {
                let text = arg.to_string_lossy();
                let name = text.split('=').next().unwrap_or_default();
                flags.contains(&name)
            };
            if !args.iter().any(given) {
                args.insert(2, format!("{}={value}", flags[0]).into());
            }
        }
    }
}

/// Translates `--verbose True`, and `--verbose False` to `--quiet`, because our flag `--verbose`
/// has no value.
fn verbose(args: &mut Vec<OsString>) {
    let truth = |text: &str| match text.to_ascii_lowercase().as_str() {
        "true" | "t" => Some(true),
        "false" | "f" => Some(false),
        _ => None,
    };
    for at in 2..args.len() {
        let Some(text) = args[at].to_str() else {
            continue;
        };
        let value = match text.strip_prefix("--verbose") {
            Some("") => args.get(at + 1).and_then(|next| truth(next.to_str()?)),
            Some(value) => value.strip_prefix('=').and_then(truth),
            None => None,
        };
        let Some(value) = value else { continue };
        if text == "--verbose" {
            args.remove(at + 1);
        }
        if value {
            args.remove(at);
        } else {
            args[at] = "--quiet".into();
        }
        return;
    }
}

/// Translates llama.cpp's `-ngl N`. Without the translation, clap would read `-n gl`.
fn gpu_layers(args: &mut [OsString]) {
    for arg in args.iter_mut().skip(2) {
        match arg.to_str().and_then(|text| text.strip_prefix("-ngl")) {
            Some("") => *arg = "--gpu-layers".into(),
            Some(value) if value.starts_with('=') => *arg = format!("--gpu-layers{value}").into(),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(line: &str) -> Result<String, Failure> {
        let args = translate(line.split(' ').map(OsString::from))?;
        let args: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
        Ok(args.join(" "))
    }

    #[test]
    fn every_way_to_call_a_program_of_mlx_lm() {
        for line in [
            "/bin/mlx_lm.generate -m 5 -p hi",
            "mlx_lm.generate.exe -m 5 -p hi",
            "/bin/mlx_lm generate -m 5 -p hi",
            "mlx mlx_lm.generate -m 5 -p hi",
        ] {
            let got = translated(line).unwrap();
            assert!(got.ends_with(" generate --max-tokens 5 -p hi"), "{got}");
        }
        for (line, want) in [
            (
                "mlx mlx_lm.generate -p hi",
                "mlx generate --max-tokens=100 -p hi",
            ),
            ("mlx mlx_lm.chat -m7", "mlx chat --max-tokens=7"),
            (
                "mlx mlx_lm.benchmark -p 9 -n 2 -g 4",
                "mlx bench --prompt-tokens 9 --repeat 2 --generate-tokens 4",
            ),
            ("mlx mlx_lm.lora --train", "mlx train --train"),
            ("mlx generate -ngl 99 a", "mlx generate --gpu-layers 99 a"),
            ("mlx serve m -ngl=0", "mlx serve m --gpu-layers=0"),
            // If the program has its own name, its own flags apply.
            ("mlx generate -m 5", "mlx generate -m 5"),
            ("mlx_lm --version", "mlx_lm --version"),
            ("mlx", "mlx"),
        ] {
            assert_eq!(translated(line).unwrap(), want);
        }
    }

    #[test]
    fn what_is_not_here_says_what_is() {
        for (name, says) in [("manage", "mlx ls"), ("nonsense", "mlx_lm.generate")] {
            let failure = translated(&format!("mlx mlx_lm.{name}")).unwrap_err();
            assert_eq!(failure.exit_code(), 2);
            let said = failure.report().unwrap();
            assert!(said.contains(says) && said.contains(name), "{said}");
        }
    }

    #[test]
    fn verbose_may_have_a_value_in_generate() {
        for (line, want) in [
            (
                "mlx generate --verbose False -p x",
                "mlx generate --quiet -p x",
            ),
            ("mlx generate -p x --verbose f", "mlx generate -p x --quiet"),
            (
                "mlx generate --verbose=False -p x",
                "mlx generate --quiet -p x",
            ),
            ("mlx generate --verbose True -p x", "mlx generate -p x"),
            ("mlx generate --verbose -p x", "mlx generate --verbose -p x"),
            ("mlx generate -p x --verbose", "mlx generate -p x --verbose"),
            ("mlx run m --verbose False", "mlx run m --verbose False"),
        ] {
            assert_eq!(translated(line).unwrap(), want);
        }
    }
}
