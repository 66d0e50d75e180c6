//! Which bytes may stand where.

/// A character of a token (RFC 9110 section 5.6.2).
pub(super) fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// A character of a method: registered ones are upper case, and readers differ on whether `get` is GET.
pub(super) fn is_method(byte: u8) -> bool {
    byte.is_ascii_uppercase() || matches!(byte, b'-' | b'_')
}

/// A byte of a field value (RFC 9110 section 5.5).
pub(super) fn is_value(byte: u8) -> bool {
    matches!(byte, b'\t' | b' '..=b'~' | 0x80..)
}

/// A character of a request target: visible ASCII, but for what no URI holds even where browsers are lax, and for the
/// backslash, which some readers take for a slash.
pub(super) fn is_target(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'<' | b'>' | b'#' | b'\\')
}

/// Whether it is `host` or `host:port` (RFC 3986 section 3.2.2) of a name as DNS has them, underscores included, or of
/// an IP address.
pub(super) fn is_authority(text: &[u8]) -> bool {
    let (host, port) = match text.strip_prefix(b"[") {
        Some(rest) => match rest.iter().position(|b| *b == b']') {
            Some(end) => {
                let (address, port) = rest.split_at(end);
                let good = !address.is_empty()
                    && address.iter().all(|b| b.is_ascii_hexdigit() || matches!(b, b':' | b'.'));
                (good, port.strip_prefix(b"]").unwrap_or_default())
            }
            None => return false,
        },
        None => {
            let (name, port) = text.split_at(text.iter().position(|b| *b == b':').unwrap_or(text.len()));
            let good = !name.is_empty()
                && name.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~'));
            (good, port)
        }
    };
    let port = match port {
        [] => true,
        [b':', digits @ ..] => (1..=5).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    host && port
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities() {
        for good in
            ["a", "a.example:80", "127.0.0.1:8080", "[::1]", "[2001:db8::1]:443", "my_service", "A-b~c"]
        {
            assert!(is_authority(good.as_bytes()), "{good}");
        }
        for bad in [
            "", ":80", "a:", "a:b", "a:123456", "a b", "a,b", "a/b", "u@a", "[::1", "[]", "[::1]x", "::1",
            "a%41", "a:80:90", "a\u{e9}",
        ] {
            assert!(!is_authority(bad.as_bytes()), "{bad}");
        }
    }
}
