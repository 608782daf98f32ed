//! Runs random programs over arrays in many layouts, types and sizes. Each step must have the same
//! result on views as on row-major copies, under `vmap` as on each example, and compiled. Gradients
//! must match finite differences. Programs run in separate processes, so that a crash is reported
//! like any other failure.
//!
//! `MLX_PROGRAMS_SECONDS=3600 MLX_PROGRAMS_SEED=1` runs other programs for an hour.
//! `MLX_PROGRAMS_JSON=file` writes each step for `tools/programs.py`, which computes it with NumPy.

mod apply;
mod judge;
mod make;
mod operations;
#[path = "../support/operations.rs"]
mod table;
mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use judge::{Judge, Report, needed};
use make::{Maker, Program};

/// A child process that writes nothing for this long hangs.
const SILENCE: Duration = Duration::from_secs(90);

/// The number of steps of a program.
const STEPS: usize = 24;

/// Reports to the parent process, a line per event.
struct Lines {
    seed: u64,
    refused: BTreeMap<String, usize>,
}

impl Report for Lines {
    fn at(&mut self, step: usize, phase: &str) {
        println!("@ {} {step} {phase}", self.seed);
    }

    fn found(&mut self, step: usize, phase: &str, text: &str) {
        let text = text.replace('\n', " ");
        println!("! {} {step} {phase} {text}", self.seed);
    }

    fn refused(&mut self, phase: &str, name: &str) {
        *self.refused.entry(format!("{phase} {name}")).or_default() += 1;
    }
}

/// Runs as the child process, with the arguments `seed count only cut,cut,..`, where `-` means
/// none.
fn child(what: &str) {
    let words: Vec<&str> = what.split(' ').collect();
    let number = |i: usize| words[i].parse::<u64>().expect("a number");
    let json = std::env::var("MLX_PROGRAMS_JSON").ok();
    mlx_rs_core::memory::set_budget(1 << 28);
    for seed in number(0)..number(0) + number(1) {
        let mut report = Lines {
            seed,
            refused: BTreeMap::new(),
        };
        report.at(0, "make");
        let program = Maker::program(seed, STEPS);
        let file = json.as_ref().map(|path| {
            let file = std::fs::OpenOptions::new()
                .append(true)
                .create(true)
                .open(path);
            Box::new(std::io::BufWriter::new(file.expect("a file"))) as Box<dyn Write>
        });
        Judge {
            program: &program,
            seed,
            only: words[2].parse().ok(),
            cuts: words[3].split(',').filter_map(|c| c.parse().ok()).collect(),
            json: file,
        }
        .run(&mut report);
        println!("= {seed} {}", program.steps.len());
        for (what, count) in report.refused {
            println!("- {count} {}", what.replace('\n', " "));
        }
    }
}

#[derive(Debug, Clone)]
struct Finding {
    seed: u64,
    step: usize,
    phase: String,
    text: String,
}

#[derive(Default)]
struct Totals {
    programs: usize,
    steps: usize,
    refused: BTreeMap<String, usize>,
}

/// Runs programs in a child process. If the child ends early, that is a finding at its current
/// step.
fn run(
    seed: u64,
    count: u64,
    only: Option<usize>,
    cuts: &BTreeSet<usize>,
    totals: &mut Totals,
) -> Vec<Finding> {
    let list: Vec<String> = cuts.iter().map(usize::to_string).collect();
    let only = only.map_or(String::from("-"), |k| k.to_string());
    let what = format!(
        "{seed} {count} {only} {}",
        if list.is_empty() {
            String::from("-")
        } else {
            list.join(",")
        }
    );
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args([
            "--exact",
            "programs_of_every_layout",
            "--nocapture",
            "--test-threads",
            "1",
        ])
        .env("MLX_PROGRAMS_CHILD", &what)
        // On Linux, the C library checks each heap block that is freed, if it has that feature.
        .env("LD_PRELOAD", "libc_malloc_debug.so.0")
        .env("MALLOC_CHECK_", "3")
        .env("MALLOC_PERTURB_", "165")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a child");
    let errors = child.stderr.take().expect("piped");
    let errors = std::thread::spawn(move || {
        let lines = BufReader::new(errors).lines().map_while(Result::ok);
        lines
            .filter(|l| !l.trim().is_empty())
            .take(40)
            .collect::<Vec<_>>()
            .join(" ")
    });
    let mut findings = Vec::new();
    let mut last = (seed, 0, String::new());
    let out = BufReader::new(child.stdout.take().expect("piped"));
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let lines = out.lines().map_while(Result::ok);
        lines.for_each(|line| drop(tell.send(line)));
    });
    loop {
        let line = match told.recv_timeout(SILENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                // A child that hangs is a finding, like one that crashes.
                child.kill().expect("the child can be ended");
                break;
            }
        };
        let Some((mark, rest)) = line.split_once(' ') else {
            continue;
        };
        let mut words = rest.splitn(4, ' ');
        let mut word = || words.next().unwrap_or_default();
        match mark {
            "@" => {
                last = (
                    word().parse().unwrap_or(0),
                    word().parse().unwrap_or(0),
                    word().to_owned(),
                );
            }
            "!" => findings.push(Finding {
                seed: word().parse().unwrap_or(0),
                step: word().parse().unwrap_or(0),
                phase: word().to_owned(),
                text: word().to_owned(),
            }),
            "=" => {
                totals.programs += 1;
                word();
                totals.steps += word().parse::<usize>().unwrap_or(0);
            }
            "-" => {
                let (count, what) = rest.split_once(' ').unwrap_or(("0", ""));
                let what: String = what.chars().take(160).collect();
                *totals.refused.entry(what).or_default() += count.parse::<usize>().unwrap_or(0);
            }
            _ => {}
        }
    }
    let status = child.wait().expect("the child ends");
    let errors = errors.join().unwrap_or_default();
    if !status.success() {
        let at = last.0;
        findings.push(Finding {
            seed: at,
            step: last.1,
            phase: last.2,
            text: format!(
                "ended with {status}: {}",
                errors.chars().take(300).collect::<String>()
            ),
        });
        if at + 1 < seed + count {
            findings.extend(run(at + 1, seed + count - at - 1, None, cuts, totals));
        }
    }
    findings
}

