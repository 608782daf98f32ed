//! A member's connections to its ring neighbors, in addition to MLX's own. They exist because MLX
//! 0.30 waits forever for a peer that has ended. Each member regularly tells its neighbors that it
//! is alive. When a member is lost, its neighbors tell the ring. Orders of rank 0 use these
//! connections, too.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Interval at which a member reports that it is alive.
const BEAT: Duration = Duration::from_secs(2);
/// How long a process waits for an error of its own before it reports a lost neighbor. Members
/// often fail with the same error. The others then lose the first member that ends.
const OWN_ERROR: Duration = Duration::from_millis(500);
/// After this time without a message, a neighbor counts as lost.
pub const SILENCE: Duration = Duration::from_secs(20);
/// Maximum size of an order (a message of rank 0) in bytes. A prompt of a million tokens is
/// smaller.
const MAX_ORDER: usize = 64 << 20;

/// Maximum number of orders that wait to be executed. All ranks compute each step together, so few
/// orders wait. The limit bounds the memory of a process that does not execute its orders.
const MAX_WAITING: usize = 4096;
/// Maximum size of all waiting orders in bytes.
const MAX_WAITING_BYTES: usize = 256 << 20;

/// A message on a connection: one byte for the kind, and a number of four bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// The sender is alive.
    Alive,
    /// The sender has finished.
    Bye,
    /// The rank with this number is lost.
    Lost(u32),
    /// The sender and all ranks before it have closed their listeners for MLX's connections.
    Ready,
    /// All ranks have closed their listeners.
    Go,
    /// An order of rank 0 with this number of bytes follows.
    Order(u32),
}

impl Word {
    fn bytes(self) -> [u8; 5] {
        let (kind, number) = match self {
            Self::Alive => (b'a', 0),
            Self::Bye => (b'b', 0),
            Self::Lost(rank) => (b'l', rank),
            Self::Ready => (b'r', 0),
            Self::Go => (b'g', 0),
            Self::Order(length) => (b'o', length),
        };
        let [a, b, c, d] = number.to_le_bytes();
        [kind, a, b, c, d]
    }

    /// Sends the message.
    ///
    /// # Errors
    /// Errors of writing to the connection.
    pub fn say(self, to: &mut impl Write) -> io::Result<()> {
        to.write_all(&self.bytes())
    }

    /// Receives the next message.
    ///
    /// # Errors
    /// If the connection fails, or if the bytes are not a valid message.
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
            b'o' => Ok(Self::Order(u32::from_le_bytes(number))),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not a member")),
        }
    }
}

/// Connections to both neighbors. In a group of two, both lead to the same member.
pub struct Neighbors {
    /// The connection to the preceding rank.
    pub left: TcpStream,
    /// The connection to the following rank.
    pub right: TcpStream,
}

/// The connections, which threads watch.
pub struct Links {
    leaving: Arc<AtomicBool>,
    /// The connections to the left and to the right.
    writers: Arc<Mutex<[TcpStream; 2]>>,
    orders: Mutex<Receiver<Vec<u8>>>,
    /// Total size of the waiting orders in bytes.
    waiting: Arc<AtomicUsize>,
    /// A neighbor that has finished, as a sentence for the user.
    finished: Arc<Mutex<Option<String>>>,
}

