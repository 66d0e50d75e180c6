//! What balancers send first.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use crate::proxy_protocol::{Origin, read};

/// A PROXY header, and what follows: nothing of that is taken, and what is no header is refused.
pub fn proxy(data: &[u8]) {
    let mut rest = data;
    let origin = {
        let reading = pin!(read(&mut rest));
        // bytes in memory never have to be waited for
        let Poll::Ready(origin) = reading.poll(&mut Context::from_waker(Waker::noop())) else {
            panic!("it waits")
        };
        origin
    };
    let Ok(origin) = origin else { return };
    let taken = data.len() - rest.len();
    assert!((12..=16 + 4096).contains(&taken), "{taken} bytes");
    let header = &data[..taken];
    if let Origin::Proxied { client, server } = origin {
        assert_eq!(client.is_ipv4(), server.is_ipv4());
    }
    // the header by itself is the same one
    let mut alone = header;
    let again = pin!(read(&mut alone)).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(again, Poll::Ready(Ok(same)) if same == origin));
}
