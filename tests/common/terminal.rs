//! Runs the program on a pseudo terminal, for tests of its screen output and of typed keys.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

/// The longest wait before a test fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that runs on a separate pseudo terminal.
pub struct Terminal {
    keys: File,
    seen: Arc<Mutex<Vec<u8>>>,
    child: Child,
    /// Number of bytes of `seen` that earlier calls of [`Self::wait_for`] have consumed.
    past: usize,
}

impl Terminal {
    /// Starts `command` on a terminal of `columns` columns. The terminal is its input, output and
    /// error output.
    pub fn start(command: &mut Command, columns: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let size = Winsize {
            ws_row: 24,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&slave, size).unwrap();
        let end = |fd: &OwnedFd| fd.try_clone().unwrap();
        let child = command
            .stdin(end(&slave))
            .stdout(end(&slave))
            .stderr(slave)
            .spawn()
            .unwrap();
        // Otherwise `command` would keep its handles of the terminal open, and the reader would
        // never reach the end.
        command.stdin(std::process::Stdio::null());
        command.stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mut screen = File::from(master.try_clone().unwrap());
        let output = Arc::clone(&seen);
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            // Linux returns EIO after the last handle is closed.
            while let Ok(n) = screen.read(&mut part) {
                if n == 0 {
                    break;
                }
                output.lock().unwrap().extend_from_slice(&part[..n]);
            }
        });
        Self {
            keys: File::from(master),
            seen,
            child,
            past: 0,
        }
    }

    /// All output so far.
    pub fn screen(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    /// Types `text` on the terminal.
    pub fn keys(&mut self, text: &str) {
        self.keys.write_all(text.as_bytes()).unwrap();
    }

    /// Whether the terminal echoes typed keys.
    pub fn echoes(&self) -> bool {
        let modes = tcgetattr(&self.keys).unwrap().local_modes;
        modes.contains(LocalModes::ECHO)
    }

    /// Waits for `text` after the position where the last call ended. Returns the output up to
    /// `text`.
    pub fn wait_for(&mut self, text: &str) -> String {
        let begun = Instant::now();
        loop {
            // The process state is read before the output. So if the process has ended, the output
            // is complete.
            let ended = self.child.try_wait().unwrap().is_some();
            if ended {
                std::thread::sleep(Duration::from_millis(50));
            }
            {
                let seen = self.seen.lock().unwrap();
                let new = &seen[self.past..];
                let position = new.windows(text.len()).position(|w| w == text.as_bytes());
                if let Some(at) = position {
                    let shown = String::from_utf8_lossy(&new[..at]).into_owned();
                    self.past += at + text.len();
                    return shown;
                }
            }
            assert!(
                !ended && begun.elapsed() < PATIENCE,
                "{text:?} is not shown: {:?}",
                self.screen()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends the signal with this name, such as `INT`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args([&format!("-{name}"), &self.child.id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
    }

    /// Waits until the program ends.
    pub fn end(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                // The last output may not have arrived yet.
                std::thread::sleep(Duration::from_millis(50));
                return status;
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "it does not end: {:?}",
                self.screen()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A failed test must not leave a program running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
