//! The child's pipes: bounded lines from its standard output, and the tail of its standard error.
//! The writer never blocks the caller. One thread a pipe; each ends when its pipe does. What lines
//! mean is in `protocol.rs`.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// How many lines may wait to be taken; then the child waits.
const LINES_AHEAD: usize = 64;
/// How much of standard error is kept.
const TAIL: usize = 8 << 10;

/// The child's output.
#[derive(Debug)]
pub enum Line {
    /// A line without its end.
    Whole(Vec<u8>),
    /// A line longer than the limit; nothing after it is read.
    TooLong,
    /// The end, and what stood before it without a line end.
    End(Vec<u8>),
    /// Reading failed.
    Failed(io::Error),
}

/// Starts to read lines of at most `limit` bytes.
pub fn read_lines(from: impl Read + Send + 'static, limit: usize) -> io::Result<Receiver<Line>> {
    let (sender, receiver) = sync_channel(LINES_AHEAD);
    Builder::new()
        .name("mlxlm-out".into())
        .spawn(move || lines(BufReader::new(from), limit, &sender))?;
    Ok(receiver)
}

fn lines(mut from: impl BufRead, limit: usize, to: &SyncSender<Line>) {
    loop {
        let mut line = Vec::new();
        // One more than allowed, and one for the line end.
        let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
        let read = from.by_ref().take(most).read_until(b'\n', &mut line);
        let (line, last) = match read {
            Err(e) => (Line::Failed(e), true),
            Ok(_) if line.last() == Some(&b'\n') => {
                line.pop();
                (Line::Whole(line), false)
            }
            Ok(_) if line.len() > limit => (Line::TooLong, true),
            Ok(_) => (Line::End(line), true),
        };
        // Without a receiver the process was given up.
        if to.send(line).is_err() || last {
            return;
        }
    }
}

/// The last words on standard error.
#[derive(Debug, Clone, Default)]
pub struct Tail(Arc<Mutex<VecDeque<u8>>>);

impl Tail {
    /// The kept part, as text.
    pub fn text(&self) -> String {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(bytes.make_contiguous()).into_owned()
    }

    fn add(&self, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(bytes);
        let over = kept.len().saturating_sub(TAIL);
        kept.drain(..over);
    }
}

/// Starts to read standard error, keeping its tail; the thread ends with the pipe.
pub fn keep_tail(mut from: impl Read + Send + 'static) -> io::Result<(Tail, JoinHandle<()>)> {
    let tail = Tail::default();
    let kept = tail.clone();
    let thread = Builder::new().name("mlxlm-err".into()).spawn(move || {
        let mut buffer = [0; 4096];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => kept.add(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    })?;
    Ok((tail, thread))
}

/// Starts to write the messages, whole ones at a time. A child that does not read blocks only this
/// thread. When it is gone, messages are dropped, and its end shows on the other pipe. Dropping the
/// sender closes the pipe.
pub fn write_messages(mut to: impl Write + Send + 'static) -> io::Result<Sender<Vec<u8>>> {
    let (sender, receiver) = channel::<Vec<u8>>();
    Builder::new().name("mlxlm-in".into()).spawn(move || {
        for message in receiver {
            if to.write_all(&message).and_then(|()| to.flush()).is_err() {
                return;
            }
        }
    })?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &'static [u8], limit: usize) -> Vec<Line> {
        read_lines(bytes, limit).unwrap().into_iter().collect()
    }

    #[test]
    fn lines_are_whole_bounded_or_the_end() {
        let lines = read(b"a\n\nbcd\nef", 3);
        assert!(matches!(&lines[0], Line::Whole(l) if l == b"a"));
        assert!(matches!(&lines[1], Line::Whole(l) if l.is_empty()));
        assert!(matches!(&lines[2], Line::Whole(l) if l == b"bcd"));
        assert!(matches!(&lines[3], Line::End(l) if l == b"ef"));
        assert_eq!(lines.len(), 4);
        let lines = read(b"a\nbcde\nf\n", 3);
        assert!(matches!(lines[1], Line::TooLong));
        assert_eq!(lines.len(), 2);
        assert!(matches!(&read(b"", 3)[..], [Line::End(l)] if l.is_empty()));
    }

    #[test]
    fn only_the_tail_of_standard_error_is_kept() {
        let mut bytes = vec![b'x'; 1 << 20];
        bytes.extend_from_slice(b"the end \xff");
        let (tail, thread) = keep_tail(io::Cursor::new(bytes)).unwrap();
        thread.join().unwrap();
        let text = tail.text();
        assert!(text.ends_with("the end \u{fffd}"), "{text}");
        assert!(text.len() <= TAIL + 2);
    }
}
