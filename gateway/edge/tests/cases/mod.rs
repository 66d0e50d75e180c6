//! HTTP/1 as it may come, and what must become of it: a table for every test that shows it to something.

/// Bytes of one connection.
pub struct Case {
    pub name: String,
    pub bytes: Vec<u8>,
    /// What passes, in order: method, target and body.
    pub passes: Vec<String>,
    /// What the rest is answered; `None`: there is no rest.
    pub then: Option<u16>,
}

/// Passes as exactly these requests.
fn good(name: &str, bytes: impl AsRef<[u8]>, passes: &[&str]) -> Case {
    Case {
        name: name.into(),
        bytes: bytes.as_ref().into(),
        passes: passes.iter().map(|s| (*s).into()).collect(),
        then: None,
    }
}

/// Is refused.
fn refused(name: impl Into<String>, bytes: impl AsRef<[u8]>, status: u16) -> Case {
    Case { name: name.into(), bytes: bytes.as_ref().into(), passes: Vec::new(), then: Some(status) }
}

fn bad(name: impl Into<String>, bytes: impl AsRef<[u8]>) -> Case {
    refused(name, bytes, 400)
}

/// A GET with these fields after Host.
fn fields(text: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: a\r\n{text}\r\n")
}

/// A POST of chunks.
fn chunked(body: &str) -> String {
    format!("POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{body}")
}

fn target(target: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")
}

fn host(host: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")
}

pub mod play;

pub fn all() -> Vec<Case> {
    let mut all = plain();
    all.extend(bodies());
    all.extend(sequences());
    all.extend(lines());
    all.extend(names_and_values());
    all.extend(targets());
    all.extend(lengths_and_codings());
    all.extend(chunks());
    all.extend(sizes());
    all
}

/// What must not be refused.
fn plain() -> Vec<Case> {
    let get = &["GET / "];
    vec![
        good("a plain request", fields(""), get),
        good("names in any case", "GET / HTTP/1.1\r\nhOsT: a\r\nACCEPT: b\r\n\r\n", get),
        good("an empty value", fields("X-A:\r\n"), get),
        good("a value of spaces", fields("X-A: \t \r\n"), get),
        good("no space before a value", fields("X-A:b\r\n"), get),
        good("much space round a value", fields("X-A: \t b\t \r\n"), get),
        good("a tab in a value", fields("X-A: b\tc\r\n"), get),
        good("Latin in a value", b"GET / HTTP/1.1\r\nHost: a\r\nX-A: \xe9\xff\r\n\r\n", get),
        good("colons and commas in a value", fields("X-A: b:c, d: e\r\n"), get),
        good("a name of every token character", fields("x!#$%&'*+-.^`|~9Z: b\r\n"), get),
        good("a field twice", fields("X-A: b\r\nX-A: c\r\n"), get),
        good("an upgrade that nobody offers", fields("Connection: Upgrade\r\nUpgrade: h2c\r\n"), get),
        good("an empty line before the request", format!("\r\n{}", fields("")), get),
        good("HTTP/1.0", "GET / HTTP/1.0\r\nHost: a\r\n\r\n", get),
        good("HTTP/1.0 without Host", "GET / HTTP/1.0\r\n\r\n", get),
        good("a host with a port", host("a.example:8080"), get),
        good("a host that is an address", host("127.0.0.1"), get),
        good("a host that is an IPv6 address", host("[::1]:80"), get),
        good("a host with an underscore", host("my_service"), get),
        good("a host in capitals", host("A.EXAMPLE"), get),
        good("spaces round a host", host(" \ta \t"), get),
        good("a query", target("/a?b=c&d=%20e"), &["GET /a?b=c&d=%20e "]),
        good("a query as browsers send it", target("/a?b={c}|[d]^`e"), &["GET /a?b={c}|[d]^`e "]),
        good("slashes and dots", target("/a//b/../c/./%7E;d"), &["GET /a//b/../c/./%7E;d "]),
        good("the server itself", "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", &["OPTIONS * "]),
        good("absolute form", target("http://a/b?c"), &["GET /b?c "]),
        good("absolute form, a scheme in capitals", target("HTTP://a/b"), &["GET /b "]),
        good("absolute form without a path", target("http://a"), &["GET / "]),
        good("absolute form with a port", "GET http://a:81/b HTTP/1.1\r\nHost: a:81\r\n\r\n", &["GET /b "]),
        good("another method", "PURGE /x HTTP/1.1\r\nHost: a\r\n\r\n", &["PURGE /x "]),
        good("a method with a dash", "M-SEARCH /x HTTP/1.1\r\nHost: a\r\n\r\n", &["M-SEARCH /x "]),
        good("HEAD", "HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n", &["HEAD /x "]),
    ]
}

