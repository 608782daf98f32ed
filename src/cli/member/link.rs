//! The connections of a member to its neighbors on the ring, beside MLX's own: MLX 0.30 waits for
//! ever for a peer that is gone. Each member tells its neighbors that it lives, and hears the same
//! of them. It tells the ring which one was lost.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// How often a member says that it lives.
const BEAT: Duration = Duration::from_secs(2);
/// Silence after which a neighbor is lost.
pub const SILENCE: Duration = Duration::from_secs(20);

/// What is said on a connection: a byte, and a number of four.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// I live.
    Alive,
    /// I have done my part.
    Bye,
    /// This rank is lost.
    Lost(u32),
    /// I, and all before me, have closed what the next connections go to.
    Ready,
    /// All have.
    Go,
}

impl Word {
    fn bytes(self) -> [u8; 5] {
        let (kind, number) = match self {
            Self::Alive => (b'a', 0),
            Self::Bye => (b'b', 0),
            Self::Lost(rank) => (b'l', rank),
            Self::Ready => (b'r', 0),
            Self::Go => (b'g', 0),
        };
        let [a, b, c, d] = number.to_le_bytes();
        [kind, a, b, c, d]
    }

    /// Says it.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn say(self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&self.bytes())
    }

    /// Hears the next one.
    ///
    /// # Errors
    /// Those of the connection, and for what is none of these.
    pub fn hear(from: &mut impl Read) -> io::Result<Self> {
        let mut bytes = [0; 5];
        from.read_exact(&mut bytes)?;
        let [kind, number @ ..] = bytes;
        match kind {
            b'a' => Ok(Self::Alive),
            b'b' => Ok(Self::Bye),
            b'l' => Ok(Self::Lost(u32::from_le_bytes(number))),
            b'r' => Ok(Self::Ready),
            b'g' => Ok(Self::Go),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a member")),
        }
    }
}

/// Connections to both neighbors, which are one and the same in a group of two.
pub struct Neighbors {
    /// To the rank before.
    pub left: TcpStream,
    /// To the rank after.
    pub right: TcpStream,
}

/// The connections while they are watched.
pub struct Links {
    leaving: Arc<AtomicBool>,
    writers: Arc<Mutex<Vec<TcpStream>>>,
}

impl Neighbors {
    /// Watches both from now on, and ends this process when a member is lost.
    pub fn watch(self, rank: usize, ring: &[String]) -> Links {
        let size = ring.len();
        let sides = [
            (self.left, (rank + size - 1) % size),
            (self.right, (rank + 1) % size),
        ];
        let writers = sides
            .iter()
            .filter_map(|(stream, _)| stream.try_clone().ok());
        let links = Links {
            leaving: Arc::default(),
            writers: Arc::new(Mutex::new(writers.collect())),
        };
        for (stream, neighbor) in sides {
            let (leaving, writers) = (Arc::clone(&links.leaving), Arc::clone(&links.writers));
            let address = ring.get(neighbor).cloned().unwrap_or_default();
            thread::spawn(move || {
                if let Some((lost, why)) = listen(stream, neighbor, &address)
                    && !leaving.load(Ordering::Acquire)
                {
                    say(&writers, Word::Lost(lost));
                    super::end(&format!("rank {rank}: {why}"));
                }
            });
        }
        let (leaving, writers) = (Arc::clone(&links.leaving), Arc::clone(&links.writers));
        thread::spawn(move || {
            while !leaving.load(Ordering::Acquire) {
                say(&writers, Word::Alive);
                thread::sleep(BEAT);
            }
        });
        links
    }
}

impl Links {
    /// Says good-bye, after which the neighbors do not miss this process.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
        say(&self.writers, Word::Bye);
    }
}

fn say(writers: &Mutex<Vec<TcpStream>>, word: Word) {
    for stream in &mut *writers.lock().unwrap_or_else(PoisonError::into_inner) {
        // The reader finds out what is wrong.
        let _ = word.say(stream);
    }
}

/// Hears a neighbor out: the rank that is lost, and why; `None` after a good-bye.
fn listen(mut stream: TcpStream, neighbor: usize, address: &str) -> Option<(u32, String)> {
    let rank = u32::try_from(neighbor).unwrap_or(u32::MAX);
    if stream.set_read_timeout(Some(SILENCE)).is_err() {
        return Some((
            rank,
            format!("rank {neighbor} ({address}) cannot be watched"),
        ));
    }
    loop {
        match Word::hear(&mut stream) {
            Ok(Word::Alive | Word::Ready | Word::Go) => {}
            Ok(Word::Bye) => return None,
            Ok(Word::Lost(lost)) => return Some((lost, format!("rank {lost} was lost"))),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) =>
            {
                let seconds = SILENCE.as_secs();
                let why = format!("rank {neighbor} ({address}) has been silent for {seconds} s");
                return Some((rank, why));
            }
            Err(_) => return Some((rank, format!("rank {neighbor} ({address}) was lost"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_heard_as_they_were_said() {
        let all = [Word::Alive, Word::Bye, Word::Lost(7), Word::Ready, Word::Go];
        let mut said = Vec::new();
        all.iter().for_each(|word| word.say(&mut said).unwrap());
        let mut heard = said.as_slice();
        for word in all {
            assert_eq!(Word::hear(&mut heard).unwrap(), word);
        }
        assert!(Word::hear(&mut heard).is_err());
        assert!(Word::hear(&mut &b"GET /"[..]).is_err());
    }
}
