//! Connects the members of a ring before MLX connects them. Each member listens at its first
//! address, and connects to the next member. Both sides exchange rank and version, and all wait
//! until all have joined. So the wait is limited, and an error names the member that is missing or
//! runs another program.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::link::{Neighbors, Word};

/// The first bytes that members send. The version of the program follows, because only equal
/// programs make equal calls in the same order.
const MAGIC: &[u8; 8] = b"rustmlx1";
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Extra time after the time limit, in which a message about the missing member may still arrive.
const SLACK: Duration = Duration::from_secs(2);
/// Delay between attempts to connect.
const PAUSE: Duration = Duration::from_millis(50);
/// The time limit of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(2);

/// What a member sends to identify itself.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hello {
    rank: u32,
    size: u32,
    version: String,
}

impl Hello {
    fn say(&self, to: &mut impl Write) -> io::Result<()> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.rank.to_le_bytes());
        bytes.extend(self.size.to_le_bytes());
        let version = self.version.as_bytes();
        bytes.push(u8::try_from(version.len()).unwrap_or(0));
        bytes.extend(version);
        to.write_all(&bytes)
    }

    fn hear(from: &mut impl Read) -> io::Result<Self> {
        let mut head = [0; 17];
        from.read_exact(&mut head)?;
        let (magic, rest) = head.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a member"));
        }
        let number = |at: usize| {
            let bytes = rest
                .get(at..at + 4)
                .and_then(|b| <[u8; 4]>::try_from(b).ok());
            u32::from_le_bytes(bytes.unwrap_or_default())
        };
        let mut version = vec![0; usize::from(rest[8])];
        from.read_exact(&mut version)?;
        Ok(Self {
            rank: number(0),
            size: number(4),
            version: String::from_utf8_lossy(&version).into_owned(),
        })
    }
}

/// A member during joining.
struct Joining<'a> {
    rank: usize,
    ring: &'a [String],
    until: Instant,
    timeout: Duration,
    /// The version to send. Tests send another one.
    version: &'a str,
}

/// Connects to both neighbors, and waits until all members have joined.
///
/// # Errors
/// If a member does not join within `timeout`, or has another version. The message names the
/// member.
pub fn ring(rank: usize, ring: &[String], timeout: Duration) -> Result<Neighbors> {
    Joining {
        rank,
        ring,
        until: Instant::now() + timeout,
        timeout,
        version: VERSION,
    }
    .join()
    .map_err(|message| Error::Group(format!("rank {rank}: {message}")))
}

