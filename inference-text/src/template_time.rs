//! Dates for chat templates: the part of Python's `strftime` that templates use.
//!
//! The time is in UTC, so the text does not depend on the machine's time zone.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];

/// Formats a time given in seconds since 1970-01-01 00:00 UTC.
pub(crate) fn strftime(seconds: u64, format: &str) -> Result<String, String> {
    let day = i64::try_from(seconds / 86_400).unwrap_or(0).min(3_000_000);
    let in_day = seconds % 86_400;
    let (hour, minute, second) = (in_day / 3600, in_day / 60 % 60, in_day % 60);
    let (year, month, date) = civil(day);
    let day_of_year = day - days(year, 1, 1) + 1;
    let weekday = usize::try_from((day + 3).rem_euclid(7)).unwrap_or(0);
    let month_name = MONTHS[month - 1];
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        // `%-d` omits leading zeros.
        let bare = code == Some('-');
        if bare {
            code = chars.next();
        }
        let mut piece = match code {
            Some('Y') => format!("{year:04}"),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{date:02}"),
            Some('e') => format!("{date:2}"),
            Some('j') => format!("{day_of_year:03}"),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{hour12:02}"),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('f') => "000000".to_owned(),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('A') => DAYS[weekday].to_owned(),
            Some('a') => DAYS[weekday][..3].to_owned(),
            Some('F') => format!("{year:04}-{month:02}-{date:02}"),
            Some('D') => format!("{month:02}/{date:02}/{:02}", year % 100),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('s') => seconds.to_string(),
            Some('%') => "%".to_owned(),
            other => {
                return Err(format!(
                    "strftime_now does not know %{}",
                    other.map_or_else(String::new, String::from)
                ));
            }
        };
        if bare {
            let short = piece.trim_start_matches(['0', ' ']);
            piece = if short.is_empty() {
                "0".to_owned()
            } else {
                short.to_owned()
            };
        }
        out.push_str(&piece);
    }
    Ok(out)
}

/// Converts days since 1970-01-01 to year, month and day in the proleptic Gregorian calendar.
fn civil(day: i64) -> (i64, usize, i64) {
    // Years start in March here, so that the leap day is the last day of a year.
    let shifted = day + 719_468;
    let era = shifted.div_euclid(146_097);
    let in_era = shifted.rem_euclid(146_097);
    let year_of_era = (in_era - in_era / 1460 + in_era / 36_524 - in_era / 146_096) / 365;
    let in_year = in_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * in_year + 2) / 153;
    let date = in_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, usize::try_from(month).unwrap_or(1).clamp(1, 12), date)
}

/// The day number of a date.
fn days(year: i64, month: i64, date: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let from_march = if month > 2 { month - 3 } else { month + 9 };
    let in_year = (153 * from_march + 2) / 5 + date - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + in_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        assert_eq!(
            strftime(0, "%Y-%m-%d %H:%M:%S %A %j").unwrap(),
            "1970-01-01 00:00:00 Thursday 001"
        );
        // 2024-02-29 13:05:09 UTC
        let leap = 1_709_211_909;
        assert_eq!(
            strftime(leap, "%d %b %Y, %a %-I:%M %p %j %e").unwrap(),
            "29 Feb 2024, Thu 1:05 PM 060 29"
        );
        assert_eq!(
            strftime(951_782_400, "%F %B").unwrap(),
            "2000-02-29 February"
        );
        assert_eq!(strftime(4_107_542_400, "%F").unwrap(), "2100-03-01");
        assert_eq!(strftime(0, "100%%").unwrap(), "100%");
        assert!(strftime(0, "%Q").unwrap_err().contains("%Q"));
        assert!(strftime(u64::MAX, "%Y").is_ok());
    }

    #[test]
    fn every_day_follows_the_one_before() {
        let mut before = civil(-1);
        for day in 0..150_000 {
            let (year, month, date) = civil(day);
            assert_eq!(days(year, i64::try_from(month).unwrap(), date), day);
            assert!((year, month, date) > before);
            before = (year, month, date);
        }
    }
}
