//! Members of a group that are started without the launcher, and members that are lost.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::model;
use crate::program::{mlx, refused, text};

/// A command that generates until a signal stops it.
fn endless(path: &str) -> [&str; 8] {
    [
        "generate",
        "--model",
        path,
        "--tokens",
        "5,17,42",
        "--max-tokens",
        "1000000",
        "--ignore-eos",
    ]
}

/// A group member started directly, without the launcher. `file` lists the addresses.
pub(super) fn member(rank: usize, file: &Path, args: &[&str]) -> Command {
    let mut command = mlx(file.parent().unwrap(), args);
    command
        .env("MLX_RANK", rank.to_string())
        .env("MLX_HOSTFILE", file)
        .env("MLX_JOIN_TIMEOUT", "20")
        .env("MLX_NUM_THREADS", "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub(super) fn ring(dir: &Path, n: usize) -> PathBuf {
    let ports = inference_group::free_ports(n).unwrap();
    let hosts: Vec<_> = ports.iter().map(|p| [format!("127.0.0.1:{p}")]).collect();
    let file = dir.join("ring.json");
    std::fs::write(&file, serde_json::to_string(&hosts).unwrap()).unwrap();
    file
}

#[test]
fn a_member_that_never_comes_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = ring(dir.path(), 2);
    let started = Instant::now();
    let mut alone = member(
        0,
        &file,
        &["logits", "--model", &model("llama"), "--tokens", "1"],
    );
    let output = alone.env("MLX_JOIN_TIMEOUT", "2").output().unwrap();
    let err = refused(&output, 1);
    assert!(
        err.contains("rank 1") && err.contains("did not come"),
        "{err}"
    );
    assert!(started.elapsed() < Duration::from_secs(60));
}

/// A member with invalid flags must exit before it joins. So no other member reports it as lost.
#[test]
fn a_member_refuses_its_flags_before_it_joins() {
    let dir = tempfile::tempdir().unwrap();
    let file = ring(dir.path(), 2);
    let path = model("llama");
    let model = ["--model", &path, "--ffn", "sparse:8"];
    for command in [&["logits", "--tokens", "1"][..], &["generate", "hi"]] {
        // Rank 1 never starts. If rank 0 joined before it checked its flags, it would wait.
        let output = member(0, &file, &[command, &model].concat()).output();
        let err = refused(&output.unwrap(), 2);
        assert!(err.contains("split and feed_forward"), "{err}");
    }
}

#[test]
fn a_member_that_dies_is_named_by_the_others_without_a_launcher() {
    let dir = tempfile::tempdir().unwrap();
    let file = ring(dir.path(), 2);
    let path = model("llama");
    let args = endless(&path);
    let mut first = member(0, &file, &args).spawn().unwrap();
    let mut second = member(1, &file, &args).spawn().unwrap();
    // The first output proves that both processes compute.
    let mut out = first.stdout.take().unwrap();
    out.read_exact(&mut [0; 16]).unwrap();
    second.kill().unwrap();
    second.wait().unwrap();
    let killed = Instant::now();
    std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
    let output = first.wait_with_output().unwrap();
    assert!(
        killed.elapsed() < Duration::from_secs(60),
        "{:?}",
        killed.elapsed()
    );
    assert_eq!(output.status.code(), Some(1));
    let err = text(&output.stderr);
    assert!(err.contains("rank 1") && err.contains("lost"), "{err}");
}

#[test]
fn a_member_that_ends_early_is_named_by_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = model("llama");
    let args = endless(&path);
    let mut short = args;
    short[6] = "3";
    let mut attempts = 0;
    let first = loop {
        let file = ring(dir.path(), 2);
        let mut first = member(0, &file, &args).spawn().unwrap();
        let second = member(1, &file, &short).output().unwrap();
        if second.status.success() {
            break first;
        }
        // Another test may have bound the port in the meantime.
        attempts += 1;
        let _ = first.kill();
        let first = text(&first.wait_with_output().unwrap().stderr);
        let second = text(&second.stderr);
        assert!(attempts < 3, "{first}\n{second}");
    };
    let ended = Instant::now();
    let output = first.wait_with_output().unwrap();
    assert!(ended.elapsed() < Duration::from_secs(60));
    assert_eq!(output.status.code(), Some(1));
    let err = text(&output.stderr);
    assert!(err.contains("rank 1") && err.contains("has ended"), "{err}");
}

#[cfg(target_os = "linux")]
mod processes {
    use super::*;