fn bodies() -> Vec<Case> {
    let post = |fields: &str, body: &str| format!("POST /p HTTP/1.1\r\nHost: a\r\n{fields}\r\n{body}");
    let c = |passes: &[&str], name: &str, body: &str| good(name, chunked(body), passes);
    vec![
        good("a body", post("Content-Length: 5\r\n", "hello"), &["POST /p hello"]),
        good("a body in HTTP/1.0", "POST /p HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi", &["POST /p hi"]),
        good("no body", post("Content-Length: 0\r\n", ""), &["POST /p "]),
        good("a length with zeros before it", post("Content-Length: 005\r\n", "hello"), &["POST /p hello"]),
        good("spaces round a length", post("Content-Length:\t 5 \r\n", "hello"), &["POST /p hello"]),
        good("a GET with a body", "GET /g HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx", &["GET /g x"]),
        good(
            "a DELETE with a body",
            "DELETE /g HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx",
            &["DELETE /g x"],
        ),
        good(
            "a body that looks like a request",
            post("Content-Length: 34\r\n", "GET /evil HTTP/1.1\r\nHost: evil\r\n\r\n"),
            &["POST /p GET /evil HTTP/1.1\r\nHost: evil\r\n\r\n"],
        ),
        good(
            "a coding in capitals",
            "POST /c HTTP/1.1\r\nHost: a\r\ntransfer-encoding:  CHUNKED \r\n\r\n1\r\nx\r\n0\r\n\r\n",
            &["POST /c x"],
        ),
        c(&["POST /c hello"], "a chunk", "5\r\nhello\r\n0\r\n\r\n"),
        c(&["POST /c "], "no chunks", "0\r\n\r\n"),
        c(&["POST /c hello"], "several chunks", "2\r\nhe\r\n1\r\nl\r\n2\r\nlo\r\n0\r\n\r\n"),
        c(&["POST /c 0123456789"], "a size in lower case", "a\r\n0123456789\r\n0\r\n\r\n"),
        c(&["POST /c 0123456789"], "a size in upper case", "A\r\n0123456789\r\n0\r\n\r\n"),
        c(&["POST /c hello"], "sizes with zeros before them", "00000005\r\nhello\r\n000\r\n\r\n"),
        c(&["POST /c \r\n0\r\n\r\n"], "a chunk that looks like the end", "7\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n"),
        c(&["POST /c x"], "an extension", "1;a\r\nx\r\n0\r\n\r\n"),
        c(&["POST /c x"], "an extension with a value", "1;a=b\r\nx\r\n0\r\n\r\n"),
        c(&["POST /c x"], "an extension with a quoted value", "1;a=\"b ;,=\\\"c\"\r\nx\r\n0\r\n\r\n"),
        c(&["POST /c x"], "several extensions", "1;a=b;c;d=\"\"\r\nx\r\n0;e\r\n\r\n"),
        c(&["POST /c x"], "a trailer", "1\r\nx\r\n0\r\nX-T: 1\r\n\r\n"),
        c(&["POST /c x"], "several trailers", "1\r\nx\r\n0\r\nX-T: 1\r\nX-U:\r\nx-v: \t2 \r\n\r\n"),
    ]
}