impl Neighbors {
    /// Starts to watch both connections. If a member is lost, this process ends.
    ///
    /// # Errors
    /// Those of the system.
    pub fn watch(self, rank: usize, ring: &[String]) -> io::Result<Links> {
        let size = ring.len();
        let writers = [self.left.try_clone()?, self.right.try_clone()?];
        let (heard, orders) = mpsc::sync_channel(MAX_WAITING);
        let waiting = Arc::<AtomicUsize>::default();
        let links = Links {
            leaving: Arc::default(),
            writers: Arc::new(Mutex::new(writers)),
            orders: Mutex::new(orders),
            waiting: Arc::clone(&waiting),
            finished: Arc::default(),
        };
        // Orders arrive from the left. The last rank does not forward them, so they do not return
        // to rank 0.
        let relay = Relay {
            rank: u32::try_from(rank).unwrap_or(u32::MAX),
            heard,
            waiting,
            next: (rank + 1 < size).then(|| Arc::clone(&links.writers)),
        };
        let sides = [
            (self.left, (rank + size - 1) % size, Some(relay)),
            (self.right, (rank + 1) % size, None),
        ];
        for (stream, neighbor, relay) in sides {
            let (leaving, writers) = (Arc::clone(&links.leaving), Arc::clone(&links.writers));
            let finished = Arc::clone(&links.finished);
            let address = ring.get(neighbor).cloned().unwrap_or_default();
            thread::spawn(move || {
                let lost = match listen(stream, neighbor, &address, relay.as_ref()) {
                    None => {
                        let why = format!("rank {neighbor} ({address}) has ended");
                        *finished.lock() = Some(why);
                        ended_early(&leaving, neighbor, &address)
                    }
                    lost => lost,
                };
                if let Some((lost, why)) = lost
                    && !leaving.load(Ordering::Acquire)
                {
                    say(&writers, Word::Lost(lost));
                    thread::sleep(OWN_ERROR);
                    if !leaving.load(Ordering::Acquire) {
                        crate::end::end(&format!("rank {rank}: {why}"));
                    }
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
        Ok(links)
    }
}

/// Receives orders and forwards them.
struct Relay {
    /// The rank of this process.
    rank: u32,
    heard: SyncSender<Vec<u8>>,
    waiting: Arc<AtomicUsize>,
    /// `None` for the last rank.
    next: Option<Arc<Mutex<[TcpStream; 2]>>>,
}

impl Relay {
    fn take(&self, order: Vec<u8>) -> io::Result<()> {
        if let Some(writers) = &self.next {
            pass_on(writers, &order)?;
        }
        let bytes = self.waiting.fetch_add(order.len(), Ordering::AcqRel) + order.len();
        let sent = match bytes <= MAX_WAITING_BYTES {
            true => self.heard.try_send(order),
            false => Err(TrySendError::Full(order)),
        };
        match sent {
            // The receiver is dropped after this member has left.
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            Err(TrySendError::Full(_)) => Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                format!(
                    "it does not follow the orders of rank 0, of which at most {MAX_WAITING} or \
                     {MAX_WAITING_BYTES} bytes may wait; do all run the same command?"
                ),
            )),
        }
    }
}

/// Sends a message to the following rank.
fn pass_on(writers: &Mutex<[TcpStream; 2]>, order: &[u8]) -> io::Result<()> {
    let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "the order is too long");
    let length = u32::try_from(order.len()).ok();
    let length = length.filter(|_| order.len() <= MAX_ORDER);
    let mut bytes = Word::Order(length.ok_or_else(too_long)?).bytes().to_vec();
    bytes.extend_from_slice(order);
    let mut writers = writers.lock();
    let [_, right] = &mut *writers;
    right.write_all(&bytes)
}

impl Links {
    /// Prepares for the end of this process after an error that it reported. If neighbors end, too,
    /// because of the same error, they are not reported as lost. To them, the end of this process
    /// is a loss, unless they report an error of their own.
    ///
    /// Returns a sentence about a neighbor that finished without an error. The error of this
    /// process may then come from MLX, which reports only a lost connection.
    pub fn fail(&self) -> Option<String> {
        self.leaving.store(true, Ordering::Release);
        // The neighbor's message may arrive after MLX's error.
        let begin = Instant::now();
        loop {
            let finished = self.finished.lock().clone();
            if finished.is_some() || begin.elapsed() >= OWN_ERROR {
                return finished;
            }
            thread::sleep(OWN_ERROR / 20);
        }
    }

    /// Tells the neighbors that this process leaves, so that its end does not count as a loss.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
        say(&self.writers, Word::Bye);
    }

    /// Sends a message (an order) to the following rank, which forwards it to the ranks after it.
    ///
    /// # Errors
    /// If the message is too long, or if the connection fails.
    pub fn order(&self, order: &[u8]) -> io::Result<()> {
        pass_on(&self.writers, order)
    }