impl Joining<'_> {
    fn left(&self) -> usize {
        (self.rank + self.ring.len() - 1) % self.ring.len()
    }

    fn right(&self) -> usize {
        (self.rank + 1) % self.ring.len()
    }

    fn address(&self, rank: usize) -> &str {
        self.ring.get(rank).map_or("", String::as_str)
    }

    fn hello(&self) -> Hello {
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Hello {
            rank: number(self.rank),
            size: number(self.ring.len()),
            version: self.version.to_owned(),
        }
    }

    fn remaining(&self) -> Duration {
        let left = self.until.saturating_duration_since(Instant::now());
        // For a socket, a zero timeout would mean no limit.
        left.max(Duration::from_millis(1))
    }

    fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    fn did_not_come(&self, rank: usize) -> String {
        format!(
            "rank {rank} ({}) did not come within {} s",
            self.address(rank),
            self.timeout.as_secs()
        )
    }

    fn join(&self) -> Result<Neighbors, String> {
        let address = self.address(self.rank);
        let listener = TcpListener::bind(address)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|e| format!("cannot listen at {address}, its address: {e}"))?;
        let (left, right) = thread::scope(|scope| {
            let connecting = scope.spawn(|| self.connect());
            let left = self.accept(&listener);
            let right = connecting.join();
            (
                left,
                right.unwrap_or_else(|_| Err(String::from("connecting broke off"))),
            )
        });
        // The listener is closed, because MLX will listen at this address.
        drop(listener);
        match (left, right) {
            (Ok(left), Ok(right)) => self.gather(Neighbors { left, right }),
            // Tells the neighbor that joined which member is missing.
            (Ok(mut left), Err(why)) => {
                self.give_up(&mut left, self.right());
                Err(why)
            }
            (Err(why), Ok(mut right)) => {
                self.give_up(&mut right, self.left());
                Err(why)
            }
            (Err(why), Err(other)) if why == other => Err(why),
            (Err(why), Err(other)) => Err(format!("{why}; {other}")),
        }
    }

    fn give_up(&self, to: &mut TcpStream, missing: usize) {
        // If this fails, the neighbor ends at its own time limit.
        let _ = Word::Lost(u32::try_from(missing).unwrap_or(u32::MAX)).say(to);
    }

    /// Accepts the connection of the preceding rank.
    fn accept(&self, listener: &TcpListener) -> Result<TcpStream, String> {
        while !self.is_late() {
            let Ok((mut stream, _)) = listener.accept() else {
                thread::sleep(PAUSE);
                continue;
            };
            let greeted = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_read_timeout(Some(self.remaining().min(ATTEMPT))))
                .and_then(|()| Hello::hear(&mut stream));
            // Connections of other programs are ignored.
            let Ok(hello) = greeted else { continue };
            let answered = self.hello().say(&mut stream);
            self.check(&hello, self.left())?;
            if answered.is_ok() {
                return Ok(stream);
            }
        }
        Err(self.did_not_come(self.left()))
    }

    /// Connects to the following rank.
    fn connect(&self) -> Result<TcpStream, String> {
        let (right, address) = (self.right(), self.address(self.right()));
        let to: Vec<SocketAddr> = address
            .to_socket_addrs()
            .map_err(|e| format!("the address of rank {right}, {address}: {e}"))?
            .filter(SocketAddr::is_ipv4)
            .collect();
        let to = to
            .first()
            .ok_or_else(|| format!("the address of rank {right}, {address}, is not of IPv4"))?;
        while !self.is_late() {
            let attempt = TcpStream::connect_timeout(to, self.remaining().min(ATTEMPT));
            let Ok(mut stream) = attempt else {
                thread::sleep(PAUSE);
                continue;
            };
            let greeted = self
                .hello()
                .say(&mut stream)
                .and_then(|()| stream.set_read_timeout(Some(self.remaining())))
                .and_then(|()| Hello::hear(&mut stream));
            // An older process may still listen on this port. It will end soon, so a later try can
            // succeed.
            let Ok(hello) = greeted else {
                thread::sleep(PAUSE);
                continue;
            };
            self.check(&hello, right)?;
            return Ok(stream);
        }
        Err(self.did_not_come(right))
    }

    fn check(&self, hello: &Hello, expected: usize) -> Result<(), String> {
        if hello.version != self.version {
            return Err(format!(
                "rank {} is of version {:?}, this one is of {:?}; install the same everywhere",
                hello.rank, hello.version, self.version
            ));
        }
        let wanted = (
            u32::try_from(expected).ok(),
            u32::try_from(self.ring.len()).ok(),
        );
        if (Some(hello.rank), Some(hello.size)) != wanted {
            return Err(format!(
                "rank {} of {} answers where rank {expected} of {} should: another group runs on \
                 these ports, or the hostfiles differ",
                hello.rank,
                hello.size,
                self.ring.len()
            ));
        }
        Ok(())
    }

    /// Waits until all members have closed their listeners. `Ready` passes around the ring once to
    /// collect the members, and then `Go` passes around once to start them.
    fn gather(&self, mut neighbors: Neighbors) -> Result<Neighbors, String> {
        for word in [Word::Ready, Word::Go] {
            if self.rank == 0 {
                self.say(&mut neighbors, word)?;
                self.hear(&mut neighbors, word)?;
            } else {
                self.hear(&mut neighbors, word)?;
                self.say(&mut neighbors, word)?;
            }
        }
        for stream in [&neighbors.left, &neighbors.right] {
            let prepared = stream
                .set_nodelay(true)
                .and_then(|()| stream.set_read_timeout(None));
            prepared.map_err(|e| format!("a connection broke: {e}"))?;
        }
        Ok(neighbors)
    }

    fn say(&self, neighbors: &mut Neighbors, word: Word) -> Result<(), String> {
        word.say(&mut neighbors.right)
            .map_err(|_| format!("rank {} was lost while joining", self.right()))
    }

    fn hear(&self, neighbors: &mut Neighbors, expected: Word) -> Result<(), String> {
        let heard = neighbors
            .left
            .set_read_timeout(Some(self.remaining() + SLACK))
            .and_then(|()| Word::hear(&mut neighbors.left));
        match heard {
            Ok(word) if word == expected => Ok(()),
            Ok(Word::Lost(rank)) => {
                let _ = Word::Lost(rank).say(&mut neighbors.right);
                Err(self.did_not_come(rank as usize))
            }
            _ if self.is_late() => Err(format!(
                "not all processes joined within {} s: rank {} still waits for a lower rank",
                self.timeout.as_secs(),
                self.left()
            )),
            _ => {
                self.give_up(&mut neighbors.right, self.left());
                Err(format!("rank {} was lost while joining", self.left()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::free_ports;

    fn addresses(n: usize) -> Vec<String> {
        let ports = free_ports(n).unwrap();
        ports.iter().map(|p| format!("127.0.0.1:{p}")).collect()
    }

    /// Joins the members of `ranks`, and returns each one's result.
    fn together(n: usize, ranks: &[usize], versions: &[&'static str]) -> Vec<Result<(), String>> {
        let ring = addresses(n);
        let timeout = Duration::from_secs(3);
        thread::scope(|scope| {
            let all: Vec<_> = ranks
                .iter()
                .map(|&rank| {
                    let (ring, version) = (&ring, versions[rank % versions.len()]);
                    scope.spawn(move || {
                        let joining = Joining {
                            rank,
                            ring,
                            until: Instant::now() + timeout,
                            timeout,
                            version,
                        };
                        joining.join().map(|_| ())
                    })
                })
                .collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        })
    }

    #[test]
    fn members_find_each_other() {
        for n in [2, 3, 5] {
            let ranks: Vec<usize> = (0..n).rev().collect();
            assert!(together(n, &ranks, &["1"]).iter().all(Result::is_ok), "{n}");
        }
    }

    #[test]
    fn the_one_that_never_comes_is_named() {
        let started = Instant::now();
        for result in together(4, &[0, 1, 3], &["1"]) {
            let why = result.unwrap_err();
            assert!(
                why.contains("rank 2") && why.contains("did not come"),
                "{why}"
            );
        }
        assert!(started.elapsed() < Duration::from_secs(8));
    }

    #[test]
    fn another_version_is_named() {
        for result in together(2, &[0, 1], &["1", "2"]) {
            let why = result.unwrap_err();
            assert!(why.contains("version"), "{why}");
        }
    }

    #[test]
    fn strangers_are_left_standing() {
        let ring = addresses(2);
        let stranger = {
            let address = ring[0].clone();
            thread::spawn(move || {
                for _ in 0..10 {
                    if let Ok(mut stream) = TcpStream::connect(&address) {
                        let _ = stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n");
                        return;
                    }
                    thread::sleep(PAUSE);
                }
            })
        };
        let timeout = Duration::from_secs(10);
        thread::scope(|scope| {
            let first = scope.spawn(|| super::ring(0, &ring, timeout).map(|_| ()));
            stranger.join().unwrap();
            super::ring(1, &ring, timeout).unwrap();
            first.join().unwrap().unwrap();
        });
    }
}
