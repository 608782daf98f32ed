//! Keep-alive times: how long a model stays loaded without requests, in Ollama's notation.

use std::time::Duration;

use inference::{Error, ErrorKind, Result};

/// Parses a duration such as `5m`, `1h30m` or `300` (seconds). Returns `None` for a negative value,
/// which means forever.
///
/// # Errors
/// [`ErrorKind::InvalidOption`] for a text that is not a duration.
pub fn parse_keep_alive(text: &str) -> Result<Option<Duration>> {
    duration(text).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOption,
            "must be a number of seconds or a duration such as 5m or 1h30m; below 0 is forever",
        )
    })
}

/// Parses a duration in Go's notation: `1h30m`, `1.5s`, `300ms`. A plain number is in seconds.
/// Returns `Some(None)` for a negative value, which means forever, and `None` for invalid text.
fn duration(text: &str) -> Option<Option<Duration>> {
    let text = text.trim();
    let (forever, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut seconds = 0.0;
    if let Some(n) = number(rest) {
        (seconds, rest) = (n, "");
    } else if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let n = number(&rest[..end])?;
        rest = &rest[end..];
        let units = [
            ("ns", 1e-9),
            ("us", 1e-6),
            ("µs", 1e-6),
            ("ms", 1e-3),
            ("s", 1.0),
            ("m", 60.0),
            ("h", 3600.0),
        ];
        let (unit, of) = units.iter().find(|(unit, _)| rest.starts_with(unit))?;
        seconds += n * of;
        rest = &rest[unit.len()..];
    }
    match forever && seconds > 0.0 {
        true => Some(None),
        false => Duration::try_from_secs_f64(seconds).ok().map(Some),
    }
}

/// Parses digits with at most one decimal point.
fn number(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    text.parse().ok().filter(|_| plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_those_of_go() {
        for (text, milliseconds) in [
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("1.5s", 1_500),
            ("300ms", 300),
            ("0", 0),
            ("-0", 0),
            ("0s", 0),
            ("3600", 3_600_000),
            ("2m0.5s", 120_500),
        ] {
            let expected = Duration::from_millis(milliseconds);
            assert_eq!(duration(text), Some(Some(expected)), "{text}");
        }
        for text in ["-1", "-1m", "-2562047h47m16.854775807s"] {
            assert_eq!(duration(text), Some(None), "{text}");
        }
        for text in [
            "", "-", "m", "5x", "5m3", "1..5s", "inf", "1e3s", "ten", "5 m",
        ] {
            assert_eq!(duration(text), None, "{text}");
        }
    }
}
