//! Request targets (RFC 9112 section 3.2).

use std::ops::Range;

use super::chars::is_authority;

/// Looks at a target whose characters may all stand in one. Returns where its authority is, if it has one.
pub(super) fn authority(method: &[u8], target: &[u8]) -> Result<Option<Range<usize>>, &'static str> {
    escapes(target)?;
    match target {
        [b'/', ..] => path(target).map(|()| None),
        b"*" if method == b"OPTIONS" => Ok(None),
        _ => {
            let start = [&b"http://"[..], b"https://"]
                .iter()
                .find(|scheme| {
                    target.get(..scheme.len()).is_some_and(|named| named.eq_ignore_ascii_case(scheme))
                })
                .map(|scheme| scheme.len())
                .ok_or("the request target has no form that a request may have")?;
            let rest = target.get(start..).unwrap_or_default();
            let end = start + rest.iter().position(|b| matches!(b, b'/' | b'?')).unwrap_or(rest.len());
            path(target.get(end..).unwrap_or_default())?;
            match target.get(start..end) {
                Some(authority) if is_authority(authority) => Ok(Some(start..end)),
                _ => Err("the request target's authority is no host and port"),
            }
        }
    }
}

/// Browsers leave a backtick in a query as it is; in a path it is escaped, and `http::Uri` does not take it.
fn path(target: &[u8]) -> Result<(), &'static str> {
    let path = target.split(|b| *b == b'?').next().unwrap_or_default();
    if path.contains(&b'`') { Err("a backtick in the request target's path") } else { Ok(()) }
}

/// Every `%` stands before two hexadecimal digits, and none of them is a NUL.
fn escapes(target: &[u8]) -> Result<(), &'static str> {
    let mut rest = target;
    while let Some(at) = rest.iter().position(|b| *b == b'%') {
        match rest.get(at + 1..at + 3) {
            Some(b"00") => return Err("NUL in the request target"),
            Some(digits) if digits.iter().all(u8::is_ascii_hexdigit) => {}
            _ => return Err("a percent sign in the request target escapes nothing"),
        }
        rest = rest.get(at + 3..).unwrap_or_default();
    }
    Ok(())
}
