//! Engines that ask to be left alone for a while.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode, header};
use pingora_http::ResponseHeader;

/// How long an engine asks to be left alone: it answers 429 or 503 with a `Retry-After` that can be read.
pub fn busy(head: &ResponseHeader) -> Option<Duration> {
    let refuses = matches!(head.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    refuses.then(|| retry_after(&head.headers, SystemTime::now())).flatten()
}

/// The only `Retry-After`: seconds, or a date in any form of RFC 9110 section 5.6.7; one that is past is now.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let mut all = headers.get_all(header::RETRY_AFTER).iter();
    let (Some(value), None) = (all.next(), all.next()) else { return None };
    let text = value.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        // more than fits is as good as for ever
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::from(u32::MAX))));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

/// A time as `Retry-After` has it: whole seconds, rounded up.
pub fn seconds(time: Duration) -> u64 {
    time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(values: &[&str]) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::RETRY_AFTER, value.parse().unwrap());
        }
        // one second before the date below
        retry_after(&headers, SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_776))
    }

    #[test]
    fn seconds_and_dates_are_read_and_nothing_else() {
        let seconds = |n| Some(Duration::from_secs(n));
        for (value, wait) in [
            ("0", seconds(0)),
            ("120", seconds(120)),
            (" 7 ", seconds(7)),
            ("99999999999999999999999", seconds(u64::from(u32::MAX))),
            ("Sun, 06 Nov 1994 08:49:37 GMT", seconds(1)),
            ("Sunday, 06-Nov-94 08:49:37 GMT", seconds(1)),
            ("Sun Nov  6 08:49:37 1994", seconds(1)),
            ("Sun, 06 Nov 1994 08:49:30 GMT", seconds(0)),
            ("", None),
            ("-1", None),
            ("1.5", None),
            ("soon", None),
            ("5, 6", None),
        ] {
            assert_eq!(after(&[value]), wait, "{value:?}");
        }
        assert_eq!(after(&[]), None);
        assert_eq!(after(&["5", "6"]), None);
    }

    #[test]
    fn only_two_statuses_say_so() {
        for (status, is_busy) in
            [(429, true), (503, true), (500, false), (502, false), (200, false), (301, false)]
        {
            let mut head = ResponseHeader::build(status, None).unwrap();
            assert_eq!(busy(&head), None);
            head.insert_header(header::RETRY_AFTER, "7").unwrap();
            assert_eq!(busy(&head).is_some(), is_busy, "{status}");
        }
    }

    #[test]
    fn part_of_a_second_is_a_second() {
        assert_eq!(seconds(Duration::ZERO), 0);
        assert_eq!(seconds(Duration::from_millis(1)), 1);
        assert_eq!(seconds(Duration::from_secs(3)), 3);
    }
}