    /// The child processes of `parent`, with their ranks.
    fn children(parent: u32) -> Vec<(u32, Option<usize>)> {
        let mut children = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|n| n.parse::<u32>().ok())
            else {
                continue;
            };
            let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
            let stat = String::from_utf8_lossy(&read("stat")).into_owned();
            let Some((_, rest)) = stat.rsplit_once(") ") else {
                continue;
            };
            let mut fields = rest.split(' ');
            let alive = fields.next() != Some("Z");
            if alive && fields.next() == Some(&parent.to_string()) {
                let environment = read("environ");
                let rank = environment.split(|b| *b == 0).find_map(|one| {
                    let text = std::str::from_utf8(one).ok()?;
                    text.strip_prefix("MLX_RANK=")?.parse().ok()
                });
                children.push((pid, rank));
            }
        }
        children
    }

    fn is_alive(pid: u32) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| !rest.starts_with('Z'))
    }

    fn all_gone(pids: &[(u32, Option<usize>)], within: Duration) -> bool {
        let until = Instant::now() + within;
        while Instant::now() < until {
            if !pids.iter().any(|(pid, _)| is_alive(*pid)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        false
    }

    /// A launcher of two processes that are generating a reply.
    fn talking() -> (Child, std::process::ChildStdout, Vec<(u32, Option<usize>)>) {
        let home = tempfile::tempdir().unwrap();
        let path = model("llama");
        let args = [&["launch", "-n", "2", "--"][..], &endless(&path)].concat();
        let mut launcher = mlx(home.path(), &args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = launcher.stdout.take().unwrap();
        out.read_exact(&mut [0; 16]).unwrap();
        let pids = children(launcher.id());
        assert_eq!(pids.len(), 2, "{pids:?}");
        (launcher, out, pids)
    }

    fn signal(pid: u32, name: &str) {
        let done = Command::new("kill")
            .args([name, &pid.to_string()])
            .status()
            .unwrap();
        assert!(done.success());
    }

    fn drained(mut out: std::process::ChildStdout) {
        std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
    }

    /// Kills one rank. The launcher must exit with that rank's code and name the rank, and all
    /// processes must end.
    fn ends_of_a_kill(launcher: Child, pid: u32, victim: usize, all: &[(u32, Option<usize>)]) {
        signal(pid, "-KILL");
        let killed = Instant::now();
        let output = launcher.wait_with_output().unwrap();
        assert!(killed.elapsed() < Duration::from_secs(60));
        assert_eq!(output.status.code(), Some(137));
        let err = text(&output.stderr);
        assert!(err.contains(&format!("rank {victim}")), "{err}");
        assert!(all_gone(all, Duration::from_secs(60)));
    }

    #[test]
    fn a_rank_that_is_killed_ends_all_and_gives_the_exit_code() {
        for victim in [0, 1] {
            let (launcher, out, pids) = talking();
            drained(out);
            let (pid, _) = pids.iter().find(|(_, rank)| *rank == Some(victim)).unwrap();
            ends_of_a_kill(launcher, *pid, victim, &pids);
        }
    }

    /// A short form of `tools/group_faults.py`. It kills processes while they start, join, load or
    /// compute.
    #[test]
    fn ranks_that_are_killed_at_any_moment_end_all() {
        let path = model("llama");
        for (n, victim, pause) in [
            ("2", 0, 0),
            ("4", 3, 30),
            ("2", 1, 60),
            ("3", 1, 120),
            ("4", 0, 250),
            ("3", 2, 600),
        ] {
            let home = tempfile::tempdir().unwrap();
            let flags = ["launch", "-n", n, "--join-timeout", "5", "--pipeline", "--"];
            let flags = if n == "3" {
                &flags[..]
            } else {
                &[&flags[..5], &flags[6..]].concat()[..]
            };
            let launcher = mlx(home.path(), &[flags, &endless(&path)].concat())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let until = Instant::now() + Duration::from_secs(30);
            let pid = loop {
                let all = children(launcher.id());
                if let Some((pid, _)) = all.iter().find(|(_, rank)| *rank == Some(victim)) {
                    break *pid;
                }
                assert!(Instant::now() < until, "{all:?}");
                std::thread::sleep(Duration::from_millis(5));
            };
            std::thread::sleep(Duration::from_millis(pause));
            let pids = children(launcher.id());
            ends_of_a_kill(launcher, pid, victim, &pids);
        }
    }

    #[test]
    fn nothing_is_left_of_a_launcher_that_is_killed() {
        let (mut launcher, out, pids) = talking();
        drained(out);
        signal(launcher.id(), "-KILL");
        launcher.wait().unwrap();
        assert!(all_gone(&pids, Duration::from_secs(60)), "{pids:?}");
    }

    #[test]
    fn signals_end_all_with_the_codes_of_a_shell() {
        for (name, code) in [("-INT", 130), ("-TERM", 143)] {
            let (launcher, out, pids) = talking();
            drained(out);
            signal(launcher.id(), name);
            let output = launcher.wait_with_output().unwrap();
            assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
            assert!(all_gone(&pids, Duration::from_secs(60)));
        }
    }
}
