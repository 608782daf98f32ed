//! Finds free ports of this machine, for processes that will listen at them shortly afterwards.

use std::net::{TcpListener, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// The ports are below the range that Linux (from 32768) and macOS (from 49152) assign to outgoing
/// connections and to listeners on port 0. Otherwise the system could assign a port before its
/// process listens.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// Offset between the first ports that processes with consecutive ids try.
const STRIDE: usize = 16;

/// The reservations of this process, for as long as it runs. A process reserves a TCP port by a UDP
/// socket at the same number: TCP listeners are not affected, and a second process cannot bind it.
static RESERVED: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());

/// Finds `count` ports without a listener. Two calls never return the same port, neither in one
/// process nor in two that run at the same time on this machine.
///
/// # Errors
/// If there are not enough free ports.
pub fn free_ports(count: usize) -> Result<Vec<u16>, String> {
    static TAKEN: AtomicUsize = AtomicUsize::new(0);
    let start = std::process::id() as usize * STRIDE;
    let next = || {
        let offset = (start + TAKEN.fetch_add(1, Ordering::Relaxed)) % usize::from(COUNT);
        FIRST + u16::try_from(offset).unwrap_or(0)
    };
    let reserved = |port: u16| {
        let reservation = UdpSocket::bind(("127.0.0.1", port)).ok()?;
        // Without a reservation, another process could see the same port as free.
        TcpListener::bind(("127.0.0.1", port)).ok()?;
        Some((port, reservation))
    };
    // Only the needed ports are tried, because another process may be about to listen at further
    // ports.
    let tries = if count <= usize::from(COUNT) {
        usize::from(COUNT)
    } else {
        0
    };
    let (ports, reservations): (Vec<u16>, Vec<UdpSocket>) = (0..tries)
        .filter_map(|_| reserved(next()))
        .take(count)
        .unzip();
    if ports.len() < count {
        return Err(format!(
            "{count} free ports are needed, but there are fewer from {FIRST} to 31999"
        ));
    }
    RESERVED.lock().extend(reservations);
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_free_different_and_not_those_of_connections() {
        let mut ports = free_ports(100).unwrap();
        ports.extend(free_ports(100).unwrap());
        assert!(ports.iter().all(|&p| (FIRST..32_768).contains(&p)));
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 200);
        assert!(free_ports(usize::from(COUNT) + 1).is_err());
    }

    /// Two launchers that start at the same time must not give their groups the same ports.
    #[test]
    fn ports_that_another_process_reserved_are_left_out() {
        let next = free_ports(1).unwrap()[0];
        assert!(UdpSocket::bind(("127.0.0.1", next)).is_err());
        let others: Vec<_> = (next + 1..next + 4)
            .filter_map(|p| UdpSocket::bind(("127.0.0.1", p)).ok())
            .collect();
        let ports = free_ports(8).unwrap();
        let other = |other: &UdpSocket| other.local_addr().unwrap().port();
        assert!(others.iter().all(|o| !ports.contains(&other(o))));
    }

    #[test]
    fn ports_that_someone_listens_at_are_left_out() {
        let next = free_ports(1).unwrap()[0];
        let listeners: Vec<_> = (next + 1..next + 4)
            .filter_map(|p| TcpListener::bind(("127.0.0.1", p)).ok())
            .collect();
        let ports = free_ports(8).unwrap();
        assert!(
            listeners
                .iter()
                .all(|l| !ports.contains(&l.local_addr().unwrap().port()))
        );
    }
}