/// The smallest set of steps that still shows the finding.
fn smallest(finding: &Finding) -> String {
    let program = Maker::program(finding.seed, STEPS);
    let mut unused = Totals::default();
    let mut cuts = BTreeSet::new();
    let shows = |findings: Vec<Finding>| {
        findings
            .iter()
            .any(|f| f.step == finding.step && f.phase == finding.phase)
    };
    let alone = shows(run(finding.seed, 1, Some(finding.step), &cuts, &mut unused));
    let steps = needed(&program, finding.step);
    if alone {
        for &k in steps.iter().rev().skip(1) {
            if program.steps[k].name == "input"
                || !needed_only(&program, finding.step, &cuts).contains(&k)
            {
                continue;
            }
            cuts.insert(k);
            if !shows(run(finding.seed, 1, Some(finding.step), &cuts, &mut unused)) {
                cuts.remove(&k);
            }
        }
    }
    let mut text = format!(
        "seed {} step {} {}: {}\n",
        finding.seed, finding.step, finding.phase, finding.text
    );
    for k in needed_only(&program, finding.step, &cuts) {
        let step = &program.steps[k];
        let name = if cuts.contains(&k) { "copy of " } else { "" };
        text += &format!(
            "  v{} = {name}{}({:?}) {:?} {}\n",
            program.first[k], step.name, step.args, step.p, step.dtype
        );
    }
    text
}

/// Like [`needed`], but not beyond a cut.
fn needed_only(program: &Program, step: usize, cuts: &BTreeSet<usize>) -> BTreeSet<usize> {
    let mut cut = program.clone();
    for &k in cuts {
        cut.steps[k].args.clear();
    }
    needed(&cut, step)
}

#[test]
fn programs_of_every_layout() {
    if let Ok(what) = std::env::var("MLX_PROGRAMS_CHILD") {
        return child(&what);
    }
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let first = number("MLX_PROGRAMS_SEED").unwrap_or(1);
    let seconds = number("MLX_PROGRAMS_SECONDS");
    let end = seconds.map(|s| Instant::now() + Duration::from_secs(s));
    let mut totals = Totals::default();
    let mut findings: Vec<Finding> = Vec::new();
    let mut seed = first;
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    let more = |seed: u64| end.map_or(seed < first + 120, |end| Instant::now() < end);
    while more(seed) {
        for finding in run(seed, 60, None, &BTreeSet::new(), &mut totals) {
            // Findings of the same operation mostly have the same cause, so they are counted by
            // operation.
            let name = Maker::program(finding.seed, STEPS).steps[finding.step].name;
            let seen = kinds
                .entry(format!("{} {name}", finding.phase))
                .or_insert(0);
            *seen += 1;
            if end.is_some() && *seen <= 3 {
                eprintln!("{}", smallest(&finding));
            }
            findings.push(finding);
        }
        seed += 60;
        if end.is_some() && (seed - first) % 1200 == 0 {
            eprintln!(
                "{} programs, {} steps, {} findings",
                totals.programs,
                totals.steps,
                findings.len()
            );
        }
    }
    if end.is_some() {
        eprintln!(
            "{} programs, {} steps, {} findings",
            totals.programs,
            totals.steps,
            findings.len()
        );
        for (what, count) in &kinds {
            eprintln!("found {count} times: {what}");
        }
        for (what, count) in &totals.refused {
            eprintln!("refused {count} times: {what}");
        }
    }
    assert!(
        totals.steps > 0 && totals.programs as u64 >= 100,
        "{} programs",
        totals.programs
    );
    let texts: Vec<String> = findings.iter().take(10).map(smallest).collect();
    assert!(
        findings.is_empty(),
        "{} findings\n{}",
        findings.len(),
        texts.join("\n")
    );
}