    /// Waits for the next order. Returns `None` after the preceding ranks have ended.
    pub fn next_order(&self) -> Option<Vec<u8>> {
        let orders = self.orders.lock();
        let order = orders.recv().ok()?;
        self.waiting.fetch_sub(order.len(), Ordering::AcqRel);
        Some(order)
    }
}

fn say(writers: &Mutex<[TcpStream; 2]>, word: Word) {
    for stream in &mut *writers.lock() {
        // If sending fails, the thread that reads this connection reports the fault.
        let _ = word.say(stream);
    }
}

/// Reads an order of `length` bytes.
fn read_order(stream: &mut TcpStream, length: u32) -> io::Result<Vec<u8>> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > MAX_ORDER {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "not an order of a member",
        ));
    }
    let mut order = vec![0; length];
    stream.read_exact(&mut order)?;
    Ok(order)
}

/// Reads a neighbor's messages until the connection ends. Returns the lost rank and the reason, or
/// `None` after a `Bye`.
fn listen(
    mut stream: TcpStream,
    neighbor: usize,
    address: &str,
    relay: Option<&Relay>,
) -> Option<(u32, String)> {
    let rank = u32::try_from(neighbor).unwrap_or(u32::MAX);
    if stream.set_read_timeout(Some(SILENCE)).is_err() {
        return Some((
            rank,
            format!("rank {neighbor} ({address}) cannot be watched"),
        ));
    }
    loop {
        let heard = Word::hear(&mut stream).and_then(|word| match (word, relay) {
            (Word::Order(length), Some(relay)) => {
                relay.take(read_order(&mut stream, length)?).map(|()| word)
            }
            (Word::Order(_), None) => Err(io::ErrorKind::InvalidData.into()),
            _ => Ok(word),
        });
        match heard {
            Ok(Word::Order(_)) => {}
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
            // The fault is in this process, not in the neighbor.
            Err(e) if e.kind() == io::ErrorKind::QuotaExceeded => {
                let this_rank = relay.map_or(rank, |relay| relay.rank);
                return Some((this_rank, e.to_string()));
            }
            Err(_) => return Some((rank, format!("rank {neighbor} ({address}) was lost"))),
        }
    }
}

