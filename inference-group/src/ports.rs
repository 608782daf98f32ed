//! Finds free ports of this machine, for processes that will listen at them shortly afterwards.

use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The ports are below the range that Linux (from 32768) and macOS (from 49152) assign to outgoing
/// connections and to listeners on port 0. Otherwise the system could assign a port before its
/// process listens.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// Offset between the first ports that processes with consecutive ids try.
const STRIDE: usize = 16;

/// Finds `count` ports without a listener. Two calls in one process never return the same port.
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
    let free = |&port: &u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    // Only the needed ports are tried, because another process may be about to listen at further
    // ports.
    let tries = if count <= usize::from(COUNT) {
        usize::from(COUNT)
    } else {
        0
    };
    let ports: Vec<u16> = (0..tries)
        .map(|_| next())
        .filter(free)
        .take(count)
        .collect();
    if ports.len() < count {
        return Err(format!(
            "{count} free ports are needed, but there are fewer from {FIRST} to 31999"
        ));
    }
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
