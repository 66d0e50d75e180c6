//! What errors of the proxy library come down to.

use std::error::Error as StdError;
use std::io;

use pingora_core::{BError, Error, ErrorType};
use rustix::io::Errno;

/// Whether a connection could not be made because the gateway itself lacks descriptors, ports or memory: no engine is to
/// blame.
pub fn exhausted(error: &Error) -> bool {
    causes(error).filter_map(|cause| cause.downcast_ref()).any(is_ours)
}

/// The same of an error of the system.
pub fn is_ours(error: &io::Error) -> bool {
    const OURS: [i32; 5] = [
        Errno::NFILE.raw_os_error(),
        Errno::MFILE.raw_os_error(),
        Errno::NOBUFS.raw_os_error(),
        Errno::NOMEM.raw_os_error(),
        Errno::ADDRNOTAVAIL.raw_os_error(),
    ];
    error.raw_os_error().is_some_and(|code| OURS.contains(&code))
}

/// What it was, in few words: the proxy library's own text repeats itself at every layer.
pub fn brief(error: &Error) -> String {
    let io = causes(error).filter_map(|cause| cause.downcast_ref::<io::Error>()).last();
    let words = match (&error.etype, io) {
        (ErrorType::TLSHandshakeFailure | ErrorType::InvalidCert | ErrorType::HandshakeError, _) => {
            // a handshake's cause is kept as a part of the text alone
            let text = error.context.as_ref().map(|context| context.as_str()).unwrap_or_default();
            let why = text.rsplit_once("cause: ").map(|(_, why)| why.split(", SNI: ").next().unwrap_or(why));
            return format!("no TLS, {}", why.unwrap_or("the handshake failed"));
        }
        (_, Some(io)) => return brief_io(io),
        (ErrorType::ConnectTimedout | ErrorType::TLSHandshakeTimedout, _) => "timed out",
        (ErrorType::ReadTimedout | ErrorType::WriteTimedout, _) => "timed out",
        (ErrorType::ConnectRefused, _) => "connection refused",
        (ErrorType::ConnectNoRoute, _) => "no route to it",
        (ErrorType::ConnectionClosed, _) => "connection closed",
        (ErrorType::InvalidHTTPHeader, _) => "what it sends is no HTTP",
        (ErrorType::H2Error | ErrorType::InvalidH2 | ErrorType::H2Downgrade, _) => "HTTP/2 error",
        (other, _) => other.as_str(),
    };
    words.to_owned()
}

/// The same of the system's errors.
pub fn brief_io(error: &io::Error) -> String {
    let words = match error.kind() {
        io::ErrorKind::ConnectionRefused => "connection refused",
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => "connection reset",
        io::ErrorKind::UnexpectedEof => "connection closed",
        io::ErrorKind::TimedOut => "timed out",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => "no route to it",
        _ => return error.to_string(),
    };
    words.to_owned()
}

/// What an error came from, down to the first.
fn causes(error: &Error) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    let first = error.cause.as_deref().map(|cause| cause as &(dyn StdError + 'static));
    std::iter::successors(first, |cause| deeper(*cause))
}

fn deeper<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e (dyn StdError + 'static)> {
    let inner = error.downcast_ref::<BError>().and_then(|inner| inner.cause.as_deref());
    let held = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    inner.map(|inner| inner as _).or(held.map(|held| held as _)).or_else(|| error.source())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_was_in_few_words() {
        let io = |kind| io::Error::new(kind, "noise");
        let nested = |kind| {
            let inner = Error::because(ErrorType::ReadError, "while reading", io(kind));
            Error::because(ErrorType::H1Error, "context", inner)
        };
        for (error, words) in [
            (nested(io::ErrorKind::ConnectionReset), "connection reset"),
            (nested(io::ErrorKind::UnexpectedEof), "connection closed"),
            (
                Error::because(ErrorType::ConnectError, "to it", io::Error::from(Errno::CONNREFUSED)),
                "connection refused",
            ),
            (
                Error::explain(ErrorType::ConnectTimedout, "timeout 3s connecting to server 1.2.3.4"),
                "timed out",
            ),
            (
                Error::explain(
                    ErrorType::TLSHandshakeFailure,
                    "TLS connect() failed:  TLSHandshakeFailure context: tls connect error cause: UnknownIssuer, SNI: a",
                ),
                "no TLS, UnknownIssuer",
            ),
            (Error::because(ErrorType::ReadError, "of it", io(io::ErrorKind::InvalidData)), "noise"),
            (Error::new(ErrorType::TLSHandshakeFailure), "no TLS, the handshake failed"),
            (Error::explain(ErrorType::InvalidHTTPHeader, "bad"), "what it sends is no HTTP"),
        ] {
            assert_eq!(brief(&error), words, "{error}");
        }
    }
}