fn sequences() -> Vec<Case> {
    let get = |path: &str, more: &str| format!("GET {path} HTTP/1.1\r\nHost: a\r\n{more}\r\n");
    let (one, two, three) = (get("/1", ""), get("/2", ""), get("/3", ""));
    let evil =
        "POST /evil HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    let then = |mut case: Case, status| {
        case.then = Some(status);
        case
    };
    vec![
        good("two requests", format!("{one}{two}"), &["GET /1 ", "GET /2 "]),
        good("three requests", format!("{one}{two}{three}"), &["GET /1 ", "GET /2 ", "GET /3 "]),
        good(
            "a body, and a request",
            format!("POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc{two}"),
            &["POST /p abc", "GET /2 "],
        ),
        good(
            "chunks, and a request",
            format!("{}{two}", chunked("1\r\nx\r\n0\r\n\r\n")),
            &["POST /c x", "GET /2 "],
        ),
        good(
            "chunks and a trailer, and a request",
            format!("{}{two}", chunked("1\r\nx\r\n0\r\nX-T: 1\r\n\r\n")),
            &["POST /c x", "GET /2 "],
        ),
        good("an empty line between requests", format!("{one}\r\n{two}"), &["GET /1 ", "GET /2 "]),
        good(
            "HTTP/1.0 that is kept alive",
            format!("GET /1 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n{two}"),
            &["GET /1 ", "GET /2 "],
        ),
        good(
            "a request after the last",
            format!("{}{two}", get("/1", "Connection: close\r\n")),
            &["GET /1 "],
        ),
        good("a request after HTTP/1.0", format!("GET /1 HTTP/1.0\r\n\r\n{two}"), &["GET /1 "]),
        good(
            "rubbish after the last",
            format!("{}\0\x01rubbish", get("/1", "Connection: close\r\n")),
            &["GET /1 "],
        ),
        then(good("a request, and a bad one", format!("{one}{evil}"), &["GET /1 "]), 400),
        then(good("a request, and rubbish", format!("{one}\x01"), &["GET /1 "]), 400),
        then(
            good(
                "a body longer than its length",
                "POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabcdef\r\n",
                &["POST /p abc"],
            ),
            400,
        ),
        then(
            good(
                "a zero-length body, and some",
                "POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n0\r\n\r\n",
                &["POST /p "],
            ),
            400,
        ),
        then(
            good("a body without a length", "POST /p HTTP/1.1\r\nHost: a\r\n\r\n{\"a\":1}", &["POST /p "]),
            400,
        ),
        then(
            good("chunks, and more", chunked("1\r\nx\r\n0\r\n\r\n1\r\ny\r\n0\r\n\r\n"), &["POST /c x"]),
            400,
        ),
        bad("two empty lines before a request", format!("\r\n\r\n{one}")),
    ]
}

