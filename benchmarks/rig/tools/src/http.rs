//! Incremental HTTP/1.1 body framing (Content-Length, chunked, until close).

/// How a body ends, and how far into it we are.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// So many bytes left.
    Length(u64),
    /// In chunks.
    Chunked(Chunk),
    /// Whatever comes until the connection is closed.
    UntilClose,
}

/// Where in a chunked body.
#[derive(Debug, Clone, PartialEq)]
pub enum Chunk {
    /// Reading the hex size; `ext` once past `;`.
    Size {
        /// As far as it is read.
        len: u64,
        /// Past `;`.
        ext: bool,
    },
    /// Bytes of data left.
    Data(u64),
    /// CRLF after a chunk's data: bytes left.
    DataEnd(u8),
    /// Trailers after the zero chunk: length of the current line.
    Trailer(u32),
    /// All is read.
    Done,
}

impl Body {
    /// A chunked body from its start.
    pub fn chunked() -> Body {
        Body::Chunked(Chunk::Size { len: 0, ext: false })
    }

    /// Whether all of it is read.
    pub fn done(&self) -> bool {
        matches!(self, Body::Length(0) | Body::Chunked(Chunk::Done))
    }

    /// Consumes from `buf`, hands every payload slice to `f`, returns the bytes used.
    ///
    /// # Errors
    /// When the framing is broken.
    pub fn feed(&mut self, buf: &[u8], mut f: impl FnMut(&[u8])) -> Result<usize, &'static str> {
        match self {
            Body::UntilClose => {
                f(buf);
                Ok(buf.len())
            }
            Body::Length(left) => {
                let n = (*left).min(buf.len() as u64) as usize;
                if n > 0 {
                    f(&buf[..n]);
                }
                *left -= n as u64;
                Ok(n)
            }
            Body::Chunked(st) => {
                let mut i = 0;
                while i < buf.len() {
                    match st {
                        Chunk::Size { len, ext } => {
                            let c = buf[i];
                            i += 1;
                            match c {
                                b'\r' => {}
                                b'\n' => *st = if *len == 0 { Chunk::Trailer(0) } else { Chunk::Data(*len) },
                                b';' | b' ' => *ext = true,
                                _ if *ext => {}
                                _ => {
                                    let d = (c as char).to_digit(16).ok_or("bad chunk size")?;
                                    if *len >> 56 != 0 {
                                        return Err("chunk size too large");
                                    }
                                    *len = *len << 4 | d as u64;
                                }
                            }
                        }
                        Chunk::Data(left) => {
                            let n = (*left).min((buf.len() - i) as u64) as usize;
                            f(&buf[i..i + n]);
                            i += n;
                            *left -= n as u64;
                            if *left == 0 {
                                *st = Chunk::DataEnd(2);
                            }
                        }
                        Chunk::DataEnd(left) => {
                            i += 1;
                            *left -= 1;
                            if *left == 0 {
                                *st = Chunk::Size { len: 0, ext: false };
                            }
                        }
                        Chunk::Trailer(n) => {
                            let c = buf[i];
                            i += 1;
                            match c {
                                b'\r' => {}
                                b'\n' if *n == 0 => {
                                    *st = Chunk::Done;
                                    return Ok(i);
                                }
                                b'\n' => *n = 0,
                                _ => *n += 1,
                            }
                        }
                        Chunk::Done => return Ok(i),
                    }
                }
                Ok(i)
            }
        }
    }
}

/// Body framing from parsed headers. `request` tells what no framing header means: an empty body or until close.
pub fn framing(headers: &[httparse::Header], request: bool) -> Result<Body, &'static str> {
    let mut len = None;
    for h in headers {
        if h.name.eq_ignore_ascii_case("transfer-encoding") {
            return Ok(Body::chunked());
        }
        if h.name.eq_ignore_ascii_case("content-length") {
            let s = std::str::from_utf8(h.value).map_err(|_| "content-length")?;
            len = Some(s.trim().parse().map_err(|_| "content-length")?);
        }
    }
    Ok(match len {
        Some(n) => Body::Length(n),
        None if request => Body::Length(0),
        None => Body::UntilClose,
    })
}

/// The value of the first header of this name.
pub fn header<'a>(headers: &[httparse::Header<'a>], name: &str) -> Option<&'a [u8]> {
    headers.iter().find(|h| h.name.eq_ignore_ascii_case(name)).map(|h| h.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunked_body_split_anywhere() {
        let wire = b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nA: b\r\n\r\nNEXT";
        for step in 1..wire.len() {
            let (mut b, mut out, mut used) = (Body::chunked(), Vec::new(), 0);
            while !b.done() {
                let end = (used + step).min(wire.len() - 4);
                used += b.feed(&wire[used..end], |s| out.extend_from_slice(s)).unwrap();
            }
            assert_eq!(out, b"hello world");
            assert_eq!(&wire[used..], b"NEXT");
        }
    }

    #[test]
    fn length_body_leaves_the_rest() {
        let mut b = Body::Length(3);
        assert_eq!(b.feed(b"abcd", |_| ()).unwrap(), 3);
        assert!(b.done());
    }
}
