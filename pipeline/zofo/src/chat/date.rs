//! Dates as C's `strftime` writes them, in English and in UTC.

use std::{
    fmt::Write,
    time::{SystemTime, UNIX_EPOCH},
};

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
/// The first of January 1970 was a Thursday.
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const DAY: u64 = 86_400;

/// `None` for a field that is not known here. A time before 1970 counts as 1970.
pub(super) fn format(now: SystemTime, format: &str) -> Option<String> {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, second) = (seconds / DAY, seconds % DAY);
    let (year, month, day) = civil(days);
    let (month_name, weekday) = (MONTHS[month - 1], WEEKDAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut signs = format.chars();
    while let Some(sign) = signs.next() {
        if sign != '%' {
            out.push(sign);
            continue;
        }
        // Writing to a string cannot fail.
        let _ = match signs.next()? {
            'Y' => write!(out, "{year}"),
            'y' => write!(out, "{:02}", year % 100),
            'm' => write!(out, "{month:02}"),
            'd' => write!(out, "{day:02}"),
            'e' => write!(out, "{day:2}"),
            'B' => write!(out, "{month_name}"),
            'b' => write!(out, "{}", &month_name[..3]),
            'A' => write!(out, "{weekday}"),
            'a' => write!(out, "{}", &weekday[..3]),
            'H' => write!(out, "{:02}", second / 3600),
            'M' => write!(out, "{:02}", second / 60 % 60),
            'S' => write!(out, "{:02}", second % 60),
            'F' => write!(out, "{year}-{month:02}-{day:02}"),
            'T' => write!(out, "{:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60),
            '%' => write!(out, "%"),
            _ => return None,
        };
    }
    Some(out)
}

/// Year, month and day, the latter two from 1, of a number of days since 1970.
fn civil(mut days: u64) -> (u64, usize, u64) {
    // 400 years have the same number of days wherever they begin.
    const CYCLE: u64 = 146_097;
    let mut year = 1970 + days / CYCLE * 400;
    days %= CYCLE;
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, form: &str) -> Option<String> {
        format(UNIX_EPOCH + Duration::from_secs(seconds), form)
    }

    /// Seconds are those of `date -u -d ... +%s`.
    #[test]
    fn known_days() {
        for (seconds, expected) in [
            (0, "Thursday 01 Jan 1970 00:00:00"),
            (951_827_696, "Tuesday 29 Feb 2000 12:34:56"),
            (1_721_952_000, "Friday 26 Jul 2024 00:00:00"),
            (4_107_542_399, "Sunday 28 Feb 2100 23:59:59"),
            (4_107_542_400, "Monday 01 Mar 2100 00:00:00"),
            (13_601_087_999, "Sunday 31 Dec 2400 23:59:59"),
        ] {
            assert_eq!(at(seconds, "%A %d %b %Y %T").unwrap(), expected);
        }
        assert_eq!(at(1_721_952_000, "%a, %e %B %y: %F %H:%M:%S 100%%").unwrap(), "Fri, 26 July 24: 2024-07-26 00:00:00 100%");
    }

    #[test]
    fn other_fields_are_not_known() {
        assert_eq!((at(0, "%Q"), at(0, "%")), (None, None));
    }
}