fn lines() -> Vec<Case> {
    vec![
        bad("HTTP/0.9", "GET /\r\n\r\n"),
        bad("HTTP/0.9 with LF", "GET /\n"),
        bad("HTTP/1.2", "GET / HTTP/1.2\r\nHost: a\r\n\r\n"),
        bad("HTTP/2.0", "GET / HTTP/2.0\r\nHost: a\r\n\r\n"),
        bad("the preface of HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        bad("HTTP/1.11", "GET / HTTP/1.11\r\nHost: a\r\n\r\n"),
        bad("HTTP/1", "GET / HTTP/1\r\nHost: a\r\n\r\n"),
        bad("HTTP/01.1", "GET / HTTP/01.1\r\nHost: a\r\n\r\n"),
        bad("http/1.1", "GET / http/1.1\r\nHost: a\r\n\r\n"),
        bad("HTTPS/1.1", "GET / HTTPS/1.1\r\nHost: a\r\n\r\n"),
        bad("no slash in the version", "GET / HTTP1.1\r\nHost: a\r\n\r\n"),
        bad("a space after the version", "GET / HTTP/1.1 \r\nHost: a\r\n\r\n"),
        bad("two spaces before the version", "GET /  HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("two spaces before the target", "GET  / HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("a tab before the target", "GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("a tab before the version", "GET /\tHTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("no target", "GET HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("an empty target", "GET  HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("no method", " / HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("a method in small letters", "get / HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("a method with a colon", "GET: / HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("a method with a slash", "GE/T / HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("a method with a NUL", "GE\0T / HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("a very long method", format!("{} / HTTP/1.1\r\nHost: a\r\n\r\n", "G".repeat(25))),
        bad("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        bad("a PROXY header", "PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n"),
        bad("JSON", "{\"model\": \"a\"}"),
        bad("LF after the request line", "GET / HTTP/1.1\nHost: a\r\n\r\n"),
        bad("LF after a field", "GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n"),
        bad("LF at the end of a head", "GET / HTTP/1.1\r\nHost: a\r\n\n"),
        bad("LF only", "GET / HTTP/1.1\nHost: a\n\n"),
        bad("LF before a request", "\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("CR before a request", "\rGET / HTTP/1.1\r\nHost: a\r\n\r\n"),
        bad("CR inside a value", fields("X: a\rb\r\n")),
        bad("CR CR LF after a value", fields("X: a\r\r\n")),
        bad("CR CR LF at the end", "GET / HTTP/1.1\r\nHost: a\r\n\r\r\n"),
        bad("CR after the request line", "GET / HTTP/1.1\rHost: a\r\n\r\n"),
        bad("a field hidden behind CR", fields("X: a\rTransfer-Encoding: chunked\r\n")),
        bad("a folded line", fields("X: a\r\n b\r\n")),
        bad("a line folded by a tab", fields("X: a\r\n\tb\r\n")),
        bad("a folded length", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n 5\r\n\r\nhello"),
        bad("a space before the first field", "GET / HTTP/1.1\r\n Host: a\r\n\r\n"),
        bad("a line without a colon", fields("X\r\n")),
        bad("a line without a name", fields(": a\r\n")),
        bad("a space before a colon", fields("X : a\r\n")),
        bad("a tab before a colon", fields("X\t: a\r\n")),
        bad(
            "a space before the colon of a length",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 1\r\n\r\nx",
        ),
        bad(
            "a space before the colon of a coding",
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        ),
        bad("a space in a name", fields("X Y: a\r\n")),
        refused("CONNECT", "CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", 405),
    ]
}

fn names_and_values() -> Vec<Case> {
    let mut cases = vec![
        bad("an underscore in a name", fields("X_A: b\r\n")),
        bad("Content_Length", fields("Content_Length: 5\r\n")),
        bad("Transfer_Encoding", fields("Transfer_Encoding: chunked\r\n")),
        bad("no Host", "GET / HTTP/1.1\r\n\r\n"),
        bad("no Host, another field", "GET / HTTP/1.1\r\nX: a\r\n\r\n"),
        bad("two Hosts", "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
        bad("the same Host twice", "GET / HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n"),
        bad("two Hosts in HTTP/1.0", "GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n"),
        bad("a name that is not ASCII", b"GET / HTTP/1.1\r\nHost: a\r\nX\xe9: b\r\n\r\n"),
        bad("a bad Host in HTTP/1.0", "GET / HTTP/1.0\r\nHost: a b\r\n\r\n"),
    ];
    for (name, value) in [
        ("an empty Host", ""),
        ("a list of Hosts", "a, b"),
        ("a Host with a path", "a/b"),
        ("a Host with a user", "u@a"),
        ("a Host with a query", "a?b"),
        ("a Host with a fragment", "a#b"),
        ("a Host with a space", "a b"),
        ("a Host with a scheme", "http://a"),
        ("a Host with an empty port", "a:"),
        ("a Host with two ports", "a:80:90"),
        ("a Host with a port that is none", "a:b"),
        ("a Host with a port too long", "a:123456"),
        ("a Host without a name", ":80"),
        ("a Host with an escape", "%61"),
        ("a Host with half an IPv6 address", "[::1"),
        ("a Host with a bare IPv6 address", "::1"),
        ("a Host with a backslash", "a\\b"),
        ("a Host in quotes", "\"a\""),
    ] {
        cases.push(bad(name, host(value)));
    }
    for byte in (0..0x20).chain([0x7f]).filter(|b| !matches!(b, b'\t' | b'\r' | b'\n')) {
        let mut bytes = fields("X: a?b\r\n").into_bytes();
        let at = bytes.iter().position(|b| *b == b'?').unwrap_or_default();
        bytes[at] = byte;
        cases.push(bad(format!("control {byte:#04x} in a value"), bytes));
    }
    for byte in (0..0x20).chain([0x7f]).chain(*b"\"(),/;<=>?@[]\\{}") {
        let mut bytes = fields("X!Y: a\r\n").into_bytes();
        let at = bytes.iter().position(|b| *b == b'!').unwrap_or_default();
        bytes[at] = byte;
        cases.push(bad(format!("{byte:#04x} in a name"), bytes));
    }
    cases
}

fn targets() -> Vec<Case> {
    let mut cases = vec![
        bad("the server itself, by GET", target("*")),
        bad("a target without a slash", target("a/b")),
        bad("a target of a port", target("a:80")),
        bad("a target that is a query", target("?a")),
        bad("another scheme", target("ftp://a/b")),
        bad("a scheme without an authority", target("http:/b")),
        bad("an empty authority", target("http:///b")),
        bad("another authority than Host", target("http://b/c")),
        bad("another port than Host", target("http://a:80/c")),
        bad("an authority in other letters than Host", target("http://A/c")),
        bad("an authority with a user", target("http://u@a/c")),
        bad("an authority with a user and a password", target("http://u:p@a/c")),
        bad("an absolute form without Host", "GET http://a/ HTTP/1.1\r\n\r\n"),
        bad("NUL, escaped", target("/a%00b")),
        bad("an escape that ends too soon", target("/a%2")),
        bad("a percent sign alone", target("/a%")),
        bad("an escape that is none", target("/a%zz")),
        bad("a fragment", target("/a#b")),
        bad("a backtick in the path", target("/a`b?c")),
        bad("a backtick in the path, absolute form", target("http://a/b`")),
        bad("a target that is not ASCII", b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n"),
    ];
    for byte in (0..0x20).chain([0x7f, 0x80, 0xff]).chain(*b"\"<>\\") {
        let mut bytes = target("/a!b").into_bytes();
        let at = bytes.iter().position(|b| *b == b'!').unwrap_or_default();
        bytes[at] = byte;
        cases.push(bad(format!("{byte:#04x} in a target"), bytes));
    }
    cases
}

fn lengths_and_codings() -> Vec<Case> {
    let post = |fields: &str| format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n\r\n0\r\n\r\n");
    let mut cases = Vec::new();
    for (name, text) in [
        ("a length and a coding", "Content-Length: 5\r\nTransfer-Encoding: chunked"),
        ("a coding and a length", "Transfer-Encoding: chunked\r\nContent-Length: 5"),
        ("a length of nothing, and a coding", "Content-Length: 0\r\nTransfer-Encoding: chunked"),
        ("two lengths", "Content-Length: 5\r\nContent-Length: 6"),
        ("the same length twice", "Content-Length: 5\r\nContent-Length: 5"),
        ("a list of lengths", "Content-Length: 5, 5"),
        ("a length with a plus", "Content-Length: +5"),
        ("a length with a minus", "Content-Length: -5"),
        ("a length of minus nothing", "Content-Length: -0"),
        ("a length in hexadecimal", "Content-Length: 0x5"),
        ("a length with a fraction", "Content-Length: 5.0"),
        ("a length with an exponent", "Content-Length: 1e1"),
        ("a length with an underscore", "Content-Length: 1_0"),
        ("a length with a space", "Content-Length: 5 5"),
        ("an empty length", "Content-Length:"),
        ("a length that is a word", "Content-Length: five"),
        ("a length of 20 digits", "Content-Length: 18446744073709551621"),
        ("a very long length", "Content-Length: 000000000000000000000000000005"),
        ("a length in other digits", "Content-Length: \u{ff15}"),
        ("a length in quotes", "Content-Length: \"5\""),
        ("two codings", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
        ("a coding and another", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity"),
        ("a list of codings", "Transfer-Encoding: gzip, chunked"),
        ("chunked, then gzip", "Transfer-Encoding: chunked, gzip"),
        ("chunked twice in a list", "Transfer-Encoding: chunked, chunked"),
        ("chunked with a comma", "Transfer-Encoding: chunked,"),
        ("chunked after a comma", "Transfer-Encoding: , chunked"),
        ("chunked with a parameter", "Transfer-Encoding: chunked;q=1"),
        ("chunked in quotes", "Transfer-Encoding: \"chunked\""),
        ("xchunked", "Transfer-Encoding: xchunked"),
        ("chunkedx", "Transfer-Encoding: chunkedx"),
        ("chunked with a word before it", "Transfer-Encoding: x chunked"),
        ("identity", "Transfer-Encoding: identity"),
        ("gzip", "Transfer-Encoding: gzip"),
        ("an empty coding", "Transfer-Encoding:"),
        ("a coding with a vertical tab", "Transfer-Encoding: \u{b}chunked"),
        ("a coding behind a NUL", "Transfer-Encoding: \0chunked"),
    ] {
        cases.push(bad(name, post(text)));
    }
    cases.push(bad(
        "a coding in HTTP/1.0",
        "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ));
    cases
}

fn chunks() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, body) in [
        ("an empty size", "\r\nx\r\n0\r\n\r\n"),
        ("an empty size that looks like the end", "\r\n\r\n"),
        ("an empty size after a chunk", "1\r\nx\r\n\r\n\r\n"),
        ("a size of nine digits", "000000001\r\nx\r\n0\r\n\r\n"),
        ("a size beyond 64 bits", "10000000000000001\r\nx\r\n0\r\n\r\n"),
        ("a negative size", "-1\r\nx\r\n0\r\n\r\n"),
        ("a size with a plus", "+1\r\nx\r\n0\r\n\r\n"),
        ("a size with 0x", "0x1\r\nx\r\n0\r\n\r\n"),
        ("a size that is no number", "g\r\nx\r\n0\r\n\r\n"),
        ("a size with an underscore", "1_0\r\nx\r\n0\r\n\r\n"),
        ("a space before a size", " 1\r\nx\r\n0\r\n\r\n"),
        ("a space after a size", "1 \r\nx\r\n0\r\n\r\n"),
        ("a tab after a size", "1\t\r\nx\r\n0\r\n\r\n"),
        ("LF after a size", "1\nx\r\n0\r\n\r\n"),
        ("CR only after a size", "1\rx\r\n0\r\n\r\n"),
        ("LF after a chunk", "1\r\nx\n0\r\n\r\n"),
        ("nothing after a chunk", "1\r\nx0\r\n\r\n"),
        ("a chunk longer than its size", "1\r\nxy\r\n0\r\n\r\n"),
        ("CR CR LF after a chunk", "1\r\nx\r\r\n0\r\n\r\n"),
        ("LF after the last size", "1\r\nx\r\n0\n\r\n"),
        ("LF at the end", "1\r\nx\r\n0\r\n\n"),
        ("CR only at the end", "1\r\nx\r\n0\r\n\rx"),
        ("an extension that is empty", "1;\r\nx\r\n0\r\n\r\n"),
        ("an extension without a name", "1;=a\r\nx\r\n0\r\n\r\n"),
        ("an extension without its value", "1;a=\r\nx\r\n0\r\n\r\n"),
        ("a space in an extension", "1; a\r\nx\r\n0\r\n\r\n"),
        ("LF in an extension", "1;a\nx\r\n0\r\n\r\n"),
        ("LF in a quoted extension", "1;a=\"\n\"\r\nx\r\n0\r\n\r\n"),
        ("NUL in an extension", "1;a\0\r\nx\r\n0\r\n\r\n"),
        ("CR in an extension", "1;a\rb\r\nx\r\n0\r\n\r\n"),
        ("a quoted extension, and more", "1;a=\"b\"c\r\nx\r\n0\r\n\r\n"),
        ("a trailer without a colon", "1\r\nx\r\n0\r\nX\r\n\r\n"),
        ("a trailer without a name", "1\r\nx\r\n0\r\n: a\r\n\r\n"),
        ("a trailer with a space before its colon", "1\r\nx\r\n0\r\nX : a\r\n\r\n"),
        ("a folded trailer", "1\r\nx\r\n0\r\nX: a\r\n b\r\n\r\n"),
        ("a trailer that ends with LF", "1\r\nx\r\n0\r\nX: a\n\r\n"),
        ("a trailer with an underscore", "1\r\nx\r\n0\r\nX_A: a\r\n\r\n"),
        ("NUL in a trailer", "1\r\nx\r\n0\r\nX: \0\r\n\r\n"),
        ("CR in a trailer", "1\r\nx\r\n0\r\nX: a\rb\r\n\r\n"),
        ("a length in the trailers", "1\r\nx\r\n0\r\nContent-Length: 5\r\n\r\n"),
        ("a coding in the trailers", "1\r\nx\r\n0\r\nTRANSFER-ENCODING: chunked\r\n\r\n"),
        ("Host in the trailers", "1\r\nx\r\n0\r\nhost: b\r\n\r\n"),
        ("credentials in the trailers", "1\r\nx\r\n0\r\nAuthorization: b\r\n\r\n"),
        ("a request in the place of the trailers", "0\r\nGET /evil HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("a request after LF", "0\r\n\nGET /evil HTTP/1.1\r\nHost: a\r\n\r\n"),
    ] {
        cases.push(bad(name, chunked(body)));
    }
    cases.push(bad("an endless extension", chunked(&format!("1;{}\r\nx\r\n0\r\n\r\n", "a".repeat(9000)))));
    cases.push(bad("endless trailers", chunked(&format!("0\r\nX: {}\r\n\r\n", "a".repeat(9000)))));
    cases.push(bad("very many trailers", chunked(&format!("0\r\n{}\r\n", "X:\r\n".repeat(129)))));
    cases
}

/// With the limits as they are by default.
fn sizes() -> Vec<Case> {
    let long = |n: usize| format!("/{}", "a".repeat(n - 1));
    let many = |n: usize| fields(&"X: a\r\n".repeat(n - 1));
    let large = |n: usize| {
        let empty = fields("X: \r\n").len();
        fields(&format!("X: {}\r\n", "a".repeat(n - empty)))
    };
    let fits = format!("GET {} ", long(8192));
    vec![
        good("the longest target", target(&long(8192)), &[&fits]),
        refused("a target too long", target(&long(8193)), 414),
        refused("a target far too long", target(&long(40_000)), 414),
        refused("a target without an end", format!("GET {}", long(9000)), 414),
        good("the most fields", many(128), &["GET / "]),
        refused("a field too many", many(129), 431),
        refused("very many fields", many(5000), 431),
        good("the largest head", large(65_536), &["GET / "]),
        refused("a head too large", large(65_537), 431),
        refused("a head far too large", large(300_000), 431),
        refused("a name without an end", format!("GET / HTTP/1.1\r\n{}", "a".repeat(70_000)), 431),
    ]
}

/// Where a case may be cut: nowhere, everywhere, and inside the line ends. Long ones are not sent byte by byte.
pub fn splits(bytes: &[u8]) -> Vec<Vec<usize>> {
    let inside = bytes.windows(2).enumerate().filter(|(_, two)| two == b"\r\n").map(|(at, _)| at + 1);
    let mut splits = vec![Vec::new(), inside.take(200).collect()];
    if bytes.len() <= 400 {
        splits.push((1..bytes.len()).collect());
    }
    splits
}
