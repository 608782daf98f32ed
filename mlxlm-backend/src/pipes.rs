//! The child's pipes: lines of limited length from standard output, and the tail of standard error.
//! Writing never blocks the caller. Each pipe has a thread that ends with the pipe. `protocol.rs`
//! parses the lines.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use parking_lot::Mutex;

/// Maximum number of unread lines. When it is reached, the child blocks.
const LINES_AHEAD: usize = 64;
/// Number of last bytes of standard error to keep.
const TAIL: usize = 8 << 10;

/// An item of the child's output.
#[derive(Debug)]
pub enum Line {
    /// A line without its line end.
    Whole(Vec<u8>),
    /// A line that exceeds the limit. Nothing after it is read.
    TooLong,
    /// The end of the output, with the text after the last line end.
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
        // The byte after the limit is the line end; otherwise the line is too long.
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
        // The receiver is dropped when the process is abandoned.
        if to.send(line).is_err() || last {
            return;
        }
    }
}

/// The last part of standard error.
#[derive(Debug, Clone, Default)]
pub struct Tail(Arc<Mutex<VecDeque<u8>>>);

impl Tail {
    /// The kept part as text.
    pub fn text(&self) -> String {
        let mut bytes = self.0.lock();
        String::from_utf8_lossy(bytes.make_contiguous()).into_owned()
    }

    fn add(&self, bytes: &[u8]) {
        let mut tail = self.0.lock();
        tail.extend(bytes);
        let over = tail.len().saturating_sub(TAIL);
        tail.drain(..over);
    }
}

/// Starts a thread that reads standard error and keeps its tail. The thread ends with the pipe.
pub fn keep_tail(mut from: impl Read + Send + 'static) -> io::Result<(Tail, JoinHandle<()>)> {
    let tail = Tail::default();
    let writer = tail.clone();
    let thread = Builder::new().name("mlxlm-err".into()).spawn(move || {
        let mut buffer = [0; 4096];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return,
                Ok(n) => writer.add(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    })?;
    Ok((tail, thread))
}

/// Starts a thread that writes messages one at a time. A child that does not read blocks only this
/// thread. After the child has ended, messages are dropped, and the other pipe reports the end.
/// Dropping the sender closes the pipe.
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
