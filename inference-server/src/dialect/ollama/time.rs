//! Timestamps in the format of Ollama's API.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The current time in RFC 3339, in UTC.
pub(super) fn now() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    rfc3339(now.as_secs(), now.subsec_nanos())
}

/// The time `stays` from now, in RFC 3339 and UTC.
pub(super) fn after(stays: Duration) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let at = now.unwrap_or_default().saturating_add(stays);
    rfc3339(at.as_secs(), at.subsec_nanos())
}

/// Seconds since 1970 as a date and a time. The formula is the inverse of days_from_civil (Howard
/// Hinnant, "chrono-Compatible Low-Level Date Algorithms").
pub(super) fn rfc3339(seconds: u64, nanos: u32) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since March 1 of year 0, in eras of 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest % 3600 / 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nanos:09}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        // The expected texts are from `date -u -d @SECONDS`.
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00"),
            (951_782_400, "2000-02-29T00:00:00"),
            (1_709_251_199, "2024-02-29T23:59:59"),
            (1_709_251_200, "2024-03-01T00:00:00"),
            (4_102_444_799, "2099-12-31T23:59:59"),
        ] {
            assert_eq!(rfc3339(seconds, 7), format!("{text}.000000007Z"));
        }
    }
}
