//! What a request is known by.

use std::fmt;
use std::net::IpAddr;

use http::header::{COOKIE, SET_COOKIE};
use http::{HeaderMap, HeaderName};
use kvgate_core::Request;

/// Where a key stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    ClientIp,
    Header(HeaderName),
    /// The cookie's name.
    Cookie(String),
    /// The parameter's name, as written in queries.
    Query(String),
}

impl Source {
    /// From the keys of the table; what is wrong with `name`.
    pub fn new(by: &str, name: Option<&str>) -> Result<Self, String> {
        let needed = || format!("is missing: by = \"{by}\" needs it");
        match (by, name) {
            ("header", name) => HeaderName::try_from(name.ok_or_else(needed)?)
                .map(Self::Header)
                .map_err(|_| "is not a header's name".into()),
            ("cookie", name) => {
                let name = name.ok_or_else(needed)?;
                // RFC 6265 section 4.1.1: a token, as a header's name is
                let sound = HeaderName::try_from(name).is_ok();
                sound.then(|| Self::Cookie(name.to_owned())).ok_or_else(|| "is not a cookie's name".into())
            }
            ("query", name) => {
                let name = name.ok_or_else(needed)?;
                let sound = !name.contains(['&', '=', '#', ' ']);
                sound.then(|| Self::Query(name.to_owned())).ok_or_else(|| "is not a parameter's name".into())
            }
            (_, None) => Ok(Self::ClientIp),
            (_, Some(_)) => Err(format!("says nothing: by = \"{by}\" has no name")),
        }
    }

    /// The key of a request, not empty.
    pub fn of(&self, request: &Request) -> Option<Vec<u8>> {
        let key = match self {
            Self::ClientIp => match request.client?.to_canonical() {
                IpAddr::V4(v4) => v4.octets().to_vec(),
                IpAddr::V6(v6) => v6.octets().to_vec(),
            },
            Self::Header(name) => request.headers.get(name)?.as_bytes().to_vec(),
            Self::Cookie(name) => {
                let lines = request.headers.get_all(COOKIE).iter();
                let mut cookies = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
                cookies.find_map(|pair| cookie(pair, name))?
            }
            Self::Query(name) => {
                let mut pairs = request.query.as_deref()?.split('&').filter_map(|pair| pair.split_once('='));
                pairs.find(|(key, _)| key == name)?.1.as_bytes().to_vec()
            }
        };
        (!key.is_empty()).then_some(key)
    }

    /// The key that an answer gives its client.
    pub fn learned(&self, headers: &HeaderMap) -> Option<Vec<u8>> {
        let key = match self {
            Self::Header(name) => headers.get(name)?.as_bytes().to_vec(),
            Self::Cookie(name) => {
                let mut set = headers.get_all(SET_COOKIE).iter();
                set.find_map(|line| cookie(line.as_bytes().split(|byte| *byte == b';').next()?, name))?
            }
            Self::ClientIp | Self::Query(_) => return None,
        };
        (!key.is_empty()).then_some(key)
    }
}

/// The value of `name=value`, if the name is this one.
fn cookie(pair: &[u8], name: &str) -> Option<Vec<u8>> {
    let value = pair.trim_ascii().strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
    Some(value.trim_ascii().to_vec())
}

/// As it tells one table of bindings from another.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClientIp => f.write_str("client-ip"),
            Self::Header(name) => write!(f, "header {name}"),
            Self::Cookie(name) => write!(f, "cookie {name}"),
            Self::Query(name) => write!(f, "query {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(source: &Source, headers: &[(&str, &str)], query: Option<&str>) -> Option<String> {
        let mut request = Request { query: query.map(str::to_owned), ..Request::default() };
        for (name, value) in headers {
            request.headers.append(HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        source.of(&request).map(|key| String::from_utf8(key).unwrap())
    }

    #[test]
    fn keys_are_found_where_they_stand_and_nowhere_else() {
        let header = Source::new("header", Some("X-Session")).unwrap();
        assert_eq!(key(&header, &[("x-session", "7")], None).as_deref(), Some("7"));
        assert_eq!(key(&header, &[("x-session", "")], None), None);
        assert_eq!(key(&header, &[("x-session-id", "7")], None), None);
        let cookie = Source::new("cookie", Some("sid")).unwrap();
        assert_eq!(
            key(&cookie, &[("cookie", "xsid=1; sid = 2"), ("cookie", "a=b;sid=3")], None).as_deref(),
            Some("3")
        );
        assert_eq!(key(&cookie, &[("cookie", "sid; sidx=1; SID=2")], None), None);
        let query = Source::new("query", Some("s")).unwrap();
        assert_eq!(key(&query, &[], Some("a=1&ss=2&s=3=4&s=5")).as_deref(), Some("3=4"));
        assert_eq!(key(&query, &[], Some("s")), None);
        assert_eq!(key(&query, &[], None), None);
    }

    #[test]
    fn addresses_are_one_in_both_their_forms() {
        let of = |address: &str| {
            Source::ClientIp.of(&Request { client: address.parse().ok(), ..Request::default() })
        };
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.2"), of("10.0.0.1"));
        assert_eq!(of("?"), None);
    }

    #[test]
    fn answers_set_headers_and_cookies() {
        let mut headers = HeaderMap::new();
        headers.insert("mcp-session-id", "m".parse().unwrap());
        headers.append(SET_COOKIE, "other=1; sid=2".parse().unwrap());
        headers.append(SET_COOKIE, "sid=3; Path=/; HttpOnly".parse().unwrap());
        let learned = |by, name| Source::new(by, Some(name)).unwrap().learned(&headers);
        assert_eq!(learned("header", "Mcp-Session-Id").unwrap(), b"m");
        assert_eq!(learned("cookie", "sid").unwrap(), b"3");
        assert_eq!(learned("query", "sid"), None);
    }

    #[test]
    fn names_that_say_nothing_or_are_missing_are_told() {
        for (by, name) in [
            ("header", None),
            ("header", Some("a b")),
            ("cookie", None),
            ("cookie", Some("a=b")),
            ("query", None),
            ("query", Some("a&b")),
            ("client-ip", Some("x")),
        ] {
            assert!(Source::new(by, name).is_err(), "{by} {name:?}");
        }
    }
}