/// Watches this process after a neighbor's `Bye`. This process may still write files, but all
/// members compute the last step together. So if the engine stays busy for [`SILENCE`], it waits
/// for a member that has ended. Returns `None` if this process leaves, too.
fn ended_early(leaving: &AtomicBool, neighbor: usize, address: &str) -> Option<(u32, String)> {
    while !leaving.load(Ordering::Acquire) {
        let (done, waiting) = mpsc::channel();
        thread::spawn(move || {
            crate::end::wait_for_engine();
            // The receiver may already be dropped.
            let _ = done.send(());
        });
        if waiting.recv_timeout(SILENCE).is_err() {
            let rank = u32::try_from(neighbor).unwrap_or(u32::MAX);
            let why = format!(
                "rank {neighbor} ({address}) has ended, and this one still waits for it; do all \
                 run the same command?"
            );
            return Some((rank, why));
        }
        thread::sleep(BEAT);
    }
    None
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn words_are_heard_as_they_were_said() {
        let all = [
            Word::Alive,
            Word::Bye,
            Word::Lost(7),
            Word::Ready,
            Word::Go,
            Word::Order(1 << 20),
        ];
        let mut said = Vec::new();
        all.iter().for_each(|word| word.say(&mut said).unwrap());
        let mut heard = said.as_slice();
        for word in all {
            assert_eq!(Word::hear(&mut heard).unwrap(), word);
        }
        assert!(Word::hear(&mut heard).is_err());
        assert!(Word::hear(&mut &b"GET /"[..]).is_err());
    }

    /// The connected neighbors of a ring of `n` members.
    fn ring(n: usize) -> Vec<Neighbors> {
        let listeners: Vec<_> = (0..n)
            .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let rights: Vec<_> = (0..n)
            .map(|rank| {
                let next = &listeners[(rank + 1) % n];
                TcpStream::connect(next.local_addr().unwrap()).unwrap()
            })
            .collect();
        let lefts = listeners.iter().map(|one| one.accept().unwrap().0);
        let lefts: Vec<_> = lefts.collect();
        (lefts.into_iter().zip(rights))
            .map(|(left, right)| Neighbors { left, right })
            .collect()
    }

    /// If a loss were reported, the watching threads would end the process of this test.
    #[test]
    fn after_an_error_of_its_own_a_process_reports_no_lost_neighbor() {
        let [first, second] = ring(2).try_into().ok().unwrap();
        let links = first.watch(0, &[String::from("here"), String::from("there")]);
        let links = links.unwrap();
        assert_eq!(links.fail(), None);
        drop(second);
        // Each thread has a reference until it ends.
        let begin = std::time::Instant::now();
        while Arc::strong_count(&links.leaving) > 1 {
            assert!(begin.elapsed().as_secs() < 60, "a thread does not end");
            thread::sleep(BEAT / 10);
        }
    }

    /// MLX itself reports only a lost connection, so this process must name the neighbor.
    #[test]
    fn a_process_that_fails_names_the_neighbor_that_has_ended() {
        let [first, second] = ring(2).try_into().ok().unwrap();
        let addresses = [String::from("here"), String::from("there")];
        let links = first.watch(0, &addresses).unwrap();
        let other = second.watch(1, &addresses).unwrap();
        other.leave();
        let why = links.fail().unwrap();
        assert!(why.contains("rank 1 (there) has ended"), "{why}");
    }

    #[test]
    fn orders_that_are_not_followed_end_at_a_bound() {
        let relay = |most| {
            let (heard, orders) = mpsc::sync_channel(most);
            let waiting = Arc::default();
            let (rank, next) = (2, None);
            let relay = Relay {
                rank,
                heard,
                waiting,
                next,
            };
            (relay, orders)
        };
        // The number of waiting orders is limited, and the reading thread reports an excess.
        let (few, orders) = relay(3);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut rank_0 = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        for _ in 0..4 {
            Word::Order(1).say(&mut rank_0).unwrap();
            rank_0.write_all(b"x").unwrap();
        }
        let (lost, why) = listen(stream, 1, "here", Some(&few)).unwrap();
        assert_eq!(lost, 2);
        assert!(
            why.contains("does not follow the orders of rank 0"),
            "{why}"
        );
        assert_eq!(orders.try_iter().count(), 3);
        // The total size of waiting orders is limited, too.
        let (large, orders) = relay(MAX_WAITING);
        large.take(vec![0; 8]).unwrap();
        large
            .waiting
            .store(MAX_WAITING_BYTES - 7, Ordering::Release);
        let full = large.take(vec![0; 8]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::QuotaExceeded);
        // Orders to a member that has left are dropped.
        large.waiting.store(0, Ordering::Release);
        drop(orders);
        large.take(vec![0; 8]).unwrap();
    }

    #[test]
    fn orders_reach_all_in_order_and_end_at_the_last() {
        let addresses = vec![String::from("here"); 3];
        let links: Vec<Links> = (ring(3).into_iter().enumerate())
            .map(|(rank, neighbors)| neighbors.watch(rank, &addresses).unwrap())
            .collect();
        let long = vec![7; 1 << 20];
        for order in [&b"one"[..], &long, b""] {
            links[0].order(order).unwrap();
        }
        for follower in &links[1..] {
            for order in [&b"one"[..], &long, b""] {
                assert_eq!(follower.next_order().unwrap(), order);
            }
        }
        assert!(links[0].order(&vec![0; MAX_ORDER + 1]).is_err());
        // No order may return to rank 0.
        let first = links[0].orders.lock();
        assert!(first.try_recv().is_err());
        drop(first);
        links.iter().for_each(Links::leave);
        assert_eq!(links[2].next_order(), None);
    }
}
